"""Tensors for another process: in a file, or broadcast to a group.

A broadcast sends bytes in buffers. Both sides cut them in the same way from a description that is sent beforehand:

    described   a bfloat16 [64, 64], b float32 [8], c bfloat16 [4096, 4096]
    buffers     a and b; c alone, since together they would exceed BUFFER bytes
    received    the same bytes, and views of them as a, b and c
"""

import os
import tempfile
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from sensorium.cluster.python_process import memory_folder, own_address
from sensorium.vocabulary.errors import EngineError, RecordError


def write_tensors(tensors: Mapping[str, Tensor], what: str = "weights", folder: Path | None = None) -> Path:
    """Write a safetensors file to ``folder``, or to shared memory if that has room, or among temporary files.

    A file that cannot be written is not the fault of an episode, and would fail all that follow: RecordError ends the run.
    """
    size = sum(tensor.nbytes for tensor in tensors.values())
    place = str(folder or memory_folder(size) or tempfile.gettempdir())
    file = None
    try:
        handle, file = tempfile.mkstemp(".safetensors", f"sensorium-{what}-", place)
        os.close(handle)
        save_file({name: tensor.detach().contiguous() for name, tensor in tensors.items()}, file)
    except Exception as error:
        if file is not None:
            with suppress(OSError):
                os.unlink(file)
        raise RecordError(
            f"the {what} ({size / 2**20:,.1f} MiB) cannot be passed to the engine process by a file in '{place}': {error}. "
            "Make room there, or set TMPDIR to a disk that has some. A run that has begun goes on with --resume."
        ) from error
    return Path(file)


BUFFER = 256 * 2**20
ALIGNED = 16  # tensors begin at multiples of this in a buffer, so that every dtype can be viewed there
SENDER = 0
Transport = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Meeting:
    """Where a group meets, its size, and how long its members wait for each other."""

    address: str
    port: int
    size: int
    transport: Transport
    wait_s: float


@dataclass(frozen=True)
class Described:
    """The description of a tensor, sent before its bytes."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * self.kind.itemsize

    @property
    def kind(self) -> torch.dtype:
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


def describe(tensors: Mapping[str, Tensor]) -> list[Described]:
    return [Described(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]


def buffers(described: Sequence[Described], limit: int = BUFFER) -> Iterator[list[Described]]:
    """Which tensors share a buffer: in order, as many as fit; a larger one alone."""
    found: list[Described] = []
    size = 0
    for one in described:
        if found and size + one.nbytes > limit:
            yield found
            found, size = [], 0
        found.append(one)
        size += one.nbytes
    if found:
        yield found


class WeightReceiver:
    """A receiver of weights. ``rank`` counts from 1. Waits until the whole group has joined."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        wait = timedelta(seconds=meeting.wait_s)
        self._store = dist.TCPStore(meeting.address, meeting.port, None, False, wait, wait_for_workers=False)
        self._group = _group(meeting, rank, self._store, own_address(meeting.address))

    def receive(self, described: Sequence[Described], device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The tensors as they come, one buffer at a time. They are views of the buffer."""
        place = device if self._meeting.transport == "nccl" else torch.device("cpu")
        for together in buffers(described):
            buffer = _buffer(together, place)
            _broadcast(self._group, buffer)
            yield _views(buffer.to(device), together)

    def close(self) -> None:
        """Leave the group."""
        with suppress(RuntimeError):
            self._group.shutdown()


class WeightSender:
    """Sends weights to ``receivers`` others, which meet at ``meeting``.

    ``address`` is this machine's, as the receivers reach it.
    """

    def __init__(self, address: str, receivers: int, device: torch.device, wait_s: float) -> None:
        wait = timedelta(seconds=wait_s)
        self._store = dist.TCPStore(address, 0, None, True, wait, wait_for_workers=False)
        transport: Transport = "nccl" if device.type == "cuda" else "gloo"
        self.meeting = Meeting(address, self._store.port, 1 + receivers, transport, wait_s)
        self._device = device
        self._group: Any = None
        self._joined = _InThread(self._join)

    def join(self) -> None:
        """Wait until all receivers have joined."""
        self._joined.result()

    @contextmanager
    def sending(self, tensors: Mapping[str, Tensor]) -> Iterator[list[Described]]:
        """Send tensors while the body sends receivers the description, and waits until they have the tensors."""
        self.join()
        described = describe(tensors)
        sent = _InThread(lambda: self._send(tensors, described))
        yield described
        sent.result()

    def close(self) -> None:
        """Leave the group; what is being sent fails."""
        if self._group is not None:
            with suppress(RuntimeError):
                self._group.abort()
        self._group = None

    def _join(self) -> None:
        self._group = _group(self.meeting, SENDER, self._store, self.meeting.address)

    def _send(self, tensors: Mapping[str, Tensor], described: Sequence[Described]) -> None:
        for together in buffers(described):
            buffer = _buffer(together, self._device)
            for name, view in _views(buffer, together).items():
                view.copy_(tensors[name].detach())
            _broadcast(self._group, buffer)


class _InThread:
    """A function that runs in another thread; its error is raised by ``result``."""

    def __init__(self, function: Callable[[], None]) -> None:
        self._error: BaseException | None = None
        self._function = function
        self._thread = threading.Thread(target=self._run, name="weights", daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait until it has ended."""
        self._thread.join()
        if self._error is not None:
            raise EngineError(
                f"weights cannot be broadcast: {str(self._error).splitlines()[0]}. Where learner and engine cannot "
                "connect, or are on one GPU, set rollout.engine.options.push: file."
            ) from self._error

    def _run(self) -> None:
        try:
            self._function()
        except Exception as error:
            self._error = error


def _room(one: Described) -> int:
    return -(-one.nbytes // ALIGNED) * ALIGNED


def _buffer(together: Sequence[Described], device: torch.device) -> Tensor:
    return torch.empty(sum(map(_room, together)), dtype=torch.uint8, device=device)


def _views(buffer: Tensor, together: Sequence[Described]) -> dict[str, Tensor]:
    views, start = {}, 0
    for one in together:
        views[one.name] = buffer[start : start + one.nbytes].view(one.kind).view(one.shape)
        start += _room(one)
    return views


def _group(meeting: Meeting, rank: int, store: dist.Store, own: str) -> Any:
    """A process group apart from torch's default one, which an engine may use itself."""
    wait = timedelta(seconds=meeting.wait_s)
    if meeting.transport == "nccl":
        options = dist.ProcessGroupNCCL.Options()
        options._timeout = wait
        return dist.ProcessGroupNCCL(store, rank, meeting.size, options)
    settings = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    settings._devices = [dist.ProcessGroupGloo.create_device(hostname=own)]
    settings._timeout = wait
    return dist.ProcessGroupGloo(store, rank, meeting.size, settings)


def _broadcast(group: Any, buffer: Tensor) -> None:
    options = dist.BroadcastOptions()
    options.rootRank = SENDER
    group.broadcast([buffer], options).wait()
    if buffer.is_cuda:
        torch.cuda.current_stream(buffer.device).synchronize()  # otherwise the next may be overwritten before this is sent
