"""Tokens and their bytes: text is read off the sampled tokens, never the tokens off the text."""

import codecs
import json
import threading
from collections.abc import Sequence
from itertools import accumulate
from typing import Any

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
