"""From plain data to messages: roles and content blocks as data sets write them. Every error names the row."""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from sensorium.data.media_files import base64_bytes, inside, located
from sensorium.data.media_store import MediaStore
from sensorium.vocabulary.content import USUAL, Block, Media, MediaKind, Message, Role, Text
from sensorium.vocabulary.decoding import Parameters, parameters_from
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError, nearest
from sensorium.vocabulary.plain import text_of

ClipKind = Literal["video", "sound"]
INSTEAD = {"frames": "fps", "fps": "frames"}  # either replaces the other


class ClipOptions:
    """A source's options ``video`` (frames or fps, pixel budgets, trim) and ``sound`` (sample rate, trim), checked.

    Both have the fields of VideoParameters and AudioParameters: ``video: {frames: 8, max_pixels_per_frame: 100352}``.
    """

    def __init__(
        self, video: Mapping[str, Any] | None = None, sound: Mapping[str, Any] | None = None, where: str = "source"
    ) -> None:
        self._given: dict[ClipKind, dict[str, Any]] = {"video": dict(video or {}), "sound": dict(sound or {})}
        for kind in self._given:
            try:
                self.parameters(kind, {})
            except ValueError as error:
                raise RecipeError(f"{where}: option '{kind}': {error}") from error

    @property
    def hears_in_video(self) -> bool:
        """Whether videos are shown with their own sound."""
        return bool(self._given["video"].get("use_audio_in_video"))

    def refuse_other_sound(self, where: str) -> None:
        """Refuse options of sounds where videos have their own."""
        if self.hears_in_video and self._given["sound"]:
            raise RecipeError(
                f"{where}: option 'sound' has no effect with video: {{use_audio_in_video: true}}, where the sound is cut "
                "as the video is. Leave one of the two out."
            )

    def parameters(self, kind: ClipKind, asked: Mapping[str, Any]) -> Parameters:
        """The parameters of one clip with a row's own ones, ``asked``; ValueError if they do not fit."""
        given = {key: value for key, value in self._given[kind].items() if INSTEAD.get(key) not in asked}
        return parameters_from(USUAL[kind], {**given, **asked})


ROLES: tuple[str, ...] = get_args(Role)
TYPES: dict[str, MediaKind] = {
    "image": "picture",
    "picture": "picture",
    "image_url": "picture",
    "video": "video",
    "video_url": "video",
    "audio": "sound",
    "sound": "sound",
    "audio_url": "sound",
}
# Keys of a block that may hold the medium itself. The other keys of a video or sound block are its parameters.
CARRIERS = ("path", "data", "bytes", "url", *TYPES)
PLACEHOLDERS: dict[MediaKind, str] = {"picture": "<image>", "video": "<video>", "sound": "<audio>"}


@dataclass(frozen=True)
class Place:
    """The context of a row: its name in errors, the folder of its relative paths, the store of its media.

    ``roots`` are the folders that may hold its media, links resolved; None: any, for rows that the user's own code made.
    ``service``: the row came in a request, so that folders are opened by an option of the service, not by a recipe.
    """

    where: str
    folder: Path
    store: MediaStore
    clips: ClipOptions = field(default_factory=ClipOptions)
    roots: tuple[Path, ...] | None = None
    service: bool = False

    def error(self, what: str) -> TaskError:
        """An error that names the row."""
        return TaskError(f"{self.where}: {what}")

    def picture(self, source: Any, item: str) -> Media:
        """A picture of this row, read and decoded; a missing or corrupt one is an error that names row and item."""
        found, origin = self._located(source, "picture", item)
        if isinstance(found, Path):
            return self.store.put_picture_file(found, origin)
        return self.store.put_picture(found, origin)

    def clip(self, kind: ClipKind, source: Any, item: str, asked: Mapping[str, Any] | None = None) -> Media:
        """A video or sound of this row, decoded later as the source and ``asked`` define; a missing one is refused."""
        try:
            parameters = self.clips.parameters(kind, asked or {})
        except ValueError as error:
            raise self.error(f"{item}: {error}") from error
        found, origin = self._located(source, kind, item)
        if isinstance(found, Path):
            return self.store.put_file(found, kind, origin, parameters)
        return self.store.put(found, kind, origin, parameters)

    def _located(self, source: Any, kind: MediaKind, item: str) -> tuple[bytes | Path, str]:
        """The bytes or the file of a medium, and its name in errors; a file outside of the roots is refused."""
        origin = f"{self.where}, {item}"
        found = located(source, kind, origin, self.folder)
        if not isinstance(found, Path):
            return found, origin
        if "'" not in item:  # else it names its file already
            origin += f" '{source if isinstance(source, str | Path) else found}'"
        try:
            if self.roots is not None:
                found = found.resolve()  # once: a link may be switched between the check and the reading
            allowed = self.roots is None or inside(found, self.roots)
        except (OSError, ValueError, RuntimeError) as error:  # a circle of links, or a name that no file can have
            raise MediaError(f"{origin}: cannot read the {kind} '{found}': {error}.") from error
        if not allowed and self.service:
            opened = ", ".join(f"'{root}'" for root in self.roots or ()) or "none"
            raise MediaError(
                f"{origin}: '{found}' lies in none of the folders that the service may read ({opened}). Start the service "
                "with --media-root FOLDER, or send the medium itself, as a data URL."
            )
        if not allowed:
            raise MediaError(
                f"{origin}: '{found}' lies outside of the data's folder '{self.folder}', and a row may not point "
                "anywhere. Move it there, or open its folder in the recipe: the source's option media_roots: [FOLDER]."
            )
        return found, origin


