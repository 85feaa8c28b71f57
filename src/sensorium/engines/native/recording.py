"""Recordings of tensor functions on the CPU: the same operations on the same kind of tensors, without Python in between.

A recording is a TorchScript trace. A trace keeps a tensor that is not among its inputs as a constant, and merges constants
that are equal at that moment. Traced with a = b = 0 as constants, x·a + x·b·10 uses one tensor for both: after b += 1 it
still gives 0. So a recording has no such constants:

    f computes with the weights a and b of a module, and is recorded:  r = record(f, [(x,)], [module])
    what is traced takes the weights as inputs:                        trace(a, b, x)
    every call reads them from the module as they are by then:         r(x) = trace(module.a, module.b, x)

What cannot be recorded is refused with a reason: a function that uses a tensor from elsewhere (it would be a constant), one
that reads a tensor's value (another value might take another way), and one whose recording gives other bits.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

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
        """The modules with other tensors in these places."""
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
