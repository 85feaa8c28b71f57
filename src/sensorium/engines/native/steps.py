"""A step of decoding as two functions of tensors: feed every row a token, then draw the next and move on.

Nothing in them reads a tensor's value, so they can be recorded and run without Python between the operations. On the CPU,
where a small model spends most of a step in Python, a recording is a TorchScript trace: the same operations on the same
parameters, bit for bit. It is held against the functions on other shapes before it is trusted.
"""

import math
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor

from sensorium.engines.native.cache import CachedAttention
from sensorium.engines.native.randomness import uniforms
from sensorium.engines.native.rows import Batch
from sensorium.engines.native.sampler import SamplingRows, sample
from sensorium.models.policy import Policy

RECORD_AFTER = 8  # steps before a recording is worth its while


def feed(
    policy: Policy, tokens_B: Tensor, positions_B: Tensor, block: Tensor, write_N: Tensor, bias_B11S: Tensor
) -> Tensor:
    """Feed one token per row, its keys and values to the cache; the logits of the next."""
    attention = CachedAttention(block, write_N, bias_B11S)
    hidden_B1H = policy.language(tokens_B[:, None], positions_B[None, :, None].expand(3, -1, 1), attention)
    return policy.logits(hidden_B1H[:, -1])


def draw(
    sampling: SamplingRows,
    logits_BV: Tensor,
    keys_B: Tensor,
    tokens_B: Tensor,
    positions_B: Tensor,
    counts_B: Tensor,
    write_N: Tensor,
    see_B: Tensor,
    bias_B11S: Tensor,
) -> Tensor:
    """Draw the next tokens and move the rows on to them, in place. Tokens, log-probs and sampled log-probs, as [3, B]."""
    drawn = sample(logits_BV, sampling, uniforms(keys_B, counts_B))
    tokens_B.copy_(drawn.tokens_B)
    positions_B.add_(1)
    counts_B.add_(1)
    write_N.add_(1)
    see_B.add_(1)
    bias_B11S.view(-1).index_fill_(0, see_B, 0.0)
    return torch.stack((drawn.tokens_B.double(), drawn.logprobs_B, drawn.sampled_logprobs_B))


class Steps:
    """Runs ``feed`` and ``draw``, from recordings where they pay: on the CPU, after some steps."""

    def __init__(self, policy: Policy, record: bool) -> None:
        self._policy = policy
        self._record = record and policy.device.type == "cpu"
        self._fed = 0
        self._feed: Callable[..., Tensor] | None = None
        self._parameters: list[int] = []
        self._draws: dict[tuple[bool, ...], tuple[int, Callable[..., Tensor] | None]] = {}

    def feed(self, batch: Batch) -> Tensor:
        """The logits after every row's last token."""
        self._fed += 1
        if self._record and self._fed == RECORD_AFTER:
            self._feed = self._recorded_feed(batch)
        if self._feed is not None:
            return self._feed(*batch.fed())
        return feed(self._policy, *batch.fed())

    def draw(self, batch: Batch, logits_BV: Tensor) -> Tensor:
        """The next tokens with their log-probs [3, B]; the batch moves on."""
        given, make = batch.sampling.parts()
        variant = tuple(part is None for part in given)
        calls, recorded = self._draws.get(variant, (0, None))
        parts = tuple(part for part in given if part is not None)
        inputs = (logits_BV, *batch.drawn())

        def plain(*tensors: Tensor) -> Tensor:
            rest = iter(tensors[len(inputs) :])
            return draw(make([None if absent else next(rest) for absent in variant]), *tensors[: len(inputs)])

        if self._record and calls == RECORD_AFTER:
            recorded = _trace(plain, tuple(tensor.clone() for tensor in (*inputs, *parts)))
        self._draws[variant] = (calls + 1, recorded)
        packed_3B = (recorded or plain)(*inputs, *parts)
        batch.reach += 1
        return packed_3B

    def refresh(self) -> None:
        """The weights changed. In place is fine; a parameter that was replaced needs a new recording."""
        if self._feed is not None and self._parameters != _identities(self._policy):
            self._feed, self._fed = None, 0

    def _recorded_feed(self, batch: Batch) -> Callable[..., Tensor] | None:
        """A recording of ``feed``, if it gives the same as ``feed`` for batches of other sizes."""

        def plain(*tensors: Tensor) -> Tensor:
            return feed(self._policy, *tensors)

        with _constant(self._policy.model):
            recorded = _trace(plain, _trial(batch.block, 2, 3))
            for trial in (_trial(batch.block, 3, 5), _trial(batch.block, 1, 2)):
                if recorded is None or not torch.equal(plain(*trial), recorded(*trial)):
                    return None
        self._parameters = _identities(self._policy)
        return recorded


def _trial(block: Tensor, rows: int, reach: int) -> tuple[Tensor, ...]:
    """Inputs of ``feed`` for so many rows, with a small cache of their own."""
    layers, two, _, kv_heads, _, size = block.shape
    shape = (layers, two, rows, kv_heads, reach, size)
    small = torch.linspace(-1, 1, math.prod(shape), dtype=block.dtype).view(shape)
    tokens_B, positions_B = torch.arange(rows) + 7 * rows, torch.arange(rows) + reach
    write_N = torch.arange(rows * kv_heads) * reach + reach - 1
    return tokens_B, positions_B, small, write_N, block.new_zeros(rows, 1, 1, reach)


def _trace(function: Callable[..., Tensor], inputs: tuple[Tensor, ...]) -> Callable[..., Tensor] | None:
    """A trace, or None where the model cannot be traced (then the function itself is run)."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            traced: Callable[..., Tensor] = torch.jit.trace(function, inputs, check_trace=False)
            return traced
        except RuntimeError:
            return None


@contextmanager
def _constant(model: Any) -> Iterator[None]:
    """Parameters that a trace may hold as constants: it refuses those that want gradients."""
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        for parameter in learning:
            parameter.requires_grad_(False)
        yield
    finally:
        for parameter in learning:
            parameter.requires_grad_(True)


def _identities(policy: Policy) -> list[int]:
    return [id(parameter) for parameter in policy.model.parameters()]
