"""The learner whose ranks are other processes, as the trainer sees it; and its ranks, as the driver sees them: started
by a host, asked together, and ended.

Invariant: after an error that not all ranks share, no rank is left. They wait for each other, so losing one ends all.
Every wait is bounded. ``rank_main`` is the other side.
"""

import os
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass, replace
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sensorium.assembly.models import write_reference
from sensorium.assembly.session import Session
from sensorium.assembly.workers import open_host
from sensorium.cluster.python_process import CLOSE_S, Channel, ProcessHost, error_of, last_words, memory_folder, plain_error
from sensorium.learner.credited_episode import Assessment, Groups, TokenMeasures
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.process_table import ProcessRow, process_state
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import LearnerLost, RecipeError, SensoriumError

GRACE_S = 10.0  # how long the others may take to notice that a rank is lost, before they are ended
IN_USE = re.compile(r"in use|EADDRINUSE", re.IGNORECASE)
WAITED = re.compile(r"Timed out waiting|Connection closed by peer|Watchdog caught collective", re.IGNORECASE)
"""Errors of a rank that waited for another one: not the cause, if that one is silent."""


@dataclass(frozen=True)
class RankSettings:
    """All that a rank must know to open: its number, where the ranks meet ("": where rank 0 is), and what they train."""

    rank: int
    size: int
    meeting: str
    recipe: Recipe
    run: Path
    saved: Path | None
    device: str
    backend: str
    threads: int


@dataclass(frozen=True)
class Call:
    """A method of the rank's learner; or ``meeting``, ``open`` and ``close``."""

    name: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it failed; with the version of the policy afterwards."""

    value: Any = None
    version: int = 0
    error: str = ""
    kind: str = ""


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised. torch's error about a checkpoint contains those of the ranks that failed."""
    failures: Mapping[int, Any] = getattr(error, "failures", None) or {}
    if failures:
        rank, (cause, *_) = min(failures.items())
        return Answer(error=f"{cause!r} on rank {rank}", kind=type(error).__name__)
    plain = plain_error(error)
    return Answer(error=plain["error"], kind=plain["kind"])


class SharedError(Exception):
    """An error that every rank has met alike: they are all as they were. ``error`` is what to raise."""

    def __init__(self, error: SensoriumError) -> None:
        super().__init__(str(error))
        self.error = error


def judged(answers: Mapping[int, Answer], size: int, lost: Sequence[str], asked: str, limit_s: float) -> list[Answer]:
    """The answers of all ranks in order; or the error they add up to. ``lost``: how ranks ended, in words.

    Raises SharedError where all ranks can go on, and another SensoriumError where none can.
    """

    def error(rank: int) -> SensoriumError:
        return error_of(vars(answers[rank]), LearnerLost, f"rank {rank} of the learner")

    errors = {rank: answer for rank, answer in answers.items() if answer.error}
    if lost:
        raise LearnerLost(lost[0])
    if len(errors) == size and len({answer.kind for answer in errors.values()}) == 1:
        raise SharedError(error(0))
    silent = [rank for rank in range(size) if rank not in answers]
    causes = [rank for rank, answer in errors.items() if not (silent and WAITED.search(answer.error))]
    if causes:
        raise error(min(causes))
    if silent:
        key = "start_s" if asked == "open" else "reply_s"
        raise LearnerLost(
            f"of the learner's {size} ranks, {', '.join(map(str, silent))} did not answer '{asked}' within {limit_s:g} s; "
            f"all were ended. Raise cluster.{key} if the model is that slow."
        )
    return [answers[rank] for rank in range(size)]


