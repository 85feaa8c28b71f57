"""Rewards to tokens: where scores are paid, who is credited, and what a critic is taught."""

import math
from dataclasses import replace

import pytest
import torch

from sensorium.learner.credited_episode import find_positions
from sensorium.learner.learner import Assessment
from sensorium.recipe.schema import AdvantageSection, AlgorithmSection, KLSection
from sensorium.trainer.credit import credit, place
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn

GRPO = AlgorithmSection()
NO_STD = AlgorithmSection(advantage=AdvantageSection(std=False))
LENGTHS = (3, 4, 2)


def episode(index: int, *scores: Score, turns: int = 1, status: Status = Status.FINISHED) -> Episode:
    """Turns of 3, 4 and 2 tokens, every token one byte long but the last of each turn, which is a stop token."""
    segments, home, taken = [Segment("environment", (1, 2))], [False], []
    for i in range(turns):
        length = LENGTHS[i]
        text = "abc"[: length - 1]
        ends = (*range(1, len(text) + 1), *[len(text)] * (length - len(text)))
        zeros = (0.0,) * length
        response = Segment("model", (5,) * length, text=text, logprobs=zeros, byte_ends=ends, name=f"{index}.{i}")
        segments += [response, Segment("environment", (7, 8, 9))]
        home += [True, False]
        taken.append(Turn(i, (), response, 0, 2 * i + 1))
    thread = Thread(tuple(segments[:-1]), tuple(home[:-1]))
    return Episode(f"e{index}", "t", "g", index, (thread,), tuple(taken), status, scores=scores)


def paid(index: int, value: float, **given: object) -> Episode:
    return episode(index, Score("term", value), **given)


def group(*episodes: Episode, name: str = "g") -> Group:
    return Group(name, Task("t"), episodes)


def assess(*groups: Group) -> Assessment:
    return Assessment(find_positions([e for g in groups for e in g.episodes], lambda segment: segment.tokens))


def placed(*episodes: Episode) -> list[list[float]]:
    """The reward of every token, by episode."""
    members = group(*episodes)
    rewards_P = place([members], assess(members), KLSection()).rewards_P
    return [part.tolist() for part in rewards_P.split([e.sampled_tokens for e in episodes])]


def test_an_episode_is_paid_at_its_last_token_and_a_turn_at_its_own() -> None:
    scores = (
        Score("whole", 2.0, weight=0.5),
        Score("step", 3.0, weight=2.0, scope="turn", turn=0),
        Score("step", -1.0, weight=2.0, scope="turn", turn=2),
        Score("shown", 9.0, weight=0.0),
        Score("watched", float("inf"), weight=0.0),
        Score("unknown", None, weight=0.0, reason="not judged"),
    )
    assert placed(episode(0, *scores, turns=3)) == [[0, 0, 6.0, 0, 0, 0, 0, 0, 1.0 - 2.0]]


def test_a_turn_without_a_token_is_paid_where_the_one_before_it_ends() -> None:
    whole = episode(0, Score("step", 1.0, scope="turn", turn=1), turns=2)
    empty = Segment("model", (), name="empty")
    thread = whole.threads[0]
    threads = (Thread((*thread.segments[:3], empty), (False, True, False, True)),)
    turns = (whole.turns[0], replace(whole.turns[1], response=empty))
    assert placed(replace(whole, threads=threads, turns=turns)) == [[0, 0, 1.0]]


def test_a_first_turn_without_a_token_is_paid_where_the_next_one_ends() -> None:
    whole = episode(0, Score("step", 1.0, scope="turn", turn=0), turns=3)
    empty = Segment("model", (), name="empty")
    prompt, _, *rest = whole.threads[0].segments
    threads = (Thread((prompt, empty, *rest), whole.threads[0].home),)
    turns = (replace(whole.turns[0], response=empty), *whole.turns[1:])
    assert placed(replace(whole, threads=threads, turns=turns)) == [[0, 0, 0, 1.0, 0, 0]]


