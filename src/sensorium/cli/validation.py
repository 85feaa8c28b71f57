"""What ``sensorium validate`` checks: rows, splits, media, prompt lengths, environments, tools and rewards; no model.

Tasks are played twice: as they are demonstrated, and at random. What is wrong is a finding, and the checks go on.
"""

import hashlib
from collections.abc import Coroutine, Generator, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from sensorium.assembly.session import EnvironmentMaker
from sensorium.cli.random_play import RandomPlay, try_tools
from sensorium.cli.without_model import ModelFreeSession
from sensorium.models.tiny_processors import PUBLISHED_PIXELS
from sensorium.models.wrong_path import may_be_hub_id
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import RolloutSection
from sensorium.recipe.task_sections import SourceSection
from sensorium.rewards.judge_parts import NO_CLIENT
from sensorium.rollout.modalities import media_of
from sensorium.rollout.threads import Renderer
from sensorium.tasks.causal import CausalSource, gaps, untold
from sensorium.tasks.mixture import Treatment, make_sources, permuted
from sensorium.tasks.source import TaskSource
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Episode, Group, Segment, Status
from sensorium.vocabulary.errors import MediaError, SensoriumError, TaskError
from sensorium.vocabulary.plain import attempt, words
from sensorium.vocabulary.score import by_name
from sensorium.vocabulary.task import Task
from sensorium.workers.event_loop import run_async

Level = Literal["ok", "warning", "error"]
DEMONSTRATED = "demonstrated play"
MEDIA_AT_ONCE = 16
MOST_NAMED = 100
"""Problems of one check that are named; the others are counted."""


@dataclass(frozen=True)
class Finding:
    """What a check found, and where."""

    where: str
    check: str
    found: str
    level: Level = "ok"


@dataclass
class Split:
    """The tasks of one side of a recipe, by their content; ``failed`` where one of its sources could not be read.

    ``left`` counts those that a run would not leave out.
    """

    place: str
    failed: bool = False
    left: int = 0
    tasks: list[Task] = field(default_factory=list)
    contents: list[str] = field(default_factory=list)


def validate(session: ModelFreeSession, rows: int = 0, episodes: int = 16) -> Iterator[Finding]:
    """Check everything that a recipe names; ``rows`` of each source at most (0: all), ``episodes`` played of each."""
    recipe = session.recipe
    if session.stand_in:
        fetched = may_be_hub_id(recipe.model.path)
        why = f"the files of {recipe.model.path} are not here" if fetched else session.problem.rstrip(".")
        level: Level = "warning" if fetched else "error"
        published = session.stand_in.removeprefix("tiny:") in PUBLISHED_PIXELS
        sizes = "media take as many tokens as in the published checkpoints" if published else "media take fewer tokens"
        measured = f"with it text takes more tokens than with the model's own files, and {sizes}"
        yield Finding("model", "chat template", f"{why}; {session.stand_in} stands in; {measured}", level)
    splits = []
    for place, sections in (("tasks.train", recipe.tasks.train), ("tasks.evaluate", recipe.tasks.evaluate)):
        split = Split(place)
        splits.append(split)
        for number, section in enumerate(sections):
            where = f"{place}.{number}"
            try:
                (source,) = make_sources([section], session.store, place)
            except SensoriumError as error:
                yield Finding(where, "source", str(error), "error")
                split.failed = True
                continue
            yield from _check_source(session, where, section, source, split, rows, episodes)
        if not split.left and (split.tasks or (split.failed and recipe.tasks.on_bad_row == "skip")):
            told = "every task that was read would be left out"
            yield Finding(place, "tasks left", told, "error" if place == "tasks.train" else "warning")
    yield from _check_splits(*splits)


