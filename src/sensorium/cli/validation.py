"""Checks of a recipe without a model: its rows, media, prompts, environments, rewards and tools are tried."""

import random
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from sensorium.assembly.playing import EnvironmentMaker, make_scorer, open_store, sampling_of
from sensorium.cli.row_checks import (
    Judged,
    WrittenAnswers,
    fingerprint,
    judge_answers,
    judge_demonstrations,
    media_fault,
)
from sensorium.cluster.event_loop import run_async
from sensorium.data.causal_history import CausalSource, gaps, without_history
from sensorium.data.demonstrations import demonstrations_of
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import Side, TaskSource, Treatment, make_source, permuted
from sensorium.data.row_format import placeholder_notes, unread_notes
from sensorium.data.task_content import (
    BadRow,
    ComparedRow,
    compared_row,
    id_of,
    original_row,
    other_media,
    repeated_ids,
    text_alone,
)
from sensorium.engines.protocol import Request, ScriptedEngine
from sensorium.envs.actions import ActionGrammar
from sensorium.envs.protocol import Environment
from sensorium.envs.remote.instances import InstancePool, poolable
from sensorium.envs.tool_use import Toolbox, ToolCall
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_path import may_be_hub_id
from sensorium.models.load_chat import load_chat_processor, load_stand_in
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.schema import Recipe, RolloutSection, SourceSection
from sensorium.report.console import WorkBar
from sensorium.rewards.reward_term import asks_others
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.live import MakeEnvironment, media_of
from sensorium.rollout.play import Attempt, Renderer, Rollout
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Episode, Group, Segment, Status, by_name
from sensorium.vocabulary.errors import MediaError, ModelError, SensoriumError, TaskError
from sensorium.vocabulary.plain import attempt, words
from sensorium.vocabulary.task import Task

WORDS = ("", "yes", "42", "<answer>1</answer>", "\\boxed{2}", "I do not know.", "<think>hm</think><answer>A</answer>")
EXAMPLES: dict[str, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "object": {}, "array": []}


class RandomPlay:
    """Random actions where an environment names them, else words; the same for the same task."""

    def __init__(self, make: MakeEnvironment) -> None:
        self._make = make
        self._grammars: dict[str, ActionGrammar | None] = {}

    def make(self, task: Task) -> Environment:
        """Build a task's environment and remember its actions."""
        environment = self._make(task)
        grammar = getattr(environment, "grammar", None)
        self._grammars[task.id] = grammar if isinstance(grammar, ActionGrammar) else None
        return environment

    @property
    def action_names(self) -> tuple[str, ...]:
        """The actions of all environments that were built."""
        return tuple(dict.fromkeys(name for grammar in self._grammars.values() if grammar for name in grammar.names))

    def answer(self, request: Request) -> str:
        """A response; one in eight is words although there are actions."""
        episode, _, turn = request.name.rpartition("/")
        task = episode.split("/", 3)[-1].rpartition("/")[0]
        chance = random.Random(f"validate/{task}/{turn}")
        grammar = self._grammars.get(task)
        if grammar is None or chance.random() < 1 / 8:
            return chance.choice(WORDS)
        count = chance.randint(1, min(3, grammar.most_actions))
        actions = [grammar.any_action(chance) for _ in range(count)]
        return grammar.write(actions, **dict.fromkeys(("think", "observation", "reasoning", "prediction"), "?"))


def try_tools(tasks: Sequence[Task], make: MakeEnvironment) -> Iterator[tuple[str, str, bool]]:
    """Call each tool of the first task's environment with arguments that fit its schema: (name, reply, good)."""
    for task in tasks[:1]:
        environment, error = attempt(make, task)
        toolbox = getattr(environment, "toolbox", None) if error is None else None
        if not isinstance(toolbox, Toolbox):
            continue
        _, begun = attempt(environment.reset, task.environment.seed if task.environment else 0)
        if begun is not None:
            continue  # it fails in play too, and is reported there
        for name, tool in toolbox.tools.items():
            if getattr(tool, "changes", False) is True:
                yield name, "not called: its server says that it changes things", True
                continue
            reply, failed = attempt(toolbox.run, ToolCall(name, example_arguments(tool.spec.parameters)))
            if failed is not None:
                yield name, words(failed), False
            else:
                text = " ".join(reply.text.split())[:80] or f"{len(reply.content)} blocks"
                yield name, f"replies: {text}", not reply.is_error
        attempt(environment.close)


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """The required arguments of a JSON schema, by their types, enums and defaults."""
    properties = schema.get("properties", {})
    return {name: _example(properties.get(name, {})) for name in schema.get("required", ())}


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return example_arguments(schema)
    if kind == "array":
        least = max(int(schema.get("minItems", 1)), 1)
        items = [_example(schema.get("items", {})) for _ in range(least)]
        if all(isinstance(item, int | float) for item in items):
            low = schema.get("items", {}).get("minimum", 0)
            return [type(item)(low + 10 * place) for place, item in enumerate(items)]
        return items
    if "minimum" in schema:
        return schema["minimum"]
    return EXAMPLES.get(kind, "1")


