"""Prepared media, the input of a tower: decoded and preprocessed once, by content and parameters, in a bounded cache."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from math import inf
from typing import TYPE_CHECKING, Any, Protocol

from PIL import Image

from sensorium.data.lru import LRU
from sensorium.models.deferred import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import FrameRule, VideoParameters
from sensorium.vocabulary.errors import MediaError, ModelError

# Invariants: however many threads ask, each medium is preprocessed once while it is kept; what a medium becomes does not
# depend on the company it is preprocessed in; one that cannot be prepared fails alone.


if TYPE_CHECKING:
    import torch
    from torch import Tensor
else:
    torch = DeferredModule("torch")

Grid = tuple[int, int, int]
EXTENTS_KEPT = 1 << 16
# Decoded media preprocessed at once: enough to share the processor's cost, and little beside what they become.
BATCH_BYTES = 1 << 26


@dataclass(frozen=True)
class Extent:
    """How large a medium is to its tower, and when its frames were: all that its expansion and positions depend on.

    ``grid`` is (time, height, width) in patches; of a sound, (mel frames, 1, 1). A video's frames begin at
    ``times_s`` by the file's average rate, each standing for ``seconds_per_frame``; ``has_sound``: the sound that follows
    it is interleaved with it.
    """

    kind: MediaKind
    grid: Grid
    times_s: tuple[float, ...] = ()
    seconds_per_frame: float = 0.0
    has_sound: bool = False


@dataclass(frozen=True)
class TowerInput:
    """A medium as a tower takes it: flat patches of a picture or video, or mel frames of a sound, as [P, C]."""

    patches_PC: Tensor
    extent: Extent


class MediaDecoder(Protocol):
    """Decodes media, each once: each medium in order with what it is decoded to, or with the error that it is."""

    def each(self, media: Iterable[Media]) -> Iterator[tuple[Media, Any | MediaError]]: ...


class Preprocessor(Protocol):
    """Turns several decoded media of one kind into tower inputs, in order."""

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[TowerInput]: ...


class PreparedMedia:
    """The cache of prepared media. Patches are cached up to ``capacity`` bytes; the least recently used are dropped first.

    Extents are small and outlive them: a prompt can be laid out without decoding its media again. A hit is a request that
    was answered from here, an eviction a medium that there was no room to keep.
    """

    def __init__(
        self,
        decoder: MediaDecoder,
        preprocessors: Mapping[MediaKind, Preprocessor],
        capacity: int = 1 << 29,
    ) -> None:
        self._decoder = decoder
        self._preprocessors = preprocessors
        self._known: LRU[Media, TowerInput] = LRU(capacity, lambda prepared: prepared.patches_PC.nbytes)
        self._extents: LRU[Media, Extent] = LRU(EXTENTS_KEPT)
        self._making = threading.Lock()
        self._lock = threading.Lock()
        self.preprocessed = self.hits = 0

    @property
    def held(self) -> int:
        """Bytes of the patches that are kept."""
        return self._known.held

    @property
    def evictions(self) -> int:
        """Media that there was no room to keep."""
        return self._known.evictions

    def extent(self, media: Media) -> Extent:
        """How large a medium is to its tower."""
        return self._extents.get(media) or self.get([media])[0].extent

    def unknown(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media whose extent is not known yet; those of a kind that the model does not take are refused."""
        new = [item for item in dict.fromkeys(media) if item not in self._extents]
        self.refuse_strange(new)
        return new

    def missing(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media whose patches are not kept."""
        return [item for item in dict.fromkeys(media) if item not in self._known]

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Prepare media ahead of their use, as many at a time as are cheap to hold; returns the errors of bad ones."""
        missing = self.missing(media)
        self.refuse_strange(missing)
        with self._making:
            made = self._make(item for item in missing if item not in self._known)
            return {item: one for item, one in made if isinstance(one, MediaError)}

    def get(self, media: Iterable[Media]) -> list[TowerInput]:
        """Tower inputs of media, in order; those not cached are preprocessed together.

        Where one cannot be prepared, the others are all the same before its error is raised.
        """
        wanted = list(media)
        found = self._recall(wanted)
        missing = [item for item in dict.fromkeys(wanted) if item not in found]
        self.refuse_strange(missing)
        if missing:
            with self._making:
                found |= self._recall(missing)  # another thread may have made them meanwhile
                errors = []
                for item, one in self._make([item for item in missing if item not in found]):
                    if isinstance(one, MediaError):
                        errors.append(one)
                    else:
                        found[item] = one
            if errors:
                raise errors[0]
        return [found[item] for item in wanted]

    def refuse_strange(self, media: Sequence[Media]) -> None:
        """Refuse media of a kind that the model does not take."""
        for item in media:
            if item.kind not in self._preprocessors:
                able = " and ".join(["text", *self._preprocessors])
                raise ModelError(f"this model takes {able}; it cannot take {item.kind} {item.name}. Use a family that can.")

    def _recall(self, media: Sequence[Media]) -> dict[Media, TowerInput]:
        """What is kept of some media, which makes it the latest."""
        found = {item: kept for item in dict.fromkeys(media) if (kept := self._known.get(item)) is not None}
        with self._lock:
            self.hits += sum(item in found for item in media)
        return found

    def _make(self, media: Iterable[Media]) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        """Decode and preprocess media, a batch at a time."""
        batch: list[tuple[Media, Any]] = []
        size = 0
        for item, decoded in self._decoder.each(media):
            if isinstance(decoded, MediaError):
                yield item, decoded
                continue
            batch.append((item, decoded))
            size += _size(decoded)
            if size >= BATCH_BYTES:
                yield from self._preprocess(batch)
                batch, size = [], 0
        yield from self._preprocess(batch)

    def _preprocess(self, batch: Sequence[tuple[Media, Any]]) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        for kind in self._preprocessors:
            items = [(item, decoded) for item, decoded in batch if item.kind == kind]
            if items:
                yield from self._together(kind, items)

    def _together(
        self, kind: MediaKind, items: Sequence[tuple[Media, Any]]
    ) -> Iterator[tuple[Media, TowerInput | MediaError]]:
        """Media of one kind preprocessed and kept; if they are refused, one by one, to find out which it was."""
        try:
            with torch.inference_mode(False):  # cached tensors must also serve training
                ready = self._preprocessors[kind](items)
        except MediaError as error:
            if len(items) == 1:
                yield items[0][0], error
            else:
                for one in items:
                    yield from self._together(kind, [one])
            return
        for (item, _), prepared in zip(items, ready, strict=True):
            self._keep(item, prepared)
            yield item, prepared

    def _keep(self, media: Media, prepared: TowerInput) -> None:
        with self._lock:
            self.preprocessed += 1
        self._extents.put(media, prepared.extent)
        self._known.put(media, prepared)


def _size(decoded: Any) -> int:
    """What a decoded medium takes in memory."""
    if isinstance(decoded, Image.Image):
        return decoded.width * decoded.height * 3
    return int(getattr(decoded, "nbytes", 0))


if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor

    from sensorium.data.sound import DecodedAudio
    from sensorium.data.video import DecodedVideo
else:
    torch = DeferredModule("torch")

# Frames processed at once: in float32 and cut into patches they take four times as much, several times over.
CLIP_BYTES = 1 << 26


class PicturePreprocessor:
    """The checkpoint's image processor over pictures."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __call__(self, items: Sequence[tuple[Media, Image.Image]]) -> list[TowerInput]:
        """Patches of each picture."""
        with naming_items(items, "image"):
            made = self._image_processor(images=[picture for _, picture in items], return_tensors="pt")
        extents = [Extent("picture", grid) for grid in _grids(made["image_grid_thw"])]
        return _split(made["pixel_values"], extents)


class VideoPreprocessor:
    """The checkpoint's video processor over sampled frames; it samples nothing itself.

    ``settings`` are given with every call. A clip of one frame is shown for two, as the last frame of an odd number is. A
    temporal step of a video that is heard may not last longer than ``chunk_s``.
    """

    def __init__(self, video_processor: Any, settings: Mapping[str, Any], chunk_s: float = inf) -> None:
        self._video_processor, self._chunk_s = video_processor, chunk_s
        self._settings = {"do_sample_frames": False, "return_tensors": "pt", **settings}

    def __call__(self, items: Sequence[tuple[Media, DecodedVideo]]) -> list[TowerInput]:
        """Patches of each clip."""
        prepared: list[TowerInput] = []
        for media, clip in items:
            self._refuse_slow(media, clip)
        for several in _by_size(items):
            # Frames that have their final size: a second resize would enlarge those that were asked for small.
            sized = _is_sized(several[0][0])
            settings = self._settings | ({"do_resize": False} if sized else {})
            with naming_items(several, "video"):
                made = self._video_processor(videos=[_two_or_more(clip.frames) for _, clip in several], **settings)
            extents = [
                Extent("video", grid, clip.frame_times_s, clip.seconds_per_frame, media.sound is not None)
                for grid, (media, clip) in zip(_grids(made["video_grid_thw"]), several, strict=True)
            ]
            prepared += _split(made["pixel_values_videos"], extents)
        return prepared

    def _refuse_slow(self, media: Media, clip: DecodedVideo) -> None:
        """Refuse a video that is heard and whose frames are further apart than its sound is cut: they would drift apart."""
        step = self._video_processor.temporal_patch_size * clip.seconds_per_frame
        if media.sound is not None and step > self._chunk_s:
            raise MediaError(
                f"{media.name}: two of its frames stand for {step:.2f} s, and its sound is put between them every "
                f"{self._chunk_s:g} s (use_audio_in_video). Take more frames (fps: 2 for one), or a shorter part of it."
            )


class SoundPreprocessor:
    """The checkpoint's mel spectrogram of sounds, with the numbers it has when padded to the extractor's full length.

    Each sound is computed by itself, so that what is kept of it does not depend on what it was asked for with. None is cut:
    one that the extractor would cut, or that is too short for a single token, is refused.
    """

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor

    def __call__(self, items: Sequence[tuple[Media, DecodedAudio]]) -> list[TowerInput]:
        """Mel frames of each sound."""
        return [self._spectrogram(media, sound) for media, sound in items]

    def _spectrogram(self, media: Media, sound: DecodedAudio) -> TowerInput:
        extractor, length = self._extractor, len(sound.samples)
        rate, hop = extractor.sampling_rate, extractor.hop_length
        refuse_other_rate(media, sound, rate)
        if length > extractor.n_samples:
            raise MediaError(
                f"{media.name}: the sound lasts {length / rate:.1f} s, and this checkpoint hears no more than "
                f"{extractor.n_samples / rate:g} s. Trim it (start, end): it is never cut."
            )
        frames = -(-length // hop)
        if sound_tokens(frames) < 1:
            raise MediaError(f"{media.name}: {length / rate * 1000:.0f} ms are too short to be heard; give 21 ms at least.")
        # Silence as far as the last window that touches a sample reaches: the same numbers as after minutes of it.
        padded = -(-(length + extractor.n_fft) // hop) * hop
        made = extractor(
            [sound.samples],
            sampling_rate=rate,
            padding="max_length",
            max_length=padded,
            truncation=False,
            return_tensors="pt",
        )
        return TowerInput(made["input_features"][0, :, :frames].T.contiguous(), Extent("sound", (frames, 1, 1)))


def refuse_other_rate(media: Media, sound: DecodedAudio, rate: int) -> None:
    """Refuse a sound that was decoded at another rate than the model listens at."""
    if sound.sample_rate != rate:
        raise MediaError(
            f"{media.name}: decoded at {sound.sample_rate} Hz; this model listens at {rate}. Ask for that rate."
        )


def sound_tokens(frames: int) -> int:
    """How many features so many mel frames become: one for four, by two strides of two."""
    return ((frames - 1) // 2 - 1) // 2 + 1


def video_settings(video_processor: Any) -> dict[str, Any]:
    """Settings of a checkpoint's video processor that must be passed explicitly, or the library warns."""
    capped = getattr(video_processor, "cap_pixels_per_frame", None)
    return {"cap_pixels_per_frame": bool(capped)}


def _by_size(items: Sequence[tuple[Media, DecodedVideo]]) -> Iterator[list[tuple[Media, DecodedVideo]]]:
    """Clips in order, as many at once as their frames allow; those that have their size and others apart."""
    several: list[tuple[Media, DecodedVideo]] = []
    held = 0
    for media, clip in items:
        if several and (held + clip.frames.nbytes > CLIP_BYTES or _is_sized(media) != _is_sized(several[0][0])):
            yield several
            several, held = [], 0
        several.append((media, clip))
        held += clip.frames.nbytes
    if several:
        yield several


def _is_sized(media: Media) -> bool:
    """Whether a video was decoded to the size that the model sees."""
    return isinstance(media.parameters, VideoParameters) and media.parameters.sampling != "middle"


def frame_rule(processor: Any, vision: Any, most: int, *, whole_clip: bool = False) -> FrameRule:
    """The official rule with a family's sizes: 128 to 768 tokens a frame, or less where a checkpoint's limit is lower.

    That is so where its limit is below ``most``. ``whole_clip``: its video processor counts the pixels of a clip, not of a
    frame.
    """
    multiple = vision.patch_size * vision.spatial_merge_size
    area, size = multiple**2, processor.video_processor.size
    usual = FrameRule("official", multiple, 128 * area, 768 * area, 115200 * area)
    if size["longest_edge"] >= most:
        return usual
    least, limit = size["shortest_edge"], size["longest_edge"]
    clip = limit if whole_clip else usual.clip_pixels
    return FrameRule("official", multiple, min(least, usual.min_pixels), min(limit, usual.max_pixels), clip)


def _two_or_more(frames_THW3: np.ndarray) -> Tensor:
    return torch.tensor(frames_THW3[[0, 0]] if len(frames_THW3) == 1 else frames_THW3)


def _grids(grids_M3: Tensor) -> list[Grid]:
    return [(time, height, width) for time, height, width in grids_M3.tolist()]


def _split(patches_PC: Tensor, extents: Sequence[Extent]) -> list[TowerInput]:
    sizes = [time * height * width for time, height, width in (extent.grid for extent in extents)]
    # A copy of each: a view would keep the whole batch alive in the cache.
    parts = [part.clone() for part in torch.split(patches_PC, sizes)]
    return [TowerInput(part, extent) for part, extent in zip(parts, extents, strict=True)]


@contextmanager
def naming_items(items: Sequence[tuple[Media, Any]], processor: str) -> Iterator[None]:
    """A processor's refusal (an absurd aspect ratio, for one) names the items."""
    try:
        yield
    except ValueError as error:
        names = ", ".join(media.name for media, _ in items)
        kind: MediaKind = items[0][0].kind
        raise MediaError(f"{names}: the {processor} processor refuses a {kind}: {error}.") from error
