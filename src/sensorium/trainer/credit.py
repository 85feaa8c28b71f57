"""Assign rewards to tokens: an episode's score to its last token, a turn's to the turn's last token.

A span's score is a channel of its own: it is credited to the tokens of the span and to no others. A KL in the reward is
subtracted token by token.
"""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch
from torch import Tensor

from sensorium.algorithms import kl
from sensorium.algorithms.advantages import Credit, Episodes, SpanScores, TermScores, optimize_threshold
from sensorium.learner.credited_episode import Assessment, CreditedEpisode, CriticValues, Positions, find_positions
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.registry import resolve
from sensorium.recipe.schema import AdvantageSection, AlgorithmSection, KLSection
from sensorium.vocabulary.episode import Episode, Group, Score, Segment, Status

UNKNOWN = float("nan")


def place(
    groups: Sequence[Group], assessment: Assessment, section: KLSection, greedy: Mapping[str, float] | None = None
) -> Episodes:
    """The groups' episodes as the estimators see them. ``greedy``: rewards of the greedy attempts by group id.

    Every episode has a sampled token; selection leaves out those without.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    empty = [episode.id for episode in episodes if not episode.sampled_tokens]
    assert not empty, f"episode {empty[0]} wrote nothing, so no token can get its reward; leave it out"
    positions = assessment.positions
    ends = _Ends(positions)
    rewards: dict[int, float] = {}
    for s, episode in enumerate(episodes):
        for score, value in _weighted(episode):
            if score.scope != "span":
                end = ends.of(s, score.turn if score.scope == "turn" else None)
                rewards[end] = rewards.get(end, 0.0) + score.weight * value
    rewards_P = torch.zeros(len(positions), dtype=torch.float64)
    rewards_P[torch.tensor(list(rewards), dtype=torch.long)] = _doubles(list(rewards.values()))
    if assessment.old_N is not None and assessment.reference_N is not None:
        penalty_N = kl.in_reward(assessment.old_N.double(), assessment.reference_N.double(), section.estimator)
        rewards_P[positions.written_P] -= assessment.kl_coef * penalty_N
    verdicts = [UNKNOWN if e.correct is None else 1.0 if e.correct else -1.0 for e in episodes]
    return Episodes(
        groups_S=torch.repeat_interleave(torch.arange(len(groups)), torch.tensor([len(g.episodes) for g in groups])),
        truncated_S=torch.tensor(positions.truncated, dtype=torch.bool),
        sequences_P=positions.sequences_P,
        turns_P=positions.turns_P,
        written_P=positions.written_P,
        rewards_P=rewards_P,
        values_P=None if assessment.values_P is None else assessment.values_P.double(),
        after_S=None if assessment.after_S is None else assessment.after_S.double(),
        greedy_S=None if greedy is None else _doubles([greedy[g.id] for g in groups for _ in g.episodes]),
        correct_S=_doubles(verdicts),
        terms=_terms(episodes),
        spans=_spans(episodes, ends),
    )


def _weighted(episode: Episode) -> list[tuple[Score, float]]:
    return [(score, score.value) for score in episode.scores if score.weight != 0 and score.value is not None]


class _Ends:
    """Where turns begin and end among the positions."""

    def __init__(self, positions: Positions) -> None:
        self.bounds: list[dict[int, tuple[int, int]]] = []
        start = 0
        for several in positions.stretches:
            bounds = {}
            for stretch in several:
                if stretch.written and stretch.length:
                    bounds[stretch.turn] = (start, start + stretch.length)
                start += stretch.length
            self.bounds.append(bounds)
        self.size = start

    def of(self, sequence: int, turn: int | None) -> int:
        """The last position of a turn, or of the episode; for a turn without tokens, of the turn before or after it."""
        bounds = self.bounds[sequence]
        at_most = [t for t in bounds if turn is None or t <= turn]
        chosen = max(at_most) if at_most else min(bounds)
        return bounds[chosen][1] - 1

    def span(self, episode: Episode, sequence: int, score: Score) -> range:
        """The positions of a span of a turn's text."""
        turn = score.turn if score.turn is not None else 0
        if turn not in self.bounds[sequence] or score.span is None:
            return range(0)
        start = self.bounds[sequence][turn][0]
        tokens = episode.turns[turn].response.tokens_in(*score.span)
        return range(start + tokens.start, start + tokens.stop)


def _terms(episodes: Sequence[Episode]) -> tuple[TermScores, ...]:
    weights: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    for s, episode in enumerate(episodes):
        for score, value in _weighted(episode):
            if score.scope != "span":
                weights[score.name] = score.weight
                sums.setdefault(score.name, [0.0] * len(episodes))[s] += value
    return tuple(TermScores(name, weights[name], _doubles(values)) for name, values in sums.items())


