"""A judged run with memories: the history is what the policy wrote, and a resumed offline run repeats it bit for bit."""

import json
from pathlib import Path
from typing import Any

import pytest

from examples.memory_judge import serving
from sensorium.media.store import MediaStore
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.record.episode_json import read_groups
from sensorium.tasks.memory_clips import MemoryClips
from sensorium.trainer.run import train
from sensorium.trainer.taskmem_layout import write_layout
from sensorium.vocabulary.errors import JudgeOffline
from sensorium.vocabulary.memory import parse_memory

STEPS = 4


def recipe_of(run: Path, *more: str) -> Recipe:
    small = (
        "batch.prompts_per_step=4", "batch.group_size=3", "checkpoint.every=1", "threads=1", "optimizer.warmup_steps=0",
        "tasks.train=[{source: memory_clips, options: {videos: 8}}]", "tasks.planner.options.choice=first",
    )  # fmt: skip
    return load_recipe("tiny/taskmem", [f"run_dir={run}", f"steps={STEPS}", *small, *more])


def at(address: str) -> str:
    return f"judges.endpoints={{truth: [{{base_url: '{address}'}}]}}"


def computed(run: Path) -> tuple[list[dict[str, Any]], list[str]]:
    """What a run computed: its metrics without times and costs of judges, and its episodes."""
    rows = [json.loads(line) for line in (run / "metrics.jsonl").open()]
    unlike = ("time/", "judge/", "memory/", "media/", "throughput/")
    kept = [{key: value for key, value in row.items() if not key.startswith(unlike)} for row in rows]
    return kept, [path.read_text() for path in sorted((run / "episodes").glob("*.jsonl"))]


def test_a_judged_run_with_memories(tmp_path: Path) -> None:
    source = MemoryClips(store=MediaStore(), videos=8)
    with serving(source.truths()) as address:
        train(recipe_of(tmp_path / "run", at(address)))
    groups = [group for path in sorted((tmp_path / "run/episodes").glob("*.jsonl")) for group in read_groups(path)]
    assert len(groups) == 4 * STEPS
    kept = {g.task.metadata["video_id"]: [parse_memory(e.response) for e in g.episodes] for g in groups[:8]}
    first = {video: next(memory for memory in memories if memory) for video, memories in kept.items() if any(memories)}
    assert len(first) >= 6
    for group in groups[8:]:
        memory = first.get(group.task.metadata["video_id"], "")
        assert group.task.metadata["history"].partition(">")[2] == memory.partition(">")[2]
    judged = [score for g in groups for e in g.episodes for score in e.scores if score.name == "episodic_memory/judged"]
    assert {score.value for score in judged} <= {0.0, 1.0}
    assert judged
    report = (tmp_path / "run/report.html").read_text()
    assert "episodic_memory/1/correctness</b> by truth" in report

    write_layout(tmp_path / "run", tmp_path / "layout")
    assert len(list((tmp_path / "layout" / "history").glob("*.json"))) == 8
    log = json.loads((tmp_path / "layout" / "4" / f"{groups[-1].task.metadata['video_id']}.json").read_text())
    assert log["global_step"] == 4
    assert len(log["items"]) == 3
    assert (tmp_path / "layout" / "global_step_4" / "model.safetensors").exists()

    offline = ("judges.offline=true", f"judges.cache={tmp_path / 'run/judges.sqlite'}")
    train(recipe_of(tmp_path / "again", "steps=3", *offline))
    train(recipe_of(tmp_path / "again", *offline), resume=True)
    for again, once in zip(computed(tmp_path / "again"), computed(tmp_path / "run"), strict=True):
        assert again == once
    with pytest.raises(JudgeOffline):
        train(recipe_of(tmp_path / "other", "seed=5", *offline))
