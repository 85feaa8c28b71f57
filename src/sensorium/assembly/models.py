"""The models of a run: loaded as the recipe says, from the recipe's own path or from what a run has written."""

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sensorium.data.decoder import Decoder, open_decoder
from sensorium.data.media_store import MediaStore
from sensorium.learner.team import ALONE, Team
from sensorium.models.checkpoint_path import CheckpointSource, describe_source
from sensorium.models.load import load_policy
from sensorium.models.policy import FormerSelf, FrozenCopy, Policy, Reference
from sensorium.recipe.schema import LoraSection, Recipe
from sensorium.runs.checkpoint_layout import ADAPTER_FOLDER, refuse_damaged
from sensorium.runs.durable import drafted, write_whole
from sensorium.runs.run_directory import RunDirectory

GIB = 1 << 30
DECODED_SHARE = 0.25  # of the memory for media; the rest is for preprocessed media, which are used again and again


def load_model(
    recipe: Recipe,
    path: str,
    store: MediaStore,
    lora: LoraSection | None = None,
    decoder: Decoder | None = None,
    *,
    verified: bool = False,
    commit: str = "",
) -> Policy:
    """The model at ``path``, in the recipe's family, precision and place; without adapters unless ``lora`` is given.

    ``commit`` of a hub id replaces the recipe's revision. ``decoder`` is made as the recipe's media section says unless
    given. A run's checkpoint is compared with its digests unless it is ``verified``.
    """
    model, media = recipe.model, recipe.media
    if not verified:
        refuse_damaged(Path(path).expanduser())
    if decoder is None:
        cache = media.cache.expanduser() if media.cache is not None else None
        memory_gib = DECODED_SHARE * media.memory_gib
        decoder = open_decoder(store, cache, cache_gib=media.cache_gib, memory_gib=memory_gib, threads=media.threads)
    return load_policy(
        path,
        store=store,
        dtype=model.dtype,
        device=model.device,
        family=model.family,
        revision=commit or (model.revision if path == model.path else ""),
        dequantize=model.dequantize,
        unused_weights=model.unused_weights,
        lora=lora,
        seed=recipe.seed,
        decoder=decoder,
        media_bytes=round((1 - DECODED_SHARE) * media.memory_gib * GIB),
        precision=model.precision,
        template_defaults=model.chat_template_kwargs,
    )


def load_beside(recipe: Recipe, path: str, policy: Policy) -> Policy:
    """Another model of a run, which shares the policy's decoded and preprocessed media."""
    other = load_model(recipe, path, policy.chat.store, decoder=policy.chat.decoder)
    other.chat.share_media(policy.chat)
    return other


def load_trained(
    recipe: Recipe, store: MediaStore, checkpoint: Path | None = None, decoder: Decoder | None = None
) -> Policy:
    """The policy to be trained: as the recipe starts it, or exactly as it was when ``checkpoint`` was saved.

    Under LoRA that is the base of model.path with the checkpoint's adapters, not the rounded sum of both. A hub id is
    loaded at the commit that the run began with, wherever its branch is today.
    """
    lora = recipe.model.lora
    if lora.rank == 0:
        path = recipe.model.path if checkpoint is None else str(checkpoint)
        policy = load_model(recipe, path, store, decoder=decoder, verified=checkpoint is not None)
        groups = policy.groups()
        for parameter in (p for name in recipe.model.freeze for p in groups.get(name, {}).values()):
            parameter.requires_grad_(False)  # features of frozen towers are cached, wherever the learner is
        return policy
    policy = load_model(recipe, recipe.model.path, store, lora, decoder, commit=_commit_of_run(recipe, checkpoint))
    if checkpoint is not None:
        assert policy.adapters is not None
        policy.adapters.load(checkpoint / ADAPTER_FOLDER)
    return policy


def write_source(recipe: Recipe, directory: RunDirectory, sampling: str) -> None:
    """Record in a run which checkpoint it starts from, where that is, and by which rule its family samples frames."""
    source = describe_source(recipe.model.path, recipe.model.revision)
    write_whole(directory.source, replace(source, sampling=sampling).to_json())


def recorded_sampling(directory: RunDirectory) -> str:
    """The rule by which a run sampled the frames of videos without their own rule; empty if it is not recorded."""
    return CheckpointSource.read(directory.source).sampling if directory.source.is_file() else ""


def _commit_of_run(recipe: Recipe, checkpoint: Path | None) -> str:
    """The hub's commit of model.path that the run of a checkpoint began with; empty if it is not recorded."""
    for folder in checkpoint.resolve().parents[:3] if checkpoint is not None else ():
        directory = RunDirectory(folder)
        if directory.source.is_file():
            source = CheckpointSource.read(directory.source)
            return source.revision if source.path == recipe.model.path else ""
    return ""


class WholeModels:
    """Every model is whole, and its only rank is this process."""

    team: Team = ALONE

    def hold(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """Take over a model that was just loaded; parameter groups of ``freeze`` will not learn."""
        return policy

    def copy(self, policy: Policy, freeze: Sequence[str]) -> Policy:
        """A copy of a model that was taken over."""
        return policy.copy()


def write_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> None:
    """Write the policy to disk as RL begins, where a reference is needed and no other file has it."""
    if recipe.algorithm.kl.coef and recipe.warm_start.steps:
        with drafted(directory.reference) as draft:
            (policy if policy.adapters is None else policy.adapters).save(draft)


def begin_reference(recipe: Recipe, policy: Policy, models: WholeModels) -> Reference | None:
    """The policy as RL begins. Without LoRA it is a copy of the model; with it, at most a copy of the adapters."""
    if recipe.algorithm.kl.coef == 0:
        return None
    if policy.adapters is not None:
        return FormerSelf(policy, policy.adapters.snapshot() if recipe.warm_start.steps else None)
    return FrozenCopy(models.copy(policy, list(policy.groups())))


def resume_reference(recipe: Recipe, policy: Policy, directory: RunDirectory, models: WholeModels) -> Reference | None:
    """The reference of a run that had begun RL, from disk."""
    if recipe.algorithm.kl.coef == 0:
        return None
    warm = recipe.warm_start.steps > 0
    if policy.adapters is not None:
        return FormerSelf(policy, policy.adapters.read(directory.reference) if warm else None)
    loaded = load_beside(recipe, str(directory.reference) if warm else recipe.model.path, policy)
    return FrozenCopy(models.hold(loaded, list(loaded.groups())))
