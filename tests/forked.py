"""``subprocess.Popen`` for Python commands, with torch and transformers imported beforehand: a fork of a server.

The command is what it would be for a new interpreter; what it cannot show is told in studies/fork_server.py.
"""

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from studies.fork_server import Forked, ForkServer

from .cpu_budget import count


class ForkedPython(subprocess.Popen):
    """A process of ``[sys.executable, "-c" or "-m", …]`` that is a fork of ``server``; other commands start as ever."""

    server: ForkServer
    _fork: Forked | None = None

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: Any, pass_fds: Any, cwd: Any, env: Any,
                       startupinfo: Any, creationflags: Any, shell: Any, p2cread: int, p2cwrite: int, c2pread: int,
                       c2pwrite: int, errread: int, errwrite: int, *rest: Any) -> None:  # fmt: skip
        if shell or isinstance(args, str) or args[0] != sys.executable or args[1] not in ("-c", "-m"):
            super()._execute_child(args, executable, preexec_fn, close_fds, pass_fds, cwd, env, startupinfo, creationflags,
                                   shell, p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite, *rest)  # fmt: skip
            return
        fds = {number: number if fd == -1 else fd for number, fd in enumerate((p2cread, c2pwrite, errwrite))}
        fds |= {fd: fd for fd in pass_fds}
        self._fork = self.server.start(args[1:], fds, cwd=os.fspath(cwd or os.getcwd()), env=env)
        self.pid = self._fork.pid
        self._child_created = True
        self._close_pipe_fds(p2cread, p2cwrite, c2pread, c2pwrite, errread, errwrite)

    def _try_wait(self, wait_flags: int) -> tuple[int, int]:
        if self._fork is None:
            return super()._try_wait(wait_flags)
        ended = self._fork.wait(0 if wait_flags & os.WNOHANG else None)
        if ended is None:
            return 0, 0
        count(ended.cpu_s)
        return self.pid, -ended.code if ended.code < 0 else ended.code << 8

    def _internal_poll(self, *given: Any, **named: Any) -> int | None:
        if self._fork is None:
            return super()._internal_poll(*given, **named)
        if self.returncode is None and self._waitpid_lock.acquire(False):
            try:
                pid, status = self._try_wait(os.WNOHANG)
                if pid:
                    self._handle_exitstatus(status)
            finally:
                self._waitpid_lock.release()
        return self.returncode


@contextmanager
def forked_python(server: ForkServer) -> Iterator[None]:
    """Inside, every Python process that is started through ``subprocess`` is a fork of the server."""
    with patch.object(subprocess, "Popen", type("Forked", (ForkedPython,), {"server": server})):
        yield
