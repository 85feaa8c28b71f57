"""Play tasks with an engine: episodes as threads of segments, groups as a stream, early stop.

Invariants: a thread is exactly what the model saw; responses recur in later threads as the very tokens that were sampled.
A bad episode is data, not a crash: an error of an environment, a medium or the engine ends that episode with a status and
a reason. Every wait on an environment has a deadline. In lockstep, batches and what an early stop cancels depend on the
recipe alone; deadlines that fired are kept in ``Deadlines`` so that a resumed run repeats them.
"""

import asyncio
import warnings
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, replace
from typing import Any, Self

from sensorium.cluster.event_loop import first_error
from sensorium.cluster.placed_workers import MOST_LOSSES
from sensorium.cluster.pool import Slots, WorkerPool
from sensorium.data.demonstrations import RECORDED
from sensorium.data.lru import LRU
from sensorium.engines.protocol import Engine, LiveEpisodes, Request, Response, Sampling, response_key
from sensorium.envs.protocol import Observation, StepResult
from sensorium.models.chat_processor import ChatProcessor
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.live import Deadlines, LiveEnvironment, MakeEnvironment, Preparation, media_of, refuse_strange_media
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Episode, Group, Segment, Status, Thread, Turn
from sensorium.vocabulary.errors import (
    EngineError,
    EnvironmentFailure,
    EnvironmentLost,
    MediaError,
    ModelError,
    PromptTooLong,
    RecipeError,
    ServerLost,
    SpanMismatch,
)
from sensorium.vocabulary.plain import printable
from sensorium.vocabulary.task import Task

MOST_SERVERS_LOST = 5  # servers that may be lost while they play one episode
CANCELLED = "cancelled: enough groups were complete"
Emit = Callable[[int, Group], None]  # hands a group to the stream, with its place among the tasks


class ThreadBuilder:
    """Grows the threads of an episode: one append-only thread, or a new one per turn once a window is full.

    ``window`` is the number of turns of history, the current one included; 0 keeps them all. Where observations say which
    turn they follow, threads are as these say.
    """

    def __init__(self, renderer: "Renderer", head: Sequence[Message], window: int) -> None:
        self.renderer = renderer
        self.head = tuple(head)
        self.window = window
        self.observations: list[tuple[Message, ...]] = []
        self.responses: list[Segment] = []
        self.current = -1  # the index of the thread being written
        self._segments: list[list[Segment]] = []
        self._home: list[list[bool]] = []
        self._places: list[tuple[int, int]] = []  # of responses: thread, and place in it

    def observe(self, messages: Sequence[Message], after: int | None = None) -> tuple[Segment, ...]:
        """Add an observation and return the context of the next response. ``after`` is that of ``Observation``."""
        self.observations.append(tuple(messages))
        if after is not None:
            self._follow(tuple(messages), after)
            return tuple(self._segments[self.current])
        turn = len(self.responses)
        first = max(0, turn - self.window + 1) if self.window else 0
        if turn == 0 or first > 0:
            self._open(first)
        else:
            self._append(self.renderer.extend(self.observations[turn], self.responses[turn - 1]), home=False)
        return tuple(self._segments[self.current])

    def respond(self, response: Segment) -> tuple[int, int]:
        """Add what the model wrote; returns its home thread and its place there."""
        self.responses.append(response)
        self._append(response, home=True)
        self._places.append((self.current, len(self._segments[self.current]) - 1))
        return self._places[-1]

    def threads(self) -> tuple[Thread, ...]:
        """The threads that hold a response, each up to its last one."""
        threads = []
        for segments, home in zip(self._segments, self._home, strict=True):
            if any(home):
                end = len(home) - home[::-1].index(True)
                threads.append(Thread(tuple(segments[:end]), tuple(home[:end])))
        return tuple(threads)

    def _open(self, first: int) -> None:
        """Begin a thread whose oldest turn is ``first``; earlier responses in it are context."""
        self._begin([])
        if self.window and self.head:
            self._append(self.renderer.head(self.head), home=False)
            self._append(self.renderer.after_head(self.observations[first]), home=False)
        else:
            self._append(self.renderer.start(self.head + self.observations[first]), home=False)
        for turn in range(first + 1, len(self.observations)):
            self._append(self.responses[turn - 1], home=False)
            self._append(self.renderer.extend(self.observations[turn], self.responses[turn - 1]), home=False)

    def _follow(self, messages: tuple[Message, ...], after: int) -> None:
        """Continue the thread of an earlier turn; if that has gone on, one that shares its segments up to there.

        Of turns u a v b, with responses a and b, a message w after turn 0 begins the thread u a w, where u a is context.
        """
        if after >= len(self.responses):
            raise EnvironmentFailure(f"an observation follows turn {after}, and there are {len(self.responses)} turns")
        if after < 0:
            self._begin([])
            self._append(self.renderer.start(self.head + messages), home=False)
            return
        self.current, place = self._places[after]
        if place + 1 < len(self._segments[self.current]):
            self._begin(self._segments[self.current][: place + 1])
        self._append(self.renderer.extend(messages, self.responses[after]), home=False)

    def _begin(self, context: Sequence[Segment]) -> None:
        self._segments.append(list(context))
        self._home.append([False] * len(context))
        self.current = len(self._segments) - 1

    def _append(self, segment: Segment, *, home: bool) -> None:
        self._segments[self.current].append(segment)
        self._home[self.current].append(home)


