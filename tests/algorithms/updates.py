"""Updates to test losses on: ragged sequences of sampled tokens, drawn by hypothesis, and cut into micro-batches."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from random import Random

import torch
from hypothesis import strategies as st
from torch import Tensor

from sensorium.algorithms.losses import TokenLoss, Tokens, UpdateTokens, sequence_weights

ranges = st.floats(0.05, 0.5)
"""Clip ranges; none so narrow that every token sits on an edge."""


@dataclass(frozen=True)
class Token:
    """A sampled token as plain numbers."""

    logp: float
    old: float
    advantage: float
    uniform: float

    @property
    def gap(self) -> float:
        """The log-ratio."""
        return self.logp - self.old


Update = list[list[Token]]


def updates(*, shared: bool = False) -> st.SearchStrategy[Update]:
    """Sequences of 0 to 6 tokens, near and far from their old log-probs; ``shared``: one advantage a sequence.

    Lengths and a seed are drawn, not each number: that took most of the time of the tests of losses.
    """
    lengths = st.lists(st.integers(0, 6), min_size=1, max_size=6).filter(any)
    return st.builds(lambda lengths, seed: _update(lengths, Random(seed), shared), lengths, st.integers(0, 2**32))


def _update(lengths: Sequence[int], random: Random, shared: bool) -> Update:
    def advantage() -> float:
        return random.choice((0.0, round(random.uniform(-3, 3), 3)))

    def token(credit: float) -> Token:
        logp = random.choice((random.uniform(-1, 0), random.uniform(-8, 0)))
        gap = random.choice((0.0, random.uniform(-0.7, 0.7), random.uniform(-6, 6)))
        return Token(logp, logp - gap, credit, random.uniform(0, 0.999))

    credits = [[advantage()] * length if shared else [advantage() for _ in range(length)] for length in lengths]
    return [[token(credit) for credit in sequence] for sequence in credits]


def flat(update: Update) -> list[Token]:
    """The tokens in canonical order."""
    return [token for sequence in update for token in sequence]


def counts(update: Update) -> Tensor:
    """How many tokens every sequence has."""
    return torch.tensor([len(sequence) for sequence in update])


def whole(update: Update, dtype: torch.dtype = torch.float64) -> Tokens:
    """The whole update as one batch of tokens, with everything a loss may ask for."""
    rows = [(t.logp, t.old, t.advantage, t.uniform) for t in flat(update)]
    logprobs_N, old_N, advantages_N, uniforms_N = torch.tensor(rows, dtype=dtype).T.contiguous()
    counts_S = counts(update)
    sequences_N = torch.repeat_interleave(counts_S)
    known = UpdateTokens(logprobs_N.clone(), old_N, advantages_N, sequences_N, counts_S, uniforms_N)
    return Tokens(logprobs_N.requires_grad_(), old_N, advantages_N, sequences_N, torch.arange(len(rows)), known)


def part(tokens: Tokens, places_M: Tensor, over: str) -> Tokens:
    """Some tokens of an update as a micro-batch that knows no more of it than ``over`` asks for."""
    update = tokens.update
    assert update is not None
    given: tuple[Tensor | None, UpdateTokens | None] = (None, None)
    if over == "update":
        given = (places_M, update)
    elif over == "sequence":
        present_U = torch.isin(update.sequences_U, tokens.sequences_N[places_M])
        own = UpdateTokens(
            update.logprobs_U[present_U],
            update.old_U[present_U],
            update.advantages_U[present_U],
            update.sequences_U[present_U],
            update.counts_S,
            update.uniforms_U[present_U],
        )
        given = (present_U.cumsum(0)[places_M] - 1, own)
    columns = (tokens.logprobs_N, tokens.old_N, tokens.advantages_N, tokens.sequences_N)
    return Tokens(*(column_N[places_M] for column_N in columns), *given)


def cuts(number: int, random: Random) -> list[Tensor]:
    """The places of so many tokens, shuffled and cut into parts."""
    places = list(range(number))
    random.shuffle(places)
    edges = sorted(random.randrange(number + 1) for _ in range(random.randrange(4)))
    bounds = zip([0, *edges], [*edges, number], strict=True)
    return [torch.tensor(places[start:end], dtype=torch.long) for start, end in bounds if start < end]


def slopes(out: TokenLoss, tokens: Tokens) -> Tensor:
    """The derivative of the tokens' summed loss by their log-probs."""
    return torch.autograd.grad(out.loss_N.sum(), tokens.logprobs_N)[0]


def per_sequence(update: Update, values_N: Tensor) -> Tensor:
    """Token values as they count under sequence_mean_token_mean, in float64."""
    return values_N * sequence_weights("sequence_mean_token_mean", counts(update))[torch.repeat_interleave(counts(update))]


def differences(function: Callable[[Sequence[float]], float], at: Sequence[float], step: float = 1e-5) -> list[float]:
    """Central finite differences of a plain function."""
    out = []
    for i in range(len(at)):
        up, down = list(at), list(at)
        up[i] += step
        down[i] -= step
        out.append((function(up) - function(down)) / (2 * step))
    return out


def ratio(token: Token) -> float:
    """New over old probability."""
    return math.exp(token.gap)
