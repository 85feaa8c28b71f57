"""AdamW that updates weights as in float32, whatever dtype they are stored in.

Float32 parameters are updated in place. A bfloat16 one is its float32 master, rounded: beside it stands the remainder, 16
bits, so the master is held exactly without a copy (``masters``). Gradients are summed over micro-batches in float32. (At a
learning rate of 1e-6 a bfloat16 weight alone would not move at all.) ``optimizer.moments: bfloat16`` halves the moments,
``8-bit`` quarters them (``eight_bits``).
"""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from math import cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sensorium.learner.adam import MOMENTS, ParameterState, Rates, StepPlan
from sensorium.learner.shards import is_sharded, local_of, part_for, spread_like
from sensorium.learner.team import ALONE, Team
from sensorium.recipe.algorithm_sections import OptimizerSection
from sensorium.recipe.computing_checks import EIGHT_BITS_APART
from sensorium.vocabulary.errors import CheckpointError, RecipeError, nearest


def rate_share(section: OptimizerSection, step: int, total: int) -> float:
    """The share of the learning rate at ``step`` (from 0): linear warm-up, then constant, linear or cosine to the end."""
    if step < section.warmup_steps:
        return (step + 1) / (section.warmup_steps + 1)
    if section.schedule == "constant":
        return 1.0
    progress = min(1.0, (step - section.warmup_steps) / max(1, total - section.warmup_steps))
    left = 1 - progress if section.schedule == "linear" else 0.5 * (1 + cos(pi * progress))
    return section.final_lr_share + (1 - section.final_lr_share) * left


