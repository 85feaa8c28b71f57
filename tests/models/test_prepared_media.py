"""Media are prepared once, spans and features are held against each other, and errors name the item."""

import io
import json
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.models.attention import MaskedAttention
from sensorium.models.load import load_policy
from sensorium.models.prepared_media import Extent, PreparedMedia, TowerInput
from sensorium.models.segment_layout import Features, Placement, placements
from sensorium.models.tiny import make_tiny
from sensorium.models.tower import VisionTower
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.episode import MediaSpan
from sensorium.vocabulary.errors import MediaError, ModelError, SpanMismatch

from .clips import clip, noise, tone
from .stock_pair import Pair

Pairs = Callable[..., Pair]


EXTENT = Extent("picture", (1, 1, 1))


class Counting:
    """A preprocessor that makes one patch of 100 bytes per item, and remembers what it was asked."""

    def __init__(self) -> None:
        self.asked: list[list[str]] = []

    def __call__(self, items: Sequence[tuple[Media, bytes]]) -> list[TowerInput]:
        self.asked.append([data.decode() for _, data in items])
        return [TowerInput(torch.zeros(1, 25), EXTENT) for _ in items]


class Bytes:
    """A decoder whose decoded media are their bytes; one that says so is broken."""

    def __init__(self, store: MediaStore) -> None:
        self.store = store

    def each(self, media: Iterable[Media]) -> Iterator[tuple[Media, Any]]:
        for item in media:
            data = self.store.bytes_of(item)
            yield item, MediaError(f"{data.decode()}: broken") if data == b"bad" else data


def made_media(store: MediaStore, preprocess: Counting, **how: Any) -> PreparedMedia:
    return PreparedMedia(Bytes(store), {"picture": preprocess, "video": preprocess}, **how)


def test_each_medium_is_prepared_once_and_those_missing_together() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, c = (store.put(name, "picture") for name in (b"a", b"b", b"c"))
    media = made_media(store, preprocess)
    media.get([a])
    media.get([b, a, b, c])
    assert media.extent(c) == EXTENT
    assert preprocess.asked == [["a"], ["b", "c"]]
    assert media.preprocessed == 3


def test_the_cache_is_bounded_and_extents_outlive_it() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, c = (store.put(name, "picture") for name in (b"a", b"b", b"c"))
    media = made_media(store, preprocess, capacity=200)
    media.get([a])
    media.get([b])
    media.get([a])
    media.get([c])  # b was used longest ago
    media.get([a])
    assert preprocess.asked == [["a"], ["b"], ["c"]]
    assert media.extent(b) == EXTENT
    assert len(media.get([b])) == 1
    assert preprocess.asked[-1] == ["b"]
    assert len(made_media(store, preprocess, capacity=50).get([a, b, c])) == 3


def test_a_broken_medium_does_not_cost_the_others_and_kinds_are_prepared_apart() -> None:
    store, preprocess = MediaStore(), Counting()
    a, b, bad = (store.put(name, "picture") for name in (b"a", b"b", b"bad"))
    video = store.put(b"v", "video")
    media = made_media(store, preprocess)
    with pytest.raises(MediaError, match="bad: broken"):
        media.get([a, bad, video, b])
    assert preprocess.asked == [["a", "b"], ["v"]]
    assert len(media.get([video, a, b])) == 3
    assert media.preprocessed == 3
    with pytest.raises(ModelError, match=r"takes text and picture and video; it cannot take sound s\.wav"):
        media.get([a, store.put(b"s", "sound", "s.wav")])


class Choosy(Counting):
    """Refuses a whole batch for one item that it does not like."""

    def __call__(self, items: Sequence[tuple[Media, bytes]]) -> list[TowerInput]:
        made = super().__call__(items)
        if any(data == b"thin" for _, data in items):
            raise MediaError(f"{', '.join(media.name for media, _ in items)}: too thin")
        return made


