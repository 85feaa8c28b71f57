"""A rank of a sharded learner: joins the others, holds its part of the models, and does what the driver asks.

All ranks are asked the same at the same time. What only one of them must give, rank 0 gives.
"""

import warnings
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from safetensors.torch import save_file

from sensorium.assembly.determinism import settle
from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import load_trained
from sensorium.assembly.session import open_store
from sensorium.cluster.messages import Answer, Call, RankSettings, failed
from sensorium.cluster.sharded_models import ShardedModels
from sensorium.learner.sharded.rank_team import RankTeam
from sensorium.learner.shards import whole_of
from sensorium.models.checkpoint_place import find_checkpoint
from sensorium.recipe.schema import Recipe
from sensorium.record.run_directory import RunDirectory
from sensorium.vocabulary.errors import LearnerLost
from sensorium.workers.versions import versions


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