def _spans(episodes: Sequence[Episode], ends: _Ends) -> tuple[SpanScores, ...]:
    """One channel for each place a term judges: a turn's first span, its second, and so on."""
    scores: dict[tuple[str, int | None, int], list[float]] = {}
    covers: dict[tuple[str, int | None, int], Tensor] = {}
    weights: dict[tuple[str, int | None, int], float] = {}
    for s, episode in enumerate(episodes):
        seen: dict[tuple[str, int | None], int] = {}
        for score, value in _weighted(episode):
            if score.scope != "span":
                continue
            nth = seen[score.name, score.turn] = seen.get((score.name, score.turn), -1) + 1
            key = (score.name, score.turn, nth)
            weights[key] = score.weight
            scores.setdefault(key, [UNKNOWN] * len(episodes))[s] = value
            covered = ends.span(episode, s, score)
            covers.setdefault(key, torch.zeros(ends.size, dtype=torch.bool))[covered.start : covered.stop] = True
    return tuple(SpanScores(key[0], weights[key], _doubles(values), covers[key]) for key, values in scores.items())


def _doubles(values: Sequence[float]) -> Tensor:
    return torch.tensor(values, dtype=torch.float64)


def credit(
    groups: Sequence[Group],
    assessment: Assessment,
    algorithm: AlgorithmSection,
    *,
    mask_truncated: bool = False,
    greedy: Mapping[str, float] | None = None,
) -> list[list[CreditedEpisode]]:
    """Samples by the recipe's estimator. Masked truncated episodes still count in baselines, but are not trained on."""
    if not groups:
        return []
    episodes = place(groups, assessment, algorithm.kl, greedy)
    if not algorithm.masked:  # the estimators then see all positions as the model's own
        episodes = replace(episodes, written_P=torch.ones_like(episodes.written_P))
    found = estimate(episodes, algorithm.advantage)
    samples = iter(_samples(groups, assessment, found, observed=not algorithm.loss_mask))
    kept = []
    for group in groups:
        members = [next(samples) for _ in group.episodes]
        kept.append([s for s in members if not (mask_truncated and s.episode.status == Status.TRUNCATED)])
    return [members for members in kept if members]


def groups_with_signal(
    groups: Sequence[Group], section: AdvantageSection, greedy: Mapping[str, float] | None = None
) -> frozenset[str]:
    """Ids of the groups in which the estimator gives any token an advantage: asked of the estimator, so both agree.

    Where it does not compare groups, those whose members' rewards differ. A KL in the reward is no signal.
    """
    if not groups:
        return frozenset()
    traits = estimator_traits(section.name)
    asked = section if traits.compares or traits.greedy else AdvantageSection(name="grpo", std=False)
    positions = find_positions([e for group in groups for e in group.episodes], _no_observation)
    found = estimate(place(groups, Assessment(positions), KLSection(), greedy if traits.greedy else None), asked)
    moved_S = torch.zeros(len(positions.stretches), dtype=torch.bool)
    moved_S[positions.sequences_P[found.advantages_P != 0]] = True
    moved = moved_S.split([len(group.episodes) for group in groups])
    return frozenset(group.id for group, members in zip(groups, moved, strict=True) if bool(members.any()))


def credit_by_rewards(
    groups: Sequence[Group],
    algorithm: AlgorithmSection,
    *,
    mask_truncated: bool = False,
    greedy: Mapping[str, float] | None = None,
) -> list[list[CreditedEpisode]]:
    """Samples by rewards alone: without a KL in the reward, and only of what the model wrote.

    An estimator that needs a critic is replaced by rewards less their group's mean.
    """
    traits = estimator_traits(algorithm.advantage.name)
    section = AdvantageSection(name="grpo", std=False) if traits.critic else algorithm.advantage
    alone = algorithm.model_copy(update={"advantage": section, "loss_mask": True, "gae_mask": True})
    positions = find_positions([e for group in groups for e in group.episodes], _no_observation)
    asked = greedy if traits.greedy else None
    return credit(groups, Assessment(positions), alone, mask_truncated=mask_truncated, greedy=asked)


def estimate(episodes: Episodes, section: AdvantageSection) -> Credit:
    """The named estimator with those of the recipe's settings that it takes, and the post-step."""
    function = resolve("advantage", section.name, "algorithm.advantage.name")
    settings = section.model_dump()
    taken = {key: settings[key] for key in inspect.signature(function).parameters if key in settings}
    found: Credit = function(episodes, **taken)
    return optimize_threshold(episodes, found) if section.post == "optimize_threshold" else found


def _samples(groups: Sequence[Group], assessment: Assessment, found: Credit, *, observed: bool) -> list[CreditedEpisode]:
    """Cut the step's vectors back into episodes and turns; with ``observed`` into observations, too."""
    episodes = [episode for group in groups for episode in group.episodes]
    positions, values_P, targets_P = assessment.positions, assessment.values_P, found.targets_P
    lengths = [sum(stretch.length for stretch in several) for several in positions.stretches]
    samples, start = [], 0
    for episode, length, stretches in zip(episodes, lengths, positions.stretches, strict=True):
        advantages_P = found.advantages_P[start : start + length].float()
        parts = list(zip(advantages_P.split([stretch.length for stretch in stretches]), stretches, strict=True))
        written = tuple(part for part, stretch in parts if stretch.written)
        between = tuple(part for part, stretch in parts if not stretch.written)
        critic_values = None
        if values_P is not None and targets_P is not None:
            own = slice(start, start + length)
            critic_values = CriticValues(values_P[own].float(), targets_P[own].float())
        samples.append(CreditedEpisode(episode, written, critic_values, between if observed else ()))
        start += length
    return samples


def _no_observation(segment: Segment) -> NoReturn:
    raise AssertionError("estimators that compare rewards look at no observation")