def test_one_that_the_processor_refuses_is_found_and_fails_alone() -> None:
    store, preprocess = MediaStore(), Choosy()
    good, thin, fine = (store.put(name, "picture", name.decode()) for name in (b"good", b"thin", b"fine"))
    media = made_media(store, preprocess)
    errors = media.prepare([good, thin, fine])
    assert {item: str(error) for item, error in errors.items()} == {thin: "thin: too thin"}
    assert media.unknown([good, thin, fine]) == [thin]
    assert len(media.get([good, fine])) == 2
    assert (media.preprocessed, media.hits) == (2, 2)


def test_preparing_ahead_holds_no_more_than_the_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sensorium.models.prepared_media.BATCH_BYTES", 0)  # each by itself
    store, preprocess = MediaStore(), Counting()
    items = [store.put(bytes([65 + i]), "picture") for i in range(20)]
    media = made_media(store, preprocess, capacity=300)
    assert media.prepare(items) == {}
    assert preprocess.asked == [[chr(65 + i)] for i in range(20)]
    assert (media.held, media.evictions) == (300, 17)
    assert media.unknown(items) == [], "extents outlive patches"
    media.get(items[-3:])
    assert (media.hits, media.preprocessed) == (3, 20)


def test_however_many_threads_ask_each_medium_is_preprocessed_once() -> None:
    store, preprocess = MediaStore(), Counting()
    items = [store.put(bytes([65 + i]), "picture") for i in range(8)]
    media = made_media(store, preprocess)

    def ask(i: int) -> int:
        return len(media.get(items[i % 3 :])) if i % 2 else len(media.prepare(items[i % 5 :]))

    with ThreadPoolExecutor(8) as pool:
        list(pool.map(ask, range(64)))
    assert sorted(name for asked in preprocess.asked for name in asked) == [chr(65 + i) for i in range(8)]
    assert (media.preprocessed, media.held, media.evictions) == (8, 800, 0)


@pytest.mark.parametrize("family", ["qwen2_5_omni", "qwen3_vl"])
def test_what_a_medium_becomes_does_not_depend_on_its_company(pairs: Pairs, family: str) -> None:
    policy = pairs(family).policy
    sizes = [(64, 64)] * 3 + [(100, 80)] * 2 + [(300, 111)]
    items = [noise(policy.chat.store, i, *size) for i, size in enumerate(sizes)]
    items += [clip(policy.chat.store, i, 2 + i % 2) for i in range(3)]
    items += [tone(policy.chat.store, i) for i in range(2)] if "sound" in policy.chat.modalities else []
    together, alone = (PreparedMedia(policy.chat.decoder, policy.chat.media_format.preprocessors) for _ in range(2))
    for one, other in zip(together.get(items), [alone.get([item])[0] for item in items], strict=True):
        assert torch.equal(one.patches_PC, other.patches_PC)
        assert one.extent == other.extent


def test_policies_that_prepare_alike_share_and_others_do_not(tmp_path: Path) -> None:
    store = MediaStore()
    folder = make_tiny("qwen2_5_vl", tmp_path / "one")
    policy = load_policy(str(folder), store=store, device="cpu")
    like = load_policy(str(folder), store=store, device="cpu", decoder=policy.chat.decoder)
    settings = json.loads((folder / "processor_config.json").read_text())
    settings["image_processor"]["size"]["longest_edge"] = 28 * 28 * 4
    (folder / "processor_config.json").write_text(json.dumps(settings))
    other = load_policy(str(folder), store=store, device="cpu", decoder=policy.chat.decoder)
    picture = noise(store, 1, 112, 112)
    for one in (like, other):
        one.chat.share_media(policy.chat)
    assert policy.chat.prepare([picture]) == {}
    assert like.chat.unprepared([picture]) == []
    like.encode([picture])
    assert like.chat.prepared.preprocessed == policy.chat.prepared.preprocessed == 1
    assert other.chat.unprepared([picture]) == [picture]
    assert len(other.encode([picture])[picture].embeds_NH) < len(like.encode([picture])[picture].embeds_NH)


