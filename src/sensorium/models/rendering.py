"""Messages to tokens by the checkpoint's own chat template, tokens to bytes, and what follows a turn."""

import codecs
import json
import re
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from itertools import accumulate
from typing import Any

from sensorium.models.family import HearsInVideo, MediaFormat
from sensorium.models.template_limits import TemplateBeyondBounds, bound_texts, bounded_rendering
from sensorium.vocabulary.content import Media, MediaKind, Message, Text
from sensorium.vocabulary.episode import MediaSpan, Segment
from sensorium.vocabulary.errors import ModelError

ANSWER_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
"""Marks that models of any family write. Most tokenizers have them as ordinary tokens, some as special ones."""


class TokenTable:
    """What each token id is: special, ordinary (with its bytes), or a row of the head that no token owns.

    ``written`` names special tokens that a model writes in its answers; their names are their text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, written: Sequence[str] = ()) -> None:
        if not getattr(tokenizer, "is_fast", False) or not _is_byte_level(tokenizer):
            raise ModelError(
                f"tokenizer {type(tokenizer).__name__} is not byte-level BPE: its tokens have no bytes of their own."
            )
        self._bytes = _Bytes(tokenizer)
        added = tokenizer.added_tokens_decoder
        self.special: dict[str, int] = {token.content: i for i, token in added.items() if token.special}
        owned = set(tokenizer.get_vocab().values())
        ordinary = owned - {*self.special.values()}
        if (highest := max(ordinary, default=0)) >= vocab_size:
            raise ModelError(
                f"the tokenizer has tokens up to {highest}, and the model of config.json a vocabulary of {vocab_size}. Do "
                "config.json and the tokenizer's files belong together?"
            )
        self.unowned = tuple(i for i in range(vocab_size) if i not in owned)
        self.written = tuple(self.special[name] for name in (*written, *ANSWER_MARKS) if name in self.special)
        for i in (*self.special.values(), *self.unowned):
            if i not in self.written:
                self._bytes[i] = b""

    def bytes_of(self, token: int) -> bytes:
        """The bytes a token adds to the text; nothing for special tokens but those that are written."""
        return self._bytes[token]

    def read(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text of tokens, and the end of each token in its UTF-8 bytes; broken UTF-8 becomes U+FFFD."""
        pieces = [self._bytes[token] for token in tokens]
        raw, ends = b"".join(pieces), tuple(accumulate(map(len, pieces)))
        try:
            return raw.decode(), ends
        except UnicodeDecodeError:
            return _decode_broken(raw, ends)


class _Bytes(dict[int, bytes]):
    """The bytes of ordinary tokens, found when they are first asked for."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self._tokenizer = tokenizer
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}

    def __missing__(self, token: int) -> bytes:
        added = self._added.get(token)
        text = self._tokenizer.convert_ids_to_tokens(token) if added is None else ""
        known = added.encode() if added is not None else bytes(BYTE_OF[character] for character in text)
        self[token] = known
        return known


class _Broken(threading.local):
    """Where the text that this thread decodes is broken."""

    spans: list[tuple[int, int]]


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _broken.spans.append((error.start, error.end))
    return "\ufffd", error.end


_broken = _Broken()
codecs.register_error("sensorium.replaced", _replaced)


def _decode_broken(raw: bytes, ends: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Text of broken UTF-8, and for each of these offsets in ``raw`` the offset in the text's bytes."""
    _broken.spans = []
    text = raw.decode(errors="sensorium.replaced")
    spans, moved, shift = iter([*_broken.spans, (len(raw), len(raw) + 1)]), [], 0
    first, last = next(spans)
    for end in ends:
        while end >= last:
            shift += len("\ufffd".encode()) - (last - first)
            first, last = next(spans)
        # The replacement appears when its last broken byte does.
        moved.append(min(end, first) + shift)
    return text, tuple(moved)


def _is_byte_level(tokenizer: Any) -> bool:
    return '"ByteLevel"' in json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder"))