@dataclass
class ModelFreeSession:
    """Plays a recipe's tasks with given responses; with the tokenizer of ``stand_in`` if there is a ``problem``."""

    recipe: Recipe
    store: MediaStore
    chat: ChatProcessor
    scorer: Scorer
    stand_in: str
    problem: str = ""
    unasked: tuple[tuple[str, float], ...] = ()  # terms that ask judges or services, with their weights

    async def play(
        self,
        tasks: list[Task],
        answers: Callable[[Request], str],
        *,
        demonstrate: bool = False,
        make: Callable[[Task], Environment] | None = None,
        section: RolloutSection | None = None,
    ) -> list[Group]:
        """Play each task once with these answers, or with its demonstration, and score it."""
        section = section or self.recipe.rollout
        rollout = Rollout(self.chat, ScriptedEngine(self.chat, answers), section, make or EnvironmentMaker(self.store))
        attempt = Attempt(self.recipe.seed, 0, "play", demonstrate)
        try:
            groups = await rollout.stream(tasks, 1, attempt, sampling_of(section)).in_order()
            return [await self.scorer.score_group(group) for group in groups]
        finally:
            rollout.close()


@contextmanager
def model_free_session(
    recipe: Recipe, store: MediaStore | None = None, *, alone: bool = False
) -> Iterator[ModelFreeSession]:
    """A session without weights; if the model's files are missing, with the tokenizer of a tiny model of its family.

    ``alone``: terms that ask a judge or a service are left out.
    """
    store = store or open_store(recipe)
    chat, stand_in, problem = chat_of(recipe, store)
    scorer = make_scorer(recipe.rewards, None, store)
    others = tuple((term.name, weight) for term, weight in scorer.terms if alone and asks_others(term))
    scorer.terms = tuple((term, weight) for term, weight in scorer.terms if not (alone and asks_others(term)))
    try:
        yield ModelFreeSession(recipe, store, chat, scorer, stand_in, problem, others)
    finally:
        scorer.close()
        chat.decoder.close()


def chat_of(recipe: Recipe, store: MediaStore) -> tuple[ChatProcessor, str, str]:
    """The model's chat processor; or, if its files are missing, a stand-in, whose it is, and the problem."""
    model = recipe.model
    try:
        chat = load_chat_processor(
            model.path,
            store=store,
            family=model.family,
            revision=model.revision,
            template_defaults=model.chat_template_kwargs,
        )
    except ModelError as error:
        named = model.path.lower().replace("_", "-").replace("qwen-", "qwen")
        families = [family for family, facts in FAMILIES.items() if any(part in named for part in facts.names)]
        families += [family for family, facts in FAMILIES.items() if facts.stands_in]
        family = model.family if model.family != "auto" else families[0]
        return load_stand_in(family, store), f"tiny:{family}", str(error)
    return chat, "", ""


# Tasks are played twice: as they are demonstrated, and at random. Problems are findings, and the checks continue.
Level = Literal["ok", "warning", "error"]
DEMONSTRATED = "demonstrated play"
MEDIA_AT_ONCE = 16
MEDIA_CHECKS = ("silent sounds", "sampling rates", "blank pictures")
MOST_NAMED = 100  # problems of one check that are named; the others are counted


@dataclass(frozen=True)
class Finding:
    """What a check found, and where."""

    where: str
    check: str
    found: str
    level: Level = "ok"


@dataclass
class Split:
    """The tasks of one side of a recipe, by their content.

    ``failed``: a source could not be read. ``left``: the number of tasks that a run would not skip.
    """

    place: str
    failed: bool = False
    left: int = 0
    rows: list[ComparedRow] = field(default_factory=list)


