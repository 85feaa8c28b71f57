"""Advantage estimators: the scored episodes of a step in, the credit of every position out. One function each."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

# An estimator is a function of ``Episodes`` and its settings that returns ``Credit``: a value for every position. It
# works in float64 and knows nothing of models, packing or rewards' names; what it needs beyond rewards (a critic's
# values, greedy rewards) is said in ``recipe.estimators_and_losses``.


@dataclass(frozen=True)
class TermScores:
    """What one reward term paid each episode, before its weight."""

    name: str
    weight: float
    scores_S: Tensor


@dataclass(frozen=True)
class SpanScores:
    """What one term paid for a part of the response only, before its weight: NaN where an episode has no such part.

    ``covers_P`` marks the part's positions; the score moves these and no others. The weight is that of the advantage that
    comes of it: an estimator that divides by a spread would divide a weight of the scores away.
    """

    name: str
    weight: float
    scores_S: Tensor
    covers_P: Tensor


@dataclass(frozen=True)
class Episodes:
    """The episodes of a step. Axes: S episodes, ordered by group; P positions, ordered by episode and time.

    Positions are the tokens the model wrote (``written_P`` all true); estimators that ask for observations also get those
    of the environment's tokens between two responses. ``sequences_P`` and ``turns_P`` say whose a position is: turns are
    counted through the whole step and an observation belongs to the turn it opens. ``rewards_P`` holds episode and turn
    scores at their places, span scores not included. ``values_P`` is the critic's value of the prefix before a position,
    ``after_S`` that of the whole episode; truncated ones bootstrap from it. ``correct_S``: 1 right, -1 wrong, NaN unknown.
    """

    groups_S: Tensor
    truncated_S: Tensor
    sequences_P: Tensor
    turns_P: Tensor
    written_P: Tensor
    rewards_P: Tensor
    values_P: Tensor | None = None
    after_S: Tensor | None = None
    greedy_S: Tensor | None = None
    correct_S: Tensor | None = None
    terms: tuple[TermScores, ...] = ()
    spans: tuple[SpanScores, ...] = ()

    @property
    def rewards_S(self) -> Tensor:
        """What each episode was paid in all, span scores not included."""
        zeros_S = torch.zeros(len(self.groups_S), dtype=torch.float64, device=self.rewards_P.device)
        return zeros_S.index_add(0, self.sequences_P, self.rewards_P.double())

    @property
    def lengths_S(self) -> Tensor:
        """How many tokens the model wrote in each episode."""
        zeros_S = torch.zeros(len(self.groups_S), dtype=torch.float64, device=self.rewards_P.device)
        return zeros_S.index_add(0, self.sequences_P, self.written_P.double())


@dataclass(frozen=True)
class Credit:
    """Advantages (0 where the model did not write) and, with a critic, what it should have said (NaN: not asked there)."""

    advantages_P: Tensor
    targets_P: Tensor | None = None


NOISE = 1e-12
"""Relative to max(1, |x|): what the order of summation can change in float64 and no reward means."""

EPSILON = 1e-6
"""Added to a standard deviation before dividing by it."""


@dataclass(frozen=True)
class Moments:
    """Mean, unbiased standard deviation, and whether the values vary at all (one value, or none, does not)."""

    mean: Tensor
    std: Tensor
    varied: Tensor


def differ(one: Tensor, other: Tensor) -> Tensor:
    """Where two numbers are apart by more than the noise of summation.

    NaN and infinities differ from everything, themselves included, so that they are never taken for "no difference".
    """
    scale = torch.maximum(one.abs(), other.abs()).clamp(min=1)
    gap = (one - other).abs()
    return ~(gap <= NOISE * scale) | ~gap.isfinite()


def alike(values: Sequence[float]) -> bool:
    """True if no two of the values differ, by the same rule."""
    given = torch.tensor(values, dtype=torch.float64)
    return len(given) < 2 or not bool(differ(given.amin(), given.amax()))


def moments(values: Tensor, members: Tensor) -> Moments:
    """Of the members only, along the last axis."""
    counts = members.sum(-1)
    mean = torch.where(members, values, 0).sum(-1) / counts.clamp(min=1)
    deviations = torch.where(members, values - mean.unsqueeze(-1), 0)
    std = (deviations.square().sum(-1) / (counts - 1).clamp(min=1)).sqrt()
    lowest = torch.where(members, values, torch.inf).amin(-1)
    highest = torch.where(members, values, -torch.inf).amax(-1)
    return Moments(mean, std, (counts > 1) & differ(lowest, highest))


@dataclass(frozen=True)
class Groups:
    """Where each of S episodes stands in a matrix with a row for every group.

    Axes: K groups, G members of the largest. ``present_KG`` is false where a smaller group has no member.
    """

    rows_S: Tensor
    columns_S: Tensor
    present_KG: Tensor

    @property
    def sizes(self) -> Tensor:
        """How many members every group has, as [K, 1]."""
        return self.present_KG.double().sum(1, keepdim=True)

    def lay_out(self, values_S: Tensor) -> Tensor:
        """A value of every episode as [K, G], 0 where there is no member."""
        laid_KG = torch.zeros(self.present_KG.shape, dtype=torch.float64, device=values_S.device)
        return laid_KG.index_put((self.rows_S, self.columns_S), values_S.double())

    def back(self, values_KG: Tensor) -> Tensor:
        """The value of every episode from [K, G], or from [K, 1] for a value of its group."""
        return values_KG.expand(self.present_KG.shape)[self.rows_S, self.columns_S]

    def moments(self, values_KG: Tensor) -> Moments:
        """Mean, spread and variation of every group, as [K, 1]."""
        return moments(values_KG.unsqueeze(1), self.present_KG.unsqueeze(1))


def grouped(groups_S: Tensor) -> Groups:
    """The groups of episodes that name theirs, in any order."""
    _, rows_S, sizes_K = torch.unique(groups_S, return_inverse=True, return_counts=True)
    order_S = rows_S.argsort(stable=True)
    within_S = torch.arange(len(rows_S), device=rows_S.device) - (sizes_K.cumsum(0) - sizes_K)[rows_S[order_S]]
    columns_S = torch.empty_like(rows_S).index_put((order_S,), within_S)
    largest = int(sizes_K.max()) if len(sizes_K) else 1
    present_KG = torch.arange(largest, device=rows_S.device) < sizes_K.unsqueeze(1)
    return Groups(rows_S, columns_S, present_KG)


def varied(scores_S: Tensor, groups_S: Tensor) -> Tensor:
    """Episodes in whose group the scores vary."""
    groups = grouped(groups_S)
    return groups.back(groups.moments(groups.lay_out(scores_S)).varied)


def whiten(values_N: Tensor) -> Tensor:
    """(x - mean) / sqrt(variance + 1e-8), for values of positions."""
    spread = _moments(values_N)
    return _unless_constant(spread, (values_N - spread.mean) * torch.rsqrt(spread.std.square() + 1e-8))


def standardise(values_S: Tensor) -> Tensor:
    """(x - mean) / (std + 1e-6), for values of episodes."""
    spread = _moments(values_S)
    return _unless_constant(spread, (values_S - spread.mean) / (spread.std + EPSILON))


def _moments(values: Tensor) -> Moments:
    if not len(values):
        values = values.new_zeros(1)
    return moments(values, torch.ones_like(values, dtype=torch.bool))


def _unless_constant(spread: Moments, scaled: Tensor) -> Tensor:
    return torch.where(spread.varied, scaled, 0)


Compare = Callable[[Tensor, Tensor, Tensor], Tensor]
"""From scores_S, groups_S and lengths_S to a value for every episode."""


def compared(episodes: Episodes, compare: Compare) -> Credit:
    """Credit of a group estimator: its value on everything the model wrote, and that of every span on the span."""
    values_S = compare(episodes.rewards_S, episodes.groups_S, episodes.lengths_S)
    return Credit(everywhere(episodes, values_S) + spans(episodes, compare))


def everywhere(episodes: Episodes, values_S: Tensor) -> Tensor:
    """The value of its episode at every position the model wrote."""
    return torch.where(episodes.written_P, values_S[episodes.sequences_P], 0)


def spans(episodes: Episodes, compare: Compare | None = None) -> Tensor:
    """What the spans' scores add, at their positions only: compared among the episodes that have the span.

    Without ``compare`` a score is standardised over the whole step. Lengths are those of the span.
    """
    added_P = torch.zeros(len(episodes.sequences_P), dtype=torch.float64, device=episodes.sequences_P.device)
    for span in episodes.spans:
        covered_P = span.covers_P & episodes.written_P
        lengths_S = torch.zeros_like(span.scores_S, dtype=torch.float64)
        lengths_S = lengths_S.index_add(0, episodes.sequences_P, covered_P.double())
        values_S = among_members(span.scores_S, episodes.groups_S, lengths_S, compare or _over_the_step)
        added_P = added_P + span.weight * torch.where(covered_P, values_S[episodes.sequences_P], 0)
    return added_P


def among_members(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor, compare: Compare) -> Tensor:
    """Compare the episodes that have a score; 0 for those that have none (NaN)."""
    has_S = ~scores_S.isnan()
    values_S = torch.zeros_like(scores_S, dtype=torch.float64)
    values_S[has_S] = compare(scores_S[has_S].double(), groups_S[has_S], lengths_S[has_S])
    return values_S


def _over_the_step(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    return standardise(scores_S)


def discounted(values_P: Tensor, segments_P: Tensor, discount: float) -> Tensor:
    """Σ_k discount^k · x_{p+k} within the segment of p; positions of a segment are neighbours and share a number.

    By doubling: a sum over 2d positions is that over the first d plus discount^d times that over the next d.
    """
    sums_P = values_P.double()
    _, lengths = torch.unique_consecutive(segments_P, return_counts=True)
    longest = int(lengths.max()) if len(lengths) else 0
    reach = 1
    while reach < longest:
        together = segments_P[:-reach] == segments_P[reach:]
        further = torch.where(together, discount**reach * sums_P[reach:], 0)
        sums_P = torch.cat([sums_P[:-reach] + further, sums_P[-reach:]])
        reach *= 2
    return sums_P


def last_of(segments_P: Tensor) -> Tensor:
    """Which positions are the last of their segment."""
    last_P = torch.ones_like(segments_P, dtype=torch.bool)
    last_P[:-1] = segments_P[1:] != segments_P[:-1]
    return last_P


def written_only(episodes: Episodes) -> Episodes:
    """The same episodes without the environment's positions."""
    written_P = episodes.written_P
    return replace(
        episodes,
        sequences_P=episodes.sequences_P[written_P],
        turns_P=episodes.turns_P[written_P],
        written_P=written_P[written_P],
        rewards_P=episodes.rewards_P[written_P],
        values_P=None if episodes.values_P is None else episodes.values_P[written_P],
        spans=tuple(replace(span, covers_P=span.covers_P[written_P]) for span in episodes.spans),
    )


