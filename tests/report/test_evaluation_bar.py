"""How far an evaluation is shows on a terminal as a bar; a log gets few lines."""

import io

import pytest
from rich.console import Console

from sensorium.report.console import EvaluationBar


@pytest.mark.parametrize(
    ("quiet_s", "lines"),
    [
        (0.0, ["2 of 6 tasks were done before", "3 of 6 tasks", "5 of 6 tasks"]),
        (60.0, ["2 of 6 tasks were done before"]),
    ],
)
def test_a_log_gets_a_line_now_and_then(quiet_s: float, lines: list[str]) -> None:
    console = Console(file=io.StringIO(), force_terminal=False)
    with EvaluationBar(console, quiet_s) as bar:
        for done in (2, 3, 5, 6):
            bar.tell(done, 6)
    assert console.file.getvalue().splitlines() == lines  # type: ignore[attr-defined]


def test_a_terminal_gets_a_bar() -> None:
    console = Console(file=io.StringIO(), force_terminal=True, width=80)
    with EvaluationBar(console, 0.0) as bar:
        bar.tell(0, 6)
        bar.tell(5, 6)
    assert "5/6" in console.file.getvalue()  # type: ignore[attr-defined]
    assert "of 6 tasks" not in console.file.getvalue()  # type: ignore[attr-defined]


def test_a_console_that_takes_nothing_ends_no_evaluation() -> None:
    closed = io.StringIO()
    closed.close()
    few_letters = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    for file in (closed, few_letters):
        with EvaluationBar(Console(file=file, force_terminal=False), 0.0) as bar:
            bar.tell(2, 6)
            bar._print("bär")
