"""What towers that do not learn said of media: kept across passes, updates and steps, within a bound on bytes.

Features are kept under the name of the weights that made them. A name changes as soon as a weight is written to, so what
is kept can be dropped, never be wrong. A copy of a model has the same weights under the same name until one of them moves.
"""

from typing import Any

import torch
from torch import nn

from sensorium.caches.lru import LRU
from sensorium.models.segment_layout import Features
from sensorium.vocabulary.content import Media


class FrozenFeatures:
    """Features by weights and medium; the least recently used leave when the bound is reached. Copies share it."""

    def __init__(self, capacity: int) -> None:
        self._kept: LRU[tuple[object, Media], Features] = LRU(capacity, lambda features: features.nbytes)

    @property
    def hits(self) -> int:
        """How often features were still known."""
        return self._kept.hits

    @property
    def evictions(self) -> int:
        """How many were dropped for want of room."""
        return self._kept.evictions

    @property
    def held(self) -> int:
        """Bytes of all that is kept."""
        return self._kept.held

    def get(self, weights: object, media: Media) -> Features | None:
        """Features that these weights computed for a medium, if they are still known."""
        return self._kept.get((weights, media))

    def add(self, weights: object, media: Media, features: Features) -> None:
        """Keep the features that these weights computed for a medium."""
        # A copy of each: a view would keep the features of a whole batch alive.
        copies = Features(features.embeds_NH.clone(), tuple(level.clone() for level in features.deepstack_NH))
        self._kept.put((weights, media), copies)

    def forget(self, weights: object) -> None:
        """Drop features computed with weights that have since changed."""
        for key, _ in self._kept.items():
            if key[0] is weights:
                self._kept.pop(key)


class Weights:
    """Names a tower's weights: the same object as long as they are the same."""

    def __init__(self, module: nn.Module, born_as: object = None) -> None:
        self._module = module
        self._state = self._written()
        self._name = born_as if born_as is not None else object()

    @property
    def learning(self) -> bool:
        """Whether any may move. Asked anew each time: freezing and adapters come later than the model."""
        return any(parameter.requires_grad for parameter in self._module.parameters())

    @property
    def name(self) -> object:
        """Their name as they are now. Weights asked for gradients are as good as moved already."""
        state = self._written()
        if state != self._state or (torch.is_grad_enabled() and self.learning):
            self._state, self._name = state, object()
        return self._name

    def _written(self) -> tuple[int, ...]:
        """Which tensors they are, where, how often written to in place by torch's own count, and adapters switched off."""
        tensors = [part for p in self._module.parameters() for part in (id(p), p.data_ptr(), p._version)]
        off = [id(part) for part in self._module.modules() if getattr(part, "disable_adapters", False)]
        return (*tensors, *off)


def spare_bytes(device: torch.device) -> int:
    """What may be kept on a device for later: a sixteenth of a GPU, or 1 GiB of memory."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.total_memory) // 16
    return 1 << 30
