"""Messages to tokens by the checkpoint's own chat template, tokens to bytes, and what follows a turn.

Two rules hold for every rendering. Only the template makes special tokens: ``<|im_end|>`` in a user's text is text. And
nothing that was sampled is rendered again: after a response comes what the template writes after a stand-in for it.

A template is code of the checkpoint's publisher, so its time, memory and output are bounded.
transformers renders templates in a sandbox without bounds: two nested loops of 99,999 rounds never end, and
``'a' * 10**10`` takes 10 GB. Here a watching thread ends a rendering that takes too long or too much memory, by an
exception in the rendering thread, and every operation that makes a text checks its size first.
"""

import codecs
import ctypes
import json
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from copy import deepcopy
from functools import lru_cache, partial, wraps
from itertools import accumulate, islice
from pathlib import Path
from typing import Any

from sensorium.models.family import HearsInVideo, MediaFormat
from sensorium.vocabulary.content import MediaKind, Message, Text
from sensorium.vocabulary.episode import MediaSpan, Segment
from sensorium.vocabulary.errors import ModelError

MOST_S = 20.0  # for one rendering; real templates take milliseconds
MOST_BYTES = 1 << 30  # growth of the process during a rendering, measured from ``LOOK_S`` on
MOST_CHARACTERS = 1 << 24  # written beyond the characters of the messages
MOST_TEXT = 1 << 26  # longest text or list that one operation may make
LOOK_S = 0.05
WIDTH = re.compile(r"\d{8,}|\*")  # in a format: a width of 10 million characters or more, or one that is an argument
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul, "**": operator.pow, "+": operator.add, "%": operator.mod,
}  # fmt: skip
_COMPILING = threading.Lock()


class TemplateBeyondBounds(Exception):
    """A rendering takes too long or too much memory, or writes too much."""

    def __str__(self) -> str:
        return self.args[0] if self.args else f"it took more than {MOST_S:g} s or {MOST_BYTES >> 20} MiB of memory"


def bound_texts(template: str) -> None:
    """Compile a template so that none of its operations makes a text or list beyond ``MOST_TEXT``.

    The watching thread ends a template only between operations, and a text that doubles takes 4 GB in its 32nd one.
    transformers caches compiled templates, and operators are bound at compile time, so its sandbox is changed only for it.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment as sandbox  # noqa: N813
    from transformers.utils import chat_template_utils

    with _COMPILING:
        usual = sandbox.intercepted_binops, sandbox.code_generator_class
        sandbox.intercepted_binops = frozenset(OPERATORS)
        sandbox.code_generator_class = _without_constants(usual[1])
        try:
            compiled = chat_template_utils._compile_jinja_template(template)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"its chat template is damaged in line {error.lineno}: {error}. Restore its chat_template.jinja from the "
                "published checkpoint."
            ) from error
        finally:
            sandbox.intercepted_binops, sandbox.code_generator_class = usual
    environment: Any = compiled.environment
    environment.binop_table |= {symbol: partial(_bounded_operator, symbol) for symbol in OPERATORS}
    compiled.root_render_func.__globals__.update(str_join=_joined, markup_join=_joined)
    environment.call = partial(_bounded_call, environment.call)
    for name in ("center", "format", "indent", "join", "replace", "wordwrap"):
        environment.filters[name] = _bounded_filter(name, environment.filters[name])


def _without_constants(usual: Any) -> Any:
    """Jinja's code generator without constant folding, so that ``'a'|center(10**10)`` is computed under the bounds."""
    from jinja2 import nodes

    class Generator(usual):
        def __init__(self, environment: Any, name: Any, filename: Any, *rest: Any) -> None:
            super().__init__(environment, name, filename, *rest[:2], optimized=False)

        def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
            if not isinstance(node, nodes.TemplateData):
                raise nodes.Impossible
            return super()._output_child_to_const(node, frame, finalize)

    return Generator


def _within(size: int) -> None:
    if size > MOST_TEXT:
        raise TemplateBeyondBounds(f"it asks for a text or list of {size:,} parts")


