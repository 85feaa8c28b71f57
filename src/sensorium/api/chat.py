"""Talking to a model from Python: ``sn.load(checkpoint).chat(["What is it?", Path("cat.png")])``."""

import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.api.run import Run
from sensorium.api.train import outside_loop
from sensorium.data.media_files import HEAD_BYTES, PATH_LENGTH, kind_of, open_regular
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.errors import SensoriumError, TaskError

NEW_TOKENS = 256


class Reply(str):
    """The model's text, with its ``tokens``, their ``logprobs``, and ``finish``, how it ended: ``stop`` or ``length``."""

    tokens: tuple[int, ...]
    logprobs: tuple[float, ...]
    finish: str

    def __new__(cls, text: str, tokens: tuple[int, ...], logprobs: tuple[float, ...], finish: str) -> "Reply":
        reply = super().__new__(cls, text)
        reply.tokens, reply.logprobs, reply.finish = tokens, logprobs, finish
        return reply


class Model:
    """A loaded model and the engine that samples from it."""

    def __init__(
        self, path: str, *, device: str, dtype: str, max_context_tokens: int, unused_weights: Sequence[str] = ()
    ) -> None:
        from sensorium.data.media_store import MediaStore
        from sensorium.engines.native.native_engine import NativeEngine
        from sensorium.envs.question import Question
        from sensorium.models.load import load_policy
        from sensorium.recipe.schema import RolloutSection
        from sensorium.rollout.play import Rollout

        self.path = path
        self.policy = load_policy(path, store=MediaStore(), device=device, dtype=dtype, unused_weights=unused_weights)
        section = RolloutSection(max_context_tokens=max_context_tokens)
        self._rollout = Rollout(self.policy.chat, NativeEngine(self.policy), section, Question)

    def chat(
        self,
        messages: Any,
        *,
        temperature: float = 0.0,
        top_p: float = 1.0,
        top_k: int = 0,
        max_new_tokens: int | None = None,
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        seed: int = 0,
    ) -> Reply:
        """The model's reply, greedy unless a temperature is given.

        ``messages``: a text; a list of texts and media (PIL images; ``Path`` or bytes of a picture, video or sound), which
        is one user message; or a conversation, a list of ``{"role", "content"}`` whose contents are texts or such lists.
        ``max_tokens`` is another name of ``max_new_tokens`` (256).
        """
        from sensorium.cluster.event_loop import run_async
        from sensorium.engines.protocol import Sampling
        from sensorium.rollout.play import Attempt
        from sensorium.vocabulary.task import Task

        if max_new_tokens is not None and max_tokens is not None:
            raise TaskError("chat was given max_new_tokens and max_tokens, which are two names of one setting; keep one.")
        most = next((given for given in (max_new_tokens, max_tokens) if given is not None), NEW_TOKENS)
        sampling = Sampling(temperature, top_p, top_k, most, tuple(stop))
        task = Task("chat", conversation(messages, self.policy.chat.store))
        stream = self._rollout.stream([task], 1, Attempt(seed, 0, "chat"), sampling)
        (group,) = outside_loop(lambda: run_async(stream.in_order()))
        (episode,) = group.episodes
        if not episode.turns:
            raise SensoriumError(f"the model could not reply: {episode.failure}")
        segment = episode.turns[0].response
        finish = "length" if episode.status.value == "truncated" else "stop"
        return Reply(segment.text, segment.tokens, segment.logprobs, finish)

    def close(self) -> None:
        """Free the engine and what decodes media."""
        self._rollout.close()
        self._rollout.engine.close()
        self.policy.chat.decoder.close()

    def __repr__(self) -> str:
        return f"Model('{self.path}', family {self.policy.family})"


def load(
    checkpoint: str | Path | Run,
    *,
    device: str = "auto",
    dtype: str = "float32",
    max_context_tokens: int = 8192,
    unused_weights: Sequence[str] = (),
) -> Model:
    """Load a checkpoint, a run's best one, a hub id, ``package:NAME`` or ``tiny:FAMILY``.

    ``unused_weights``: name prefixes of checkpoint weights to ignore, as a recipe's ``model.unused_weights``.
    """
    if isinstance(checkpoint, Run):
        checkpoint = checkpoint.checkpoint
    place = Path(checkpoint)
    if place.is_dir() and not (place / "config.json").exists():
        checkpoint = Run(place).checkpoint
    return Model(
        str(checkpoint), device=device, dtype=dtype, max_context_tokens=max_context_tokens, unused_weights=unused_weights
    )


