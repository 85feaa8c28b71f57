"""A cache in memory within a bound, by number or by size: the least recently used values go first.

Example with a bound of 3 values: put a, b, c, get a, put d. Now b is the one not used for longest, so b is dropped.
"""

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

K = TypeVar("K", bound=Hashable)
V = TypeVar("V")


class LRU(Generic[K, V]):
    """Values by key whose sizes together stay within ``bound`` (None: no bound). Safe to call from several threads.

    ``size`` of a value must not change while it is held; by default every value counts 1. ``at_least`` so many values stay
    whatever their size; without it a value larger than the bound is not held at all. ``held`` is the size of all values,
    ``hits`` counts the keys that ``get`` found, ``evictions`` the values dropped to stay within the bound.
    """

    def __init__(self, bound: int | None, size: Callable[[V], int] = lambda _: 1, *, at_least: int = 0) -> None:
        self.bound = bound
        self.held = self.hits = self.evictions = 0
        self._size, self._at_least = size, at_least
        self._values: OrderedDict[K, V] = OrderedDict()
        self._lock = threading.Lock()

    def __len__(self) -> int:
        return len(self._values)

    def __contains__(self, key: object) -> bool:
        return key in self._values

    def get(self, key: K) -> V | None:
        """The value of a key, which makes it the most recent; None if there is none."""
        with self._lock:
            if key not in self._values:
                return None
            self._values.move_to_end(key)
            self.hits += 1
            return self._values[key]

    def peek(self, key: K) -> V | None:
        """The value of a key, which changes nothing."""
        return self._values.get(key)

    def put(self, key: K, value: V) -> None:
        """Hold a value as the most recent, in place of the key's earlier one."""
        with self._lock:
            self._drop(key)
            self._hold(key, value)

    def add(self, key: K, value: V) -> None:
        """Hold a value as the most recent, unless the key has one."""
        with self._lock:
            if key not in self._values:
                self._hold(key, value)

    def pop(self, key: K) -> V | None:
        """Take a value out."""
        with self._lock:
            return self._drop(key)

    def clear(self) -> None:
        """Drop everything; the counts stay."""
        with self._lock:
            self._values.clear()
            self.held = 0

    def items(self) -> list[tuple[K, V]]:
        """Keys and values, the least recent first."""
        with self._lock:
            return list(self._values.items())

    def _hold(self, key: K, value: V) -> None:
        self._values[key] = value
        self.held += self._size(value)
        while self.bound is not None and self.held > self.bound and len(self._values) > self._at_least:
            _, oldest = self._values.popitem(last=False)
            self.held -= self._size(oldest)
            self.evictions += 1

    def _drop(self, key: K) -> V | None:
        value = self._values.pop(key, None)
        self.held -= 0 if value is None else self._size(value)
        return value
