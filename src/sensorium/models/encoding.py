"""Media through the towers of a model. Features of frozen towers are cached under the version of their weights.

The version changes as soon as a weight is written to, so cached features can be dropped but never be wrong. A frozen tower
whose weights are written to between the second and the third call::

    tower.current_version()          v1     v1    v2
    cache.get((version, picture))    miss   hit   miss: computed again; the features under v1 are dropped
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from typing import Any

import torch
from torch import nn

from sensorium.data.lru import LRU
from sensorium.kernels.matched_ops import MatchedOps
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.family import Family, Tower
from sensorium.models.matched import TowerBatching
from sensorium.models.segment_layout import Features, mismatch
from sensorium.vocabulary.content import Media

# Patches of one pass, unless a single medium has more. On a GPU, a block of Qwen2.5-VL's tower holds 6 GiB for this many. A
# CPU gains nothing from large passes, and 16,384 patches are 100 MB before the tower has started.
PASS_PATCHES = {"cuda": 1 << 17, "cpu": 1 << 14}
GIB = 1 << 30


class FrozenFeatures(LRU[tuple[object, Media], Features]):
    """Features by version of the weights and medium, within a bound of bytes. Copies of a model share it."""

    def __init__(self, capacity: int) -> None:
        super().__init__(capacity, lambda features: features.nbytes)

    def put(self, key: tuple[object, Media], value: Features) -> None:
        """Cache a copy: a view would keep the features of a whole batch alive."""
        super().put(key, Features(value.embeds_NH.clone(), tuple(level.clone() for level in value.deepstack_NH)))

    def forget(self, version: object) -> None:
        """Drop features computed with weights that have since changed."""
        for key, _ in self.items():
            if key[0] is version:
                self.pop(key)


class WeightsVersion:
    """The version of a module's weights: the same object as long as none of them changed."""

    def __init__(self, module: nn.Module, version: object = None) -> None:
        self._module = module
        self._state = self._fingerprint()
        self._version = version if version is not None else object()

    @property
    def learning(self) -> bool:
        """Whether any weight is trained. Not cached: freezing and adapters come later than the model."""
        return any(parameter.requires_grad for parameter in self._module.parameters())

    def current_version(self) -> object:
        """The version now; a new one if a weight was written to. Weights that learn count as written to in grad mode."""
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


@dataclass
class Counters:
    """The work of the towers: passes, items encoded, items whose features were cached, and patches encoded."""

    tower_passes: int = 0
    tower_items: int = 0
    tower_hits: int = 0
    patches: int = 0


