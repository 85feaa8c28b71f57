"""Record demonstrations once, for warm starts that then read them: by the environment's own demonstrations, a person, a
checkpoint, or a model behind an OpenAI-compatible server. Episodes may be filtered by their reward.

Each episode is written as soon as it ends. A recording that was interrupted goes on when its command is run again.
"""

import itertools
from argparse import ArgumentParser, Namespace
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from sensorium.assembly.playing import EnvironmentMaker, make_stream, sampling_of
from sensorium.cli.play import HOW, EndOfPlay, Screen
from sensorium.data.demonstrations import Recording, RecordingClaim, RecordingSummary, row_of, summary_of
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import SkippedRow, TaskStream, with_way_out
from sensorium.envs.protocol import Observation, WatchedEnvironment
from sensorium.envs.remote.instances import InstancePool
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import JudgeEndpointSection, Recipe
from sensorium.report.console import WorkBar
from sensorium.report.terminal import Terminal, say
from sensorium.runs.run_directory import lock_run
from sensorium.vocabulary.content import Message, assistant
from sensorium.vocabulary.episode import Episode, Group, Status
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, RecipeError, SensoriumError, TaskError
from sensorium.vocabulary.task import Task

if TYPE_CHECKING:  # they import torch
    from sensorium.rewards.judges.client import JudgeClient
    from sensorium.rewards.scorer import Scorer
    from sensorium.rollout.play import Rollout

USAGE = "sensorium record RECIPE [key=value …] [--from demonstrate|person|CHECKPOINT|URL] [--to DIR] [--min-reward R] …"
DEMONSTRATE, PERSON = "demonstrate", "person"
MOST_NAMED = 3
PLAYED = (
    "temperature",
    "top_p",
    "top_k",
    "stop",
    "max_new_tokens",
    "max_turns",
    "max_context_tokens",
    "max_episode_tokens",
)


@dataclass(frozen=True)
class RecordingOrder:
    """What to record. ``limit`` 0: each row of tasks.train once. ``model`` and ``api_key_env`` are of a server."""

    by: str = DEMONSTRATE
    to: Path | None = None
    limit: int = 0
    samples: int = 1
    min_reward: float | None = None
    temperature: float | None = None
    model: str = ""
    api_key_env: str = ""
    pictures: str = "auto"

    @property
    def served(self) -> bool:
        """True if a server is asked."""
        return self.by.startswith(("http://", "https://"))

    def folder(self, recipe: Recipe) -> Path:
        return self.to or Path("demonstrations") / recipe.name


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("recipe", help="a YAML file, or a shipped recipe (frozen_lake)")
    parser.add_argument("overrides", nargs="*", metavar="key=value", help="change the recipe: rollout.max_turns=3")
    who = "who plays: the demonstrations of tasks and environments (default), you, a checkpoint or run, or a server's URL"
    parser.add_argument("--from", dest="by", default=DEMONSTRATE, metavar="WHO", help=who)
    parser.add_argument("--to", type=Path, metavar="DIR", help="the folder; by default demonstrations/NAME")
    parser.add_argument("--limit", type=int, default=0, metavar="N", help="tasks to play; default: each row once")
    parser.add_argument("--samples", type=int, default=1, metavar="K", help="episodes of each task (1)")
    parser.add_argument("--min-reward", type=float, metavar="R", help="keep episodes of at least this reward; default: all")
    parser.add_argument("--temperature", type=float, metavar="T", help="of a checkpoint or server; default: rollout's")
    parser.add_argument("--model", default="", metavar="NAME", help="the model's name at the server")
    parser.add_argument("--api-key-env", default="", metavar="VARIABLE", help="environment variable with the server's key")
    parser.add_argument("--pictures", choices=["auto", "kitty", "iterm", "blocks", "none"], default="auto", help="for you")


def run(arguments: Namespace) -> int:
    recipe = load_recipe(arguments.recipe, arguments.overrides)
    given = {name: getattr(arguments, name) for name in RecordingOrder.__dataclass_fields__}
    order = RecordingOrder(**given)
    with WorkBar() as bar:
        found = record(recipe, order, bar)
    console, folder = Terminal(), order.folder(recipe)
    for line in found.lines:
        say(line, console)
    if found.missing:
        say("run the command again to play those that are missing", console)
    if found.kept:
        say(f"a warm start learns them: warm_start.demonstrations={folder}", console)
    return int(bool(found.missing) or not found.kept)


