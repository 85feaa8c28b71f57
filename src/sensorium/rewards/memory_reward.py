"""The episodic-memory reward as a pure function of what was parsed and judged: every part by its name.

samples of a group: (correct, u = 1, t = 1000), (correct, u = 0, t = 1800), (wrong, t = 500), (not parsed)
final:              0.55                        0.0                         -0.5              -1.5

A semantic memory is a list of facts. Each is rewarded as a description is; usefulness is the mean over its correct facts.
"""

import re
from collections.abc import Sequence
from dataclasses import dataclass

from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.memory import END_OF_THOUGHT, START_OF_THOUGHT, faces_are_spelled, parse_facts, parse_memory

LITERAL = re.compile(r'"(?:[^"\\]|\\.)*"')
"""A text of JSON; in what was parsed, the first is the key."""


@dataclass(frozen=True)
class MemoryPay:
    """What is rewarded; the defaults are those of the published run."""

    think_length_threshold: int = 1200
    think_penalty: float = -1.0
    correct_reward: float = 0.5
    wrong_reward: float = -0.5
    format_penalty: float = -1.5
    memory_token_threshold: int = 150
    usefulness_scale: float = 0.1
    memory_length_threshold: int = 5


@dataclass(frozen=True)
class WrittenMemory:
    """A response: its descriptions, none where it was not parsed; tokens of its thought, and from ``</think>`` on.

    ``lengths`` are the tokens of each description: a single one counts from ``</think>`` on, a fact of a list by itself.
    """

    descriptions: tuple[str, ...]
    think_tokens: int
    memory_tokens: int
    lengths: tuple[int, ...]


def written_memory(response: Segment, max_response_tokens: int, semantic: bool = False) -> WrittenMemory:
    """What a response holds. Of one that is not parsed the thought counts as long as a response may be."""
    description = None if semantic else parse_memory(response.text)
    descriptions = parse_facts(response.text) if semantic else (description,) if description is not None else None
    if descriptions is None:
        return WrittenMemory((), max_response_tokens, 0, ())
    thought, _, rest = response.text.partition(END_OF_THOUGHT)
    opening, mark, _ = thought.partition(START_OF_THOUGHT)
    first = len((opening + mark).encode()) if mark else 0
    last = len(thought.encode())
    ends = response.byte_ends
    with_text = [end for i, end in enumerate(ends) if end > (ends[i - 1] if i else 0)]  # a stop token has no text
    total = sum(end > last for end in with_text)
    lengths: tuple[int, ...] = (total,)
    if len(descriptions) > 1:
        start = last + len(END_OF_THOUGHT)
        spans = [
            (len(rest[: found.start()].encode()), len(rest[: found.end()].encode())) for found in LITERAL.finditer(rest)
        ]
        lengths = tuple(sum(start + low < end <= start + high for end in with_text) for low, high in spans[1:])
    return WrittenMemory(descriptions, sum(first < end <= last for end in with_text), total, lengths)


def is_correct(pay: MemoryPay, description: str, tokens: int, judged: float, label: float) -> bool:
    """True for a description that is judged correct, is labelled good, spells faces rightly and is short enough."""
    return judged > 0.5 and label != 0 and faces_are_spelled(description) and tokens <= pay.memory_token_threshold


def think_reward(pay: MemoryPay, tokens: int) -> float:
    """0 up to L tokens of thought, the whole penalty from 2L on, in a straight line between."""
    longest = pay.think_length_threshold
    if tokens <= longest:
        return 0.0
    return pay.think_penalty if tokens >= 2 * longest else pay.think_penalty * (tokens - longest) / longest


def bonuses(pay: MemoryPay, usefulness: Sequence[float | None]) -> list[float]:
    """What the ranked of a group get besides: ``correct_reward`` for the most useful, 0 for the least; None: not ranked."""
    ranked = [value for value in usefulness if value is not None]
    lowest, spread = (min(ranked), max(ranked) - min(ranked)) if ranked else (0.0, 0.0)
    if spread <= 1e-8:
        return [0.0] * len(usefulness)
    return [0.0 if value is None else pay.correct_reward * (value - lowest) / spread for value in usefulness]


def paid_parts(pay: MemoryPay, memory: WrittenMemory, correct: Sequence[bool], bonus: float) -> dict[str, float]:
    """The reward of a sample part by part, with a verdict on each description; the parts sum up to its reward."""
    if not memory.descriptions:
        return {"correct": 0.0, "usefulness": 0.0, "think": 0.0, "format": pay.format_penalty}
    return {
        "correct": sum(pay.correct_reward if good else pay.wrong_reward for good in correct),
        "usefulness": pay.usefulness_scale * bonus,
        "think": think_reward(pay, memory.think_tokens),
        "format": 0.0,
    }
