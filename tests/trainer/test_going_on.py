"""A run goes on where its directory is, from its last good checkpoint, longer if asked to; nothing goes on by mistake."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sensorium.cli.main import main
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.report.watcher import RunStart, Watcher
from sensorium.runs.checkpoint_layout import checkpoint_of_run, contents_of, is_complete, refuse_damaged
from sensorium.runs.metrics import Notice, read_metrics, write_notice
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from sensorium.trainer.task_loader import media_files
from sensorium.vocabulary.errors import CheckpointError, RecipeError, RecordError
from tests.trainer.run_contents import assert_equal, everything, flip
from tests.trainer.small import small

ROOT = Path(__file__).parents[2]


class Notes(Watcher):
    """Remembers what was noted."""

    def __init__(self) -> None:
        self.texts: list[str] = []

    def noted(self, text: str) -> None:
        self.texts.append(text)


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of three steps; tests work on copies of it."""
    folder = tmp_path_factory.mktemp("finished")
    train(small(folder / "run"))
    return folder


@pytest.fixture
def run(finished: Path, tmp_path: Path) -> Path:
    shutil.copytree(finished / "run", tmp_path / "run")
    return tmp_path / "run"


def test_a_finished_run_that_is_resumed_does_not_repeat_its_findings(run: Path) -> None:
    class Findings(Notes):
        """Remembers what was found, too."""

        def diagnosed(self, notice: Notice) -> None:
            self.texts.append(notice.rule)

    write_notice(run / "health.jsonl", Notice(0, "constant_term", "began", "the term has given 0.5", False))
    seen = Findings()
    train(load_recipe(run), resume=True, watchers=[seen])
    assert any("the run is finished, with all its 3 steps" in text for text in seen.texts)
    assert "constant_term" not in seen.texts
    train(load_recipe(run, ["steps=4"]), resume=True, watchers=[seen])
    assert "constant_term" in seen.texts, "one that goes on is reminded of what lasts"


@pytest.mark.parametrize("by", ["directory", "recipe"])
def test_a_copied_run_goes_on_in_the_copy_and_the_original_is_not_touched(by: str, finished: Path, run: Path) -> None:
    before = everything(finished / "run")
    recipe = load_recipe(run if by == "directory" else run / "recipe.yaml", ["steps=4"])
    assert train(recipe, resume=True) == run
    assert everything(finished / "run") == before
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4]


def test_an_extended_run_is_the_one_that_was_longer_from_the_start(run: Path, tmp_path: Path) -> None:
    notes = Notes()
    train(load_recipe(run, ["steps=4"]), resume=True, watchers=[notes])
    train(small(tmp_path / "long" / "run", steps=4))
    assert_equal(run, tmp_path / "long" / "run", 4)
    assert load_recipe(run).steps == 4
    assert load_recipe(run / "recipe_until_step_000003.yaml").steps == 3, "what it was until then is kept"
    assert "the run now ends at 4 steps of RL instead of 3." in notes.texts
    assert not any("schedule" in text for text in notes.texts)


