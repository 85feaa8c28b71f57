"""Does a policy that is paid by a judge write better memories, and does it use the ones it wrote before?

    python studies/memory.py [best|first|early_best|early_first …] [seed=1 …] [results=FOLDER] [steps=2 …]

Trains ``recipes/tiny/taskmem.yaml`` against a judge on loopback (``examples/memory_judge.py``), three seeds. The memory
that later clips are told is the best paid of its group, as in the recipe, or the first, as in the published run. The model
before and after watches 200 held-out videos of three clips, clip by clip, with its own memories as history, and then the
later clips again without any; sampled and greedy. Nothing was chosen by these videos: their seed is used here alone.

The start that ships with the package sees colours and was made unsure of them. ``early`` begins with one that was not: the
first half of the warm start, ended after 60 of its 120 steps, when it gets few memories right, also greedily. It is trained
for 120 steps. Other words override the recipe. Writes studies/results/memory/NAME.json.
"""

import asyncio
import json
import shutil
import sys
from collections import Counter
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))

from examples.memory_judge import serving
from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import Session, model_session
from sensorium.data.causal_history import CausalHistory, parse_memory
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream
from sensorium.evaluation.summary import wilson
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.rollout.play import Attempt
from sensorium.runs.episodes import read_groups
from sensorium.runs.run_directory import RunDirectory
from sensorium.systems.taskmem.memory_clips import MemoryClips
from sensorium.systems.taskmem.memory_rows import rewrite_faces
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from sensorium.trainer.task_loader import outcome_of
from sensorium.vocabulary.task import Task
from studies.seeds import add_run, chosen_seeds, circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results" / "memory"
EARLY_START, EARLY_STEPS = 60, 120
CLAIMS = ("best", "first", "early_best", "early_first")
VIDEOS, HELD_OUT_SEED = 200, 7


def right(task: Task, response: str) -> bool:
    """True if a response is a memory that says all that is true of its clip."""
    memory = parse_memory(response)
    return memory is not None and memory.split() == str(task.answer).split()


async def watch(session: Session, recipe: Recipe, temperature: float, videos: int, *, blank: bool) -> Counter[str]:
    """Watch held-out videos clip by clip; how many memories of first and later clips are right, and how many failed."""
    source = MemoryClips(store=session.store, split="test", videos=videos, together=videos, seed=HELD_OUT_SEED)
    planner = CausalHistory(TaskStream([source], [1.0], seed=0, shuffle=False))
    found: Counter[str] = Counter()
    for clip in range(source.clips):
        tasks = planner.draw(videos).tasks
        if blank:
            tasks = tuple(source.with_history(clip * videos + i, {}) for i in range(videos))
        attempt = Attempt(1, clip + 1, f"watch {temperature} {blank}")
        groups = await session.rollout.stream(tasks, 1, attempt, sampling_of(recipe.rollout, temperature)).in_order()
        kind = "first" if clip == 0 else "later"
        for group in groups:
            failed = bool(group.episodes[0].failure)
            found[f"{kind} clips"] += not failed
            found[f"{kind} failed"] += failed
            found[f"{kind} right"] += not failed and right(group.task, group.episodes[0].response)
        planner.observe([outcome_of(group, False) for group in groups])
        session.forget_played()
    return found


def summed(found: Counter[str], kinds: tuple[str, ...]) -> dict[str, Any]:
    """The share of right memories of some clips."""
    clips, correct, failed = (sum(found[f"{kind} {what}"] for kind in kinds) for what in ("clips", "right", "failed"))
    return {
        "accuracy": correct / clips,
        "interval": wilson(correct, clips),
        "tasks": clips,
        "failed": failed,
        "missing": 0,
    }


