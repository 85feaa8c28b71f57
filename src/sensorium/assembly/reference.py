"""The reference of the KL term: the model as it was when RL began, frozen."""

from sensorium.assembly.models import load_beside
from sensorium.models.policy import Policy
from sensorium.models.reference import FormerSelf, FrozenCopy, Reference
from sensorium.recipe.schema import Recipe
from sensorium.record.durable import drafted
from sensorium.record.run_directory import RunDirectory


def begin_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> Reference | None:
    """The policy as RL begins. After a warm start it is written to disk, since no other file holds it.

    Without LoRA it is a copy of the model; with it, at most a copy of the adapters.
    """
    if recipe.algorithm.kl.coef == 0:
        return None
    warm = recipe.warm_start.steps > 0
    if warm:
        with drafted(directory.reference) as draft:
            (policy if policy.adapters is None else policy.adapters).save(draft)
    if policy.adapters is not None:
        return FormerSelf(policy, policy.adapters.snapshot() if warm else None)
    return FrozenCopy(policy.frozen_copy())


def resume_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> Reference | None:
    """The reference of a run that had begun RL, from disk."""
    if recipe.algorithm.kl.coef == 0:
        return None
    warm = recipe.warm_start.steps > 0
    if policy.adapters is not None:
        return FormerSelf(policy, policy.adapters.read(directory.reference) if warm else None)
    return FrozenCopy(load_beside(recipe, str(directory.reference) if warm else recipe.model.path, policy))
