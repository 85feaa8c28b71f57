"""The formulas written out as loops over plain lists, to hold the estimators against."""

import math
from collections.abc import Callable, Sequence

from tests.algorithms.batches import Batch, Played

Compare = Callable[[Sequence[float], Sequence[int], Sequence[int]], list[float]]


def mean(values: Sequence[float]) -> float:
    return math.fsum(values) / len(values)


def std(values: Sequence[float]) -> float:
    middle = mean(values)
    return math.sqrt(math.fsum((v - middle) ** 2 for v in values) / (len(values) - 1))


def vary(values: Sequence[float]) -> bool:
    return len(values) > 1 and max(values) - min(values) > 1e-12 * max(1.0, *map(abs, values))


def whitened(values: Sequence[float]) -> list[float]:
    if not vary(values):
        return [0.0] * len(values)
    middle, spread = mean(values), math.sqrt(std(values) ** 2 + 1e-8)
    return [(v - middle) / spread for v in values]


def standardised(values: Sequence[float]) -> list[float]:
    if not vary(values):
        return [0.0] * len(values)
    middle, spread = mean(values), std(values)
    return [(v - middle) / (spread + 1e-6) for v in values]


def over_the_step(scores: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    return standardised(scores)


def by_group(member: Callable[[int, list[float], list[int]], float]) -> Compare:
    """A comparison within groups from the value of one member, given its place, the group's scores and its lengths."""

    def compare(scores: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
        values = []
        for i, group in enumerate(groups):
            places = [j for j, other in enumerate(groups) if other == group]
            own = [scores[j] for j in places]
            values.append(member(places.index(i), own, [lengths[j] for j in places]) if vary(own) else 0.0)
        return values

    return compare


def among_members(compare: Compare, scores: Sequence[float], groups: Sequence[int], lengths: Sequence[int]) -> list[float]:
    has = [i for i, score in enumerate(scores) if not math.isnan(score)]
    found = compare([scores[i] for i in has], [groups[i] for i in has], [lengths[i] for i in has]) if has else []
    values = [0.0] * len(scores)
    for i, value in zip(has, found, strict=True):
        values[i] = value
    return values


def with_spans(batch: Batch, main: list[float], compare: Compare) -> list[float]:
    """The main channel's values at positions plus those of every span at its own."""
    total = list(main)
    for span in batch.spans:
        lands = [cover and p.written for cover, (_, p) in zip(span.covers, batch.positions, strict=True)]
        lengths = [0] * len(batch.played)
        for land, (i, _) in zip(lands, batch.positions, strict=True):
            lengths[i] += land
        values = among_members(compare, span.scores, batch.groups, lengths)
        for place, (i, _) in enumerate(batch.positions):
            total[place] += values[i] if lands[place] else 0.0
    return total


def compared(batch: Batch, compare: Compare) -> list[float]:
    """A group estimator: its comparison of the episodes' rewards, and the spans'."""
    lengths = [len(p.written) for p in batch.played]
    values = compare([p.reward for p in batch.played], batch.groups, lengths)
    return with_spans(batch, everywhere(batch, values), compare)


def everywhere(batch: Batch, values: Sequence[float]) -> list[float]:
    return [values[i] if p.written else 0.0 for i, p in batch.positions]


def gae(rewards: Sequence[float], values: Sequence[float], after: float, gamma: float, lam: float) -> list[float]:
    """Backwards over one episode's list of positions."""
    advantages, carry, following = [], 0.0, after
    for reward, value in zip(reversed(rewards), reversed(values), strict=True):
        carry = reward + gamma * following - value + gamma * lam * carry
        following = value
        advantages.append(carry)
    return advantages[::-1]


def bootstrap(played: Played) -> float:
    return played.after if played.truncated else 0.0


def turns_of(played: Played) -> list[list[int]]:
    """The places, in the list of written positions, of every turn's tokens."""
    turns: dict[int, list[int]] = {}
    for place, position in enumerate(played.written):
        turns.setdefault(position.turn, []).append(place)
    return list(turns.values())


def bi_level(played: Played, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> list[float]:
    """Before whitening, over one episode's written positions."""
    rewards = [p.reward for p in played.written]
    values = [p.value for p in played.written]
    turns = turns_of(played)
    ends = [turn[-1] for turn in turns]
    high = gae([rewards[e] for e in ends], [values[e] for e in ends], bootstrap(played), turn_gamma, turn_lam)
    advantages = [0.0] * len(values)
    for turn, advantage in zip(turns, high, strict=True):
        carry = following = 0.0
        for place in reversed(turn):
            paid = advantage + values[place] if place == turn[-1] else rewards[place]
            carry = paid + gamma * following - values[place] + gamma * lam * carry
            following = values[place]
            advantages[place] = carry
    return advantages
