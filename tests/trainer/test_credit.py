"""Missing is not zero: who is dropped, by which policy, and what the rest is credited with."""

import torch

from sensorium.recipe.schema import AdvantageSection
from sensorium.trainer.credit import credit
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn


def episode(index: int, *values: float | None, status: Status = Status.FINISHED) -> Episode:
    response = Segment("model", (5, 6, 7), logprobs=(0.0,) * 3, name=f"e{index}")
    prompt = Segment("environment", (1, 2))
    scores = tuple(
        Score(f"term{i}", v, weight=0.5, reason="" if v is not None else "timed out") for i, v in enumerate(values)
    )
    thread = Thread((prompt, response), (False, True))
    return Episode(f"e{index}", "t", "g", index, (thread,), (Turn(0, (), response, 0, 1),), status, scores=scores)


def group(*episodes: Episode) -> Group:
    return Group("g", Task("t"), episodes)


def test_an_episode_with_one_missing_term_has_no_total_and_leaves_its_group() -> None:
    selection = select([group(episode(0, 1.0, 1.0), episode(1, 1.0, None), episode(2, 0.0, 0.0))], "drop_episode")
    assert [e.id for e in selection.groups[0].episodes] == ["e0", "e2"]
    assert selection.fates == {"e1": "dropped: no score for term1 (timed out)"}


def test_drop_group_takes_the_whole_group() -> None:
    whole = group(episode(0, 1.0), episode(1, 0.0), episode(2, None))
    fine = group(episode(3, 1.0), episode(4, 0.0))
    selection = select([whole, fine], "drop_group")
    assert [g.episodes[0].id for g in selection.groups] == ["e3"]
    assert set(selection.fates) == {"e0", "e1", "e2"}


def test_a_group_left_with_one_member_is_not_trained_on() -> None:
    selection = select([group(episode(0, 1.0), episode(1, None), episode(2, 1.0, status=Status.FAILED))], "drop_episode")
    assert selection.groups == ()
    assert set(selection.fates) == {"e0", "e1", "e2"}


def test_a_group_paid_alike_gets_exactly_zero() -> None:
    alike = group(*(episode(i, 0.1 + 0.2) for i in range(7)))
    samples = credit([alike], AdvantageSection(), mask_truncated=False)
    assert all(torch.equal(a, torch.zeros(3)) for s in samples[0] for a in s.advantages)
    assert zero_variance([alike]) == 1


def test_better_episodes_get_larger_advantages_on_every_token() -> None:
    samples = credit([group(episode(0, 1.0), episode(1, 0.0))], AdvantageSection(), mask_truncated=False)
    winner, loser = (s.advantages[0] for s in samples[0])
    assert (winner > 0).all()
    assert torch.allclose(winner, -loser)
    assert winner.shape == (3,)


def test_masked_truncated_episodes_count_in_the_baseline_but_are_not_trained() -> None:
    members = group(episode(0, 1.0), episode(1, 0.0, status=Status.TRUNCATED), episode(2, 0.0))
    samples = credit([members], AdvantageSection(std=False), mask_truncated=True)
    assert [s.episode.id for s in samples[0]] == ["e0", "e2"]
    assert torch.allclose(samples[0][0].advantages[0], torch.full((3,), 1 / 3))
