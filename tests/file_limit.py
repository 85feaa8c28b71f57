"""Files that may not grow, as on a disk that is full."""

import resource
import signal
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def small_files_only() -> Iterator[None]:
    """Files of this process may not grow beyond 64 KiB."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