@dataclass
class BadRows:
    """Rows with a problem: the first problem of each, in the order in which they were found."""

    found: dict[tuple[str, int], BadRow] = field(default_factory=dict)

    def add(self, place: tuple[str, int], task_id: str, check: str, reason: str) -> str:
        """Add a row; returns the line that names it."""
        self.found.setdefault(place, BadRow(*place, task_id, check, reason))
        return reason


def validate(
    session: ModelFreeSession, rows: int = 0, episodes: int = 16, bad: BadRows | None = None, bar: WorkBar | None = None
) -> Iterator[Finding]:
    """Check everything that a recipe names; ``rows`` of each source at most (0: all), ``episodes`` played of each.

    Rows with a problem are added to ``bad``; ``bar`` shows what is being done.
    """
    recipe = session.recipe
    bad, bar = bad or BadRows(), bar or WorkBar(silent=True)
    if session.stand_in:
        fetched = may_be_hub_id(recipe.model.path)
        why = f"the files of {recipe.model.path} are not here" if fetched else session.problem.rstrip(".")
        published = FAMILIES[session.stand_in.removeprefix("tiny:")].published_pixels is not None
        sizes = "media take as many tokens as in the published checkpoints" if published else "media take fewer tokens"
        measured = f"with it text takes more tokens than with the model's own files, and {sizes}"
        text = f"{why}; {session.stand_in} replaces it; {measured}"
        yield Finding("model", "chat template", text, "warning" if fetched else "error")
    splits = []
    sides: dict[Side, Sequence[SourceSection]] = {"train": recipe.tasks.train, "evaluate": recipe.tasks.evaluate}
    for side, sections in sides.items():
        place = f"tasks.{side}"
        split = Split(place)
        splits.append(split)
        for number, section in enumerate(sections):
            where = f"{place}.{number}"
            try:
                source = make_source(recipe.tasks, side, number, session.store)
            except SensoriumError as error:
                yield Finding(where, "source", str(error), "error")
                split.failed = True
                continue
            yield from _SourceCheck(session, where, source, split, bad, bar).findings(section, rows, episodes)
        for note in repeated_ids(split.rows):
            yield Finding(place, "ids", note, "warning")
        if not split.left and (split.rows or (split.failed and recipe.tasks.on_bad_row == "skip")):
            level: Level = "error" if place == "tasks.train" else "warning"
            yield Finding(place, "tasks left", "every task that was read would be left out", level)
    yield from _check_splits(splits[0], splits[1], bad)
    yield from _check_recording(recipe, session.store)


def _check_recording(recipe: Recipe, store: MediaStore) -> Iterator[Finding]:
    """Read every recorded demonstration that the warm start would, with its media."""
    where, unreadable = "warm_start.demonstrations", list[str]()
    try:
        rows = demonstrations_of(recipe, store)
    except SensoriumError as error:
        yield Finding(where, "recording", str(error), "error")
        return
    if rows is None:
        return
    for row in range(len(rows)):
        try:
            rows[row]
        except (TaskError, MediaError) as error:
            unreadable.append(str(error))
    yield Finding(where, "rows", *_counted(f"{len(rows):,} read", unreadable, _level(recipe.tasks.on_bad_row)))
    yield Finding(where, "recording", "; ".join(rows.summary.lines), "warning" if rows.summary.missing else "ok")


def _check_reuse(store: MediaStore, where: str, tasks: Sequence[Task], deadline_s: float) -> Iterator[Finding]:
    """Whether an instance that has played another seed begins the first task as a fresh one does."""
    pool, spec = InstancePool(1, deadline_s), tasks[0].environment
    assert spec is not None

    def shown(seed: int) -> Any:
        instance = pool.environment(spec.name, spec.options, store)
        try:
            head, observation = instance.reset(seed)
            attempt(instance.step, WORDS[1])  # one that fails is replaced
            return head, observation.messages
        finally:
            instance.close()

    others = [task.environment.seed for task in tasks[1:] if task.environment is not None]
    try:
        first, error = attempt(shown, spec.seed)
        if error is None:
            attempt(shown, others[0] if others else spec.seed + 1)
            again, error = attempt(shown, spec.seed)
    finally:
        pool.close()
    if error is not None:
        return  # it fails in play too, and is reported there
    kept = (
        f"by seed {spec.seed} it shows something else after another episode than at first, and environments.pool uses "
        "instances again: episodes then depend on the instance they get. Clear in reset(seed) what earlier ones left"
    )
    alike = again == first
    text = "begins alike in an instance that is used again" if alike else kept
    yield Finding(where, "instances", f"task {tasks[0].id}: {text}", "ok" if alike else "warning")


