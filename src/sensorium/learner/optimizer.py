"""AdamW whose weights move as in float32, whatever they are stored in.

Float32 parameters are updated in place. Others have a float32 master and a float32 sum of gradients over micro-batches;
after a step the parameter is the master, rounded. (At a learning rate of 1e-6 a bfloat16 weight would not move at all.)
"""

from collections.abc import Mapping, Sequence
from math import cos, pi
from typing import Any

import torch
from torch import Tensor
from torch.nn import Parameter

from sensorium.recipe.schema import OptimizerSection
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
    ) -> None:
        _check_names(freeze, list(groups), f"{where}.freeze")
        _check_names(section.group_lr, list(groups), "optimizer.group_lr")
        if adapted:
            _check_adapted(groups, freeze, section)
        self._section = section
        self._parameters: dict[str, Parameter] = {}
        self._masters: dict[str, Tensor] = {}
        settings = []
        for group, named in groups.items():
            if group in freeze or not named:
                continue
            for parameter in named.values():
                parameter.requires_grad_()
            masters = {name: _master(parameter) for name, parameter in named.items()}
            self._parameters |= named
            self._masters |= masters
            rate = section.group_lr.get(group, section.lr)
            for decay, chosen in _by_decay(masters, section.weight_decay):
                settings.append({"params": chosen, "lr": rate, "rate": rate, "weight_decay": decay})
        if not settings:
            raise RecipeError(f"{where}.freeze {list(freeze)} leaves nothing to train; freeze fewer groups.")
        self._adam = torch.optim.AdamW(settings, lr=section.lr, betas=section.betas, eps=section.eps, fused=True)
        self._rounded = [name for name, master in self._masters.items() if master is not self._parameters[name]]

    def gather(self) -> None:
        """Add the gradients of a micro-batch to the float32 sums; call after every backward."""
        for name in self._rounded:
            parameter, master = self._parameters[name], self._masters[name]
            if parameter.grad is not None:
                master.grad = parameter.grad.float() if master.grad is None else master.grad.add_(parameter.grad)
                parameter.grad = None

    def grad_norm(self) -> Tensor:
        """The norm of all gradients together. A parameter without gradient has gradient zero: its moments still count."""
        for master in self._masters.values():
            if master.grad is None:
                master.grad = torch.zeros_like(master)
        return torch.nn.utils.get_total_norm(self._gradients())

    def not_finite(self) -> list[str]:
        """Names of parameters whose gradient is not finite."""
        gradients = {name: master.grad for name, master in self._masters.items() if master.grad is not None}
        return [name for name, gradient in gradients.items() if not bool(gradient.isfinite().all())]

    def step(self, share: float, norm: Tensor) -> None:
        """Move the weights by the clipped gradients, whose norm is given, at a share of every group's rate; forget them."""
        torch._foreach_mul_(self._gradients(), (self._section.clip_norm / (norm + 1e-6)).clamp(max=1.0))
        for group in self._adam.param_groups:
            group["lr"] = group["rate"] * share
        self._adam.step()
        # The fused kernel writes without telling torch's count, by which caches see that weights moved.
        torch.autograd.graph.increment_version(list(self._masters.values()))
        with torch.no_grad():
            for name in self._rounded:
                self._parameters[name].copy_(self._masters[name])
        self.forget()

    def _gradients(self) -> list[Tensor]:
        return [master.grad for master in self._masters.values() if master.grad is not None]

    def forget(self) -> None:
        """Drop all gradients."""
        for name, parameter in self._parameters.items():
            parameter.grad = self._masters[name].grad = None

    def state_dict(self) -> dict[str, Any]:
        """Moments by parameter name, and the masters of parameters that are not float32."""
        moments = {name: dict(self._adam.state[master]) for name, master in self._masters.items()}
        return {"moments": moments, "masters": {name: self._masters[name].detach() for name in self._rounded}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on exactly where ``state`` was taken; it must be of the same parameters and precision."""
        if set(state["moments"]) != set(self._masters) or set(state["masters"]) != set(self._rounded):
            strange = sorted(set(state["moments"]) ^ set(self._masters))[:3] or ["the precision"]
            raise CheckpointError(
                f"the optimizer's state is of other parameters ({', '.join(strange)} differ); resume with the model, dtype "
                "and frozen groups of the checkpoint."
            )
        with torch.no_grad():
            for name, master in self._masters.items():
                if name in state["masters"]:
                    master.copy_(state["masters"][name])
                    self._parameters[name].copy_(master)
                moments = {key: value.clone() for key, value in state["moments"][name].items()}
                if moments:
                    self._adam.state[master] = {key: value.to(master.device) for key, value in moments.items()}


def _master(parameter: Parameter) -> Tensor:
    return parameter if parameter.dtype == torch.float32 else parameter.detach().float().requires_grad_()


def _by_decay(masters: dict[str, Tensor], decay: float) -> list[tuple[float, list[Tensor]]]:
    """Matrices decay; norms and biases do not."""
    if not decay:
        return [(0.0, list(masters.values()))]
    matrices = [master for master in masters.values() if master.dim() > 1]
    others = [master for master in masters.values() if master.dim() < 2]
    return [(share, chosen) for share, chosen in ((decay, matrices), (0.0, others)) if chosen]


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