def conversation(given: Any, store: Any) -> tuple[Message, ...]:
    """Messages from what ``chat`` takes."""
    if isinstance(given, str):
        return (Message("user", (_whole(given, "the message"),)),)
    if isinstance(given, os.PathLike | bytes | bytearray) or hasattr(given, "getbands"):  # a picture, without importing PIL
        shown = f"{given!r:.60}" if isinstance(given, os.PathLike) else f"a medium ({type(given).__name__})"
        raise TaskError(f"chat was given {shown} alone. Put it in a list with a question: chat([medium, 'What is this?']).")
    if not isinstance(given, list | tuple) or not given:
        raise TaskError(f"chat takes a text, a list of texts and media, or a list of messages; not {given!r:.60}.")
    if all(isinstance(item, Message) or (isinstance(item, Mapping) and "role" in item) for item in given):
        return tuple(item if isinstance(item, Message) else _message(item, i, store) for i, item in enumerate(given))
    return (Message("user", _blocks(given, 0, store)),)


def _message(raw: Mapping[str, Any], number: int, store: Any) -> Message:
    from sensorium.data.row_format import ROLES

    role, content = raw.get("role"), raw.get("content", "")
    if role not in ROLES:
        raise TaskError(f"message {number} has the role {role!r:.40}; use one of {', '.join(ROLES)}.")
    if not isinstance(content, str):
        return Message(role, _blocks(content, number, store))
    return Message(role, (Text(content) if role == "assistant" else _whole(content, f"message {number}"),))


def _blocks(content: Any, number: int, store: Any) -> tuple[Text | Media, ...]:
    if not isinstance(content, list | tuple):
        content = [content]
    return tuple(_block(block, f"message {number}, block {i}", store) for i, block in enumerate(content))


def _block(block: Any, origin: str, store: Any) -> Text | Media:
    """A text, a medium in any of its forms, or a block as rows have it."""
    from sensorium.data.row_format import Place, messages_of
    from sensorium.data.rows import with_bytes

    if isinstance(block, str):
        if not any(letter.isspace() for letter in block) and kind_of(b"", block):
            raise _file_as_words(block, origin)
        return _whole(block, origin)
    if isinstance(block, Text | Media):
        return block
    place = Place(origin, Path(), store)
    if isinstance(block, Mapping):
        (message,) = messages_of([{"role": "user", "content": [with_bytes(block)]}], place)
        return message.content[0]
    source = Path(os.path.expanduser(block)) if isinstance(block, os.PathLike) else with_bytes(block)
    if not isinstance(source, Path | bytes | bytearray | memoryview):
        raise TaskError(
            f"{origin} is of type {type(block).__module__}.{type(block).__name__}, which chat does not take. Give a text, "
            "a PIL image (of an array: Image.fromarray), the Path of a picture, video or sound, or the bytes of such a "
            "file (samples of a sound: write them as a WAV file)."
        )
    if isinstance(source, Path):
        head = _head(source)
        kind = kind_of(head or b"", source.name)
        if kind is None and head is not None:
            raise TaskError(
                f"{origin} is the path of '{source}', which is no picture, video or sound by its first bytes or its name."
            )
    else:
        kind = kind_of(source[:HEAD_BYTES]) if isinstance(source, bytes) else "picture"
    return place.clip(kind, source, kind) if kind in ("video", "sound") else place.picture(source, "picture")


def _whole(text: str, origin: str) -> Text:
    """A text, unless it is the name of a media file that exists."""
    head = _head(Path(os.path.expanduser(text))) if len(text) <= PATH_LENGTH else None
    if head is not None and kind_of(head, text):
        raise _file_as_words(text, origin)
    return Text(text)


def _head(path: Path) -> bytes | None:
    """The first bytes of a file; None where there is no regular file that can be read."""
    try:
        with open_regular(path) as file:
            return file.read(HEAD_BYTES)
    except (OSError, ValueError):
        return None


def _file_as_words(name: str, origin: str) -> TaskError:
    given = "{'type': 'image', 'url': …}" if name.startswith("data:") else f"Path('{name:.80}')"
    return TaskError(
        f"{origin} is the text '{name:.80}', which the model would read as words. For the picture, video or sound give "
        f"{given}; if you mean the words, {{'type': 'text', 'text': …}}."
    )
