"""Which groups have signal is what the estimator says: nothing it would credit is dropped, nothing it would not is kept."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.recipe.estimators_and_losses import ESTIMATORS
from sensorium.recipe.schema import AdvantageSection, AlgorithmSection
from sensorium.trainer.credit import credit, groups_with_signal
from sensorium.vocabulary import Episode, Group, Score

from .scored import episode, group, paid
from .test_credit import assess
from .test_credit import episode as written

SECTIONS = [AdvantageSection(name=name) for name, traits in ESTIMATORS.items() if traits.compares or traits.greedy]
SECTIONS += [
    AdvantageSection(name="grpo", std=False),
    AdvantageSection(name="grpo", leave_one_out=True),
    AdvantageSection(name="grpo", std=False, leave_one_out=True),
    AdvantageSection(name="gdpo", std=False, leave_one_out=True),
    AdvantageSection(name="grpo", post="optimize_threshold"),
]
LEVELS = st.sampled_from([0.0, 0.1, 0.2, 0.3, 0.1 + 0.2, 1.0, 1.0 + 1e-13, 1.0 + 1e-11, 1e9, 1e9 + 1e-4, 1e9 + 1e-2])
MEMBERS = st.lists(st.tuples(LEVELS, LEVELS), min_size=2, max_size=4)


def scored(groups: list[list[tuple[float, float]]]) -> list[Group]:
    found = []
    for g, members in enumerate(groups):
        episodes = tuple(episode(100 * g + i, *values) for i, values in enumerate(members))
        found.append(Group(f"g{g}", group().task, episodes))
    return found


def with_advantages(groups: list[Group], section: AdvantageSection, greedy: dict[str, float] | None) -> set[str]:
    samples = credit(groups, assess(*groups), AlgorithmSection(advantage=section), greedy=greedy)
    pairs = zip(groups, samples, strict=True)
    return {one.id for one, members in pairs if any(a.any() for sample in members for a in sample.advantages)}


@pytest.mark.parametrize("section", SECTIONS, ids=lambda s: " ".join([s.name, *map(str, sorted(s.model_fields_set))]))
@settings(max_examples=25)
@given(st.lists(MEMBERS, min_size=1, max_size=3), LEVELS)
def test_a_group_has_no_signal_exactly_where_all_its_advantages_are_zero(
    section: AdvantageSection, groups: list[list[tuple[float, float]]], baseline: float
) -> None:
    given = scored(groups)
    greedy = {one.id: baseline for one in given} if ESTIMATORS[section.name].greedy else None
    assert groups_with_signal(given, section, greedy) == with_advantages(given, section, greedy)


GRPO = AdvantageSection()


def test_paid_alike_is_no_signal_and_summed_in_another_order_is_alike() -> None:
    groups = [paid("a", 0.3, 0.3), paid("b", 0.1 + 0.2, 0.3), paid("c", 0.0, 1.0), paid("d", 1.0)]
    assert groups_with_signal(groups, GRPO) == {"c"}
    assert groups_with_signal([], GRPO) == frozenset()


def test_terms_that_are_credited_apart_are_signal_also_where_they_cancel_in_the_total() -> None:
    def crossed(index: int, first: float, second: float, weight: float) -> Episode:
        return episode(index).with_scores((Score("a", first, weight=1.0), Score("b", second, weight=weight)))

    uneven = group(crossed(0, 1.0, 0.0, 2.0), crossed(1, 0.0, 0.5, 2.0), crossed(2, 1.0, 0.0, 2.0))
    assert not groups_with_signal([uneven], GRPO)
    assert groups_with_signal([uneven], AdvantageSection(name="gdpo"))
    even = group(crossed(0, 1.0, 0.0, 1.0), crossed(1, 0.0, 1.0, 1.0))
    assert not groups_with_signal([even], AdvantageSection(name="gdpo")), "normalised alike, they cancel there too"


def test_a_best_that_is_shared_is_no_signal_for_pass_at_k() -> None:
    shared = paid("a", 1.0, 1.0, 0.0)
    assert groups_with_signal([shared], GRPO) == {"a"}
    assert not groups_with_signal([shared], AdvantageSection(name="pass_at_k"))


def test_scores_of_a_part_are_signal_for_themselves() -> None:
    def judged(index: int, value: float, span: tuple[int, int] = (0, 2)) -> Episode:
        return written(index, Score("term", 1.0), Score("thought", value, scope="span", turn=0, span=span))

    assert groups_with_signal([group(judged(0, 0.25), judged(1, 0.75))], GRPO)
    assert not groups_with_signal([group(judged(0, 0.25), judged(1, 0.25))], GRPO)
    assert not groups_with_signal([group(judged(0, 0.25, (0, 0)), judged(1, 0.75, (0, 0)))], GRPO), "no token moves"


def test_what_differs_from_the_greedy_reward_is_signal_for_remax() -> None:
    remax = AdvantageSection(name="remax")
    groups = [paid("a", 1.0), paid("b", 1.0, 1.0), paid("c", 1.0, 1.0)]
    assert groups_with_signal(groups, remax, {"a": 0.0, "b": 0.0, "c": 1.0}) == {"a", "b"}


@pytest.mark.parametrize("name", ["reinforce_plus_plus", "masked_gae", "tests.trainer.test_signal:GRPO"])
def test_where_groups_are_not_compared_it_is_that_members_were_paid_differently(name: str) -> None:
    section = AdvantageSection(name=name)
    assert groups_with_signal([paid("a", 1.0, 1.0), paid("b", 0.0, 1.0)], section) == {"b"}
