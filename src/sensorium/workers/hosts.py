"""Where the processes of a run are started: on this machine, or wherever a cluster places them (``ray_host``).

Whoever talks to such a process sees a HostedProcess and Frames, and does not know where it is.
"""

import socket
from collections.abc import Mapping
from contextlib import ExitStack
from pathlib import Path
from typing import Protocol

from sensorium.workers.channel import Frames, SocketFrames
from sensorium.workers.python_process import PythonProcess


class HostedProcess(Protocol):
    """A process that works for this one."""

    @property
    def pid(self) -> int:
        """Its process id, on its machine."""
        ...

    @property
    def alive(self) -> bool:
        """True until it has ended."""
        ...

    def end(self, after_s: float = 0.0) -> None:
        """Wait so long for it to end, then kill it and whatever it started."""
        ...

    def ending(self) -> str:
        """How it ended, as the end of a sentence about it."""
        ...

    def log_text(self) -> str:
        """All that it printed, as far as that can be had."""
        ...


class ProcessHost(Protocol):
    """Starts processes. ``folder`` is one that this process and those it starts both see; None: any of this machine.

    ``address`` is this machine's, as those processes reach it. ``own_device``: they have GPUs of their own, which do not
    have the numbers that they have here; ``shared``: but maybe this process's too.
    """

    folder: Path | None
    address: str
    own_device: bool
    shared: bool

    def start(
        self,
        module: str,
        channels: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many connections to it."""
        ...

    def close(self) -> None:
        """Start nothing more."""
        ...


class ThisMachine:
    """Starts processes beside this one. ``gpus`` are the only ones that they see, as CUDA_VISIBLE_DEVICES; "": the same."""

    folder: Path | None = None
    address = "127.0.0.1"

    def __init__(self, gpus: str = "", *, shared: bool = False) -> None:
        self._gpus, self.own_device, self.shared = gpus, bool(gpus), shared

    def start(
        self,
        module: str,
        channels: int,
        log: Path,
        environment: Mapping[str, str] | None = None,
        *,
        own_group: bool = False,
    ) -> tuple[HostedProcess, list[Frames]]:
        """Start ``python -m module`` with so many sockets."""
        if self._gpus:
            environment = {**(environment or {}), "CUDA_VISIBLE_DEVICES": self._gpus}
        pairs = [socket.socketpair() for _ in range(channels)]
        with ExitStack() as theirs:
            for _, end in pairs:
                theirs.enter_context(end)
            process = PythonProcess(module, [end for _, end in pairs], log, environment, own_group=own_group)
        return process, [SocketFrames(ours) for ours, _ in pairs]

    def close(self) -> None:
        """There is nothing to give back."""
