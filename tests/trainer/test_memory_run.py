"""A judged run with memories: the history is what the policy wrote; killed anywhere, or offline, it repeats bit for bit."""

import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from examples.memory_judge import judged, serving
from sensorium.data.causal_history import parse_memory
from sensorium.data.media_store import MediaStore
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.rewards.judges.judgements import AnswerCache
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import repeatable
from sensorium.systems.taskmem.layout import write_layout
from sensorium.systems.taskmem.memory_clips import ClipTruth, MemoryClips
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import JudgeOffline
from studies.memory import histories_held
from tests.rewards.judges.server import judge_server

STEPS, VIDEOS = 3, 4


ROOT = Path(__file__).parents[2]
SMALL = (
    "batch.prompts_per_step=4", "batch.group_size=3", "checkpoint.every=1", "threads=1", "optimizer.warmup_steps=0",
    "tasks.train=[{source: memory_clips, options: {videos: 4, together: 4}}]", "tasks.planner.options.choice=first",
    f"steps={STEPS}",
)  # fmt: skip


SOURCE = MemoryClips(store=MediaStore(), videos=VIDEOS, together=VIDEOS)


def recipe_of(run: Path, *more: str) -> Recipe:
    return load_recipe("tiny/taskmem", [f"run_dir={run}", *SMALL, *more])


def at(address: str) -> str:
    return f"judges.endpoints={{truth: [{{base_url: '{address}'}}]}}"


def computed(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What a run computed: its metrics without times and costs of judges, and its episodes."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    kept = [repeatable(row) | {key: row[key] for key in row if key.startswith("retries/")} for row in rows]
    return kept, [path.read_text() for path in sorted((run / "episodes").glob("*.jsonl"))]


def layout_of(folder: Path) -> dict[str, str]:
    """TaskMem's files in a folder by name, and the steps of its links."""
    files = [path for pattern in ("[0-9]*/*.json", "history/*.json") for path in folder.glob(pattern)]
    links = {path.name: path.resolve().name for path in folder.glob("global_step_*") if path.is_symlink()}
    return {str(path.relative_to(folder)): path.read_text() for path in files} | links


@pytest.fixture(scope="module")
def truths() -> dict[str, ClipTruth]:
    return SOURCE.truths()


@pytest.fixture(scope="module")
def whole(truths: dict[str, ClipTruth], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that nothing interrupted."""
    run = tmp_path_factory.mktemp("whole") / "run"
    with serving(truths) as address:
        train(recipe_of(run, at(address)))
    return run


def test_a_judged_run_with_memories(whole: Path, tmp_path: Path) -> None:
    groups = [group for path in sorted((whole / "episodes").glob("*.jsonl")) for group in read_groups(path)]
    assert len(groups) == VIDEOS * STEPS
    kept = {g.task.metadata["video_id"]: [parse_memory(e.response) for e in g.episodes] for g in groups[:VIDEOS]}
    first = {video: next(memory for memory in memories if memory) for video, memories in kept.items() if any(memories)}
    assert len(first) >= 3
    for group in groups[VIDEOS : 2 * VIDEOS]:
        memory = first.get(group.task.metadata["video_id"], "")
        assert group.task.metadata["history"].partition(">")[2] == memory.partition(">")[2]
    assert histories_held(whole, SOURCE, "first") == VIDEOS * 2
    judged_by = [score for g in groups for e in g.episodes for score in e.scores if score.name == "episodic_memory/judged"]
    assert {score.value for score in judged_by} == {0.0, 1.0}
    report = (whole / "report.html").read_text()
    assert "episodic_memory/1/correctness</b> by truth" in report

    written = layout_of(whole)
    assert sum(name.startswith("history/") for name in written) == VIDEOS
    log = json.loads(written[f"3/{groups[-1].task.metadata['video_id']}.json"])
    assert (log["global_step"], log["num_items"], len(log["items"])) == (3, 3, 3)
    assert (whole / "global_step_3" / "model.safetensors").exists()
    assert not (whole / "global_step_3").readlink().is_absolute(), "a run that is moved keeps its links"
    write_layout(whole, tmp_path / "layout")
    assert layout_of(tmp_path / "layout") == written

    offline = ("judges.offline=true", f"judges.cache={whole / 'judges.sqlite'}")
    train(recipe_of(tmp_path / "again", "steps=2", *offline))
    train(recipe_of(tmp_path / "again", *offline), resume=True)
    for again, once in zip(computed(tmp_path / "again"), computed(whole), strict=True):
        assert again == once
    with pytest.raises(JudgeOffline):
        train(recipe_of(tmp_path / "other", "seed=5", *offline))


def killed(run: Path, address: str, moment: Callable[[], bool], *more: str) -> None:
    """Train in a process of its own, and kill it as soon as ``moment`` comes."""
    command = [sys.executable, "-m", "sensorium.cli.main", "train", "tiny/taskmem", f"run_dir={run}", *SMALL, at(address)]
    surroundings = os.environ | {"PYTHONPATH": os.pathsep.join([str(ROOT / "src"), str(ROOT)])}
    process = subprocess.Popen([*command, *more], env=surroundings, stdout=subprocess.DEVNULL)
    while process.poll() is None and not moment():
        time.sleep(0.01)
    process.kill()
    assert process.wait() == -signal.SIGKILL, "it was killed before it ended"


@pytest.mark.usefixtures("forked_python")
def test_a_run_that_is_killed_while_it_is_judged_and_while_it_saves_changes_nothing(
    whole: Path, truths: dict[str, ClipTruth], tmp_path: Path
) -> None:
    run, arrived, go_on = tmp_path / "run", threading.Event(), threading.Event()

    def judge(request: dict[str, Any]) -> str:
        if len(server.asked) > 20:  # in the middle of the second step's questions
            arrived.set()
            go_on.wait(600)
        return judged(request, truths)

    with judge_server(judge) as server:
        killed(run, server.url, lambda: arrived.wait(0.1))
        assert [path.name for path in (run / "checkpoints").glob("step_*")] == ["step_000001"]
        go_on.set()
        killed(run, server.url, lambda: any((run / "checkpoints").glob("*step_000002*")), "--resume")
        ahead = [run / "3" / "gone.json", run / "history" / "gone.json", run / "global_step_3"]
        for path in ahead[:2]:  # as of steps past the checkpoint
            path.parent.mkdir(exist_ok=True)
            path.write_text("{}")
        ahead[2].symlink_to("checkpoints/step_000009")
        train(recipe_of(run, at(server.url)), resume=True)
        assert computed(run) == computed(whole)
        assert layout_of(run) == layout_of(whole)
        state = [(place / "checkpoints/step_000003/model.safetensors").read_bytes() for place in (run, whole)]
        assert state[0] == state[1]
    cache, before = AnswerCache(run / "judges.sqlite"), AnswerCache(whole / "judges.sqlite")
    assert Counter(row.key for row in cache.calls() if row.outcome == "answered") == Counter(cache.keys())
    assert cache.keys() == before.keys(), "it asked what the other run asked, and nothing else"
    for one in (cache, before):
        one.close()
