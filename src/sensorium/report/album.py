"""Media on a page: pictures, and players of clips with what the model was given (sampled frames and times, loudness).

Small media are embedded, within a bound; other clips are referenced in the run directory's ``media/``, or only named.
For ``sensorium show`` frames, tiles and sounds are drawn as pictures: a sheet of labelled frames, a waveform with its
seconds.
"""

import base64
from collections.abc import Sequence
from html import escape
from io import BytesIO
from math import ceil, sqrt
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image, ImageDraw

from sensorium.data.decoder import Decoder
from sensorium.data.media_files import HEAD_BYTES, mime_type
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio, encode_wav
from sensorium.data.video import DecodedVideo
from sensorium.runs.episodes import TRANSCRIPTS, read_transcripts
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import MediaError

CLIP_BYTES = 512 * 1024  # the largest clip that is embedded
PIXELS, PLAIN_BYTES = 512, 96 * 1024  # larger pictures are embedded as smaller copies
TYPES = {"PNG": "image/png", "JPEG": "image/jpeg", "GIF": "image/gif", "WEBP": "image/webp"}
NO_ROOM = "left out to keep this page small"
FRAMES, FRAME_HEIGHT, FRAME_WIDTH = 8, 72, 128
BARS, BAR_HEIGHT = 60, 40


def _data_uri(kind: str, data: bytes) -> str:
    return f"data:{kind};base64,{base64.b64encode(data).decode()}"


def _player(store: MediaStore, media: Media, embed: bool) -> str:  # plays the part of a clip that the model was given
    kind = mime_type(store.head_of(media, HEAD_BYTES), media.kind)
    if embed:
        source = _data_uri(kind, store.bytes_of(media))
    else:
        assert store.folder is not None, "clips that are not embedded are in a folder"
        source = f"{store.folder.name}/{media.hash}"
    if kind.startswith("image/"):
        return f'<img class="moving" src="{source}" alt="video {media.hash[:8]}">'
    element, preload = "video" if media.kind == "video" else "audio", "auto" if embed else "none"
    asked, part = media.parameters, ""
    if asked is not None and (asked.start != 0 or asked.end is not None):
        part = f"#t={asked.start:g}" + (f",{asked.end:g}" if asked.end is not None else "")
    return (
        f'<{element} controls preload="{preload}"><source src="{source}{part}" type="{kind}">'
        f'<a href="{source}">{media.kind} {media.hash[:8]}</a></{element}>'
    )


def strip_of(
    video: DecodedVideo, most: int = FRAMES, size: tuple[int, int] = (FRAME_WIDTH, FRAME_HEIGHT)
) -> tuple[Image.Image, list[int]]:
    """Some frames side by side, at most so many and so large, and which they are."""
    shown = [round(i) for i in np.linspace(0, len(video.frames) - 1, min(most, len(video.frames)))]
    pictures = [Image.fromarray(video.frames[i]) for i in shown]
    for picture in pictures:
        picture.thumbnail(size)
    width, height = pictures[0].size
    strip = Image.new("RGB", (width * len(pictures), height))
    for place, picture in enumerate(pictures):
        strip.paste(picture, (place * width, 0))
    return strip, shown


def _jpeg_uri(picture: Image.Image, quality: int) -> str:
    buffer = BytesIO()
    picture.save(buffer, format="JPEG", quality=quality)
    return _data_uri("image/jpeg", buffer.getvalue())


def _strip_figure(id: str, size: tuple[int, int], shown: Sequence[int], video: DecodedVideo) -> str:
    width, height = size[0] // len(shown), size[1]
    frames = "".join(
        f'<span><svg viewBox="{place * width} 0 {width} {height}" role="img" aria-label="frame {i + 1}">'
        f'<use href="#{id}"/></svg>{video.times_s[i]:.2f} s</span>'
        for place, i in enumerate(shown)
    )
    return f'<div class="strip">{frames}</div>'


def loudness(sound: DecodedAudio, bars: int) -> list[float]:
    """The loudest sample of each of so many equal stretches."""
    parts = np.array_split(np.abs(sound.samples), min(bars, len(sound.samples)))
    return [float(part.max()) for part in parts]


def _wave_figure(sound: DecodedAudio) -> str:
    loud = loudness(sound, BARS)
    most = max(max(loud), 1e-6)
    bars = "".join(
        f"M{4 * place + 2} {BAR_HEIGHT / 2 * (1 - level / most):.1f}V{BAR_HEIGHT / 2 * (1 + level / most):.1f}"
        for place, level in enumerate(loud)
    )
    label = f"loudness over {sound.end_s - sound.start_s:.2f} seconds, {max(loud):.2f} at most"
    return (
        f'<svg class="wave" viewBox="0 0 {4 * len(loud)} {BAR_HEIGHT}" preserveAspectRatio="none" role="img" '
        f'aria-label="{label}"><path d="{bars}"/></svg>'
    )


