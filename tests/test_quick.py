"""Which test files ``make quick`` leaves out."""

import pytest

from .quick import TESTS, is_slow


@pytest.mark.parametrize(
    ("name", "slow"),
    [
        ("algorithms/test_kl.py", False),
        ("test_quick.py", False),
        ("test_install.py", True),  # starts processes
        ("cli/test_cluster.py", True),
        ("engines/test_sampler.py", True),
    ],
)
def test_files_are_slow_by_what_they_import(name: str, slow: bool) -> None:
    assert is_slow(TESTS / name) == slow
