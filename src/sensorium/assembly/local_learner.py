"""The learner of a run in this process, on the same policy that the engine samples from."""

import sys
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from sensorium.assembly.models import WholeModels, begin_reference, load_beside, resume_reference, write_reference
from sensorium.assembly.session import Session
from sensorium.learner.credited_episode import Assessment, CreditedEpisode, Groups, TokenMeasures
from sensorium.learner.critic import Critic
from sensorium.learner.learner import Learner
from sensorium.learner.learner_protocol import RunLearner
from sensorium.learner.saved_state import local_of, read_learner_state, write_learner_state
from sensorium.models.fused import Recomputation
from sensorium.models.policy import Policy, Reference
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.memory_estimate import TowerRoom
from sensorium.recipe.model_shape import read_shape
from sensorium.recipe.plan import GIB, given_recomputation, learners_memory, least_recomputation
from sensorium.recipe.schema import Recipe
from sensorium.runs.checkpoint_layout import LEARNER_STATE, TRAINER_FOLDER
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import CheckpointError, RecipeError


class LocalLearner:
    """The learners of the stages, one after the other, on a policy in this process. ``directory`` holds the reference.

    ``models`` says how models are held, whole or sharded; the policy is held so already.
    """

    def __init__(self, recipe: Recipe, policy: Policy, directory: RunDirectory, models: WholeModels | None = None) -> None:
        self._recipe, self._policy, self._directory = recipe, policy, directory
        self._models = models or WholeModels()
        policy.checkpoint_gradients(*recomputation(recipe, policy))
        self._warming = recipe.warm_start.steps > 0
        self._stage = make_learner(recipe, policy, None, self._models, warming=self._warming)
        self._shortest: CreditedEpisode | None = None
        self._sound: int | None = None

    @property
    def version(self) -> int:
        return self._policy.version

    def begin_rl(self) -> None:
        """Begin RL with a new optimizer and critic, and the present policy as the KL's reference."""
        if self._policy.sharding is None:  # a rank holds no whole model to write
            write_reference(self._recipe, self._policy, self._directory)
        reference = begin_reference(self._recipe, self._policy, self._models)
        if self._warming:
            self._warming = False
            self._stage = make_learner(self._recipe, self._policy, reference, self._models, warming=False)
        self._stage.reference = reference

    def assess(self, groups: Sequence[Sequence[Episode]], costs: Sequence[float] | None = None) -> Assessment:
        """Positions of the episodes, and log-probs and values of the models, as far as credit needs them."""
        return self._stage.assess(groups, costs)

    def step(self, groups: Groups, loss: str, costs: Sequence[float] | None = None) -> dict[str, float]:
        """All updates of one step; returns its metrics. ``costs`` divide the groups among ranks."""
        metrics = self._stage.step(groups, loss, costs)
        trained = [sample for group in groups for sample in group if sample.episode.sampled_tokens]
        self._shortest = min(trained, key=_length)
        return metrics

    def token_measures(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        """Entropies and mismatches that the last step found, for those of these episodes that it trained on."""
        return self._stage.token_measures(episodes)

    def weights(self) -> Mapping[str, Tensor]:
        """The live parameters that learn, by name."""
        return self._stage.weights()

    def problem(self) -> str:
        """A parameter that is not finite, or log-probs that are not, for the shortest episode of the last step."""
        if self._sound == self.version:
            return ""
        held = {name: local_of(parameter) for name, parameter in self._policy.model.named_parameters()}
        named = {name: local for name, local in held.items() if local.numel()}  # a rank may have no row of a small one
        largest = torch.stack([norm.double() for norm in torch._foreach_norm(list(named.values()), torch.inf)])
        wrong = {name for name, fine in zip(named, largest.isfinite().tolist(), strict=True) if not fine}
        anywhere = self._models.team.largest(*(name in wrong for name in held))
        bad = [name for name, found in zip(held, anywhere, strict=True) if found]
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
        self.save_state(folder)

    def save_state(self, folder: Path) -> None:
        """Write the learner's state alone. All ranks of a team call it together."""
        (folder / TRAINER_FOLDER).mkdir(parents=True, exist_ok=True)
        state = {"warming": self._warming, "version": self.version, "learner": self._stage.state_dict()}
        write_learner_state(state, folder / TRAINER_FOLDER, self._models.team)

    def load(self, folder: Path) -> None:
        """Go on exactly where ``save`` was called."""
        if not (folder / TRAINER_FOLDER / LEARNER_STATE).exists():
            raise CheckpointError(
                f"'{folder}' has no {TRAINER_FOLDER}/{LEARNER_STATE}: an older version wrote it. Continue with that "
                "version, or start a new run from its weights (model.path)."
            )
        state = read_learner_state(folder / TRAINER_FOLDER, self._models.team)
        self._warming, self._policy.version = state["warming"], state["version"]
        begun = not self._warming
        reference = resume_reference(self._recipe, self._policy, self._directory, self._models) if begun else None
        self._stage = make_learner(self._recipe, self._policy, reference, self._models, warming=self._warming)
        self._stage.load_state_dict(state["learner"])

    def close(self) -> None:
        """Nothing to release but memory."""


def local_learner(recipe: Recipe, session: Session, directory: RunDirectory, saved: Path | None) -> RunLearner:
    """The learner on the policy that the session's engine samples from; it was loaded from ``saved`` already."""
    return LocalLearner(recipe, session.policy, directory)


LearnerMaker = Callable[[Recipe, Session, RunDirectory, Path | None], RunLearner]
"""Makes the learner of a run, given its session, its directory and the checkpoint that it resumes, if any."""


def make_learner(
    recipe: Recipe, policy: Policy, reference: Reference | None, models: WholeModels, *, warming: bool
) -> Learner:
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
        critic=None if warming else make_critic(recipe, policy, models),
        seed=recipe.seed,
        stop_tokens=warming or not recipe.rollout.ignore_stop_tokens,
        team=models.team,
    )


