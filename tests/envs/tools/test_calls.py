"""Tool calls: geo3k's grammar, read in linear time, and arguments held against a schema."""

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.envs.tool_use import argument_problem, calls_in, write_call


@pytest.mark.parametrize(
    ("text", "name", "arguments"),
    [
        ('<tool_call>{"name": "a", "arguments": {"x": 1}}</tool_call>', "a", {"x": 1}),
        ('so <tool_call>\n{"name": "a",\n "arguments": {}}\n</tool_call> and', "a", {}),
        ('<tool_call>{"function": {"name": "a", "arguments": "{\\"x\\": [1]}"}}</tool_call>', "a", {"x": [1]}),
        ('<tool_call>{"name": "a"}</tool_call>', "a", {}),
        ('<tool_call>{"name": "a", "arguments": {"t": "}</tool"}}</tool_call>', "a", {"t": "}</tool"}),
    ],
)
def test_a_call_is_read(text: str, name: str, arguments: dict[str, Any]) -> None:
    (call,) = calls_in(text)
    assert (call.name, call.arguments, call.problem) == (name, arguments, "")


@pytest.mark.parametrize(
    ("said", "problem", "is_json"),
    [
        ("{name: a}", "not JSON", False),
        ('{"name": NaN}', "not JSON", False),
        ('{"name": 5}', 'no "name"', True),
        ("{}", 'no "name"', True),
        ('{"function": "a"}', 'no "name"', True),
        ('{"function": ["a"], "arguments": []}', 'no "name"', True),
        ('{"name": "a", "arguments": [1]}', "must be an object", True),
        ('{"name": "a", "arguments": "{"}', "not JSON", True),
        ('{"name": "a", "arguments": "[]"}', "must be an object", True),
        ('{"a":' * 5000 + "}", "not JSON", False),
        ('{"a": "' + "x" * 200_000 + '"}', "longer", False),
    ],
)
def test_a_call_that_cannot_be_made_says_why(said: str, problem: str, is_json: bool) -> None:
    (call,) = calls_in(f"<tool_call>{said}</tool_call>")
    assert problem in call.problem
    assert call.is_json == is_json


def test_what_is_no_call_is_none() -> None:
    for text in (
        "",
        "<tool_call>",
        "<tool_call>{}",
        "<tool_call>5</tool_call>",
        '{"name": "a"}',
        "<tool_call></tool_call>",
    ):
        assert calls_in(text) == []


def test_calls_come_in_order() -> None:
    text = write_call("a", {"x": "é"}) + "\n" + write_call("b", {})
    assert [(call.name, dict(call.arguments)) for call in calls_in(text)] == [("a", {"x": "é"}), ("b", {})]


@pytest.mark.parametrize("piece", ["<tool_call>{", "}</tool_call", "<tool_call> ", "} ", "<tool_call>{}</tool_call>"])
def test_megabytes_of_calls_are_read_in_a_moment(piece: str) -> None:
    began = time.process_time()
    calls_in(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 10


@given(st.text(max_size=60), st.dictionaries(st.text(max_size=5), st.integers() | st.text(max_size=5), max_size=3))
def test_what_is_written_is_read(name: str, arguments: dict[str, Any]) -> None:
    texts = json.dumps([name, arguments], ensure_ascii=False)
    if name and "</tool_call>" not in texts:
        (call,) = calls_in(write_call(name, arguments))
        assert (call.name, call.arguments) == (name, arguments)


BOX = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
SCHEMA = {
    "type": "object",
    "properties": {
        "box": BOX,
        "n": {"type": "integer", "minimum": 0, "maximum": 9},
        "mode": {"enum": ["a", "b"]},
        "t": {"type": ["string", "null"], "maxLength": 3},
    },
    "required": ["box"],
    "additionalProperties": False,
}


@pytest.mark.parametrize(
    ("arguments", "problem"),
    [
        ({"box": [1, 2, 3, 4.5], "n": 3, "mode": "a", "t": None}, ""),
        ({"box": [1, 2, 3, 4], "n": 3.0}, ""),
        ({}, "'box' is a required"),
        ({"box": "1,2,3,4"}, "'box': '1,2,3,4'"),
        ({"box": [1, 2, 3]}, "'box': [1, 2, 3]"),
        ({"box": [1, 2, 3, "4"]}, "'box[3]': '4'"),
        ({"box": [1, 2, 3, True]}, "'box[3]': True"),
        ({"box": [1, 2, 3, 4], "n": 2.5}, "'n': 2.5"),
        ({"box": [1, 2, 3, 4], "n": 10}, "'n': 10"),
        ({"box": [1, 2, 3, 4], "n": True}, "'n': True"),
        ({"box": [1, 2, 3, 4], "mode": "c"}, "['a', 'b']"),
        ({"box": [1, 2, 3, 4], "t": "four"}, "'t': 'four'"),
        ({"box": [1, 2, 3, 4], "more": 1}, "'more'"),
    ],
)
def test_arguments_are_held_against_the_schema(arguments: dict[str, Any], problem: str) -> None:
    found = argument_problem(arguments, SCHEMA)
    assert problem in found if problem else not found


def test_a_schema_that_is_none_is_reported_once_and_left_to_the_tool(capsys: pytest.CaptureFixture[str]) -> None:
    for _ in range(2):
        assert not argument_problem({"n": "x"}, {"type": "object", "properties": {"n": {"type": "float"}}})
    assert capsys.readouterr().err.count("properties.n.type") == 1
