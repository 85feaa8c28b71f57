"""The most recently used things by key, within a bound. Safe to call from several threads."""

import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import Generic, TypeVar

Kept = TypeVar("Kept")


class Recent(Generic[Kept]):
    """Things whose sizes together stay within ``bound`` (None: no bound); the least recently used go first."""

    def __init__(self, bound: int | None, size: Callable[[Kept], int]) -> None:
        self.used = self.evicted = 0
        self._bound, self._size = bound, size
        self._kept: OrderedDict[str, Kept] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, key: str) -> Kept | None:
        """What is kept under a key, which makes it the latest; None if nothing is."""
        with self._lock:
            if key in self._kept:
                self._kept.move_to_end(key)
            return self._kept.get(key)

    def add(self, key: str, thing: Kept) -> None:
        """Keep a thing as the latest, unless its key is taken."""
        with self._lock:
            if key in self._kept:
                return
            self._kept[key] = thing
            self.used += self._size(thing)
            while self._bound is not None and self.used > self._bound and self._kept:
                self.used -= self._size(self._kept.popitem(last=False)[1])
                self.evicted += 1
