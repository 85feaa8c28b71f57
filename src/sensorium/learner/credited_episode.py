"""The positions of an episode that get credit: sampled tokens and, where asked, the observations between them.

Positions are numbered in canonical order: groups, episodes, time. The value *at* a position is that of the prefix before
it; the values *after* the episodes come behind all positions, one place an episode.
"""

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from itertools import groupby
from typing import Any, Literal, NamedTuple

import numpy as np
import torch
from torch import Tensor

from sensorium.models.segment_layout import Layout
from sensorium.vocabulary.episode import Episode, MediaSpan, Segment, Status, Thread, Turn

LayOut = Callable[[Segment], Layout]


@dataclass(frozen=True)
class Stretch:
    """Consecutive positions: all tokens of one segment of a thread. An observation belongs to the turn it opens."""

    turn: int
    thread: int
    segment: int
    length: int
    written: bool


@dataclass(frozen=True)
class Positions:
    """The positions of episodes. ``turns_P`` are counted through all of them."""

    stretches: tuple[tuple[Stretch, ...], ...]
    truncated: tuple[bool, ...]
    sequences_P: Tensor
    turns_P: Tensor
    written_P: Tensor

    def __len__(self) -> int:
        return len(self.sequences_P)


def find_positions(episodes: Sequence[Episode], lay_out: LayOut, *, observations: bool = False) -> Positions:
    """Number the positions of episodes; with ``observations`` each must be one growing thread."""
    stretches = tuple(tuple(_stretches(episode, lay_out, observations)) for episode in episodes)
    flat = [(s, stretch) for s, several in enumerate(stretches) for stretch in several]
    lengths = torch.tensor([stretch.length for _, stretch in flat], dtype=torch.long)
    turns_before = [0]
    for episode in episodes:
        turns_before.append(turns_before[-1] + len(episode.turns))

    def spread(values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.repeat_interleave(torch.tensor(values, dtype=dtype), lengths)

    return Positions(
        stretches,
        tuple(episode.status == Status.TRUNCATED for episode in episodes),
        spread([s for s, _ in flat]),
        spread([turns_before[s] + stretch.turn for s, stretch in flat]),
        spread([stretch.written for _, stretch in flat], torch.bool),
    )


def _stretches(episode: Episode, lay_out: LayOut, observations: bool) -> list[Stretch]:
    found: list[Stretch] = []
    for i, turn in enumerate(episode.turns):
        if observations and i > 0:
            before = episode.turns[i - 1]
            assert before.thread == turn.thread, f"{episode.id}: observations are positions of one growing thread only"
            segments = episode.threads[turn.thread].segments
            for place in range(before.segment + 1, turn.segment):
                found.append(Stretch(i, turn.thread, place, len(lay_out(segments[place])), False))
        found.append(Stretch(i, turn.thread, turn.segment, len(turn.response.tokens), True))
    return found


@dataclass(frozen=True)
class Assessment:
    """What credit must know of episodes before they are trained on, in canonical order, on the CPU.

    ``values_P`` and ``after_S`` are the critic's; ``old_N`` and ``reference_N`` log-probs for a KL in the reward.
    """

    positions: Positions
    values_P: Tensor | None = None
    after_S: Tensor | None = None
    old_N: Tensor | None = None
    reference_N: Tensor | None = None
    kl_coef: float = 0.0


@dataclass(frozen=True)
class CriticValues:
    """At an episode's positions: the critic's values before the step, and the targets it is trained on (NaN: none)."""

    values_P: Tensor
    targets_P: Tensor


@dataclass(frozen=True)
class CreditedEpisode:
    """An episode with one tensor of advantages per turn, as long as the turn's response.

    ``observed`` are those of the observations between responses, one tensor each, where they are trained too
    (``algorithm.loss_mask: false``).
    """

    episode: Episode
    advantages: tuple[Tensor, ...]
    critic_values: CriticValues | None = None
    observed: tuple[Tensor, ...] = ()

    def __post_init__(self) -> None:
        assert len(self.advantages) == len(self.episode.turns), f"{self.episode.id}: advantages for every turn"
        for turn, advantages in zip(self.episode.turns, self.advantages, strict=True):
            assert len(advantages) == len(turn.response.tokens), f"{self.episode.id}: an advantage for every token"

    def __reduce__(self) -> tuple[Any, ...]:
        """Pickled, for ranks of their own, with arrays: a tensor takes twenty times as long."""
        critic = self.critic_values
        values = None if critic is None else (critic.values_P.cpu().numpy(), critic.targets_P.cpu().numpy())
        parts = [[one.cpu().numpy() for one in several] for several in (self.advantages, self.observed)]
        return _unpickled, (self.episode, parts[0], values, parts[1])


def _unpickled(
    episode: Episode,
    advantages: list[np.ndarray],
    values: tuple[np.ndarray, np.ndarray] | None,
    observed: list[np.ndarray],
) -> CreditedEpisode:
    critic = None if values is None else CriticValues(*map(torch.tensor, values))
    parts = (tuple(map(torch.tensor, several)) for several in (advantages, observed))
    written, between = parts
    return CreditedEpisode(episode, written, critic, between)  # copied: Ray's arrays are read-only


Groups = Sequence[Sequence[CreditedEpisode]]


def uncredited(groups: Sequence[Sequence[Episode]]) -> list[list[CreditedEpisode]]:
    """Episodes with advantages of zero, before credit."""
    return [
        [CreditedEpisode(e, tuple(torch.zeros(len(t.response.tokens)) for t in e.turns)) for e in group] for group in groups
    ]


def with_observations(sample: CreditedEpisode, lay_out: LayOut, forbidden: Collection[int]) -> CreditedEpisode:
    """The sample with every stretch of observed text as a turn of its own, so that it is trained as responses are.

    After ``Up`` the environment shows ``<|im_start|>user You see <picture><|im_end|>``: "user You see " becomes a turn;
    what the model may not write (special tokens, media) stays context. Such turns have no log-probs of an engine: NaN.
    """
    if not sample.observed:
        return sample
    episode, observed = sample.episode, iter(sample.observed)
    thread = episode.turns[0].thread
    advantages = {turn.segment: given for turn, given in zip(episode.turns, sample.advantages, strict=True)}
    segments: list[Segment] = []
    turns: list[tuple[int, Tensor]] = []
    for place, segment in enumerate(episode.threads[thread].segments):
        if place in advantages:
            turns.append((len(segments), advantages[place]))
            segments.append(segment)
        elif place < episode.turns[0].segment:
            segments.append(segment)
        else:
            given_T, ends_S = next(observed), lay_out(segment).ends_S
            for start, end, writable in _stretches_of_text(segment, forbidden):
                if writable:
                    turns.append((len(segments), given_T[ends_S[start:end]]))
                segments.append(_cut(segment, start, end, f"{episode.id}/observed/{place}/{start}" if writable else ""))
    home = {place for place, _ in turns}
    threads = list(episode.threads)
    threads[thread] = Thread(tuple(segments), tuple(place in home for place in range(len(segments))))
    cut = replace(
        episode,
        threads=tuple(threads),
        turns=tuple(Turn(index, (), segments[place], thread, place) for index, (place, _) in enumerate(turns)),
    )
    return CreditedEpisode(cut, tuple(given for _, given in turns), sample.critic_values)


def _stretches_of_text(segment: Segment, forbidden: Collection[int]) -> list[tuple[int, int, bool]]:
    """The tokens of a segment as runs (start, end, whether the model may write them)."""
    media = {span.index for span in segment.media}
    may_write = [token not in forbidden and index not in media for index, token in enumerate(segment.tokens)]
    runs, start = [], 0
    for writable, run in groupby(may_write):
        end = start + len(list(run))
        runs.append((start, end, writable))
        start = end
    return runs


def _cut(segment: Segment, start: int, end: int, name: str) -> Segment:
    """A part of an observation: with a name, as if the model had written it."""
    tokens = segment.tokens[start:end]
    if name:
        unknown = (float("nan"),) * len(tokens)
        return Segment("model", tokens, logprobs=unknown, sampled_logprobs=unknown, name=name)
    media = tuple(MediaSpan(span.index - start, span.media) for span in segment.media if start <= span.index < end)
    return Segment("environment", tokens, media)


@dataclass(frozen=True)
class SampledTokens:
    """The sampled tokens of an update in canonical order: groups, episodes, turns, tokens.

    This order, not the packing's, is the order of everything measured per token: so no number depends on packing.
    ``engine_N`` are the engine's log-probs under the whole policy, ``truncated_N`` those after top-p and top-k; NaN where
    no engine sampled the token, but an environment showed it.
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


class TokenMeasures(NamedTuple):
    """What the learner found of an episode's sampled tokens, by turn, with the weights that the step began with.

    ``entropies`` (nats, four decimals) are of the policy at the rollout's temperature, before top-p and top-k;
    ``mismatches`` (three digits) are the learner's log-prob of the token minus the engine's, NaN where it gave none.
    """

    entropies: tuple[tuple[float, ...], ...]
    mismatches: tuple[tuple[float, ...], ...]


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