def _bounded_operator(symbol: str, left: Any, right: Any) -> Any:
    several = str | list | tuple
    if symbol == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, several) and isinstance(other, int):
                _within(len(one) * other)
    elif symbol == "+" and isinstance(left, several) and isinstance(right, several):
        _within(len(left) + len(right))
    elif symbol == "%" and isinstance(left, str):
        _within(_size("format", left, ()))
    elif symbol == "**" and isinstance(right, int) and abs(right) > 64:
        raise TemplateBeyondBounds(f"it asks for a power of {right}")
    return OPERATORS[symbol](left, right)


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _within(sum(map(len, texts)))
    return "".join(texts)


def _bounded_call(usual: Callable[..., Any], context: Any, function: Any, *given: Any, **named: Any) -> Any:
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    text = getattr(method, "__self__", None)
    if isinstance(text, str):
        if method.__name__ == "join" and given:
            given = ([str(part) for part in given[0]], *given[1:])
        _within(_size(method.__name__, text, (*given, *named.values())))
    return usual(context, function, *given, **named)


def _bounded_filter(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)  # keeps jinja's mark of filters that take the environment first
    def bounded(*given: Any, **named: Any) -> Any:
        at = 1 if hasattr(usual, "jinja_pass_arg") else 0
        text, rest = given[at], given[at + 1 :]
        if name == "join":
            text = list(text)
            given = (*given[:at], text, *rest)
            glue = str(rest[0]) if rest else str(named.get("d", ""))
            _within(sum(len(str(part)) for part in text) + len(glue) * len(text))
        else:
            _within(_size(name, str(text), (*rest, *named.values())))
        return usual(*given, **named)

    return bounded


def _size(name: str, text: str, given: Sequence[Any]) -> int:
    """The most characters that a method of a text can make."""
    numbers = [one for one in given if isinstance(one, int)]
    if name == "replace" and len(given) > 1:
        return len(text) + text.count(str(given[0])) * len(str(given[1]))
    if name == "join" and given:
        return sum(map(len, given[0])) + len(text) * len(given[0])
    if name == "translate" and given and isinstance(given[0], dict):
        return len(text) * max((len(one) for one in given[0].values() if isinstance(one, str)), default=1)
    if name in ("format", "format_map") and WIDTH.search(text):
        return MOST_TEXT + 1
    if name in ("indent", "expandtabs"):
        return len(text) * max([1, *numbers])
    return max([len(text), *numbers])


def bounded_rendering(render: Callable[[], str], characters: int) -> str:
    """The text that ``render`` returns for messages of so many characters, or TemplateBeyondBounds."""
    with _WATCH.watching():
        text = render()
    if len(text) > characters + MOST_CHARACTERS:
        raise TemplateBeyondBounds(f"it writes {len(text):,} characters for {characters:,}")
    return text


class _Watch:
    """One thread that watches all renderings of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start without renderings, also in a forked child: it has no threads, and its copy of the lock may be held."""
        # Rendering threads take the lock itself: Condition.__enter__ is Python code, and the exception that ends a
        # rendering could come between its two lines and leave the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, tuple[float, int]] = {}
        self._looking = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's rendering. A rendering inside another belongs to the outer one."""
        thread = threading.get_ident()
        if thread in self._running:
            yield
            return
        with self._lock:
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="chat templates", daemon=True).start()
            self._running[thread] = (time.monotonic(), 0)
            self._changed.notify()
        try:
            yield
        finally:
            with self._lock:
                if self._running.pop(thread, None) is None:  # it was ended: discard an exception that is still pending
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _look(self) -> None:
        while True:
            with self._changed:
                while not self._running:
                    self._changed.wait()
            time.sleep(LOOK_S)
            with self._changed:
                for thread, (began, size) in list(self._running.items()):
                    taken, used = time.monotonic() - began, resident_bytes()
                    if taken < LOOK_S:
                        continue
                    self._running[thread] = (began, size or used)
                    if taken > MOST_S or (size and used - size > MOST_BYTES):
                        del self._running[thread]
                        error = ctypes.py_object(TemplateBeyondBounds)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def resident_bytes() -> int:
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.forget)