class Renderer:
    """A chat processor's rendering with a bounded memory, so that the members of a group render their prompt once.

    Equal media of another origin are rendered again: an episode's record and its errors must name its own origin, not that
    of another task that showed the same picture.
    """

    def __init__(self, chat: ChatProcessor, capacity: int = 4096) -> None:
        self.chat = chat
        self._known: LRU[tuple[Any, ...], Segment] = LRU(capacity)

    def start(self, messages: tuple[Message, ...]) -> Segment:
        """The first turn of a thread."""
        return self._once("start", messages, lambda: self.chat.render(messages, generate=True))

    def head(self, messages: tuple[Message, ...]) -> Segment:
        """The head of a windowed thread."""
        return self._once("head", messages, lambda: self.chat.render(messages, generate=False))

    def after_head(self, messages: tuple[Message, ...]) -> Segment:
        """An observation right after the head."""
        return self._once("after_head", messages, lambda: self.chat.render_after_head(messages))

    def extend(self, messages: tuple[Message, ...], after: Segment) -> Segment:
        """An observation after a response, which may or may not end with a stop token."""
        stopped = bool(after.tokens) and after.tokens[-1] in self.chat.stop_ids
        return self._once(f"extend {stopped}", messages, lambda: self.chat.extend(messages, after=after))

    def _once(self, kind: str, messages: tuple[Message, ...], render: Callable[[], Segment]) -> Segment:
        key = (kind, messages, tuple(media.origin for message in messages for media in message.media))
        segment = self._known.get(key)
        if segment is None:
            segment = render()
            self._known.put(key, segment)
        return segment


class EarlyStop:
    """Cancels what is still played once ``enough`` groups are complete and have an episode that neither failed nor aborted.

    ``complete`` has the moment by group id; groups of one moment are equals, whichever ended first by the clock. A lockstep
    engine asks between two ticks, when every live episode waits for it, so that the outcome is a function of the recipe.
    """

    def __init__(self, enough: int) -> None:
        self.complete: dict[str, int] = {}
        self._enough = enough
        self._moment = 0
        self._runs: dict[str, asyncio.Task[Episode]] = {}
        self._left: Counter[str] = Counter()
        self._sound: set[str] = set()

    def begin(self, runs: Mapping[tuple[str, str], "asyncio.Task[Episode]"]) -> None:
        """These are all the episodes, by group and episode id."""
        self._runs = {episode: run for (_, episode), run in runs.items()}
        self._left = Counter(group for group, _ in runs)

    def ended(self, episode: Episode) -> None:
        """An episode is over, well or not."""
        del self._runs[episode.id]
        self._left[episode.group_id] -= 1
        if episode.status in (Status.FINISHED, Status.TRUNCATED):
            self._sound.add(episode.group_id)
        if not self._left[episode.group_id]:
            self.complete[episode.group_id] = self._moment

    def between_ticks(self) -> bool:
        """Cancel the rest if enough groups are complete; True if anything was."""
        self._moment += 1
        if len(self._sound & self.complete.keys()) < self._enough or not self._runs:
            return False
        for run in self._runs.values():
            run.cancel()
        self._runs.clear()
        return True


