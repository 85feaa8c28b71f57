"""What the sight check compares, and on which tasks."""

import pytest

from sensorium.evaluation.evaluate import sight_result, spread
from sensorium.runs.metrics import SightResult
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Turn


@pytest.mark.parametrize(("correct", "measure", "shown"), [(True, "accuracy", 1.0), (None, "mean reward", -0.25)])
def test_what_is_compared_is_called_by_its_name(correct: bool | None, measure: str, shown: float) -> None:
    scores = (Score("judge", -0.25, correct=correct),)
    episode = Episode("e", "t", "g", 0, (), (), Status.FINISHED, scores=scores)
    found = sight_result("picture", [Group("g", Task("t"), (episode,))], [Group("g", Task("t"), (episode,))])
    assert (found.measure, found.shown, found.blanked) == (measure, shown, shown)


def test_shown_and_blanked_are_not_mixed_up() -> None:
    def group(right: bool, text: str) -> Group:
        response = Segment("model", (1,), text=text)
        scores = (Score("exact", float(right), correct=right),)
        return Group(
            "g", Task("t"), (Episode("e", "t", "g", 0, (), (Turn(0, (), response, 0, 0),), Status.FINISHED, scores=scores),)
        )

    found = sight_result("sound", [group(True, "a"), group(True, "b")], [group(False, "a"), group(True, "c")])
    assert found == SightResult("sound", tasks=2, shown=1.0, blanked=0.5, same=1)


def test_the_tasks_of_the_check_are_of_all_kinds_where_kinds_take_turns() -> None:
    tasks = [Task(str(i), metadata={"category": "abcd"[i % 4]}) for i in range(512)]
    few = spread(tasks, 32)
    assert len({task.id for task in few}) == 32
    assert {task.metadata["category"] for task in few} == set("abcd")
    assert spread(tasks[:5], 32) == tasks[:5]