# Marks that models of any family write. Most tokenizers have them as ordinary tokens, some as special ones.
ANSWER_MARKS = ("<think>", "</think>", "<tool_call>", "</tool_call>")
# How transformers' templates name the kinds of media.
TEMPLATE_KINDS: dict[MediaKind, str] = {"picture": "image", "video": "video", "sound": "audio"}
SINGLE_BYTE = re.compile("<0x([0-9A-F]{2})>")  # a byte as SentencePiece writes it
CACHED_TEXT = 1 << 16  # longest text whose tokens are cached
# Characters that mark places while a template runs; those that occur in the text at hand are skipped.
PRIVATE = [chr(code) for code in (*range(0xFDD0, 0xFDF0), *range(0xE000, 0xF8FF))]


class TokenTable:
    """What each token id is: special, ordinary (with its bytes), or a row of the head that no token owns.

    ``written``: special tokens that a model writes in its answers; their names are their text.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, written: Sequence[str] = ()) -> None:
        fast = getattr(tokenizer, "is_fast", False)
        decoder = json.dumps(json.loads(tokenizer.backend_tokenizer.to_str()).get("decoder")) if fast else ""
        if '"ByteLevel"' not in decoder and '"ByteFallback"' not in decoder:
            raise ModelError(
                f"tokenizer {type(tokenizer).__name__} is neither byte-level BPE nor has it tokens for single bytes: its "
                "tokens have no bytes of their own."
            )
        self._bytes = _Bytes(tokenizer, byte_level='"ByteLevel"' in decoder)
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
        """The bytes a token adds to the text; none for special tokens, except those that a model writes."""
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
    """The bytes of ordinary tokens, computed at their first use: by the table of byte-level BPE, or as SentencePiece's."""

    def __init__(self, tokenizer: Any, byte_level: bool) -> None:
        super().__init__()
        self._tokenizer, self._byte_level = tokenizer, byte_level
        self._added = {i: token.content for i, token in tokenizer.added_tokens_decoder.items()}

    def __missing__(self, token: int) -> bytes:
        if token in self._added:
            self[token] = self._added[token].encode()
        elif self._byte_level:
            self[token] = bytes(BYTE_OF[character] for character in self._tokenizer.convert_ids_to_tokens(token))
        else:
            piece = self._tokenizer.convert_ids_to_tokens(token)
            byte = SINGLE_BYTE.fullmatch(piece)
            self[token] = bytes([int(byte[1], 16)]) if byte else piece.replace("\u2581", " ").encode()
        return self[token]


_broken = threading.local()  # .spans: where the text that this thread decodes is broken


def _replaced(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeDecodeError)
    _broken.spans.append((error.start, error.end))
    return "\ufffd", error.end


codecs.register_error("sensorium.replaced", _replaced)


def _decode_broken(raw: bytes, ends: Sequence[int]) -> tuple[str, tuple[int, ...]]:
    """Text of broken UTF-8, and each of these offsets in ``raw`` as an offset in the text's bytes."""
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


