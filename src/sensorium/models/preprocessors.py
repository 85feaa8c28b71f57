"""What makes a tower's input of decoded media: the checkpoint's own image, video and sound processors.

Here a picture is resized: the checkpoint's image processor does it. Frames of a video get their size when they are decoded
(``data/frame_sizes.py``). Checkpoints on the general path have the preprocessors of ``general_media.py``, families that cut
pictures into tiles those of ``families/tiles.py`` or their own.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import inf, prod
from typing import TYPE_CHECKING, Any

from sensorium.models.prepared_media import Extent, Grid, TowerInput
from sensorium.recipe.family_facts import DeferredModule
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, ModelError

if TYPE_CHECKING:
    import torch
    from PIL import Image
    from torch import Tensor

    from sensorium.data.sound import DecodedAudio
    from sensorium.data.video import DecodedVideo
else:
    torch = DeferredModule("torch")

CAP = "cap_pixels_per_frame"
CLIP_BYTES = 1 << 26  # of frames processed at once: as float32 patches they take four times as much, several times over


class PicturePreprocessor:
    """The checkpoint's image processor over pictures."""

    def __init__(self, image_processor: Any) -> None:
        self._image_processor = image_processor

    def __call__(self, items: Sequence[tuple[Media, Image.Image]]) -> list[TowerInput]:
        with naming_items(items, "image"):
            made = self._image_processor(images=[picture for _, picture in items], return_tensors="pt")
        return _split(made["pixel_values"], [Extent("picture", grid) for grid in _grids(made["image_grid_thw"])])


class VideoPreprocessor:
    """The checkpoint's video processor over sampled frames; it samples nothing itself.

    ``settings`` are given with every call. A clip of one frame is shown for two, as the last frame of an odd number is. A
    temporal step of a video with sound may not last longer than ``chunk_s``.
    """

    def __init__(self, video_processor: Any, settings: Mapping[str, Any], chunk_s: float = inf) -> None:
        self._video_processor, self._chunk_s = video_processor, chunk_s
        self._settings = {"do_sample_frames": False, "return_tensors": "pt", **settings}

    def __call__(self, items: Sequence[tuple[Media, DecodedVideo]]) -> list[TowerInput]:
        for media, clip in items:
            step = self._video_processor.temporal_patch_size * clip.seconds_per_frame
            if media.sound is not None and step > self._chunk_s:  # frames and sound would drift apart
                raise MediaError(
                    f"{media.name}: two of its frames span {step:.2f} s, and its sound is put between them every "
                    f"{self._chunk_s:g} s (use_audio_in_video). Take more frames (fps: 2, for example), or a shorter part."
                )
        prepared: list[TowerInput] = []
        for several in _batches(items):
            # Frames that have their final size: a second resize would enlarge those that were asked for small.
            settings = self._settings | ({"do_resize": False} if _is_sized(several[0][0]) else {})
            clips = [clip.frames[[0, 0]] if len(clip.frames) == 1 else clip.frames for _, clip in several]
            with naming_items(several, "video"):
                made = self._video_processor(videos=[torch.tensor(frames) for frames in clips], **settings)
            extents = [
                Extent("video", grid, clip.frame_times_s, clip.seconds_per_frame, media.sound is not None)
                for grid, (media, clip) in zip(_grids(made["video_grid_thw"]), several, strict=True)
            ]
            prepared += _split(made["pixel_values_videos"], extents)
        return prepared


class SoundPreprocessor:
    """The checkpoint's mel spectrogram of sounds, with the numbers it has when padded to the extractor's full length.

    Each sound is computed by itself, so that the result does not depend on the batch. None is cut: one that the extractor
    would cut, or that is too short for a single token, is refused.
    """

    def __init__(self, extractor: Any) -> None:
        self._extractor = extractor

    def __call__(self, items: Sequence[tuple[Media, DecodedAudio]]) -> list[TowerInput]:
        return [self._spectrogram(media, sound) for media, sound in items]

    def _spectrogram(self, media: Media, sound: DecodedAudio) -> TowerInput:
        extractor, length = self._extractor, len(sound.samples)
        rate, hop = extractor.sampling_rate, extractor.hop_length
        refuse_other_rate(media, sound, rate)
        if length > extractor.n_samples:
            raise MediaError(
                f"{media.name}: the sound lasts {length / rate:.1f} s, and this checkpoint takes no more than "
                f"{extractor.n_samples / rate:g} s. Trim it (start, end): it is never cut."
            )
        frames = -(-length // hop)
        if sound_tokens(frames) < 1:
            raise MediaError(f"{media.name}: {length / rate * 1000:.0f} ms are too short for a token; give 21 ms at least.")
        # Silence up to the last window that touches a sample: the same numbers as after minutes of it.
        padded = -(-(length + extractor.n_fft) // hop) * hop
        settings = {"padding": "max_length", "max_length": padded, "truncation": False, "return_tensors": "pt"}
        made = extractor([sound.samples], sampling_rate=rate, **settings)
        return TowerInput(made["input_features"][0, :, :frames].T.contiguous(), Extent("sound", (frames, 1, 1)))


def refuse_other_rate(media: Media, sound: DecodedAudio, rate: int) -> None:
    """Refuse a sound that was decoded at another sample rate than the model's."""
    if sound.sample_rate != rate:
        raise MediaError(f"{media.name}: decoded at {sound.sample_rate} Hz; this model takes {rate}. Ask for that rate.")


def sound_tokens(frames: int) -> int:
    """The number of features of so many mel frames: one for four, by two strides of two."""
    return ((frames - 1) // 2 - 1) // 2 + 1


def video_settings(video_processor: Any) -> dict[str, Any]:
    """Settings of a checkpoint's video processor that must be passed explicitly, or the library warns."""
    capped = bool(getattr(video_processor, CAP, None))
    if hasattr(type(video_processor), CAP):
        return {CAP: capped}
    if capped:
        raise ModelError(f"its video processor sets {CAP}, which transformers knows from 5.16 on: install a newer one.")
    return {}


def usual_settings(processor: Any, kind: str) -> dict[str, Any]:
    """What a stock processor passes its image or video processor by default (transformers 5.23, or older ones)."""
    return getattr(processor, kind, None) or processor.valid_processor_kwargs._defaults[kind]


def _batches(items: Sequence[tuple[Media, DecodedVideo]]) -> Iterator[list[tuple[Media, DecodedVideo]]]:
    """Clips in order, up to ``CLIP_BYTES`` at once; those with their final size and others apart."""
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
    """Whether a video was decoded to its final size."""
    return isinstance(media.parameters, VideoParameters) and media.parameters.sampling != "middle"


def _grids(grids_M3: Tensor) -> list[Grid]:
    return [(time, height, width) for time, height, width in grids_M3.tolist()]


def _split(patches_PC: Tensor, extents: Sequence[Extent]) -> list[TowerInput]:
    sizes = [prod(extent.grid) for extent in extents]
    # A copy of each: a view would keep the whole batch alive in the cache.
    parts = [part.clone() for part in torch.split(patches_PC, sizes)]
    return [TowerInput(part, extent) for part, extent in zip(parts, extents, strict=True)]


@contextmanager
def naming_items(items: Sequence[tuple[Media, Any]], processor: str) -> Iterator[None]:
    """Inside, what a processor refuses (an absurd aspect ratio, a sound below a window) becomes a MediaError naming it."""
    try:
        yield
    except (ValueError, RuntimeError) as error:
        if "memory" in str(error):
            raise
        names = ", ".join(media.name for media, _ in items)
        raise MediaError(f"{names}: the {processor} processor refuses a {items[0][0].kind}: {error}.") from error
