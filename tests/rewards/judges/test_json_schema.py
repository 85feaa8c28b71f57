"""Answers held to a user's JSON schema, which is refused where they cannot be held to it."""

import json
from typing import Any

import pytest

from sensorium.rewards.judges.answer_forms import SchemaAnswer, strict

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
        ('{"truth": 0.5}', "'grade' is a required"),
        ('{"truth": 2, "grade": 1}', "'truth': 2 .* 1"),
        ('{"truth": "0.5", "grade": 1}', "'truth': '0.5' .* 'number'"),
        ('{"truth": true, "grade": 1}', "'truth': True .* 'number'"),
        ('{"truth": 1e999, "grade": 1}', "too large"),
        ('{"truth": 0, "grade": 4}', r"'grade': 4 .*\[1, 2, 3\]"),
        ('{"truth": 0, "grade": true}', r"'grade': True .*\[1, 2, 3\]"),
        ('{"truth": 0, "grade": 1, "more": 1}', "'more'"),
        ('{"truth": 0, "grade": 1, "faults": ["a", "b", "c"]}', "'faults'"),
        ('{"truth": 0, "grade": 1, "faults": ["a", "a"]}', "'faults'"),
        ('{"truth": 0, "grade": 1, "faults": [""]}', r"'faults\[0\]'"),
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
        ({"type": "object", "properties": {"a": {"type": "float"}}}, "'properties.a.type': 'float'"),
        ({"type": "object", "properties": {"a": {"pattern": "(a+)+"}}}, "'pattern' .* is not checked here"),
        ({"type": "object", "propertys": {}}, "'propertys' .* is not checked here"),
        ({"type": "object", "properties": []}, "'properties': .*'object'"),
        ({"type": "object", "required": "a"}, "'required': 'a' .*'array'"),
        ({"type": "object", "properties": {"a": {"$ref": "other.json#/A"}}}, "a place in the schema"),
        ({"type": "object", "$defs": {"A": {"$ref": "#/$defs/A"}}}, "leads back to itself"),
        ({"type": "object", "properties": {"a": {"enum": []}}}, "'enum'"),
        ({"type": "object", "properties": {"a": {"minItems": -1}}}, "'properties.a.minItems': -1"),
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
    with pytest.raises(ValueError, match="too deeply"):
        SchemaAnswer(endless).parse("{}")