def _byte_table() -> dict[str, int]:
    """The printable characters that byte-level BPE uses for the 256 bytes."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(byte): byte for byte in printable} | {chr(256 + i): byte for i, byte in enumerate(others)}


BYTE_OF = _byte_table()


class ChatRenderer:
    """Renders conversations for one checkpoint. ``owner`` has the template: the processor, or a text model's tokenizer.

    ``close_id`` ends an assistant's turn; ``shared_close``: it is the mark that opens the next one. ``lead`` is what the
    template writes between the generation prompt and a response (SmolVLM2: a space, which is sampled). ``append_only``: a
    response stays as written when the conversation goes on.
    """

    def __init__(self, tokenizer: Any, owner: Any, table: TokenTable, media_format: MediaFormat) -> None:
        self._owner, self._format = owner, media_format
        self._hears_in_video = isinstance(media_format, HearsInVideo)
        if not getattr(owner, "chat_template", None):
            raise ModelError(
                f"checkpoint '{tokenizer.name_or_path}' has no chat template; give it one (chat_template.jinja)."
            )
        if isinstance(owner.chat_template, str):
            bound_texts(owner.chat_template)
        self._kind_of = {token: kind for kind, token in media_format.placeholders.items()}
        self._as_text = False
        self._special = {**table.special, **media_format.stand_ins}
        self._guard = _Guard(self._special)
        written = [name for name, token in table.special.items() if token in table.written]
        self._written = re.compile("(" + "|".join(map(re.escape, written)) + ")") if written else None
        self._encode, self._encode_first = _plain_encoder(_without_first_space(tokenizer)), _plain_encoder(tokenizer)
        for token, kind in self._kind_of.items():
            if token not in self._special.values():
                raise ModelError(
                    f"the tokenizer does not mark token {token}, the placeholder of a {kind}, as special. Do config.json, "
                    "which names the placeholder, and the tokenizer's files belong together?"
                )
        question, answer = Message("user", (Text("-"),)), Message("assistant", (Text(PRIVATE[0]),))
        # GLM-4.1V's template takes an answer as a text, and blocks only in a user's turn.
        self._as_text = not self._kind_of or PRIVATE[0] not in self._apply([question, answer], False)
        after = _after(self._apply([question, answer], False), PRIVATE[0])
        self.shared_close = not after
        pieces = self._guard.split(after or _after(self._apply([question, answer, question], False), PRIVATE[0]))
        if pieces[0] or len(pieces) < 2:
            raise ModelError("this chat template does not end an assistant's turn with a special token.")
        self.close_id = self._special[pieces[1]]
        thought = f"<think>\n{PRIVATE[1]}\n</think>\n\n{PRIVATE[0]}"
        prompt = self._apply([question], True)
        before = self._apply([question, answer], False).partition(PRIVATE[0])[0]
        if prompt == self._apply([question], False) and before.strip() != prompt.strip():
            raise ModelError(
                f"this chat template writes {before.removeprefix(prompt)!r} before an answer, and nothing where it is "
                "asked for one (add_generation_prompt). Use the template that was published with the weights."
            )
        history = self._apply([question, Message("assistant", (Text(thought),)), question], True)
        self.lead = " " if history.startswith(f"{prompt} {thought}") else ""
        # A generation prompt that opens the thoughts leaves only their end to the response.
        sampled = thought.removeprefix("<think>\n") if prompt.endswith("<think>\n") else thought
        self.append_only = history.startswith(f"{prompt}{self.lead}{sampled}")

    def render(self, messages: Sequence[Message], *, generate: bool) -> Segment:
        """The first turn, default system prompt included."""
        guarded, (fence,) = self._guard.messages(messages, 1)
        tail = self._format.tail if generate and any(message.media for message in messages) else ""
        return self._segment(self._apply(guarded, generate) + tail, fence, messages, first=True)

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
                "this chat template writes a lone system message differently from one in a conversation: no head."
            )
        return self._segment(after.removeprefix(tail), fence, messages)

    def encode_answer(self, text: str) -> tuple[int, ...]:
        """Tokens of an answer. Special tokens in it are text, except those that models write."""
        pieces = self._written.split(self.lead + text) if self._written else [self.lead + text]
        return tuple(
            token for i, piece in enumerate(pieces) for token in ((self._special[piece],) if i % 2 else self._encode(piece))
        )

    def _apply(self, messages: Sequence[Message], generate: bool) -> str:
        conversation = [{"role": message.role, "content": self._content(message)} for message in messages]
        tools = [tool for message in messages if message.tools for tool in json.loads(message.tools)]
        options = {"tokenize": False, "add_generation_prompt": generate, **({"tools": tools} if tools else {})}
        try:
            text = bounded_rendering(
                lambda: self._owner.apply_chat_template(conversation, **options),
                sum(len(message.text) + len(message.tools) for message in messages),
            )
        except TemplateBeyondBounds as error:
            raise ModelError(
                f"the checkpoint's chat template cannot be used: {error}. Restore its chat_template.jinja from the "
                "published checkpoint, and check where this one comes from."
            ) from error
        except Exception as error:  # jinja's own errors, or those of a template's raise_exception
            roles = ", ".join(message.role for message in messages)
            raise ModelError(f"the chat template refuses messages of roles {roles}: {error}.") from error
        for tool in tools:
            if tool["function"]["name"] not in text:
                raise ModelError(
                    f"this checkpoint's chat template does not show the offered tool '{tool['function']['name']}'. Let the "
                    "environment describe its tools in words (its option offer: text), or give the checkpoint a template "
                    "that takes tools."
                )
        return text

    def _content(self, message: Message) -> Any:
        for item in message.media:
            if item.kind not in self._format.placeholders:
                raise ModelError(f"this model cannot take {item.kind} {item.name}; use a family that can.")
            if item.sound is not None and not self._hears_in_video:
                raise ModelError(
                    f"video {item.name} has use_audio_in_video, and this model does not take the sound of videos. Leave "
                    "that out, or use a family that does (docs/guides/families.md)."
                )
        if self._as_text and not message.media:
            return message.text
        return [
            {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": TEMPLATE_KINDS[block.kind]}
            for block in message.content
        ]

    def _segment(
        self, text: str, fence: str, messages: Sequence[Message], skip: int = 0, *, first: bool = False
    ) -> Segment:
        pieces = self._guard.split(text)  # plain texts and special tokens in turn
        for i in range(1, len(pieces), 2):
            kind = self._kind_of.get(self._special[pieces[i]])
            if kind is not None and kind in self._format.joined:  # its expansion is text that joins its neighbours
                removed, before, after = self._format.joined[kind]
                pieces[i - 1] = pieces[i - 1].removesuffix(removed) + before
                pieces[i + 1] = after + pieces[i + 1]
        tokens: list[int] = []
        for i, piece in enumerate(pieces):
            encode = self._encode if i or not first else self._encode_first
            tokens += (self._special[piece],) if i % 2 else encode(piece.replace(fence, ""))
        del tokens[:skip]
        media = [item.resolved(self._format.frame_rule) for message in messages for item in message.media]
        places = [i for i, token in enumerate(tokens) if token in self._kind_of]
        if [self._kind_of[tokens[i]] for i in places] != [item.kind for item in media]:
            names = ", ".join(f"{item.kind} {item.name}" for item in media) or "none"
            raise ModelError(f"the chat template shows {len(places)} media where the messages hold {names}.")
        dropped = set()  # the template's marks around a placeholder whose expansion has its own
        for i in places:
            if tuple(tokens[i - 1 : i + 2 : 2]) == self._format.own_marks.get(self._kind_of[tokens[i]]):
                dropped |= {i - 1, i + 1}
        at = dict(zip(places, media, strict=True))
        kept: list[int] = []
        spans: list[MediaSpan] = []
        for i, token in enumerate(tokens):
            if i in at:  # the placeholder of a video's sound follows that of the video
                for part in at[i].parts:
                    spans.append(MediaSpan(len(kept), part))
                    kept.append(self._format.placeholders[part.kind])
            elif i not in dropped:
                kept.append(token)
        return Segment("environment", tuple(kept), tuple(spans))


class _Guard:
    """Keeps texts from forging special tokens: puts a private character, the fence, into whatever could become one."""

    def __init__(self, special: Mapping[str, int]) -> None:
        ordered = sorted(special, key=len, reverse=True)
        self._pattern = re.compile("(" + "|".join(map(re.escape, ordered)) + ")")
        # Two texts that meet could also form a special token.
        self._beginnings = tuple({token[:i] for token in special for i in range(1, len(token))})
        self._endings = tuple({token[i:] for token in special for i in range(1, len(token))})

    def messages(self, messages: Sequence[Message], count: int) -> tuple[list[Message], list[str]]:
        """The messages guarded, and ``count`` characters that do not occur in them; the first is the fence."""
        written = "".join(message.text + message.tools for message in messages)
        characters = list(islice((character for character in PRIVATE if character not in written), count))
        if len(characters) < count:
            raise ModelError("a text uses every private character of Unicode; it cannot be rendered safely.")
        guarded = []
        for message in messages:
            content = [
                Text(self._text(block.text, characters[0])) if isinstance(block, Text) else block
                for block in message.content
            ]
            # As JSON without escapes, so that what could become a special token is seen.
            tools = json.dumps(json.loads(message.tools), ensure_ascii=False) if message.tools else ""
            guarded.append(Message(message.role, tuple(content), self._fenced(tools, characters[0])))
        return guarded, characters

    def split(self, text: str) -> list[str]:
        return self._pattern.split(text)

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


def _without_first_space(tokenizer: Any) -> Any:
    """A tokenizer as it reads text behind a special token: SentencePiece's puts a space before a text's first word only."""
    own = tokenizer.backend_tokenizer.pre_tokenizer
    if getattr(own, "prepend_scheme", "") != "first":
        return tokenizer
    inside = deepcopy(tokenizer)
    inside.backend_tokenizer.pre_tokenizer = type(own)(own.replacement, "never", own.split)
    return inside


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
