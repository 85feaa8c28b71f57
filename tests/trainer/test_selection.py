"""Missing is not zero: who is dropped, by which policy; and which groups vary most."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.schema import SelectionSection
from sensorium.trainer.selection import (
    EMPTY,
    TOO_ALIKE,
    UNUSED,
    Selection,
    first,
    masked,
    most_varied,
    select,
    why_unfit,
    zero_variance,
)
from sensorium.trainer.step_metrics import episode_metrics
from sensorium.vocabulary import Group, Score, Segment, Status, Thread

from .scored import episode, group, paid


def test_an_episode_with_one_missing_term_has_no_total_and_leaves_its_group() -> None:
    members = group(episode(0, 1.0, 1.0), episode(1, 1.0, None), episode(2, 0.0, 0.0))
    selection = select([members], "drop_episode", smallest=2)
    assert [e.id for e in selection.groups[0].episodes] == ["e0", "e2"]
    assert selection.fates == {"e1": "dropped: no score for term1 (timed out)"}


def test_drop_group_takes_the_whole_group() -> None:
    whole = group(episode(0, 1.0), episode(1, 0.0), episode(2, None))
    fine = group(episode(3, 1.0), episode(4, 0.0))
    selection = select([whole, fine], "drop_group", smallest=2)
    assert [g.episodes[0].id for g in selection.groups] == ["e3"]
    assert set(selection.fates) == {"e0", "e1", "e2"}


def test_a_group_left_with_one_member_is_trained_on_only_where_nothing_is_compared() -> None:
    members = group(episode(0, 1.0), episode(1, None), episode(2, 1.0, status=Status.FAILED))
    compared = select([members], "drop_episode", smallest=2)
    assert compared.groups == ()
    assert set(compared.fates) == {"e0", "e1", "e2"}
    assert compared.fates["e0"] == "dropped: of its group 1 can be trained on, 2 are needed"
    alone = select([members], "drop_episode", smallest=1)
    assert [e.id for e in alone.groups[0].episodes] == ["e0"]
    assert set(alone.fates) == {"e1", "e2"}


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_an_episode_that_broke_off_is_not_trained_on_even_with_a_score(status: Status) -> None:
    assert why_unfit(replace(episode(0, 1.0, status=status), failure="it hung")) == f"{status}: it hung"
    assert why_unfit(episode(0, 1.0, status=Status.TRUNCATED)) == ""


def test_masked_episodes_are_counted_and_a_group_of_nothing_else_is_not_trained_on() -> None:
    cut = group(episode(0, 1.0, status=Status.TRUNCATED), episode(1, 0.0, status=Status.TRUNCATED))
    mixed = group(episode(2, 1.0), episode(3, 0.0, status=Status.TRUNCATED))
    selection = select([cut, mixed], "drop_episode", smallest=2)
    assert set(masked(selection.groups)) == {"e0", "e1", "e3"}
    row = episode_metrics([cut, mixed], selection, mask_truncated=True)
    assert (row["episodes/masked"], row["episodes/truncated"], row["episodes/dropped"]) == (3, 3, 0)
    assert (row["groups/trained"], row["groups/dropped"]) == (1, 0)
    plain = episode_metrics([cut, mixed], selection)
    assert plain["groups/trained"] == 2
    assert "episodes/masked" not in plain


def test_a_group_that_left_nobody_is_not_trained_on_at_all() -> None:
    nobody = select([group(episode(0, None)), group(episode(1, 1.0))], "drop_episode", smallest=1)
    assert [e.id for g in nobody.groups for e in g.episodes] == ["e1"]


@pytest.mark.parametrize("value", [float("inf"), float("-inf"), float("nan"), 1e31])
def test_a_score_that_is_no_number_leaves_its_episode_out_with_the_reason(value: float) -> None:
    members = group(episode(0, 1.0), episode(1, value), episode(2, 0.0))
    selection = select([members], "drop_episode", smallest=2)
    assert [e.id for e in selection.groups[0].episodes] == ["e0", "e2"]
    assert selection.fates == {"e1": f"dropped: no number to train on (term0 gave {value:g})"}


def test_scores_that_are_too_much_together_leave_their_episode_out() -> None:
    huge = episode(0, 1e30, weight=1e300)
    assert why_unfit(huge) == "dropped: no number to train on (in all inf)"
    watched = huge.with_scores((Score("shown", float("inf"), weight=0.0), Score("term", 1.0)))
    assert why_unfit(watched) == "", "what carries no weight is not trained on"


def test_an_episode_without_a_token_is_left_out_and_counted() -> None:
    nothing = Segment("model", (), name="nothing")
    full = episode(1, 0.0)
    thread = Thread((full.threads[0].segments[0], nothing), (False, True))
    empty = replace(full, threads=(thread,), turns=(replace(full.turns[0], response=nothing),))
    members = group(episode(0, 1.0), empty, episode(2, 0.5))
    selection = select([members], "drop_episode", smallest=2)
    assert [e.id for e in selection.groups[0].episodes] == ["e0", "e2"]
    assert selection.fates == {"e1": EMPTY}
    row = episode_metrics([members], selection)
    assert (row["episodes/empty"], row["episodes/dropped"], row["episodes/failed"]) == (1, 1, 0)


def test_groups_paid_alike_are_counted_by_the_estimators_measure() -> None:
    inside, beyond = paid("c", 1.0, 1.0 + 1e-13), paid("d", 1.0, 1.0 + 1e-11)
    assert zero_variance([paid("a", 0.3, 0.1 + 0.2), paid("b", 0.0, 1.0), inside, beyond, paid("e", 1.0)]) == 3


REWARDS = st.lists(st.lists(st.sampled_from([0.0, 0.1, 0.2, 1.0]), min_size=2, max_size=4), min_size=1, max_size=9)


@given(REWARDS, st.integers(1, 100))
def test_the_share_that_varies_most_is_kept(rewards: list[list[float]], percent: int) -> None:
    groups = tuple(paid(f"g{i}", *values) for i, values in enumerate(rewards))
    section = SelectionSection(variance_share=percent / 100)
    kept = most_varied(Selection(groups), section.kept(len(groups)))
    assert len(kept.groups) == max(1, -(-percent * len(groups) // 100))
    places = [groups.index(one) for one in kept.groups]
    assert places == sorted(places), "in the order they were drawn"
    dropped = [one for one in groups if one not in kept.groups]
    assert kept.fates == {e.id: TOO_ALIKE for one in dropped for e in one.episodes}
    for loser in dropped:
        for winner in kept.groups:
            assert (_spread(winner), -groups.index(winner)) > (_spread(loser), -groups.index(loser))


def _spread(one: Group) -> float:
    values = [round(10 * (e.reward or 0.0)) for e in one.episodes]
    return sum((len(values) * value - sum(values)) ** 2 for value in values) / len(values) ** 3


@pytest.mark.parametrize(
    ("share", "groups", "kept"), [(0.55, 20, 11), (0.1, 10, 1), (0.7, 10, 7), (0.25, 5, 2), (1.0, 3, 3)]
)
def test_a_share_is_meant_as_the_decimal_it_was_written_as(share: float, groups: int, kept: int) -> None:
    assert SelectionSection(variance_share=share).kept(groups) == kept
    assert SelectionSection(oversample=1 + share).played(groups) == groups + kept


def test_the_first_complete_are_taken_and_trained_in_the_order_they_were_drawn() -> None:
    groups = tuple(paid(name, 0.0, 1.0) for name in "abcd")
    ranks = {"a": (1, 7), "b": (1, 3), "c": (1, 7), "d": (1, 3)}
    taken = first(Selection(groups, {"x": "failed"}), 3, ranks)
    assert [one.id for one in taken.groups] == ["a", "b", "d"]
    assert taken.fates == {"x": "failed", "c/0": UNUSED, "c/1": UNUSED}
    later_round = first(Selection(groups), 2, ranks | {"b": (2, 0)})
    assert [one.id for one in later_round.groups] == ["a", "d"]


def test_a_group_is_left_out_with_all_its_members() -> None:
    both = Selection((paid("a", 0.0, 1.0),)).joined(Selection((paid("b", 1.0, 1.0),), {"z": "why"}))
    left = both.without({"b": "no"})
    assert [one.id for one in left.groups] == ["a"]
    assert left.fates == {"z": "why", "b/0": "no", "b/1": "no"}
    assert replace(both, groups=()).fates == {"z": "why"}
