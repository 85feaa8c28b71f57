"""The learner's input: an episode, the advantage of every sampled token, and the critic's values and targets."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from torch import Tensor

from sensorium.vocabulary.episode import Episode


@dataclass(frozen=True)
class CriticValues:
    """At an episode's positions: the critic's values before the step, and the targets it is trained on (NaN: none)."""

    values_P: Tensor
    targets_P: Tensor


@dataclass(frozen=True)
class CreditedEpisode:
    """An episode with one tensor of advantages per turn, as long as the turn's response."""

    episode: Episode
    advantages: tuple[Tensor, ...]
    critic_values: CriticValues | None = None

    def __post_init__(self) -> None:
        assert len(self.advantages) == len(self.episode.turns), f"{self.episode.id}: advantages for every turn"
        for turn, advantages in zip(self.episode.turns, self.advantages, strict=True):
            assert len(advantages) == len(turn.response.tokens), f"{self.episode.id}: an advantage for every token"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, for ranks of their own, with arrays: a tensor takes twenty times as long."""
        critic = self.critic_values
        values = None if critic is None else (critic.values_P.cpu().numpy(), critic.targets_P.cpu().numpy())
        return _unpickled, (self.episode, [advantages.cpu().numpy() for advantages in self.advantages], values)


def _unpickled(
    episode: Episode, advantages: list[np.ndarray], values: tuple[np.ndarray, np.ndarray] | None
) -> CreditedEpisode:
    critic = None if values is None else CriticValues(*map(torch.tensor, values))
    return CreditedEpisode(episode, tuple(map(torch.tensor, advantages)), critic)  # copied: Ray's arrays are read-only


Groups = Sequence[Sequence[CreditedEpisode]]


def uncredited(groups: Sequence[Sequence[Episode]]) -> list[list[CreditedEpisode]]:
    """Episodes with advantages of zero, before credit."""
    return [
        [CreditedEpisode(e, tuple(torch.zeros(len(t.response.tokens)) for t in e.turns)) for e in group] for group in groups
    ]


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of an update in canonical order: groups, episodes, turns, tokens.

    This order, not the packing's, is the order of everything measured per token: so no number depends on packing.
    ``engine_N`` are the engine's log-probs under the whole policy, ``truncated_N`` those after top-p and top-k.
    """

    engine_N: Tensor
    truncated_N: Tensor
    advantages_N: Tensor
    sequences_N: Tensor
    counts_S: Tensor

    def __len__(self) -> int:
        return len(self.engine_N)

    def engine(self, kind: Literal["policy", "sampled"]) -> Tensor:
        """The engine's log-probs that a correction compares with: of the policy, or of what was sampled from."""
        return self.engine_N if kind == "policy" else self.truncated_N


def sampled_tokens(groups: Groups, device: torch.device) -> SampledTokens:
    """Gather log-probs, advantages and sequence of every sampled token."""
    samples = [sample for group in groups for sample in group]
    written = [turn.response for sample in samples for turn in sample.episode.turns]
    engine, truncated = (
        np.array([p for logprobs in parts for p in logprobs], dtype=np.float32)
        for parts in ([r.logprobs for r in written], [r.sampled_logprobs for r in written])
    )
    advantages = [a for sample in samples for a in sample.advantages]
    counts_S = torch.tensor([sample.episode.sampled_tokens for sample in samples], dtype=torch.long)
    return SampledTokens(
        torch.from_numpy(engine).to(device),
        torch.from_numpy(truncated).to(device),
        torch.cat([torch.zeros(0), *advantages]).to(device, torch.float32),
        torch.repeat_interleave(torch.arange(len(samples)), counts_S).to(device),
        counts_S.to(device),
    )


@dataclass(frozen=True)
class AskedValues:
    """The critic's targets in an update, in canonical order of positions; ``weights_P`` sum to one."""

    old_P: Tensor
    targets_P: Tensor
    weights_P: Tensor

    @property
    def asked_P(self) -> Tensor:
        """True where there is a target."""
        return self.weights_P > 0


def asked_values(groups: Groups, device: torch.device) -> AskedValues | None:
    """Gather the critic's targets; None where the episodes have none."""
    critic_values = [sample.critic_values for group in groups for sample in group]
    known = [one for one in critic_values if one is not None]
    if not known:
        return None
    assert len(known) == len(critic_values), "either every episode has critic values or none"
    targets_P = torch.cat([one.targets_P for one in known]).to(device, torch.float32)
    asked_P = ~targets_P.isnan()
    weights_P = asked_P / asked_P.sum().clamp(min=1)
    old_P = torch.cat([one.values_P for one in known]).to(device, torch.float32)
    return AskedValues(old_P, targets_P.nan_to_num(), weights_P)
