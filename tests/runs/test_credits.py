"""What training made of an episode is in its log row: fate, advantages as trained, and why scores are missing."""

import json
import math
from pathlib import Path

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import (
    EpisodeCredit,
    credit_from_json,
    credit_to_json,
    credits_of,
    episode_row,
    read_credits_of,
    write_episodes,
)
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn

float32s = st.floats(width=32, allow_nan=False, allow_infinity=False)


def episode(lengths: list[int], scores: tuple[Score, ...] = (), id: str = "e") -> Episode:
    written = [Segment("model", tuple(range(n)), text="x" * n, name=str(n)) for n in lengths]
    turns = tuple(Turn(i, (), segment, i, 0) for i, segment in enumerate(written))
    return Episode(id, "t", "g", 0, tuple(Thread((s,), (True,)) for s in written), turns, Status.FINISHED, scores=scores)


@given(st.lists(st.lists(float32s, min_size=1, max_size=5), min_size=1, max_size=3))
def test_advantages_come_back_to_the_last_bit_of_a_float32(given_advantages: list[list[float]]) -> None:
    credit = EpisodeCredit("trained", tuple(map(tuple, given_advantages)))
    row = json.loads(json.dumps(credit_to_json(credit)))
    found = credit_from_json(row, episode([len(turn) for turn in given_advantages]))
    assert found is not None
    for turn, was in zip(found.advantages, given_advantages, strict=True):
        assert np.array_equal(np.array(turn, np.float32), np.array(was, np.float32))


def test_a_turn_whose_tokens_have_one_advantage_takes_one_number() -> None:
    fields = credit_to_json(EpisodeCredit("trained", ((0.5, 0.5, 0.5), (1.0, -1.0))))
    assert fields == {"fate": "trained", "advantages": [0.5, [1.0, -1.0]]}


def test_entropies_and_mismatches_come_back_and_an_unknown_one_is_none_in_the_log() -> None:
    turns = ((-1.19e-07, math.nan, 0.0), (0.25, 0.25))
    row = json.loads(json.dumps(credit_to_json(EpisodeCredit("trained", ((1.0,) * 3, (1.0,) * 2), (), turns))))
    assert row["mismatches"] == [[-1.19e-07, None, 0.0], 0.25]
    assert "entropies" not in row
    found = credit_from_json(row, episode([3, 2]))
    assert found is not None
    assert str(found.mismatches) == str(turns)
    assert found.entropies == ()


def test_a_step_is_written_with_fates_and_advantages_and_rows_without_them_are_still_read(tmp_path: Path) -> None:
    members = (episode([2], id="a"), episode([2], id="b"))
    groups = [Group("g", Task("t"), members)]
    credits = credits_of(groups, {"b": "dropped: why not"}, {"a": [[0.25, 0.75]]})
    write_episodes(tmp_path / "new.jsonl", 1, groups, credits=credits)
    assert read_credits_of(read_rows(tmp_path / "new.jsonl")) == credits
    assert credits["a"].advantages == ((0.25, 0.75),)
    assert credits["b"] == EpisodeCredit("dropped: why not")
    write_episodes(tmp_path / "old.jsonl", 1, groups)
    assert read_credits_of(read_rows(tmp_path / "old.jsonl")) == {}


def test_why_scores_are_missing_stands_in_front_of_the_row() -> None:
    scores = (
        Score("judge", None, reason="timed out"),
        Score("format", 1.0),
        Score("steps", None, scope="turn", turn=1, reason="no move"),
    )
    row = episode_row(1, Task("t"), episode([1, 1], scores))
    assert row["missing"] == {"judge": "timed out", "steps, turn 1": "no move"}
    assert "missing" not in episode_row(1, Task("t"), episode([1]))