def over_written(episodes: Episodes, estimate: Callable[[Episodes], Credit]) -> Credit:
    """Estimate on the model's tokens; at the environment's, advantages are 0 and targets not asked."""
    credit = estimate(written_only(episodes))
    targets_P = None if credit.targets_P is None else placed(credit.targets_P, episodes.written_P, torch.nan)
    return Credit(placed(credit.advantages_P, episodes.written_P, 0.0), targets_P)


def placed(values_N: Tensor, where_P: Tensor, fill: float) -> Tensor:
    """Values at the chosen positions, ``fill`` at the others."""
    return torch.full(where_P.shape, fill, dtype=torch.float64, device=where_P.device).masked_scatter(where_P, values_N)


# Divided by the group's own std an advantage cannot exceed (n-1)/√n. Divided by the std of the others it could be
# anything: of [1, 0.5, 0.5 + 1e-7] the first is 7 million of the others' stds away. So leave-one-out is held to √n, the
# most that a reward can be away from the mean of the others in units of the whole group's std. Rewards of 0 and 1 never
# get there.


def grpo(episodes: Episodes, *, std: bool = True, leave_one_out: bool = False) -> Credit:
    """``std=False`` does not divide (Dr.GRPO); ``leave_one_out`` takes mean and std over the other members."""
    return compared(episodes, partial(against_group, std=std, leave_one_out=leave_one_out))