class Optimizer:
    """Trainable parameters by group, and their moments; those of ``freeze`` groups do not learn.

    ``adapted``: the parameters are adapters; their groups cannot be frozen, and no other has a rate.
    """

    def __init__(
        self,
        groups: Mapping[str, Mapping[str, Parameter]],
        section: OptimizerSection,
        freeze: Sequence[str] = (),
        *,
        where: str = "model",
        adapted: bool = False,
        team: Team = ALONE,
    ) -> None:
        _check_names(freeze, list(groups), f"{where}.freeze")
        _check_names(section.group_lr, list(groups), "optimizer.group_lr")
        if adapted:
            _check_adapted(groups, freeze, section)
        self._section, self._team = section, team
        self._tensors: dict[str, ParameterState] = {}
        self._rates: dict[str, float] = {}
        self._plan: StepPlan | None = None
        for group, named in groups.items():
            if group in freeze:
                continue
            for name, parameter in named.items():
                parameter.requires_grad_()
                if section.moments == "8-bit" and is_sharded(parameter):
                    raise RecipeError(EIGHT_BITS_APART)
                self._tensors[name] = ParameterState(parameter, len(self._tensors), MOMENTS[section.moments])
                self._rates[name] = section.group_lr.get(group, section.lr)
        if not self._tensors:
            raise RecipeError(f"{where}.freeze {list(freeze)} leaves nothing to train; freeze fewer groups.")

    def weights(self) -> dict[str, Tensor]:
        """The parameters that learn, as the model holds them."""
        return {name: tensor.parameter.detach() for name, tensor in self._tensors.items()}

    @contextmanager
    def gathering(self) -> Iterator[None]:
        """Inside, bfloat16 gradients are added to float32 sums as soon as a backward finds them, and freed."""
        handles = [
            tensor.parameter.register_post_accumulate_grad_hook(partial(_gather, tensor))
            for tensor in self._tensors.values()
            if tensor.remainder is not None
        ]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def grad_norm(self) -> Tensor:
        """The norm of all gradients together. A parameter without gradient has gradient zero: its moments still count."""
        for tensor in self._tensors.values():
            if tensor.gradient is None:
                tensor.gradient = torch.zeros_like(tensor.parameter, dtype=torch.float32)
        shards: list[Tensor] = []
        whole: list[Tensor] = []
        for name, gradient in self.gradients().items():
            (shards if is_sharded(self._tensors[name].parameter) else whole).append(gradient)
        for gradient in whole:
            self._team.sum(gradient)  # those of shards were summed as they were found
        return self._team.norm(shards, whole)

    def not_finite(self) -> list[str]:
        """Names of parameters whose gradient is not finite."""
        bad = {name: float(not gradient.isfinite().all()) for name, gradient in self.gradients().items()}
        return [name for name, found in zip(bad, self._team.largest(*bad.values()), strict=True) if found]

    def prepare(self, share: float, norm: Tensor) -> None:
        """Lay out the step that may follow, at a share of every group's rate, without waiting for the norm."""
        section, (beta1, beta2) = self._section, self._section.betas
        rates = [
            Rates(self._rates[name] * share, beta1, beta2, section.eps, section.weight_decay * (tensor.parameter.dim() > 1))
            for name, tensor in self._tensors.items()
        ]  # matrices decay; norms and biases do not
        self._plan = StepPlan(list(self._tensors.values()), rates, norm.device)

    def step(self, share: float, norm: Tensor) -> None:
        """Update the weights by the clipped gradients of the given norm, at a share of every group's rate; clear them."""
        if self._plan is None:
            self.prepare(share, norm)
        assert self._plan is not None
        with torch.no_grad():
            self._plan.run((self._section.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        # Kernels write without raising torch's version counter, by which caches see that weights changed.
        torch.autograd.graph.increment_version([local_of(tensor.parameter) for tensor in self._tensors.values()])
        self.forget()

    def gradients(self) -> dict[str, Tensor]:
        """The float32 gradients gathered so far, by parameter name."""
        return {name: tensor.gradient for name, tensor in self._tensors.items() if tensor.gradient is not None}

    def masters(self) -> dict[str, Tensor]:
        """The float32 weights that the optimizer updates, by parameter name; copies where they are stored in two halves."""
        return {name: tensor.master for name, tensor in self._tensors.items()}

    def forget(self) -> None:
        """Drop all gradients, and a step that was laid out for them."""
        self._plan = None
        for tensor in self._tensors.values():
            tensor.gradient = None

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name, and the remainders of parameters that are not float32."""
        remainders = {
            name: spread_like(tensor.remainder, tensor.parameter)
            for name, tensor in self._tensors.items()
            if tensor.remainder is not None
        }
        return {"moments": {name: _moments(tensor) for name, tensor in self._tensors.items()}, "remainders": remainders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken; it must be of the same parameters and precision.

        The weights are already in place. States of older versions hold whole masters instead of remainders.
        """
        held = state["masters"] if "masters" in state else state["remainders"]
        halves = {name for name, tensor in self._tensors.items() if tensor.remainder is not None}
        if set(state["moments"]) != set(self._tensors) or set(held) != halves:
            strange = sorted(set(state["moments"]) ^ set(self._tensors))[:3] or ["the precision"]
            raise CheckpointError(
                f"the optimizer's state is of other parameters ({', '.join(strange)} differ); resume with the model, dtype "
                "and frozen groups of the checkpoint."
            )
        with torch.no_grad():
            for name, tensor in self._tensors.items():
                if tensor.remainder is not None and "masters" in state:
                    tensor.master = part_for(held[name], tensor.parameter).to(tensor.parameter.device)
                elif tensor.remainder is not None:
                    tensor.remainder.copy_(part_for(held[name], tensor.parameter))
                moments = state["moments"][name]
                tensor.steps = int(moments["step"]) if moments else 0
                if moments:
                    first, second = tensor.make_moments()
                    if moments["exp_avg"].dtype != first.dtype or (tensor.tops is None) != ("tops" not in moments):
                        raise CheckpointError(
                            f"the optimizer's moments were saved as {_word(moments['exp_avg'])} and the recipe asks for "
                            f"{_word(first)}; set optimizer.moments as it was."
                        )
                    first.copy_(part_for(moments["exp_avg"], tensor.parameter))
                    second.copy_(part_for(moments["exp_avg_sq"], tensor.parameter))
                    if tensor.tops is not None:
                        tensor.tops.copy_(moments["tops"])


def _gather(tensor: ParameterState, _: Tensor) -> None:
    tensor.gather()


def _moments(tensor: ParameterState) -> dict[str, Tensor]:
    if tensor.first is None or tensor.second is None:
        return {}
    first, second = (spread_like(moment, tensor.parameter) for moment in (tensor.first, tensor.second))
    tops = {} if tensor.tops is None else {"tops": tensor.tops}
    return {"step": torch.tensor(float(tensor.steps)), "exp_avg": first, "exp_avg_sq": second, **tops}


def _word(tensor: Tensor) -> str:
    return next((word for word, dtype in MOMENTS.items() if dtype == tensor.dtype), str(tensor.dtype))


def _check_names(names: Any, known: list[str], where: str) -> None:
    for name in names:
        if name not in known:
            raise RecipeError(f"{where}: the model has no parameter group '{name}'{nearest(name, known)}")


def _check_adapted(groups: Mapping[str, Any], freeze: Sequence[str], section: OptimizerSection) -> None:
    adapted = [group for group, named in groups.items() if named]
    for group in freeze:
        if group in adapted:
            raise RecipeError(f"model.freeze: '{group}' is adapted by model.lora.groups; drop one of the two.")
    for group in section.group_lr:
        if group not in adapted:
            raise RecipeError(
                f"optimizer.group_lr: '{group}' has no adapters, so it does not learn; adapted are: {', '.join(adapted)}."
            )