def _byte_table() -> dict[str, int]:
    """The printable stand-ins that byte-level BPE uses for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_table()


# Two rules hold for every rendering. Only the template makes special tokens: ``<|im_end|>`` in somebody's text is text. And
# nothing already sampled is rendered again: what comes after a response is what the template writes after a stand-in for
# it.


# How transformers' templates name the kinds of media.
TEMPLATE_KINDS: dict[MediaKind, str] = {"picture": "image", "video": "video", "sound": "audio"}
CACHED_TEXT = 1 << 16
"""Characters of a text whose tokens are remembered; thousands of longer ones would fill the memory."""
# Characters that stand for something while a template runs; those that occur in the text at hand are passed over.
PRIVATE = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF8FF))]


class ChatRenderer:
    """Renders conversations for one checkpoint.

    ``owner`` of the template is the processor, or the tokenizer of a text model. ``media_format`` says which token ids
    stand for media, and which media bring start and end marks of their own.
    """

    def __init__(self, tokenizer: Any, owner: Any, table: TokenTable, media_format: MediaFormat) -> None:
        self._owner = owner
        placeholders, self._own_marks = media_format.placeholders, media_format.own_marks
        self._joined = media_format.joined
        self._placeholders, self._frame_rule = placeholders, media_format.frame_rule
        self._hears_in_video = isinstance(media_format, HearsInVideo)
        if not getattr(owner, "chat_template", None):
            raise ModelError(
                f"checkpoint '{tokenizer.name_or_path}' has no chat template; give it one (chat_template.jinja)."
            )
        if isinstance(owner.chat_template, str):
            bound_texts(owner.chat_template)
        self._kind_of = {token: kind for kind, token in placeholders.items()}
        self._special = {**table.special, **media_format.stand_ins}
        self._guard = _Guard(self._special)
        written = [name for name, token in table.special.items() if token in table.written]
        self._written = re.compile("(" + "|".join(map(re.escape, written)) + ")") if written else None
        self._encode = _plain_encoder(tokenizer)
        for kind, token in placeholders.items():
            if token not in table.special.values():
                raise ModelError(
                    f"the tokenizer does not mark token {token}, the placeholder of a {kind}, as special. Do config.json, "
                    "which names the placeholder, and the tokenizer's files belong together?"
                )
        self.close_id = self._find_close()
        self.lead, self.append_only = self._find_lead()

    def render(self, messages: Sequence[Message], *, generate: bool) -> Segment:
        """The first turn, default system prompt included."""
        guarded, (fence,) = self._guard.messages(messages, 1)
        return self._segment(self._apply(guarded, generate), fence, messages)

    def extend(self, messages: Sequence[Message], *, closed: bool) -> Segment:
        """What follows a response: its closing token unless it is ``closed``, the messages, the generation prompt."""
        guarded, (fence, mark) = self._guard.messages(messages, 2)
        history = [Message("user", (Text("-"),)), Message("assistant", (Text(mark),))]
        after = _after(self._apply([*history, *guarded], True), mark)
        return self._segment(after, fence, messages, skip=1 if closed else 0)

    def after_head(self, messages: Sequence[Message]) -> Segment:
        """What follows a system message, generation prompt included."""
        guarded, (fence, mark) = self._guard.messages(messages, 2)
        head = [Message("system", (Text(mark),))]
        tail = _after(self._apply(head, False), mark)
        after = _after(self._apply([*head, *guarded], True), mark)
        if not after.startswith(tail):
            raise ModelError(
                "this chat template writes a lone system message otherwise than one in a conversation: no head."
            )
        return self._segment(after.removeprefix(tail), fence, messages)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Tokens of an answer as it stands after the generation prompt.

        Special tokens in it are text, but for those that the model may write, which are what it would have sampled.
        """
        pieces = self._written.split(self.lead + text) if self._written else [self.lead + text]
        return tuple(
            token for i, piece in enumerate(pieces) for token in ((self._special[piece],) if i % 2 else self._encode(piece))
        )

    def _apply(self, messages: Sequence[Message], generate: bool) -> str:
        conversation = [{"role": message.role, "content": self._content(message)} for message in messages]
        tools = [tool for message in messages if message.tools for tool in json.loads(message.tools)]
        offered = {"tools": tools} if tools else {}
        try:
            text = bounded_rendering(
                lambda: self._owner.apply_chat_template(
                    conversation, tokenize=False, add_generation_prompt=generate, **offered
                ),
                sum(len(message.text) + len(message.tools) for message in messages),
            )
        except TemplateBeyondBounds as error:
            raise ModelError(
                f"the checkpoint's chat template cannot be used: {error}. Restore its chat_template.jinja from where it "
                "was published, and mind where the checkpoint comes from."
            ) from error
        except Exception as error:  # jinja's own errors, or what a template raises by raise_exception
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template refuses messages of roles {roles}: {error}.") from error
        for tool in tools:
            if tool["function"]["name"] not in text:
                raise ModelError(
                    f"this checkpoint's chat template does not show the tool '{tool['function']['name']}' that is offered. "
                    "Let the environment describe its tools in words (its option offer: text), or give the checkpoint a "
                    "template that takes tools."
                )
        return text

    def _content(self, message: Message) -> Any:
        for item in message.media:
            if item.kind not in self._kind_of.values():
                raise ModelError(f"this model cannot take {item.kind} {item.name}; use a family that can.")
            if item.sound is not None and not self._hears_in_video:
                raise ModelError(
                    f"video {item.name} is to be heard (use_audio_in_video), and this model does not hear inside videos. "
                    "Leave that out, or use a family that does (docs/guides/families.md)."
                )
        if not self._kind_of:
            return message.text
        return [
            {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": TEMPLATE_KINDS[block.kind]}
            for block in message.content
        ]

    def _segment(self, text: str, fence: str, messages: Sequence[Message], skip: int = 0) -> Segment:
        tokens: list[int] = []
        for i, piece in enumerate(self._join(self._guard.split(text))):
            tokens += (self._special[piece],) if i % 2 else self._encode(piece.replace(fence, ""))
        del tokens[:skip]
        media = [item.resolved(self._frame_rule) for message in messages for item in message.media]
        places = [i for i, token in enumerate(tokens) if token in self._kind_of]
        if [self._kind_of[tokens[i]] for i in places] != [item.kind for item in media]:
            raise ModelError(f"the chat template shows {len(places)} media where the messages hold {_names(media)}.")
        spared = {i for place in places for i in self._template_marks(tokens, place)}
        at = dict(zip(places, media, strict=True))
        kept: list[int] = []
        spans: list[MediaSpan] = []
        for i, token in enumerate(tokens):
            if i in at:  # the sound that is heard with a video has its placeholder right behind the video's
                for part in at[i].parts:
                    spans.append(MediaSpan(len(kept), part))
                    kept.append(self._placeholders[part.kind])
            elif i not in spared:
                kept.append(token)
        return Segment("environment", tuple(kept), tuple(spans))

    def _join(self, pieces: list[str]) -> list[str]:
        """Plain texts and special tokens in turn, with the texts around media whose expansion joins them."""
        for i in range(1, len(pieces), 2):
            kind = self._kind_of.get(self._special[pieces[i]])
            if kind is not None and kind in self._joined:
                before, after = self._joined[kind]
                pieces[i - 1] = pieces[i - 1].removesuffix(before)
                pieces[i + 1] = after + pieces[i + 1]
        return pieces

    def _template_marks(self, tokens: Sequence[int], place: int) -> tuple[int, ...]:
        """The template's markers around a placeholder whose expansion has its own markers."""
        marks = self._own_marks.get(self._kind_of[tokens[place]])
        around = (tokens[place - 1], tokens[place + 1]) if 0 < place < len(tokens) - 1 else None
        return (place - 1, place + 1) if marks is not None and around == marks else ()

    def _find_close(self) -> int:
        pieces = self._guard.split(
            _after(self._apply([_say("user", "-"), _say("assistant", PRIVATE[0])], False), PRIVATE[0])
        )
        if pieces[0] or len(pieces) < 2:
            raise ModelError("this chat template does not end an assistant's turn with a special token.")
        return self._special[pieces[1]]

    def _find_lead(self) -> tuple[str, bool]:
        """What the template writes between the generation prompt and a response (SmolVLM2: a space, which is sampled).

        And whether a response stays as it was written once the conversation goes on, after the prompt it was written for.
        """
        thought = f"<think>\n{PRIVATE[1]}\n</think>\n\n{PRIVATE[0]}"
        before, after = [_say("user", "-")], [_say("user", "-")]
        prompt = self._apply(before, True)
        history = self._apply([*before, _say("assistant", thought), *after], True)
        lead = " " if history.startswith(f"{prompt} {thought}") else ""
        return lead, history.startswith(f"{prompt}{lead}{thought}")


class _Guard:
    """Keeps texts from forging special tokens: puts a private character, the fence, into whatever could become one."""

    def __init__(self, special: Mapping[str, int]) -> None:
        ordered = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")
        # A special token could also be put together from two texts that meet.
        self._beginnings = tuple({token[:i] for token in special for i in range(1, len(token))})
        self._endings = tuple({token[i:] for token in special for i in range(1, len(token))})

    def messages(self, messages: Sequence[Message], count: int) -> tuple[list[Message], list[str]]:
        """The messages guarded, and ``count`` characters that do not occur in them; the first is the fence."""
        written = "".join(message.text + message.tools for message in messages)
        free = (character for character in PRIVATE if character not in written)
        characters = [character for character, _ in zip(free, range(count), strict=False)]
        if len(characters) < count:
            raise ModelError("a text uses every private character of Unicode; it cannot be rendered safely.")
        guarded = [
            Message(
                message.role,
                tuple(self._block(block, characters[0]) for block in message.content),
                self._tools(message.tools, characters[0]),
            )
            for message in messages
        ]
        return guarded, characters

    def _tools(self, tools: str, fence: str) -> str:
        """Tools as JSON without escapes, so that what could become a special token is seen; a fence within it is text."""
        return self._fenced(json.dumps(json.loads(tools), ensure_ascii=False), fence) if tools else ""

    def split(self, text: str) -> list[str]:
        """Plain text and special tokens in turn, beginning with (perhaps empty) plain text."""
        return self._pattern.split(text)

    def _block(self, block: Text | Media, fence: str) -> Text | Media:
        if isinstance(block, Media):
            return block
        text = self._text(block.text, fence)
        return Text(text) if text is not block.text else block

    def _text(self, text: str, fence: str) -> str:
        text = self._fenced(text, fence)
        if text.startswith(self._endings):
            text = fence + text
        if text.endswith(self._beginnings):
            text += fence
        return text

    def _fenced(self, text: str, fence: str) -> str:
        while self._pattern.search(text):
            text = self._pattern.sub(lambda found: found[0][0] + fence + found[0][1:], text)
        return text


def _plain_encoder(tokenizer: Any) -> Callable[[str], tuple[int, ...]]:
    def encode(text: str) -> tuple[int, ...]:
        if not text:
            return ()
        return tuple(tokenizer(text, add_special_tokens=False, split_special_tokens=True)["input_ids"])

    cached = lru_cache(maxsize=8192)(encode)
    return lambda text: cached(text) if len(text) <= CACHED_TEXT else encode(text)


def _after(text: str, mark: str) -> str:
    before, found, after = text.partition(mark)
    if not found or mark in after:
        raise ModelError(f"this chat template does not write a message's text once, as given: {before[-40:]!r}.")
    return after


def _say(role: Any, text: str) -> Message:
    return Message(role, (Text(text),))


def _names(media: Sequence[Media]) -> str:
    return ", ".join(f"{item.kind} {item.name}" for item in media) or "none"
