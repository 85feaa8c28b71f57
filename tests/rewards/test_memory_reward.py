"""TaskMem's reward: the golden scores of the published run, and every rule by itself (advantages: tests/algorithms)."""

import pytest

from sensorium.data.causal_history import parse_facts, parse_memory
from sensorium.rewards.judge_terms import usefulness_of
from sensorium.systems.taskmem.reward import (
    MemoryRewards,
    WrittenMemory,
    bonuses,
    faces_are_spelled,
    is_correct,
    reward_parts,
    think_reward,
    written_memory,
)
from sensorium.vocabulary.episode import Segment

PAY = MemoryRewards()


def memory(think: int = 0, text: str | None = "a dog runs", tokens: int = 10) -> WrittenMemory:
    return WrittenMemory(() if text is None else (text,), think, tokens, () if text is None else (tokens,))


def test_the_golden_group() -> None:
    useful = [1.0, 0.0, None, None]
    memories = [memory(1000), memory(1800), memory(500), memory(text=None)]
    paid = [
        sum(reward_parts(PAY, one, [i < 2], bonus).values())
        for i, (one, bonus) in enumerate(zip(memories, bonuses(PAY, useful), strict=True))
    ]
    assert paid == pytest.approx([0.55, 0.0, -0.5, -1.5], abs=1e-12)


def test_thoughts_cost_from_their_threshold_on() -> None:
    assert [think_reward(PAY, tokens) for tokens in (0, 1200, 1500, 1800, 2400, 9999)] == [0, 0, -0.25, -0.5, -1, -1]


@pytest.mark.parametrize(
    ("text", "description"),
    [
        ('so</think>{"description": "a dog"}', "a dog"),
        ('</think>\n {"description": "a dog"} \n', "a dog"),
        ('{"description": "a dog"}', None),
        ('a</think>b</think>{"description": "a dog"}', None),
        ('a</think>{"description": ""}', None),
        ('a</think>{"description": " "}', None),
        ('a</think>{"description": ["a dog"]}', None),
        ('a</think>{"description": "a dog", "more": 1}', None),
        ('a</think>```json\n{"description": "a dog"}\n```', "a dog"),
        ("a</think>a dog", None),
        ('a</think>["description"]', None),
        ("a</think>" + "[" * 50_000, None),
        ("", None),
    ],
)
def test_a_memory_is_parsed_or_it_is_not(text: str, description: str | None) -> None:
    assert parse_memory(text) == description


def test_tokens_are_counted_on_both_sides_of_the_thought() -> None:
    text = 'hm hm</think>{"description": "x"}'
    ends = (2, 5, 13, 20, len(text), len(text))  # the last one is a stop token: it has no text
    found = written_memory(Segment("model", (1,) * 6, text=text, byte_ends=ends), 99)
    assert (found.think_tokens, found.memory_tokens) == (2, 3)
    opened = tuple(end + len("<think>") for end in (0, *ends))  # what opens the thought is not part of it
    found = written_memory(Segment("model", (1,) * 7, text="<think>" + text, byte_ends=opened), 99)
    assert (found.think_tokens, found.memory_tokens) == (2, 3)
    lost = written_memory(Segment("model", (1,) * 6, text="hm", byte_ends=(1, 2)), 99)
    assert (lost.descriptions, lost.think_tokens) == ((), 99)


@pytest.mark.parametrize(
    ("text", "good"),
    [
        ("<face_1> greets <face_12>", True),
        ("a surface 3 and an interface_2", True),
        ("nobody is here", True),
        ("<face> is here", False),
        ("face 3 waves", False),
        ("<face 3> waves", False),
        ("face_3 waves", False),
        ("<Face_3> waves", False),
        ("<face_3 waves", False),
        ("<face_1> and face_1", False),
    ],
)
def test_faces_are_spelled_in_one_way(text: str, good: bool) -> None:
    assert faces_are_spelled(text) is good


def test_what_counts_as_correct() -> None:
    assert is_correct(PAY, "a dog runs", 150, 1.0, 1.0)
    assert not is_correct(PAY, "a dog runs", 151, 1.0, 1.0)
    assert not is_correct(PAY, "a dog runs", 10, 0.5, 1.0)
    assert not is_correct(PAY, "a dog runs", 10, 1.0, 0.0)
    assert not is_correct(PAY, "face 3 waves", 10, 1.0, 1.0)


@pytest.mark.parametrize(
    ("description", "facts"),
    [
        ('["a", "b"]', ("a", "b")),
        ('"a"', ("a",)),
        ("[]", None),
        ('["a", 1]', None),
        ('["a", " "]', None),
        ('["a", "\\ud800"]', None),
        ('{"a": "b"}', None),
    ],
)
def test_a_semantic_memory_is_a_list_of_facts(description: str, facts: tuple[str, ...] | None) -> None:
    assert parse_facts(f'hm</think>{{"description": {description}}}') == facts


def test_each_fact_of_a_list_has_its_own_length_and_reward() -> None:
    text = 'ä</think>```json\n{"description": ["kürzer", "says \\"hi\\""]}```'
    ends = tuple(range(1, len(text.encode()) + 1))
    found = written_memory(Segment("model", (1,) * len(ends), text=text, byte_ends=ends), 99, semantic=True)
    assert found.descriptions == ("kürzer", 'says "hi"')
    assert found.lengths == (9, 13), "one token for each byte, quotation marks included"
    assert found.memory_tokens == len(text.encode()) - 2
    alone = written_memory(
        Segment("model", (1,) * 30, text='</think>{"description": ["x"]}', byte_ends=tuple(range(1, 31))), 9, True
    )
    assert alone.lengths == (alone.memory_tokens,), "one description counts from </think> on"
    parts = reward_parts(PAY, found, [True, False, True], 0.5)
    assert (parts["correct"], parts["usefulness"]) == pytest.approx((0.5, 0.05))


def test_usefulness_by_place() -> None:
    assert usefulness_of([0]) == [1.0]
    assert usefulness_of([2, 0, 1]) == [0.0, 1.0, 0.5]
    assert usefulness_of([0, None, 1]) == [1.0, 0.75, 0.5]
    assert usefulness_of([]) == []


def test_a_bonus_needs_somebody_to_be_better_than() -> None:
    assert bonuses(PAY, [1.0, None]) == [0.0, 0.0]
    assert bonuses(PAY, [0.2, 0.2]) == [0.0, 0.0]
    assert bonuses(PAY, [0.5, 1.0, None, 0.0]) == [0.25, 0.5, 0.0, 0.0]
    assert bonuses(PAY, []) == []
