"""What the learner is given goes to other processes as it is, and quickly."""

import math
import pickle
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sensorium.learner.credited_episode import CreditedEpisode, CriticValues, with_observations
from sensorium.models.policy import Policy
from sensorium.recipe.schema import AlgorithmSection, OptimizerSection

from .played import Player, distribution, make_learner, open_policy, stock_model, stock_rows


def test_a_pickled_episode_is_the_same_and_holds_no_tensor(checkpoints: dict[str, Path]) -> None:
    group = Player(open_policy(checkpoints["qwen2_5_vl"])).single_turn(size=2)
    values = CriticValues(torch.randn(3), torch.tensor([1.0, float("nan"), 2.0]))
    given = [group[0], CreditedEpisode(group[1].episode, group[1].advantages, values, (torch.ones(2),))]
    data = pickle.dumps(given, protocol=5)
    assert b"_load_from_bytes" not in data, "torch writes a file for every tensor"
    for sent, found in zip(given, pickle.loads(data), strict=True):
        assert found.episode == sent.episode
        assert all(torch.equal(a, b) for a, b in zip(found.advantages, sent.advantages, strict=True))
    assert [len(found.observed) for found in pickle.loads(data)] == [0, 1]
    critic = pickle.loads(data)[1].critic_values
    assert torch.equal(critic.values_P, values.values_P)
    assert torch.equal(critic.targets_P.nan_to_num(9), values.targets_P.nan_to_num(9))


def observing(policy: Policy, sample: CreditedEpisode) -> CreditedEpisode:
    """The sample with an advantage for every token that was shown between its responses."""
    lengths = [len(policy.chat.layout(segment)) for segment in sample.episode.threads[0].segments[2::2]]
    return replace(sample, observed=tuple(torch.arange(length).float() + 100 * i for i, length in enumerate(lengths)))


@pytest.mark.parametrize("family", ["qwen2_5_vl", "qwen3_vl", "smolvlm"])
def test_observed_text_is_scored_as_the_stock_model_scores_it(family: str, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints[family])
    plain = Player(policy).conversation(size=2)
    learner = make_learner(policy)
    lay_out, forbidden = policy.chat.layout, frozenset(policy.chat.forbidden_ids)
    whole = [with_observations(observing(policy, sample), lay_out, forbidden) for sample in plain]
    for before, after in zip(plain, whole, strict=True):
        ids = [torch.cat([lay_out(s).ids_T for s in e.episode.threads[0].segments]) for e in (before, after)]
        assert torch.equal(*ids)
        shown = before.episode.threads[0].segments[2::2]
        writable = [t not in forbidden for s in shown for t in s.tokens]
        assert after.episode.sampled_tokens == before.episode.sampled_tokens + sum(writable)
        assert sum(writable) > 5
        assert not all(writable)
        observed = [
            (float(a), t)
            for turn, given in zip(after.episode.turns, after.advantages, strict=True) if "/observed/" in turn.response.name
            for a, t in zip(given, turn.response.tokens, strict=True)
        ]  # fmt: skip
        expected = [
            (float(lay_out(s).ends_S[i]) + 100 * number, t)
            for number, s in enumerate(shown) for i, t in enumerate(s.tokens) if t not in forbidden
        ]  # fmt: skip
        assert observed == expected, "each token has the advantage of its own position"
    expected_N: list[torch.Tensor] = []

    def take(sample: CreditedEpisode, turn: int, logits: torch.Tensor, tokens: torch.Tensor) -> None:
        expected_N.append(distribution(policy, logits.detach(), 1.0).gather(1, tokens[:, None])[:, 0].float())

    stock_rows(stock_model(checkpoints[family]), policy, [whole], take)
    found = [part for sample in learner.logprobs([whole])[0] for part in sample]
    assert torch.allclose(torch.cat(found), torch.cat(expected_N), atol=1e-4)


def test_updates_train_observed_text_and_measure_the_mismatch_without_it(checkpoints: dict[str, Path]) -> None:
    def run(observed: bool, weights: str) -> dict[str, float]:
        policy = open_policy(checkpoints["qwen3_vl"])
        group = Player(policy).conversation(size=2)
        algorithm = AlgorithmSection.model_validate(
            {"loss_mask": not observed, "correction": {"weights": weights, "reject": "mean", "reject_above": 50.0}}
        )
        learner = make_learner(policy, algorithm=algorithm, optimizer=OptimizerSection(lr=1e-5))
        metrics = learner.step([[observing(policy, sample) if observed else sample for sample in group]])
        for sample in group:
            measures = learner.token_measures([sample.episode.id])[sample.episode.id]
            for turn, found in zip(sample.episode.turns, zip(*measures, strict=True), strict=True):
                assert [len(one) for one in found] == [len(turn.response.tokens)] * 2
                assert all(map(math.isfinite, found[1])), "of what the environment showed there is no log-prob of an engine"
        return metrics

    for weights in ("token", "sequence", "geometric"):
        with_them, without = run(True, weights), run(False, weights)
        assert with_them["packing/trained_tokens"] > without["packing/trained_tokens"] + 10
        for name in ("prob_error", "kl", "max", "sequence_max", "sequence_min", "effective_share"):
            assert with_them[f"mismatch/{name}"] == pytest.approx(without[f"mismatch/{name}"], rel=1e-3), name
        assert all(math.isfinite(value) for value in with_them.values())
