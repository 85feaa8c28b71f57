"""Videos and sounds on a page: a player, and what the model was given: the sampled frames with their times, the loudness.

Small clips stand in the page itself; others lie beside it, in the run directory's ``media/``, and are never loaded here.
"""

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from typing import Any

import numpy as np
from PIL import Image

from sensorium.data.decoder import Decoder
from sensorium.data.media_files import HEAD_BYTES, mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.runs.episodes import TRANSCRIPTS, read_transcripts
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import MediaError

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


# What is embedded stays within a bound; what a page has no room for is shown from its file, or only named.


PIXELS = 512
PLAIN_BYTES = 96 * 1024
TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
NO_ROOM = "left out to keep this page small"


class Album:
    """Media of one page. A picture that is shown twice is embedded once; past ``bound`` bytes media are only named.

    ``decoder`` gives the frames and samples of clips as the model was given them.
    """

    def __init__(self, store: MediaStore, bound: int, decoder: Decoder) -> None:
        self.store, self.left, self.decoder = store, bound, decoder
        self._pictures: dict[str, tuple[str, int, int]] = {}
        self._given: dict[Media, str] = {}
        self._seen: dict[tuple[Any, ...], Media] = {}

    def transcripts(self, episode: str) -> list[dict[str, Any]]:
        """What judges were asked about an episode; nothing where none were."""
        folder = self.store.folder
        return [] if folder is None else read_transcripts(folder.parent / TRANSCRIPTS, episode)

    def learn(self, episode: Episode) -> None:
        """Note what an episode's model was shown of the clips in its messages: a family decides what they leave open."""
        spans = (span for thread in episode.threads for segment in thread.segments for span in segment.media)
        self._seen |= {_asked(span.media): span.media for span in spans if span.media.kind == "video"}

    def show(self, media: Media) -> str:
        """The element that shows a medium, or says why it is not shown."""
        try:
            return self._picture(media) if media.kind == "picture" else self._clip(media)
        except MediaError as error:
            return _absent(media, str(error))

    def definitions(self) -> str:
        """The pictures themselves, to stand once at the head of the page."""
        images = "".join(
            f'<image id="{id}"{_small(width, height)} width="{width}" height="{height}" href="{uri}"/>'
            for id, (uri, width, height) in self._pictures.items()
        )
        return f'<svg width="0" height="0" class="album" aria-hidden="true"><defs>{images}</defs></svg>'

    def _picture(self, media: Media) -> str:
        id = f"m{media.hash[:16]}"
        if id not in self._pictures and not self._defined(
            id, *_embed(self.store.bytes_of(media), self.store.picture(media))
        ):
            return _absent(media, NO_ROOM)
        _, width, height = self._pictures[id]
        return (
            f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="picture {media.hash[:8]}, {width} by {height} pixels"><use href="#{id}"/></svg>'
        )

    def _clip(self, media: Media) -> str:
        size = embedded_size(self.store, media)
        embed = size <= min(self.left, CLIP_BYTES)
        if embed:
            self.left -= size
        if embed or self.store.folder is not None:
            shown = player(self.store, media, embed)
        else:
            shown = _absent(media, NO_ROOM)
        if media not in self._given:
            seen = self._seen.get(_asked(media), media)
            self._given[media] = "".join(self._as_given(part) for part in seen.parts)
        return f'<figure class="clip {media.kind}">{shown}{self._given[media]}</figure>'

    def _as_given(self, media: Media) -> str:
        """What the model was given of a clip."""
        try:
            clip = self.decoder.get(media)
        except MediaError as error:
            return _absent(media, str(error))
        if isinstance(clip, DecodedAudio):
            return wave_figure(clip) + caption(media, clip, 0)
        assert isinstance(clip, DecodedVideo), "pictures are shown as they are"
        strip, shown = strip_of(clip)
        id = f"s{media.key}"
        if not self._defined(id, strip_uri(strip), *strip.size):
            return caption(media, clip, 0)
        return strip_figure(id, strip.size, shown, clip) + caption(media, clip, len(shown))

    def _defined(self, id: str, uri: str, width: int, height: int) -> bool:
        """Embed a picture, if there is room for it."""
        if len(uri) > self.left:
            return False
        self.left -= len(uri)
        self._pictures[id] = (uri, width, height)
        return True


def _asked(media: Media) -> tuple[Any, ...]:
    """What tells the clips of a page apart, whether or not a family has decided what their messages left open."""
    asked = media.parameters
    if not isinstance(asked, VideoParameters):
        return (media,)
    return (media.hash, asked.frames, asked.fps, asked.start, asked.end, asked.max_frames, asked.use_audio_in_video)


def _embed(data: bytes, picture: Image.Image) -> tuple[str, int, int]:
    """A picture's data URI and its size: its own bytes where they are few, else a smaller copy."""
    format = Image.open(BytesIO(data)).format or ""
    if len(data) <= PLAIN_BYTES and max(picture.size) <= PIXELS and format in TYPES:
        return data_uri(TYPES[format], data), picture.width, picture.height
    copy = picture.copy()
    copy.thumbnail((PIXELS, PIXELS))
    buffer = BytesIO()
    copy.save(buffer, format="JPEG", quality=85)
    return data_uri("image/jpeg", buffer.getvalue()), copy.width, copy.height


def _small(width: int, height: int) -> str:
    """Small pictures are enlarged pixel by pixel, as the model sees them."""
    return ' class="small"' if max(width, height) <= 160 else ""


def _absent(media: Media, why: str) -> str:
    return f'<span class="absent">{media.kind} {media.hash[:8]}: {escape(why)}</span>'
