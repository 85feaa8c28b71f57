"""The learner of a run, in this process: on the very policy that the engine samples from."""

import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sensorium.assembly.models import load_beside
from sensorium.assembly.reference import begin_reference, resume_reference
from sensorium.assembly.session import Session
from sensorium.learner.assessment import Assessment
from sensorium.learner.credited_episode import CreditedEpisode, Groups
from sensorium.learner.critic import Critic
from sensorium.learner.learner import Learner
from sensorium.learner.plain_state import load_state, save_state
from sensorium.learner.protocol import RunLearner
from sensorium.models.fused import Recomputation
from sensorium.models.policy import Policy
from sensorium.models.reference import Reference
from sensorium.recipe.recomputation import least_recomputation
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import read_shape
from sensorium.recipe.traits import estimator_traits
from sensorium.record.run_directory import RunDirectory
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import CheckpointError, RecipeError

STATE = Path("trainer") / "learner.pt"


class LocalLearner:
    """One learner after another, stage by stage, on a policy in this process. ``directory`` holds the reference."""

    def __init__(self, recipe: Recipe, policy: Policy, directory: RunDirectory) -> None:
        self._recipe, self._policy, self._directory = recipe, policy, directory
        policy.checkpoint_gradients(recomputation(recipe, policy.device))
        self._warming = recipe.warm_start.steps > 0
        self._stage = make_learner(recipe, policy, None, warming=self._warming)
        self._shortest: CreditedEpisode | None = None
        self._sound: int | None = None

    @property
    def version(self) -> int:
        """How many updates the policy has had."""
        return self._policy.version

    def begin_rl(self) -> None:
        """RL begins: with an optimizer and a critic of its own, and the policy as it is now for the KL's reference."""
        reference = begin_reference(self._recipe, self._policy, self._directory)
        if self._warming:
            self._warming = False
            self._stage = make_learner(self._recipe, self._policy, reference, warming=False)
        self._stage.reference = reference

    def assess(self, groups: Sequence[Sequence[Episode]]) -> Assessment:
        """Positions of the episodes, and what the models think of them, as far as credit needs it."""
        return self._stage.assess(groups)

    def step(self, groups: Groups, loss: str) -> dict[str, float]:
        """All updates of one step; returns its metrics."""
        metrics = self._stage.step(groups, loss)
        trained = [sample for group in groups for sample in group if sample.episode.sampled_tokens]
        self._shortest = min(trained, key=_length)
        return metrics

    def weights(self) -> Mapping[str, Tensor]:
        """The live parameters that learn, by name."""
        return self._stage.weights()

    def problem(self) -> str:
        """A parameter that is not finite, or log-probs that are not, for the shortest episode of the last step."""
        if self._sound == self.version:
            return ""
        named = dict(self._policy.model.named_parameters())
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(list(named.values()), torch.inf)])
        bad = [name for name, fine in zip(named, largest.isfinite().tolist(), strict=True) if not fine]
        if bad:
            return f"holds numbers that are not finite, in {len(bad)} parameters (the first is {bad[0]})"
        if self._shortest is None:
            return ""
        ((found,),) = self._stage.logprobs([[self._shortest]])
        if all(bool(logprobs_T.isfinite().all()) for logprobs_T in found):
            self._sound = self.version
            return ""
        return "gives log-probs that are not finite"

    def save(self, folder: Path) -> None:
        """Write the policy as a Hugging Face model, and the learner's state beside it."""
        self._policy.save(folder)
        (folder / STATE).parent.mkdir(exist_ok=True)
        state = {"warming": self._warming, "version": self.version, "learner": self._stage.state_dict()}
        save_state(state, folder / STATE)

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called."""
        if not (folder / STATE).exists():
            raise CheckpointError(
                f"'{folder}' has no {STATE}: an older version wrote it. Go on with that version, or start a new run from "
                "its weights (model.path)."
            )
        state = load_state(folder / STATE)
        self._warming, self._policy.version = state["warming"], state["version"]
        reference = None if self._warming else resume_reference(self._recipe, self._policy, self._directory)
        self._stage = make_learner(self._recipe, self._policy, reference, warming=self._warming)
        self._stage.load_state_dict(state["learner"])

    def close(self) -> None:
        """Nothing is held but memory."""


def local_learner(recipe: Recipe, session: Session, directory: RunDirectory, saved: Path | None) -> RunLearner:
    """The learner on the very policy that the session's engine samples from; it was loaded from ``saved`` already."""
    return LocalLearner(recipe, session.policy, directory)


LearnerMaker = Callable[[Recipe, Session, RunDirectory, Path | None], RunLearner]
"""Makes the learner of a run, given its session, its directory and the checkpoint that it goes on from, if any."""


def make_learner(recipe: Recipe, policy: Policy, reference: Reference | None, *, warming: bool) -> Learner:
    """The learner of a stage: the supervised warm start's, or RL's with its critic where the estimator needs one.

    RL trains the distribution that is sampled. Demonstrations end with a stop token even where RL ignores them.
    """
    return Learner(
        policy,
        optimizer=recipe.warm_start.optimizer if warming else recipe.optimizer,
        algorithm=recipe.algorithm,
        batch=recipe.batch,
        temperature=recipe.rollout.temperature,
        total_steps=recipe.warm_start.steps if warming else recipe.steps,
        freeze=recipe.model.freeze,
        reference=reference,
        critic=None if warming else make_critic(recipe, policy),
        seed=recipe.seed,
        stop_tokens=warming or not recipe.rollout.ignore_stop_tokens,
    )


def make_critic(recipe: Recipe, policy: Policy) -> Critic | None:
    """The critic as RL begins: on the policy's trunk, on a copy of it, or on another checkpoint of the family."""
    if not estimator_traits(recipe.algorithm.advantage.name).critic:
        return None
    section = recipe.algorithm.critic
    trunk = policy
    if section.trunk == "own":
        trunk = load_beside(recipe, section.path, policy) if section.path else policy.copy()
        if trunk.family != policy.family:
            raise RecipeError(
                f"algorithm.critic.path '{section.path}' is of family {trunk.family} and the policy of {policy.family}: a "
                "critic reads the policy's own tokens. Use a checkpoint of the same family, or leave path empty."
            )
        trunk.checkpoint_gradients(recomputation(recipe, trunk.device))
    return Critic(trunk, section, total_steps=recipe.steps)


def recomputation(recipe: Recipe, device: torch.device) -> Recomputation:
    """What the learner computes again in the backward pass; where that is left to the GPU, it is said what was chosen."""
    how = recipe.model.gradient_checkpointing
    if how != "auto":
        return how
    shape = read_shape(recipe.model.path, recipe.model.revision) if device.type == "cuda" else None
    if shape is None:
        return False
    memory = torch.cuda.get_device_properties(device).total_memory
    way, forecast = least_recomputation(recipe, shape, memory)
    named = {False: "nothing", "selective": "MLPs", True: "whole layers"}[way]
    print(
        f"model.gradient_checkpointing=auto: the backward pass recomputes {named}; forecast {forecast / 2**30:.1f} GiB of "
        f"{memory / 2**30:.1f}.",
        file=sys.stderr,
    )
    return way


def _length(sample: CreditedEpisode) -> int:
    return sum(len(segment.tokens) for thread in sample.episode.threads for segment in thread.segments)
