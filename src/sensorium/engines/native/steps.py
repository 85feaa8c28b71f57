"""A decode step as two functions of tensors: feed every row a token, then sample the next and advance the rows.

A small model on the CPU spends most of a step between the operations, not in them. So there are two forms there:

    plain       the functions as they stand here: the reference
    recorded    the same operations on the weights of the moment, bit for bit (see ``recording``), after some steps
"""

import math
import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sensorium.engines.native.kv_cache import CachedAttention
from sensorium.engines.native.recording import CannotRecord, Inputs, Recording, record
from sensorium.engines.native.response_rows import Batch
from sensorium.engines.native.sampler import SamplingRows, sample
from sensorium.models.policy import Policy

RECORD_AFTER = 32
"""Steps before a recording is made: it takes as long as they do without one, so a short run never pays for it."""


def feed(
    policy: Policy, tokens_B: Tensor, positions_B: Tensor, block: Tensor, write_N: Tensor, bias_B11S: Tensor
) -> Tensor:
    """Feed one token per row, its keys and values to the cache; the logits of the next."""
    attention = CachedAttention(block, write_N, bias_B11S)
    positions_3B1 = positions_B[None, :, None].expand(3, -1, 1)
    hidden_B1H = policy.language(tokens_B[:, None], positions_3B1, attention, stock=policy.matched is None)
    return policy.logits(hidden_B1H[:, -1])


def draw(
    sampling: SamplingRows,
    logits_BV: Tensor,
    uniforms_B: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    write_N: Tensor,
    see_B: Tensor,
    bias_B11S: Tensor,
) -> Tensor:
    """Sample the next tokens and advance the rows in place. Returns tokens, log-probs and sampled log-probs as [3, B]."""
    drawn = sample(logits_BV, sampling, uniforms_B)
    tokens_B.copy_(drawn.tokens_B)
    positions_B.add_(1)
    write_N.add_(1)
    see_B.add_(1)
    bias_B11S.view(-1).index_fill_(0, see_B, 0.0)
    return torch.stack((drawn.tokens_B.double(), drawn.logprobs_B, drawn.sampled_logprobs_B))


class Steps:
    """Runs ``feed`` and ``draw``, on the CPU from recordings if ``record``.

    ``refusal`` says why ``feed`` could not be recorded, once that was tried.
    """

    def __init__(self, policy: Policy, record: bool) -> None:
        self.refusal: str | None = None
        self.noted: Callable[[str], None] = _warn
        self._policy = policy
        self._record = record and policy.device.type == "cpu"
        self._fed = 0
        self._feed: Recording | None = None
        self._draws: dict[tuple[bool, ...], tuple[int, Recording | None]] = {}

    def feed(self, batch: Batch) -> Tensor:
        """The logits after every row's last token, until the next call."""
        self._fed += 1
        if self._record and self._fed == RECORD_AFTER:
            self._record_feed(batch.block)
        if self._feed is None:
            return feed(self._policy, *batch.fed())
        return self._feed(*batch.fed())

    def draw(self, batch: Batch, logits_BV: Tensor) -> Tensor:
        """Sample the next tokens, with their log-probs [3, B], and advance the batch."""
        given = batch.sampling.tensors()
        variant = tuple(tensor is None for tensor in given)
        calls, recorded = self._draws.get(variant, (0, None))
        present = tuple(tensor for tensor in given if tensor is not None)
        inputs = (logits_BV, batch.next_uniforms(), *batch.drawn())

        def plain(*tensors: Tensor) -> Tensor:
            rest = iter(tensors[len(inputs) :])
            sampling = SamplingRows(*(None if absent else next(rest) for absent in variant))  # type: ignore[arg-type]
            return draw(sampling, *tensors[: len(inputs)])

        if self._record and calls == RECORD_AFTER:
            recorded = self._record_draw(plain, (*inputs, *present))
        self._draws[variant] = (calls + 1, recorded)
        packed_3B = (recorded or plain)(*inputs, *present)
        batch.reach += 1
        return packed_3B

    def refresh(self) -> None:
        """The weights changed. In place or replaced is fine; after modules came or went a step is recorded again."""
        if self._feed is not None and not self._feed.state.is_of(self._modules):
            self._feed, self._fed = None, 0

    @property
    def _modules(self) -> Sequence[nn.Module]:
        """The parts that a decode step computes with."""
        return self._policy.adapter.language_model, self._policy.adapter.head

    def _record_feed(self, block: Tensor) -> None:
        """A recording of ``feed``, if it can be recorded."""
        trials = [feed_trial(block, rows, reach) for rows, reach in ((2, 3), (3, 5), (1, 2), (32, 9))]
        try:
            self._feed, self.refusal = record(partial(feed, self._policy), trials, self._modules), None
        except CannotRecord as error:
            self.refusal = str(error)
            self.noted(
                f"sampling on the CPU runs without a recording of its decode step, so this {self._policy.family} model is "
                f"sampled more slowly; the numbers are the same. The step cannot be recorded because {error}."
            )

    def _record_draw(self, plain: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Recording | None:
        try:
            return record(plain, [inputs])
        except CannotRecord as error:
            self.noted(f"drawing tokens runs without a recording, more slowly: {error}.")
            return None


def feed_trial(block: Tensor, rows: int, reach: int) -> Inputs:
    """Inputs of ``feed`` for so many rows, with a small cache of their own."""
    layers, two, _, kv_heads, _, size = block.shape
    shape = (layers, two, rows, kv_heads, reach, size)
    small = torch.linspace(-1, 1, math.prod(shape), dtype=block.dtype).view(shape)
    tokens_B, positions_B = torch.arange(rows) + 7 * (rows % 32), torch.arange(rows) + reach
    write_N = torch.arange(rows * kv_heads) * reach + reach - 1
    return tokens_B, positions_B, small, write_N, block.new_zeros(rows, 1, 1, reach)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
