"""A decode step as two functions of tensors: feed every row a token, then sample the next and advance the rows.

A small model on the CPU spends most of a step between the operations, not in them. Three ways to run these functions there:

    compiled    in C (see ``compiled_step``), from the first step on, several a call: small float32 models of known layers
    recorded    the same operations on the weights of the moment, bit for bit (see ``recording``), after some steps
    plain       the functions as they stand here, on which the other two are tried before they are used

Which of them a run takes depends on its model and options, and on whether the machine has a C compiler: not on timings. The
compiled way gives other last bits than the other two, so a run that goes on after a break must take the one it took before.
"""

import warnings
from collections.abc import Callable, Sequence
from functools import partial

import torch
from torch import Tensor, nn

from sensorium.compiled.library import NoLibrary
from sensorium.engines.native.compiled_step import CompiledStep
from sensorium.engines.native.kv_cache import CachedAttention
from sensorium.engines.native.lean_feed import RotaryTable, lean_feed
from sensorium.engines.native.recording import CannotRecord, Inputs, Recording, record
from sensorium.engines.native.response_rows import Batch
from sensorium.engines.native.sampler import SamplingRows, sample
from sensorium.engines.native.step_trials import draws_differ, feed_trial, feeds_differ, writes_differ
from sensorium.models.fast_paths import note_fallback, without_compiled_parts
from sensorium.models.layer_parts import UnknownLayer
from sensorium.models.policy import Policy

RECORD_AFTER = 32
"""Steps before a recording is made: it takes as long as they do without one, so a short run never pays for it."""
FED = 5
"""How many tensors ``feed`` takes."""


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
    """Runs ``feed`` and ``draw``: on the CPU from recordings if ``record``, and compiled where ``compile`` is true as well.

    ``refusal`` says why ``feed`` could not be recorded, once that was tried.
    """

    def __init__(self, policy: Policy, record: bool, compile: bool = True) -> None:
        self.refusal: str | None = None
        self.noted: Callable[[str], None] = _warn
        self._policy = policy
        self._record = record and policy.device.type == "cpu"
        self._compile = self._record and compile
        self._compiled: CompiledStep | None = None
        self._fed = 0
        self._feed: Recording | None = None
        self._table: RotaryTable | None = None
        self._draws: dict[tuple[bool, ...], tuple[int, Recording | None]] = {}

    def write(self, batch: Batch, most: int) -> Tensor:
        """Feed and draw, up to ``most`` times where one call does that; what was drawn, as [T, 3, B].

        Rows that come to a stop id go on, and what they then draw means nothing.
        """
        if not self._compiles(batch.block):
            return self.draw(batch, self.feed(batch))[None]
        assert self._compiled is not None
        uniforms_TB = batch.take_uniforms(min(most, self._compiled.steps_of_a_call(len(batch.tokens_B))))
        packed_T3B = self._compiled.write(batch.sampling, batch.block, uniforms_TB, batch.stops_B, *batch.drawn())
        batch.reach += len(packed_T3B)
        return packed_T3B

    def feed(self, batch: Batch) -> Tensor:
        """The logits after every row's last token, until the next call."""
        if self._compiles(batch.block):
            assert self._compiled is not None
            return self._compiled.feed(*batch.fed())
        self._fed += 1
        if self._record and self._fed == RECORD_AFTER:
            self._record_feed(batch.block)
        if self._feed is None:
            return feed(self._policy, *batch.fed())
        return self._feed(*self._given(batch))

    def _given(self, batch: Batch) -> Inputs:
        """What the recording of ``feed`` takes."""
        inputs = batch.fed()
        return inputs if self._table is None else (*inputs, self._table.upto(int(inputs[1].max())))

    def draw(self, batch: Batch, logits_BV: Tensor) -> Tensor:
        """Sample the next tokens, with their log-probs [3, B], and advance the batch."""
        if self._compiles(batch.block):
            assert self._compiled is not None
            packed_3B = self._compiled.draw(batch.sampling, logits_BV, batch.take_uniforms()[0], *batch.drawn())
            batch.reach += 1
            return packed_3B
        given = batch.sampling.tensors()
        variant = tuple(tensor is None for tensor in given)
        calls, recorded = self._draws.get(variant, (0, None))
        present = tuple(tensor for tensor in given if tensor is not None)
        inputs = (logits_BV, batch.take_uniforms()[0], *batch.drawn())

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
        """The weights changed. In place or replaced is fine; modules that came or went are compiled or recorded anew."""
        if self._compiled is not None and not self._compiled.refresh():
            self._compiled = None
        if self._feed is not None and not self._feed.state.is_of(self._modules):
            self._feed, self._fed = None, 0

    @property
    def _modules(self) -> Sequence[nn.Module]:
        """The parts that a decode step computes with."""
        return self._policy.adapter.language_model, self._policy.adapter.head

    def _compiles(self, block: Tensor) -> bool:
        """Whether steps run compiled: settled at the first one."""
        if self._compile and self._compiled is None:
            self._compiled = self._tried(block)
            self._compile = self._compiled is not None
        return self._compile

    def _tried(self, block: Tensor) -> CompiledStep | None:
        """The compiled step, if there is one for this model and it gives what ``feed`` and ``draw`` give."""
        try:
            compiled = CompiledStep(self._policy)
            reason = feeds_differ(partial(feed, self._policy), compiled.feed, block, self._policy.vocab_size)
            reason = reason or draws_differ(draw, compiled.draw, block, self._policy.vocab_size)
            one_by_one = (compiled.feed, compiled.draw)
            reason = reason or writes_differ(*one_by_one, compiled.write, block, self._policy.vocab_size)
            if not reason:
                return compiled
        except UnknownLayer:
            return None  # as architecture.md says, only small models of known parts are compiled
        except NoLibrary as error:
            without_compiled_parts(str(error))
            return None
        except Exception as error:  # layers that look known and are not are a reason to be slower, not to stop
            reason = str(error)
        note = (
            f"sampling on the CPU runs without its compiled decode step, so this small model is sampled more slowly, up to "
            f"three times: {reason}. To leave it out without this note, set rollout.engine.options.compile: false."
        )
        note_fallback(note)
        self.noted(note)
        return None

    def _record_feed(self, block: Tensor) -> None:
        """A recording of ``feed``, in fewer operations where the layers are known, if it gives the same as ``feed``."""

        def plain(*tensors: Tensor) -> Tensor:
            return feed(self._policy, *tensors[:FED])

        trials = [feed_trial(block, rows, reach) for rows, reach in ((2, 3), (3, 5), (1, 2), (32, 9))]
        wrong = ""
        try:
            table = RotaryTable(self._policy)
            longer = [(*trial, table.upto(int(trial[1].max()))) for trial in trials]
            self._feed = record(partial(lean_feed, self._policy), longer, self._modules, plain)
            self._table, self.refusal = table, None
            return
        except UnknownLayer:
            pass  # as architecture.md says, only layers of known parts are taken apart
        except Exception as error:  # layers that look known and are not are a reason to be slower, not to stop
            wrong = str(error)
        try:
            self._feed, self._table, self.refusal = record(plain, trials, self._modules), None, None
            if wrong:
                self.noted(f"the decode step is recorded as the stock layers compute it, in more operations: {wrong}.")
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


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
