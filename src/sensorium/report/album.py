"""The album of a page: pictures embedded once each as data URIs, scaled down where large; clips by their players.

What is embedded stays within a bound; what a page has no room for is shown from its file, or only named.
"""

from html import escape
from io import BytesIO
from typing import Any

from PIL import Image

from sensorium.media.audio import DecodedAudio
from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.media.video import DecodedVideo
from sensorium.record.judge_transcripts import TRANSCRIPTS, read_transcripts
from sensorium.report.clips import (
    CLIP_BYTES,
    caption,
    data_uri,
    embedded_size,
    player,
    strip_figure,
    strip_of,
    strip_uri,
    wave_figure,
)
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import MediaError

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
