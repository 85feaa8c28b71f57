"""A source of the user's own that hangs is waited for no longer than its deadline, and names itself."""

import threading
from pathlib import Path

import pytest

from sensorium.data.mixture import BoundedPlanner, BoundedSource, TaskStream, a_few, bounded, each_once, table_columns
from sensorium.data.planner import MixturePlanner, PlannedTasks
from sensorium.vocabulary import Task, user
from sensorium.vocabulary.errors import RecipeError, TaskError

NEVER = threading.Event()


class Rows:
    """Four rows. Row 2 is bad; row 3 never comes."""

    def __init__(self) -> None:
        self.threads: set[int] = set()
        self.table_columns = {"all": "All"}

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> Task:
        self.threads.add(threading.get_ident())
        if index == 2:
            raise TaskError("row 2 has no question")
        if index == 3:
            NEVER.wait()
        return Task(str(index))


def test_a_row_that_never_comes_ends_the_reading_by_name_and_is_not_skipped_as_a_bad_one_is() -> None:
    source = BoundedSource(Rows(), "my_rows:Rows", "tasks.train.0", deadline_s=0.2)
    with pytest.raises(RecipeError, match=r"tasks\.train\.0: source 'my_rows:Rows' was asked for row 3 and did not answer"):
        each_once([source], on_bad_row="skip")
    assert source[0] == Task("0"), "another thread reads on"


def test_rows_come_through_in_one_thread_and_bad_ones_say_what_they_said() -> None:
    rows = Rows()
    source = BoundedSource(rows, "my_rows:Rows", "tasks.train.0")
    assert [task.id for task in TaskStream([source], [1.0], seed=0, shuffle=False).draw(0, 2).tasks] == ["0", "1"]
    with pytest.raises(TaskError, match="row 2 has no question"):
        source[2]
    assert len(rows.threads) == 1
    assert rows.threads != {threading.get_ident()}
    assert table_columns([source]) == {"all": "All"}


class Mistaken(Rows):
    """Shows a path where a picture belongs."""

    def __getitem__(self, index: int) -> Task:
        return Task(str(index), (user(Path("cat.png"), "What is it?"),))  # type: ignore[arg-type]


def test_a_mistake_in_the_code_of_a_row_names_the_source_and_is_not_skipped_as_a_bad_row() -> None:
    source = BoundedSource(Mistaken(), "my_rows:Mistaken", "tasks.train.0")
    said = (
        r"^tasks\.train\.0: source 'my_rows:Mistaken', row 1 \(test_bounded\.py:\d+\): TypeError: user\(…\) takes text and "
        r"media, not PosixPath\..*store\.put_picture\(bytes"
    )
    with pytest.raises(RecipeError, match=said):
        source[1]
    with pytest.raises(RecipeError, match=r"row 0 "):
        a_few([source])
    with pytest.raises(RecipeError, match=r"row \d "):
        TaskStream([source], [1.0], seed=0, on_bad_row="skip").draw(0, 1)


def test_sources_of_the_package_are_read_in_place() -> None:
    rows = Rows()
    assert bounded(rows, "jsonl", "tasks.train.0") is rows
    assert bounded(rows, "my_rows:Rows", "tasks.train.0") is not rows


def test_a_planner_that_does_not_answer_is_said_and_one_that_does_is_the_same_behind_the_deadline() -> None:
    class Waiting(MixturePlanner):
        def draw(self, count: int) -> PlannedTasks:
            if self.position:
                NEVER.wait()
            return super().draw(count)

    stream = TaskStream([[Task("a"), Task("b"), Task("c")]], [1], seed=0)  # type: ignore[list-item]
    planner = BoundedPlanner(Waiting(stream), "my:Waiting", deadline_s=0.2)
    assert planner.observes is False
    assert planner.draw(2) == MixturePlanner(stream).draw(2)
    assert planner.state_dict() == {"position": 2}
    with pytest.raises(RecipeError, match=r"tasks.planner: 'my:Waiting' was asked for 2 tasks and did not answer"):
        planner.draw(2)
    planner.load_state_dict({"position": 0})
    assert len(planner.draw(1).tasks) == 1
