"""Rewards to tokens: where each score of an episode, a turn or a span is paid.

An episode's score is paid at its last token, a turn's at the turn's last token (turns end where their segments end). A
span's score is a channel of its own: it is credited to the tokens of the span and to no others. A KL in the reward is paid
token by token.
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from sensorium.algorithms import kl
from sensorium.algorithms.episodes import Episodes, SpanScores, TermScores
from sensorium.learner.assessment import Assessment
from sensorium.learner.positions import Positions
from sensorium.recipe.algorithm_sections import KLSection
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.score import Score

UNKNOWN = float("nan")


def place(
    groups: Sequence[Group], assessment: Assessment, section: KLSection, greedy: Mapping[str, float] | None = None
) -> Episodes:
    """The groups' episodes as the estimators see them. ``greedy``: rewards of the greedy attempts by group id.

    Every episode has a token: one that wrote nothing has no place for its pay, and selection leaves it out.
    """
    episodes = [episode for group in groups for episode in group.episodes]
    empty = [episode.id for episode in episodes if not episode.sampled_tokens]
    assert not empty, f"episode {empty[0]} wrote nothing, so there is no token to pay; leave it out"
    positions = assessment.positions
    ends = _Ends(positions)
    paid: dict[int, float] = {}
    for s, episode in enumerate(episodes):
        for score, value in _paid(episode):
            if score.scope != "span":
                end = ends.of(s, score.turn if score.scope == "turn" else None)
                paid[end] = paid.get(end, 0.0) + score.weight * value
    rewards_P = torch.zeros(len(positions), dtype=torch.float64)
    rewards_P[torch.tensor(list(paid), dtype=torch.long)] = _doubles(list(paid.values()))
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


def _paid(episode: Episode) -> list[tuple[Score, float]]:
    """Scores that were given and carry weight, with their values."""
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
        """The last position of a turn, or of the episode. A turn without tokens is paid at the turn before it, or after."""
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
    """What each term paid each episode, spans aside."""
    weights: dict[str, float] = {}
    sums: dict[str, list[float]] = {}
    for s, episode in enumerate(episodes):
        for score, value in _paid(episode):
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
        for score, value in _paid(episode):
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