class RankProcess:
    """One rank: its process and the connection to it."""

    def __init__(self, host: ProcessHost, rank: int, log: Path) -> None:
        variables = {}
        if host.folder is None and sys.platform == "linux":  # on one machine: other interfaces may be down, or firewalled
            variables["GLOO_SOCKET_IFNAME"] = os.environ.get("GLOO_SOCKET_IFNAME", "lo")
        self.process, (frames,) = host.start("sensorium.assembly.rank_main", 1, log, variables)
        self._channel = Channel(frames)
        self.name = f"rank {rank} of the learner (pid {self.process.pid})"

    def ask(self, call: Call, limit_s: float) -> Answer:
        """Its answer; TimeoutError if none comes in time, another OSError or EOFError if it is gone."""
        self._channel.send(call, limit_s)
        answer: Answer = self._channel.receive(limit_s)
        return answer

    def close(self) -> None:
        """Ask it to end."""
        with suppress(EOFError, OSError):
            self._channel.send(Call("close"), CLOSE_S)

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it."""
        self.process.end(after_s)
        with suppress(OSError):
            self._channel.close()


class Ranks:
    """All ranks of a learner, which a host starts. ``exchange`` is a folder for what is too large for a message."""

    def __init__(
        self, host: ProcessHost, settings: Sequence[RankSettings], exchange: Path, start_s: float, reply_s: float
    ) -> None:
        self._host, self._exchange, self._reply_s = host, exchange, reply_s
        self._threads = ThreadPoolExecutor(len(settings), "ranks")
        self._left = False
        starting = [
            self._threads.submit(RankProcess, host, one.rank, exchange / f"rank_{one.rank}.log") for one in settings
        ]
        wait(starting)
        self._ranks = [future.result() for future in starting if future.exception() is None]
        try:
            for future in starting:
                future.result()
            self._open(settings, start_s)
        except BaseException:
            self._end()
            raise

    def _open(self, settings: Sequence[RankSettings], start_s: float) -> None:
        meeting = settings[0].meeting
        if not meeting:
            first = self._ranks[0]
            meeting = first.ask(Call("meeting", (first.process.address,)), start_s).value
        try:
            self._ask_each([Call("open", (replace(one, meeting=meeting),)) for one in settings], start_s)
        except LearnerLost as error:
            if IN_USE.search(str(error)):
                raise LearnerLost(
                    f"the port at which the learner's ranks were to meet, {meeting}, was taken by another process. "
                    "Start the run again: it chooses another one."
                ) from error
            raise

    @property
    def pids(self) -> list[int]:
        return [rank.process.pid for rank in self._ranks]

    def ask(self, name: str, *given: Any) -> Answer:
        """Ask all ranks the same; the answer is that of rank 0. After a LearnerLost no rank is left."""
        return self._ask_each([Call(name, given)] * len(self._ranks), self._reply_s)[0]

    def close(self) -> None:
        """Ask all to end, and end those that do not."""
        for rank in self._ranks:
            rank.close()
        self._end(CLOSE_S)
        shutil.rmtree(self._exchange, ignore_errors=True)

    def _ask_each(self, calls: Sequence[Call], limit_s: float) -> list[Answer]:
        if not self._ranks:
            raise LearnerLost("the ranks of the learner were ended; start the run again with --resume.")
        waiting = {
            self._threads.submit(rank.ask, call, limit_s): number
            for number, (rank, call) in enumerate(zip(self._ranks, calls, strict=True))
        }
        until = time.monotonic() + limit_s
        answers: dict[int, Answer] = {}
        lost: list[str] = []
        late: list[int] = []
        while waiting:
            if lost or any(answer.error for answer in answers.values()):
                until = min(until, time.monotonic() + GRACE_S)
            done, _ = wait(waiting, max(0.0, until - time.monotonic()), FIRST_COMPLETED)
            if not done:
                break
            for future in done:
                number = waiting.pop(future)
                process = self._ranks[number].process
                try:
                    answers[number] = future.result()
                except TimeoutError:
                    late.append(number)
                except (EOFError, OSError):
                    how = f"{self._ranks[number].name} {process.ending()}"
                    lost.append(f"{how}.{last_words(process.log_text())}")
        if self._host.folder is None:  # on this machine
            silent = [self._ranks[number] for number in (*late, *waiting.values())]
            stopped = [rank.name for rank in silent if process_state(rank.process.pid) == "T"]
            lost += [f"{name} is stopped (SIGSTOP): it did not answer in {limit_s:g} s." for name in stopped]
        try:
            return judged(answers, len(self._ranks), lost, calls[0].name, limit_s)
        except SharedError as shared:
            raise shared.error from None
        except SensoriumError:
            self._end()
            raise

    def _end(self, after_s: float = 0.0) -> None:
        for rank in self._ranks:
            rank.end(after_s)
        self._ranks = []
        self._threads.shutdown(wait=False)
        if not self._left:
            self._left = True
            self._host.close()


class GroupCosts:
    """Costs in tokens of the language model; a patch costs its tower's size relative to the model.

    The driver knows layouts and extents already, since it has just played the groups. A rank would have to decode media.
    """

    def __init__(self, policy: Policy) -> None:
        self._chat = policy.chat
        towers = {id(p) for tower in policy.adapter.towers.values() for p in tower.module.parameters()}
        sizes = {id(p): p.numel() for p in policy.model.parameters()}
        in_towers = sum(size for key, size in sizes.items() if key in towers)
        self._patch = in_towers / max(1, sum(sizes.values()) - in_towers)

    def of(self, episodes: Sequence[Episode]) -> float:
        """The cost of a group: what its episodes share is computed once."""
        tokens, seen, media = 0, set(), set()
        for episode in episodes:
            for thread in episode.threads:
                path: tuple[str, ...] = ()
                for segment in thread.segments:
                    path = (*path, segment.key)
                    if path not in seen:
                        seen.add(path)
                        written = segment.author == "model"
                        tokens += len(segment.tokens) if written else len(self._chat.layout(segment))
                        media |= {slot.media for slot in (() if written else self._chat.layout(segment).slots)}
        patches = sum(prod(self._chat.prepared.extent(item).grid) for item in media)
        return tokens + self._patch * patches


class ShardedLearner:
    """Asks the ranks, and keeps the driver's policy up to date. ``exchange`` is a folder that driver and ranks both see.

    The driver holds a whole policy: the one that the engine samples from. After each step it takes the new weights, so it
    writes the checkpoints too. Only the ranks hold optimizer, critic and reference.
    """

    def __init__(self, recipe: Recipe, session: Session, directory: RunDirectory, ranks: Ranks, exchange: Path) -> None:
        self._recipe, self._session, self._directory = recipe, session, directory
        self._ranks, self._exchange = ranks, exchange
        self._costs = GroupCosts(session.policy)
        self._version = 0

    @property
    def version(self) -> int:
        return self._version

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        """The ranks; those that Ray placed may be on another machine."""
        does = "ready, an actor of Ray" if self._recipe.cluster.placement == "ray" else "ready"
        pids = enumerate(self._ranks.pids)
        return tuple(ProcessRow(f"learner rank {i}", pid, does, 0, self._version) for i, pid in pids)

    def begin_rl(self) -> None:
        """Begin RL; the reference of a resumed run is written from the driver's policy."""
        self._catch_up()
        write_reference(self._recipe, self._session.policy, self._directory)
        self._ask("begin_rl")

    def assess(self, groups: Sequence[Sequence[Episode]]) -> Assessment:
        """Positions of the episodes, and log-probs and values of the models, as far as credit needs them."""
        plain = [list(group) for group in groups]
        assessment: Assessment = self._ask("assess", plain, [self._costs.of(group) for group in plain])
        return assessment

    def step(self, groups: Groups, loss: str) -> dict[str, float]:
        """All updates of one step; returns its metrics."""
        plain = [list(group) for group in groups]
        costs = [self._costs.of([sample.episode for sample in group]) for group in plain]
        metrics: dict[str, float] = self._ask("step", plain, loss, costs)
        return metrics

    def token_measures(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        """Entropies and mismatches that the last step found, for those of these episodes that it trained on."""
        measures: dict[str, TokenMeasures] = self._ask("token_measures", tuple(episodes))
        return measures

    def weights(self) -> Mapping[str, Tensor]:
        """The parameters that learn, gathered from the ranks."""
        file = self._room_for_weights() / f"{self._exchange.name}-weights.safetensors"
        self._ask("weights", str(file))
        try:
            return load_file(file)
        finally:
            file.unlink(missing_ok=True)

    def problem(self) -> str:
        """Why the model must not be saved or measured; "" if it may."""
        problem: str = self._ask("problem")
        return problem

    def save(self, folder: Path) -> None:
        """Write the driver's policy as a Hugging Face model; each rank writes its part of the state beside it."""
        self._catch_up()
        self._session.policy.save(folder)
        self._ask("save_state", folder.absolute())

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called, with any number of ranks."""
        self._ask("load", folder.absolute())

    def close(self) -> None:
        """End the ranks."""
        self._ranks.close()

    def _ask(self, name: str, *given: Any) -> Any:
        try:
            answer = self._ranks.ask(name, *given)
        except LearnerLost as error:
            complete = CheckpointFolder(self._directory.checkpoints).complete()
            after = (
                f"The last checkpoint is that of step {complete[-1]}: go on from it with --resume."
                if complete
                else "There is no checkpoint yet (checkpoint.every): start over with --restart."
            )
            raise LearnerLost(f"{error} {after}") from error
        self._version = answer.version
        return answer.value

    def _room_for_weights(self) -> Path:
        """Memory that driver and ranks share, if all are on this machine and it has room for the weights that learn."""
        if self._recipe.cluster.address:
            return self._exchange
        learning = (weight.nbytes for weight in self._session.policy.model.parameters() if weight.requires_grad)
        return memory_folder(sum(learning)) or self._exchange

    def _catch_up(self) -> None:
        """Give the driver's policy the ranks' weights, if it has older ones."""
        if self._session.policy.version != self._version:
            self._session.sample_with(self.weights(), self._version)


def sharded_learner(recipe: Recipe, session: Session, directory: RunDirectory, saved: Path | None) -> ShardedLearner:
    """Start the ranks that the recipe's cluster section asks for, and the learner in front of them.

    Other machines are only sure to see the run directory.
    """
    section = recipe.cluster
    exchange = Path(tempfile.mkdtemp(prefix="sensorium-ranks-", dir=directory.path.absolute() if section.address else None))
    try:
        settings = rank_settings(recipe, directory, saved, "" if section.address else f"file://{exchange}/meeting")
        host = open_host(recipe, "a rank of the learner", LearnerLost, directory.path, float(settings[0].device != "cpu"))
        ranks = Ranks(host, settings, exchange, section.start_s, section.reply_s)
    except BaseException:
        shutil.rmtree(exchange, ignore_errors=True)
        raise
    return ShardedLearner(recipe, session, directory, ranks, exchange)


def rank_settings(recipe: Recipe, directory: RunDirectory, saved: Path | None, meeting: str) -> list[RankSettings]:
    """The settings of each rank. On GPUs each has its own; on a CPU they share the recipe's threads."""
    count, wanted = recipe.cluster.learners, recipe.model.device
    on_ray = recipe.cluster.placement == "ray"
    cuda = torch.cuda.is_available() and wanted in ("auto", "cuda")
    backend = recipe.cluster.backend
    if cuda and not on_ray and torch.cuda.device_count() < count:
        raise RecipeError(
            f"cluster.learners={count} asks for a GPU each, and this machine has {torch.cuda.device_count()}. Ask for "
            "fewer, place them on more machines (cluster.placement: ray), or train on the CPU (model.device: cpu)."
        )
    if cuda and count > 1 and backend == "gloo":
        raise RecipeError(
            "cluster.backend is gloo, and ranks on GPUs end by a segmentation fault when gloo sums their gradients (seen "
            "with torch 2.11). Leave it out: GPUs use nccl. To try ranks out without GPUs set model.device: cpu."
        )
    if backend == "nccl" and not cuda:
        raise RecipeError("cluster.backend is nccl, which needs GPUs; leave it out, or set it to gloo.")
    threads = max(1, (recipe.threads or torch.get_num_threads()) // count)
    return [
        RankSettings(
            rank=rank,
            size=count,
            meeting=meeting,
            recipe=recipe,
            run=directory.path.absolute(),
            saved=None if saved is None else saved.absolute(),
            device="cpu" if not cuda else "cuda:0" if on_ray else f"cuda:{rank}",  # Ray shows an actor its own GPU only
            backend=("nccl" if cuda else "gloo") if backend == "auto" else backend,
            threads=threads,
        )
        for rank in range(count)
    ]
