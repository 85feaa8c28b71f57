"""A rank of a sharded learner: ``python -m sensorium.assembly.rank_main FD`` joins the others and serves the driver.

It holds its part of the models. All ranks are asked the same at the same time; what only one of them must give, rank 0
gives.
"""

import os
import select
import socket
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from sensorium.assembly.determinism import make_deterministic
from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import WholeModels, load_trained
from sensorium.assembly.playing import open_store
from sensorium.assembly.ranks import Answer, Call, RankSettings, failed
from sensorium.cluster.python_process import Channel, parent_sockets
from sensorium.learner.saved_state import whole_of
from sensorium.learner.sharding import RankTeam, copy_weights, shard_policy
from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import LearnerLost


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


class Rank:
    """The state of a rank's process: nothing before ``open``."""

    def __init__(self) -> None:
        self._learner: LocalLearner | None = None
        self._rank = 0

    def answer(self, call: Call) -> Answer:
        """Do what is asked. An error is an answer too: the driver decides what it means."""
        try:
            if call.name == "meeting":
                with socket.socket() as probe:
                    probe.bind(("", 0))
                    return Answer(f"tcp://{call.given[0]}:{probe.getsockname()[1]}")
            if call.name == "open":
                self._open(*call.given)
                return Answer()
            assert self._learner is not None, "a rank is opened first"
            own = self._weights if call.name == "weights" else getattr(self._learner, call.name)
            value = own(*call.given)
            return Answer(value if self._rank == 0 else None, self._learner.version)
        except (SystemExit, KeyboardInterrupt):
            raise
        except BaseException as error:  # torch.distributed.checkpoint's errors are no Exception
            return failed(error)

    def _open(self, settings: RankSettings) -> None:
        warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")  # nobody writes to it
        recipe, self._rank = settings.recipe, settings.rank
        make_deterministic(recipe)
        torch.set_num_threads(settings.threads)
        device = torch.device(settings.device)
        if device.type == "cuda":
            torch.cuda.set_device(device)
        # Models are loaded into this machine's memory: a GPU holds only its part. One that is made on the spot is made now:
        # among ranks, transformers lets only the first one write files.
        path = recipe.model.path
        path = find_checkpoint(path) if path.startswith("tiny:") else path
        recipe = recipe.model_copy(update={"model": recipe.model.model_copy(update={"device": "cpu", "path": path})})
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
                    f"the weights cannot be passed to the driver by '{file}': {error}. Make room there, or set TMPDIR to a "
                    "disk that has some."
                ) from error


def serve(channel: Channel) -> None:
    """Answer the driver until it closes."""
    rank = Rank()
    while (call := channel.receive()).name != "close":
        channel.send(rank.answer(call))
    if dist.is_initialized():
        dist.destroy_process_group()


def end_with_the_driver(fileno: int) -> None:
    """A rank may be waiting for others that are gone too: so it watches whether the driver hangs up."""
    poll = select.poll()
    poll.register(fileno, select.POLLHUP | getattr(select, "POLLRDHUP", 0))
    poll.poll()
    os._exit(1)


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    (connection,) = parent_sockets()
    threading.Thread(target=end_with_the_driver, args=(connection.fileno(),), daemon=True).start()
    with suppress(EOFError, OSError):
        serve(Channel(connection))
    os._exit(0)  # nothing is left to be saved, and unloading a large model takes its time


if __name__ == "__main__":
    main()