def test_a_schedule_that_depends_on_the_last_step_is_said_loudly(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = train(small(tmp_path / "run", steps=1, optimizer={"lr": 1e-3, "schedule": "cosine"}))
    train(load_recipe(run, ["steps=2"]), resume=True)
    assert "ATTENTION: optimizer.schedule is cosine" in capsys.readouterr().err


@pytest.mark.parametrize("change", ["optimizer.lr=0.5", "seed=1", "batch.group_size=4", "evaluation.temperature=0.5"])
def test_what_would_change_the_run_is_refused_by_its_key(change: str, run: Path) -> None:
    before, key = everything(run), change.partition("=")[0]
    with pytest.raises(CheckpointError, match=rf"{key} was .* and is now .* may change: steps, ") as refused:
        train(load_recipe(run, ["steps=4", change]), resume=True)
    assert f"leave {key} unchanged" in str(refused.value), "it was resumed by its directory: only the change must go"
    assert f"{run} name=… {key}=…" in str(refused.value)
    assert everything(run) == before
    again = load_recipe(run, ["name=other", change])
    assert again.directory != run, "the advised new run has a directory of its own"


def test_another_engine_may_go_on_and_is_told(run: Path, tmp_path: Path) -> None:
    """It gives the same run here, where no more rows than before are batched together."""
    notes = Notes()
    train(
        load_recipe(run, ["steps=4", "rollout.engine={name: native, options: {max_rows: 400}}"]),
        resume=True,
        watchers=[notes],
    )
    assert any(
        "ATTENTION: steps so far were sampled by rollout.engine native, the next ones by native (max_rows: 400)" in text
        for text in notes.texts
    )
    train(small(tmp_path / "long" / "run", steps=4))
    assert_equal(run, tmp_path / "long" / "run", 4)
    train(load_recipe(run, ["rollout.schedule=eager", "steps=5"]), resume=True, watchers=[notes])
    assert any("rollout.schedule was lockstep and is now eager" in text for text in notes.texts)


def test_a_picture_that_was_replaced_by_another_is_told_when_the_run_goes_on(tmp_path: Path) -> None:
    for name, colour in (("a", "red"), ("b", "blue")):
        Image.new("RGB", (56, 56), colour).save(tmp_path / f"{name}.png")
    rows = [
        {
            "messages": [
                {"role": "user", "content": [{"type": "image", "image": f"{name}.png"}, {"type": "text", "text": "?"}]}
            ]
        }
        for name in "ab"
    ]
    data = tmp_path / "pictures.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    run = train(
        small(
            tmp_path / "run",
            steps=1,
            model={"path": "tiny:qwen2_5_vl", "device": "cpu"},
            tasks={"train": [{"source": "jsonl", "options": {"path": str(data)}}]},
        )
    )
    same, other = Notes(), Notes()
    train(load_recipe(run, []), resume=True, watchers=[same])
    assert not any("ATTENTION" in text for text in same.texts)
    Image.new("RGB", (56, 56), "green").save(tmp_path / "b.png")
    train(load_recipe(run, ["steps=2"]), resume=True, watchers=[other])
    assert any("of 2 tasks that were looked at when the run began, 1 have changed" in text for text in other.texts)