class GroupStream:
    """``async with stream: async for place, group in stream``. Leaving it early ends what is still played.

    Of three tasks whose groups are complete in the order 2, 0, 1 it gives ``(2, group)``, ``(0, group)``, ``(1, group)``:
    completion may follow the clock, so records sort by the place.
    """

    def __init__(self, play: Callable[[Emit], Coroutine[Any, Any, None]]) -> None:
        self._play = play
        self._queue: asyncio.Queue[tuple[int, Group] | None] = asyncio.Queue()
        self._player: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._player = asyncio.create_task(self._play(self._emit), name="rollout")
        self._player.add_done_callback(lambda _: self._queue.put_nowait(None))
        return self

    async def __aexit__(self, *error: object) -> None:
        assert self._player is not None
        self._player.cancel()
        await asyncio.wait({self._player})
        if not self._player.cancelled():
            self._player.exception()  # raised when the stream ended, or of no interest after leaving early

    async def in_order(self) -> list[Group]:
        """All groups once the stream has ended, in the tasks' order."""
        async with self:
            found = {place: group async for place, group in self}
        return [found[place] for place in sorted(found)]

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> tuple[int, Group]:
        assert self._player is not None
        item = await self._queue.get()
        if item is not None:
            return item
        self._player.result()  # raises what went wrong
        raise StopAsyncIteration

    def _emit(self, place: int, group: Group) -> None:
        self._queue.put_nowait((place, group))


@dataclass(frozen=True)
class Attempt:
    """Seed, step and prefix, which determine the random numbers and the ids of a step's episodes.

    ``occasion`` is in the ids alone: two evaluations use the same random numbers, but have different ids.
    ``demonstrate`` plays the tasks' or the environments' own demonstrations instead of asking the engine. ``first`` is the
    place of its first group among those of attempts that are played at the same time: engines serve requests in this order.
    """

    seed: int
    step: int
    prefix: str = "train"
    demonstrate: bool = False
    occasion: str = ""
    first: int = 0