class _SourceCheck:
    """The checks of one source."""

    def __init__(
        self, session: ModelFreeSession, where: str, source: TaskSource, split: Split, bad: BadRows, bar: WorkBar
    ) -> None:
        self.session, self.where, self.source, self.split, self.bad, self.bar = session, where, source, split, bad, bar
        self.rows: dict[int, int] = {}  # the row of each task, by the task's identity
        self.seen: dict[str, str] = {}  # the fingerprint of each medium that was decoded, by its key

    def findings(self, section: SourceSection, rows: int, episodes: int) -> Iterator[Finding]:
        """Read the source's rows, then check their media, prompts, demonstrations and answers, and play some."""
        source, split, recipe = self.source, self.split, self.session.recipe
        tasks, unreadable = [], []
        planner = recipe.tasks.planner.name if split.place == "tasks.train" else ""
        count = min(rows or len(source), len(source))
        self.bar.begin(f"{self.where}: reading rows", count)
        for nth in range(count):
            row = permuted(nth, len(source), "validate") if count < len(source) else nth
            try:
                task = without_history(source, row, planner)
                tasks.append(task)
                self.rows[id(task)] = original_row(source, row)
            except (TaskError, MediaError) as error:
                place = self.where, original_row(source, row)
                unreadable.append(self.bad.add(place, id_of(source, row) or "", "rows", str(error)))
            self.bar.tell(nth + 1)
        if planner == "causal_history" and isinstance(source, CausalSource):
            unreadable += gaps(source).values()
        text = f"{section.source}: {count:,} of {len(source):,} read"
        yield Finding(self.where, "rows", *_counted(text, unreadable, _level(recipe.tasks.on_bad_row)))
        if not tasks:
            split.failed = split.failed or bool(unreadable)
            return
        for tag, ids, advice in placeholder_notes(tasks):
            yield Finding(self.where, f"placeholder {tag}", *_counted(advice, [f"task {one}" for one in ids], "warning"))
        for note in unread_notes(source):
            yield Finding(self.where, "unread media", note, "warning")
        whole = tasks
        tasks = yield from self.media(tasks)
        compared = [compared_row(task, self.where, self.rows[id(task)], self.seen) for task in whole]
        split.rows += compared
        for note in text_alone(compared, source):
            yield Finding(self.where, "media shown", note, "warning")
        limits = recipe.rollout if split.place == "tasks.train" else recipe.held_out_rollout
        tasks = yield from self.questions(tasks, limits)
        split.left += len(tasks)
        if not tasks:
            return
        yield from self.answers(tasks, limits)
        played = [tasks[permuted(nth, len(tasks), "play")] for nth in range(min(episodes, len(tasks)))]
        self.bar.begin(f"{self.where}: playing {len(played)} tasks")
        yield from _check_play(self.session, self.where, played, limits)
        if recipe.environments.pool and (pooled := [task for task in played if poolable(task)]):
            yield from _check_reuse(self.session.store, self.where, pooled, limits.environment_deadline_s)

    def mark(self, task: Task, check: str, reason: str) -> str:
        """Add a task's row to the bad ones; returns a line that names it."""
        name = f"task {task.id}"
        line = reason if reason.startswith(name) else f"{name}: {reason}"
        return self.bad.add((self.where, self.rows[id(task)]), task.id, check, line)

    def media(self, tasks: list[Task]) -> Generator[Finding, None, list[Task]]:
        """Decode all media; returns the tasks that a run would not skip for theirs."""
        chat, recipe = self.session.chat, self.session.recipe
        shown = {id(task): [part for item in media_of(task.messages) for part in chat.shown(item).parts] for task in tasks}
        media = list(dict.fromkeys(media_of(message for task in tasks for message in task.messages)))
        if not media:
            return tasks
        problems: list[str] = []
        unreadable: dict[Media, str] = {}
        faults: dict[Media, tuple[str, str]] = {}
        level = _level(recipe.tasks.on_bad_row)
        self.bar.begin(f"{self.where}: decoding media", len(media))
        for start in range(0, len(media), MEDIA_AT_ONCE):
            several = media[start : start + MEDIA_AT_ONCE]
            found, error = attempt(chat.prepare, several)
            if error is not None:  # not of a single medium, so no run would skip it
                problems, level = [*problems, words(error)], "error"
                continue
            problems += [str(each) for each in found.values()]
            unreadable |= {item: str(each) for item, each in found.items()}
            for part in dict.fromkeys(part for item in several if item not in found for part in chat.shown(item).parts):
                decoded, error = attempt(chat.decoder.get, part)
                if error is None:
                    self.seen[part.key] = fingerprint(decoded)
                    faults[part] = media_fault(part, decoded, self.session.store)
            self.bar.tell(start + len(several))
        kinds = ", ".join(f"{sum(item.kind == k for item in media):,} {k}s" for k in sorted({m.kind for m in media}))
        yield Finding(self.where, "media readable", *_counted(kinds, problems, level))
        for task in tasks:
            for item in media_of(task.messages):
                if item in unreadable:
                    self.mark(task, "media readable", unreadable[item])
        for check in MEDIA_CHECKS:
            lines = [
                self.mark(task, check, faults[part][1])
                for task in tasks
                for part in shown[id(task)]
                if faults.get(part, ("", ""))[0] == check
            ]
            if lines:
                yield Finding(self.where, check, *_counted(f"{len(tasks):,} tasks", lines, "warning"))
        if recipe.tasks.on_bad_row == "refuse":
            return tasks
        return [task for task in tasks if unreadable.keys().isdisjoint(media_of(task.messages))]

    def questions(self, tasks: list[Task], section: RolloutSection) -> Generator[Finding, None, list[Task]]:
        """Measure prompts of questions as a run does; returns the tasks that it would not skip for their length."""
        chat, treatment = self.session.chat, self.session.recipe.tasks.on_long_prompt
        renderer = Renderer(chat)
        limit, key = section.prompt_limit
        lengths, long, short, fitting = [], [], [], []
        self.bar.begin(f"{self.where}: measuring prompts", len(tasks))
        for nth, task in enumerate(tasks):
            self.bar.tell(nth)
            fitting.append(task)
            if task.environment is not None:
                continue
            length, error = attempt(lambda asked=task: len(chat.layout(renderer.start(asked.messages))))
            if error is not None:
                continue  # its media cannot be read, which is reported above
            lengths.append(length)
            if length >= limit:
                reason = f"it takes {length} tokens and is {'left out' if treatment == 'skip' else 'refused'}"
                long.append(self.mark(task, "prompt lengths", reason))
                if treatment == "skip":
                    fitting.pop()
            elif length + section.max_new_tokens > limit:
                short.append(f"task {task.id} takes {length}, so its response is cut at {limit - length}")
        if lengths:
            budget = f"{section.max_new_tokens:,} to write, of {limit:,} ({key.rstrip(',')})"
            level = _level(treatment) if long else "warning"
            text = f"up to {max(lengths):,} tokens and {budget}"
            yield Finding(self.where, "prompt lengths", *_counted(text, [*long, *short], level))
        return fitting

    def answers(self, tasks: list[Task], section: RolloutSection) -> Iterator[Finding]:
        """Score the demonstrations of questions, and see whether their known answers can be reached."""
        written = WrittenAnswers(self.session.scorer, self.session.chat)
        self.bar.begin(f"{self.where}: scoring demonstrations", len(tasks))
        shown = judge_demonstrations(tasks, written, self.bar.tell)
        text = f"{shown.count:,} demonstrations"
        if not self.session.recipe.steps and shown.problems:  # a warm start alone may well teach what is not rewarded
            text += f", {len(shown.problems):,} without reward, which no step of RL uses (steps: 0)"
            shown = replace(shown, problems={})
        yield from self.judged("demonstrations rewarded", text, shown, tasks)
        self.bar.begin(f"{self.where}: writing known answers", len(tasks))
        known = judge_answers(tasks, written, section.max_new_tokens, shown.right, self.bar.tell)
        yield from self.judged("answers reachable", f"{known.count:,} answers", known, tasks)

    def judged(self, check: str, text: str, found: Judged, tasks: list[Task]) -> Iterator[Finding]:
        """The finding of a check of rows, which are marked."""
        lines = [self.mark(tasks[place], check, reason) for place, reason in sorted(found.problems.items())]
        if found.count:
            yield Finding(self.where, check, *_counted(text, lines, "warning"))


