"""A key that a service sends back is masked in whatever spelling; ordinary words are left alone."""

import base64
import json
import time
from urllib.parse import quote

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.vocabulary.secrets import Secret, holds_key, masked, without_keys

KEY = "sk-0123/abc+DEF=456789"
keys = st.text(st.characters(min_codepoint=33, max_codepoint=126), min_size=12, max_size=40)


def escaped(text: str) -> str:
    return "".join(f"\\u{ord(character):04x}" for character in text)


SPELLINGS = {
    "plain": lambda key: key,
    "JSON": lambda key: json.dumps(key)[1:-1],
    "JSON escapes": escaped,
    "JSON escapes in JSON": lambda key: json.dumps(escaped(key)),
    "URL": lambda key: quote(key, safe=""),
    "URL, all of it": lambda key: "".join(f"%{ord(character):02X}" for character in key),
    "URL twice": lambda key: quote(quote(key, safe=""), safe=""),
    "base64": lambda key: base64.b64encode(key.encode()).decode(),
    "base64 of a header": lambda key: base64.b64encode(f"user:{key}@host".encode()).decode(),
    "base64 for URLs": lambda key: base64.urlsafe_b64encode(f"x{key}".encode()).decode(),
    "hex": lambda key: key.encode().hex().upper(),
    "HTML": lambda key: "".join(f"&#{ord(character)};" for character in key),
}


@pytest.mark.parametrize("spelling", SPELLINGS)
@given(key=keys)
def test_every_spelling_of_a_key_is_masked(spelling: str, key: str) -> None:
    spelled = SPELLINGS[spelling](key)
    found = masked(f"before {spelled} after", [key])
    assert "***" in found
    assert found.startswith("before ")
    assert found.endswith(" after")
    assert spelled not in found
    assert spelled[4:-4] not in found


def test_texts_and_names_of_json_are_masked_and_numbers_stay() -> None:
    value = {"error": [f"bad {KEY}", {KEY: 1.5}], "n": 3, "none": None}
    assert masked(value, [KEY]) == {"error": ["bad ***", {"***": 1.5}], "n": 3, "none": None}


def test_short_keys_are_masked_as_whole_words_and_placeholders_are_no_keys() -> None:
    assert masked("key hunter2 of hunter22", ["hunter2"]) == "key *** of hunter22"
    assert masked("none of it is empty, ollama", ["none", "EMPTY", "ollama", ""]) == "none of it is empty, ollama"


def test_of_two_keys_the_longer_one_is_masked_whole() -> None:
    short, long = "sk-0123456789ab", "sk-0123456789ab-and-more"
    assert masked(f"{long} {short}", [short, long]) == "*** ***"


@pytest.mark.parametrize("key", [KEY, "\\" * 12 + "key", r"C:\\\\server\\key"])
def test_masking_takes_time_linear_in_the_text(key: str) -> None:
    started = time.process_time()
    assert masked("\\" * 100_000, [key]) == "\\" * 100_000
    assert time.process_time() - started < 10  # 0.1 to 2 s; without bounds a minute, or for ever
    assert masked(f"bad {key} {escaped(key)} {json.dumps(key)}", [key]) == 'bad *** *** "***"'


def test_a_secret_prints_as_a_mask() -> None:
    assert (repr(Secret(KEY)), str(Secret(KEY)), Secret(KEY).reveal()) == ("***", "***", KEY)


@pytest.mark.parametrize(
    ("address", "shown"),
    [
        ("http://me:word@host:1/a", "http://host:1/a?***"),
        ("WSS://word@host", "WSS://host?***"),
        ("https://host/a?token=word#b", "https://host/a?***"),
        ("http://me:word@[::1", "http://[::1?***"),
        ("http://[::1", "http://[::1"),
        ("http://host:1/a@b#c?d", "http://host:1/a@b#c?d"),
        ("Look at http://host?q", "Look at http://host?q"),
    ],
)
def test_an_address_is_shown_without_its_key_however_broken_it_is(address: str, shown: str) -> None:
    assert without_keys({"servers": [address]}) == {"servers": [shown]}
    assert holds_key(address) is (address != shown)
