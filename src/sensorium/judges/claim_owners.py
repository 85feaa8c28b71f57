"""Who asks a question: a name by which another process can tell whether the asker is still there."""

import os
import platform
from pathlib import Path


def owner_name(of: str) -> str:
    """What claims are made under: this machine, this process, and ``of``, which of its clients."""
    return f"{_machine()} {os.getpid()} {of}"


def is_dead(owner: str) -> bool:
    """True if the owner of a claim was a process of this machine, and there is no such process any more."""
    machine, _, rest = owner.partition(" ")
    pid = rest.partition(" ")[0]
    if machine != _machine() or not pid.isdigit():
        return False
    try:
        os.kill(int(pid), 0)
    except ProcessLookupError:
        return True
    except OSError:
        pass  # there is one, of another user
    return _is_zombie(pid)


def _is_zombie(pid: str) -> bool:
    """True if a process was killed and who started it has not asked after it yet (on Linux)."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except (OSError, IndexError):
        return False


def _machine() -> str:
    """Where process numbers mean the same: the host, and on Linux the namespace of processes (a container has its own)."""
    try:
        space = os.readlink("/proc/self/ns/pid")
    except OSError:
        space = ""
    return f"{platform.node()}/{space}".replace(" ", "_")