class Encoder:
    """The towers of a model. A frozen tower encodes each medium once, as long as ``cache`` holds its features.

    ``matched``: a medium's features do not depend on what is encoded in the same pass, to the last bit.
    """

    def __init__(
        self, adapter: Family, chat: ChatProcessor, device: torch.device, matched: MatchedOps | None = None
    ) -> None:
        self.counters = Counters()
        self._adapter, self._chat, self._device = adapter, chat, device
        self._matched = matched
        self.batching = TowerBatching(matched, device)
        self.cache = FrozenFeatures(spare_bytes(device))
        self._weights = {tower: WeightsVersion(tower.module) for tower in dict.fromkeys(adapter.towers.values())}
        self._cached_under: dict[Tower, object] = {}

    def __call__(self, media: Iterable[Media]) -> dict[Media, Features]:
        """Features of the distinct media; those of a tower that learns keep their graph in grad mode."""
        distinct = list(dict.fromkeys(media))
        self._chat.prepared.refuse_unsupported(distinct)
        features: dict[Media, Features] = {}
        for tower in self._weights:
            items = [item for item in distinct if self._adapter.towers[item.kind] is tower]
            if not items:
                continue
            version = self._frozen_version(tower)
            if version is not None:
                features |= self._recall(tower, version, items)
            else:
                for several in self._passes(tower, items):
                    features |= self._look(tower, several)
        return {item: features[item] for item in distinct}

    def copied(self, adapter: Family) -> "Encoder":
        """The towers of a copied model. They start with the same versions and share the cache."""
        copy = Encoder(adapter, self._chat, self._device, self._matched)
        copy.cache = self.cache
        pairs = zip(copy._weights, self._weights.values(), strict=True)
        with torch.no_grad():
            copy._weights = {tower: WeightsVersion(tower.module, weights.current_version()) for tower, weights in pairs}
        return copy

    def _frozen_version(self, tower: Tower) -> object | None:
        """The version of a frozen tower's weights, None if it is trained. Features of an earlier version are dropped."""
        weights = self._weights[tower]
        version, learning = weights.current_version(), weights.learning
        before = self._cached_under.pop(tower, None)
        if before is not None and (learning or before is not version):
            self.cache.forget(before)
        if not learning:
            self._cached_under[tower] = version
        return None if learning else version

    def _recall(self, tower: Tower, version: object, media: Sequence[Media]) -> dict[Media, Features]:
        """Features from a frozen tower, computed where they are not cached."""
        cached = {item: self.cache.get((version, item)) for item in media}
        features = {item: found for item, found in cached.items() if found is not None}
        self.counters.tower_hits += len(features)
        missing = [item for item in media if item not in features]
        # On a CPU one at a time: in a batch the last bits may differ, so cached features would depend on earlier batches,
        # and a resumed run would not repeat the uninterrupted one.
        passes = [[item] for item in missing] if self._device.type == "cpu" else self._passes(tower, missing)
        self._chat.prepared.get(missing)
        with torch.inference_mode(False), torch.no_grad():  # cached features must also serve training
            for several in passes:
                for item, made in self._look(tower, several).items():
                    features[item] = made
                    self.cache.put((version, item), made)
        return features

    def _passes(self, tower: Tower, media: Sequence[Media]) -> Sequence[Sequence[Media]]:
        """The media of each pass of a tower: as many as may share one, up to a bound of patches."""
        if new := self._chat.prepared.unknown(media):
            self._chat.prepared.get(new)  # together, not one by one
        passes: list[list[Media]] = []
        room = 0
        for item in media:
            patches = self._chat.patches(item)
            if not passes or patches > room:
                passes.append([])
                room = PASS_PATCHES.get(self._device.type, PASS_PATCHES["cuda"])
            passes[-1].append(item)
            room -= patches
        together = self.batching.together(tower, max(passes, key=len, default=[]), self._chat.prepared.get)
        return passes if together else [[item] for item in media]

    def _look(self, tower: Tower, media: Sequence[Media]) -> dict[Media, Features]:
        if not media:
            return {}
        prepared = self._chat.prepared.get(media)
        self.counters.tower_passes += 1
        self.counters.tower_items += len(media)
        self.counters.patches += sum(len(ready.patches_PC) for ready in prepared)
        with self.batching.linears(tower):
            features = tower(prepared)
        for item, ready, made in zip(media, prepared, features, strict=True):
            expected, given = self._chat.media_format.expand(ready.extent).count, made.embeds_NH.shape[0]
            if expected != given:
                raise mismatch(item, f"{expected} placeholder tokens for {given} features of the tower")
        return dict(zip(media, features, strict=True))


@dataclass(frozen=True)
class MediaCounts:
    """Counts since a policy was loaded, those of copies that share its media included.

    ``decoded`` pictures, videos and sounds; ``hits`` found decoded on disk, ``damaged`` found there and decoded again;
    ``memory_hits`` answered from memory, decoded or preprocessed. ``tower_items`` were encoded by a tower, ``tower_hits``
    found in the cache of a frozen one.
    """

    decoded: int
    preprocessed: int
    hits: int
    memory_hits: int
    evictions: int
    memory_evictions: int
    damaged: int
    tower_items: int
    tower_hits: int
    tower_evictions: int
    cache_bytes: int
    memory_bytes: int

    def since(self, before: "MediaCounts") -> dict[str, float]:
        return {name: getattr(self, name) - getattr(before, name) for name in COUNTS}

    @property
    def sizes(self) -> dict[str, float]:
        """GiB cached now: decoded on disk, and in memory."""
        return {"cache_gib": self.cache_bytes / GIB, "memory_gib": self.memory_bytes / GIB}


COUNTS = tuple(field.name for field in fields(MediaCounts) if not field.name.endswith("_bytes"))