def _check_source(
    session: ModelFreeSession,
    where: str,
    section: SourceSection,
    source: TaskSource,
    split: Split,
    rows: int,
    episodes: int,
) -> Iterator[Finding]:
    tasks, bad = [], []
    planner = session.recipe.tasks.planner.name if split.place == "tasks.train" else ""
    count = min(rows or len(source), len(source))
    for nth in range(count):
        try:
            row = permuted(nth, len(source), "validate") if count < len(source) else nth
            tasks.append(untold(source, row, planner))
        except (TaskError, MediaError) as error:
            bad.append(str(error))
    if planner == "causal_history" and isinstance(source, CausalSource):
        bad += gaps(source).values()
    told = f"{section.source}: {count:,} of {len(source):,} read"
    yield Finding(where, "rows", *_counted(told, bad, _treated(session.recipe.tasks.on_bad_row)))
    split.tasks += tasks
    split.contents += [content_of(task) for task in tasks]
    if not tasks:
        split.failed = split.failed or bool(bad)
        return
    tasks = yield from _check_media(session, where, tasks)
    limits = session.recipe.rollout if split.place == "tasks.train" else session.recipe.held_out_rollout
    tasks = yield from _check_questions(session, where, tasks, limits)
    split.left += len(tasks)
    if tasks:
        played = [tasks[permuted(nth, len(tasks), "play")] for nth in range(min(episodes, len(tasks)))]
        yield from _check_play(session, where, played, limits)


def _treated(treatment: Treatment) -> Level:
    """How bad it is what a run refuses or, if the recipe has it skipped, leaves out and counts."""
    return "warning" if treatment == "skip" else "error"


def _counted(told: str, problems: Sequence[str], level: Level = "error") -> tuple[str, Level]:
    """What was found, with the number of problems and a line for each, equal ones once."""
    if not problems:
        return told, "ok"
    different = list(dict.fromkeys(problems))
    more = [f"and {len(different) - MOST_NAMED:,} more"] if len(different) > MOST_NAMED else []
    return "\n".join((f"{told}; {len(problems):,} with a problem:", *different[:MOST_NAMED], *more)), level


def content_of(task: Task) -> str:
    """What a task is made of: an environment's start, or the question with its media and answer."""
    spec = task.environment
    key = getattr(resolve("environment", spec.name), "content_key", None) if spec is not None else None
    if spec is not None and task.metadata.get("split_by") == "seed":
        return f"{spec.name}/seed {spec.seed}"
    if spec is not None and key is not None and not task.messages:
        content, error = attempt(key, spec.seed, spec.options)
        return f"{spec.name}/{content}" if error is None else f"{spec.name}/seed {spec.seed}"
    shown = [(m.role, m.text, [item.hash for item in m.media]) for m in task.messages]
    start = (spec.name, spec.seed) if spec is not None and not task.messages else ()
    return hashlib.blake2b(repr((shown, task.answer, start)).encode(), digest_size=16).hexdigest()


def _check_splits(train: Split, held_out: Split) -> Iterator[Finding]:
    if train.failed or held_out.failed:
        return  # which was found above; splits are compared when all of both can be read
    if not held_out.tasks:
        yield Finding("tasks.evaluate", "splits", "there are no held-out tasks", "warning")
        return
    known = set(train.contents)
    shared = [task.id for content, task in zip(held_out.contents, held_out.tasks, strict=True) if content in known]
    different = len(set(held_out.contents))
    told = f"{len(set(train.contents)):,} different tasks to train on, {different:,} held out"
    if shared:
        told += f"; {len(shared):,} held-out tasks are trained on too, the first: {shared[0]}"
    yield Finding("tasks", "splits disjoint", told, "error" if shared else "ok")


def _check_media(session: ModelFreeSession, where: str, tasks: list[Task]) -> Generator[Finding, None, list[Task]]:
    """Returns the tasks that a run would not leave out for their media."""
    media = list(dict.fromkeys(media_of(message for task in tasks for message in task.messages)))
    if not media:
        return tasks
    treatment = session.recipe.tasks.on_bad_row
    problems: list[str] = []
    unreadable: set[Media] = set()
    level = _treated(treatment)
    for start in range(0, len(media), MEDIA_AT_ONCE):
        some = media[start : start + MEDIA_AT_ONCE]
        found, error = attempt(session.chat.prepare, some)
        if error is not None:  # which is not of one medium, and no run leaves it out
            problems, level = [*problems, words(error)], "error"
            continue
        problems += [str(each) for each in found.values()]
        unreadable |= set(found)
    kinds = ", ".join(f"{sum(item.kind == kind for item in media):,} {kind}s" for kind in sorted({m.kind for m in media}))
    yield Finding(where, "media readable", *_counted(kinds, problems, level))
    if treatment == "refuse":
        return tasks
    return [task for task in tasks if unreadable.isdisjoint(media_of(task.messages))]


