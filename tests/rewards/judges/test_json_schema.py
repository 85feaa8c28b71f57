"""Answers held to a user's JSON schema: as the jsonschema package has it, and refused where it cannot be held to."""

import json
from typing import Any

import jsonschema
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.rewards.judges.answer_forms import SchemaAnswer, refuse_schema, strict

RUBRIC: dict[str, Any] = {
    "type": "object",
    "properties": {
        "truth": {"type": "number", "minimum": 0, "maximum": 1},
        "grade": {"$ref": "#/$defs/Grade"},
        "kept": {"type": "boolean"},
        "faults": {"type": "array", "items": {"type": "string", "minLength": 1}, "maxItems": 2, "uniqueItems": True},
    },
    "required": ["truth", "grade"],
    "additionalProperties": False,
    "$defs": {"Grade": {"enum": [1, 2, 3], "description": "3 is best"}},
}
ANSWER = SchemaAnswer(RUBRIC)


def test_an_answer_by_a_schema_is_read_through_its_wrapping() -> None:
    value = {"truth": 0.5, "grade": 2, "faults": ["late"]}
    assert ANSWER.parse(f"Here:\n```json\n{json.dumps(value)}\n```") == value
    assert ANSWER.parse("{'truth': 1, 'grade': 2, 'kept': True,}") == {"truth": 1, "grade": 2, "kept": True}


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("0.5", "no JSON"),
        ("[1]", "no JSON object"),
        ('{"truth": 0.5}', "lacks 'grade'"),
        ('{"truth": 2, "grade": 1}', "'truth': 2 is above 1"),
        ('{"truth": "0.5", "grade": 1}', "'truth': '0.5' is not a number"),
        ('{"truth": true, "grade": 1}', "is not a number"),
        ('{"truth": 1e999, "grade": 1}', "too large"),
        ('{"truth": 0, "grade": 4}', "'grade': .* is none of 1, 2, 3"),
        ('{"truth": 0, "grade": true}', "is none of"),
        ('{"truth": 0, "grade": 1, "more": 1}', "'more': was not asked for"),
        ('{"truth": 0, "grade": 1, "faults": ["a", "b", "c"]}', "'faults': it has 3 items"),
        ('{"truth": 0, "grade": 1, "faults": ["a", "a"]}', "twice"),
        ('{"truth": 0, "grade": 1, "faults": [""]}', r"'faults\[0\]': it has 0 characters"),
        ('{"truth": 0, "truth": 1, "grade": 1}', "'truth' is given twice"),
        ("{'truth': 0, 'truth': 1, 'grade': 1}", "'truth' is given twice"),
        ('{"truth": 0, "grade": 1} {"truth": 1, "grade": 1}', "several"),
    ],
)
def test_what_does_not_hold_to_the_schema_is_no_answer(text: str, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        ANSWER.parse(text)


@pytest.mark.parametrize(
    ("schema", "problem"),
    [
        ([], "is an object"),
        ({"type": "number"}, '"type" must be "object"'),
        ({"type": "object", "properties": {"a": {"type": "float"}}}, "'type' .* is one or several of"),
        ({"type": "object", "properties": {"a": {"pattern": "(a+)+"}}}, "'pattern' .* is not checked here"),
        ({"type": "object", "propertys": {}}, "'propertys' .* is not checked here"),
        ({"type": "object", "properties": []}, "an object of schemas"),
        ({"type": "object", "required": "a"}, "'required' .* a list of names"),
        ({"type": "object", "properties": {"a": {"$ref": "other.json#/A"}}}, "a place in the schema"),
        ({"type": "object", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "leads back to itself"),
        ({"type": "object", "properties": {"a": {"minItems": -1}}}, "whole number from 0"),
    ],
)
def test_a_schema_that_answers_cannot_be_held_to_is_refused(schema: Any, problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        SchemaAnswer(schema)


def test_a_field_that_is_paid_has_bounds() -> None:
    assert ANSWER.bounds("truth") == (0, 1)
    assert ANSWER.bounds("grade") == (1, 3)
    with pytest.raises(ValueError, match="also among required"):
        ANSWER.bounds("kept")
    unbounded = SchemaAnswer({"type": "object", "properties": {"a": {"type": "number", "minimum": 0}}, "required": ["a"]})
    with pytest.raises(ValueError, match="minimum and maximum"):
        unbounded.bounds("a")


def test_only_a_closed_schema_is_sent_as_strict() -> None:
    closed = {"type": "object", "properties": {"a": {}}, "required": ["a"], "additionalProperties": False}
    assert strict(closed)
    assert not strict(RUBRIC)  # not every field is required
    assert not strict({**closed, "properties": {"a": {"type": "object"}}})


def test_a_schema_that_calls_itself_ends() -> None:
    tree = {"type": "object", "properties": {"left": {"$ref": "#"}}, "additionalProperties": False}
    assert SchemaAnswer(tree).parse('{"left": {"left": {}}}') == {"left": {"left": {}}}
    endless = {"type": "object", "allOf": [{"$ref": "#/$defs/A"}], "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}]}}}
    with pytest.raises(ValueError, match="64 deep"):
        SchemaAnswer(endless).parse("{}")


PLAIN = (
    st.none() | st.booleans() | st.integers(-3, 3) | st.sampled_from([0.5, 1.0, -1.5]) | st.sampled_from(["", "a", "ab"])
)
NAMES = st.sampled_from("xyz")
VALUES = st.recursive(
    PLAIN,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)
KINDS = st.sampled_from(["object", "array", "string", "boolean", "null", "number", "integer"])
SIMPLE = st.fixed_dictionaries(
    {},
    optional={
        "type": KINDS | st.lists(KINDS, min_size=1, max_size=2, unique=True),
        "enum": st.lists(VALUES, min_size=1, max_size=3),
        "const": PLAIN,
        "minimum": st.integers(-2, 2),
        "exclusiveMaximum": st.integers(-2, 2),
        "minLength": st.integers(0, 2),
        "maxItems": st.integers(0, 2),
        "uniqueItems": st.booleans(),
        "required": st.lists(NAMES, max_size=2, unique=True),
    },
)
SCHEMAS = st.recursive(
    st.booleans() | SIMPLE,
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "additionalProperties": inner,
            "items": inner,
            "anyOf": st.lists(inner, min_size=1, max_size=2),
            "oneOf": st.lists(inner, min_size=1, max_size=2),
            "allOf": st.lists(inner, min_size=1, max_size=2),
        },
    ),
    max_leaves=4,
)


@settings(max_examples=80, deadline=None)
@given(SCHEMAS, st.dictionaries(NAMES, VALUES, max_size=3))
def test_it_agrees_with_the_jsonschema_package(inner: Any, value: dict[str, Any]) -> None:
    schema = {"type": "object", "allOf": [inner]}
    refuse_schema(schema)
    fits = jsonschema.Draft202012Validator(schema).is_valid(value)
    try:
        found = SchemaAnswer(schema).parse(json.dumps(value))
    except ValueError:
        assert not fits
    else:
        assert fits
        assert found == value
