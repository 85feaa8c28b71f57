"""What the learner is given goes to other processes as it is, and quickly."""

import pickle
from pathlib import Path

import torch

from sensorium.learner.credited_episode import CreditedEpisode, CriticValues

from .played import Player, open_policy


def test_a_pickled_episode_is_the_same_and_holds_no_tensor(checkpoints: dict[str, Path]) -> None:
    group = Player(open_policy(checkpoints["qwen2_5_vl"])).single_turn(size=2)
    values = CriticValues(torch.randn(3), torch.tensor([1.0, float("nan"), 2.0]))
    given = [group[0], CreditedEpisode(group[1].episode, group[1].advantages, values)]
    data = pickle.dumps(given, protocol=5)
    assert b"_load_from_bytes" not in data, "torch writes a file for every tensor"
    for sent, found in zip(given, pickle.loads(data), strict=True):
        assert found.episode == sent.episode
        assert all(torch.equal(a, b) for a, b in zip(found.advantages, sent.advantages, strict=True))
    critic = pickle.loads(data)[1].critic_values
    assert torch.equal(critic.values_P, values.values_P)
    assert torch.equal(critic.targets_P.nan_to_num(9), values.targets_P.nan_to_num(9))
