"""Media are prepared once, spans and features are held against each other, and errors name the item."""

import io
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from PIL import Image

from sensorium.media.store import MediaStore
from sensorium.models.attention import MaskedAttention
from sensorium.models.features import Extent, Prepared, PreparedMedia
from sensorium.models.layout import Features, Placement, placements
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.episode import MediaSpan
from sensorium.vocabulary.errors import MediaError, ModelError, SpanMismatch

from .clips import noise
from .stock_pair import Pair

Pairs = Callable[..., Pair]


EXTENT = Extent("picture", (1, 1, 1))


class Counting:
    """A preprocessor that makes one patch of 100 bytes per item, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, items: Sequence[tuple[Media, bytes]]) -> list[Prepared]:
        self.asked.append([data.decode() for _, data in items])
        return [Prepared(torch.zeros(1, 25), EXTENT) for _ in items]


class Bytes:
    """A decoder whose decoded media are their bytes; one that says so is broken."""

    def __init__(self, store: MediaStore) -> None:
        self.store = store

    def get_many(self, media: Iterable[Media]) -> list[Any]:
        found = [self.store.bytes_of(item) for item in media]
        return [MediaError(f"{data.decode()}: broken") if data == b"bad" else data for data in found]


def prepared_media(store: MediaStore, preprocess: Counting, **how: Any) -> PreparedMedia:
    return PreparedMedia(Bytes(store), {"picture": preprocess, "video": preprocess}, **how)


def test_each_medium_is_prepared_once_and_those_missing_together() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, c = (store.put(name, "picture") for name in (b"a", b"b", b"c"))
    media = prepared_media(store, preprocess)
    media.get([a])
    media.get([b, a, b, c])
    assert media.extent(c) == EXTENT
    assert preprocess.asked == [["a"], ["b", "c"]]
    assert media.preprocessed == 3


def test_the_cache_is_bounded_and_extents_outlive_it() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, c = (store.put(name, "picture") for name in (b"a", b"b", b"c"))
    media = prepared_media(store, preprocess, capacity=200)
    media.get([a])
    media.get([b])
    media.get([a])
    media.get([c])  # b was used longest ago
    media.get([a])
    assert preprocess.asked == [["a"], ["b"], ["c"]]
    assert media.extent(b) == EXTENT
    assert len(media.get([b])) == 1
    assert preprocess.asked[-1] == ["b"]
    assert len(prepared_media(store, preprocess, capacity=50).get([a, b, c])) == 3


def test_a_broken_medium_does_not_cost_the_others_and_kinds_are_prepared_apart() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, bad = (store.put(name, "picture") for name in (b"a", b"b", b"bad"))
    video = store.put(b"v", "video")
    media = prepared_media(store, preprocess)
    with pytest.raises(MediaError, match="bad: broken"):
        media.get([a, bad, video, b])
    assert preprocess.asked == [["a", "b"], ["v"]]
    assert len(media.get([video, a, b])) == 3
    assert media.preprocessed == 3
    with pytest.raises(ModelError, match=r"takes text and picture and video; it cannot take sound s\.wav"):
        media.get([a, store.put(b"s", "sound", "s.wav")])


def test_a_prompt_shared_by_a_group_is_laid_out_once(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    picture = noise(policy.store, 11)
    before = policy.counters.preprocessed
    one, other = policy.render([user(picture, "What?")]), policy.render([user(picture, "What?")])
    assert policy.layout(one) is policy.layout(other)
    policy.encode([picture])
    assert policy.counters.preprocessed == before + 1


def test_a_corrupt_picture_is_named(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    broken = policy.store.put(b"\x89PNG\r\n\x1a\n but no picture", "picture", "maps/7.png")
    segment = policy.render([user(broken, "What?")])
    with pytest.raises(MediaError, match=r"maps/7\.png"):
        policy.layout(segment)
    with pytest.raises(MediaError, match=r"maps/7\.png"):
        policy.encode([noise(policy.store, 1), broken])


def test_a_picture_the_processor_refuses_is_named(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    data = io.BytesIO()
    Image.new("RGB", (2000, 4)).save(data, "PNG")
    thin = policy.store.put(data.getvalue(), "picture", "thin.png")
    with pytest.raises(MediaError, match=r"thin\.png.*aspect ratio"):
        policy.encode([thin])


def test_spans_that_miss_their_placeholder_are_named(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl").policy
    picture = noise(policy.store, 1)
    segment = policy.render([user(picture, "What?")])
    (span,) = segment.media
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*token 0"):
        policy.layout(replace(segment, media=(MediaSpan(0, picture),)))
    with pytest.raises(SpanMismatch, match=f"token {span.index} .* without a medium"):
        policy.layout(replace(segment, media=()))
    with pytest.raises(SpanMismatch, match=r"noise-1\.png"):
        policy.layout(replace(segment, media=(span, MediaSpan(10_000, picture))))


def test_features_that_do_not_fill_their_slot_are_named(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl").policy
    picture = noise(policy.store, 1)
    layout = policy.layout(policy.render([user(picture, "What?")]))
    short = Features(torch.zeros(layout.slots[0].count - 1, 128))
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*4 placeholder tokens for 3 features"):
        placements(layout, {picture: short})
    beyond = [Placement(0, ((len(layout) - 1, 4),), policy.encode([picture])[picture])]
    with pytest.raises(SpanMismatch, match="do not fit"):
        policy.language(layout.ids_T[None], layout.positions_3T[:, None], MaskedAttention(), beyond)


def test_a_tower_that_disagrees_with_the_expansion_is_caught(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = pairs("qwen2_5_vl").policy
    whole = VisionTower.__call__

    def short(self: VisionTower, prepared: Sequence[Prepared]) -> list[Features]:
        return [Features(features.embeds_NH[1:]) for features in whole(self, prepared)]

    monkeypatch.setattr(VisionTower, "__call__", short)
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*features of the tower"):
        policy.encode([noise(policy.store, 1)])


def test_no_media_cost_no_tower_pass(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    before = policy.counters.tower_passes
    assert policy.encode([]) == {}
    assert policy.counters.tower_passes == before
