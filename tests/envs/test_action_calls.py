"""Calls of actions with parameters: what was written is read, what is wrong is named, and nothing else is accepted."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.envs.action_calls import Call, Signature, read_calls, signature_of
from sensorium.envs.actions import ActionGrammar
from sensorium.vocabulary.errors import RecipeError

DECLARED = (
    "click(x: 0..639, y: 0..479)", "drag(x1: -5..5, y1: 0..9, x2: -5..5, y2: 0..9)", "type(text: text 100)",
    "scroll(way: up|down, by: 1..10)", "steer(turn: -1.0..1.0)", "set(a: number, n: whole)", "wait", "Pick up",
)  # fmt: skip
SIGNATURES = tuple(map(signature_of, DECLARED))
GRAMMAR = ActionGrammar.declared(*DECLARED, most_actions=3)
PIECES = st.sampled_from(
    [
        *"(),=\"'\\ \n-.",
        "click",
        "type",
        "wait",
        "x",
        "1",
        "20",
        "3.5",
        "1e3",
        "nan",
        "up",
        "\ud800",
        "é",
        "Pick up",
        "((",
        "ſ",
    ]
)
VALUES: dict[str, st.SearchStrategy[Any]] = {
    "whole": st.integers(0, 9), "number": st.floats(-1, 1), "choice": st.sampled_from(["up", "down"]),
    "text": st.text(st.characters(exclude_categories=("Cs",)), max_size=100),
}  # fmt: skip


@st.composite
def calls(draw: st.DrawFn) -> Call:
    signature = draw(st.sampled_from(SIGNATURES))
    within = {"by": st.integers(1, 10), "x1": st.integers(-5, 5), "x2": st.integers(-5, 5)}
    return Call(signature.name, {p.name: draw(within.get(p.name, VALUES[p.kind])) for p in signature.parameters})


def same(read: tuple[Any, ...], written: list[Call]) -> bool:
    return [(call.name, call.arguments) for call in read] == [(call.name, call.arguments) for call in written]


def reason(answer: str) -> str:
    actions, why = read_calls(answer, SIGNATURES, 3)
    assert bool(actions) != bool(why)
    return why


@given(st.lists(calls(), min_size=1, max_size=3))
def test_what_the_grammar_writes_it_reads(written: list[Call]) -> None:
    asked = GRAMMAR.read(GRAMMAR.write(written))
    if not any("</answer>" in str(value) for call in written for value in call.arguments.values()):
        assert same(asked.actions, written)
        assert (asked.valid, asked.well_formed, asked.reason) == (True, True, "")
    assert same(read_calls("\n".join(map(GRAMMAR._spelled, written)), SIGNATURES, 3)[0], written), "also on lines"


@given(st.one_of(st.text(max_size=60), st.lists(PIECES, max_size=25).map("".join)))
def test_whatever_is_written_is_a_valid_call_or_has_a_reason(answer: str) -> None:
    actions, why = read_calls(answer, SIGNATURES, 3)
    assert bool(actions) != bool(why)
    assert len(why) < 1000
    why.encode()
    for call in actions:
        (signature,) = (one for one in SIGNATURES if one.name == call.name)
        assert set(call.arguments) == {p.name for p in signature.parameters}
        again, _ = read_calls(signature.write(call), SIGNATURES, 1)
        assert same(again, [call]), "its values lie within what is declared"


@given(st.integers(), st.sampled_from(SIGNATURES))
def test_random_calls_are_allowed_and_spread(seed: int, signature: Signature) -> None:
    written = [signature.random(random.Random(f"{seed}/{i}")) for i in range(3)]
    assert same(read_calls(", ".join(map(signature.write, written)), SIGNATURES, 3)[0], written)


@given(st.integers(0, 159), st.integers(0, 209), st.integers(0, 1000), st.integers(0, 1000))
def test_relative_positions_span_the_range_and_pixels_come_back(x: int, y: int, across: int, down: int) -> None:
    grammar = ActionGrammar.declared("click(x: 0..159, y: 0..209, n: 0..5)", coordinates="relative")
    (call,) = grammar.read(grammar.write([Call("click", {"x": x, "y": y, "n": 5})])).actions
    assert dict(call.arguments) == {"x": x, "y": y, "n": 5}
    (call,) = grammar.read(f"<answer>click({across}, {down}, 0)</answer>").actions
    assert dict(call.arguments) == {"x": round(across / 1000 * 159), "y": round(down / 1000 * 209), "n": 0}
    assert grammar.read("<answer>click(1001, 0, 0)</answer>").actions == ()
    assert grammar.spell([call]) == f"click({across}, {down}, 0)", "as it was written"


@pytest.mark.parametrize(
    ("answer", "arguments"),
    [
        ("click(3, 4)", {"x": 3, "y": 4}),
        ("CLICK ( y = 4 , x = 3.0 )", {"x": 3, "y": 4}),
        ("click(3, y=4)", {"x": 3, "y": 4}),
        ("type('it\\'s')", {"text": "it's"}),
        ('type("a\\n\\d, <b>)")', {"text": "a\n\\d, <b>)"}),
        ("scroll(\"Up\", 2)", {"way": "up", "by": 2}),
        ("steer(-.5)", {"turn": -0.5}),
        ("set(1e3, -7)", {"a": 1000.0, "n": -7}),
        ("pick UP", {}),
        ("wait()", {}),
    ],
)  # fmt: skip
def test_forms_of_a_call(answer: str, arguments: dict[str, Any]) -> None:
    (call,), why = read_calls(f" {answer}\n", SIGNATURES, 1)
    assert (dict(call.arguments), why, call.text) == (arguments, "", answer)


@pytest.mark.parametrize(
    ("answer", "named"),
    [
        ("click(700, 2)", ["click(700, 2)", "x is 700", "0 to 639"]),
        ("click(1.5, 2)", ["x is 1.5", "whole number"]),
        ("click(1)", ["click(1)", "click(x, y)"]),
        ("click(x=1, x=2)", ["click(x, y)"]),
        ("click(y=1, 2)", ["click(x, y)"]),
        ("click(1, 2, 3)", ["click(x, y)"]),
        ("click", ["click(x, y)"]),
        ("click(1, 2", ["the end"]),
        ("scroll(left, 2)", ["way is 'left'", "up or down"]),
        ("scroll(up, '2')", ["by is '2'"]),
        ("type(hello)", ["text is 'hello'", "in quotes"]),
        (f'type("{"a" * 101}")', ["up to 100"]),
        ("steer(nan)", ["turn is 'nan'"]),
        ("steer(1e99)", ["turn is 1e99"]),
        ("__import__('os')", ["no action", "scroll(way, by)"]),
        ("clicks(1, 2)", ["no action"]),
        ("wait wait", ["after wait comes 'wait'"]),
        ("wait,, wait", ["no action"]),
        ("wait, wait, wait, wait", ["at most 3"]),
        ("", ["no action is named"]),
        ("wait " * 2001, ["10,005 characters"]),
    ],
)
def test_what_is_wrong_is_named_with_what_is_allowed(answer: str, named: list[str]) -> None:
    why = reason(answer)
    assert [words for words in named if words not in why] == []


def test_a_prompt_lists_the_declared_actions_and_an_example_that_is_read() -> None:
    listed = GRAMMAR.listed()
    assert "- click(x, y), where x is a whole number from 0 to 639; y is a whole number from 0 to 479" in listed
    assert "- drag(x1, y1, x2, y2), where" in listed
    assert listed.endswith("- wait\n- Pick up")
    assert GRAMMAR.read(GRAMMAR.write(GRAMMAR.example())).valid
    missing = GRAMMAR.read("click(1, 2)")
    assert (missing.valid, "<answer>" in missing.reason) == (False, True)
    assert ActionGrammar.declared("wait", "click(x: 0..9)", bare=True).read("click(3)").valid


@pytest.mark.parametrize(
    "declared",
    ["", "click(x", "click(x: 5..1)", "click(x: 0..1e12)", "click(x)", "click(x: colour)", "click(1: 0..5)", 
     "a(x: 0..1, x: 0..1)", "a(x: up|UP)", "a)b"],
)  # fmt: skip
def test_declarations_that_cannot_be_meant_are_refused(declared: str) -> None:
    with pytest.raises(RecipeError):
        ActionGrammar.declared(declared)


def test_grammars_that_cannot_be_meant_are_refused() -> None:
    with pytest.raises(RecipeError, match="position"):
        ActionGrammar.declared("press(key: 0..9)", coordinates="relative")
    with pytest.raises(RecipeError, match="no range"):
        ActionGrammar.declared("click(x: whole)", coordinates="relative")
    with pytest.raises(RecipeError, match="one name"):
        ActionGrammar.declared("wait", "Wait")
    with pytest.raises(RecipeError, match="coordinates"):
        ActionGrammar.declared("wait", coordinates="percent")  # type: ignore[arg-type]