class Rollout:
    """Plays tasks with an engine. One instance serves a whole run, training and evaluation.

    With ``instances`` so many episodes are played at once in environments that are no plain computation; the others wait,
    and are no live episodes meanwhile, so that a lockstep engine does not wait for them.
    """

    def __init__(
        self,
        chat: ChatProcessor,
        engine: Engine,
        section: RolloutSection,
        make_environment: MakeEnvironment,
        instances: int = 0,
    ) -> None:
        if section.max_turns > 1 and section.window != 1 and not (chat.append_only or section.keep_thoughts):
            raise RecipeError(
                "rollout.window: this checkpoint's chat template rewrites earlier assistant turns, so one growing thread "
                "would not be what the template says. Set rollout.window: 1 (each turn a fresh context), or "
                "rollout.keep_thoughts: true (earlier turns stay as they were sampled), or use a template that does so."
            )
        if section.max_turns > 1 and section.window != 1 and chat.one_turn:
            raise RecipeError(
                "rollout.window: this model's prompt attends both ways, so a second turn would change what was computed of "
                "the first. Set rollout.window: 1 (each turn a fresh context), or rollout.max_turns: 1."
            )
        self.chat = chat
        self.engine = engine
        self.section = section
        self.make_environment = make_environment
        self.renderer = Renderer(chat)
        self.ready = Preparation(chat)
        self.pool = WorkerPool("environment", size=section.environment_calls)
        self.instances = Slots(instances) if instances else None
        self.instance_waits_s: list[float] = []  # of each episode since the metrics were last taken
        self.rolled_again = 0
        self.deadly: set[str] = set()  # tasks that workers were lost over
        self.noted: Callable[[str], None] = lambda text: warnings.warn(text, stacklevel=2)

    def stream(
        self,
        tasks: Sequence[Task],
        size: int,
        attempt: Attempt,
        sampling: Sampling,
        deadlines: Deadlines | None = None,
        progress: Callable[[int], None] | None = None,
        *,
        before: Sequence[Task] = (),
        stop: EarlyStop | None = None,
        section: RolloutSection | None = None,
    ) -> GroupStream:
        """Play each task ``size`` times; a group comes when it is complete. ``progress`` gets the number of episodes done.

        ``before`` are the tasks this attempt has played already: ids and random numbers continue after them. ``stop`` may
        cancel episodes; their groups come last, as far as they were played. ``section`` replaces the rollout's own, for
        held-out tasks with other limits.
        """
        self.refuse_strange(tasks)
        deadlines, section = deadlines or Deadlines(), section or self.section
        times = Counter(task.id for task in before)  # a task that comes again gets other random numbers
        groups: list[list[_Play]] = []
        for order, task in enumerate(tasks, start=len(before)):
            first = times[task.id] * size
            times[task.id] += 1
            groups.append(
                [_Play(self, task, (order, i), first + i, attempt, sampling, deadlines, section) for i in range(size)]
            )

        async def play(emit: Emit) -> None:
            await self._play(groups, emit, progress or (lambda done: None), stop)

        return GroupStream(play)

    async def _play(
        self, groups: Sequence[Sequence["_Play"]], emit: Emit, progress: Callable[[int], None], stop: EarlyStop | None
    ) -> None:
        episodes: dict[str, Episode] = {}
        gate = asyncio.Semaphore(self.section.concurrency or max(1, sum(map(len, groups))))
        done = 0

        async def one(place: int, play: _Play) -> Episode:
            nonlocal done
            async with gate, self._instance(play):
                live.enter()
                try:
                    with self.pool.caller() if play.task.environment is not None else nullcontext():
                        episodes[play.id] = episode = await play.episode(live)
                    if stop is not None:
                        stop.ended(episode)
                    if all(member.id in episodes for member in groups[place]):
                        emit(place, _group(groups[place], episodes))
                    return episode
                finally:
                    live.leave()
                    if stop is not None and not self.engine.capabilities.lockstep:
                        stop.between_ticks()  # there are no ticks to wait for
                    done += 1
                    progress(done)

        live = LiveEpisodes(stop.between_ticks if stop is not None else None)
        try:
            async with asyncio.TaskGroup() as crowd:
                plays = [(place, play) for place, members in enumerate(groups) for play in members]
                runs = {(play.group_id, play.id): crowd.create_task(one(place, play)) for place, play in plays}
                if stop is not None:
                    stop.begin(runs)
        except BaseExceptionGroup as failed:  # an error of our own, or of the recipe
            raise first_error(failed) from failed
        for place, members in enumerate(groups):
            if any(play.id not in episodes for play in members):
                emit(place, _group(members, episodes))

    @asynccontextmanager
    async def _instance(self, play: "_Play") -> AsyncIterator[None]:
        """Inside, an episode may have an instance of its environment; before, it waits for its turn."""
        if self.instances is None or not self.takes_instance(play.task):
            yield
            return
        async with self.instances.one(play.place) as waited_s:
            self.instance_waits_s.append(waited_s)
            yield

    def takes_instance(self, task: Task) -> bool:
        """Whether ``instances`` bounds a task: its environment is no plain computation."""
        name = None if task.environment is None or task.environment.name == RECORDED else task.environment.name
        return name is not None and getattr(resolve("environment", name), "instant", False) is not True

    async def available(self, task: Task) -> None:
        """Wait until a task's environment can be played: workers may all be starting again, and servers be lost."""
        available = getattr(self.make_environment, "available", None)
        if available is not None:
            await available(task, self.noted)

    def close(self) -> None:
        """Release the threads, without waiting for one that hangs in an environment."""
        self.pool.close()

    def refuse_strange(self, tasks: Sequence[Task]) -> None:
        """Refuse tasks whose questions show media of a kind that the model or the engine lacks."""
        for task in tasks:
            refuse_strange_media(task, task.messages, self.chat, self.engine)

    def prepare(self, tasks: Sequence[Task]) -> dict[Media, MediaError]:
        """Preprocess the questions' media together, from any thread; returns the errors of those that cannot be read."""
        self.refuse_strange(tasks)
        return self.chat.prepare(media_of(message for task in tasks for message in task.messages))

    def check_prompt(self, task: Task, section: RolloutSection | None = None) -> None:
        """Raise PromptTooLong if a question's prompt leaves no room for a response (environments show theirs in play)."""
        if task.environment is None:
            section, length = section or self.section, self.length((self.renderer.start(task.messages),))
            if length >= section.prompt_limit[0]:
                raise too_long(task, length, section)

    def length(self, context: Sequence[Segment]) -> int:
        """Expanded tokens of a context."""
        lengths = (len(one.tokens) if one.author == "model" else len(self.chat.layout(one)) for one in context)
        return sum(lengths)  # a model's words are not expanded, and laying them out at every turn is slow


def too_long(task: Task, length: int, section: RolloutSection) -> PromptTooLong:
    """The error of a prompt that does not fit."""
    limit, key = section.prompt_limit
    return PromptTooLong(f"task {task.id}: the prompt takes {length} tokens and {key} is {limit}.")


