"""Bounds on a checkpoint's chat template, which is code from whoever published it: time, memory and output.

transformers renders templates in a sandbox that has no such bounds: two nested loops of 99,999 rounds never end, and
``'a' * 10**10`` takes 10 GB. Here a watching thread ends a rendering that takes too long or too much memory by an exception
in the thread that renders, and products of texts are bounded before they are made.
"""

import ctypes
import operator
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

MOST_S = 20.0
"""Seconds for one rendering; real templates take milliseconds."""
MOST_BYTES = 1 << 30
"""Growth of the process while one conversation is rendered, looked at from ``LOOK_S`` on."""
MOST_CHARACTERS = 1 << 24
"""Characters that a rendering may have beyond those of its messages; also the longest product of a text or list."""
LOOK_S = 0.05


class TemplateBeyondBounds(Exception):
    """A rendering that took too long, too much memory, or wrote too much."""

    def __str__(self) -> str:
        return self.args[0] if self.args else f"it took more than {MOST_S:g} s or {MOST_BYTES >> 20} MiB of memory"


def bound_products(template: str) -> None:
    """Compile a template, once, so that products of texts and lists in it are bounded.

    transformers keeps compiled templates, and decides what an operator does when it compiles: so its sandbox is changed
    for that moment only.
    """
    from jinja2.sandbox import ImmutableSandboxedEnvironment
    from transformers.utils import chat_template_utils

    with _COMPILING:
        usual = ImmutableSandboxedEnvironment.intercepted_binops
        ImmutableSandboxedEnvironment.intercepted_binops = frozenset({"*", "**"})
        try:
            compiled = chat_template_utils._compile_jinja_template(template)
        finally:
            ImmutableSandboxedEnvironment.intercepted_binops = usual
    compiled.environment.binop_table |= {"*": _product, "**": _power}


_COMPILING = threading.Lock()


def _product(left: Any, right: Any) -> Any:
    for one, other in ((left, right), (right, left)):
        if isinstance(one, str | list | tuple) and isinstance(other, int) and len(one) * other > MOST_CHARACTERS:
            raise TemplateBeyondBounds(f"it asks for a text of {len(one) * other:,} characters")
    return operator.mul(left, right)


def _power(left: Any, right: Any) -> Any:
    if isinstance(right, int) and abs(right) > 64:
        raise TemplateBeyondBounds(f"it asks for a power of {right}")
    return operator.pow(left, right)


def bounded_rendering(render: Callable[[], str], characters: int) -> str:
    """What a template writes for messages of so many characters; TemplateBeyondBounds where it takes too much."""
    with _WATCH.watching():
        text = render()
    if len(text) > characters + MOST_CHARACTERS:
        raise TemplateBeyondBounds(f"it writes {len(text):,} characters for {characters:,}")
    return text


class _Watch:
    """One thread that looks at all renderings of this process, for as long as there are any."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Begin without renderings, also in a forked child: it has no threads, and its copy of the lock may be held."""
        # Threads that render take the lock itself: Condition.__enter__ is Python code, and an exception that ends a
        # rendering could come between its two lines and leave the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, tuple[float, int]] = {}
        self._looking = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Bound what this thread renders. A rendering inside of another is part of that one, which began earlier."""
        thread = threading.get_ident()
        if thread in self._running:
            yield
            return
        with self._lock:
            if not self._looking:
                self._looking = True
                threading.Thread(target=self._look, name="chat templates", daemon=True).start()
            self._running[thread] = (time.monotonic(), 0)
            self._changed.notify()
        try:
            yield
        finally:
            with self._lock:
                if self._running.pop(thread, None) is None:  # it was ended: an exception that is still to come must not
                    ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), None)

    def _look(self) -> None:
        while True:
            with self._changed:
                while not self._running:
                    self._changed.wait()
            time.sleep(LOOK_S)
            with self._changed:
                for thread, (began, size) in list(self._running.items()):
                    taken, used = time.monotonic() - began, resident_bytes()
                    if taken < LOOK_S:
                        continue
                    self._running[thread] = (began, size or used)
                    if taken > MOST_S or (size and used - size > MOST_BYTES):
                        del self._running[thread]
                        error = ctypes.py_object(TemplateBeyondBounds)
                        ctypes.pythonapi.PyThreadState_SetAsyncExc(ctypes.c_ulong(thread), error)


def resident_bytes() -> int:
    """Memory that this process has now; 0 where the system does not say."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.forget)
