"""A run directory as a trainer would leave it, made up: real tasks and pictures, invented answers that get better."""

from concurrent.futures import ThreadPoolExecutor
from math import exp
from pathlib import Path
from random import Random

from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import ANSWERS, Shapes
from sensorium.runs.durable import write_whole
from sensorium.runs.episodes import write_episodes
from sensorium.runs.metrics import MetricsFile
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn

RECIPE = """\
name: shapes
seed: 7
steps: {steps}
model:
  path: package:shapes
batch:
  prompts_per_step: 32
  group_size: 8
"""


def attempt(task: Task, group: str, index: int, right: bool, random: Random, *, tidy: bool = True) -> Episode:
    """One answer, right or wrong, in the right form or not."""
    others = [word for word in ANSWERS[task.metadata["category"]] if word != task.answer]
    word = task.answer if right else random.choice(others)
    text = f"<answer>{word}</answer>" if tidy else f"answer: {word}"
    segment = Segment(
        "model", (5, 6, 7), text=text, logprobs=(-0.1,) * 3, sampled_logprobs=(-0.1,) * 3, name=f"{group}/{index}"
    )
    prompt = Segment("environment", (1, 2, 3), text=task.messages[0].text)
    scores = (Score("exact", float(right and tidy), correct=right and tidy), Score("format", float(tidy), weight=0.1))
    return Episode(
        f"{group}/{index}",
        task.id,
        group,
        index,
        (Thread((prompt, segment), (False, True)),),
        (Turn(0, task.messages, segment, 0, 1),),
        Status.FINISHED,
        scores=scores,
    )


