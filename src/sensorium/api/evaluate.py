"""Evaluating from Python: ``sn.evaluate(run)["accuracy"]``."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from sensorium.api.outside import outside_loop
from sensorium.api.recipes import recipe_of
from sensorium.api.run import Run
from sensorium.api.table import Table
from sensorium.evaluation.places import default_folder, evaluated_model
from sensorium.record.durable import read_rows
from sensorium.report.evaluation_bar import EvaluationBar
from sensorium.report.evaluations import markdown, summary_grid
from sensorium.report.terminal import Terminal
from sensorium.vocabulary.errors import RecipeError


class Evaluation(Mapping[str, Any]):
    """What an evaluation found, by name (``accuracy``, ``interval``, ``reward``, ``terms``, ``categories``, …)."""

    def __init__(self, summary: Mapping[str, Any], folder: Path) -> None:
        self.summary, self.folder = dict(summary), folder

    @property
    def accuracy(self) -> float | None:
        """The share of right answers; None where no term knows right from wrong."""
        return self.summary["accuracy"]

    @property
    def samples(self) -> Table:
        """One row a sample: what was asked, what was answered, and what it was paid."""
        return Table(list(read_rows(self.folder / "samples.jsonl")))

    def __getitem__(self, key: str) -> Any:
        return self.summary[key]

    def __iter__(self) -> Iterator[str]:
        return iter(self.summary)

    def __len__(self) -> int:
        return len(self.summary)

    def __repr__(self) -> str:
        return markdown(summary_grid(self.summary))


def evaluate(
    recipe: Any,
    model: str | Path | Run | None = None,
    *,
    greedy: bool = True,
    samples: int = 1,
    limit: int = 0,
    out: str | Path | None = None,
    fresh: bool = False,
    show: bool = True,
    **changes: Any,
) -> Evaluation:
    """Evaluate on a recipe's or run's held-out tasks: ``model``, else the run's best checkpoint, else the recipe's model.

    Greedy unless told otherwise (then at ``evaluation.temperature``). An evaluation that was interrupted goes on when it is
    asked for again; ``fresh`` forgets it. ``show``: tell on the console how far it is.
    """
    from sensorium.evaluation.held_out import Progress, evaluate_into

    run = recipe if isinstance(recipe, Run) else Run(recipe) if _is_run(recipe) else None
    section: dict[str, Any] = {"samples": samples, "limit": limit} | ({"temperature": 0.0} if greedy else {})
    checked = recipe_of(run or recipe, {**changes, "evaluation": {**section, **changes.get("evaluation", {})}})
    if not checked.tasks.evaluate:
        raise RecipeError("tasks.evaluate names no source, so there is nothing to evaluate on.")
    wanted = model.directory if isinstance(model, Run) else model
    path = evaluated_model(None if wanted is None else str(wanted), checked, None if run is None else run.directory)
    folder = Path(out) if out is not None else default_folder(checked, path)

    def play(progress: Progress | None) -> dict[str, Any]:
        return outside_loop(lambda: evaluate_into(folder, checked, path, fresh=fresh, progress=progress))

    if not show:
        return Evaluation(play(None), folder)
    from sensorium.cli.show import say

    console = Terminal()
    with suppress(OSError, ValueError):  # as in ``EvaluationBar``
        say(f"evaluating {path} into {folder}", console)
    with EvaluationBar(console) as bar:
        return Evaluation(play(bar.tell), folder)


def _is_run(recipe: Any) -> bool:
    return isinstance(recipe, str | Path) and (Path(recipe) / "recipe.yaml").is_file()
