"""From plain data to messages: roles and content blocks as data sets write them. Every error names the row."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_args

from sensorium.media.picture import picture_bytes
from sensorium.media.sources import base64_bytes
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Block, Media, Message, Role, Text
from sensorium.vocabulary.errors import TaskError, nearest

ROLES: tuple[str, ...] = get_args(Role)
PICTURE_TYPES = ("image", "picture", "image_url")
PICTURE_KEYS = ("path", "data", "bytes", "url", "image", "image_url")
PLACEHOLDER = "<image>"


@dataclass(frozen=True)
class Place:
    """Where a row stands: its name in errors, the folder its paths start from, the store its media go to."""

    where: str
    folder: Path
    store: MediaStore

    def error(self, what: str) -> TaskError:
        """An error that names the row."""
        return TaskError(f"{self.where}: {what}")

    def picture(self, source: Any, item: str) -> Media:
        """A picture of this row, read and decoded; a missing or corrupt one is an error that names row and item."""
        origin = f"{self.where}, {item}"
        return self.store.put_picture(picture_bytes(source, origin, self.folder), origin)


def messages_of(raw: Any, place: Place) -> tuple[Message, ...]:
    """Messages from ``[{"role": …, "content": text or blocks}, …]``."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise place.error(f"'messages' must be a list of messages, not {raw!r:.60}.")
    return tuple(_message(message, f"message {i}", place) for i, message in enumerate(raw))


def fill_placeholders(messages: Sequence[Message], pictures: Sequence[Media], place: Place) -> tuple[Message, ...]:
    """Put the pictures where the texts say ``<image>``, in order; their numbers must agree."""
    count = sum(block.text.count(PLACEHOLDER) for m in messages for block in m.content if isinstance(block, Text))
    if count != len(pictures):
        raise place.error(
            f"the text has {count} {PLACEHOLDER} placeholders and the row has {len(pictures)} pictures. Give each picture "
            "its placeholder, or set pictures_first: true for texts without any."
        )
    left = iter(pictures)
    return tuple(Message(m.role, tuple(b for block in m.content for b in _filled(block, left))) for m in messages)


def put_first(pictures: Sequence[Media], messages: Sequence[Message], place: Place) -> tuple[Message, ...]:
    """Put the pictures before the last message's text, which must not have places for them."""
    if any(PLACEHOLDER in message.text for message in messages):
        raise place.error(f"the text has {PLACEHOLDER} placeholders and pictures_first is on; turn it off.")
    return (*messages[:-1], Message(messages[-1].role, (*pictures, *messages[-1].content)))


def _message(raw: Any, item: str, place: Place) -> Message:
    if not isinstance(raw, Mapping):
        raise place.error(f"{item} must be an object with role and content, not {raw!r:.60}.")
    raw = _present(raw)
    for key in raw:
        if key not in ("role", "content"):
            raise place.error(f"{item} has an unknown key '{key}'{nearest(str(key), ['role', 'content'])}")
    role, content = raw.get("role"), raw.get("content")
    if role not in ROLES:
        raise place.error(f"{item} has the role {role!r:.40}{nearest(str(role), list(ROLES))}")
    if isinstance(content, str):
        return Message(role, (Text(content),))
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise place.error(f"{item}: content must be text or a list of blocks, not {content!r:.60}.")
    return Message(role, tuple(_block(block, f"{item}, block {i}", place) for i, block in enumerate(content)))


def _block(raw: Any, item: str, place: Place) -> Block:
    if isinstance(raw, str):
        return Text(raw)
    if not isinstance(raw, Mapping):
        raise place.error(f"{item} must be an object with a type, not {raw!r:.60}.")
    raw = _present(raw)
    kind = raw.get("type")
    if kind == "text":
        if set(raw) != {"type", "text"} or not isinstance(raw["text"], str):
            raise place.error(f"{item}: a text block is {{type: text, text: …}}; this one has keys {sorted(raw)}.")
        return Text(raw["text"])
    if kind in PICTURE_TYPES:
        return _picture(raw, item, place)
    raise place.error(f"{item} has the type {kind!r:.40}{nearest(str(kind), ['text', *PICTURE_TYPES])}")


def _picture(raw: Mapping[str, Any], item: str, place: Place) -> Media:
    keys = [key for key in raw if key != "type"]
    if len(keys) != 1 or keys[0] not in PICTURE_KEYS:
        raise place.error(f"{item}: a picture is given by exactly one of {', '.join(PICTURE_KEYS)}; got {sorted(keys)}.")
    source = raw[keys[0]]
    if keys[0] == "image_url" and isinstance(source, Mapping):
        source = source.get("url")
    if keys[0] in ("data", "bytes") and isinstance(source, str) and not source.startswith("data:"):
        source = base64_bytes(source, "picture", f"{place.where}, {item}")
    return place.picture(source, item)


def _filled(block: Block, pictures: Iterator[Media]) -> Iterator[Block]:
    if not isinstance(block, Text):
        yield block
        return
    for i, text in enumerate(block.text.split(PLACEHOLDER)):
        if i:
            yield next(pictures)
        if text:
            yield Text(text)


def _present(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Without the empty fields: Parquet gives every block the keys of all others."""
    return {key: value for key, value in raw.items() if value is not None}
