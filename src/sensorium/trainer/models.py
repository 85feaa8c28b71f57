"""The models of a run: loaded as the recipe holds them, from the recipe's own path or from what a run has written."""

from pathlib import Path

from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.lora import FOLDER
from sensorium.models.policy import Policy
from sensorium.recipe.schema import LoraSection, Recipe


def load_model(
    recipe: Recipe, path: str, store: MediaStore, lora: LoraSection | None = None, decoder: Decoder | None = None
) -> Policy:
    """The model at ``path``, in the recipe's family, precision and place; without adapters unless some are asked for.

    Models of one run share a ``decoder``, so that a clip is decoded once for all of them.
    """
    model = recipe.model
    return load_policy(
        path,
        store=store,
        dtype=model.dtype,
        device=model.device,
        family=model.family,
        lora=lora,
        seed=recipe.seed,
        decoder=decoder,
    )


def load_trained(recipe: Recipe, store: MediaStore, checkpoint: Path | None = None) -> Policy:
    """The policy to be trained: as the recipe starts it, or exactly as it was when ``checkpoint`` was saved.

    Under LoRA that is the base of model.path with the checkpoint's adapters, not the rounded sum of both.
    """
    lora = recipe.model.lora
    if lora.rank == 0:
        return load_model(recipe, recipe.model.path if checkpoint is None else str(checkpoint), store)
    policy = load_model(recipe, recipe.model.path, store, lora)
    if checkpoint is not None:
        assert policy.adapters is not None
        policy.adapters.load(checkpoint / FOLDER)
    return policy