def record(recipe: Recipe, order: RecordingOrder, bar: WorkBar) -> RecordingSummary:
    """Record what is missing of an order; returns the summary of all that the folder holds."""
    _refuse(recipe, order)
    from sensorium.cluster.event_loop import run_async

    folder, data = order.folder(recipe), recipe.model_dump(mode="json")
    with ExitStack() as opened:
        opened.enter_context(lock_run(folder))
        bar.begin(f"{recipe.name}: looking at tasks.train")
        player = _player(recipe, order, bar, opened)
        stream = make_stream(recipe, player.store)
        rows = rows_to_record(stream, order.limit)
        content = {"tasks": [data["tasks"]["train"], recipe.tasks.shuffle], "rewards": data["rewards"]["terms"]}
        content["rollout"] = {key: data["rollout"][key] for key in PLAYED} | {"temperature": order.temperature}
        claim = RecordingClaim(
            recipe.name, order.by, len(rows), order.samples, order.min_reward, recipe.seed, content | {"model": order.model}
        )
        recording = Recording(folder)
        recording.take(claim)
        run_async(_Recorder(recipe, order, recording, player, bar).record(stream, rows))
        recording.sort()
    return summary_of(recording)


def _refuse(recipe: Recipe, order: RecordingOrder) -> None:
    if order.limit < 0 or order.samples < 1:
        raise RecipeError(f"--limit {order.limit} and --samples {order.samples}: record at least one episode of a task.")
    if order.min_reward is not None and not recipe.rewards.terms:
        raise RecipeError("--min-reward: the recipe names no rewards.terms, so no episode has a reward to be compared.")
    if order.by == DEMONSTRATE and order.samples > 1:
        raise RecipeError("--samples: a demonstration is the same each time it is played; drop it, or name another --from.")
    if order.served and not order.model:
        raise RecipeError(f"--from {order.by}: name the model as the server calls it, with --model NAME.")
    if not order.served and (order.model or order.api_key_env):
        raise RecipeError("--model and --api-key-env are for --from http://…; a checkpoint is named by --from PATH.")


def rows_to_record(stream: TaskStream, count: int) -> list[tuple[int, int]]:
    """``count`` different (source, row), the last that training draws in its first pass; 0: every row, from the first on.

    RL draws from the beginning, so it starts with tasks that no demonstration has shown.
    """
    total = sum(map(len, stream.sources))
    some = 0 < count < total
    positions = itertools.chain(range(total - 1, -1, -1), itertools.count(total)) if some else itertools.count()
    rows: dict[tuple[int, int], None] = {}
    while len(rows) < (count if some else total):
        rows.setdefault(stream.at(next(positions)))
    return list(rows)


@dataclass(frozen=True)
class _Player:
    """Who plays: a rollout, or a person at a screen. ``demonstrates``: its environments are asked for responses."""

    store: MediaStore
    scorer: "Scorer"
    rollout: "Rollout | None"
    demonstrates: bool = False
    without_own: bool = False  # the tasks' own demonstrations are not used
    screen: Screen | None = None


def _player(recipe: Recipe, order: RecordingOrder, bar: WorkBar, opened: ExitStack) -> _Player:
    if order.by not in (DEMONSTRATE, PERSON) and not order.served:
        from sensorium.assembly.session import model_session
        from sensorium.evaluation.folder import evaluated_model

        path = evaluated_model(order.by, recipe, None)
        bar.begin(f"{recipe.name}: loading {path}")
        own = opened.enter_context(model_session(recipe, path))
        return _Player(own.store, own.scorer, own.rollout)
    from sensorium.cli.validation import model_free_session
    from sensorium.engines.protocol import ScriptedEngine
    from sensorium.rollout.play import Rollout

    bar.begin(f"{recipe.name}: loading the tokenizer and the chat template of {recipe.model.path}")
    session = opened.enter_context(model_free_session(recipe))
    if order.by == PERSON:
        bar.progress.stop()
        screen = Screen(recipe, Path("runs") / "play" / recipe.name, order.pictures, session)
        screen.say(HOW)
        return _Player(session.store, session.scorer, None, screen=screen)
    pool = None
    if recipe.environments.pool:
        pool = InstancePool(recipe.environments.pool, recipe.rollout.environment_deadline_s)
        opened.callback(pool.close)
    make, section = EnvironmentMaker(session.store, pool=pool), recipe.rollout
    if order.served:
        make = _Teacher(recipe, order, session.store, pool, opened)
        longest_s = max(section.environment_deadline_s, recipe.judges.total_deadline_s)
        section = section.model_copy(update={"environment_deadline_s": longest_s})
    rollout = Rollout(
        session.chat, ScriptedEngine(session.chat, lambda request: ""), section, make, recipe.environments.pool
    )
    opened.callback(rollout.close)
    return _Player(session.store, session.scorer, rollout, demonstrates=True, without_own=order.served)