def _check_questions(
    session: ModelFreeSession, where: str, tasks: list[Task], section: RolloutSection
) -> Generator[Finding, None, list[Task]]:
    """Measure the prompts of questions as a run does. Returns the tasks that it would not leave out for their length."""
    renderer, treatment = Renderer(session.chat), session.recipe.tasks.on_long_prompt
    limit, key = section.prompt_limit
    lengths, long, short, fitting = [], [], [], []
    for task in tasks:
        fitting.append(task)
        if task.environment is not None:
            continue
        length, error = attempt(lambda asked=task: len(session.chat.layout(renderer.start(asked.messages))))
        if error is not None:
            continue  # its media cannot be read, which was found above
        lengths.append(length)
        if length >= limit:
            long.append(f"task {task.id} takes {length} and is {'left out' if treatment == 'skip' else 'refused'}")
            if treatment == "skip":
                fitting.pop()
        elif length + section.max_new_tokens > limit:
            short.append(f"task {task.id} takes {length}, so its response is cut at {limit - length}")
    if lengths:
        most = f"{limit:,} ({key.rstrip(',')})"
        told = f"up to {max(lengths):,} tokens and {section.max_new_tokens:,} to write, of {most}"
        yield Finding(where, "prompt lengths", *_counted(told, [*long, *short], _treated(treatment) if long else "warning"))
    return fitting


def _check_play(session: ModelFreeSession, where: str, tasks: list[Task], section: RolloutSection) -> Iterator[Finding]:
    random = RandomPlay(EnvironmentMaker(session.store))
    demonstrated = _episodes(session.play(tasks, lambda request: "", demonstrate=True, section=section))
    first = _episodes(session.play(tasks, random.answer, make=random.make, section=section))
    again = _episodes(session.play(tasks, random.answer, make=random.make, section=section))
    shown = [episode for episode in demonstrated if not _lacks_demonstration(episode)]
    yield from _outcome(where, DEMONSTRATED, shown, len(tasks), session)
    yield from _outcome(where, "random play", first, len(tasks), session)
    if random.action_names:
        yield _actions(where, random.action_names)
    differing = [a.task_id for a, b in zip(first, again, strict=True) if _course(a) != _course(b)]
    if tasks[0].environment is not None and any(episode.turns for episode in first):
        told = "the same responses lead to the same observations and pay"
        if differing:
            told = "the same responses lead to other observations or pay when played again, so runs do not repeat"
        yield Finding(where, "repeats", *_counted(told, differing, "warning"))
    yield from _success(where, tasks, (*shown, *first))
    yield from _rewards(where, shown, first)
    yield from _lengths(session, where, shown, first, section)
    for name, told, good in try_tools(tasks, EnvironmentMaker(session.store)):
        yield Finding(where, f"tool {name}", told, "ok" if good else "warning")


def _success(where: str, tasks: Sequence[Task], episodes: Sequence[Episode]) -> Iterator[Finding]:
    """Whether the episodes of an environment that came to their end were right or wrong, by any term."""
    ended = [episode for episode in episodes if episode.status is Status.FINISHED]
    if tasks[0].environment is not None and ended and all(episode.correct is None for episode in ended):
        told = (
            f"none of {len(ended)} episodes that ended says whether it succeeded, so there will be no accuracy: have the "
            "environment give success with its last step, or add a term that compares answers"
        )
        yield Finding(where, "success", told, "warning")


def _actions(where: str, names: Sequence[str]) -> Finding:
    """The actions by name; numbers say nothing to a model."""
    told = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
    if all(name.lstrip("-").isdigit() for name in names):
        return Finding(
            where, "actions", f"{told}: numbers say nothing to a model; name them by the option actions", "warning"
        )
    return Finding(where, "actions", told, "ok")


def _episodes(play: Coroutine[Any, Any, list[Group]]) -> list[Episode]:
    return [group.episodes[0] for group in run_async(play)]


def _lacks_demonstration(episode: Episode) -> bool:
    return episode.status is Status.FAILED and "demonstrat" in episode.failure


def _course(episode: Episode) -> object:
    return [([(m.role, m.content) for m in turn.observation], turn.reward, turn.parts) for turn in episode.turns]