def test_an_episode_without_any_token_has_no_place_for_its_pay() -> None:
    whole = paid(0, 1.0)
    empty = Segment("model", (), name="empty")
    threads = (Thread((whole.threads[0].segments[0], empty), (False, True)),)
    with pytest.raises(AssertionError, match="episode e0 wrote nothing"):
        placed(replace(whole, threads=threads, turns=(replace(whole.turns[0], response=empty),)))


def test_a_kl_in_the_reward_is_paid_token_by_token_on_what_the_model_wrote() -> None:
    members = group(paid(0, 1.0, turns=2), paid(1, 0.0, turns=2))
    old_N, reference_N = torch.linspace(-2, 0, 14), torch.linspace(-1, -1.5, 14)
    found = replace(assess(members), old_N=old_N, reference_N=reference_N, kl_coef=0.1)
    section = KLSection(coef=0.1, estimator="k1", place="reward")
    rewards_P = place([members], found, section).rewards_P
    expected_P = -0.1 * (old_N - reference_N).double()
    expected_P[6] += 1.0
    assert torch.allclose(rewards_P, expected_P)


def test_observations_are_positions_only_where_they_are_asked_for() -> None:
    members = group(paid(0, 1.0, turns=2), paid(1, 0.0, turns=1))
    found = find_positions(members.episodes, lambda segment: segment.tokens, observations=True)
    assert found.written_P.int().tolist() == [1, 1, 1, 0, 0, 0, 1, 1, 1, 1, 1, 1, 1]
    assert found.turns_P.tolist() == [0, 0, 0, 1, 1, 1, 1, 1, 1, 1, 2, 2, 2]
    episodes = place([members], Assessment(found), KLSection())
    assert episodes.rewards_P.nonzero().tolist() == [[9]]


def test_a_score_of_a_span_moves_the_tokens_of_the_span_and_no_others() -> None:
    def judged(index: int, value: float) -> Episode:
        span = Score("thought", value, weight=2.0, scope="span", turn=1, span=(1, 2))
        return episode(index, Score("term", 0.5), span, turns=2)

    members = group(judged(0, 1.0), judged(1, 0.0), paid(2, 0.5, turns=2))
    samples = credit([members], assess(members), NO_STD)
    assert [a.tolist() for a in samples[0][0].advantages] == [[0, 0, 0], [0, 1.0, 0, 0]]
    assert [a.tolist() for a in samples[0][1].advantages] == [[0, 0, 0], [0, -1.0, 0, 0]]
    assert not any(a.any() for a in samples[0][2].advantages)


def test_the_first_and_the_second_span_of_a_turn_are_judged_apart() -> None:
    def judged(index: int, *values: float) -> Episode:
        spans = (Score("step", v, scope="span", turn=1, span=(i, i + 1)) for i, v in enumerate(values))
        return episode(index, Score("term", 0.5), *spans, turns=2)

    members = group(judged(0, 1.0, 0.0, 0.5), judged(1, 0.0, 1.0, 0.5))
    samples = credit([members], assess(members), NO_STD)
    assert [a.tolist() for a in samples[0][0].advantages] == [[0, 0, 0], [0.5, -0.5, 0, 0]]
    assert [a.tolist() for a in samples[0][1].advantages] == [[0, 0, 0], [-0.5, 0.5, 0, 0]]


def test_a_group_paid_alike_gets_exactly_zero() -> None:
    alike = group(*(paid(i, 0.1 + 0.2) for i in range(7)))
    samples = credit([alike], assess(alike), GRPO)
    assert all(torch.equal(a, torch.zeros(3)) for s in samples[0] for a in s.advantages)


def test_totals_summed_in_another_order_are_the_same_total() -> None:
    def turns(index: int, *values: float) -> Episode:
        return episode(index, *(Score("s", v, scope="turn", turn=t) for t, v in enumerate(values)), turns=3)

    alike = group(turns(0, 0.1, 0.2, 0.3), turns(1, 0.3, 0.2, 0.1), turns(2, 0.2, 0.1, 0.3))
    samples = credit([alike], assess(alike), GRPO)
    assert not any(a.any() for s in samples[0] for a in s.advantages)