def _caption(media: Media, clip: DecodedVideo | DecodedAudio, shown: int) -> str:  # what the model was given of a clip
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
    return f"<figcaption>{given}{name}{_changes(media)}</figcaption>"


def _changes(media: Media) -> str:  # how a medium was augmented for training
    changed = media.augmentation
    return "" if changed is None else f'<span class="augmented">augmented: {escape(changed.description)}</span>'


class Album:
    """Media of one page, each embedded once; past ``bound`` bytes they are only named.

    Clips above ``clip_bytes`` (default: CLIP_BYTES) are referenced in the store's folder, or named where it has none.
    ``judged`` is the file of judges' transcripts; by default that of the run which the store belongs to.
    """

    def __init__(
        self,
        store: MediaStore,
        bound: int,
        decoder: Decoder,
        *,
        clip_bytes: int | None = None,
        judged: Path | None = None,
    ) -> None:
        self.store, self.left, self.decoder = store, bound, decoder
        self.clip_bytes = CLIP_BYTES if clip_bytes is None else clip_bytes
        self.judged = store.folder.parent / TRANSCRIPTS if judged is None and store.folder is not None else judged
        self._pictures: dict[str, tuple[str, int, int]] = {}
        self._given: dict[Media, str] = {}
        self._seen: dict[tuple[Any, ...], Media] = {}

    def transcripts(self, episode: str) -> list[dict[str, Any]]:
        """What judges were asked about an episode."""
        return [] if self.judged is None else read_transcripts(self.judged, episode)

    def learn(self, episode: Episode) -> None:
        """Note the decoding parameters of an episode's clips, as its model's family completed them."""
        self._seen |= given_clips(episode)

    def show(self, media: Media) -> str:
        """The element that shows a medium, or says why it is not shown."""
        try:
            return self._picture(media) if media.kind == "picture" else self._clip(media)
        except MediaError as error:
            return _absent(media, str(error))

    def definitions(self) -> str:
        """The embedded pictures, for the head of the page."""
        small = ' class="small"'  # enlarged pixel by pixel, as the model sees them
        images = "".join(
            f'<image id="{id}"{small if max(width, height) <= 160 else ""} width="{width}" height="{height}" href="{uri}"/>'
            for id, (uri, width, height) in self._pictures.items()
        )
        return f'<svg width="0" height="0" class="album" aria-hidden="true"><defs>{images}</defs></svg>'

    def _picture(self, media: Media) -> str:
        id = f"m{media.hash[:16]}{media.key[len(media.hash) :]}"
        if id not in self._pictures:
            data, picture = self.store.shown_bytes(media), self.store.picture(media)
            format = Image.open(BytesIO(data)).format or ""
            if len(data) <= PLAIN_BYTES and max(picture.size) <= PIXELS and format in TYPES:
                uri = _data_uri(TYPES[format], data)
            else:
                picture = picture.copy()
                picture.thumbnail((PIXELS, PIXELS))
                uri = _jpeg_uri(picture, 85)
            if not self._defined(id, uri, *picture.size):
                return _absent(media, NO_ROOM)
        _, width, height = self._pictures[id]
        return (
            f'<svg class="picture" viewBox="0 0 {width} {height}" role="img" '
            f'aria-label="picture {media.hash[:8]}, {width} by {height} pixels"><use href="#{id}"/></svg>{_changes(media)}'
        )

    def _clip(self, media: Media) -> str:
        heard = media.kind == "sound" and media.augmentation is not None  # which no file has
        data = self._wav(media) if heard else b""
        size = (len(data) if heard else self.store.size_of(media)) * 4 // 3  # in base64
        embed = size <= min(self.left, self.clip_bytes)
        if embed:
            self.left -= size
        if heard and embed:
            shown = f'<audio controls src="{_data_uri("audio/wav", data)}"></audio>'
        elif not heard and (embed or self.store.folder is not None):
            shown = _player(self.store, media, embed)
        else:
            shown = _absent(media, NO_ROOM)
        if media not in self._given:
            seen = self._seen.get(asked(media), media)
            self._given[media] = "".join(self._as_given(part) for part in seen.parts)
        return f'<figure class="clip {media.kind}">{shown}{self._given[media]}</figure>'

    def _wav(self, media: Media) -> bytes:
        sound = self.decoder.get(media)
        assert isinstance(sound, DecodedAudio)
        return encode_wav(sound.samples, sound.sample_rate)

    def _as_given(self, media: Media) -> str:
        try:
            clip = self.decoder.get(media)
        except MediaError as error:
            return _absent(media, str(error))
        if isinstance(clip, DecodedAudio):
            return _wave_figure(clip) + _caption(media, clip, 0)
        assert isinstance(clip, DecodedVideo), "pictures are shown as they are"
        strip, shown = strip_of(clip)
        id = f"s{media.key}"
        if not self._defined(id, _jpeg_uri(strip, 80), *strip.size):
            return _caption(media, clip, 0)
        return _strip_figure(id, strip.size, shown, clip) + _caption(media, clip, len(shown))

    def _defined(self, id: str, uri: str, width: int, height: int) -> bool:
        if len(uri) > self.left:
            return False
        self.left -= len(uri)
        self._pictures[id] = (uri, width, height)
        return True


