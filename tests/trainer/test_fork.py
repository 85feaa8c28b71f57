"""A fork goes on from a checkpoint of another run: bit for bit with nothing changed, and with what fits where it is."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.cli.main import main
from sensorium.evaluation.comparison import measured_run
from sensorium.learner.saved_state import load_state
from sensorium.recipe.load import load_recipe
from sensorium.report.page import write_report
from sensorium.runs.checkpoint_layout import CheckpointFolder, refuse_damaged
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import train
from sensorium.trainer.run_claim import Fork
from sensorium.vocabulary.errors import CheckpointError, RecipeError
from tests.trainer.small import small
from tests.trainer.test_going_on import Notes


@pytest.fixture(scope="module")
def ancestor(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps; every checkpoint of it is kept."""
    return train(small(tmp_path_factory.mktemp("ancestor") / "run", checkpoint={"every": 1, "keep": 9}))


def forked(ancestor: Path, place: Path, *changes: str, step: int = 2, **named: Any) -> tuple[Path, list[str]]:
    """A fork of the ancestor, and what was noted."""
    notes = Notes()
    recipe = load_recipe(ancestor, ["name=forked", f"run_dir={place}", *changes])
    return train(recipe, fork=Fork(ancestor, step, **named), watchers=[notes]), notes.texts


def moments_of(run: Path, step: int) -> dict[str, Any]:
    state = load_state(run / f"checkpoints/step_{step:06d}/trainer/learner.pt")
    return state["learner"]["optimizer"]["moments"]


def rows_of(run: Path) -> list[dict[str, Any]]:
    return [repeatable(row) for row in read_metrics(run / "metrics.jsonl")]


def test_a_fork_with_nothing_changed_repeats_its_ancestor(ancestor: Path, tmp_path: Path) -> None:
    run, notes = forked(ancestor, tmp_path / "run")
    assert rows_of(run) == rows_of(ancestor)
    ours, theirs = (
        {path.name: path.read_bytes() for path in (place / "checkpoints/step_000003").glob("*.safetensors")}
        for place in (run, ancestor)
    )
    assert ours == theirs
    assert any("the optimizer's moments are kept" in note for note in notes)
    assert not any("ATTENTION" in note for note in notes), notes


def test_a_changed_rate_holds_from_the_fork_on_and_the_ancestor_is_recorded_and_shown(
    ancestor: Path, tmp_path: Path
) -> None:
    before = (ancestor / "metrics.jsonl").read_bytes()
    run, _ = forked(ancestor, tmp_path / "run", "optimizer.lr=0.5", "steps=4")
    rows, was = rows_of(run), rows_of(ancestor)
    assert [row["step"] for row in rows] == [1, 2, 3, 4]
    assert rows[:2] == was[:2], "the curve begins with the ancestor's"
    assert [row["policy/lr"] for row in rows[2:]] == [0.5, 0.5]
    record = json.loads((run / "ancestor.json").read_text())
    assert (record["run"], record["step"]) == (str(ancestor), 2)
    assert record["changed"] == {"optimizer.lr": [0.001, 0.5], "steps": [3, 4]}
    page = write_report(run).read_text()
    assert ">fork</text>" in page
    assert "forked from run after step 2" in page
    assert (ancestor / "metrics.jsonl").read_bytes() == before
    refuse_damaged(ancestor / "checkpoints/step_000002")
    assert all(int(moments["step"]) == 4 for moments in moments_of(run, 4).values() if moments)
    shutil.rmtree(run / "checkpoints/step_000004")
    train(load_recipe(run), resume=True)
    assert rows_of(run) == rows, "a fork that was killed goes on as any run"


def test_a_fork_is_not_compared_by_an_evaluation_of_its_ancestor(tmp_path: Path) -> None:
    source = small(tmp_path / "run").tasks.train[0].model_dump(mode="json", exclude_unset=True)
    tasks = {"train": [source], "evaluate": [source]}
    evaluated = train(small(tmp_path / "run", tasks=tasks, evaluation={"every": 2}, checkpoint={"every": 1, "keep": 9}))
    run, _ = forked(evaluated, tmp_path / "fork", "evaluation.every=0", "steps=3")
    assert [*(run / "eval/outcomes").glob("step_000002_eval.jsonl")], "its page shows it"
    with pytest.raises(CheckpointError, match="after step 2 and not evaluated since"):
        measured_run(run)


def test_an_optimizer_that_does_not_fit_starts_afresh_and_one_may_be_asked_for(ancestor: Path, tmp_path: Path) -> None:
    run, notes = forked(ancestor, tmp_path / "a", "model.freeze=[head]", "optimizer.moments=bfloat16")
    assert any("starts afresh: model.freeze, optimizer.moments changed" in note for note in notes)
    assert {int(moments["step"]) for moments in moments_of(run, 3).values() if moments} == {1}
    run, _ = forked(ancestor, tmp_path / "b", fresh_optimizer=True)
    assert {int(moments["step"]) for moments in moments_of(run, 3).values() if moments} == {1}
    assert {int(moments["step"]) for moments in moments_of(ancestor, 3).values() if moments} == {3}


