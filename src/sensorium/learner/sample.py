"""What the learner is given: an episode and the advantage of every token the model wrote in it."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from sensorium.vocabulary.episode import Episode


@dataclass(frozen=True)
class Sample:
    """An episode with one tensor of advantages per turn, as long as the turn's response."""

    episode: Episode
    advantages: tuple[Tensor, ...]

    def __post_init__(self) -> None:
        assert len(self.advantages) == len(self.episode.turns), f"{self.episode.id}: advantages for every turn"
        for turn, advantages in zip(self.episode.turns, self.advantages, strict=True):
            assert len(advantages) == len(turn.response.tokens), f"{self.episode.id}: an advantage for every token"


Groups = Sequence[Sequence[Sample]]


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of an update in canonical order: groups, episodes, turns, tokens.

    This order, not the packing's, is the order of everything measured per token: so no number depends on packing.
    """

    engine_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor
    counts_S: Tensor

    def __len__(self) -> int:
        return len(self.engine_N)


def sampled_tokens(groups: Groups, device: torch.device) -> SampledTokens:
    """Gather what is known of every sampled token."""
    samples = [sample for group in groups for sample in group]
    engine = np.array([p for s in samples for turn in s.episode.turns for p in turn.response.logprobs], dtype=np.float32)
    advantages = [a for sample in samples for a in sample.advantages]
    counts_S = torch.tensor([sample.episode.sampled_tokens for sample in samples], dtype=torch.long)
    return SampledTokens(
        torch.from_numpy(engine).to(device),
        torch.cat([torch.zeros(0), *advantages]).to(device, torch.float32),
        torch.repeat_interleave(torch.arange(len(samples)), counts_S).to(device),
        counts_S.to(device),
    )
