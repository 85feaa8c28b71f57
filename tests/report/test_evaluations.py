"""Evaluations as tables: the same words on the terminal and in Markdown, turned where columns do not fit."""

import io

from rich.console import Console

from sensorium.evaluation.summary import summarize_samples
from sensorium.report.tables import markdown, print_grid, summary_grid
from tests.evaluation.made import sample


def summary_of(categories: int, k: int = 1) -> dict[str, object]:
    made = [
        sample(i, j, correct=(i + j) % 2 == 0, category=f"kind {i % categories:02d}", terms={"exact": 1.0})
        for i in range(categories * 2)
        for j in range(k)
    ]
    return summarize_samples(made, "greedy")


def printed(summary: dict[str, object], width: int, *, terminal: bool) -> list[str]:
    console = Console(file=io.StringIO(), width=width, force_terminal=terminal, color_system=None)
    print_grid(summary_grid(summary), console)
    assert console.width == width
    assert isinstance(console.file, io.StringIO)
    return [" ".join(line.split()) for line in console.file.getvalue().splitlines()]


def test_categories_are_columns_where_they_fit() -> None:
    assert "all kind 00 kind 01 kind 02" in printed(summary_of(3), 100, terminal=True)


def test_a_narrow_terminal_has_them_as_rows_and_a_log_is_as_wide_as_needed() -> None:
    narrow = printed(summary_of(8), 70, terminal=True)
    assert any(line.startswith("kind 07 ") for line in narrow)
    assert any(line.startswith("accuracy 95 % interval n reward") for line in narrow)
    assert f"all {' '.join(f'kind {i:02d}' for i in range(8))}" in printed(summary_of(8), 70, terminal=False)


def test_more_than_ten_categories_are_rows_everywhere() -> None:
    page = markdown(summary_grid(summary_of(11)))
    assert "|  | accuracy | 95 % interval | chance | n | reward | reward/exact |" in page
    assert "| kind 10 | " in page
    assert any(line.startswith("kind 10 ") for line in printed(summary_of(11), 200, terminal=False))
    assert "|  | all | kind 00 |" in markdown(summary_grid(summary_of(10)))


def test_several_samples_tell_mean_best_and_majority() -> None:
    page = markdown(summary_grid(summary_of(2, k=3)))
    for name in ("accuracy (mean@3)", "best@3", "majority@3"):
        assert f"| {name} | " in page
    assert page.count("| 95 % interval |") == 3


def test_what_was_not_judged_is_a_dash_and_words_stay_in_their_cells() -> None:
    summary = summarize_samples([sample(0, correct=None, reward=None, category="a|b [red]")], "greedy")
    page = markdown(summary_grid(summary))
    assert "| accuracy | – | – |" in page
    assert "a\\|b [red]" in page
    assert "all a|b [red]" in printed(summary, 80, terminal=False)
    assert "1 without a whole reward" in page
