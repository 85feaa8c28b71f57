"""Tensors for another process: in a file that its reader or its writer deletes."""

import os
import socket
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any, Literal

import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

from sensorium.cluster.temporary_folder import memory_folder
from sensorium.vocabulary.errors import EngineError, RecordError


def write_tensors(tensors: Mapping[str, Tensor], what: str = "weights", folder: Path | None = None) -> Path:
    """A safetensors file in ``folder``; without one in shared memory, where there is room for it.

    One that cannot be written is no fault of an episode, and would fail all that follow: the RecordError ends the run.
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
            f"the {what} ({size / 2**20:,.1f} MiB) cannot be handed to the engine process by a file in '{place}': {error}. "
            "Make room there, or set TMPDIR to a disk that has some. A run that has begun goes on with --resume."
        ) from error
    return Path(file)


# Tensors go as bytes in buffers that both sides cut alike, from what is said of the tensors beforehand: told a bfloat16
# [64, 64], b float32 [8], c bfloat16 [4096, 4096] buffers a and b; c alone, since together they would pass BUFFER bytes
# a receiver has the same bytes, and views of them as a, b and c


BUFFER = 256 * 2**20
SENDER = 0

Transport = Literal["gloo", "nccl"]


@dataclass(frozen=True)
class Meeting:
    """Where a group meets, how many belong to it, and how long one waits for another."""

    address: str
    port: int
    size: int
    transport: Transport
    wait_s: float


@dataclass(frozen=True)
class Described:
    """What is said of a tensor before its bytes come."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        """Its size in bytes."""
        return prod(self.shape) * self.kind.itemsize

    @property
    def kind(self) -> torch.dtype:
        """Its dtype."""
        found = getattr(torch, self.dtype)
        assert isinstance(found, torch.dtype)
        return found


def describe(tensors: Mapping[str, Tensor]) -> list[Described]:
    """What receivers must be told of these."""
    return [Described(name, str(one.dtype).removeprefix("torch."), tuple(one.shape)) for name, one in tensors.items()]


def buffers(described: Sequence[Described], limit: int = BUFFER) -> Iterator[list[Described]]:
    """Which tensors go together: in order, as many as fit; a larger one alone."""
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
    """One of those who are sent weights. ``rank`` counts from 1. Waits for the whole group to be there."""

    def __init__(self, meeting: Meeting, rank: int) -> None:
        self._meeting = meeting
        wait = timedelta(seconds=meeting.wait_s)
        self._store = dist.TCPStore(meeting.address, meeting.port, None, False, wait, wait_for_workers=False)
        self._group = _group(meeting, rank, self._store, _own_address(meeting.address))

    def receive(self, described: Sequence[Described], device: torch.device) -> Iterator[dict[str, Tensor]]:
        """The tensors as they come, a buffer at a time. They are views of it."""
        place = device if self._meeting.transport == "nccl" else torch.device("cpu")
        for together in buffers(described):
            buffer = torch.empty(_room(together), dtype=torch.uint8, device=place)
            _broadcast(self._group, buffer)
            buffer = buffer.to(device)
            yield {one.name: _view(buffer, one, start) for one, start in _places(together)}

    def close(self) -> None:
        """Leave the group."""
        with suppress(RuntimeError):
            self._group.shutdown()


class WeightSender:
    """Sends weights to ``receivers`` others. They meet at ``meeting``; ``join`` ends when all are there.

    ``address`` is this machine's, as the receivers reach it.
    """

    def __init__(self, address: str, receivers: int, device: torch.device, wait_s: float) -> None:
        transport: Transport = "nccl" if device.type == "cuda" else "gloo"
        wait = timedelta(seconds=wait_s)
        self._store = dist.TCPStore(address, 0, None, True, wait, wait_for_workers=False)
        self.meeting = Meeting(address, self._store.port, 1 + receivers, transport, wait_s)
        self._device = device
        self._group: Any = None
        self._joined = _InThread(self._join, "weights: meeting")

    @property
    def told(self) -> dict[str, Any]:
        """What receivers are told to find the group."""
        return asdict(self.meeting)

    def join(self) -> None:
        """Wait until all receivers are there."""
        self._joined.result()

    @contextmanager
    def sending(self, tensors: Mapping[str, Tensor]) -> Iterator[list[Described]]:
        """Send tensors while the body tells receivers what comes, and waits for them to have it."""
        self.join()
        described = describe(tensors)
        sent = _InThread(lambda: self._send(tensors, described), "weights: sending")
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
            buffer = torch.empty(_room(together), dtype=torch.uint8, device=self._device)
            for one, start in _places(together):
                _view(buffer, one, start).copy_(tensors[one.name].detach())
            _broadcast(self._group, buffer)


class _InThread:
    """Something that is done beside this thread; whoever asks for its result gets its error."""

    def __init__(self, do: Any, name: str) -> None:
        self._error: BaseException | None = None
        self._do = do
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)
        self._thread.start()

    def result(self) -> None:
        """Wait for it."""
        self._thread.join()
        if self._error is not None:
            raise EngineError(
                f"weights cannot be broadcast: {str(self._error).splitlines()[0]}. Where learner and engine cannot meet, "
                "or are on one GPU, rollout.engine.options.push: file is the other way."
            ) from self._error

    def _run(self) -> None:
        try:
            self._do()
        except Exception as error:
            self._error = error


ALIGNED = 16
"""Tensors begin at multiples of this in a buffer, so that every dtype can be viewed there."""


def _places(together: Sequence[Described]) -> Iterator[tuple[Described, int]]:
    start = 0
    for one in together:
        yield one, start
        start += -(-one.nbytes // ALIGNED) * ALIGNED


def _view(buffer: Tensor, one: Described, start: int) -> Tensor:
    return buffer[start : start + one.nbytes].view(one.kind).view(one.shape)


def _room(together: Sequence[Described]) -> int:
    return sum(-(-one.nbytes // ALIGNED) * ALIGNED for one in together)


def _group(meeting: Meeting, rank: int, store: dist.Store, own: str) -> Any:
    """A group that torch's default one, which an engine may have made for itself, knows nothing of."""
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
        torch.cuda.current_stream(buffer.device).synchronize()  # else the next may be written to before this is sent


def _own_address(other: str) -> str:
    """This machine's address on the way to another; nothing is sent."""
    with socket.socket(socket.AF_INET6 if ":" in other else socket.AF_INET, socket.SOCK_DGRAM) as probe:
        probe.connect((other, 1))
        return str(probe.getsockname()[0])
