"""What TaskMem's own reward manager paid 16 groups of 8 responses, recorded when its file was run, is paid here too."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from sensorium.rewards.judge_terms import usefulness_of
from sensorium.systems.taskmem.reward import MemoryRewards, bonuses, is_correct, reward_parts, written_memory
from sensorium.vocabulary.episode import Segment

RECORDED = json.loads((Path(__file__).parent / "authors_memories.json").read_text())
PAY = MemoryRewards()


def response(thought: int, opened: int, ended: int, description: str) -> Segment:
    """A response of which every character is a token, as are the marks of its thought."""
    text = "<think>" * opened + "x" * thought + "</think>" * ended + json.dumps({"description": description})
    ends = tuple(found.end() for found in re.finditer("</think>|<think>|.", text))
    return Segment("model", tuple(range(len(ends))), text=text, byte_ends=ends)


def paid(group: list[list[Any]]) -> list[float]:
    """What the responses of a group are paid, by the verdicts and the ranking that were recorded."""
    memories = [written_memory(response(*row[:4]), 8192) for row in group]
    verdicts = [(float(row[4]), float(row[5])) for row in group]
    good = [
        i
        for i, memory in enumerate(memories)
        if memory.descriptions and is_correct(PAY, memory.descriptions[0], memory.lengths[0], *verdicts[i])
    ]
    ranked = sorted((i for i in good if group[i][6] is not None), key=lambda i: group[i][6])
    places = [ranked.index(i) if i in ranked else None for i in good] if len(good) > 1 else [0] * len(good)
    useful: list[float | None] = [None] * len(group)
    for i, value in zip(good, usefulness_of(places), strict=True):
        useful[i] = value
    return [
        sum(reward_parts(PAY, memory, [i in good], bonus).values())
        for i, (memory, bonus) in enumerate(zip(memories, bonuses(PAY, useful), strict=True))
    ]


@pytest.mark.parametrize("number", range(len(RECORDED["groups"])))
def test_a_group_is_paid_as_the_authors_pay_it(number: int) -> None:
    group = RECORDED["groups"][number]
    assert paid(group) == pytest.approx([row[-1] for row in group], abs=1e-8)
