"""The album of a page: media embedded once each as data URIs, pictures scaled down where large, within a bound."""

import base64
from html import escape
from io import BytesIO

from PIL import Image

from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import MediaError

PIXELS = 512
PLAIN_BYTES = 96 * 1024
TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}


class Album:
    """Media of one page. A medium that is shown twice is embedded once; past ``bound`` bytes media are only named."""

    def __init__(self, store: MediaStore, bound: int) -> None:
        self.store, self.left = store, bound
        self._pictures: dict[str, tuple[str, int, int]] = {}

    def show(self, media: Media) -> str:
        """The element that shows a medium, or says why it is not shown."""
        try:
            return self._picture(media) if media.kind == "picture" else self._clip(media)
        except MediaError as error:
            return _absent(media, str(error))

    def definitions(self) -> str:
        """The pictures themselves, to stand once at the head of the page."""
        images = "".join(
            f'<image id="m{digest[:16]}"{_small(width, height)} width="{width}" height="{height}" href="{uri}"/>'
            for digest, (uri, width, height) in self._pictures.items()
        )
        return f'<svg width="0" height="0" class="album" aria-hidden="true"><defs>{images}</defs></svg>'

    def _picture(self, media: Media) -> str:
        if media.hash not in self._pictures:
            embedded = _embed(self.store.bytes_of(media), self.store.picture(media))
            if len(embedded[0]) > self.left:
                return _absent(media, "left out to keep this page small")
            self.left -= len(embedded[0])
            self._pictures[media.hash] = embedded
        _, width, height = self._pictures[media.hash]
        return (
            f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="picture {media.hash[:8]}, {width} by {height} pixels"><use href="#m{media.hash[:16]}"/></svg>'
        )

    def _clip(self, media: Media) -> str:
        data = self.store.bytes_of(media)
        if len(data) * 4 // 3 > self.left:
            return _absent(media, "left out to keep this page small")
        self.left -= len(data) * 4 // 3
        element = "video" if media.kind == "video" else "audio"
        return f'<{element} controls src="{_uri("video/mp4" if element == "video" else "audio/wav", data)}"></{element}>'


def _embed(data: bytes, picture: Image.Image) -> tuple[str, int, int]:
    """A picture's data URI and its size: its own bytes where they are few, else a smaller copy."""
    format = Image.open(BytesIO(data)).format or ""
    if len(data) <= PLAIN_BYTES and max(picture.size) <= PIXELS and format in TYPES:
        return _uri(TYPES[format], data), picture.width, picture.height
    copy = picture.copy()
    copy.thumbnail((PIXELS, PIXELS))
    buffer = BytesIO()
    copy.save(buffer, format="JPEG", quality=85)
    return _uri("image/jpeg", buffer.getvalue()), copy.width, copy.height


def _uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _small(width: int, height: int) -> str:
    """Small pictures are enlarged pixel by pixel, as the model sees them."""
    return ' class="small"' if max(width, height) <= 160 else ""


def _absent(media: Media, why: str) -> str:
    return f'<span class="absent">{media.kind} {media.hash[:8]}: {escape(why)}</span>'
