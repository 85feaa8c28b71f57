"""A decode step as two functions of tensors (feed a token, sample the next), and recordings of them on the CPU."""

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from sensorium.engines.native.key_values import CachedAttention, DeltaRows, RowStates, layer_places
from sensorium.engines.native.prefix_cache import recording_routes
from sensorium.engines.native.response_rows import Batch
from sensorium.engines.native.sampler import SamplingRows, sample
from sensorium.models.policy import Policy

# A recording is a TorchScript trace. A trace keeps a tensor that is not among its inputs as a constant, and merges
# constants that are equal at that moment. Traced with a = b = 0 as constants, x·a + x·b·10 uses one tensor for both:
# after b += 1 it still gives 0. So a recording has no such constants: f computes with the weights a and b of a module,
# and is recorded: r = record(f, [(x,)], [module]) what is traced takes the weights as inputs: trace(a, b, x) every call
# reads them from the module as they are by then: r(x) = trace(module.a, module.b, x) What cannot be recorded is refused
# with a reason: a function that uses a tensor from elsewhere (it would be a constant), one that reads a tensor's value
# (another value might take another way), and one whose recording gives other bits.


TensorFunction = Callable[..., Tensor]
Inputs = tuple[Tensor, ...]


class CannotRecord(Exception):
    """Why a function is not recorded; it is then run as it is, with the same result."""


class ModuleState:
    """The parameters and buffers of modules by the places that hold them, so that replaced ones are seen too."""

    def __init__(self, modules: Iterable[nn.Module]) -> None:
        self._places = _places(modules)
        self._pointers: list[int] = []
        self._tensors: list[Tensor] = []

    def __len__(self) -> int:
        return len(self._places)

    def held(self) -> list[Tensor]:
        """What the places hold now."""
        return [store[name] for store, name in self._places]

    def tensors(self) -> list[Tensor]:
        """What the places hold now: the same memory, without gradient."""
        held = self.held()
        pointers = [tensor.data_ptr() for tensor in held]
        if pointers != self._pointers:
            self._pointers, self._tensors = pointers, [tensor.detach() for tensor in held]
        return self._tensors

    @contextmanager
    def holding(self, tensors: Sequence[Tensor]) -> Iterator[None]:
        kept = [store[name] for store, name in self._places]
        try:
            for (store, name), tensor in zip(self._places, tensors, strict=True):
                store[name] = tensor
            yield
        finally:
            for (store, name), tensor in zip(self._places, kept, strict=True):
                store[name] = tensor

    def is_of(self, modules: Iterable[nn.Module]) -> bool:
        """True if the modules still consist of these places: none was added, taken out or exchanged."""
        now = _places(modules)
        return len(now) == len(self._places) and all(
            store is other and name == known for (store, name), (other, known) in zip(now, self._places, strict=True)
        )


def _places(modules: Iterable[nn.Module]) -> list[tuple[dict[str, Any], str]]:
    stores = [store for root in modules for part in root.modules() for store in (part._parameters, part._buffers)]
    return [(store, name) for store in stores for name, tensor in store.items() if tensor is not None]


class Recording:
    """A recorded function; it computes with what the modules hold at the time of the call."""

    def __init__(self, trace: TensorFunction, state: ModuleState) -> None:
        self._trace, self.state = trace, state

    def __call__(self, *inputs: Tensor) -> Tensor:
        return self._trace(*self.state.tensors(), *inputs)


@torch.no_grad()
def record(function: TensorFunction, trials: Sequence[Inputs], modules: Iterable[nn.Module] = ()) -> Recording:
    """Record a function on the first trial, and hold the recording against it on all. Raises CannotRecord."""
    state = ModuleState(modules)
    count = len(state)

    def explicit(*tensors: Tensor) -> Tensor:
        with state.holding(tensors[:count]):
            return function(*tensors[count:])

    given = (*state.tensors(), *_copies(trials[0]))
    with _Provenance(given):
        explicit(*given)
    recording = Recording(_traced(explicit, (*state.tensors(), *_copies(trials[0]))), state)
    for trial in (*trials, trials[0]):
        if not _agree(function, recording, trial):
            raise CannotRecord("its recording gives other numbers for batches of other sizes")
    return recording


def _traced(function: TensorFunction, inputs: Inputs) -> TensorFunction:
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            traced: TensorFunction = torch.jit.trace(function, inputs, check_trace=False)
        except RuntimeError as error:
            raise CannotRecord(f"torch.jit.trace refuses it ({str(error).strip().splitlines()[0]})") from error
    for warning in told:
        if any(f"Converting a tensor to a {kind}" in str(warning.message) for kind in ("NumPy array", "Python list")):
            raise CannotRecord(f"it reads the values of a tensor ({warning.filename}:{warning.lineno})")
    return traced


