"""A rank of a sharded learner: joins the others, holds its part of the models, and does what the driver asks."""

import re
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from sensorium.assembly.determinism import settle
from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import WholeModels, load_trained
from sensorium.assembly.session import open_store
from sensorium.cluster import channel
from sensorium.cluster.channel import plain_error
from sensorium.cluster.ray_host import refuse_other_versions as refuse_other
from sensorium.cluster.ray_host import versions
from sensorium.learner.rank_team import RankTeam
from sensorium.learner.saved_state import whole_of
from sensorium.learner.sharding import copy_weights, shard_policy
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import LearnerLost, SensoriumError


@dataclass(frozen=True)
class RankSettings:
    """All that a rank must know to open: which it is, where the ranks meet, and what they train."""

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
    """A method of the rank's learner, or ``open`` and ``close``."""

    name: str
    given: tuple[Any, ...] = ()


@dataclass(frozen=True)
class Answer:
    """What a call returned, or why it failed; with the version of the policy afterwards."""

    value: Any = None
    version: int = 0
    error: str = ""
    kind: str = ""
    versions: dict[str, str] = field(default_factory=dict)


def failed(error: BaseException) -> Answer:
    """The answer of a call that raised. torch's error about a checkpoint holds those of the ranks that failed."""
    failures: Mapping[int, Any] = getattr(error, "failures", None) or {}
    if failures:
        rank, (cause, *_) = min(failures.items())
        return Answer(error=f"{cause!r} on rank {rank}", kind=type(error).__name__)
    plain = plain_error(error)
    return Answer(error=plain["error"], kind=plain["kind"])


def error_of(answer: Answer, rank: int) -> SensoriumError:
    """The error behind an answer; one that is not of ours is the rank's own."""
    return channel.error_of({"kind": answer.kind, "error": answer.error}, LearnerLost, f"rank {rank} of the learner")


WAITED = re.compile(r"Timed out waiting|Connection closed by peer|Watchdog caught collective", re.IGNORECASE)
"""What a rank says that waited for another one: no cause, if that one is silent."""


class SharedError(Exception):
    """An error that every rank has met alike: they are all as they were. ``error`` is what to raise."""

    def __init__(self, error: SensoriumError) -> None:
        super().__init__(str(error))
        self.error = error


def judged(answers: Mapping[int, Answer], size: int, lost: Sequence[str], asked: str, limit_s: float) -> list[Answer]:
    """The answers of all ranks in order; or the error they add up to. ``lost``: how ranks ended, in words.

    Raises SharedError where all ranks can go on, and an error of ours where none can.
    """
    errors = {rank: answer for rank, answer in answers.items() if answer.error}
    if lost:
        raise LearnerLost(lost[0])
    if len(errors) == size and len({answer.kind for answer in errors.values()}) == 1:
        raise SharedError(error_of(errors[0], 0))
    silent = [rank for rank in range(size) if rank not in answers]
    causes = {rank: answer for rank, answer in errors.items() if not (silent and WAITED.search(answer.error))}
    if causes:
        rank, answer = min(causes.items())
        raise error_of(answer, rank)
    if silent:
        key = "start_s" if asked == "open" else "reply_s"
        raise LearnerLost(
            f"of the learner's {size} ranks, {', '.join(map(str, silent))} did not answer '{asked}' within {limit_s:g} s; "
            f"all were ended. Raise cluster.{key} if the model is that slow."
        )
    return [answers[rank] for rank in range(size)]


def refuse_other_versions(answers: Sequence[Answer]) -> None:
    """Refuse ranks that run another version of Python, torch or of this package than the driver."""
    for rank, answer in enumerate(answers):
        refuse_other(answer.versions, f"rank {rank} of the learner", LearnerLost)


class ShardedModels(WholeModels):
    """Every model is spread over the ranks of a team, by the recipe's cluster section."""

    team: RankTeam

    def __init__(self, recipe: Recipe, team: RankTeam, saved: Path | None) -> None:
        self._recipe, self.team, self._saved = recipe, team, saved

    def hold(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """Spread a model in place."""
        shard_policy(policy, self.team, freeze, offload=self._recipe.cluster.offload)
        return policy

    def copy(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """A model with the weights of one that is spread: loaded again, since a spread one cannot be copied."""
        chat = policy.chat
        copy = load_trained(self._recipe, chat.store, self._saved, chat.decoder)
        copy.chat.share_media(chat)
        copy.version = policy.version
        self.hold(copy, freeze)
        copy_weights(policy.model, copy.model)
        return copy


# All ranks are asked the same at the same time. What only one of them must give, rank 0 gives.


class Rank:
    """The state of a rank's process: nothing before ``open``."""

    def __init__(self) -> None:
        self._learner: LocalLearner | None = None
        self._rank = 0

    def answer(self, call: Call) -> Answer:
        """Do what is asked. An error is an answer too: the driver decides what it means."""
        try:
            if call.name == "open":
                self._open(*call.given)
                return Answer(versions=versions())
            assert self._learner is not None, "a rank is opened first"
            own = getattr(self, f"_{call.name}", None)
            value = own(*call.given) if own is not None else getattr(self._learner, call.name)(*call.given)
            return Answer(value if self._rank == 0 else None, self._learner.version)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # torch.distributed.checkpoint's errors are no Exception
            return failed(error)

    def close(self) -> None:
        """Leave the others."""
        if dist.is_initialized():
            dist.destroy_process_group()

    def _open(self, settings: RankSettings) -> None:
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nobody writes to it
        recipe, self._rank = settings.recipe, settings.rank
        settle(recipe)
        torch.set_num_threads(settings.threads)
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        recipe = _loaded_here(recipe)
        dist.init_process_group(
            settings.backend,
            init_method=settings.meeting,
            rank=settings.rank,
            world_size=settings.size,
            timeout=timedelta(seconds=recipe.cluster.reply_s),
        )
        team = RankTeam(device, recipe.cluster.sequence_parallel)
        directory = RunDirectory(settings.run)
        models = ShardedModels(recipe, team, settings.saved)
        policy = load_trained(recipe, open_store(recipe, directory.media), settings.saved)
        models.hold(policy, recipe.model.freeze)
        self._learner = LocalLearner(recipe, policy, directory, models)

    def _weights(self, file: str) -> None:
        """Write the whole weights that learn, gathered one by one, from rank 0."""
        assert self._learner is not None
        found: dict[str, Any] = {}
        for name, weight in self._learner.weights().items():
            whole = whole_of(weight)
            if self._rank == 0:
                found[name] = whole.cpu().contiguous()
        if self._rank == 0:
            try:
                save_file(found, file)
            except Exception as error:
                raise LearnerLost(
                    f"the weights cannot be handed to the driver by '{file}': {error}. Make room there, or set TMPDIR to a "
                    "disk that has some."
                ) from error

    def _save_state(self, folder: Path) -> None:
        assert self._learner is not None
        self._learner.save_state(folder)


def _loaded_here(recipe: Recipe) -> Recipe:
    """The recipe with models loaded into this machine's memory: a GPU holds only its part.

    A model that is made on the spot is made now: among ranks, transformers lets only the first one write files.
    """
    path = recipe.model.path
    place = find_checkpoint(path) if path.startswith("tiny:") else path
    return recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu", "path": place})})