def make_critic(recipe: Recipe, policy: Policy, models: WholeModels) -> Critic | None:
    """The critic as RL begins: on the policy's trunk, on a copy of it, or on another checkpoint of the family."""
    if not estimator_traits(recipe.algorithm.advantage.name).critic:
        return None
    section = recipe.algorithm.critic
    trunk = policy
    if section.trunk == "own":
        trunk = load_beside(recipe, section.path, policy) if section.path else models.copy(policy, section.freeze)
        own, other = (
            model.model.config.model_type if model.general is not None else model.family for model in (policy, trunk)
        )  # families of the general path are many
        if own != other:
            raise RecipeError(
                f"algorithm.critic.path '{section.path}' is of family {other} and the policy of {own}: a critic reads the "
                "policy's own tokens. Use a checkpoint of the same family, or leave path empty."
            )
        if section.path:
            trunk = models.hold(trunk, section.freeze)
        trunk.checkpoint_gradients(recomputation(recipe, trunk)[0])
    return Critic(trunk, section, total_steps=recipe.steps, team=models.team)


def recomputation(recipe: Recipe, policy: Policy) -> tuple[Recomputation, TowerRoom | None]:
    """What the learner recomputes in the backward pass, and the room of its vision tower on a GPU.

    With ``auto``, the choice is printed.
    """
    how, device = recipe.model.gradient_checkpointing, policy.device
    if policy.general is not None:  # whose sizes are not forecast by layers: on a GPU recompute where it can
        return (device.type == "cuda" and policy.general.recomputes) if how == "auto" else how, None
    shape = read_shape(recipe.model.path, recipe.model.revision) if device.type == "cuda" else None
    if shape is None:
        return how != "auto" and how, None
    memory = torch.cuda.get_device_properties(device).total_memory
    if how != "auto":
        return how, given_recomputation(recipe, shape, memory, how).room
    chosen = least_recomputation(recipe, shape, memory)
    inner = "MLPs and delta rules" if shape.delta else "MLPs"
    named = {False: "nothing", "selective": inner, True: "whole layers"}[chosen.way]
    room = chosen.room
    tower = f", and the vision tower may keep {room.bytes / GIB:.1f} GiB" if room and room.kept else ""
    print(
        f"model.gradient_checkpointing=auto: the backward pass recomputes {named}; forecast "
        f"{chosen.forecast / GIB:.1f} GiB of {learners_memory(recipe, memory) / GIB:.1f}{tower}.",
        file=sys.stderr,
    )
    return chosen.way, room


def _length(sample: CreditedEpisode) -> int:
    return sum(len(segment.tokens) for thread in sample.episode.threads for segment in thread.segments)
