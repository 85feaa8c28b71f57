"""Features of media for prefill: encoded once per policy version, checked against the spans that take them."""

from collections.abc import Mapping, Sequence

from sensorium.caches.lru import LRU
from sensorium.engines.native.prefix_cache import UncachedSuffix
from sensorium.models.policy import Policy
from sensorium.models.segment_layout import Features
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import SensoriumError


class FeatureCache:
    """Features of media under the current weights: each distinct medium goes through the tower once per version."""

    def __init__(self, policy: Policy, limit_bytes: int) -> None:
        self.encoded = 0
        self._policy = policy
        self._items: LRU[Media, Features] = LRU(limit_bytes, lambda features: features.nbytes)

    def get(self, media: Sequence[Media]) -> tuple[dict[Media, Features], dict[Media, SensoriumError]]:
        """Features of media, those missing in one tower pass; and the errors of those that have none."""
        missing = [item for item in dict.fromkeys(media) if item not in self._items]
        made, errors = self._encode(missing)
        known = {item: found for item in media if (found := self._items.get(item)) is not None}
        for item, features in made.items():
            self._items.put(item, features)
        return made | known, errors

    def _encode(self, media: list[Media]) -> tuple[dict[Media, Features], dict[Media, SensoriumError]]:
        if not media:
            return {}, {}
        try:
            made = self._policy.encode(media)
        except SensoriumError as error:
            if len(media) == 1:
                return {}, {media[0]: error}
            # One bad medium must not cost the others: find it by encoding one at a time.
            made = {}
            errors: dict[Media, SensoriumError] = {}
            for item in media:
                one, wrong = self._encode([item])
                made |= one
                errors |= wrong
            return made, errors
        self.encoded += len(made)
        return made, {}

    def clear(self) -> None:
        """Forget the features: the weights changed."""
        self._items.clear()


def check_features(
    suffix: UncachedSuffix | None, features: Mapping[Media, Features], errors: Mapping[Media, SensoriumError]
) -> None:
    """Raise what is wrong with the media of a context: the tower's error, or a span that does not fit its features."""
    for slot in suffix.slots if suffix is not None else ():
        if slot.media in errors:
            raise errors[slot.media]
        slot.place(features[slot.media])