def test_media_counts_tell_what_was_decoded_kept_and_let_go(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_omni").policy
    before = policy.media_counts
    sound, video = tone(policy.chat.store, 41), clip(policy.chat.store, 41)
    policy.chat.prepare([sound, video])
    policy.encode([sound, video])
    now = policy.media_counts
    row = now.since(before)
    counted = {name: row[name] for name in ("decoded", "preprocessed", "memory_hits", "hits", "evictions", "tower_items")}
    assert counted == {"decoded": 2, "preprocessed": 2, "memory_hits": 2, "hits": 0, "evictions": 0, "tower_items": 2}
    assert now.sizes["memory_gib"] > 0


def test_a_prompt_shared_by_a_group_is_laid_out_once(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    picture = noise(policy.chat.store, 11)
    before = policy.chat.prepared.preprocessed
    one, other = policy.chat.render([user(picture, "What?")]), policy.chat.render([user(picture, "What?")])
    assert policy.chat.layout(one) is policy.chat.layout(other)
    policy.encode([picture])
    assert policy.chat.prepared.preprocessed == before + 1


def test_a_corrupt_picture_is_named(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    broken = policy.chat.store.put(b"\x89PNG\r\n\x1a\n but no picture", "picture", "maps/7.png")
    segment = policy.chat.render([user(broken, "What?")])
    with pytest.raises(MediaError, match=r"maps/7\.png"):
        policy.chat.layout(segment)
    with pytest.raises(MediaError, match=r"maps/7\.png"):
        policy.encode([noise(policy.chat.store, 1), broken])


def test_a_picture_the_processor_refuses_is_named(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    data = io.BytesIO()
    Image.new("RGB", (2000, 4)).save(data, "PNG")
    thin = policy.chat.store.put(data.getvalue(), "picture", "thin.png")
    with pytest.raises(MediaError, match=r"thin\.png.*aspect ratio"):
        policy.encode([thin])


def test_spans_that_miss_their_placeholder_are_named(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl").policy
    picture = noise(policy.chat.store, 1)
    segment = policy.chat.render([user(picture, "What?")])
    (span,) = segment.media
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*token 0"):
        policy.chat.layout(replace(segment, media=(MediaSpan(0, picture),)))
    with pytest.raises(SpanMismatch, match=f"token {span.index} .* without a medium"):
        policy.chat.layout(replace(segment, media=()))
    with pytest.raises(SpanMismatch, match=r"noise-1\.png"):
        policy.chat.layout(replace(segment, media=(span, MediaSpan(10_000, picture))))


def test_features_that_do_not_fill_their_slot_are_named(pairs: Pairs) -> None:
    policy = pairs("qwen3_vl").policy
    picture = noise(policy.chat.store, 1)
    layout = policy.chat.layout(policy.chat.render([user(picture, "What?")]))
    short = Features(torch.zeros(layout.slots[0].count - 1, 128))
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*4 placeholder tokens for 3 features"):
        placements(layout, {picture: short})
    beyond = [Placement(0, ((len(layout) - 1, 4),), policy.encode([picture])[picture])]
    with pytest.raises(SpanMismatch, match="do not fit"):
        policy.language(layout.ids_T[None], layout.positions_3T[:, None], MaskedAttention(), beyond)


def test_a_tower_that_disagrees_with_the_expansion_is_caught(pairs: Pairs, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = pairs("qwen2_5_vl").policy
    whole = VisionTower.__call__

    def short(self: VisionTower, prepared: Sequence[TowerInput]) -> list[Features]:
        return [Features(features.embeds_NH[1:]) for features in whole(self, prepared)]

    monkeypatch.setattr(VisionTower, "__call__", short)
    with pytest.raises(SpanMismatch, match=r"noise-1\.png.*features of the tower"):
        policy.encode([noise(policy.chat.store, 1)])


def test_no_media_cost_no_tower_pass(pairs: Pairs) -> None:
    policy = pairs("qwen2_5_vl").policy
    before = policy.counters.tower_passes
    assert policy.encode([]) == {}
    assert policy.counters.tower_passes == before
