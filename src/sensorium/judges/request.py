"""What a judge is asked, and what a judgement is known by: model, prompt version, parameters, texts and media.

A judgement is not known by run, step or episode: equal questions have one answer, in whichever run they are asked.
"""

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from sensorium.judges.forms import AnswerForm, FreeText
from sensorium.judges.untrusted import quote
from sensorium.vocabulary.content import Block, Media, Message, Text


@dataclass(frozen=True)
class JudgeRequest:
    """One question to a judge. ``prompt`` names the prompt and its version, as in ``caption_qa/2``.

    ``parameters`` go to the endpoint as they are (temperature, max_tokens, seed). ``draw`` tells apart several answers to
    one question where the temperature is above 0. ``video``: as ``frames`` (pictures with their times) or as a ``file``.
    """

    model: str
    messages: tuple[Message, ...]
    prompt: str
    form: AnswerForm = field(default_factory=FreeText)
    parameters: Mapping[str, Any] = field(default_factory=dict)
    draw: int = 0
    video: str = "frames"

    @property
    def key(self) -> str:
        """The content address of the judgement."""
        said = [[message.role, [_written(block) for block in message.content]] for message in self.messages]
        whole: list[Any] = [self.model, self.prompt, self.form.identity, dict(self.parameters), said, self.draw]
        if any(media.kind == "video" for message in self.messages for media in message.media):
            whole.append(self.video)
        written = json.dumps(whole, sort_keys=True, ensure_ascii=False)
        return hashlib.blake2b(written.encode("utf-8", "backslashreplace"), digest_size=20).hexdigest()

    def asked_of(self, model: str) -> "JudgeRequest":
        """The same question to another model."""
        return replace(self, model=model)


@dataclass(frozen=True)
class JudgeAnswer:
    """What a judge said: ``value`` as the form reads it, ``text`` as it came, and the model that said it."""

    value: Any
    text: str
    model: str
    key: str
    cached: bool = False


def untrusted_message(instructions: str, media: Mapping[str, Media] | tuple[Media, ...] = (), **texts: str) -> Message:
    """A user message: instructions with each ``{name}`` exchanged for that text, quoted, and media before it.

    Texts are what the policy wrote: they are framed and neutralised (``untrusted.py``), and never formatted again.
    """
    framed = quote(texts)
    parts: list[str] = []
    rest = instructions
    while rest:
        found = [(rest.find("{" + name + "}"), name) for name in framed if "{" + name + "}" in rest]
        if not found:
            break
        place, name = min(found)
        parts += [rest[:place], framed[name]]
        rest = rest[place + len(name) + 2 :]
    shown = tuple(media.values()) if isinstance(media, Mapping) else tuple(media)
    return Message("user", (*shown, Text("".join(parts) + rest)))


def _written(block: Block) -> list[str]:
    return [block.text] if isinstance(block, Text) else [block.kind, block.key]