def given_clips(episode: Episode) -> dict[tuple[Any, ...], Media]:
    """The videos of an episode by what was asked for, with the parameters that the model's family completed."""
    spans = (span for thread in episode.threads for segment in thread.segments for span in segment.media)
    return {asked(span.media): span.media for span in spans if span.media.kind == "video"}


def asked(media: Media) -> tuple[Any, ...]:
    """What is asked for of a medium, whatever a family completes."""
    wanted = media.parameters
    if not isinstance(wanted, VideoParameters):
        return (media,)
    part = (wanted.frames, wanted.fps, wanted.start, wanted.end, wanted.max_frames, wanted.use_audio_in_video)
    return (media.hash, media.augmentation, *part)


def _absent(media: Media, why: str) -> str:
    return f'<span class="absent">{media.kind} {media.hash[:8]}: {escape(why)}</span>'


SHEET_PIXELS = 12_000_000  # of a whole sheet; frames are drawn smaller where they would take more
LABEL = 14  # pixels below a frame
GAP = 4
GROUND, INK, FAINT, WAVE = (255, 255, 255), (20, 20, 20), (215, 215, 215), (40, 110, 170)
WAVE_SIZE = (960, 240)
WAVE_FOOT = 18


def contact_sheet(frames: Sequence[Image.Image], labels: Sequence[str] = ()) -> Image.Image:
    """Frames of one size in rows, each with its label below; a single frame without labels is itself."""
    if len(frames) == 1 and not labels:
        return frames[0]
    width, height = frames[0].size
    across = max(1, min(len(frames), ceil(sqrt(len(frames) * height / width))))
    down = ceil(len(frames) / across)
    scale = min(1.0, sqrt(SHEET_PIXELS / (across * down * width * height)))
    cell = max(1, round(width * scale)), max(1, round(height * scale))
    foot = LABEL if labels else 0
    step = max(cell[0], 44 if labels else 0) + GAP, cell[1] + foot + GAP
    sheet = Image.new("RGB", (across * step[0] - GAP, down * step[1] - GAP), GROUND)
    pen = ImageDraw.Draw(sheet)
    for place, frame in enumerate(frames):
        left, top = place % across * step[0], place // across * step[1]
        sheet.paste(frame if scale == 1.0 else frame.resize(cell), (left, top))
        if labels:
            pen.text((left + 1, top + cell[1] + 1), labels[place], fill=INK)
    return sheet


def waveform(samples: np.ndarray, rate: int, start_s: float = 0.0) -> Image.Image:
    """The lowest and highest sample of each column, with full scale as the height and a line at every whole second."""
    width, height = WAVE_SIZE
    picture = Image.new("RGB", (width, height + WAVE_FOOT), GROUND)
    pen = ImageDraw.Draw(picture)
    seconds = len(samples) / rate
    pace = next(pace for pace in (0.1, 0.2, 0.5, 1, 2, 5, 10, 30, 60, 300, 1800, 1e9) if seconds / pace <= 12)
    for nth in range(int(seconds / pace) + 1):
        x = round(nth * pace / max(seconds, 1e-9) * (width - 1))
        pen.line([(x, 0), (x, height)], fill=FAINT)
        pen.text((min(x + 2, width - 40), height + 3), f"{start_s + nth * pace:g} s", fill=INK)
    pen.line([(0, height // 2), (width, height // 2)], fill=FAINT)
    edges = np.linspace(0, len(samples), width + 1).astype(int)
    for x in range(width):
        part = samples[edges[x] : max(edges[x] + 1, edges[x + 1])]
        low, high = (float(np.clip(value, -1, 1)) for value in (part.min(), part.max()))
        pen.line([(x, (1 - high) / 2 * (height - 1)), (x, (1 - low) / 2 * (height - 1))], fill=WAVE)
    return picture
