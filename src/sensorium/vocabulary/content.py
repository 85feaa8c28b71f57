"""Content blocks and messages, before any tokenizer. Media are named by content hash; the media store has their bytes."""

import hashlib
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Literal

from sensorium.vocabulary.decoding import AudioParameters, Augmentation, FrameRule, Parameters, VideoParameters

MediaKind = Literal["picture", "video", "sound"]
Role = Literal["system", "user", "assistant", "tool"]
USUAL: dict[str, type[Parameters]] = {"video": VideoParameters, "sound": AudioParameters}


@dataclass(frozen=True)
class Text:
    """A run of text."""

    text: str


@dataclass(frozen=True)
class Media:
    """One picture, video or sound: sha256 of its bytes, decoding parameters, and how it is augmented.

    ``origin`` (path, row) is for messages.
    """

    kind: MediaKind
    hash: str
    origin: str = field(default="", compare=False)
    parameters: Parameters | None = None
    augmentation: Augmentation | None = None

    def __post_init__(self) -> None:
        usual = USUAL.get(self.kind)
        if self.parameters is None and usual is not None:
            object.__setattr__(self, "parameters", usual())
        assert type(self.parameters) is (usual or type(None)), f"a {self.kind} has no {type(self.parameters).__name__}"

    @cached_property
    def key(self) -> str:
        """Identity as text: the hash of a picture; hash and parameters of a video or sound, or of what is augmented."""
        changed = [repr(part) for part in (self.parameters, self.augmentation) if part is not None]
        if not changed:
            return self.hash
        return f"{self.hash}-{hashlib.blake2b(''.join(changed).encode(), digest_size=8).hexdigest()}"

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
        """The medium and, with a video, the sound that is heard with it: each has its own tower."""
        return (self,) if self.sound is None else (self, self.sound)

    def heard_with(self, sound: "Media") -> "Media":
        """The video with another file's sound."""
        assert isinstance(self.parameters, VideoParameters)
        return replace(self, parameters=replace(self.parameters, sound_from=sound.hash))

    def resolved(self, rule: FrameRule) -> "Media":
        """The same medium with all decoding parameters set, by the family's rule."""
        if not isinstance(self.parameters, VideoParameters):
            return self
        return replace(self, parameters=self.parameters.resolved(rule))

    @property
    def name(self) -> str:
        """Its name in an error: its origin, or the head of its hash; and how it is augmented."""
        name = self.origin or self.hash[:12]
        return name if self.augmentation is None else f"{name} (augmented: {self.augmentation.description})"


Block = Text | Media


@dataclass(frozen=True)
class Message:
    """One message: a role and content blocks. ``tools``: a JSON list of functions offered from here on."""

    role: Role
    content: tuple[Block, ...]
    tools: str = ""

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, Text))

    @property
    def media(self) -> tuple[Media, ...]:
        """The media blocks in order."""
        return tuple(block for block in self.content if isinstance(block, Media))


def user(*blocks: Block | str) -> Message:
    """A user message from blocks or plain strings."""
    return Message("user", tuple(_block(block, "user(…)") for block in blocks))


def system(text: str) -> Message:
    return Message("system", (_block(text, "system(…)"),))


def assistant(text: str) -> Message:
    return Message("assistant", (_block(text, "assistant(…)"),))


def _block(part: Block | str, caller: str) -> Block:
    if isinstance(part, str):
        return Text(part)
    if isinstance(part, Text | Media):
        return part
    raise TypeError(
        f"{caller} takes text and media, not {type(part).__name__}. A picture becomes a medium by the media store: "
        'store.put_picture(bytes, "where from"), of the bytes of a PNG or JPEG file; a video or sound file by '
        'store.put_file(path, "video") or "sound". The store is given to a source or environment whose __init__ names it.'
    )
