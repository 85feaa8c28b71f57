"""Planners draw by their own rule, and go on from their state exactly."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream
from sensorium.data.planner import GroupOutcome, LevelCurriculum, MixturePlanner, Planner, SuccessCurriculum, make_planner
from sensorium.recipe.schema import PlannerSection
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task


class Numbers:
    """Tasks named by their row; some rows are bad."""

    def __init__(self, name: str = "n", length: int = 40, bad: tuple[int, ...] = ()) -> None:
        self.name, self.length, self.bad = name, length, set(bad)

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, index: int) -> Task:
        if index in self.bad:
            raise TaskError(f"row {index} is bad")
        return Task(id=f"{self.name}{index}")


def stream(**settings: object) -> TaskStream:
    return TaskStream([Numbers()], [1], seed=5, **settings)  # type: ignore[arg-type]


def outcome(id: str, right: int, of: int = 4) -> GroupOutcome:
    verdicts = tuple(i < right for i in range(of))
    return GroupOutcome(id, tuple(map(float, verdicts)), verdicts, ("",) * of)


def ids(planner: Planner, count: int) -> list[str]:
    return [task.id for task in planner.draw(count).tasks]


@given(counts=st.lists(st.integers(1, 7), max_size=6))
def test_the_mixture_planner_draws_what_stands_at_the_positions(counts: list[int]) -> None:
    planner = MixturePlanner(stream())
    drawn = [id for count in counts for id in ids(planner, count)]
    assert drawn == [task.id for task in stream().draw(0, sum(counts)).tasks]
    assert planner.state_dict() == {"position": sum(counts)}


def test_success_is_the_share_of_right_attempts_or_else_the_mean_reward_in_bounds() -> None:
    assert outcome("a", 1).success == 0.25
    assert GroupOutcome("a", (2.0, 0.0, None), (None,) * 3, ("",) * 3).success == 0.5
    assert GroupOutcome("a", (None,), (None,), ("",)).success is None


def test_before_anything_is_known_the_curriculum_is_the_mixture() -> None:
    planner = SuccessCurriculum(stream(), revisit=0.9)
    assert ids(planner, 10) == [task.id for task in stream().draw(0, 10).tasks]
    planner.observe([outcome(id, right) for id, right in zip(dict(planner.open.items()), [0, 4] * 5, strict=True)])
    assert ids(planner, 5) == [task.id for task in stream().draw(10, 5).tasks], "none succeeded in part"


def test_tasks_that_succeed_in_part_come_again_the_undecided_most_often() -> None:
    planner = SuccessCurriculum(TaskStream([Numbers(length=4000)], [1], seed=0), revisit=0.5)
    even, rare, solved = ids(planner, 3)
    chance = {even: 2, rare: 1, solved: 4}
    planner.observe([outcome(id, right) for id, right in chance.items()])
    counts: Counter[str] = Counter()
    for _ in range(600):
        (drawn,) = ids(planner, 1)
        counts[drawn] += 1
        planner.observe([outcome(drawn, chance.get(drawn, 0))])
    assert counts[solved] == 0
    assert counts[even] + counts[rare] == pytest.approx(300, abs=60)
    assert counts[even] / counts[rare] == pytest.approx(4 / 3, rel=0.35)


def test_no_task_is_revisited_twice_before_it_was_observed_again() -> None:
    planner = SuccessCurriculum(stream(), revisit=0.95)
    planner.observe([outcome(id, 2) for id in ids(planner, 3)])
    assert max(Counter(ids(planner, 8)).values()) == 1


@given(seed=st.integers(0, 50), rights=st.lists(st.integers(0, 4), min_size=4, max_size=24), cut=st.integers(0, 5))
def test_a_curriculum_that_was_saved_and_loaded_draws_on_as_if_it_had_not(seed: int, rights: list[int], cut: int) -> None:
    def build() -> SuccessCurriculum:
        return SuccessCurriculum(TaskStream([Numbers("a"), Numbers("b", 9)], [1, 2], seed=seed), revisit=0.6, memory=3)

    whole, broken = build(), build()
    steps = [rights[i : i + 4] for i in range(0, len(rights) - 3, 4)]
    for step, given_rights in enumerate(steps):
        if step == cut:
            state = broken.state_dict()
            broken = build()
            broken.load_state_dict(state)
        drawn = [ids(planner, 4) for planner in (whole, broken)]
        assert drawn[0] == drawn[1]
        for planner in (whole, broken):
            planner.observe([outcome(id, right) for id, right in zip(drawn[0], given_rights, strict=True)])
        assert len(whole.known) <= 3
    assert whole.state_dict() == broken.state_dict()


def test_rows_that_went_bad_are_not_revisited_but_skipped_and_said() -> None:
    source = Numbers()
    planner = SuccessCurriculum(TaskStream([source], [1], seed=0, on_bad_row="skip"), revisit=0.99)
    (known,) = ids(planner, 1)
    planner.observe([outcome(known, 2)])
    source.bad.add(int(known[1:]))
    drawn = planner.draw(3)
    assert len(drawn.tasks) == 3
    assert known not in {task.id for task in drawn.tasks}
    assert [skip.reason for skip in drawn.skipped] == [f"row {known[1:]} is bad"]
    assert len(planner.known) == 0


class Graded(Numbers):
    """Rows of three levels."""

    levels = (range(10), range(10, 25), range(25, 40))


def graded(**options: float) -> LevelCurriculum:
    sources = [Numbers("easy", 6), Graded()]
    return LevelCurriculum(TaskStream(sources, [1, 1], seed=3), **{"groups": 4, **options})  # type: ignore[arg-type]


def play(planner: Planner, *right: int) -> list[str]:
    drawn = ids(planner, len(right))
    planner.observe([outcome(id, one) for id, one in zip(drawn, right, strict=True)])
    return drawn


def test_levels_rise_and_fall_by_the_success_of_the_last_groups() -> None:
    planner = graded(rise=0.75, fall=0.25)
    assert {id[:4] for id in play(planner, 4, 4)} == {"easy"}
    assert (planner.level, planner.metrics()) == (0, {"level": 1, "success": 1.0})
    assert {id[:4] for id in play(planner, 3, 0)} == {"easy"}
    assert planner.level == 0, "0.6875 is below 0.75"
    play(planner, 4, 4, 4)
    assert (planner.level, planner.metrics()) == (1, {"level": 1, "success": 0.75})
    assert all(int(id[1:]) < 10 for id in play(planner, 4, 4, 4))
    assert planner.level == 1, "counting begins again at a new level"
    play(planner, 4)
    assert all(10 <= int(id[1:]) < 25 for id in play(planner, 0, 1, 0, 0))
    assert planner.level == 1
    assert sorted(ids(planner, 10), key=lambda id: int(id[1:]))[-1] == "n9"
    for _ in range(4):
        play(planner, 4, 4, 4, 4)
    assert all(int(id[1:]) >= 25 for id in play(planner, 4, 4, 4, 4)), "the last level does not rise"
    unjudged = [GroupOutcome(id, (None,), (None,), ("",)) for id in ids(planner, 4)]
    before = planner.state_dict()["successes"]
    planner.observe(unjudged)
    assert planner.state_dict()["successes"] == before, "a group without a score counts for nothing"


@given(
    rights=st.lists(st.integers(0, 4), min_size=4, max_size=60), cut=st.integers(0, 15), fall=st.sampled_from([0.0, 0.3])
)
def test_levels_that_were_saved_and_loaded_go_on_as_if_they_had_not(rights: list[int], cut: int, fall: float) -> None:
    whole, broken = graded(rise=0.5, fall=fall), graded(rise=0.5, fall=fall)
    for step in range(len(rights) // 4):
        if step == cut:
            state = broken.state_dict()
            broken = graded(rise=0.5, fall=fall)
            broken.load_state_dict(state)
        now = rights[4 * step : 4 * step + 4]
        assert play(whole, *now) == play(broken, *now)
        assert whole.metrics() == broken.metrics()
    assert whole.state_dict() == broken.state_dict()


def test_bad_rows_of_a_level_are_named_by_their_place_in_the_source() -> None:
    planner = LevelCurriculum(
        TaskStream([Numbers("easy", 2), Numbers("n", 9, tuple(range(8)))], [1, 1], seed=0, on_bad_row="skip")
    )
    planner.level = 1
    drawn = planner.draw(1)
    assert [task.id for task in drawn.tasks] == ["n8"]
    assert {skip.source for skip in drawn.skipped} <= {1}
    with pytest.raises(RecipeError, match="2 levels"):
        graded().load_state_dict(planner.state_dict())


@pytest.mark.parametrize(
    ("section", "words"),
    [
        ({"name": "success_curriculum", "options": {"revisit": 1.5}}, "revisit is 1.5"),
        ({"name": "success_curriculum", "options": {"memory": 0}}, "memory is 0"),
        ({"name": "level_curriculum", "options": {"rise": 0.2, "fall": 0.3}}, "rise is 0.2"),
        ({"name": "level_curriculum", "options": {"groups": 0}}, "groups is 0"),
        ({"name": "level_curriculum"}, "two levels"),
        ({"name": "tests.data.test_planner:Numbers"}, r"has no draw\(\)"),
        ({"name": "tests.data.test_planner:raises"}, "cannot be built.*no luck"),
        ({"name": "curriculum"}, "unknown planner 'curriculum'"),
    ],
)
def test_what_is_no_planner_is_refused(section: dict[str, object], words: str) -> None:
    with pytest.raises(RecipeError, match=words):
        make_planner(PlannerSection.model_validate(section), stream(), MediaStore())


def raises() -> None:
    raise ValueError("no luck")
