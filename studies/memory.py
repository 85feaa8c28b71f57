"""Does a policy that is paid by a judge write better memories, and does it use the ones it wrote before?

    python studies/memory.py [FOLDER]         # writes studies/results/memory.json

Trains ``recipes/tiny/taskmem.yaml`` against a judge on loopback (``examples/memory_judge.py``), then has the model before
and after watch 200 held-out videos of three clips, clip by clip, with its own memories as history, and then without any.
Greedy and sampled. 600 clips each, of which 400 need the history.
"""

import asyncio
import json
import sys
import tempfile
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.memory_judge import all_truths, serving
from sensorium.assembly.session import Session, model_session, sampling_of
from sensorium.media.store import MediaStore
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.record.episode_json import read_groups
from sensorium.record.run_directory import RunDirectory
from sensorium.rollout.play import Attempt
from sensorium.tasks.causal import CausalHistory
from sensorium.tasks.face_ids import rewrite_faces
from sensorium.tasks.memory_clips import MemoryClips
from sensorium.tasks.mixture import TaskStream
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from sensorium.trainer.task_loader import outcome_of
from sensorium.vocabulary.memory import parse_memory
from sensorium.vocabulary.task import Task

VIDEOS = 200
RESULT = Path(__file__).parent / "results" / "memory.json"


def right(task: Task, response: str) -> bool:
    """True if a response is a memory that says all that is true of its clip."""
    memory = parse_memory(response)
    return memory is not None and memory.split() == str(task.answer).split()


async def watch(session: Session, recipe: Recipe, temperature: float, *, blank: bool) -> Counter[str]:
    """Watch the held-out videos clip by clip; how many memories of first and later clips are right."""
    source = MemoryClips(store=session.store, split="test", videos=VIDEOS, together=VIDEOS)
    planner = CausalHistory(TaskStream([source], [1.0], seed=0, shuffle=False))
    found: Counter[str] = Counter()
    for clip in range(source.clips):
        tasks = planner.draw(VIDEOS).tasks
        if blank:
            tasks = tuple(source.with_history(clip * VIDEOS + i, {}) for i in range(VIDEOS))
        attempt = Attempt(1, clip + 1, f"watch {temperature} {blank}")
        groups = await session.rollout.stream(tasks, 1, attempt, sampling_of(recipe.rollout, temperature)).in_order()
        for group in groups:
            kind = "first" if clip == 0 else "later"
            found[f"{kind} clips"] += 1
            found[f"{kind} right"] += right(group.task, group.episodes[0].response)
        planner.observe([outcome_of(group, False) for group in groups])
        session.forget_played()
    return found


def measure(recipe: Recipe, model: str) -> dict[str, Any]:
    """Shares of right memories of a model: all clips, first ones, later ones; with its own history and without."""
    row: dict[str, Any] = {}
    with model_session(recipe, model) as session:
        for name, temperature in (("greedy", 0.0), ("sampled", 1.0)):
            for blank in (False, True):
                found = asyncio.run(watch(session, recipe, temperature, blank=blank))
                session.forget_played()
                row[f"{name}{', history blanked' if blank else ''}"] = {
                    "all": (found["first right"] + found["later right"]) / (found["first clips"] + found["later clips"]),
                    "first": found["first right"] / found["first clips"],
                    "later": found["later right"] / found["later clips"],
                    "clips": found["first clips"] + found["later clips"],
                }
    return row


def histories_held(run: Path) -> int:
    """How many prompts of a run tell exactly what the policy wrote of earlier clips; AssertionError if one does not."""
    written: dict[tuple[str, int], str | None] = {}
    source = MemoryClips(store=MediaStore(), videos=192, together=16)
    held = 0
    for path in sorted(RunDirectory(run).episodes.glob("step_*.jsonl")):
        for group in read_groups(path):
            task = group.task
            video, clip = str(task.metadata["video_id"]), int(task.metadata["video_idx"])
            number = int(video.rsplit("-", 1)[1])
            if clip:
                maps = {i: {1: source.truth(number, i).face} for i in range(source.clips)}
                memories = {i: memory for i in range(clip) if (memory := written[video, i]) is not None}
                told = rewrite_faces(memories, maps, clip)
                assert task.metadata["history"] == " ".join(told[i] for i in sorted(told)), (path, task.id)
                held += 1
            paid = [
                (-1e9 if e.reward is None else e.reward, -i, memory)
                for i, e in enumerate(group.episodes)
                if (memory := parse_memory(e.response)) is not None
            ]
            written[video, clip] = max(paid)[2] if paid else None  # the recipe keeps the best paid
    return held


def main() -> None:
    """Train, measure, write the result."""
    folder = Path(sys.argv[1] if len(sys.argv) > 1 else tempfile.mkdtemp(prefix="memory_study_"))
    with serving(all_truths()) as address:
        endpoint = f"judges.endpoints.truth=[{{base_url: '{address}'}}]"
        recipe = load_recipe("tiny/taskmem", [f"run_dir={folder / 'run'}", endpoint, "threads=1"])
        if not (folder / "run" / "recipe.yaml").exists():
            train(recipe)
        checkpoints = Checkpoints(folder / "run" / "checkpoints", recipe.checkpoint.keep)
        last = checkpoints.path(checkpoints.complete()[-1])
        result = {
            "recipe": "tiny/taskmem",
            "steps": recipe.steps,
            "before": measure(recipe, recipe.model.path),
            "after": measure(recipe, str(last)),
            "prompts whose history is what the policy wrote": histories_held(folder / "run"),
        }
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
