"""Bounds on a checkpoint's chat template, which is code of its publisher: time, memory and output.

transformers renders templates in a sandbox without such bounds: two nested loops of 99,999 rounds never end, and
``'a' * 10**10`` takes 10 GB. Here a watching thread ends a rendering that takes too long or too much memory, by an
exception in the rendering thread, and every operation that makes a text checks its size first.
"""

import ctypes
import operator
import os
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import Any

from sensorium.vocabulary.errors import ModelError

MOST_S = 20.0  # for one rendering; real templates take milliseconds
MOST_BYTES = 1 << 30  # growth of the process during a rendering, measured from ``LOOK_S`` on
MOST_CHARACTERS = 1 << 24  # written beyond the characters of the messages
MOST_TEXT = 1 << 26  # longest text or list that one operation may make
LOOK_S = 0.05
WIDTH = re.compile(r"\d{8,}|\*")  # in a format: a width of 10 million characters or more, or one that is an argument
OPERATORS: dict[str, Callable[[Any, Any], Any]] = {
    "*": operator.mul, "**": operator.pow, "+": operator.add, "%": operator.mod,
}  # fmt: skip
_COMPILING = threading.Lock()


class TemplateBeyondBounds(Exception):
    """A rendering takes too long or too much memory, or writes too much."""

    def __str__(self) -> str:
        return self.args[0] if self.args else f"it took more than {MOST_S:g} s or {MOST_BYTES >> 20} MiB of memory"


def bound_texts(template: str) -> None:
    """Compile a template so that none of its operations makes a text or list beyond ``MOST_TEXT``.

    The watching thread ends a template only between operations, and a text that doubles takes 4 GB in its 32nd one.
    transformers caches compiled templates, and operators are bound at compile time, so its sandbox is changed only for it.
    """
    from jinja2 import TemplateSyntaxError
    from jinja2.sandbox import ImmutableSandboxedEnvironment as sandbox  # noqa: N813
    from transformers.utils import chat_template_utils

    with _COMPILING:
        usual = sandbox.intercepted_binops, sandbox.code_generator_class
        sandbox.intercepted_binops = frozenset(OPERATORS)
        sandbox.code_generator_class = _without_constants(usual[1])
        try:
            compiled = chat_template_utils._compile_jinja_template(template)
        except TemplateSyntaxError as error:
            raise ModelError(
                f"its chat template is damaged in line {error.lineno}: {error}. Restore its chat_template.jinja from the "
                "published checkpoint."
            ) from error
        finally:
            sandbox.intercepted_binops, sandbox.code_generator_class = usual
    environment: Any = compiled.environment
    environment.binop_table |= {symbol: partial(_bounded_operator, symbol) for symbol in OPERATORS}
    compiled.root_render_func.__globals__.update(str_join=_joined, markup_join=_joined)
    environment.call = partial(_bounded_call, environment.call)
    for name in ("center", "format", "indent", "join", "replace", "wordwrap"):
        environment.filters[name] = _bounded_filter(name, environment.filters[name])


def _without_constants(usual: Any) -> Any:
    """Jinja's code generator without constant folding, so that ``'a'|center(10**10)`` is computed under the bounds."""
    from jinja2 import nodes

    class Generator(usual):
        def __init__(self, environment: Any, name: Any, filename: Any, *rest: Any) -> None:
            super().__init__(environment, name, filename, *rest[:2], optimized=False)

        def _output_child_to_const(self, node: Any, frame: Any, finalize: Any) -> str:
            if not isinstance(node, nodes.TemplateData):
                raise nodes.Impossible
            return super()._output_child_to_const(node, frame, finalize)

    return Generator


def _within(size: int) -> None:
    if size > MOST_TEXT:
        raise TemplateBeyondBounds(f"it asks for a text or list of {size:,} parts")


