"""ReMax: an episode's reward against what the greedy answer to the same task was paid, R - greedy R."""

import torch

from sensorium.algorithms.channels import everywhere, spans
from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.variance import differ


def estimate(episodes: Episodes) -> Credit:
    """Every token gets its episode's value; exactly 0 where the greedy answer was paid the same."""
    assert episodes.greedy_S is not None, "remax needs greedy rewards"
    rewards_S, greedy_S = episodes.rewards_S, episodes.greedy_S.double()
    values_S = torch.where(differ(rewards_S, greedy_S), rewards_S - greedy_S, 0)
    return Credit(everywhere(episodes, values_S) + spans(episodes))
