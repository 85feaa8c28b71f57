"""The response grammar: eight forms, read in linear time whatever the text is."""

import re
import time
from itertools import takewhile

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.envs.actions import ActionGrammar, describe, share_right, turn_reward
from sensorium.envs.responses import LAYOUTS, REQUIRED, ResponseFormat
from sensorium.vocabulary.errors import RecipeError

FORMS = {
    "no_think": "<answer>Left</answer>",
    "free_think": "<think>why</think><answer>Left</answer>",
    "grounding": "<think><observation>o</observation><reasoning>r</reasoning></think><answer>Left</answer>",
    "worldmodeling": "<think><reasoning>r</reasoning><prediction>p</prediction></think><answer>Left</answer>",
    "grounding_worldmodeling": (
        "<think><observation>o</observation><reasoning>r</reasoning><prediction>p</prediction></think><answer>Left</answer>"
    ),
    "wm": "<observation>o</observation><think>why</think><answer>Left</answer><prediction>p</prediction>",
    "free_wm": "<observation>o</observation><answer>Left</answer><prediction>p</prediction>",
    "eval_mode": "<think>why</think><answer>Left</answer>",
}
STRICT = [name for name in FORMS if name not in REQUIRED]
PIECES = [
    "<think>",
    "</think>",
    "<answer>",
    "</answer>",
    "<observation>",
    "</Observation>",
    "<",
    ">",
    "Left",
    ",",
    " ",
    "é\0",
]


@pytest.mark.parametrize("name", FORMS)
def test_a_form_reads_what_it_writes(name: str) -> None:
    form = ResponseFormat(name)
    assert form.write("Left", think="why", observation="o", reasoning="r", prediction="p") == FORMS[name]
    assert (form.parse(FORMS[name]).well_formed, form.parse(FORMS[name]).answer) == (True, "Left")
    assert set(FORMS) == set(LAYOUTS)


@pytest.mark.parametrize("name", STRICT)
def test_a_strict_form_reads_no_other(name: str) -> None:
    form = ResponseFormat(name)
    for other in STRICT:
        text = FORMS[other]
        spaced = text.replace("><", "> \n<").upper()
        assert (form.parse(text).well_formed, form.parse(spaced).well_formed) == (other == name, other == name)
        assert form.parse(text).answer == "Left"
    assert not form.parse(FORMS[name] + "!").well_formed
    assert not form.parse("so " + FORMS[name]).well_formed


def test_free_forms_let_thoughts_stand_around_what_they_require() -> None:
    free, lenient = ResponseFormat("free_wm"), ResponseFormat("eval_mode")
    said = (
        "<observation>o</observation> so <think>a box</think> <answer>Left</answer>, and then <prediction>p</prediction>!"
    )
    assert free.parse(said).well_formed
    assert free.parse(said).sections == {"observation": "o", "think": "a box", "prediction": "p"}
    assert lenient.parse("I go <answer>Left</answer> now").well_formed
    for broken in (
        "<answer>Left</answer><observation>o</observation><prediction>p</prediction>",
        "<observation>o<answer>Left</answer></observation><prediction>p</prediction>",
        "<observation>o</observation><answer>Left</answer>",
        "<observation>o</observation><answer>Le<think>ft</think></answer><prediction>p</prediction>",
    ):
        assert not free.parse(broken).well_formed, broken
    assert not lenient.parse("Left").well_formed
    assert not lenient.parse("<answer>Left</answer><answer>Left</answer>").well_formed


def test_the_answer_may_stand_in_another_tag_with_another_separator() -> None:
    grammar = ActionGrammar(("move_forward", "turn_left"), 3, ResponseFormat("wm", "action"), separator="|")
    said = "<observation>o</observation><think>t</think><action>move_forward| turn_left</action><prediction>p</prediction>"
    assert grammar.write((0, 1), observation="o", think="t", prediction="p") == said
    turn = grammar.read(said)
    assert (turn.actions, turn.well_formed, turn.sections["prediction"]) == ((0, 1), True, "p")
    assert grammar.read(said.replace("action>", "answer>")).actions == ()
    assert "separated by '|'" in grammar.instruction()
    assert "<action>your actions</action>" in grammar.instruction()


