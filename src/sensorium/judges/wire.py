"""Messages as OpenAI's chat API has them: text, pictures, videos (as frames or as a file) and sounds as content parts."""

import base64
from io import BytesIO
from typing import Any

from PIL import Image

from sensorium.media.audio import DecodedAudio
from sensorium.media.decoder import decode
from sensorium.media.mime import mime_type
from sensorium.media.store import MediaStore
from sensorium.media.video import DecodedVideo
from sensorium.media.wav import encode_wav
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError

MEDIUM_TOKENS = 300
"""What a picture or frame, or a second of sound, is taken for when tokens are estimated."""


def wire_messages(messages: tuple[Message, ...], store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    """The messages as the API takes them; media are read from the store."""
    return [_message(message, store, video) for message in messages]


def _message(message: Message, store: MediaStore | None, video: str) -> dict[str, Any]:
    if not message.media:
        return {"role": message.role, "content": _sendable(message.text)}
    parts: list[dict[str, Any]] = []
    for block in message.content:
        if isinstance(block, Text):
            parts.append({"type": "text", "text": _sendable(block.text)})
        else:
            parts += _media_parts(block, store, video)
    return {"role": message.role, "content": parts}


def _sendable(text: str) -> str:
    """The text with half characters (lone surrogates, which JSON can hold and UTF-8 cannot) written as escapes."""
    return text.encode("utf-8", "backslashreplace").decode()


def _media_parts(media: Media, store: MediaStore | None, video: str) -> list[dict[str, Any]]:
    if store is None:
        raise MediaError(f"a judge is to be shown the {media.kind} '{media.name}', and there is no store that holds it.")
    if media.kind == "picture":
        data = store.bytes_of(media)
        return [_picture(data, mime_type(data[:64], "picture"))]
    if media.kind == "sound":
        return [_sound(media, store)]
    sound = [] if media.sound is None else [_sound(media.sound, store)]
    return [*(_file(media, store) if video == "file" else _frames(media, store)), *sound]


def _picture(data: bytes, mime: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": f"data:{mime};base64,{base64.b64encode(data).decode()}"}}


def _frames(media: Media, store: MediaStore) -> list[dict[str, Any]]:
    """Frames as pictures, each after its time."""
    clip = decode(store, media)
    assert isinstance(clip, DecodedVideo)
    parts: list[dict[str, Any]] = []
    for time_s, frame in zip(clip.times_s.tolist(), clip.frames, strict=True):
        buffer = BytesIO()
        Image.fromarray(frame).save(buffer, "JPEG", quality=90)
        parts += [{"type": "text", "text": f"<{time_s:.1f} seconds>"}, _picture(buffer.getvalue(), "image/jpeg")]
    return parts


def _file(media: Media, store: MediaStore) -> list[dict[str, Any]]:
    """The whole file; a trimmed one would show more than was asked for."""
    asked = media.parameters
    assert isinstance(asked, VideoParameters)
    if asked.start or asked.end is not None:
        raise MediaError(f"video '{media.name}' is trimmed, so a judge can be shown its frames only; set video: frames.")
    data = store.bytes_of(media)
    url = f"data:{mime_type(data[:64], 'video')};base64,{base64.b64encode(data).decode()}"
    return [{"type": "video_url", "video_url": {"url": url}}]


def video_files_as_images(messages: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The messages with video files as ``image_url``: Azure's API has no other part for them, and TaskMem sends them so."""
    return [
        {**message, "content": [_video_as_image(part) for part in message["content"]]}
        if has_video_file([message])
        else message
        for message in messages
    ]


def has_video_file(messages: list[dict[str, Any]]) -> bool:
    """True if a video is shown as a file."""
    return any(
        part["type"] == "video_url"
        for message in messages
        if not isinstance(message["content"], str)
        for part in message["content"]
    )


def _video_as_image(part: dict[str, Any]) -> dict[str, Any]:
    return {"type": "image_url", "image_url": part["video_url"]} if part["type"] == "video_url" else part


def _sound(media: Media, store: MediaStore) -> dict[str, Any]:
    clip = decode(store, media)
    assert isinstance(clip, DecodedAudio)
    data = encode_wav(clip.samples, clip.sample_rate)
    return {"type": "input_audio", "input_audio": {"data": base64.b64encode(data).decode(), "format": "wav"}}


def estimated_tokens(messages: list[dict[str, Any]], most: int) -> int:
    """About how many tokens a call takes: a quarter of the characters, a fixed number a medium, and all it may write."""
    found = most
    for message in messages:
        content = message["content"]
        parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
        found += sum(len(part["text"]) // 4 + 4 if part["type"] == "text" else MEDIUM_TOKENS for part in parts)
    return found
