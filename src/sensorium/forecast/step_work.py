"""What a step has to compute, in tokens and patches: from a recipe's budgets, or from a workload that was measured."""

from dataclasses import dataclass

import numpy as np

from sensorium.recipe.activations import PATCHES
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import RecipeError

PARETO = 1.3  # of the heavy tail that W3 draws its lengths from (bench/workload.py)


@dataclass(frozen=True)
class StepWork:
    """The work of one step. ``response`` is the mean length; ``tail`` the longest over the mean, 1: all alike.

    ``prompt`` counts the tokens of a prompt with its media; ``patches`` those of its pictures, videos and sounds that a
    tower computes. Episodes of several turns are taken as one response with the longest prompt. ``observed`` are the tokens
    of that prompt which are trained in every episode, as observations under ``algorithm.loss_mask: false``.
    """

    prompts: int
    group: int
    prompt: int
    response: float
    tail: float = 1.0
    patches: int = 0
    updates: int = 1
    epochs: int = 1
    tokens_per_microbatch: int = 16384
    observed: int = 0

    @property
    def episodes(self) -> int:
        """Episodes of a step."""
        return self.prompts * self.group

    @property
    def sampled(self) -> float:
        """Tokens that a step writes, on average."""
        return self.episodes * self.response

    @property
    def trained_tokens(self) -> float:
        """Tokens that an epoch of updates computes: prompts once a group, and what was written."""
        return self.prompts * self.prompt + self.sampled

    def lengths(self, groups: int, seed: int) -> np.ndarray:
        """Response lengths of so many groups, a row each: from a heavy tail that is cut at ``tail`` times the mean."""
        if self.tail == 1:
            return np.full((groups, self.group), round(self.response))
        drawn = np.random.default_rng(seed).pareto(PARETO, (groups, self.group)) + 0.2
        for _ in range(20):  # cutting lowers the mean, so scale and cut in turn
            drawn = np.minimum(drawn / drawn.mean(), self.tail)
        return np.maximum(1, drawn * self.response).astype(int)


def work_of(recipe: Recipe, prompt_tokens: int = 0, response_tokens: float = 0) -> StepWork:
    """The work of a recipe's step. What is not given is as much as the recipe's budgets allow.

    With a mean response below the budget, lengths have a heavy tail that the budget cuts.
    """
    batch, rollout = recipe.batch, recipe.rollout
    budget = rollout.max_new_tokens * rollout.max_turns
    if rollout.max_episode_tokens:
        budget = min(budget, rollout.max_episode_tokens)
    budget = min(budget, rollout.max_context_tokens - 1)
    if response_tokens > budget:
        raise RecipeError(
            f"--response-tokens {response_tokens:g} is more than an episode of this recipe may write ({budget}: "
            "rollout.max_new_tokens, max_turns, max_episode_tokens)."
        )
    prompt = prompt_tokens or max(1, rollout.max_context_tokens - budget)
    response = response_tokens or float(budget)
    return StepWork(
        prompts=recipe.selection.kept(batch.prompts_per_step),
        group=batch.group_size,
        prompt=prompt,
        response=response,
        tail=budget / response,
        patches=PATCHES * prompt,
        updates=batch.updates_per_epoch,
        epochs=batch.epochs_per_step,
        tokens_per_microbatch=batch.tokens_per_microbatch,
        observed=prompt if rollout.max_turns > 1 and not recipe.algorithm.loss_mask else 0,
    )