def test_better_episodes_get_larger_advantages_on_every_token() -> None:
    members = group(paid(0, 1.0), paid(1, 0.0))
    samples = credit([members], assess(members), GRPO)
    winner, loser = (s.advantages[0] for s in samples[0])
    assert (winner > 0).all()
    assert torch.allclose(winner, -loser)
    assert winner.shape == (3,)


def test_groups_are_compared_among_themselves() -> None:
    first, second = group(paid(0, 1.0), paid(1, 0.0)), group(paid(2, 10.0), paid(3, 9.0), name="h")
    samples = credit([first, second], assess(first, second), NO_STD)
    assert [[float(s.advantages[0][0]) for s in row] for row in samples] == [[0.5, -0.5], [0.5, -0.5]]


def test_masked_truncated_episodes_count_in_the_baseline_but_are_not_trained() -> None:
    members = group(paid(0, 1.0), paid(1, 0.0, status=Status.TRUNCATED), paid(2, 0.0))
    samples = credit([members], assess(members), NO_STD, mask_truncated=True)
    assert [s.episode.id for s in samples[0]] == ["e0", "e2"]
    assert torch.allclose(samples[0][0].advantages[0], torch.full((3,), 2 / 3))


def test_gdpo_weighs_the_terms_as_the_recipe_does() -> None:
    members = group(*(episode(i, Score("a", float(i == 0)), Score("b", float(i == 1), weight=3.0)) for i in range(3)))
    algorithm = AlgorithmSection(advantage=AdvantageSection(name="gdpo"))
    first, second, third = (float(s.advantages[0][0]) for s in credit([members], assess(members), algorithm)[0])
    assert [second / first, third / first] == pytest.approx([-5, 4], rel=1e-4)


def test_remax_compares_with_the_greedy_attempt_at_the_same_task() -> None:
    first, second = group(paid(0, 1.0)), group(paid(1, 1.0), name="h")
    algorithm = AlgorithmSection(advantage=AdvantageSection(name="remax"))
    samples = credit([first, second], assess(first, second), algorithm, greedy={"g": 0.25, "h": 1.0})
    assert [float(row[0].advantages[0][0]) for row in samples] == [0.75, 0.0]


def test_a_critic_is_taught_the_return_and_truncated_episodes_bootstrap() -> None:
    members = group(paid(0, 1.0), paid(1, 0.0, status=Status.TRUNCATED))
    values_P = torch.tensor([0.1, 0.2, 0.3, 0.4, 0.5, 0.6])
    found = replace(assess(members), values_P=values_P, after_S=torch.tensor([0.0, 0.7]))
    algorithm = AlgorithmSection(advantage=AdvantageSection(name="masked_gae"))
    finished, cut = credit([members], found, algorithm)[0]
    assert finished.critic_values.targets_P.tolist() == pytest.approx([1.0] * 3)
    assert cut.critic_values.targets_P.tolist() == pytest.approx([0.7] * 3)
    assert torch.equal(torch.cat([finished.critic_values.values_P, cut.critic_values.values_P]), values_P)


def test_the_threshold_never_pushes_a_good_memory_down() -> None:
    good = [episode(i, Score("memory", value, correct=True)) for i, value in enumerate([0.55, 0.5, 0.53333, 0.51667])]
    members = group(*good)
    mended = AlgorithmSection(advantage=AdvantageSection(post="optimize_threshold"))
    for algorithm, values in ((GRPO, [1.1618, -1.1618, 0.3873, -0.3873]), (mended, [1.1618, 0, 0.3873, 0])):
        samples = credit([members], assess(members), algorithm)[0]
        assert [float(s.advantages[0][0]) for s in samples] == pytest.approx(values, abs=1e-3)


