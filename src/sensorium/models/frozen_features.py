"""Features of media from frozen towers: cached across passes, updates and steps, within a bound on bytes.

Features are cached under the version of the weights that computed them. The version changes as soon as a weight is written
to, so cached features can be dropped but never be wrong. A copy of a model starts with the version of its original.

Example. A frozen tower, its weights written to between the second and the third call:

    version = tower.current_version()    v1    v1    v2
    cache.get(version, picture)          miss  hit   miss: computed anew, and the features under v1 are dropped
"""

from typing import Any

import torch
from torch import nn

from sensorium.caches.lru import LRU
from sensorium.models.segment_layout import Features
from sensorium.vocabulary.content import Media


class FrozenFeatures:
    """Features by version of the weights and medium; the least recently used go first. Copies of a model share it."""

    def __init__(self, capacity: int) -> None:
        self._features: LRU[tuple[object, Media], Features] = LRU(capacity, lambda features: features.nbytes)

    @property
    def hits(self) -> int:
        """How often features were found."""
        return self._features.hits

    @property
    def evictions(self) -> int:
        """How many were dropped because the bound was reached."""
        return self._features.evictions

    @property
    def held(self) -> int:
        """Bytes of all cached features."""
        return self._features.held

    def get(self, version: object, media: Media) -> Features | None:
        """Features of a medium under a version of the weights, if they are cached."""
        return self._features.get((version, media))

    def add(self, version: object, media: Media, features: Features) -> None:
        """Cache the features of a medium under a version of the weights."""
        # A copy of each: a view would keep the features of a whole batch alive.
        copies = Features(features.embeds_NH.clone(), tuple(level.clone() for level in features.deepstack_NH))
        self._features.put((version, media), copies)

    def forget(self, version: object) -> None:
        """Drop features computed with weights that have since changed."""
        for key, _ in self._features.items():
            if key[0] is version:
                self._features.pop(key)


class WeightsVersion:
    """Tells whether a module's weights changed: the version is the same object as long as they did not."""

    def __init__(self, module: nn.Module, version: object = None) -> None:
        self._module = module
        self._state = self._fingerprint()
        self._version = version if version is not None else object()

    @property
    def learning(self) -> bool:
        """Whether any weight is trained. Not remembered: freezing and adapters come later than the model."""
        return any(parameter.requires_grad for parameter in self._module.parameters())

    def current_version(self) -> object:
        """The version now: a new one if a weight was written to. Weights asked for gradients count as written to."""
        state = self._fingerprint()
        if state != self._state or (torch.is_grad_enabled() and self.learning):
            self._state, self._version = state, object()
        return self._version

    def _fingerprint(self) -> tuple[int, ...]:
        """Identity, address and torch's count of in-place writes of each tensor, and which adapters are switched off."""
        tensors = [part for p in self._module.parameters() for part in (id(p), p.data_ptr(), p._version)]
        off = [id(part) for part in self._module.modules() if getattr(part, "disable_adapters", False)]
        return (*tensors, *off)


def spare_bytes(device: torch.device) -> int:
    """Bytes to spend on cached features: a sixteenth of a GPU's memory, or 1 GiB on a CPU."""
    if device.type == "cuda":
        properties: Any = torch.cuda.get_device_properties(device)
        return int(properties.total_memory) // 16
    return 1 << 30
