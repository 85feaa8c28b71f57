"""`epochs` beside `steps`: resolved by the rows of tasks.train, and used wherever a run's end counts."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import sensorium as sn
from sensorium.cli.main import main
from sensorium.data.mixture import TaskStream, resolve_epochs
from sensorium.recipe.load import dump_recipe, load_recipe, parse_recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RecipeError
from tests.trainer.small import small


class Notes(Watcher):
    """Keeps the notes of a run."""

    def __init__(self) -> None:
        self.notes: list[str] = []

    def noted(self, text: str) -> None:
        self.notes.append(text)

    def of_rows(self) -> list[str]:
        return [note for note in self.notes if "rows of tasks.train" in note]


class Endless:
    """A source that does not know how many tasks it has."""

    def __init__(self, *, store: Any) -> None: ...

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("nothing is read")


def by_epochs(folder: Path, epochs: float, *overrides: str, **changes: Any) -> Any:
    """The small run (8 rows, 2 a step) with epochs, and steps only if given."""
    return small(folder, f"epochs={epochs}", *overrides, **({"steps": None} | changes))


@pytest.mark.parametrize(
    ("epochs", "changes", "steps"),
    [
        (1, {}, 4),
        (0.5, {}, 2),
        (1, {"batch": {"prompts_per_step": 3, "group_size": 2}}, 2),  # 8 rows in batches of 3: two rows are left over
        (3, {"batch": {"prompts_per_step": 3, "group_size": 2}}, 8),  # 24 rows: batches run on into the next epoch
        (1, {"steps": 3}, 3),
        (1, {"steps": 100}, 4),
        (1, {"selection": {"oversample": 2.0}}, 2),
    ],
)
def test_epochs_are_steps_by_the_rows(tmp_path: Path, epochs: float, changes: dict[str, Any], steps: int) -> None:
    recipe = resolve_epochs(by_epochs(tmp_path / "run", epochs, **changes))
    assert (recipe.steps, recipe.total_steps, recipe.saves_after(steps)) == (steps, steps, True)
    assert resolve_epochs(recipe) == recipe, "resolving twice changes nothing"


def test_before_its_rows_are_counted_a_recipe_is_written_and_read_as_it_is(tmp_path: Path) -> None:
    recipe = by_epochs(tmp_path / "run", 2)
    assert recipe.counts_rows
    assert "steps: null" in dump_recipe(recipe)
    assert parse_recipe(dump_recipe(recipe), "again") == recipe


def test_what_has_no_end_refuses_epochs(tmp_path: Path) -> None:
    curriculum = by_epochs(tmp_path / "run", 1, "tasks.planner=success_curriculum")
    with pytest.raises(RecipeError, match=r"success_curriculum.*steps"):
        resolve_epochs(curriculum)
    endless = [{"source": "tests.trainer.test_epochs:Endless"}]
    with pytest.raises(RecipeError, match=r"tasks\.train\.0.*steps"):
        resolve_epochs(by_epochs(tmp_path / "run", 1, tasks={"train": endless}))
    with pytest.raises(RecipeError, match=r"8 rows.*prompts_per_step"):
        resolve_epochs(by_epochs(tmp_path / "run", 1, batch={"prompts_per_step": 9, "group_size": 2}))
    with pytest.raises(RecipeError, match=r"steps.*epochs"):
        small(tmp_path / "run", steps=None)


def test_what_depends_on_the_number_of_steps_is_checked_again(tmp_path: Path) -> None:
    optimizer = {"lr": 1e-3}
    critic = {"advantage": {"name": "masked_gae"}, "critic": {"warmup_steps": 4, "optimizer": optimizer}}
    with pytest.raises(RecipeError, match="warmup_steps"):
        resolve_epochs(by_epochs(tmp_path / "run", 1, algorithm=critic))


def test_a_run_ends_with_its_epochs_and_its_schedule_does(tmp_path: Path) -> None:
    notes = Notes()
    falling = {"lr": 1e-3, "schedule": "cosine", "final_lr_share": 0.0}
    saved = {"every": 3, "keep": 9}
    by_steps = train(small(tmp_path / "steps", steps=4, optimizer=falling, checkpoint=saved))
    directory = train(by_epochs(tmp_path / "run", 1, optimizer=falling, checkpoint=saved), watchers=[notes])
    rows, others = (read_metrics(RunDirectory(place).metrics) for place in (directory, by_steps))
    rates = [row["policy/lr"] for row in rows]
    assert len(rates) == 4
    assert rates == [row["policy/lr"] for row in others]
    assert sorted(path.name for path in (directory / "checkpoints").glob("step_*")) == ["step_000003", "step_000004"]
    kept = load_recipe(directory)
    assert (kept.steps, kept.epochs) == (4, 1)
    assert notes.of_rows() == [], "one epoch passes the end of no row"


def test_a_run_says_once_that_it_passes_the_end_of_its_rows(tmp_path: Path) -> None:
    notes, after = Notes(), Notes()
    directory = train(small(tmp_path / "run", steps=9), watchers=[notes])  # 18 draws of 8 rows
    assert len(notes.of_rows()) == 1
    assert "tasks.train.0" in notes.of_rows()[0]
    train(load_recipe(directory, ["steps=14"]), resume=True, watchers=[after])
    assert after.of_rows() == [], "the third and fourth pass, in a resumed run, are no news"


@pytest.mark.parametrize(("change", "steps"), [({"epochs": 2}, 8), ({"steps": 6}, 6)])
def test_a_run_goes_on_to_another_end_in_either_unit(tmp_path: Path, change: dict[str, Any], steps: int) -> None:
    directory = train(by_epochs(tmp_path / "run", 1))
    run = sn.resume(directory, show=False, **change)
    assert run.recipe.steps == steps
    assert len(run.metrics) == steps


def test_turns_count_what_the_stream_draws() -> None:
    sources = [[None] * 3, [None] * 11, [None] * 5]
    stream = TaskStream(sources, [0.5, 0.2, 0.3], seed=1)  # type: ignore[arg-type]
    for position in range(60):
        drawn = [stream.at(nth)[0] for nth in range(position)]
        assert stream.turns(position) == [drawn.count(i) for i in range(3)]


def test_dry_run_and_plan_show_the_resolved_number(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(by_epochs(tmp_path / "run", 1)))
    assert main(["train", str(file), "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "steps: 4" in shown
    assert "4 steps" in shown
    planning = ["plan", str(file), "--gpus", "1", "--kind", "h200", "--shape", "Qwen2.5-VL-3B"]
    planning += ["--prompt-tokens", "64", "--json"]
    assert main(planning) == 0
    hours = json.loads(capsys.readouterr().out)["hours"]
    assert main([*planning, "steps=2"]) == 0
    assert json.loads(capsys.readouterr().out)["hours"] == pytest.approx(hours / 2)
    (tmp_path / "rows.jsonl").unlink()
    assert main(planning) == 0, "a plan needs no data"
    assert json.loads(capsys.readouterr().out)["hours"] is None


def test_counting_rows_needs_no_torch(tmp_path: Path) -> None:
    file = tmp_path / "recipe.yaml"
    file.write_text(dump_recipe(by_epochs(tmp_path / "run", 1)))
    code = (
        "import sys; from sensorium.recipe.load import load_recipe; from sensorium.data.mixture import resolve_epochs; "
        f"assert resolve_epochs(load_recipe({str(file)!r})).steps == 4; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