def against_group(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor, *, std: bool, leave_one_out: bool) -> Tensor:
    """A group without variance gives exactly 0; where the others' scores do not vary, they are not divided by.

    With ``leave_one_out`` and ``std`` no value is beyond ±√n, n the size of the group.
    """
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = base = groups.moments(scores_KG)
    if leave_one_out:
        itself_GG = torch.eye(scores_KG.shape[1], dtype=torch.bool, device=scores_KG.device)
        base = moments(scores_KG.unsqueeze(1), groups.present_KG.unsqueeze(1) & ~itself_GG)
    values_KG = scores_KG - base.mean
    if std:
        values_KG = torch.where(base.varied, values_KG / (base.std + EPSILON), values_KG)
    if std and leave_one_out:
        bound_K1 = groups.sizes.sqrt()
        values_KG = torch.where(values_KG.isfinite(), values_KG.clamp(-bound_K1, bound_K1), values_KG)
    return groups.back(torch.where(own.varied, values_KG, 0))


def rloo(episodes: Episodes) -> Credit:
    """Every token gets its episode's value; a group without variance gives exactly 0."""
    return compared(episodes, _against_others)


def _against_others(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = groups.moments(scores_KG)
    scale_K1 = groups.sizes / (groups.sizes - 1).clamp(min=1)
    return groups.back(torch.where(own.varied, scale_K1 * (scores_KG - own.mean), 0))


def opo(episodes: Episodes) -> Credit:
    """Lengths are in tokens the model wrote (a span's are its own); a group without variance gives exactly 0."""
    return compared(episodes, _against_weighted_mean)


def _against_weighted_mean(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG, lengths_KG = groups.lay_out(scores_S), groups.lay_out(lengths_S)
    total_K1 = lengths_KG.sum(1, keepdim=True).clamp(min=1)
    baseline_K1 = (lengths_KG * scores_KG).sum(1, keepdim=True) / total_K1
    return groups.back(torch.where(groups.moments(scores_KG).varied, scores_KG - baseline_K1, 0))


def remax(episodes: Episodes) -> Credit:
    """Every token gets its episode's value; exactly 0 where the greedy answer was paid the same."""
    assert episodes.greedy_S is not None, "remax needs greedy rewards"
    rewards_S, greedy_S = episodes.rewards_S, episodes.greedy_S.double()
    values_S = torch.where(differ(rewards_S, greedy_S), rewards_S - greedy_S, 0)
    return Credit(everywhere(episodes, values_S) + spans(episodes))


def gpg(episodes: Episodes) -> Credit:
    """Counts episodes whose reward is not zero, at least one; a group without variance gives exactly 0."""
    return compared(episodes, _against_mean)


def _against_mean(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    scores_KG = groups.lay_out(scores_S)
    own = groups.moments(scores_KG)
    paid = differ(scores_S, torch.zeros_like(scores_S)).double().sum()
    factor = len(scores_S) / paid.clamp(min=1)
    return groups.back(torch.where(own.varied, factor * (scores_KG - own.mean), 0))


def pass_at_k(episodes: Episodes) -> Credit:
    """Everyone else gets exactly 0, and so does a best that is shared."""
    return compared(episodes, _lead_of_best)


def _lead_of_best(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
    groups = grouped(groups_S)
    laid_KG = groups.lay_out(scores_S)
    own = groups.moments(laid_KG)
    scores_KG = torch.where(groups.present_KG, laid_KG, -torch.inf)
    first_K1, best_K1 = scores_KG.max(1, keepdim=True)
    second_K1 = scores_KG.scatter(1, best_K1, -torch.inf).amax(1, keepdim=True)
    leads_K1 = own.varied & differ(first_K1, second_K1)
    lead_K1 = torch.where(leads_K1, (first_K1 - second_K1) / (own.std + EPSILON), 0)
    lead_K1 = torch.where(own.std.isfinite(), lead_K1, torch.nan)  # a reward that is no number is not hidden by a tie
    return groups.back(torch.zeros_like(laid_KG).scatter(1, best_K1, lead_K1))


def gdpo(episodes: Episodes, *, std: bool = True, leave_one_out: bool = False) -> Credit:
    """``std`` and ``leave_one_out`` as in GRPO. A group in which no term varies, or all cancel, gives exactly 0."""
    compare = partial(against_group, std=std, leave_one_out=leave_one_out)

    def compare_span(scores_S: Tensor, groups_S: Tensor, lengths_S: Tensor) -> Tensor:
        return torch.where(varied(scores_S, groups_S), standardise(compare(scores_S, groups_S, lengths_S)), 0)

    groups_S, lengths_S = episodes.groups_S, episodes.lengths_S
    summed_S = torch.zeros_like(lengths_S)
    for term in episodes.terms:
        summed_S = summed_S + term.weight * among_members(term.scores_S, groups_S, lengths_S, compare)
    # standardising shifts by the step's mean, which would pay a group that has nothing to compare
    values_S = torch.where(varied(summed_S, groups_S), standardise(summed_S), 0)
    return Credit(everywhere(episodes, values_S) + spans(episodes, compare_span))


def reinforce_plus_plus(episodes: Episodes, *, gamma: float) -> Credit:
    """Each token gets what was paid from it on, discounted token by token."""
    return over_written(episodes, partial(_returns, gamma=gamma))


def reinforce_plus_plus_baseline(episodes: Episodes) -> Credit:
    """R - mean of the group on every token, whitened likewise; a group without variance gives exactly 0."""
    rewards_S, groups_S, written_P = episodes.rewards_S, episodes.groups_S, episodes.written_P
    values_S = against_group(rewards_S, groups_S, episodes.lengths_S, std=False, leave_one_out=False)
    sequences_N = episodes.sequences_P[written_P]
    # whitening shifts by the tokens' mean, which would pay a group that has nothing to compare
    whitened_N = torch.where(varied(rewards_S, groups_S)[sequences_N], whiten(values_S[sequences_N]), 0)
    return Credit(placed(whitened_N, written_P, 0.0) + spans(episodes))


def _returns(episodes: Episodes, *, gamma: float) -> Credit:
    return Credit(whiten(discounted(episodes.rewards_P, episodes.sequences_P, gamma)) + spans(episodes))


# δ_t = r_t + γ·V_{t+1} - V_t and A_t = Σ_k (γλ)^k·δ_{t+k}; targets are A + V. A is whitened over what the model wrote.


def gae(episodes: Episodes, *, gamma: float, lam: float) -> Credit:
    """After the last position V is 0, or the value of the whole where the episode was truncated."""
    values_P, after_S = values_of(episodes)
    raw_P = generalised(episodes.rewards_P, values_P, episodes.sequences_P, after_S, gamma=gamma, lam=lam)
    whitened_P = placed(whiten(raw_P[episodes.written_P]), episodes.written_P, 0.0)
    return Credit(whitened_P + spans(episodes), raw_P + values_P)


def values_of(episodes: Episodes) -> tuple[Tensor, Tensor]:
    """The critic's values at all positions, and after every episode's last: 0 where it ended by itself."""
    assert episodes.values_P is not None, "this estimator needs a critic's values"
    assert episodes.after_S is not None, "this estimator needs a critic's values"
    return episodes.values_P.double(), torch.where(episodes.truncated_S, episodes.after_S.double(), 0)


def generalised(
    rewards_N: Tensor, values_N: Tensor, sequences_N: Tensor, after_S: Tensor, *, gamma: float, lam: float
) -> Tensor:
    """A over a list of positions, each followed by the next of its episode and the last by ``after_S``."""
    next_N = torch.where(last_of(sequences_N), after_S[sequences_N], values_N.roll(-1))
    return discounted(rewards_N.double() + gamma * next_N - values_N, sequences_N, gamma * lam)


def masked_gae(episodes: Episodes, *, gamma: float, lam: float) -> Credit:
    """As ``gae``, with the environment's positions left out of δ, discounts and targets."""
    return over_written(episodes, partial(gae, gamma=gamma, lam=lam))


# With e_t the last token of turn t: δ_t = r_t + Γ·V[e_{t+1}] - V[e_t], A_t = δ_t + Γ·λ_turn·A_{t+1}, r_t all that the
# turn's tokens were paid. A is whitened over turns; the critic's targets A_t + V[e_t] are asked at turn ends only.


def turn_wise_gae(episodes: Episodes, *, turn_gamma: float, turn_lam: float) -> Credit:
    """After the last turn V is 0, or the value of the whole where the episode was truncated."""
    return over_written(episodes, partial(_turn_wise, turn_gamma=turn_gamma, turn_lam=turn_lam))


def _turn_wise(episodes: Episodes, *, turn_gamma: float, turn_lam: float) -> Credit:
    values_P, after_S = values_of(episodes)
    ends_P = last_of(episodes.turns_P)
    _, turns_P = torch.unique_consecutive(episodes.turns_P, return_inverse=True)
    values_T, sequences_T = values_P[ends_P], episodes.sequences_P[ends_P]
    rewards_T = torch.zeros_like(values_T).index_add(0, turns_P, episodes.rewards_P.double())
    raw_T = generalised(rewards_T, values_T, sequences_T, after_S, gamma=turn_gamma, lam=turn_lam)
    return Credit(whiten(raw_T)[turns_P] + spans(episodes), placed(raw_T + values_T, ends_P, torch.nan))


# With e_t the last token of turn t: δ_t = r[e_t] + Γ·V[e_{t+1}] - V[e_t] and A_t = δ_t + Γ·λ_turn·A_{t+1}; the last
# token of the turn is paid A_t + V[e_t], so its own δ is A_t. Before it δ_p = r_p + γ·V_{p+1} - V_p and A_p = δ_p +
# γλ·A_{p+1}.


def bi_level_gae(episodes: Episodes, *, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> Credit:
    """Whitened over what the model wrote; targets are A + V before whitening. Truncated episodes go on in ``after_S``."""

    def whitened(written: Episodes) -> Credit:
        raw_P = unwhitened(written, gamma=gamma, lam=lam, turn_gamma=turn_gamma, turn_lam=turn_lam)
        return Credit(whiten(raw_P) + spans(written), raw_P + values_of(written)[0])

    return over_written(episodes, whitened)


def unwhitened(episodes: Episodes, *, gamma: float, lam: float, turn_gamma: float, turn_lam: float) -> Tensor:
    """A as the two levels give it, for episodes without the environment's positions; exactly A_t at a turn's end."""
    values_P, after_S = values_of(episodes)
    rewards_P, turns_P = episodes.rewards_P.double(), episodes.turns_P
    ends_P = last_of(turns_P)
    sequences_T = episodes.sequences_P[ends_P]
    turn_level_T = generalised(rewards_P[ends_P], values_P[ends_P], sequences_T, after_S, gamma=turn_gamma, lam=turn_lam)
    inside_P = rewards_P + gamma * values_P.roll(-1) - values_P
    return discounted(inside_P.masked_scatter(ends_P, turn_level_T), turns_P, gamma * lam)


# In a group, those with the largest ``correct_S`` are the best answers. If they are not wrong (at least 0), the
# advantages of those among them that were paid more than 0 are raised to at least 0. Answers of unknown correctness
# (NaN) stand outside.


def optimize_threshold(episodes: Episodes, credit: Credit) -> Credit:
    """The same credit with every negative advantage of a group's best and paid answers at 0."""
    assert episodes.correct_S is not None, "optimize_threshold needs to know which answers are correct"
    groups = grouped(episodes.groups_S)
    correct_S = torch.where(episodes.correct_S.isnan(), -torch.inf, episodes.correct_S.double())
    laid_KG = torch.where(groups.present_KG, groups.lay_out(correct_S), -torch.inf)
    best_S = groups.back(laid_KG.amax(1, keepdim=True))
    good_S = (best_S >= 0) & (correct_S == best_S) & (episodes.rewards_S > NOISE)
    raised_P = credit.advantages_P.clamp(min=0)
    return replace(credit, advantages_P=torch.where(good_S[episodes.sequences_P], raised_P, credit.advantages_P))