def summary(name: str, accuracy: float, tasks: int = 512) -> dict:
    half = 1.96 * (accuracy * (1 - accuracy) / tasks) ** 0.5
    parts = dict(zip(ANSWERS, (0.04, -0.03, 0.01, -0.02), strict=True))
    return {
        "name": name,
        "tasks": tasks,
        "episodes": tasks,
        "accuracy": accuracy,
        "interval": [max(0.0, accuracy - half), min(1.0, accuracy + half)],
        "categories": {kind: {"accuracy": min(1.0, accuracy + d), "tasks": tasks // 4} for kind, d in parts.items()},
    }


def skill(step: int, steps: int) -> float:
    """How often the made-up model is right."""
    return 0.55 + 0.41 * (1 - exp(-4 * step / steps)) / (1 - exp(-4))


def make_run(folder: Path, steps: int = 120, warm: int = 0) -> RunDirectory:
    """Write the run: metrics, evaluations with their episodes, the first and last step's groups, and media.

    With ``warm`` so many supervised steps come before those of RL.
    """
    random = Random(0)
    run = RunDirectory(folder).create()
    write_whole(run.recipe, RECIPE.format(steps=steps) + (f"warm_start: {{steps: {warm}}}\n" if warm else ""))
    store = MediaStore(run.media)
    held_out = Shapes(store=store, split="test", size=64)
    metrics = MetricsFile(run.metrics)
    for step in range(1, warm + 1):
        metrics.append(step, {"policy/loss": 3 * exp(-step / warm), "policy/grad_norm": 1.0, "time/step_s": 0.8})
    if warm:
        run.write_summary(0, summary("sampled", 0.02))
    for place in range(steps + 1):
        rate, step = skill(place, steps), place + warm
        if place % (steps // 6) == 0:
            run.write_summary(step, summary("sampled", rate))
            if place in (0, steps):
                for name, accuracy in (("greedy", min(0.99, rate + 0.05)), ("blank", 0.25), ("swapped", 0.26)):
                    run.write_summary(step, summary(name, accuracy))
                groups = []
                for i in range(64):
                    episode = attempt(held_out[i], f"eval/{i}", 0, random.random() < rate, random)
                    groups.append(Group(f"eval/{i}", held_out[i], (episode,)))
                write_episodes(run.eval_episodes_of(step, "sampled"), step, groups)
        if place:
            noisy = min(1.0, max(0.0, random.gauss(rate, 0.035)))
            metrics.append(
                step,
                {
                    "reward/mean": noisy + 0.1 * min(1.0, 0.93 + place / steps / 10),
                    "reward/exact": noisy,
                    "reward/format": min(1.0, 0.93 + place / steps / 10),
                    "accuracy": noisy,
                    "policy/entropy": 0.9 * (1.1 - rate) + random.gauss(0, 0.01),
                    "policy/grad_norm": 0.4 + abs(random.gauss(0, 0.1)),
                    "policy/clip_fraction": abs(random.gauss(0, 0.004)),
                    "mismatch/kl": abs(random.gauss(0, 1e-9)),
                    "groups/zero_variance": 8 + 20 * rate,
                    "episodes/length_mean": 4.0,
                    "throughput/episodes_per_s": random.gauss(180, 8),
                    "time/step_s": 1.42,
                },
            )
        if place in (1, steps):
            train = Shapes(store=store, split="train", size=4096)
            groups = []
            for i in range(8):
                task = train[place * 8 + i]
                members = tuple(
                    attempt(task, f"g{i}", k, random.random() < rate, random, tidy=k != 3 or place > 1) for k in range(8)
                )
                groups.append(Group(f"g{i}", task, members))
            write_episodes(run.episodes_of(step), step, groups)
    return run


def walk(store: MediaStore, seed: int, group: str, index: int, careless: float) -> tuple[Task, Episode]:
    """A walk over a frozen lake that mostly knows the way."""
    from sensorium.envs.frozen_lake import ACTIONS, FrozenLake
    from sensorium.vocabulary.task import EnvironmentSpec

    random, environment = Random(seed * 100 + index), FrozenLake(store)
    _, seen = environment.reset(seed)
    segments: list[Segment] = []
    turns: list[Turn] = []
    success = False
    while seen is not None:
        text = f"<answer>{random.choice(ACTIONS)}</answer>" if random.random() < careless else environment.demonstrate()
        said = Segment("model", (5, 6), text=text, logprobs=(-0.1,) * 2, name=f"{group}/{index}/{len(turns)}")
        segments += [Segment("environment", (len(turns),)), said]
        result = environment.step(text)
        turns.append(Turn(len(turns), seen.messages, said, 0, len(segments) - 1, result.reward, result.info))
        seen, success = result.observation, bool(result.success)
    environment.close()
    home = tuple(segment.author == "model" for segment in segments)
    task = Task(f"frozen_lake-{seed}", environment=EnvironmentSpec("frozen_lake", {}, seed))
    scores = (Score("environment", float(success), correct=success),)
    return task, Episode(
        f"{group}/{index}",
        task.id,
        group,
        index,
        (Thread(tuple(segments), home),),
        tuple(turns),
        Status.FINISHED,
        scores=scores,
    )


def make_walks(folder: Path) -> RunDirectory:
    """A run of several turns an episode: two evaluations and two groups."""
    run = RunDirectory(folder).create()
    write_whole(run.recipe, RECIPE.format(steps=40).replace("shapes", "frozen_lake"))
    store = MediaStore(run.media)
    for step, careless in ((0, 0.6), (40, 0.05)):
        run.write_summary(step, summary("eval", 0.2 if step == 0 else 0.9, 64))
        walks = [walk(store, seed, f"e{seed}", 0, careless) for seed in range(8)]
        write_episodes(run.eval_episodes_of(step), step, [Group(e.group_id, task, (e,)) for task, e in walks])
        members = [walk(store, 50, "g", index, 0.4) for index in range(4)]
        write_episodes(
            run.episodes_of(max(1, step)), max(1, step), [Group("g", members[0][0], tuple(e for _, e in members))]
        )
    return run


def make_rescoring(run: RunDirectory) -> Path:
    """The run of ``make_run`` scored again, which rewards the form more than being right, and brevity."""
    from sensorium.trainer.rescoring import RescoringOrder, rescore, rescoring_folder, rescoring_recipe

    terms = "{name: exact}, {name: format, weight: 0.1}"
    run.recipe.write_text(
        f"{run.recipe.read_text()}tasks: {{train: [{{source: shapes}}]}}\nrewards: {{terms: [{terms}]}}\n"
    )
    file = run.path.parent / "brief.yaml"
    brief = "{name: token_length, weight: 0.5, options: {full_until: 2, none_from: 6}}"
    file.write_text(f"rewards: {{terms: [{{name: exact, weight: 0.1}}, {{name: format, weight: 3}}, {brief}]}}\n")
    folder = rescoring_folder(run.path, "by_brief", RescoringOrder())
    with ThreadPoolExecutor(1) as thread:  # a test of a browser has an event loop in its own
        thread.submit(rescore, run.path, rescoring_recipe(run.path, file), folder).result()
    return folder
