"""The learner of a run as the trainer sees it, when its ranks are other processes."""

import shutil
import tempfile
from collections.abc import Mapping, Sequence
from math import prod
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from sensorium.assembly.models import write_reference
from sensorium.assembly.ranks import Ranks, RankSettings
from sensorium.assembly.session import Session
from sensorium.assembly.workers import open_host
from sensorium.cluster.temporary_folder import memory_folder
from sensorium.learner.credited_episode import Assessment, Groups
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.process_table import ProcessRow
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import LearnerLost, RecipeError


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