def _bounded_operator(symbol: str, left: Any, right: Any) -> Any:
    several = str | list | tuple
    if symbol == "*":
        for one, other in ((left, right), (right, left)):
            if isinstance(one, several) and isinstance(other, int):
                _within(len(one) * other)
    elif symbol == "+" and isinstance(left, several) and isinstance(right, several):
        _within(len(left) + len(right))
    elif symbol == "%" and isinstance(left, str):
        _within(_size("format", left, ()))
    elif symbol == "**" and isinstance(right, int) and abs(right) > 64:
        raise TemplateBeyondBounds(f"it asks for a power of {right}")
    return OPERATORS[symbol](left, right)


def _joined(parts: Iterable[Any]) -> str:
    texts = [str(part) for part in parts]
    _within(sum(map(len, texts)))
    return "".join(texts)


def _bounded_call(usual: Callable[..., Any], context: Any, function: Any, *given: Any, **named: Any) -> Any:
    method = getattr(function, "__wrapped__", function)  # the sandbox wraps str.format
    text = getattr(method, "__self__", None)
    if isinstance(text, str):
        if method.__name__ == "join" and given:
            given = ([str(part) for part in given[0]], *given[1:])
        _within(_size(method.__name__, text, (*given, *named.values())))
    return usual(context, function, *given, **named)


def _bounded_filter(name: str, usual: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(usual)  # keeps jinja's mark of filters that take the environment first
    def bounded(*given: Any, **named: Any) -> Any:
        at = 1 if hasattr(usual, "jinja_pass_arg") else 0
        text, rest = given[at], given[at + 1 :]
        if name == "join":
            text = list(text)
            given = (*given[:at], text, *rest)
            glue = str(rest[0]) if rest else str(named.get("d", ""))
            _within(sum(len(str(part)) for part in text) + len(glue) * len(text))
        else:
            _within(_size(name, str(text), (*rest, *named.values())))
        return usual(*given, **named)

    return bounded


def _size(name: str, text: str, given: Sequence[Any]) -> int:
    """The most characters that a method of a text can make."""
    numbers = [one for one in given if isinstance(one, int)]
    if name == "replace" and len(given) > 1:
        return len(text) + text.count(str(given[0])) * len(str(given[1]))
    if name == "join" and given:
        return sum(map(len, given[0])) + len(text) * len(given[0])
    if name == "translate" and given and isinstance(given[0], dict):
        return len(text) * max((len(one) for one in given[0].values() if isinstance(one, str)), default=1)
    if name in ("format", "format_map") and WIDTH.search(text):
        return MOST_TEXT + 1
    if name in ("indent", "expandtabs"):
        return len(text) * max([1, *numbers])
    return max([len(text), *numbers])


def bounded_rendering(render: Callable[[], str], characters: int) -> str:
    """The text that ``render`` returns for messages of so many characters, or TemplateBeyondBounds."""
    with _WATCH.watching():
        text = render()
    if len(text) > characters + MOST_CHARACTERS:
        raise TemplateBeyondBounds(f"it writes {len(text):,} characters for {characters:,}")
    return text


class _Watch:
    """One thread that watches all renderings of this process."""

    def __init__(self) -> None:
        self.forget()

    def forget(self) -> None:
        """Start without renderings, also in a forked child: it has no threads, and its copy of the lock may be held."""
        # Rendering threads take the lock itself: Condition.__enter__ is Python code, and the exception that ends a
        # rendering could come between its two lines and leave the lock held.
        self._lock = threading.Lock()
        self._changed = threading.Condition(self._lock)
        self._running: dict[int, tuple[float, int]] = {}
        self._looking = False

    @contextmanager
    def watching(self) -> Iterator[None]:
        """Watch this thread's rendering. A rendering inside another belongs to the outer one."""
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
                if self._running.pop(thread, None) is None:  # it was ended: discard an exception that is still pending
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
    """Resident memory of this process; 0 where the system does not report it."""
    try:
        return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return 0


_WATCH = _Watch()
os.register_at_fork(after_in_child=_WATCH.forget)