def _level(treatment: Treatment) -> Level:
    return "warning" if treatment == "skip" else "error"


def _counted(text: str, problems: Sequence[str], level: Level = "error") -> tuple[str, Level]:
    """The text with the number of problems and a line for each, without repetitions."""
    if not problems:
        return text, "ok"
    different = list(dict.fromkeys(problems))
    more = [f"and {len(different) - MOST_NAMED:,} more"] if len(different) > MOST_NAMED else []
    return "\n".join((f"{text}; {len(problems):,} with a problem:", *different[:MOST_NAMED], *more)), level


def _check_splits(train: Split, held_out: Split, bad: BadRows) -> Iterator[Finding]:
    if train.failed or held_out.failed:
        return  # reported above; splits are compared only if all of both can be read
    if not held_out.rows:
        yield Finding("tasks.evaluate", "splits", "there are no held-out tasks", "warning")
        return
    for note in other_media(train.rows, held_out.rows):
        yield Finding("tasks", "media shown", note, "warning")
    known = {row.content: row.id for row in held_out.rows}
    both = [
        bad.add(
            (row.source, row.row), row.id, "splits disjoint", f"task {row.id} is the held-out task {known[row.content]}"
        )
        for row in train.rows
        if row.content in known
    ]
    contents = {row.content for row in train.rows}
    text = f"{len(contents):,} different tasks to train on, {len(known):,} held out"
    if both:
        count = len(known.keys() & contents)
        text += f"; {count:,} held-out tasks are trained on too"
    yield Finding("tasks", "splits disjoint", *_counted(text, both))


