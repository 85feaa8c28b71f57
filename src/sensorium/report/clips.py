"""Videos and sounds on a page: a player, and what the model was given: the sampled frames with their times, the loudness.

Small clips stand in the page itself; others lie beside it, in the run directory's ``media/``, and are never loaded here.
"""

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO

import numpy as np
from PIL import Image

from sensorium.media.audio import DecodedAudio
from sensorium.media.mime import HEAD_BYTES, mime_type
from sensorium.media.store import MediaStore
from sensorium.media.video import DecodedVideo
from sensorium.vocabulary.content import Media

CLIP_BYTES = 512 * 1024
"""The largest clip that is embedded."""

FRAMES, FRAME_HEIGHT, FRAME_WIDTH = 8, 72, 128
BARS, BAR_HEIGHT = 60, 40


def data_uri(kind: str, data: bytes) -> str:
    """Bytes as a URI that holds them."""
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def embedded_size(store: MediaStore, media: Media) -> int:
    """What a clip takes in a page, told without reading it."""
    return store.size_of(media) * 4 // 3


def player(store: MediaStore, media: Media, embed: bool) -> str:
    """A player of a clip, of the part that the model was given; or its file, where there is no player for it."""
    kind = mime_type(store.head_of(media, HEAD_BYTES), media.kind)
    if embed:
        source = data_uri(kind, store.bytes_of(media))
    else:
        assert store.folder is not None, "what is not embedded lies in a folder"
        source = f"{store.folder.name}/{media.hash}"
    if kind.startswith("image/"):
        return f'<img class="moving" src="{source}" alt="video {media.hash[:8]}">'
    element = "video" if media.kind == "video" else "audio"
    preload = "auto" if embed else "none"
    return (
        f'<{element} controls preload="{preload}"><source src="{source}{_part(media)}" type="{kind}">'
        f'<a href="{source}">{media.kind} {media.hash[:8]}</a></{element}>'
    )


def strip_of(video: DecodedVideo) -> tuple[Image.Image, list[int]]:
    """Some of the sampled frames side by side, small, and which they are."""
    shown = [round(i) for i in np.linspace(0, len(video.frames) - 1, min(FRAMES, len(video.frames)))]
    pictures = [Image.fromarray(video.frames[i]) for i in shown]
    for picture in pictures:
        picture.thumbnail((FRAME_WIDTH, FRAME_HEIGHT))
    width, height = pictures[0].size
    strip = Image.new("RGB", (width * len(pictures), height))
    for place, picture in enumerate(pictures):
        strip.paste(picture, (place * width, 0))
    return strip, shown


def strip_uri(strip: Image.Image) -> str:
    """A strip as a small JPEG."""
    buffer = BytesIO()
    strip.save(buffer, format="JPEG", quality=80)
    return data_uri("image/jpeg", buffer.getvalue())


def strip_figure(id: str, size: tuple[int, int], shown: Sequence[int], video: DecodedVideo) -> str:
    """The frames of the strip ``id`` of a page, each with its time below it."""
    width, height = size[0] // len(shown), size[1]
    frames = "".join(
        f'<span><svg viewBox="{place * width} 0 {width} {height}" role="img" aria-label="frame {i + 1}">'
        f'<use href="#{id}"/></svg>{video.times_s[i]:.2f} s</span>'
        for place, i in enumerate(shown)
    )
    return f'<div class="strip">{frames}</div>'


def wave_figure(sound: DecodedAudio) -> str:
    """How loud a sound is over time."""
    parts = np.array_split(np.abs(sound.samples), min(BARS, len(sound.samples)))
    loud = [float(part.max()) for part in parts]
    most = max(max(loud), 1e-6)
    bars = "".join(
        f"M{4 * place + 2} {BAR_HEIGHT / 2 * (1 - level / most):.1f}V{BAR_HEIGHT / 2 * (1 + level / most):.1f}"
        for place, level in enumerate(loud)
    )
    told = f"loudness over {sound.end_s - sound.start_s:.2f} seconds, {max(loud):.2f} at most"
    return (
        f'<svg class="wave" viewBox="0 0 {4 * len(loud)} {BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{told}"><path d="{bars}"/></svg>'
    )


def caption(media: Media, clip: DecodedVideo | DecodedAudio, shown: int) -> str:
    """What the model was given of a clip, in words."""
    part = f"{clip.end_s - clip.start_s:.2f} s"
    if clip.start_s > 0 or clip.end_s < clip.duration_s:
        part = f"{clip.start_s:.2f} to {clip.end_s:.2f} of {clip.duration_s:.2f} s"
    if isinstance(clip, DecodedVideo):
        count = len(clip.frames)
        height, width = clip.frames.shape[1:3]
        given = f"{count} frame{'s' if count > 1 else ''} of {width} × {height} from {part}"
        given += f", {shown} shown" if shown < count else ""
    else:
        given = f"{part} at {clip.sample_rate / 1000:g} kHz"
    name = f"<span>{escape(media.origin)}</span>" if media.origin else ""
    return f"<figcaption>{given}{name}</figcaption>"


def _part(media: Media) -> str:
    """The part that was asked for, as players take it."""
    asked = media.parameters
    if asked is None or (asked.start == 0 and asked.end is None):
        return ""
    return f"#t={asked.start:g}" + (f",{asked.end:g}" if asked.end is not None else "")
