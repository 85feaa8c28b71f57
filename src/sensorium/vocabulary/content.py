"""Content blocks and messages: what is said and shown, before any tokenizer.

Media are referred to by content hash; their bytes live once, in the media store.
"""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from sensorium.vocabulary.decoding import AudioParameters, FrameRule, Parameters, VideoParameters

MediaKind = Literal["picture", "video", "sound"]
Role = Literal["system", "user", "assistant", "tool"]
USUAL: dict[str, type[Parameters]] = {"video": VideoParameters, "sound": AudioParameters}


@dataclass(frozen=True)
class Text:
    """A run of text."""

    text: str


@dataclass(frozen=True)
class Media:
    """One picture, video or sound: sha256 of its bytes, and how a video or sound is decoded (the usual way if not said).

    ``origin`` (path, row) only serves error messages.
    """

    kind: MediaKind
    hash: str
    origin: str = field(default="", compare=False)
    parameters: Parameters | None = None

    def __post_init__(self) -> None:
        usual = USUAL.get(self.kind)
        if self.parameters is None and usual is not None:
            object.__setattr__(self, "parameters", usual())
        assert type(self.parameters) is (usual or type(None)), f"a {self.kind} has no {type(self.parameters).__name__}"

    @cached_property
    def key(self) -> str:
        """Identity as text: the hash alone for a picture, hash and parameters for what can be decoded in several ways."""
        if self.parameters is None:
            return self.hash
        return f"{self.hash}-{hashlib.blake2b(repr(self.parameters).encode(), digest_size=8).hexdigest()}"

    @property
    def sound(self) -> "Media | None":
        """The sound that is heard with a video (``use_audio_in_video``): the same part of the same file."""
        asked = self.parameters
        if not isinstance(asked, VideoParameters) or not asked.use_audio_in_video:
            return None
        trim = AudioParameters(start=asked.start, end=asked.end)
        return Media("sound", asked.sound_from or self.hash, self.origin, trim)

    @property
    def parts(self) -> "tuple[Media, ...]":
        """The medium and, with a video, the sound that is heard with it: each goes through a tower of its own."""
        return (self,) if self.sound is None else (self, self.sound)

    def heard_with(self, sound: "Media") -> "Media":
        """A video with another file's sound for its own."""
        assert isinstance(self.parameters, VideoParameters)
        return replace(self, parameters=replace(self.parameters, sound_from=sound.hash))

    def resolved(self, rule: FrameRule) -> "Media":
        """The same medium with all said of how it is decoded: what a video leaves open is as the family has it."""
        if not isinstance(self.parameters, VideoParameters):
            return self
        return replace(self, parameters=self.parameters.resolved(rule))

    @property
    def name(self) -> str:
        """What to call it in an error: where it came from, or the head of its hash."""
        return self.origin or self.hash[:12]


Block = Text | Media


@dataclass(frozen=True)
class Message:
    """One message of a conversation: a role and content blocks in order.

    ``tools`` are functions that are offered from here on, as the JSON text of a list of them; the chat template shows them.
    """

    role: Role
    content: tuple[Block, ...]
    tools: str = ""

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
    return Message("user", tuple(_block(block, "user(…)") for block in blocks))


def system(text: str) -> Message:
    """A system message."""
    return Message("system", (_block(text, "system(…)"),))


def assistant(text: str) -> Message:
    """An assistant message."""
    return Message("assistant", (_block(text, "assistant(…)"),))


def _block(part: Block | str, caller: str) -> Block:
    """A part of a message as a block; what is neither text nor a medium is refused."""
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Text | Media):
        return part
    raise TypeError(
        f"{caller} takes text and media, not {type(part).__name__}. A picture becomes a medium by the media store: "
        'store.put_picture(bytes, "where from"), of the bytes of a PNG or JPEG file; a video or sound file by '
        'store.put_file(path, "video") or "sound". The store is given to a source or environment whose __init__ names it.'
    )
