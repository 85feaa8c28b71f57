"""What sessions show, for protocols of other systems: text with placeholders, the bytes of pictures, pay as one number."""

from collections.abc import Sequence

from sensorium.envs.adapters.content import PLACEHOLDER
from sensorium.envs.remote.wire import Json
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Media


def text_of_messages(messages: Sequence[Json], placeholder: str = "") -> str:
    """The text of messages, one after another; ``placeholder`` stands where a picture is."""
    return "\n".join("".join(_said(block, placeholder) for block in message["content"]) for message in messages)


def with_images(messages: Sequence[Json]) -> str:
    """The text of messages with ``<image>`` for each picture. A placeholder that is in the text itself stands for none."""
    return text_of_messages(messages, PLACEHOLDER)


def pictures(messages: Sequence[Json], store: MediaStore) -> list[bytes]:
    """The bytes of all pictures of messages, in order."""
    blocks = [block for message in messages for block in message["content"] if "hash" in block]
    return [store.bytes_of(Media("picture", block["hash"])) for block in blocks]


def paid(outcome: Json) -> float | None:
    """A step's pay as one number; None where nothing is paid."""
    reward = outcome["reward"]
    return sum(reward.values()) if isinstance(reward, dict) else reward


def _said(block: Json, placeholder: str) -> str:
    return (
        block["text"].replace(PLACEHOLDER, "< image>")
        if "text" in block and placeholder
        else block.get("text", placeholder)
    )
