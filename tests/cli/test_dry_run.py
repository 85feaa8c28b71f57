"""A dry run opens what a recipe names and refuses what a run would refuse, without a model and without torch."""

import json
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from sensorium.cli.dry_run import look_at
from sensorium.cli.main import main
from sensorium.recipe import plan
from sensorium.recipe.checks import wrong_metric
from sensorium.recipe.load import load_recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run_claim import begin
from sensorium.vocabulary import Episode, Task
from tests.cli.test_main import sensorium


class Fragile:
    """A term that cannot be built."""

    name = "fragile"
    instant = True

    def __init__(self) -> None:
        raise KeyError("API_KEY")


def brief(task: Task, episode: Episode) -> float:
    """A function as a reward."""
    return 1.0 / (1 + episode.sampled_tokens)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(20)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    bare = [{"messages": row["messages"]} for row in rows]
    (tmp_path / "unanswered.jsonl").write_text("".join(json.dumps(row) + "\n" for row in bare))
    text = """
        name: trial
        steps: 6
        model: {path: "tiny:qwen2"}
        tasks:
          train: [{source: jsonl, options: {path: rows.jsonl}}]
          evaluate: [{source: shapes, options: {size: 4}}]
        rewards: {terms: [{name: exact}]}
        evaluation: {every: 2, at_start: true}
        """
    (tmp_path / "trial.yaml").write_text(text)
    return tmp_path / "trial.yaml"


def said(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(["train", *arguments, "--dry-run"])
    out, err = capsys.readouterr()
    return code, " ".join(out.split()), " ".join(err.split())


def test_rows_parameters_evaluations_and_disk_are_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, str(recipe))
    assert code == 0
    read = "tasks.train.0: jsonl, 20 rows; the first 8 were read"
    assert f"{read}; `sensorium validate {recipe}` reads and measures all tasks.evaluate.0" in out
    assert "tasks.evaluate.0: shapes, 4 rows; the first 4 were read; their pictures take" in out
    assert out.count("sensorium validate") == 1, "not of a source that was read to its end"
    assert "evaluations 4" in out
    assert "parameters 353.4 k (language 353.4 k); 353.4 k are trained" in out
    assert "disk about" in out
    assert "checkpoints" in out
    assert not (recipe.parent / "runs").exists()


