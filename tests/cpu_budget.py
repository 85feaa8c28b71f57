"""CPU seconds of every test, printed at the end, and a budget for them that fails the test command when it is broken.

CPU time and not wall time: a test that waits is not at fault, nor is a busy machine. A slow machine gets more, and so does
one whose cores are shared with others: while tests run, a short computation is timed now and then against the machine on
which the budget was set.
"""

import os
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

REFERENCE_S = 0.045
"""CPU seconds of ``a_short_computation`` where the budgets in pyproject.toml were set."""
EVERY_S = 15.0
SAMPLES: list[float] = []
"""What it took in the processes that run tests, every so many seconds."""
IN_FORKS = [0.0]
"""CPU seconds of processes that are not children of this one: a fork server's."""
TESTS: Counter[str] = Counter()
WORKERS: list[float] = []


def count(cpu_s: float) -> None:
    """Count CPU seconds that a test has spent in a process which is not its child."""
    IN_FORKS[0] += cpu_s


def spent() -> float:
    """CPU seconds of this process and the children that have ended."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system + IN_FORKS[0]


def spent_by_all() -> float:
    """CPU seconds of the whole test run. Workers that have ended are children too, and count once: as they told."""
    times = os.times()
    return times.user + times.system + sum(WORKERS) if WORKERS else spent()


def a_short_computation() -> float:
    """CPU seconds that a fixed piece of work takes now."""
    start, total = time.process_time(), 0
    for number in range(300_000):
        total += number % 7
    return time.process_time() - start


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--cpu-shown", type=int, default=15, help="how many files and tests are listed with their CPU seconds")
    parser.addini("cpu_budget_s", "CPU seconds for the whole test run, all workers together", default="0")
    parser.addini("cpu_budget_of_a_test_s", "CPU seconds for one test", default="0")
    parser.addini("standstill_s", "seconds without work after which a test hangs (tests/standstill.py)", default="0")


_last = [0.0]


_sampled = [-EVERY_S]


def pytest_runtest_protocol() -> None:
    """Time the short computation, in the process that is about to run a test and outside of its count."""
    if time.monotonic() - _sampled[0] >= EVERY_S:
        SAMPLES.append(a_short_computation())
        _sampled[0] = time.monotonic()


def pytest_runtest_logstart() -> None:
    _last[0] = spent()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport() -> Iterator[None]:
    report: Any = yield
    now = spent()
    report.user_properties.append(("cpu_s", now - _last[0]))
    _last[0] = now
    return report


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    TESTS[report.nodeid] += sum(value for name, value in report.user_properties if name == "cpu_s")


@pytest.hookimpl(optionalhook=True)
def pytest_testnodedown(node: Any) -> None:
    told = getattr(node, "workeroutput", {})
    WORKERS.append(told.get("cpu_s", 0.0))
    SAMPLES.extend(told.get("samples", []))


def pytest_sessionfinish(session: pytest.Session) -> None:
    config = session.config
    if hasattr(config, "workerinput"):
        config.workeroutput |= {"cpu_s": spent(), "samples": SAMPLES}  # type: ignore[attr-defined]
    elif broken := broken_budgets(config):
        config.stash[BROKEN] = broken
        session.exitstatus = session.exitstatus or pytest.ExitCode.TESTS_FAILED


BROKEN = pytest.StashKey[list[str]]()


def slowness() -> float:
    """How much longer this machine took than the one on which the budgets were set; 1 for a faster one."""
    return max(1.0, sum(SAMPLES) / len(SAMPLES) / REFERENCE_S) if SAMPLES else 1.0


def broken_budgets(config: pytest.Config) -> list[str]:
    """A sentence for each budget that was broken."""
    whole, one = float(config.getini("cpu_budget_s")), float(config.getini("cpu_budget_of_a_test_s"))
    total = spent_by_all()
    slowest = TESTS.most_common(1)
    if not (whole and total > whole) and not (one and slowest and slowest[0][1] > one):
        return []
    slower = slowness()
    found = [f"{name} took {cpu_s:.0f} s, and a test may take {one * slower:.0f} s" for name, cpu_s in TESTS.items()
             if one and cpu_s > one * slower]  # fmt: skip
    if whole and total > whole * slower:
        found.append(f"all tests took {total:.0f} s, and may take {whole * slower:.0f} s")
    return found


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    files: Counter[str] = Counter()
    for name, cpu_s in TESTS.items():
        files[name.partition("::")[0]] += cpu_s
    for title, table in (("files", files), ("tests", TESTS)):
        terminalreporter.section(f"CPU seconds of the costliest {title}")
        for name, cpu_s in table.most_common(config.getoption("--cpu-shown")):
            terminalreporter.write_line(f"{cpu_s:8.1f}  {name}")
    terminalreporter.write_line(f"{spent_by_all():8.1f}  all, collection and workers included")
    terminalreporter.write_line(f"{slowness():8.2f}  times the seconds that the same would take where the budget was set")
    for sentence in config.stash.get(BROKEN, []):
        terminalreporter.write_line(f"CPU BUDGET BROKEN: {sentence}. Make it cheaper, or move it to studies/.")