def vagen(estimator: str, rewards: list[list[float]], values: list[list[float]], ends: list[int]) -> list[list[float]]:
    """VAGEN's estimators without its masks, as its loops are: over every token after the first prompt, then whitened.

    ``ends`` are the last tokens of responses, the same in all rows; gamma 0.9, lam 0.8, high_level_gamma 0.7. Returns the
    advantages of all rows, and behind them the targets.
    """
    gamma, lam, high = 0.9, 0.8, 0.7
    advantages, targets, counted = [], [], []
    for reward, value in zip(rewards, values, strict=True):
        paid, row = list(reward), [0.0] * len(reward)
        carried, following = 0.0, 0.0
        for end in reversed(ends if estimator in ("turn_wise_gae", "bi_level_gae") else []):
            carried = reward[end] + high * following - value[end] + high * lam * carried
            following, row[end], paid[end] = value[end], carried, carried + value[end]
        carried = following = 0.0
        for at in reversed(range(len(reward))):
            if estimator == "turn_wise_gae":
                row[at] = carried = row[at] if at in ends else carried
                continue
            if estimator == "bi_level_gae" and at in ends:
                carried = following = 0.0
            row[at] = carried = paid[at] + gamma * following - value[at] + gamma * lam * carried
            following = value[at]
        advantages.append(row)
        targets.append([a + v for a, v in zip(row, value, strict=True)])
        counted += [row[at] for at in (ends if estimator == "turn_wise_gae" else range(len(row)))]
    mean = math.fsum(counted) / len(counted)
    variance = math.fsum((a - mean) ** 2 for a in counted) / (len(counted) - 1)
    return [[(a - mean) / math.sqrt(variance + 1e-8) for a in row] for row in advantages] + targets


@pytest.mark.parametrize("estimator", ["gae", "masked_gae", "turn_wise_gae", "bi_level_gae"])
@pytest.mark.parametrize("loss_mask", [True, False])
def test_without_masks_credit_is_what_vagen_computes(estimator: str, loss_mask: bool) -> None:
    """Responses of 3, 4 and 2 tokens with observations of 3 between them: 15 positions an episode."""
    steps = [(0.5, 1.0, -2.0), (1.5, 0.0, 3.0)]
    ends = [2, 9, 14]
    episodes = [
        episode(i, *(Score("step", r, scope="turn", turn=turn) for turn, r in enumerate(paid)), turns=3)
        for i, paid in enumerate(steps)
    ]
    members = group(*episodes)
    positions = find_positions(episodes, lambda segment: segment.tokens, observations=True)
    values_P = torch.randn(30, generator=torch.Generator().manual_seed(0))
    discounts = {"gamma": 0.9, "lam": 0.8, "turn_gamma": 0.7, "turn_lam": 0.8}
    advantage = AdvantageSection.model_validate({"name": estimator, **discounts})
    algorithm = AlgorithmSection(advantage=advantage, loss_mask=loss_mask, gae_mask=False)
    assert algorithm.sees_observations
    (samples,) = credit([members], Assessment(positions, values_P, torch.zeros(2)), algorithm)
    rewards = [[dict(zip(ends, paid, strict=True)).get(at, 0.0) for at in range(15)] for paid in steps]
    expected = vagen(estimator, rewards, [part.tolist() for part in values_P.double().split(15)], ends)
    responses, shown = ((0, 3), (6, 10), (13, 15)), ((3, 6), (10, 13))
    for number, sample in enumerate(samples):
        row, targets = expected[number], expected[2 + number]
        assert [a.tolist() for a in sample.advantages] == [pytest.approx(row[a:b], abs=1e-5) for a, b in responses]
        between = [] if loss_mask else [pytest.approx(row[a:b], abs=1e-5) for a, b in shown]
        assert [a.tolist() for a in sample.observed] == between
        assert sample.critic_values is not None
        asked = [targets[at] if at in ends or estimator != "turn_wise_gae" else float("nan") for at in range(15)]
        assert sample.critic_values.targets_P.tolist() == pytest.approx(asked, abs=1e-5, nan_ok=True)


def test_without_the_loss_mask_a_group_s_advantage_is_that_of_observations_too() -> None:
    episodes = [paid(0, 1.0, turns=2), paid(1, 0.0, turns=2)]
    positions = find_positions(episodes, lambda segment: segment.tokens, observations=True)
    (samples,) = credit([group(*episodes)], Assessment(positions), AlgorithmSection(loss_mask=False))
    for sample in samples:
        (between,) = sample.observed
        assert between.tolist() == [float(sample.advantages[0][0])] * 3
        assert between.any()