def test_sections_are_told_apart() -> None:
    parsed = ResponseFormat("grounding_worldmodeling").parse(FORMS["grounding_worldmodeling"])
    assert parsed.sections == {"observation": "o", "reasoning": "r", "prediction": "p"}
    assert ResponseFormat("free_think").parse("<think>a < b > c</think><answer>x</answer>").sections == {
        "think": "a < b > c"
    }


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<answer>a</answer><answer>b</answer>", "b"),
        ("<answer>a<answer>b</answer>", "b"),
        ("<answer>a</answer></answer>", "a"),
        ("<answer>a<think>b</answer>", None),
        ("answer>a</answer>", None),
        ("<answer >a</answer>", None),
    ],
)
def test_the_last_answer_counts(text: str, answer: str | None) -> None:
    parsed = ResponseFormat("no_think").parse(text)
    assert (parsed.answer, parsed.well_formed) == (answer, False)


def test_an_unknown_form_is_refused_with_the_nearest() -> None:
    with pytest.raises(RecipeError, match="did you mean 'worldmodeling'"):
        ResponseFormat("worldmodelling")


def test_what_is_not_all_valid_names_no_action() -> None:
    grammar = ActionGrammar(("Left", "Look up"), 2, ResponseFormat("no_think"))
    for said, actions in {
        "left": (0,),
        "LEFT , look up": (0, 1),
        "left, left, left": (),
        "left, jump": (),
        "left,": (),
        "": (),
        "<b>left": (),
    }.items():
        assert grammar.read(f"<answer>{said}</answer>").actions == actions, said
    assert grammar.read("left").actions == ()


@given(st.sampled_from(STRICT), st.lists(st.sampled_from(PIECES), max_size=30), st.booleans())
def test_any_text_is_read(name: str, pieces: list[str], bare: bool) -> None:
    grammar = ActionGrammar(("Left",), 3, ResponseFormat(name), bare)
    asked = grammar.read("".join(pieces))
    assert set(asked.actions) <= {0}
    tagged = "<answer>" in "".join(pieces) or not bare
    assert not (asked.well_formed and tagged and grammar.format.thinks and "".join(pieces).count("<think>") != 1)


