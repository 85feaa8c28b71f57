"""Missing is not zero: who is dropped, by which policy; which groups have signal, and which vary most."""

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.schema import SelectionSection
from sensorium.trainer.selection import (
    TOO_ALIKE,
    UNUSED,
    Selection,
    first,
    has_signal,
    most_varied,
    select,
    zero_variance,
)
from sensorium.vocabulary import Group, Score, Status

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
    assert compared.fates["e0"] == "dropped: its group has 1 members left, 2 are needed"
    alone = select([members], "drop_episode", smallest=1)
    assert [e.id for e in alone.groups[0].episodes] == ["e0"]
    assert set(alone.fates) == {"e1", "e2"}


def test_a_group_that_left_nobody_is_not_trained_on_at_all() -> None:
    nobody = select([group(episode(0, None)), group(episode(1, 1.0))], "drop_episode", smallest=1)
    assert [e.id for g in nobody.groups for e in g.episodes] == ["e1"]


def test_paid_alike_is_no_signal() -> None:
    assert zero_variance([paid("a", 0.3, 0.3), paid("b", 0.0, 1.0)]) == 1
    assert not has_signal(paid("a", 0.1 + 0.2, 0.1 + 0.2))
    assert has_signal(paid("a", 0.1 + 0.2, 0.3)), "what differs in the last bit differs"
    assert not has_signal(paid("a", 1.0))


def test_terms_that_are_credited_apart_are_signal_also_where_they_cancel() -> None:
    crossed = group(episode(0, 1.0, 0.0), episode(1, 0.0, 1.0))
    assert not has_signal(crossed)
    assert has_signal(crossed, per_term=True)
    same = group(episode(0, 1.0, 0.0), episode(1, 1.0, 0.0))
    assert not has_signal(same, per_term=True)


def test_scores_of_a_part_are_signal_also_where_they_cancel() -> None:
    def with_span(index: int, span: float) -> object:
        member = episode(index, 1.0 - span, weight=1.0)
        part = Score("thought", span, scope="span", turn=0, span=(0, 2))
        return member.with_scores((*member.scores, part))

    assert has_signal(group(with_span(0, 0.25), with_span(1, 0.75)))  # type: ignore[arg-type]
    assert not has_signal(group(with_span(0, 0.25), with_span(1, 0.25)))  # type: ignore[arg-type]


def test_what_differs_from_the_greedy_reward_is_signal() -> None:
    assert has_signal(paid("a", 1.0), greedy=0.0)
    assert has_signal(paid("a", 1.0, 1.0), greedy=0.0)
    assert not has_signal(paid("a", 1.0, 1.0), greedy=1.0)


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