def _outcome(
    where: str, check: str, episodes: Sequence[Episode], asked: int, session: ModelFreeSession
) -> Iterator[Finding]:
    if not episodes:
        learns = session.recipe.warm_start.steps > 0 and where.startswith("tasks.train")
        needs = "which warm_start.steps needs" if learns else "which only a warm start needs"
        yield Finding(where, check, f"there are no demonstrations, {needs}", "error" if learns else "ok")
        return
    failed = [episode for episode in episodes if episode.status in (Status.FAILED, Status.ABORTED)]
    turns = [len(episode.turns) for episode in episodes]
    correct = [episode.correct for episode in episodes if episode.correct is not None]
    told = f"{len(episodes)} of {asked} tasks, {min(turns)} to {max(turns)} turns"
    told += f", {sum(correct)} of {len(correct)} correct" if correct else ""
    long = all(episode.info.get("prompt_too_long") for episode in failed)  # of environments, which show theirs in play
    worst = _treated(session.recipe.tasks.on_long_prompt) if long else "error"
    found, level = _counted(told, [episode.failure for episode in failed], worst)
    wrong = [e for e in episodes if e.correct is False] if check == DEMONSTRATED else []
    if wrong:
        found += f"\ndemonstrations that are judged wrong teach what gets no reward: {', '.join(e.task_id for e in wrong)}"
        level = "warning" if level == "ok" else level
    yield Finding(where, check, found, level)


def _rewards(where: str, demonstrated: Sequence[Episode], random: Sequence[Episode]) -> Iterator[Finding]:
    """Each reward by name: its range in both kinds of play, and what is missing."""
    kinds = {"demonstrated": demonstrated, "random": random}
    names = list(dict.fromkeys(score.name for episode in (*demonstrated, *random) for score in episode.scores))
    sound = [e for e in (*demonstrated, *random) if e.status not in (Status.FAILED, Status.ABORTED)]
    for name in names:
        ranges = []
        for kind, episodes in kinds.items():
            values = [value for episode in episodes if (value := by_name(episode.scores).get(name)) is not None]
            if values:
                ranges.append(f"{kind} {min(values):g} to {max(values):g}")
        missing = [s.reason for episode in sound for s in episode.scores if s.name == name and s.missing]
        if any(NO_CLIENT in reason for reason in missing):
            yield Finding(where, f"reward {name}", "asks a judge, and none is asked here", "ok")
        elif ranges or missing:  # else nothing was played to its end, which was found above
            yield Finding(where, f"reward {name}", *_counted(", ".join(ranges) or "never given", missing))
    totals = {kind: [e.reward for e in episodes if e.reward is not None] for kind, episodes in kinds.items()}
    if all(totals.values()):
        good, chance = (sum(values) / len(values) for values in totals.values())
        level: Level = "ok" if good > chance else "warning"
        more = "" if good > chance else "; a reward that does not tell good play from random play teaches nothing"
        yield Finding(where, "reward", f"demonstrated {good:.3g}, random {chance:.3g} on average{more}", level)


def _lengths(
    session: ModelFreeSession,
    where: str,
    demonstrated: Sequence[Episode],
    random: Sequence[Episode],
    section: RolloutSection,
) -> Iterator[Finding]:
    """The longest context that was played, and the longest demonstration, against their budgets."""
    contexts: list[int] = []
    beyond, cut, tight = [], [], []

    def taken(segment: Segment) -> int:
        """Tokens of a segment; a response was written without a limit here, and a run would end it at its own."""
        length = len(session.chat.layout(segment))
        return min(length, section.max_new_tokens) if segment.author == "model" else length

    for episode in (*demonstrated, *random):
        if episode.info.get("prompt_too_long"):
            beyond.append(episode.failure)
        if episode.info.get("out_of_context"):  # a run counts the episode as truncated and goes on
            cut.append(episode.failure)
        lengths = [sum(map(taken, thread.segments)) for thread in episode.threads]
        contexts += lengths
        if lengths and max(lengths) > section.max_context_tokens:
            tight.append(f"task {episode.task_id} takes {max(lengths)}, so a response would be cut")
    if contexts:
        told = f"up to {max(contexts):,} of {section.max_context_tokens:,} tokens ({section.context_key})"
        level = _treated(session.recipe.tasks.on_long_prompt) if beyond else "warning"
        yield Finding(where, "context lengths", *_counted(told, [*beyond, *cut, *tight], level))
    written = [len(turn.response.tokens) for episode in demonstrated for turn in episode.turns]
    if written:
        told = f"demonstrations take up to {max(written):,} tokens; {section.new_tokens_key} is {section.max_new_tokens:,}"
        long = max(written) > section.max_new_tokens
        yield Finding(where, "response lengths", told + ": they would be cut" * long, "warning" if long else "ok")