def test_one_replaced_file_among_many_is_reported_if_the_run_had_read_it(tmp_path: Path) -> None:
    rows = []
    for n in range(40):
        Image.new("RGB", (56, 56), (6 * n, 0, 0)).save(tmp_path / f"{n}.bmp")  # all of the same size
        blocks = [{"type": "image", "image": f"{n}.bmp"}, {"type": "text", "text": "?"}]
        rows.append({"messages": [{"role": "user", "content": blocks}]})
    data = tmp_path / "pictures.jsonl"
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    model, source = {"path": "tiny:qwen2_5_vl", "device": "cpu"}, {"source": "jsonl", "options": {"path": str(data)}}
    run = train(small(tmp_path / "run", steps=1, model=model, tasks={"train": [source]}))

    def noted() -> str:
        notes = Notes()
        train(load_recipe(run, []), resume=True, watchers=[notes])
        (compared,) = [text for text in notes.texts if "the run began with" in text]
        return compared

    looked_at = {i * 39 // 7 for i in range(8)}
    read = {Path(path) for path in media_files(RunDirectory(run))}
    (trained_on, *_) = sorted(read - {tmp_path / f"{n}.bmp" for n in looked_at})
    (unread, *_) = sorted({tmp_path / f"{n}.bmp" for n in range(40)} - read)
    for path in read:
        os.utime(path, (1, 1))
    assert "ATTENTION" not in noted(), "a touch is no change"
    assert f"8 of 40 tasks, 1 file of rows, {len(read)} of the {len(read)} media files" in noted()
    first = trained_on.read_bytes()
    for path, reported in ((unread, False), (trained_on, True)):
        Image.new("RGB", (56, 56), "green").save(tmp_path / "new.bmp")
        (tmp_path / "new.bmp").rename(path)
        assert ("ATTENTION" in noted()) is reported
        assert (str(path) in noted()) is reported
    assert "ATTENTION" in noted(), "it is still not what the run began with"
    trained_on.write_bytes(first)
    assert "ATTENTION" not in noted()
    trained_on.unlink()
    assert f"{len(read) - 1} of the {len(read)} media files" in noted()
    (run / "media_files.jsonl").write_text("{}\n")
    with pytest.raises(RecordError, match="media_files"):
        noted()


def test_rows_that_were_rewritten_are_reported_once_when_the_run_goes_on(tmp_path: Path) -> None:
    from datasets import Dataset

    data, held_out = tmp_path / "rows.jsonl", tmp_path / "held_out.parquet"
    rows = [{"messages": [{"role": "user", "content": f"{n}?"}], "answer": str(n)} for n in range(40)]
    data.write_text("".join(json.dumps(row) + "\n" for row in rows))
    questions = [{"prompt": f"{n}?", "answer": str(n)} for n in range(40)]
    Dataset.from_list(questions).to_parquet(held_out)
    columns = {"prompt": "prompt", "answer": "answer"}
    tasks = {
        "train": [{"source": "jsonl", "options": {"path": str(data)}}],
        "evaluate": [{"source": "parquet", "options": {"path": str(held_out), "columns": columns}}],
    }
    run = train(small(tmp_path / "run", steps=1, tasks=tasks, evaluation={"limit": 1, "every": 9}))

    def attentions() -> list[str]:
        notes = Notes()
        train(load_recipe(run, []), resume=True, watchers=[notes])
        return [text for text in notes.texts if "ATTENTION" in text]

    for path in (data, held_out):
        os.utime(path, (1, 1))
    assert attentions() == [], "a touch is no change"
    first = data.read_text()
    data.write_text(first.replace('"1?"', '"one"'))
    (told,) = attentions()
    assert str(data) in told
    assert str(held_out) not in told
    assert "looked at" not in told, "row 1 is none of the sampled rows"
    data.write_text(first)
    Dataset.from_list([*questions[:30], *questions[:10]]).to_parquet(held_out)
    (told,) = attentions()
    assert str(held_out) in told
    assert str(data) not in told
    record = run / "tasks.json"
    record.write_text(json.dumps(json.loads(record.read_text())["tasks"]))
    assert attentions() == [], "an earlier version kept no digests of files"


def test_what_cannot_change_the_run_may_differ(run: Path) -> None:
    free = ["steps=3", "checkpoint.every=2", "checkpoint.keep=9", "logging.episodes=1", "media.threads=1", "threads=2"]
    free += ["tasks.on_bad_row=skip", "tasks.on_long_prompt=skip"]
    notes = Notes()
    with pytest.warns(UserWarning, match="threads"):
        train(load_recipe(run, free), resume=True, watchers=[notes])
    assert any("the run is finished, with all its 3 steps" in text for text in notes.texts)


def test_fewer_steps_than_were_made_are_refused(run: Path) -> None:
    with pytest.raises(CheckpointError, match=r"has made 3 steps of RL, so it cannot end at steps=2"):
        train(load_recipe(run, ["steps=2"]), resume=True)


def test_a_moved_run_with_adapters_and_a_reference_repeats_the_unmoved_one(tmp_path: Path) -> None:
    """Its parent is renamed, it is called from elsewhere, and where it was stands nothing any more."""
    settings: dict[str, Any] = {
        "warm_start": {"steps": 1, "prompts_per_step": 2, "optimizer": {"lr": 1e-3}},
        "algorithm": {"kl": {"coef": 0.01}},
        "tasks": {"train": [{"source": "shapes", "options": {"size": 8, "picture_size": 56}}]},
        "model": {"path": "tiny:qwen2_5_vl", "device": "cpu", "lora": {"rank": 2}},
    }
    whole = train(small(tmp_path / "whole", steps=3, **settings))
    begun = train(small(tmp_path / "before" / "run", steps=2, **settings))
    (tmp_path / "before").rename(tmp_path / "after")
    moved = tmp_path / "after" / "run"
    assert train(load_recipe(moved, ["steps=3"]), resume=True) == moved
    assert not begun.exists()
    assert_equal(whole, moved, 4)


def test_what_an_evaluation_left_in_the_engine_does_not_reach_the_next_step(tmp_path: Path) -> None:
    """A resumed run has no evaluation behind it: the step after one must not differ by what the engine still knows."""
    pictures = {"source": "shapes", "options": {"size": 2, "picture_size": 56}}
    run = train(
        small(
            tmp_path / "run",
            tasks={"train": [pictures], "evaluate": [pictures]},
            evaluation={"every": 1},
            model={"path": "tiny:qwen2_5_vl", "device": "cpu"},
        )
    )
    shutil.copytree(run, tmp_path / "copy")
    shutil.rmtree(tmp_path / "copy" / "checkpoints" / "step_000003")
    train(load_recipe(tmp_path / "copy"), resume=True)
    assert_equal(run, tmp_path / "copy", 3)


def test_rows_that_were_lost_are_said(run: Path) -> None:
    rows = (run / "metrics.jsonl").read_text().splitlines(keepends=True)
    (run / "metrics.jsonl").write_text("".join([rows[0], rows[2]]))
    notes = Notes()
    train(load_recipe(run), resume=True, watchers=[notes])
    assert any("lacks the rows of 1 step, the first of step 2" in text for text in notes.texts)


def test_a_damaged_checkpoint_is_set_aside_and_the_run_repeats_from_the_one_before(
    finished: Path, run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flip(run / "checkpoints" / "step_000003" / "model.safetensors")
    notes = Notes()
    train(load_recipe(run), resume=True, watchers=[notes])
    told = "\n".join(notes.texts)
    assert "ATTENTION: the checkpoint of step 3 is damaged (model.safetensors has other bytes" in told
    assert "goes on from the last good checkpoint, of step 2" in told
    assert "the checkpoint of step 3 is damaged" in capsys.readouterr().err
    assert (run / "checkpoints" / "damaged_step_000003" / "model.safetensors").is_file()
    assert_equal(finished / "run", run, 3)


@pytest.mark.parametrize("marker", ["", '{"files": {"config.json": {"size": 1}}}'])
def test_a_damaged_marker_is_a_damaged_checkpoint(marker: str, run: Path) -> None:
    (run / "checkpoints" / "step_000003" / "COMPLETE").write_text(marker)
    notes = Notes()
    train(load_recipe(run), resume=True, watchers=[notes])
    assert any("its COMPLETE is damaged" in text for text in notes.texts)


def test_a_file_that_the_run_did_not_write_is_refused_where_it_would_be_read_and_else_told(run: Path) -> None:
    checkpoint = checkpoint_of_run(run, last=True)
    (checkpoint / "notes.md").write_text("the best so far")
    notes = Notes()
    train(load_recipe(run), resume=True, watchers=[notes])
    assert any("1 file that the run did not write, the first 'notes.md'" in text for text in notes.texts)
    for name in ("trainer/shards/shard-1 (copy).safetensors", "added_tokens.json", "model-00001-of-00002.safetensors"):
        stray = checkpoint / name
        assert not stray.exists()
        stray.parent.mkdir(exist_ok=True)
        stray.write_bytes(b"")
        with pytest.raises(CheckpointError, match="which its run did not write") as refused:
            train(load_recipe(run), resume=True)
        assert name in str(refused.value)
        with pytest.raises(CheckpointError, match="which its run did not write"):
            refuse_damaged(checkpoint)
        stray.unlink()
    assert is_complete(checkpoint), "nothing was set aside"


def test_without_a_good_checkpoint_resume_stops_and_restart_starts_over(finished: Path, run: Path) -> None:
    with pytest.raises(CheckpointError, match="complete checkpoint of step 3, which starting over would throw away"):
        train(load_recipe(run), restart=True)
    with pytest.raises(RecipeError, match=r"exists. Go on with it from step 3 \(--resume"):
        train(load_recipe(run))
    for step in (2, 3):
        flip(run / "checkpoints" / f"step_{step:06d}" / "trainer" / "state.pt")
    rows = (run / "metrics.jsonl").read_bytes()
    with pytest.raises(RecordError, match=r"step 3 is damaged .* step 2 is damaged .* no complete checkpoint.* --restart"):
        train(load_recipe(run), resume=True)
    with pytest.raises(RecipeError, match=r"exists. It has no checkpoint to go on from: start over in it \(--restart\)"):
        train(load_recipe(run))
    assert (run / "metrics.jsonl").read_bytes() == rows, "nothing is forgotten before it is asked for"
    train(load_recipe(run), restart=True)
    assert_equal(finished / "run", run, 3)
    assert len(list((run / "checkpoints").glob("damaged_*"))) == 2


def test_an_older_checkpoint_without_digests_is_gone_on_with_and_that_is_said(run: Path) -> None:
    for marker in (run / "checkpoints").glob("*/COMPLETE"):
        data = json.loads(marker.read_text())
        data["files"] = {name: entry["size"] for name, entry in data["files"].items()}
        marker.write_text(json.dumps(data))
    notes = Notes()
    train(load_recipe(run, ["steps=4"]), resume=True, watchers=[notes])
    assert any("has no digests" in text for text in notes.texts)


def test_a_damaged_best_json_is_written_again_by_the_checkpoint(tmp_path: Path) -> None:
    run = train(small(tmp_path / "run", steps=2, checkpoint={"every": 1, "keep": 2, "best": "reward/mean"}))
    best = Checkpoints(run / "checkpoints", 2).best()
    (run / "checkpoints" / "best.json").write_text("{")
    with pytest.raises(RecordError, match=r"best\.json' is damaged.*--last or --step"):
        Checkpoints(run / "checkpoints", 2).best()
    train(load_recipe(run), resume=True)
    assert Checkpoints(run / "checkpoints", 2).best() == best


def test_a_damaged_ledger_row_or_summary_is_one_paragraph_before_anything_is_spent(run: Path) -> None:
    (run / "eval" / "step_000002_eval.json").write_text('{"step": 2}')
    with pytest.raises(RecordError, match=r"step_000002_eval\.json' is damaged"):
        train(load_recipe(run), resume=True)
    (run / "eval" / "step_000002_eval.json").unlink()
    rows = (run / "metrics.jsonl").read_text()
    (run / "metrics.jsonl").write_text(rows.replace('{"step":2', '{"step"2', 1))
    with pytest.raises(RecordError, match=r"metrics\.jsonl, line 2"):
        train(load_recipe(run), resume=True)
    (run / "metrics.jsonl").write_text(rows)
    (run / "ledger.sqlite").write_bytes(b"not a database" * 1000)
    with pytest.raises(RecordError, match=r"ledger\.sqlite' cannot be used.*move it away"):
        train(load_recipe(run), resume=True)
    (run / "ledger.sqlite").unlink()
    train(load_recipe(run, ["steps=4"]), resume=True)


WAIT = """
import sys, time
from sensorium.recipe.load import load_recipe
from sensorium.report.watcher import Watcher
from sensorium.trainer.run import train

class Wait(Watcher):
    def stepped(self, step, metrics):
        print("step", step, flush=True)
        time.sleep(600)

train(load_recipe(sys.argv[1], ["steps=5"]), resume=True, watchers=[Wait()])
"""


@pytest.mark.usefixtures("forked_python")
def test_a_live_run_cannot_be_resumed_and_a_killed_one_can(run: Path) -> None:
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}:{ROOT}"}
    child = subprocess.Popen([sys.executable, "-c", WAIT, str(run)], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert child.stdout is not None
        assert child.stdout.readline() == "step 4\n"
        before = everything(run)
        with pytest.raises(RecordError, match=f"in use by process {child.pid} on"):
            train(load_recipe(run, ["steps=5"]), resume=True)
        with pytest.raises(RecordError, match=f"in use by process {child.pid} on"):
            train(small(run))
        assert everything(run) == before
    finally:
        child.send_signal(signal.SIGKILL)
        child.wait()
    train(load_recipe(run, ["steps=5"]), resume=True)
    assert [row["step"] for row in read_metrics(run / "metrics.jsonl")] == [1, 2, 3, 4, 5]


def test_a_run_whose_directory_is_moved_stops_and_writes_nothing_in_its_old_place(tmp_path: Path) -> None:
    class Moves(Watcher):
        def stepped(self, step: int, metrics: Any) -> None:
            (tmp_path / "run").rename(tmp_path / "moved")

    with pytest.raises(RecordError, match=r"moved or removed.*--resume"):
        train(small(tmp_path / "run", "checkpoint.every=2"), watchers=[Moves()])
    assert not (tmp_path / "run").exists()
    assert (tmp_path / "moved" / "metrics.jsonl").exists()


def test_a_run_stays_where_it_is_when_somebody_changes_the_working_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Wanders(Watcher):
        def stepped(self, step: int, metrics: Any) -> None:
            os.chdir(tmp_path / "elsewhere")

    (tmp_path / "elsewhere").mkdir()
    recipe = small(tmp_path / "run").model_copy(update={"run_dir": Path("run")})
    monkeypatch.chdir(tmp_path)
    train(recipe, watchers=[Wanders()])
    assert not list((tmp_path / "elsewhere").iterdir())
    assert len(read_metrics(tmp_path / "run" / "metrics.jsonl")) == 3


def test_files_that_were_removed_are_said_and_notes_of_the_start_are_not_repeated(run: Path) -> None:
    (run / "metrics.jsonl").unlink()
    (run / "ledger.sqlite").unlink()
    (run / "episodes" / "step_000003.jsonl").unlink()
    notes = Notes()
    train(load_recipe(run), resume=True, watchers=[notes])
    told = "\n".join(notes.texts)
    for name in ("metrics.jsonl' lacks the rows of 3 steps", "ledger.sqlite' is missing", "step_000003.jsonl' is missing"):
        assert name in told
    start = Notes()
    train(load_recipe(run, [f"run_dir={run}_b", "optimizer.warmup_steps=9", "steps=1"]), watchers=[start])
    assert any("warmup_steps" in text for text in start.texts)
    again = Notes()
    train(load_recipe(Path(f"{run}_b")), resume=True, watchers=[again])
    assert not any("warmup_steps" in text for text in again.texts)


def test_what_somebody_is_shown_is_not_printed_a_second_time(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (run / "metrics.jsonl").unlink()
    train(load_recipe(run), resume=True, watchers=[ConsoleWatcher()])
    said = capsys.readouterr()
    assert (said.out + said.err).count("lacks the rows of 3 steps") == 1


def test_a_second_run_in_the_same_process_is_told_what_it_shares(tmp_path: Path) -> None:
    inner = Notes()

    class StartsAnother(Watcher):
        def started(self, run: RunStart) -> None:
            other = threading.Thread(target=lambda: train(small(tmp_path / "b" / "run", steps=1), watchers=[inner]))
            other.start()
            other.join()

    outer = Notes()
    train(small(tmp_path / "a" / "run", steps=1), watchers=[StartsAnother(), outer])
    assert any("goes on in this process too" in text for text in inner.texts)
    assert not any("goes on in this process too" in text for text in outer.texts)


@pytest.mark.parametrize(("file", "state"), [("state.pt", {"step": 3}), ("learner.pt", [1])])
def test_a_state_of_another_form_is_refused_by_its_checkpoint(file: str, state: Any, run: Path) -> None:
    """As another version may have written it: the digests hold, the keys do not."""
    folder = run / "checkpoints" / "step_000003"
    torch.save(state, folder / "trainer" / file)
    marker = json.loads((folder / "COMPLETE").read_text())
    now = contents_of(folder)
    marker["files"] = {name: {"size": now[name].size, "digest": now[name].digest} for name in marker["files"]}
    (folder / "COMPLETE").write_text(json.dumps(marker))
    with pytest.raises(CheckpointError, match=r"this version"):
        train(load_recipe(run, ["steps=4"]), resume=True)


def test_modules_beside_the_recipe_are_found_again_from_another_folder(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    mine, elsewhere, run = tmp_path / "mine", tmp_path / "elsewhere", tmp_path / "run"
    for folder in (mine, elsewhere):
        folder.mkdir()
    (mine / "beside_the_run.py").write_text("from tests.trainer.small import ByParity as Own\n")
    own = small(run, steps=1).model_dump(mode="json") | {"rewards": {"terms": [{"name": "beside_the_run:Own"}]}}
    (mine / "own.yaml").write_text(json.dumps(own))

    def command(*arguments: str) -> int:
        """A command as a process of its own would run it: what an earlier one found and imported is forgotten."""
        monkeypatch.setattr(sys, "path", [path for path in sys.path if not path.startswith(str(tmp_path))])
        monkeypatch.delitem(sys.modules, "beside_the_run", raising=False)
        return main(["train", *arguments])

    monkeypatch.chdir(elsewhere)
    assert command(str(mine / "own.yaml")) == 0
    assert command(str(run), "--resume", "steps=2") == 0
    assert json.loads((run / "modules.json").read_text()) == {"beside_the_run": str(mine)}
    mine.rename(tmp_path / "moved")
    capsys.readouterr()
    assert command(str(run), "--resume", "steps=3") == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "No module named 'beside_the_run'" in told
    assert f"'{elsewhere}'" in told, "the working directory was searched"
    assert f"'{mine}'" in told, "and where the run found it first"
    monkeypatch.chdir(tmp_path / "moved")
    assert command(str(run), "--resume", "steps=3") == 0
    assert json.loads((run / "modules.json").read_text()) == {"beside_the_run": str(tmp_path / "moved")}