def test_algorithm_rewards_batch_kl_and_tasks_may_change(ancestor: Path, tmp_path: Path) -> None:
    rows = tmp_path / "others.jsonl"
    rows.write_text(json.dumps({"messages": [{"role": "user", "content": "1 + 2?"}], "answer": "3"}) + "\n")
    changes = ["algorithm.advantage.name=gae", "algorithm.kl.coef=0.1", "batch.group_size=3", "seed=5"]
    changes += [f"tasks.train=[{{source: jsonl, options: {{path: {rows}}}}}]", "rewards.terms=[{name: exact}]", "steps=4"]
    run, notes = forked(ancestor, tmp_path / "run", *changes)
    row = read_metrics(run / "metrics.jsonl")[2]
    assert {"value/loss", "reward/exact", "policy/kl_ref"} <= row.keys()
    assert row["policy/kl_coef"] == 0.1
    assert row["policy/kl_ref"] > 0, "the reference is the model that RL began with"
    assert any("a critic starts afresh" in note for note in notes)
    assert any("tasks are drawn from the beginning: tasks.train changed" in note for note in notes)
    episodes = (run / "episodes/step_000003.jsonl").read_text().splitlines()
    assert len(episodes) == 2 * 3
    assert all("1 + 2?" in line for line in episodes)


def test_a_kl_after_a_warm_start_is_to_the_ancestors_reference_or_to_the_fork(tmp_path: Path) -> None:
    warm = {"steps": 1, "warm_start": {"steps": 1, "prompts_per_step": 2, "optimizer": {"lr": 0.01}}}
    for coef in (0.0, 0.1):
        base = small(tmp_path / f"base{coef}", **warm, algorithm={"kl": {"coef": coef}})
        ancestor = train(base)
        run, notes = forked(ancestor, tmp_path / f"fork{coef}", "algorithm.kl.coef=0.2", "steps=2")
        row = read_metrics(run / "metrics.jsonl")[-1]
        assert row["step"] == 3
        assert row["policy/kl_coef"] == 0.2
        told = any("the KL is to the policy of step 2" in note for note in notes)
        assert told == (coef == 0)
        assert (row["policy/kl_ref"] == pytest.approx(0, abs=1e-9)) == (coef == 0)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.path=tiny:qwen3", "model.path was"),
        ("model.lora.rank=4", "model.lora.rank was"),
        ("model.family=qwen3", "model.family was"),
        ("steps=2", "has made all 2 steps"),
        ("warm_start.steps=1", "warm_start.steps was 0"),
    ],
)
def test_what_a_checkpoint_cannot_become_is_refused_and_nothing_is_left(
    change: str, said: str, ancestor: Path, tmp_path: Path
) -> None:
    with pytest.raises(RecipeError, match=said):
        forked(ancestor, tmp_path / "runs" / "fork", change)
    assert not (tmp_path / "runs").exists()


def test_the_command_forks_and_a_changed_key_on_resume_names_it(
    ancestor: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        train(load_recipe(ancestor, ["optimizer.lr=1e-5", "rewards.retries=1"]), resume=True)
    command = f"sensorium train {ancestor}@3 --as NAME rewards.retries=1 optimizer.lr=1e-5"
    assert command in str(refused.value)
    with pytest.raises(CheckpointError) as refused:
        train(load_recipe(ancestor, ["optimizer.lr=1e-5", "model.lora.rank=4"]), resume=True)
    assert "--as" not in str(refused.value), "a fork would refuse it, too"
    RunDirectory(tmp_path / "runs/near").create().recipe.touch()
    for arguments, said in (
        ([f"{ancestor}@9", "--as", "b"], "no complete checkpoint of step 9; there are: 1, 2, 3"),
        ([f"{ancestor}@2"], "needs a name: --as NAME"),
        ([str(ancestor), "--as", "b"], f"sensorium train {ancestor}@3 (there are 1, 2, 3)"),
        ([f"{tmp_path}/nothing@2", "--as", "b"], "holds no run"),
        (["near@2", "--as", "b"], "There is one in 'runs/near'."),
        ([f"{ancestor}@2", "--as", "b", "model.lora.rank=4", "--dry-run"], "model.lora.rank was 0 and is now 4"),
    ):
        assert main(["train", *arguments]) == 2
        assert said in " ".join(capsys.readouterr().err.split())
    assert main(["train", f"{ancestor}@2", "--as", "b", "optimizer.moments=bfloat16", "--dry-run"]) == 0
    assert "the optimizer starts afresh: optimizer.moments changed" in capsys.readouterr().out
    assert [path.name for path in (tmp_path / "runs").iterdir()] == ["near"]
    assert main(["train", f"{ancestor}@2", "--as", "b", "optimizer.lr=1e-5"]) == 0
    run = tmp_path / "runs" / "b"
    assert load_recipe(run).name == "b"
    assert CheckpointFolder(run / "checkpoints").complete() == [2, 3]
    assert rows_of(run)[2]["policy/lr"] == pytest.approx(1e-5)
    assert torch.load(run / "checkpoints/step_000002/trainer/state.pt", weights_only=True)["step"] == 2