def messages_of(raw: Any, place: Place) -> tuple[Message, ...]:
    """Messages from ``[{"role": …, "content": text or blocks}, …]``."""
    if not isinstance(raw, Sequence) or isinstance(raw, str | bytes) or not raw:
        raise place.error(f"'messages' must be a list of messages, not {raw!r:.60}.")
    return tuple(_message(message, f"message {i}", place) for i, message in enumerate(raw))


def fill_placeholders(
    messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Media]], place: Place
) -> tuple[Message, ...]:
    """Put media in the places of ``<image>``, ``<video>`` and ``<audio>``, in order; their numbers must agree."""
    texts = [block.text for m in messages for block in m.content if isinstance(block, Text)]
    for kind, items in media.items():
        count = sum(text.count(PLACEHOLDERS[kind]) for text in texts)
        if count != len(items):
            raise place.error(
                f"the text has {count} {PLACEHOLDERS[kind]} placeholders and the row has {len(items)} {kind}s. Give each "
                f"{kind} its placeholder, or set media_first: true for texts without any."
            )
    left = {PLACEHOLDERS[kind]: iter(items) for kind, items in media.items()}
    pattern = f"({'|'.join(map(re.escape, left))})"
    filled = []
    for message in messages:
        blocks: list[Block] = []
        for block in message.content:
            if not isinstance(block, Text) or not left:
                blocks.append(block)
                continue
            for text in filter(None, re.split(pattern, block.text)):
                blocks.append(next(left[text]) if text in left else Text(text))
        filled.append(Message(message.role, tuple(blocks)))
    return tuple(filled)


def put_first(messages: Sequence[Message], media: Mapping[MediaKind, Sequence[Media]], place: Place) -> tuple[Message, ...]:
    """Put pictures, videos and sounds before the last message's text, which must not have placeholders."""
    for kind in media:
        if any(PLACEHOLDERS[kind] in message.text for message in messages):
            raise place.error(f"the text has {PLACEHOLDERS[kind]} placeholders and media_first is on; turn it off.")
    first = [item for items in media.values() for item in items]
    return (*messages[:-1], Message(messages[-1].role, (*first, *messages[-1].content)))


def literal_placeholders(messages: Sequence[Message]) -> tuple[str, ...]:
    """Placeholders that go to the model as text, because the messages have no medium of their kind.

    "<image>What is it?", without a picture                      → ("<image>",)
    "<video>\\nWhat is it?", with a picture                      → ("<video>",)
    "<video>a.mp4</video>": markup, which has an end tag         → ()
    "What does the tag <video> do?", with a picture              → (): beside other media only at a line's start or end
    """
    held = {item.kind for message in messages for item in message.media}
    texts = [message.text for message in messages]
    found = []
    for kind, tag in PLACEHOLDERS.items():
        pattern = rf"^\s*{tag}|{tag}\s*$" if held else tag
        marked = (text for text in texts if f"</{tag[1:]}" not in text)
        if kind not in held and any(re.search(pattern, text, re.MULTILINE) for text in marked):
            found.append(tag)
    return tuple(found)


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
        return Message(role, (Text(_text(content, item, place)),))
    if not isinstance(content, Sequence) or isinstance(content, bytes):
        raise place.error(f"{item}: content must be text or a list of blocks, not {content!r:.60}.")
    return Message(role, tuple(_block(block, f"{item}, block {i}", place) for i, block in enumerate(content)))


def _block(raw: Any, item: str, place: Place) -> Block:
    if isinstance(raw, str):
        return Text(_text(raw, item, place))
    if not isinstance(raw, Mapping):
        raise place.error(f"{item} must be an object with a type, not {raw!r:.60}.")
    raw = _present(raw)
    kind = raw.get("type")
    if kind == "text":
        if set(raw) != {"type", "text"} or not isinstance(raw["text"], str):
            raise place.error(f"{item}: a text block is {{type: text, text: …}}; this one has keys {sorted(raw)}.")
        return Text(_text(raw["text"], item, place))
    if kind in TYPES:
        return _medium(TYPES[kind], raw, item, place)
    raise place.error(f"{item} has the type {kind!r:.40}{nearest(str(kind), ['text', *TYPES])}")


def _text(text: str, item: str, place: Place) -> str:
    """A text that can be written as UTF-8, which half of a surrogate pair (``"\\ud800"`` in JSON) cannot."""
    try:
        return text_of(text)
    except ValueError as error:
        raise place.error(f"{item}: {error}.") from error


def _medium(kind: MediaKind, raw: Mapping[str, Any], item: str, place: Place) -> Media:
    asked = {key: value for key, value in raw.items() if key != "type" and key not in CARRIERS}
    held = [key for key in raw if key in CARRIERS]
    if len(held) != 1 or (kind == "picture" and asked):
        given = sorted(str(key) for key in raw if key != "type")
        raise place.error(f"{item}: a {kind} is given by exactly one of {', '.join(CARRIERS)}; got {given}.")
    source = raw[held[0]]
    if held[0].endswith("_url") and isinstance(source, Mapping):
        source = source.get("url")
    if held[0] in ("data", "bytes") and isinstance(source, str) and not source.startswith("data:"):
        source = base64_bytes(source, kind, f"{place.where}, {item}")
    return place.picture(source, item) if kind == "picture" else place.clip(kind, source, item, asked)


def _present(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The fields that are not None: Parquet gives every block the keys of all others."""
    return {key: value for key, value in raw.items() if value is not None}
