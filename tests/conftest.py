"""What all tests share: one thread for each process, a budget of CPU time, property tests without a time limit.

A loaded machine is not a failure, so nothing here measures wall time; a test that hangs is found by what it does not do.
"""

import gc
import os
import sys
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

# Before torch is imported, and for the processes that tests start: two workers with a thread each fill two cores, and
# models this small gain nothing from threads. A test that means two says so (``threads: 2``).
os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault(
    "OMP_WAIT_POLICY", "PASSIVE"
)  # where a test asks for two threads, they do not spin while others compute
# Before triton is imported, which torch does where it is installed: kernels run in its interpreter where there is no GPU.
if not Path("/dev/nvidiactl").exists():
    os.environ.setdefault("TRITON_INTERPRET", "1")

import pytest

from studies.fork_server import ForkServer

from .cpu_budget import (  # noqa: F401
    pytest_addoption,
    pytest_runtest_logreport,
    pytest_runtest_logstart,
    pytest_runtest_makereport,
    pytest_runtest_protocol,
    pytest_sessionfinish,
    pytest_terminal_summary,
    pytest_testnodedown,
)
from .forked import forked_python
from .standstill import (  # noqa: F401
    pytest_runtest_call,
    pytest_runtest_setup_watched,
    pytest_runtest_teardown,
)


@pytest.fixture(scope="session", name="common")
def _common(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that all workers of a test run share."""
    base = tmp_path_factory.getbasetemp()
    return base.parent if "PYTEST_XDIST_WORKER" in os.environ else base


@pytest.fixture(scope="session", autouse=True)
def _tiny_models(common: Path) -> None:
    """Made once for all workers."""
    from . import tiny_models

    tiny_models.SHELF[:] = [common / "tiny_models"]
    tiny_models.SHELF[0].mkdir(exist_ok=True)


@pytest.fixture(autouse=True)
def _nothing_given_up() -> None:
    """Fast ways to compute that an earlier test of this process gave up are not told of the next one's run."""
    if (fast_paths := sys.modules.get("sensorium.kernels.first_use")) is not None:
        fast_paths._taken.clear()


@pytest.fixture(scope="session")
def fork_server(common: Path) -> Iterator[ForkServer]:
    """One for all workers, which the first test that wants it starts."""
    modules = ("studies.resumed_runs", "torch.distributed.checkpoint", "openai", "uvicorn")
    ours = ("sensorium.cli.main", "sensorium.engines.process_child", "sensorium.assembly.rank_main")
    ours += ("sensorium.services.environment_service", "sensorium.services.sessions")
    with ForkServer(*modules, *ours, shared=common / "forks") as server:
        yield server


@pytest.fixture(name="forked_python")
def _forked_python(fork_server: ForkServer) -> Iterator[None]:
    """Python processes that a test starts are forks with everything imported: six CPU seconds less for each."""
    with forked_python(fork_server):
        yield


def pytest_collectstart(collector: pytest.Collector) -> None:
    """Mend torchvision before a test imports transformers by itself; one that only starts workers collects nothing."""
    import sensorium.models.checkpoint_path

    sensorium.models.checkpoint_path._UNSEEN.set(True)  # stock models of the tests, too, need no configs in log lines
    from . import tiny_models

    tiny_models.keep()


def pytest_runtest_setup() -> None:
    """No test depends on what another computed: a bfloat16 product can make torch leave oneDNN for the whole process."""
    if torch := sys.modules.get("torch"):
        torch.backends.mkldnn.enabled = True


def pytest_collection_finish() -> None:
    """Let the collector of garbage pass over what all tests have imported: walking it took a tenth of a short run.

    A run that finds it so neither freezes nor thaws.
    """
    gc.collect()
    gc.set_threshold(20_000, 20, 20)
    gc.freeze()


if find_spec("hypothesis") is not None:
    from hypothesis import settings

    settings.register_profile("sensorium", deadline=None, max_examples=12)
    settings.load_profile("sensorium")
