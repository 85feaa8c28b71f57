"""The reference policy of the KL term: the model as it was when RL began, frozen."""

import os
import shutil

from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.report.run_directory import RunDirectory


def begin_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> Policy | None:
    """Copy the policy as RL begins. After a warm start the copy is written to disk, since no other file holds it."""
    if recipe.algorithm.kl.coef == 0:
        return None
    if recipe.warm_start.steps:
        draft = directory.path / ".reference"
        shutil.rmtree(draft, ignore_errors=True)
        policy.save(draft)
        shutil.rmtree(directory.reference, ignore_errors=True)
        os.replace(draft, directory.reference)
    return policy.frozen_copy()


def resume_reference(recipe: Recipe, policy: Policy, directory: RunDirectory) -> Policy | None:
    """Load the reference of a run that had begun RL."""
    if recipe.algorithm.kl.coef == 0:
        return None
    path = str(directory.reference) if recipe.warm_start.steps else recipe.model.path
    model = recipe.model
    return load_policy(path, store=policy.store, dtype=model.dtype, device=model.device, family=model.family)
