"""How messages, results and pictures travel: a JSON object, and the bytes of the pictures it refers to by hash.

A frame is the length of the JSON (4 bytes, big-endian), the JSON as UTF-8, and the pictures one after another:

    {"replies": [{"id": 3, "step": {…}}], "media": [{"hash": "9f86…", "size": 812}]}   then 812 bytes

The bytes are checked against their hash when they arrive.
"""

import hashlib
import json
import struct
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary.content import Block, Media, Message, Text
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.plain import json_of

Json = dict[str, Any]
MOST_BYTES = 256 * 1024 * 1024  # of one frame
FIELDS = ("category", "after", "max_new_tokens")  # of an observation, beside its messages


class WireError(ValueError):
    """A frame is broken: not what this module writes."""


def pack(body: Mapping[str, Any], media: Mapping[str, bytes]) -> bytes:
    """A frame."""
    listed = [{"hash": digest, "size": len(data)} for digest, data in media.items()]
    text = json.dumps({**body, "media": listed} if listed else dict(body), ensure_ascii=False).encode()
    return b"".join([struct.pack(">I", len(text)), text, *media.values()])


def unpack(frame: bytes) -> tuple[Json, dict[str, bytes]]:
    """The object of a frame and its pictures by hash; a WireError for anything that is no frame."""
    if len(frame) < 4:
        raise WireError("a frame has at least 4 bytes")
    (length,) = struct.unpack_from(">I", frame)
    try:
        body = json.loads(frame[4 : 4 + length].decode())
    except (ValueError, RecursionError) as error:
        raise WireError(f"the JSON of a frame cannot be read: {error}") from error
    if not isinstance(body, dict) or 4 + length > len(frame):
        raise WireError("a frame holds one JSON object, whole")
    listed, place, media = body.pop("media", []), 4 + length, {}
    for item in listed if isinstance(listed, list) else [None]:
        if not isinstance(item, dict) or not isinstance(item.get("size"), int) or not isinstance(item.get("hash"), str):
            raise WireError("media are listed by hash and size")
        data = frame[place : place + item["size"]] if item["size"] >= 0 else b""
        if len(data) != item["size"] or hashlib.sha256(data).hexdigest() != item["hash"]:
            raise WireError("a picture is not what its hash says")
        media[item["hash"]] = data
        place += item["size"]
    return body, media


def messages_to_json(messages: Iterable[Message]) -> list[Json]:
    """Messages; a picture is a reference by hash."""
    return [
        {"role": message.role, "content": [_block_to_json(block) for block in message.content]}
        | ({"tools": message.tools} if message.tools else {})
        for message in messages
    ]


def messages_from_json(data: Sequence[Json]) -> tuple[Message, ...]:
    """The inverse of messages_to_json."""

    def block(item: Json) -> Block:
        return Text(item["text"]) if "text" in item else Media("picture", item["hash"], item.get("origin", ""))

    return tuple(Message(item["role"], tuple(map(block, item["content"])), item.get("tools", "")) for item in data)


def _block_to_json(block: Block) -> Json:
    if isinstance(block, Text):
        return {"text": block.text}
    if block.kind != "picture":
        raise EnvironmentFailure(f"{block.name}: only pictures can be sent to another process, and this is a {block.kind}.")
    return {"kind": "picture", "hash": block.hash, "origin": block.origin}


def reset_to_json(head: Sequence[Message], observation: Observation) -> Json:
    """The result of a reset."""
    return {"head": messages_to_json(head), "observation": messages_to_json(observation.messages), **_fields(observation)}


def reset_from_json(data: Json) -> tuple[tuple[Message, ...], Observation]:
    """The inverse of reset_to_json."""
    return messages_from_json(data["head"]), _observation(data)


def _fields(observation: Observation | None) -> Json:
    """What an observation says beside its messages, as far as it does."""
    given = {} if observation is None else {key: getattr(observation, key) for key in FIELDS}
    return {key: value for key, value in given.items() if value != getattr(Observation, key)}


def _observation(data: Json) -> Observation:
    return Observation(messages_from_json(data["observation"]), **{key: data[key] for key in FIELDS if key in data})


def step_to_json(result: StepResult) -> Json:
    """The outcome of a turn."""
    shown = None if result.observation is None else messages_to_json(result.observation.messages)
    reward = dict(result.reward) if isinstance(result.reward, Mapping) else result.reward
    ends = {"done": result.done, "truncated": result.truncated, "success": result.success}
    return {"observation": shown, "reward": reward, **ends, "info": json_of(result.info), **_fields(result.observation)}


def step_from_json(data: Json) -> StepResult:
    """The inverse of step_to_json."""
    shown = None if data["observation"] is None else _observation(data)
    return StepResult(shown, *(data[key] for key in ("reward", "done", "truncated", "success", "info")))


def pictures_in(body: Any) -> list[str]:
    """The hashes of all pictures that an object refers to, each once, in order."""
    found: dict[str, None] = {}
    stack = [body]
    while stack:
        item = stack.pop()
        if isinstance(item, dict):
            if item.get("kind") == "picture" and isinstance(item.get("hash"), str):
                found[item["hash"]] = None
            stack.extend(reversed(list(item.values())))
        elif isinstance(item, list):
            stack.extend(reversed(item))
    return list(found)


def bytes_of(body: Any, store: MediaStore) -> dict[str, bytes]:
    """The bytes of the pictures that an object refers to."""
    return {digest: store.bytes_of(Media("picture", digest)) for digest in pictures_in(body)}


def keep(media: Mapping[str, bytes], store: MediaStore, origin: str) -> None:
    """Put pictures that arrived into a store."""
    for data in media.values():
        store.put_picture(data, origin)