def _check_play(session: ModelFreeSession, where: str, tasks: list[Task], section: RolloutSection) -> Iterator[Finding]:
    random = RandomPlay(EnvironmentMaker(session.store))

    def episodes(answers: Callable[[Request], str], **options: Any) -> list[Episode]:
        return [group.episodes[0] for group in run_async(session.play(tasks, answers, section=section, **options))]

    def course(episode: Episode) -> object:
        return [([(m.role, m.content) for m in turn.observation], turn.reward, turn.parts) for turn in episode.turns]

    demonstrated = episodes(lambda request: "", demonstrate=True)
    first, again = (episodes(random.answer, make=random.make) for _ in range(2))
    shown = [e for e in demonstrated if not (e.status is Status.FAILED and "demonstrat" in e.failure)]
    yield from _outcome(where, DEMONSTRATED, shown, len(tasks), session, questions=tasks[0].environment is None)
    yield from _outcome(where, "random play", first, len(tasks), session)
    if names := random.action_names:
        numbers = all(name.lstrip("-").isdigit() for name in names)
        text = ", ".join(names[:12]) + (", …" if len(names) > 12 else "")
        text += ": numbers say nothing to a model; name them by the option actions" if numbers else ""
        yield Finding(where, "actions", text, "warning" if numbers else "ok")
    differing = [a.task_id for a, b in zip(first, again, strict=True) if course(a) != course(b)]
    if tasks[0].environment is not None and any(episode.turns for episode in first):
        text = "the same responses lead to the same observations and rewards"
        if differing:
            text = "the same responses lead to other observations or rewards when played again, so runs do not repeat"
        yield Finding(where, "repeats", *_counted(text, differing, "warning"))
    ended = [episode for episode in (*shown, *first) if episode.status is Status.FINISHED]
    if tasks[0].environment is not None and ended and all(episode.correct is None for episode in ended):
        text = (
            f"none of {len(ended)} episodes that ended says whether it succeeded, so there will be no accuracy: have the "
            "environment give success with its last step, or add a term that compares answers"
        )
        yield Finding(where, "success", text, "warning")
    yield from _rewards(session, where, shown, first)
    yield from _lengths(session, where, shown, first, section)
    for name, text, good in try_tools(tasks, EnvironmentMaker(session.store)):
        yield Finding(where, f"tool {name}", text, "ok" if good else "warning")