def test_memory_is_told_with_the_prompts_that_it_is_counted_for(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    _, out, _ = said(capsys, "shapes", "rollout.max_context_tokens=306")
    assert "if prompts of up to 300 tokens are all picture (rollout.max_context_tokens)" in out
    _, out, _ = said(capsys, str(recipe))
    assert "memory at most" in out
    assert "picture (rollout" not in out, "a model without a tower"


def test_a_disk_that_may_not_suffice_is_told(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, out, _ = said(capsys, str(recipe))
    assert "are there for it" in out
    assert "ATTENTION" not in out
    monkeypatch.setattr(plan.shutil, "disk_usage", lambda place: SimpleNamespace(free=5 << 20))
    _, out, _ = said(capsys, str(recipe))
    assert "5.0 MiB are there for it" in out
    assert "ATTENTION: the run may take" in out
    assert "Make room, put it elsewhere (run_dir=…), or keep less" in out


def test_clips_that_were_not_opened_are_not_called_read(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    blocks = [{"type": "audio", "path": "bad.wav"}, {"type": "text", "text": "What?"}]
    row = {"messages": [{"role": "user", "content": blocks}], "answer": "A", "demonstration": "A"}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    place = json.dumps({"source": "jsonl", "options": {"path": str(tmp_path / "rows.jsonl")}})
    heard = ["sight_and_sound", f"tasks.train=[{place}]", f"tasks.evaluate=[{place}]"]
    assert main(["train", *heard, "--dry-run"]) == 0
    out = capsys.readouterr().out
    (line,) = [line for line in out.splitlines() if "tasks.train.0" in line]
    assert "1 sound found and not decoded" in line
    assert "sensorium validate" in line
    assert "vision tower" not in out  # it computes nothing in tasks without pictures
    assert main(["train", "sight_and_sound", "--dry-run"]) == 0
    assert "vision tower" in capsys.readouterr().out


def test_it_loads_no_torch(recipe: Path) -> None:
    done = sensorium("train", str(recipe), "--dry-run", check="assert 'torch' not in sys.modules")
    assert done.returncode == 0, done.stderr


def test_a_bad_row_among_the_first_is_refused_or_counted(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = recipe.parent / "rows.jsonl"
    lines = rows.read_text().splitlines(keepends=True)
    rows.write_text("".join([*lines[:3], '{"messages": 3}\n', *lines[4:]]))
    code, _, err = said(capsys, str(recipe))
    assert code == 2
    assert "rows.jsonl:4" in err
    code, out, _ = said(capsys, str(recipe), "tasks.on_bad_row=skip")
    assert code == 0
    assert "1 of them would be skipped, the first because:" in out


def failing(task: object, episode: object) -> float:
    raise ValueError("boom")


def test_answers_rewards_and_columns_that_cannot_work_are_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    ask = [{"role": "user", "content": "What?"}]
    odd = [{"messages": ask, "answer": answer, "demonstration": "<answer>1</answer>"} for answer in ("1", {"a": 1}, "3")]
    (recipe.parent / "odd.jsonl").write_text("".join(json.dumps(row) + "\n" for row in odd))
    path = "tasks.train.0.options.path=odd.jsonl"
    code, _, err = said(capsys, str(recipe), path)
    assert code == 2
    assert "odd.jsonl:2" in err
    code, out, _ = said(capsys, str(recipe), path, "tasks.on_bad_row=skip")
    assert code == 0
    assert "odd.jsonl:2" in out
    code, out, _ = said(capsys, str(recipe), path, "rewards.terms=[{name: 'tests.cli.test_dry_run:failing'}]")
    assert code == 0
    assert "reward 'failing' fails on its demonstration" in out
    code, _, err = said(capsys, str(recipe), "tasks.train.0.options.columns={prompt: question}")
    assert code == 2
    assert "none of 8 rows" in err


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("tasks.train.0.options.path=nowhere.jsonl", "nowhere.jsonl"),
        ("rewards.terms=[{name: 'tests.cli.test_dry_run:Fragile'}]", "cannot be built with these options: KeyError"),
        ("algorithm.advantage.name=no_such_module:estimate", "cannot load advantage 'no_such_module:estimate'"),
        ("warm_start.steps=3", "none of 8 tasks looked at has a demonstration to learn from"),
        ("tasks.train.0.options.path=unanswered.jsonl", "tasks.train: 8 of 8 tasks looked at have no answer"),
        ("logging.loggers=[tensorbord]", "did you mean 'tensorboard'?"),
        ("checkpoint.best=eval/acuracy", "no evaluation has the metric 'eval/acuracy'; did you mean 'eval/accuracy'?"),
        ("checkpoint.best=reward/exakt", "never has the metric 'reward/exakt'; did you mean 'reward/exact'?"),
        ("model.path=tiny:qwen7", "unknown family 'qwen7'"),
        ("rollout.engine=tests.cli.test_dry_run:Fragile", "has no generate(), so it is no engine"),
        ("rollout.engine={name: native, options: {max_rows: 0}}", "max_rows is 0; it must be 1 at least"),
        ("rollout.engine={name: process, options: {max_context: 4}}", "max_context is 4; it must be 16 at least"),
        ("rollout.engine={name: process, options: {start_s: -1}}", "start_s is -1; it must be 0.001 at least"),
        ("rollout.engine={name: native, options: {kv: none}}", "kv is 'none'; it must be one of auto, rows, pages"),
        ("tasks.planner=no_such_planner", "no_such_planner"),
        ("cluster.rewards=2", "no term of the recipe can be asked in a worker: 'exact' is plain computation"),
    ],
)  # fmt: skip
def test_what_a_run_would_refuse_is_refused(
    change: str, words: str, recipe: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code, _, err = said(capsys, str(recipe), change)
    assert code == 2
    assert words in err


def test_ray_is_missed_before_it_is_needed(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delitem(sys.modules, "ray", raising=False)
    monkeypatch.setattr("sensorium.cluster.ray_host.find_spec", lambda name: None)
    code, _, err = said(capsys, str(recipe), "cluster.learners=2", "cluster.placement=ray")
    assert code == 2
    assert "the package ray is not installed: pip install 'sensorium[ray]'" in err


def test_a_cluster_that_does_not_answer_from_here_is_told(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sensorium.cli.dry_run.refuse_without_ray", lambda: None)
    given = ("cluster.learners=2", "cluster.placement=ray", "rollout.schedule=eager", "cluster.address=127.0.0.1:1")
    code, out, err = said(capsys, str(recipe), *given)
    assert code == 0, err
    assert "cluster.address '127.0.0.1:1' does not answer from here: " in " ".join(out.split())


def test_a_function_may_be_a_reward_and_needs_no_answers(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    terms = "rewards.terms=[{name: 'tests.cli.test_dry_run:brief'}]"
    code, out, err = said(capsys, str(recipe), terms, "tasks.train.0.options.path=unanswered.jsonl")
    assert code == 0, err
    assert "have no answer" not in out


def test_held_out_rows_without_an_answer_are_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, str(recipe), "tasks.evaluate=[{source: jsonl, options: {path: unanswered.jsonl}}]")
    assert code == 0
    assert "tasks.evaluate: 8 of 8 tasks looked at have no answer" in out


@pytest.mark.parametrize(
    ("changes", "metric", "fine"),
    [
        ([], "eval/accuracy", True),
        ([], "", True),
        ([], "reward/mean", True),
        ([], "eval/accuracy/place", True),
        ([], "eval/reward/exact", True),
        ([], "eval/mean@4", False),
        (["evaluation.samples=4"], "eval/mean@4", True),
        (["evaluation.every=0"], "eval/reward", False),
        ([], "value/loss", False),
        (["algorithm.advantage.name=gae"], "value/loss", True),
        (["rewards.terms.0.options={name: right}"], "reward/right", True),
        (["rewards.terms=[{name: 'tests.trainer.small:ByParity'}]"], "reward/anything", True),
        ([], "eval_accuracy", False),
    ],
)
def test_the_metric_of_the_best_checkpoint_is_one_that_this_recipe_has(
    changes: list[str], metric: str, fine: bool, recipe: Path
) -> None:
    assert (not wrong_metric(load_recipe(recipe, changes), metric)) == fine


def test_every_metric_of_the_page_is_known_to_some_recipe(recipe: Path) -> None:
    """docs/reference/metrics.md is held to what runs write; so is, through it, what ``checkpoint.best`` may name."""
    page = (Path(__file__).parents[2] / "docs/reference/metrics.md").read_text()
    names = {name for line in page.splitlines() if line.startswith("| `") for name in line.split("|")[1].split("`")[1::2]}
    plain = {name for name in names if "/" in name and not set(name) & set("<>{}*…ABCDEFGHIJKLMNOPQRSTUVWXYZ@")}
    assert len(plain) > 30
    rich = load_recipe(recipe, ["algorithm.advantage.name=gae"])
    assert [name for name in sorted(plain) if wrong_metric(rich, name)] == []


def test_what_is_likely_a_mistake_is_told(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    code, out, _ = said(capsys, str(recipe), "optimizer.lr=10")
    assert code == 0
    assert "optimizer.lr 10 is larger than most weights are" in " ".join(out.split())


def test_a_run_that_would_not_go_on_is_refused(recipe: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    run = RunDirectory(tmp_path / "run")
    begin(load_recipe(recipe, [f"run_dir={run.path}"]), run)
    code, _, err = said(capsys, str(run.path), "--resume", "optimizer.moments=8-bit")
    assert code == 2
    assert "optimizer.moments was 'float32' and is now '8-bit'" in err
    assert said(capsys, str(run.path), "--resume", "threads=1")[0] == 0


def test_a_run_that_would_not_go_on_is_refused_before_torch_is_imported(recipe: Path, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    begin(load_recipe(recipe, [f"run_dir={run.path}"]), run)
    done = sensorium("train", str(run.path), "--resume", "seed=5", check="assert 'torch' not in sys.modules")
    assert done.returncode == 2, done.stderr
    assert "seed was 0 and is now 5" in done.stderr
    code = "import sys, sensorium as sn\ntry: sn.resume(sys.argv[1], seed=5)\nexcept sn.SensoriumError as e: print(e)\n"
    code += "assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, str(run.path)], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "seed was 0 and is now 5" in done.stdout


def test_a_worker_that_hangs_longer_than_a_deadline_is_told() -> None:
    late = ["cluster.environments=2", "cluster.hang_s=40"]
    assert any("cluster.hang_s is 40" in line for line in look_at(load_recipe("frozen_lake", late)))
    crowded = ["cluster.learners=4096", "model.device=cpu"]
    assert any("processes (4,096 learner ranks) share" in line for line in look_at(load_recipe("frozen_lake", crowded)))


def test_a_recipe_whose_planner_tells_histories_can_be_looked_at(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["train", "tiny/taskmem", "--dry-run"]) == 0
    assert "memory_clips, 576 rows; the first 8 were read" in capsys.readouterr().out


def test_a_judge_without_an_endpoint_is_named(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    judge = "rewards.terms=[{name: judge, options: {model: grader, prompt: good}}]"
    assert main(["train", str(recipe), "--dry-run", judge]) == 0
    assert "would be refused: judges: there is no endpoint for the model 'grader'" in " ".join(
        capsys.readouterr().out.split()
    )
    known = "judges.endpoints={grader: [{base_url: 'http://127.0.0.1:9/v1'}]}"
    assert main(["train", str(recipe), "--dry-run", judge, known]) == 0
    assert "would be refused" not in " ".join(capsys.readouterr().out.split())


def test_a_run_directory_that_is_taken_is_told(
    recipe: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(recipe.parent)
    _, out, _ = said(capsys, str(recipe))
    assert "would be refused" not in out
    begin(load_recipe(recipe), run := RunDirectory(load_recipe(recipe).directory))
    run.metrics.write_text('{"step": 1}\n')
    code, out, _ = said(capsys, str(recipe))
    assert code == 0
    assert (
        "A run by this recipe would be refused: run directory 'runs/trial' exists. It has no checkpoint to go on from"
        in out
    )
    _, out, _ = said(capsys, str(recipe), "--restart")
    assert "would be refused" not in out
