"""What all tests share: one thread for each process, a budget of CPU time, property tests without a time limit.

A loaded machine is not a failure, so nothing here measures wall time.
"""

import os
from importlib.util import find_spec

# Before torch is imported, and for the processes that tests start: two workers with a thread each fill two cores, and
# models this small gain nothing from threads. A test that means two says so (``threads: 2``).
os.environ.setdefault("OMP_NUM_THREADS", "1")

import pytest

from .cpu_budget import (  # noqa: F401
    pytest_addoption,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
    pytest_runtest_makereport,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Mend torchvision before a test imports transformers by itself; one that only starts workers collects nothing."""
    import sensorium.models  # noqa: F401


if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("sensorium", deadline=None, max_examples=25)
    settings.load_profile("sensorium")