def _outcome(
    where: str, check: str, episodes: Sequence[Episode], asked: int, session: ModelFreeSession, *, questions: bool = False
) -> Iterator[Finding]:
    if not episodes:
        learns = session.recipe.warm_start.steps > 0 and where.startswith("tasks.train")
        needs = "which warm_start.steps needs" if learns else "which only a warm start needs"
        yield Finding(where, check, f"there are no demonstrations, {needs}", "error" if learns else "ok")
        return
    failed = [episode for episode in episodes if episode.status in (Status.FAILED, Status.ABORTED)]
    turns = [len(episode.turns) for episode in episodes]
    correct = [episode.correct for episode in episodes if episode.correct is not None]
    text = f"{len(episodes)} of {asked} tasks, {min(turns)} to {max(turns)} turns"
    text += f", {sum(correct)} of {len(correct)} correct" if correct else ""
    long = all(episode.info.get("prompt_too_long") for episode in failed)  # of environments, whose prompts show in play
    worst = _level(session.recipe.tasks.on_long_prompt) if long else "error"
    found, level = _counted(text, [episode.failure for episode in failed], worst)
    short = [e.task_id for e in episodes if e.info.get("out_of_turns")]
    if short:
        found += f"\nrollout.max_turns cuts demonstrations off before they end, so raise it: {', '.join(short)}"
        level = "warning" if level == "ok" else level
    # Demonstrations of questions are all scored, not only those that are played.
    wrong = [e for e in episodes if e.correct is False and not short] if check == DEMONSTRATED and not questions else []
    if wrong:
        found += f"\ndemonstrations that are judged wrong teach what gets no reward: {', '.join(e.task_id for e in wrong)}"
        level = "warning" if level == "ok" else level
    yield Finding(where, check, found, level)


def _rewards(
    session: ModelFreeSession, where: str, demonstrated: Sequence[Episode], random: Sequence[Episode]
) -> Iterator[Finding]:
    """Each reward by name: its range in both kinds of play, and what is missing."""
    kinds = {"demonstrated": demonstrated, "random": random}
    for name, _ in session.unasked:
        yield Finding(where, f"reward {name}", "asks a judge or a service, and none is asked here", "ok")
    names = list(dict.fromkeys(score.name for episode in (*demonstrated, *random) for score in episode.scores))
    sound = [e for e in (*demonstrated, *random) if e.status not in (Status.FAILED, Status.ABORTED)]
    for name in names:
        ranges = []
        for kind, episodes in kinds.items():
            values = [value for episode in episodes if (value := by_name(episode.scores).get(name)) is not None]
            if values:
                ranges.append(f"{kind} {min(values):g} to {max(values):g}")
        missing = [s.reason for episode in sound for s in episode.scores if s.name == name and s.missing]
        if ranges or missing:  # else no episode finished, which is reported above
            yield Finding(where, f"reward {name}", *_counted(", ".join(ranges) or "never given", missing))
    totals = {kind: [e.reward for e in episodes if e.reward is not None] for kind, episodes in kinds.items()}
    if all(totals.values()) and not any(weight for _, weight in session.unasked):
        good, chance = (sum(values) / len(values) for values in totals.values())
        more = "" if good > chance else "; a reward that does not tell good play from random play teaches nothing"
        text = f"demonstrated {good:.3g}, random {chance:.3g} on average{more}"
        yield Finding(where, "reward", text, "ok" if good > chance else "warning")


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

    def taken(segment: Segment) -> int:  # responses have no limit here, but a run cuts them
        length = len(session.chat.layout(segment))
        return min(length, section.max_new_tokens) if segment.author == "model" else length

    for episode in (*demonstrated, *random):
        if episode.info.get("prompt_too_long"):
            beyond.append(episode.failure)
        if episode.info.get("out_of_context"):  # a run counts the episode as truncated and continues
            cut.append(episode.failure)
        lengths = [sum(map(taken, thread.segments)) for thread in episode.threads]
        contexts += lengths
        if lengths and max(lengths) > section.max_context_tokens:
            tight.append(f"task {episode.task_id} takes {max(lengths)}, so a response would be cut")
    if contexts:
        text = f"up to {max(contexts):,} of {section.max_context_tokens:,} tokens ({section.context_key})"
        level = _level(session.recipe.tasks.on_long_prompt) if beyond else "warning"
        yield Finding(where, "context lengths", *_counted(text, [*beyond, *cut, *tight], level))
    written = [len(turn.response.tokens) for episode in demonstrated for turn in episode.turns]
    if written:
        text = f"demonstrations take up to {max(written):,} tokens; {section.new_tokens_key} is {section.max_new_tokens:,}"
        long = max(written) > section.max_new_tokens
        yield Finding(where, "response lengths", text + ": they would be cut" * long, "warning" if long else "ok")