def _agree(function: TensorFunction, recording: Recording, trial: Inputs) -> bool:
    """True if both return the same bits, and leave the same bits in their inputs."""
    ours, theirs = _copies(trial), _copies(trial)
    results = zip((function(*ours), *ours), (recording(*theirs), *theirs), strict=True)
    return all(torch.equal(one, other) for one, other in results)


def _copies(inputs: Inputs) -> Inputs:
    return tuple(tensor.clone() for tensor in inputs)


class _Provenance(TorchDispatchMode):
    """Refuses operations that read values, and tensors that are neither given nor made on the way."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__()
        self._known = {id(tensor): tensor for tensor in given}  # kept alive, so that no other tensor gets its id

    def __torch_dispatch__(self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None) -> Any:
        if _reads_values(func, args):
            raise CannotRecord(f"it reads the value of a tensor ({func})")
        if not func.name().startswith("aten::lift_fresh"):  # which brings in a number written in the code
            for tensor in _tensors_in((*args, *(kwargs or {}).values())):
                if id(tensor) not in self._known:
                    raise CannotRecord(
                        f"it uses a tensor of shape {tuple(tensor.shape)} that is no parameter, buffer or input ({func})"
                    )
        result = func(*args, **(kwargs or {}))
        self._known |= {id(tensor): tensor for tensor in _tensors_in((result,))}
        return result


def _reads_values(func: Any, args: tuple[Any, ...]) -> bool:
    """True if Python may learn a tensor's value from the operation: as a number, or from the shape of the result."""
    if func is torch.ops.aten.index.Tensor:  # by places its shape is theirs; by a mask it depends on the mask
        return any(index.dtype in (torch.bool, torch.uint8) for index in _tensors_in(args[1]))
    return bool({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(func.tags))


def _tensors_in(values: Iterable[Any]) -> Iterator[Tensor]:
    for value in values:
        if isinstance(value, Tensor):
            yield value
        elif isinstance(value, list | tuple):
            yield from _tensors_in(value)


# A small model on the CPU spends most of a step between the operations, not in them. So there are two forms there:
# plain the functions as they stand here: the reference recorded the same operations on the weights of the moment, bit
# for bit (see ``recording``), after some steps


RECORD_AFTER = 32
"""Steps before a recording is made: it takes as long as they do without one, so a short run never pays for it."""


def feed(
    policy: Policy,
    tokens_B: Tensor,
    positions_B: Tensor,
    block: Tensor,
    write_N: Tensor,
    bias_B11S: Tensor,
    routes_BLK: Tensor,
    *states: Tensor,
) -> Tensor:
    """Feed one token per row, its keys and values to the cache; the logits of the next.

    ``routes_BLK`` takes the experts that the tokens are sent to, unless it is empty. ``states``: windows and states of
    delta nets (``RowStates.tensors``), which advance by the token.
    """
    places, nets = layer_places(policy.adapter.language_model), len(states) // 2
    deltas = DeltaRows(RowStates(states[:nets], states[nets:]), places, slice(0, tokens_B.shape[0]))
    attention = CachedAttention(block, write_N, bias_B11S, places=places, deltas=deltas)
    positions_3B1 = positions_B[None, :, None].expand(3, -1, 1)
    with recording_routes(policy, routes_BLK if int(routes_BLK.shape[1]) else None):
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
            self._record_feed(batch)
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

    def _record_feed(self, batch: Batch) -> None:
        """A recording of ``feed``, if it can be recorded."""
        given = batch.block, batch.states, batch.routes_BLK
        trials = [feed_trial(*given, rows, reach) for rows, reach in ((2, 3), (3, 5), (1, 2), (32, 9))]
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


def feed_trial(block: Tensor, states: RowStates, routes_BLK: Tensor, rows: int, reach: int) -> Inputs:
    """Inputs of ``feed`` for so many rows, with a small cache of their own."""
    layers, two, _, kv_heads, _, size = block.shape
    small = _ramp(block, layers, two, rows, kv_heads, reach, size)
    tokens_B, positions_B = torch.arange(rows) + 7 * (rows % 32), torch.arange(rows) + reach
    write_N = torch.arange(rows * kv_heads) * reach + reach - 1
    held = [_ramp(tensor, rows, *tensor.shape[1:]) for tensor in states.tensors]
    routes = routes_BLK.new_zeros(rows, *routes_BLK.shape[1:])
    return tokens_B, positions_B, small, write_N, block.new_zeros(rows, 1, 1, reach), routes, *held


def _ramp(like: Tensor, *shape: int) -> Tensor:
    return torch.linspace(-1, 1, math.prod(shape), dtype=like.dtype).view(shape)


def _warn(text: str) -> None:
    warnings.warn(text, stacklevel=3)
