"""Scored episodes as plain lists, drawn by hypothesis, and the same as the vectors an estimator gets."""

from dataclasses import dataclass, replace
from random import Random

import torch
from hypothesis import strategies as st

from sensorium.algorithms.advantages import Episodes, SpanScores, TermScores


@dataclass(frozen=True)
class Position:
    turn: int
    written: bool
    reward: float
    value: float


@dataclass(frozen=True)
class Played:
    group: int
    truncated: bool
    positions: tuple[Position, ...]
    after: float = 0.0
    greedy: float = 0.0
    correct: float = float("nan")

    @property
    def reward(self) -> float:
        return sum(p.reward for p in self.positions)

    @property
    def written(self) -> list[Position]:
        return [p for p in self.positions if p.written]


@dataclass(frozen=True)
class Span:
    scores: tuple[float, ...]
    covers: tuple[bool, ...]


@dataclass(frozen=True)
class Batch:
    """``terms``: weight and the scores of every episode. Spans cover positions of the whole batch, in order."""

    played: tuple[Played, ...]
    terms: tuple[tuple[float, tuple[float, ...]], ...] = ()
    spans: tuple[Span, ...] = ()

    @property
    def positions(self) -> list[tuple[int, Position]]:
        """Every position with the index of its episode."""
        return [(i, p) for i, played in enumerate(self.played) for p in played.positions]

    @property
    def groups(self) -> list[int]:
        return [p.group for p in self.played]

    def episodes(self) -> Episodes:
        positions = self.positions
        return Episodes(
            groups_S=torch.tensor(self.groups),
            truncated_S=torch.tensor([p.truncated for p in self.played]),
            sequences_P=torch.tensor([i for i, _ in positions]),
            turns_P=torch.tensor([p.turn for _, p in positions]),
            written_P=torch.tensor([p.written for _, p in positions]),
            rewards_P=float64(p.reward for _, p in positions),
            values_P=float64(p.value for _, p in positions),
            after_S=float64(p.after for p in self.played),
            greedy_S=float64(p.greedy for p in self.played),
            correct_S=float64(p.correct for p in self.played),
            terms=tuple(TermScores(str(k), weight, float64(scores)) for k, (weight, scores) in enumerate(self.terms)),
            spans=tuple(
                SpanScores(str(k), 1.0, float64(span.scores), torch.tensor(span.covers))
                for k, span in enumerate(self.spans)
            ),
        )


def float64(values) -> torch.Tensor:
    return torch.tensor(list(values), dtype=torch.float64)


def of_rewards(*groups: list[float], tokens: int = 1) -> Batch:
    """Episodes of one response each, paid at its end by a single term."""
    played = []
    for group, rewards in enumerate(groups):
        for reward in rewards:
            paid = [0.0] * (tokens - 1) + [reward]
            positions = tuple(Position(len(played), True, r, 0.0) for r in paid)
            played.append(Played(group, False, positions))
    return Batch(tuple(played), terms=((1.0, tuple(p.reward for p in played)),))


def per_episode(batch: Batch, advantages_P: torch.Tensor) -> list[float]:
    """The value that all tokens of an episode share."""
    seen: dict[int, set[float]] = {}
    for (i, position), value in zip(batch.positions, advantages_P.tolist(), strict=True):
        if position.written:
            seen.setdefault(i, set()).add(value)
    assert all(len(values) == 1 for values in seen.values())
    return [seen[i].pop() for i in sorted(seen)]


LEVELS = (0.0, 0.0, 0.1, 0.2, 0.3, 1.0, -0.5)
"""Few levels, so that groups without variance, ties and sums of the same terms in another order are frequent."""


@st.composite
def batches(draw: st.DrawFn, *, inside: bool = True, spans: bool = True) -> Batch:
    """Any batch. ``inside``: tokens within a turn may be paid too (as by a KL in the reward), not only turn ends."""
    turn = st.tuples(st.integers(0, 2), st.integers(1, 4))
    episode = st.lists(turn, min_size=1, max_size=5)
    groups = draw(st.lists(st.lists(episode, min_size=1, max_size=4), min_size=1, max_size=4))
    numbers = Random(draw(st.integers(0, 2**32)))
    pays_inside = inside and draw(st.booleans())
    played, turns = [], 0
    for group, members in enumerate(groups):
        alike = numbers.random() < 0.2
        for member in members:
            positions = []
            for observed, written in member:
                for k in range(observed + written):
                    last = k == observed + written - 1
                    reward = numbers.choice(LEVELS) if last and not alike else 0.0
                    reward += numbers.uniform(-1, 0) if pays_inside and k >= observed else 0.0
                    positions.append(Position(turns, k >= observed, reward, numbers.uniform(-2, 2)))
                turns += 1
            if numbers.random() < 0.2:
                positions += [Position(turns, False, 0.0, numbers.uniform(-2, 2)) for _ in range(2)]
                turns += 1
            cut = numbers.random() < 0.3
            correct = numbers.choice((1.0, -1.0, float("nan")))
            after, greedy = numbers.uniform(-2, 2), numbers.choice(LEVELS)
            played.append(Played(group, cut, tuple(positions), after, greedy, correct))
    batch = Batch(tuple(played))
    terms = tuple((numbers.choice((0.5, 1.0, 2.0)), _scores(numbers, len(played), 0.0)) for _ in range(3))
    drawn = tuple(_span(numbers, batch) for _ in range(draw(st.integers(0, 2)) if spans else 0))
    return replace(batch, terms=terms, spans=drawn)


def _scores(numbers: Random, count: int, missing: float) -> tuple[float, ...]:
    return tuple(float("nan") if numbers.random() < missing else numbers.choice(LEVELS) for _ in range(count))


def _span(numbers: Random, batch: Batch) -> Span:
    covers = tuple(numbers.random() < 0.4 for _ in batch.positions)
    return Span(_scores(numbers, len(batch.played), 0.3), covers)
