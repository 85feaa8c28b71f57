"""TaskMem's reward: the golden scores of the published run, and every rule by itself (advantages: tests/algorithms)."""

import pytest

from sensorium.rewards.judge_ranking import usefulness_of
from sensorium.rewards.memory_reward import (
    MemoryPay,
    WrittenMemory,
    bonuses,
    is_correct,
    paid_parts,
    think_reward,
    written_memory,
)
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.memory import faces_are_spelled, parse_memory

PAY = MemoryPay()


def memory(think: int = 0, text: str | None = "a dog runs", tokens: int = 10) -> WrittenMemory:
    return WrittenMemory(text, think, tokens)


def test_the_golden_group() -> None:
    useful = [1.0, 0.0, None, None]
    memories = [memory(1000), memory(1800), memory(500), memory(text=None)]
    paid = [
        sum(paid_parts(PAY, one, i < 2, bonus).values())
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
    assert (lost.description, lost.think_tokens) == (None, 99)


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
    assert is_correct(PAY, memory(tokens=150), 1.0, 1.0)
    assert not is_correct(PAY, memory(tokens=151), 1.0, 1.0)
    assert not is_correct(PAY, memory(), 0.5, 1.0)
    assert not is_correct(PAY, memory(), 1.0, 0.0)
    assert not is_correct(PAY, memory(text="face 3 waves"), 1.0, 1.0)


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