def measure(recipe: Recipe, model: str, videos: int) -> dict[str, Any]:
    """Shares of right memories of a model: all clips, first ones, later ones, later ones without history."""
    rows: dict[str, Any] = {}
    with model_session(recipe, model) as session:
        for name, temperature in (("sampled", 1.0), ("greedy", 0.0)):
            found = asyncio.run(watch(session, recipe, temperature, videos, blank=False))
            rows[name] = summed(found, ("first", "later"))
            rows[f"{name}, first clips"] = summed(found, ("first",))
            rows[f"{name}, later clips"] = summed(found, ("later",))
            session.forget_played()
            found = asyncio.run(watch(session, recipe, temperature, videos, blank=True))
            rows[f"{name}, later clips, history blanked"] = summed(found, ("later",))
            session.forget_played()
    return rows


def histories_held(run: Path, source: MemoryClips, choice: str) -> int:
    """How many prompts of a run tell exactly what the policy wrote of earlier clips; AssertionError if one does not."""
    written: dict[tuple[str, int], str | None] = {}
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
                (-1e9 if e.reward is None or choice == "first" else e.reward, -i, memory)
                for i, e in enumerate(group.episodes)
                if (memory := parse_memory(e.response)) is not None
            ]
            written[video, clip] = max(paid)[2] if paid else None
    return held


def early_start(run: Path) -> str:
    """A model that has learned to write memories and not yet to see their colours: the warm start, ended early."""
    shutil.rmtree(run, ignore_errors=True)
    recipe = load_recipe("tiny/memory_clips_warm", [f"run_dir={run}", f"warm_start.steps={EARLY_START}", "threads=1"])
    train(recipe)
    return str(Checkpoints(run / "checkpoints", 1).path(EARLY_START))


def study(claim: str, seed: int, results: Path, overrides: list[str], videos: int) -> None:
    """Measure, train, measure again on the same videos with the same random numbers, and add that to the results."""
    name, choice = f"study_memory_{claim}_seed{seed}", claim.removeprefix("early_")
    spent = cpu_minutes()
    changed = [f"name={name}", f"seed={seed}", f"tasks.planner.options.choice={choice}", "threads=1"]
    if claim != choice:
        changed += [f"model.path={early_start(Path('runs') / f'{name}_start')}", f"steps={EARLY_STEPS}"]
    changed += overrides
    rows = load_recipe("tiny/taskmem", changed).tasks.train[0].options
    source = MemoryClips(store=MediaStore(), **rows)
    with serving(source.truths()) as address:
        recipe = load_recipe("tiny/taskmem", [*changed, f"judges.endpoints.truth=[{{base_url: '{address}'}}]"])
        shutil.rmtree(recipe.directory, ignore_errors=True)
        before = measure(recipe, recipe.model.path, videos)
        directory = train(recipe)
        checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
        after = measure(recipe, str(checkpoints.path(checkpoints.complete()[-1])), videos)
    metrics = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    one = {
        "seed": seed,
        **circumstances(),
        "cpu_minutes": round(cpu_minutes() - spent, 1),
        "curve": [round(row["reward/mean"], 4) for row in metrics if "reward/mean" in row],
        "prompts whose history is what the policy wrote": histories_held(directory, source, choice),
        "before": before,
        "after": after,
    }
    facts = {"recipe": "tiny/taskmem", "choice": choice, "command": f"python studies/memory.py {claim}"}
    found = add_run(results / f"{claim}.json", {**facts, "steps": recipe.steps}, one)
    for kind, summary in found["after"].items():
        print(f"{name} {kind:>38} {found['before'][kind]['mean']:.3f} → {summary['mean']:.3f}", flush=True)


def main(words: list[str]) -> None:
    """Run the study for the named claims and seeds, or all."""
    named = dict(word.split("=", 1) for word in words if "=" in word)
    results, videos = Path(named.pop("results", RESULTS)), int(named.pop("videos", VIDEOS))
    overrides = [f"{key}={value}" for key, value in named.items() if key != "seed"]
    for claim in [word for word in words if "=" not in word] or CLAIMS:
        for seed in chosen_seeds(words):
            study(claim, seed, results, overrides, videos)


if __name__ == "__main__":
    main(sys.argv[1:])