@pytest.mark.parametrize("piece", ["<think>", "<answer>", "</think> ", "<", "<answer></answer>", "\U0001f600"])
def test_megabytes_are_read_in_a_moment(piece: str) -> None:
    text = piece * (2_000_000 // len(piece))
    began = time.process_time()
    ActionGrammar(("Left",), 3, ResponseFormat("grounding")).read(text + "<answer>Left</answer>")
    assert time.process_time() - began < 10


def test_reward_parts_keep_their_names_and_a_single_part_needs_none() -> None:
    parts = turn_reward({"goal": 10.0, "format": 0.5, "step": -0.1}, goal=True, step=2)
    assert parts == {"goal": 10.0, "format": 0.0, "step": -0.2}
    assert turn_reward({"goal": 2.0, "format": 0.0}, goal=True, format=True) == 2.0


def test_naming_every_place_earns_nothing() -> None:
    state = {"player": frozenset([(0, 1)]), "box": frozenset([(1, 1), (2, 3)])}
    everywhere = ", ".join(f"({r}, {c})" for r in range(4) for c in range(4))
    assert share_right(f"player {everywhere} box {everywhere}", state) == 0
    assert share_right(describe(state), state) == 1
    assert share_right("cubea at (1, 2)", {"cubeA": frozenset([(1, 2)])}) == 1
    assert share_right("ellip\u017fe at (1, 2)", {"ellipse": frozenset([(1, 2)])}) == 1
    assert share_right("boxes: ( 2,3 ) and (1,1). The player? In (0, 2).", state) == 0.5
    assert share_right("(0, 1)", state) == 0


BETWEEN = {
    "no_think": ["<answer>", "</answer>"],
    "free_think": ["<think>", r"</think>\s*<answer>", "</answer>"],
    "grounding": [
        r"<think>\s*<observation>", r"</observation>\s*<reasoning>", r"</reasoning>\s*</think>\s*<answer>", "</answer>"
    ],
    "worldmodeling": [
        r"<think>\s*<reasoning>", r"</reasoning>\s*<prediction>", r"</prediction>\s*</think>\s*<answer>", "</answer>"
    ],
    "grounding_worldmodeling": [
        r"<think>\s*<observation>", r"</observation>\s*<reasoning>", r"</reasoning>\s*<prediction>",
        r"</prediction>\s*</think>\s*<answer>", "</answer>",
    ],
    "wm": [
        "<observation>", r"</observation>\s*<think>", r"</think>\s*<answer>", r"</answer>\s*<prediction>", "</prediction>"
    ],
    "free_wm": ["<observation>", "</observation>", "<answer>", "</answer>", "<prediction>", "</prediction>"],
    "eval_mode": ["<answer>", "</answer>"],
}  # fmt: skip
ANSWER_GROUP = {"no_think": 1, "free_think": 2, "grounding": 3, "worldmodeling": 3, "grounding_worldmodeling": 4,
                "wm": 3, "free_wm": 3, "eval_mode": 1}  # fmt: skip


def as_vagen(name: str, text: str, most: int) -> tuple[list[str], bool]:
    """Plain regular expressions of VAGEN's formats: the words that it plays, and whether the form is right."""
    text = text.replace("<image>", "")
    pattern = "(.*?)".join(BETWEEN[name])
    found = re.search(pattern, text, re.DOTALL)
    legacy = name in STRICT and name != "wm"
    right = bool(re.match(rf"^\s*{pattern}\s*$", text.strip(), re.DOTALL)) if legacy else found is not None
    if found is None or (name in ("free_think", "no_think") and not right):
        return [], right
    answer = found.group(ANSWER_GROUP[name])
    for tag in ("<think>", "</think>", "<answer>", "</answer>") if legacy else ():
        answer = answer.replace(tag, "")
    words = [word.strip() for word in answer.split(",") if word.strip()][:most]
    return words if legacy else [word.lower() for word in words], right


ASKED = st.lists(
    st.sampled_from([*PIECES, "Up", "left", "Jump", "<image>", "</observation>", "<reasoning>", "</reasoning>",
                     "<prediction>", "</prediction>", *FORMS.values()]), max_size=12,
).map("".join)  # fmt: skip


@given(st.sampled_from(sorted(FORMS)), ASKED)
@settings(max_examples=300, deadline=None)
def test_vagens_grammar_takes_the_first_answer_and_cuts_it(name: str, text: str) -> None:
    names = ("Left", "Down", "Right", "Up")
    asked = ActionGrammar(names, 2, ResponseFormat(name, grammar="vagen")).read(text)
    words, right = as_vagen(name, text, 2)
    known = names if name in STRICT and name != "wm" else tuple(each.lower() for each in names)
    played = list(takewhile(lambda word: word in known, words))
    assert [known[action] for action in asked.actions] == played
    assert asked.well_formed == right
    assert asked.valid == (bool(words) and played == words)


def test_vagens_grammar_in_short() -> None:
    def read(text: str, form: str = "free_think") -> tuple[tuple[int, ...], bool, bool]:
        asked = ActionGrammar(("Left", "Up"), 2, ResponseFormat(form, grammar="vagen")).read(text)
        return asked.actions, asked.valid, asked.well_formed

    assert read("<think>a</think><answer>Up</answer><answer>Left</answer>") == ((1,), True, True)
    assert read("<think>a</think><answer>Up, Left, Up</answer>") == ((1, 0), True, True)
    assert read("<think>a</think><answer>Up, Jump</answer>") == ((1,), False, True)
    assert read("<think>a</think><answer>, Up,</answer>") == ((1,), True, True)
    assert read("Well. <think>a</think><answer>Up</answer>") == ((), False, False)
    assert read(f"Well. {FORMS['grounding']}", "grounding") == ((0,), True, False)
    with pytest.raises(RecipeError, match="unknown grammar"):
        ResponseFormat("free_think", grammar="vagan")
    with pytest.raises(RecipeError, match="bare"):
        ActionGrammar(("Left",), 1, ResponseFormat("no_think", grammar="vagen"), bare=True)


@pytest.mark.parametrize("name", FORMS)
def test_vagens_grammar_reads_megabytes_in_a_moment(name: str) -> None:
    form = ResponseFormat(name, grammar="vagen")
    began = time.process_time()
    for piece in (
        "<think>",
        "</think>",
        "<answer>",
        "<think><observation>",
        "</think> ",
        "<observation></observation><reasoning>",
    ):
        form.parse(piece * (1_000_000 // len(piece)))
    assert time.process_time() - began < 5
