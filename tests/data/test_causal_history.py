"""The causal planner: a row comes when what it needs was written, and its history is exactly that."""

import json
from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.data.causal_history import CausalHistory, ClipPlace
from sensorium.data.mixture import TaskStream
from sensorium.data.planner import GroupOutcome
from sensorium.vocabulary.content import user
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task


class Clips:
    """Rows of (video, clip); each needs up to two clips before it."""

    def __init__(self, *rows: tuple[str, int]) -> None:
        self.rows = rows

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, index: int) -> Task:
        return self.with_history(index, {})

    def place_of(self, index: int) -> ClipPlace:
        video, clip = self.rows[index]
        return ClipPlace(video, clip, tuple(range(max(0, clip - 2), clip)))

    def with_history(self, index: int, memories: Mapping[int, str]) -> Task:
        video, clip = self.rows[index]
        if video == "bad":
            raise TaskError("this row is bad")
        return Task(f"{video}*{clip}", (user(" ".join(memories[c] for c in sorted(memories))),))


GRID = [(video, clip) for clip in range(3) for video in "ab"]


def planner_of(*rows: tuple[str, int], bad: str = "refuse", **options: Any) -> CausalHistory:
    stream = TaskStream([Clips(*rows)], [1.0], seed=3, shuffle=False, on_bad_row=bad)  # type: ignore[arg-type]
    return CausalHistory(stream, **options)


def wrote(text: str) -> str:
    return f"</think>{json.dumps({'description': text})}"


def outcome(task: Task, *texts: str, rewards: tuple[float | None, ...] | None = None) -> GroupOutcome:
    paid = rewards or (0.0,) * len(texts)
    return GroupOutcome(task.id, paid, (None,) * len(texts), texts)


def play(planner: CausalHistory, count: int, turn: int = 0) -> list[tuple[str, str]]:
    """Draw, write a memory that names the task, observe; what was drawn, with its history."""
    tasks = planner.draw(count).tasks
    planner.observe([outcome(task, wrote(f"{task.id}@{turn}")) for task in tasks])
    return [(task.id, task.messages[0].text) for task in tasks]


def test_rows_come_with_what_was_written() -> None:
    planner = planner_of(*GRID)
    assert play(planner, 2) == [("a*0", ""), ("b*0", "")]
    assert play(planner, 2) == [("a*1", "a*0@0"), ("b*1", "b*0@0")]
    assert play(planner, 2) == [("a*2", "a*0@0 a*1@0"), ("b*2", "b*0@0 b*1@0")]
    assert play(planner, 2, turn=1) == [("a*0", ""), ("b*0", "")]
    assert play(planner, 2, turn=1) == [("a*1", "a*0@1"), ("b*1", "b*0@1")]
    assert {turn for turn, _ in planner.history} == {0, 1}, "the pass before is kept for who wants to read it"


def test_a_row_that_has_to_wait_is_passed_over() -> None:
    planner = planner_of(("a", 0), ("a", 1), ("b", 0), ("c", 0))
    assert [task.id for task in planner.draw(3).tasks] == ["a*0", "b*0", "c*0"]


def test_a_batch_that_nothing_can_fill_is_refused() -> None:
    planner = planner_of(("a", 0), ("a", 1), ("a", 2))
    with pytest.raises(TaskError, match="has 1 videos"):
        planner.draw(2)


def test_several_draws_before_an_observation_give_other_rows() -> None:
    planner = planner_of(*GRID)
    first = planner.draw(1).tasks + planner.draw(1).tasks
    assert [task.id for task in first] == ["a*0", "b*0"]


@pytest.mark.parametrize(
    ("choice", "kept"), [("first", "two"), ("best", "four"), ("sampled", None)], ids=["first", "best", "sampled"]
)
def test_which_memory_is_kept(choice: str, kept: str | None) -> None:
    planner = planner_of(*GRID, choice=choice)
    a, b = planner.draw(2).tasks
    said = ("no memory", wrote("two"), wrote("three"), wrote("four"))
    planner.observe([outcome(t, *said, rewards=(9.0, 0.1, None, 0.5)) for t in (a, b)])
    found = planner.draw(1).tasks[0].messages[0].text
    assert found == kept if kept else found in ("two", "three", "four")


def test_without_a_memory_the_successors_do_without_it_or_the_row_comes_again() -> None:
    planner = planner_of(*GRID)
    planner.observe([outcome(t, "no memory") for t in planner.draw(2).tasks])
    assert play(planner, 2) == [("a*1", ""), ("b*1", "")]
    again = planner_of(*GRID, attempts=2)
    a, b = again.draw(2).tasks
    again.observe([outcome(a, "no memory"), outcome(b, wrote("b"))])
    assert [(t.id, t.messages[0].text) for t in again.draw(2).tasks] == [("a*0", ""), ("b*1", "b")]


def test_a_row_that_was_not_played_to_its_end_counts_as_a_try() -> None:
    planner = planner_of(*GRID, attempts=2)
    a, _ = planner.draw(2).tasks
    planner.observe([outcome(a, wrote("a"))])
    assert [task.id for task in planner.draw(2).tasks] == ["b*0", "a*1"]


def test_bad_rows_and_clips_that_nobody_writes() -> None:
    with pytest.raises(TaskError, match="bad"):
        planner_of(("bad", 0), ("a", 0)).draw(1)
    skipping = planner_of(("bad", 0), ("a", 0), bad="skip").draw(1)
    assert ([task.id for task in skipping.tasks], skipping.skipped[0].reason) == (["a*0"], "this row is bad")
    with pytest.raises(TaskError, match="needs the memory of clip 0, and no row writes it"):
        planner_of(("a", 1), ("b", 0))
    skipping = planner_of(("a", 1), ("b", 0), bad="skip").draw(1)
    assert ([task.id for task in skipping.tasks], [skip.row for skip in skipping.skipped]) == (["b*0"], [0])


def test_wrong_settings_are_refused() -> None:
    with pytest.raises(RecipeError, match="choice"):
        planner_of(*GRID, choice="last")
    with pytest.raises(RecipeError, match="shuffle: false"):
        CausalHistory(TaskStream([Clips(*GRID)], [1.0], seed=0))

    class Plain:
        def __len__(self) -> int:
            return 1

        def __getitem__(self, index: int) -> Task:
            return Task("t")

    with pytest.raises(RecipeError, match="causal_history takes one source"):
        CausalHistory(TaskStream([Plain()], [1.0], seed=0, shuffle=False))


@settings(max_examples=25)
@given(st.integers(0, 7), st.integers(1, 2), st.sampled_from(["first", "sampled"]))
def test_a_resumed_planner_draws_the_same_and_what_came_later_is_rolled_back(stop: int, count: int, choice: str) -> None:
    whole = planner_of(*GRID, choice=choice)
    told = []
    state: dict[str, Any] = {}
    for turn in range(10):
        if turn == stop:
            state = json.loads(json.dumps(whole.state_dict()))
        told.append(play(whole, count, turn))
    resumed = planner_of(*GRID, choice=choice)
    play(resumed, count, 99)
    resumed.load_state_dict(state)
    assert [play(resumed, count, turn) for turn in range(stop, 10)] == told[stop:]
    assert resumed.state_dict() == whole.state_dict()