def _group(members: Sequence["_Play"], episodes: Mapping[str, Episode]) -> Group:
    found = tuple(episodes.get(play.id) or play.so_far(Status.ABORTED, CANCELLED) for play in members)
    return Group(id=members[0].group_id, task=members[0].task, episodes=found)


class _Play:
    """One episode being played. ``number`` counts the episodes of its task in this attempt, for the random numbers."""

    def __init__(
        self,
        rollout: Rollout,
        task: Task,
        order: tuple[int, int],
        number: int,
        attempt: Attempt,
        sampling: Sampling,
        deadlines: Deadlines,
        section: RolloutSection,
    ) -> None:
        self.rollout, self.task, self.order, self.number = rollout, task, order, number
        self.attempt, self.sampling, self.deadlines, self.section = attempt, sampling, deadlines, section
        occasion = f"@{attempt.occasion}" if attempt.occasion else ""
        self.group_id = f"{attempt.prefix}{occasion}/{attempt.step}/{order[0]}/{task.id}"
        self.id = f"{self.group_id}/{order[1]}"
        self.place = attempt.first + order[0], order[1]  # among all that are played: those before it are served first
        self.turns: list[Turn] = []
        self.info: dict[str, Any] = {}
        self.builder: ThreadBuilder | None = None
        self.opened: set[str] = set()
        self.live: LiveEpisodes | None = None
        self.environment = self.live_environment()

    async def episode(self, live: LiveEpisodes) -> Episode:
        """Play to the end, as one of the live episodes of a rollout; failures become the episode's status."""
        self.live = live
        at = f"task {self.task.id}, turn"
        try:
            status, failure = await self.run_to_the_end()
        except (EnvironmentFailure, SpanMismatch, MediaError, ModelError) as error:
            status, failure = Status.FAILED, f"{at} {len(self.turns)}: {error}"
        except PromptTooLong as error:
            status, failure = Status.ABORTED, str(error)
            self.info["prompt_too_long"] = True
        except EngineError as error:
            status, failure = Status.ABORTED, f"{at} {len(self.turns)}: {error}"
        except BaseException:  # cancelled, or an error of our own
            self.environment.abandon()
            raise
        finally:
            self.release()
        if problem := await self.environment.close():
            self.info["close_failed"] = problem
        return self.so_far(status, printable(failure))

    def so_far(self, status: Status, failure: str) -> Episode:
        threads = self.builder.threads() if self.builder else ()
        turns, info = tuple(self.turns), dict(self.info)
        head = self.builder.head if self.builder and self.task.environment else ()  # a question's is in its task
        return Episode(
            self.id, self.task.id, self.group_id, self.order[1], threads, turns, status, failure, info=info, head=head
        )

    async def run_to_the_end(self) -> tuple[Status, str]:
        """Play; if the environment's worker or server dies, again from the beginning with the same random numbers.

        An episode that kills its workers would use them all up, again at each resume; so it fails with the second loss, and
        later episodes of the same task with the first. A server plays many episodes, so it may be lost more often.
        """
        lost, servers_lost = int(self.task.id in self.rollout.deadly), 0
        while True:
            await self.rollout.available(self.task)
            try:
                return await self.run()
            except EnvironmentLost as error:
                if isinstance(error, ServerLost):
                    servers_lost += 1
                else:
                    lost += 1
                if lost == MOST_LOSSES or servers_lost == MOST_SERVERS_LOST:
                    self.rollout.deadly.add(self.task.id)
                    self.rollout.noted(
                        f"task {self.task.id}: {max(lost, servers_lost)} environment processes were lost while they played "
                        f"it, which may be what ends them, so the episode {self.id} fails and is not rolled again"
                    )
                    raise EnvironmentFailure(
                        f"another environment process was lost while it played this episode's task, which may be what "
                        f"ends them, so it is not rolled again ({error})"
                    ) from error
                self.rollout.rolled_again += 1
                self.environment.abandon()
                self.release()
                self.turns, self.info, self.builder = [], {}, None
                self.environment = self.live_environment()

    def live_environment(self) -> LiveEnvironment:
        rollout = self.rollout
        deadline_s = self.section.environment_deadline_s
        given = rollout.pool, rollout.make_environment, self.task, deadline_s, self.deadlines, self.id
        return LiveEnvironment(*given, order=self.place)

    async def run(self) -> tuple[Status, str]:
        """The loop: observe, respond, step."""
        section = self.section
        head, observation = await self.environment.reset(self.task.environment.seed if self.task.environment else 0)
        self.builder = ThreadBuilder(self.rollout.renderer, head, section.window)
        if observation.category:
            self.info["category"] = observation.category
        written = 0
        while True:
            refuse_strange_media(self.task, observation.messages, self.rollout.chat, self.rollout.engine)
            context = self.builder.observe(observation.messages, observation.after)
            await self.rollout.ready(span.media for segment in context for span in segment.media)
            budget = self.budget(context, written)
            if budget <= 0:
                return Status.TRUNCATED, self.without_room(context)
            most = min(self.sampling.max_new_tokens, observation.max_new_tokens or self.sampling.max_new_tokens)
            response = await self.generate(context, min(budget, most))
            thread, place = self.builder.respond(response.segment)
            written += len(response.segment.tokens)
            cut = response.finish == "length"
            out_of_budget = cut and budget < most
            usage = self.rollout.length(context), len(response.segment.tokens), cut
            result = await self.environment.step(response.segment.text, len(self.turns), usage)
            self.record(observation, response, thread, place, result)
            if result.done or result.truncated or result.observation is None:
                # A question is truncated with its response. An environment that has ended is finished even if its last
                # response was cut: nothing would have followed, so no critic may estimate a future.
                unfinished = result.truncated or (cut and self.task.environment is None)
                return (Status.TRUNCATED if unfinished else Status.FINISHED), ""
            if out_of_budget or len(self.turns) >= section.max_turns:
                if self.attempt.demonstrate:
                    self.info["out_of_turns"] = True
                return Status.TRUNCATED, ""
            observation = result.observation

    def budget(self, context: tuple[Segment, ...], written: int) -> int:
        """Tokens the next response may have: the least of turn, episode and context budgets."""
        section, length = self.section, self.rollout.length(context)
        room = section.max_context_tokens - length
        if length >= section.prompt_limit[0] and not self.turns:
            raise too_long(self.task, length, section)
        counted = length if section.count_observations else written
        left = section.max_episode_tokens - counted if section.max_episode_tokens else room
        return min(self.sampling.max_new_tokens, room, left)

    def without_room(self, context: tuple[Segment, ...]) -> str:
        """Why a further turn cannot be answered, if the environment's observations exceed the context."""
        length, limit = self.rollout.length(context), self.section.max_context_tokens
        if length < limit:
            return ""
        self.info["out_of_context"] = True
        return (
            f"task {self.task.id}, turn {len(self.turns)}: with the environment's observation the context takes "
            f"{length} tokens and {self.section.context_key} is {limit}. Raise it, or set rollout.window; media are "
            "never cut."
        )

    async def generate(self, context: tuple[Segment, ...], budget: int) -> Response:
        """Ask the engine for the next response, or the task or environment for a demonstration."""
        assert self.builder is not None
        turn = len(self.turns)
        if self.attempt.demonstrate:
            shown = self.task.demonstration
            text = shown[turn] if turn < len(shown) else await self.environment.demonstrate(turn)
            version = self.rollout.engine.version
            return Response(self.rollout.chat.respond(text, f"{self.id}/{turn}", version), "stop")
        thread = f"{self.id}#{self.builder.current}"
        if thread not in self.opened:
            self.release()
            self.opened.add(thread)
        sampling = self.sampling
        if budget < sampling.max_new_tokens:
            sampling = replace(sampling, max_new_tokens=budget)
        attempt = self.attempt
        key = response_key(attempt.seed, attempt.step, f"{attempt.prefix}:{self.task.id}", self.number, turn)
        request = Request(thread, context, sampling, (*self.place, turn), key, f"{self.id}/{turn}")
        return await self.rollout.engine.generate(request, self.live)

    def record(self, observation: Observation, response: Response, thread: int, place: int, result: StepResult) -> None:
        parts = dict(result.reward) if isinstance(result.reward, Mapping) else {}
        reward = sum(parts.values()) if isinstance(result.reward, Mapping) else result.reward
        cut = response.finish == "length"
        given = len(self.turns), observation.messages, response.segment, thread, place, reward, result.info, parts, cut
        self.turns.append(Turn(*given, after=observation.after))
        if result.success is not None:
            self.info["success"] = result.success

    def release(self) -> None:
        """Release what the engine holds for this episode's threads."""
        for thread in self.opened:
            self.rollout.engine.release(thread)
        self.opened.clear()
