"""Schemas of others: named keywords alone are checked, nothing is fetched, no schema takes hours or the whole stack."""

import json
import socket
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sensorium.vocabulary.json_schema import KEYWORDS, misfit, subschemas, validator_of

SLOW = {"pattern": "^(a+)+$"}
TEXT = "a" * 40 + "b"
DRAFT_7 = "http://json-schema.org/draft-07/schema#"


def problem(value: Any, schema: Any, *more: str) -> str:
    return misfit(value, validator_of(json.dumps(schema), KEYWORDS | set(more)))


@pytest.mark.parametrize(
    "schema",
    [
        {"properties": {"x": SLOW}},
        {"properties": {"x": {**SLOW, "$schema": DRAFT_7}}},
        {"$schema": DRAFT_7, "properties": {"x": SLOW}},
        {"additionalProperties": SLOW},
        {"patternProperties": {"^(a+)+$": False}, "additionalProperties": False},
    ],
)
def test_regular_expressions_of_a_schema_are_never_run(schema: dict[str, Any]) -> None:
    start = time.monotonic()
    assert not problem({"x": TEXT, TEXT: TEXT}, schema)
    assert time.monotonic() - start < 20


def test_no_address_is_fetched() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.settimeout(0)
        here = {"properties": {"x": {"$ref": f"http://127.0.0.1:{listener.getsockname()[1]}/schema.json"}}}
        assert not problem({"x": 1}, here)
        with pytest.raises(Exception, match="Unresolvable"):
            problem({"x": 1}, here, "$ref")
        with pytest.raises(BlockingIOError):  # nobody has called
            listener.accept()


def test_nesting_without_end_is_a_problem_and_no_crash() -> None:
    endless = {"$ref": "#/$defs/A", "$defs": {"A": {"anyOf": [{"$ref": "#/$defs/A"}, {"$ref": "#/$defs/A"}]}}}
    assert "deeply" in problem({}, endless, "$ref", "$defs", "anyOf")
    deep: Any = {"type": "string"}
    for _ in range(700):
        deep = {"items": deep}
    with pytest.raises(ValueError, match="deeply"):
        problem([], deep)


def test_what_depends_on_an_unchecked_keyword_is_not_checked_without_it() -> None:
    schema = {"patternProperties": {"^x": {}}, "properties": {"y": {"type": "string"}}, "additionalProperties": False}
    assert not problem({"x1": 1, "y": ""}, schema)
    assert "'y'" in problem({"x1": 1, "y": 1}, schema)


def test_the_draft_that_a_schema_names_is_its_own() -> None:
    pair = {"items": [{"type": "string"}, {"type": "integer"}]}
    assert "'[1]'" in problem(["a", "b"], {"$schema": DRAFT_7, **pair})
    with pytest.raises(ValueError, match="'items'"):
        problem(["a", "b"], pair)


def test_a_sentence_about_a_long_value_is_short() -> None:
    assert len(problem({"k" * 5000: "v" * 50_000}, {"additionalProperties": {"type": "number"}})) < 500


NAMES = st.sampled_from(["title", "pattern", "items", "$ref", "x"])
SCHEMAS = st.recursive(
    st.booleans() | st.fixed_dictionaries({}, optional={"type": st.sampled_from(["object", "string", "array"])}),
    lambda inner: st.fixed_dictionaries(
        {},
        optional={
            "properties": st.dictionaries(NAMES, inner, max_size=3),
            "additionalProperties": inner,
            "items": inner,
            "title": st.just("a note"),
        },
    ),
    max_leaves=5,
)
VALUES = st.recursive(
    st.just("a") | st.just(1),
    lambda inner: st.lists(inner, max_size=2) | st.dictionaries(NAMES, inner, max_size=3),
    max_leaves=5,
)


@given(SCHEMAS, VALUES)
def test_properties_with_the_names_of_keywords_are_checked(schema: Any, value: Any) -> None:
    assert (not problem(value, schema)) == Draft202012Validator(schema).is_valid(value)
    assert all("title" not in node for node in subschemas(validator_of(json.dumps(schema), KEYWORDS).schema))