class _Recorder:
    """Plays what is missing of a recording, and decides which episodes are kept."""

    def __init__(self, recipe: Recipe, order: RecordingOrder, recording: Recording, player: _Player, bar: WorkBar) -> None:
        self.recipe, self.order, self.recording, self.player, self.bar = recipe, order, recording, player, bar
        self.decided = recording.decided()
        self.failures: dict[str, list[str]] = {}  # ids of tasks by reason

    async def record(self, stream: TaskStream, rows: Sequence[tuple[int, int]]) -> None:
        samples = range(self.order.samples)
        left = [i for i in range(len(rows)) if any((i, k) not in self.decided for k in samples)]
        before = len(rows) - len(left)
        went_on = f", {before:,} of {len(rows):,} were before" if before else ""
        self.bar.begin(f"recording by {self.order.by} into {self.recording.path}{went_on}", len(left))
        lot = 1 if self.player.screen else self.recipe.rollout.concurrency or self.recipe.warm_start.prompts_per_step
        done = 0
        for start in range(0, len(left), lot):
            tasks = [(place, task) for place in left[start : start + lot] if (task := self._task(stream, place, rows))]
            failed = sum(map(len, self.failures.values()))
            try:
                async for place, group in self._played(tasks):
                    await self._decide(place, group)
                    done += 1
                    self.bar.tell(done)
            except EndOfPlay:
                break
            if tasks and sum(map(len, self.failures.values())) - failed >= len(tasks) * self.order.samples:
                say("stopped, because none of the last episodes could be played", Terminal(stderr=True))
                break
        for failure, ids in list(self.failures.items())[:MOST_NAMED]:
            more = f" and {len(ids) - MOST_NAMED:,} more" if len(ids) > MOST_NAMED else ""
            say(f"failed: {failure} ({', '.join(ids[:MOST_NAMED])}{more})", Terminal(stderr=True))

    def _task(self, stream: TaskStream, place: int, rows: Sequence[tuple[int, int]]) -> Task | None:
        source, row = rows[place]
        try:
            return stream.sources[source][row]
        except (TaskError, MediaError) as error:
            if stream.on_bad_row == "refuse":
                raise with_way_out(error) from error
            skipped = SkippedRow(source, row, str(error))
            for sample in range(self.order.samples):
                self.recording.leave_out(place, sample, skipped.reason, None, "its row cannot be read")
            return None

    async def _played(self, tasks: Sequence[tuple[int, Task]]) -> AsyncIterator[tuple[int, Group]]:
        """The groups of some tasks with their places, as they end."""
        from sensorium.rollout.play import Attempt

        player, recipe = self.player, self.recipe
        if player.screen is not None:
            for place, task in tasks:
                for sample in range(self.order.samples):
                    if (place, sample) not in self.decided:
                        (group,) = await player.screen.play(task, demonstrate=False)
                        player.screen.end(group.episodes[0])
                        yield place, replace(group, episodes=(replace(group.episodes[0], index=sample),))
            return
        assert player.rollout is not None
        attempt = Attempt(recipe.seed, 0, "record", player.demonstrates)
        given = [replace(task, demonstration=()) if player.without_own else task for _, task in tasks]
        sampling = sampling_of(recipe.rollout)
        if self.order.temperature is not None:
            sampling = replace(sampling, temperature=self.order.temperature)
        async with player.rollout.stream(given, self.order.samples, attempt, sampling) as stream:
            async for number, group in stream:
                yield tasks[number][0], await player.scorer.score_group(group)

    async def _decide(self, place: int, group: Group) -> None:
        for episode in group.episodes:
            if (place, episode.index) in self.decided:
                continue
            if unplayed := self._unplayed(episode):
                self.failures.setdefault(unplayed, []).append(group.task.id)
            elif why := self._unwanted(episode):
                self.recording.leave_out(place, episode.index, group.task.id, episode.reward, why)
            else:
                row, media = row_of(place, group.task, episode, self.player.store)
                self.recording.keep(row, media, self.player.store)

    def _unplayed(self, episode: Episode) -> str:
        """Why an episode decides nothing and is missing: it, or a term, failed. It is played again by the next command."""
        if episode.status in (Status.FAILED, Status.ABORTED) and not episode.info.get("prompt_too_long"):
            return episode.failure.removeprefix(f"task {episode.task_id}, turn {len(episode.turns)}: ")
        missing = next((s for s in episode.scores if s.missing and s.weight), None)
        known = self.order.min_reward is None or episode.info.get("prompt_too_long")
        return "" if missing is None or known else f"no score '{missing.name}': {missing.reason}"

    def _unwanted(self, episode: Episode) -> str:
        """Why an episode is not kept, the same words for all of a kind; empty if it is."""
        if episode.info.get("prompt_too_long"):
            return "the prompt does not fit the context"
        if not episode.turns:
            return "no response"
        if any(turn.cut for turn in episode.turns):
            return "a response was cut off (rollout.max_new_tokens)"
        floor = self.order.min_reward
        return "" if floor is None or (episode.reward or 0.0) >= floor else f"reward below {floor:g}"


