r"""Keys of services, and masking them in replies, in whatever spelling.

    masked({"error": "bad key sk-0123456789ab"}, [key])     → {"error": "bad key ***"}
    masked(r"bad key \u0073k-0123456789ab", [key])          → "bad key ***"        the same for %73k-…, base64 and hex

Judges, remote rewards and remote environments mask every reply here, before it is parsed, logged, cached or shown.
"""

import base64
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

MASK = "***"
SHORT = 12  # shorter keys are masked as whole words only: they may be a part of ordinary words
SHORTEST = 4
BACKSLASHES = r"\\{1,31}"  # before an escape: JSON within JSON doubles them; bounded, or a search would take n² steps
# Written where a server asks for no key; as ordinary words of answers they are not masked.
PLACEHOLDERS = frozenset(
    ("none", "null", "empty", "dummy", "test", "token", "true", "false", "secret", "password", "xxxx", "local", "vllm",
     "ollama", "sglang", "not-needed", "no-key")
)  # fmt: skip
HELD_KEYS = ("headers", "env")  # options of tools and environments that pass a key to a server
# Also matches malformed addresses, where urllib would fail.
ADDRESS = re.compile(r"(?i)(?P<scheme>(?:http|ws)s?://)(?P<user>[^/?#]*@)?(?P<place>[^?#]*)(?P<query>\?[^#]+)?.*")


class Secret:
    """A key that only ``reveal`` returns; it cannot be pickled or written as JSON."""

    __slots__ = ("_key",)

    def __init__(self, key: str) -> None:
        self._key = key

    def reveal(self) -> str:
        return self._key

    def __repr__(self) -> str:
        return MASK

    def __reduce__(self) -> Any:
        raise TypeError("a key is not written anywhere")


def holds_key(address: str) -> bool:
    """Whether an address has a user, password or query, which a recipe's must not have: recipes are stored and logged."""
    found = ADDRESS.match(address)
    return found is not None and bool(found["user"] or found["query"])


def without_keys(recipe: Any) -> Any:
    """A recipe with ``***`` for possible keys: values of ``headers`` and ``env``, users and queries of addresses."""
    if isinstance(recipe, Mapping):
        return {
            name: dict.fromkeys(held, MASK) if name in HELD_KEYS and isinstance(held, Mapping) else without_keys(held)
            for name, held in recipe.items()
        }
    if isinstance(recipe, list | tuple):
        return [without_keys(held) for held in recipe]
    if isinstance(recipe, str) and not re.search(r"\s", recipe) and holds_key(recipe):
        return ADDRESS.sub(rf"\g<scheme>\g<place>?{MASK}", recipe)
    return recipe


def masked(value: Any, keys: Sequence[str]) -> Any:
    """The value with ``***`` for each of the keys: a text, or JSON whose texts and names are all masked."""
    pattern = _pattern(tuple(dict.fromkeys(keys)))
    return value if pattern is None else _masked(value, pattern)


def _masked(value: Any, pattern: re.Pattern[str]) -> Any:
    if isinstance(value, str):
        return pattern.sub(MASK, value)
    if isinstance(value, Mapping):
        return {_masked(name, pattern): _masked(item, pattern) for name, item in value.items()}
    if isinstance(value, list | tuple):
        found = [_masked(item, pattern) for item in value]
        return found if isinstance(value, list) else tuple(found)
    return value


@lru_cache(maxsize=64)
def _pattern(keys: tuple[str, ...]) -> re.Pattern[str] | None:
    # Longer keys first: one may begin with another.
    real = [key for key in keys if len(key) >= SHORTEST and key.lower() not in PLACEHOLDERS]
    spelled = [_spelling(key) for key in sorted(real, key=len, reverse=True)]
    return re.compile("|".join(spelled)) if spelled else None


def _spelling(key: str) -> str:
    """Each character plain or as an escape of JSON, URLs, Python or HTML; or all in base64 or hex."""
    plain = "".join(map(_character, re.findall(r"\\+|[^\\]", key)))
    if len(key) < SHORT:
        return rf"(?<![A-Za-z0-9]){plain}(?![A-Za-z0-9])"
    data = key.encode()
    return "|".join([plain, *map(re.escape, _base64_parts(data)), rf"(?i:{data.hex()})"])


def _character(found: str) -> str:
    """A pattern of one character, or of consecutive backslashes."""
    code, own = ord(found[0]), re.escape(found[0])
    escapes = [rf"{BACKSLASHES}u(?i:{code:04x})", rf"{BACKSLASHES}x(?i:{code:02x})", rf"%(?:25)*(?i:{code:02x})"]
    escapes += [rf"&#0*{code};", rf"&#[xX]0*(?i:{code:x});"]
    if found[0] == "\\":
        return f"(?:{'|'.join(escapes)}|{BACKSLASHES}+){{1,{len(found)}}}+"
    if found in "\"'/":
        escapes.append(BACKSLASHES + own)
    return f"(?:{own}|{'|'.join(escapes)})"


def _base64_parts(data: bytes) -> list[str]:
    """The base64 of the data inside a longer text at each offset, without the edges that depend on that text."""
    parts = []
    for before in range(3):
        spelled = base64.b64encode(b"\0" * before + data).decode().rstrip("=")
        first = -(-8 * before // 6)
        whole = spelled[first : 8 * (before + len(data)) // 6]
        parts += [whole, whole.replace("+", "-").replace("/", "_")]
    return list(dict.fromkeys(parts))
