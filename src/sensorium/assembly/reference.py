"""The reference of the KL term: the model as it was when RL began, frozen."""

from sensorium.assembly.models import load_beside
from sensorium.assembly.whole_models import WholeModels
from sensorium.models.policy import Policy
from sensorium.models.reference import FormerSelf, FrozenCopy, Reference
from sensorium.recipe.schema import Recipe
from sensorium.record.durable import drafted
from sensorium.record.run_directory import RunDirectory


def write_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> None:
    """Write the policy to disk as RL begins, where a reference is asked for and no other file holds it."""
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