class _Teacher(EnvironmentMaker):
    """Makes environments whose demonstrations are a served model's responses."""

    def __init__(
        self, recipe: Recipe, order: RecordingOrder, store: MediaStore, pool: InstancePool | None, opened: ExitStack
    ) -> None:
        super().__init__(store, pool=pool)
        from sensorium.rewards.judges.client import JudgeClient

        endpoints = {order.model: (JudgeEndpointSection(base_url=order.by, api_key_env=order.api_key_env),)}
        section = recipe.judges.model_copy(update={"endpoints": endpoints, "fallbacks": {}, "offline": False})
        self._client = JudgeClient(section, store, Recording(order.folder(recipe)).answers)
        opened.callback(self._client.close)
        self._client.refuse_unknown(order.model)
        self._client.refuse_without_keys(order.model)
        temperature = recipe.rollout.temperature if order.temperature is None else order.temperature
        self._parameters = {"temperature": temperature, "max_tokens": recipe.rollout.max_new_tokens}
        self._order, self._begun = order, Counter[str]()

    def instant(self, task: Task) -> bool:
        """False: the server is waited for."""
        return False

    def __call__(self, task: Task) -> Any:
        draw = self._begun[task.id] % self._order.samples
        self._begun[task.id] += 1
        return _TaughtEnvironment(super().__call__(task), self._client, self._order.model, self._parameters, draw)


class _TaughtEnvironment(WatchedEnvironment):
    """An environment whose demonstrations a served model gives, asked with the conversation so far."""

    instant = False  # it waits for the server

    def __init__(self, inner: Any, client: "JudgeClient", model: str, parameters: dict[str, Any], draw: int) -> None:
        super().__init__(inner, self._begun, self._went_on, self._answered)
        self._client, self._model, self._parameters, self._draw = client, model, parameters, draw
        self._head: list[Message] = []
        self._turns: list[list[Message]] = []  # the conversation up to each response

    def _begun(self, returned: Any) -> Any:
        head, observation = returned
        self._head, self._turns = list(head), []
        self._conversation = [*head, *observation.messages]
        return returned

    def _answered(self, response: str) -> None:
        self._turns.append([*self._conversation, assistant(response)])

    def _went_on(self, result: Any) -> Any:
        shown = result.observation
        if isinstance(shown, Observation):
            before = self._head if shown.after == -1 else self._turns[-1 if shown.after is None else shown.after]
            self._conversation = [*before, *shown.messages]
        return result

    def demonstrate(self) -> str:
        from sensorium.rewards.judges.judgements import JudgeRequest

        if any(message.tools for message in self._conversation):
            raise EnvironmentFailure(
                "it offers tools in the form of the recipe's model, which another model behind a server does not write."
            )
        # A server takes messages of the role tool only after a call of its own API.
        messages = tuple(replace(one, role="user") if one.role == "tool" else one for one in self._conversation)
        asked = JudgeRequest(self._model, messages, "record/1", parameters=self._parameters, draw=self._draw, whole=True)
        try:
            return self._client.ask_now(asked).text
        except SensoriumError as error:
            raise EnvironmentFailure(str(error).replace("judge", "model", 1)) from error
