"""Content blocks and messages: what is said and shown, before any tokenizer.

Media are referred to by content hash; their bytes live once, in the media store.
"""

from dataclasses import dataclass
from typing import Literal

MediaKind = Literal["picture", "video", "sound"]
Role = Literal["system", "user", "assistant", "tool"]


@dataclass(frozen=True)
class Text:
    """A run of text."""

    text: str


@dataclass(frozen=True)
class Media:
    """One picture, video or sound: sha256 of its bytes. ``origin`` (path, row) only serves error messages."""

    kind: MediaKind
    hash: str
    origin: str = ""

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Media) and (self.kind, self.hash) == (other.kind, other.hash)

    def __hash__(self) -> int:
        return hash((self.kind, self.hash))


Block = Text | Media


@dataclass(frozen=True)
class Message:
    """One message of a conversation: a role and content blocks in order."""

    role: Role
    content: tuple[Block, ...]

    @property
    def text(self) -> str:
        """The text blocks joined."""
        return "".join(block.text for block in self.content if isinstance(block, Text))

    @property
    def media(self) -> tuple[Media, ...]:
        """The media blocks in order."""
        return tuple(block for block in self.content if isinstance(block, Media))


def user(*blocks: Block | str) -> Message:
    """A user message from blocks or plain strings."""
    return Message("user", tuple(Text(b) if isinstance(b, str) else b for b in blocks))


def system(text: str) -> Message:
    """A system message."""
    return Message("system", (Text(text),))


def assistant(text: str) -> Message:
    """An assistant message."""
    return Message("assistant", (Text(text),))
