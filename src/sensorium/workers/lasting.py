"""Objects that live as long as a process works: the garbage collector need not walk them again and again.

A model with its libraries is some 400,000 objects. Walking them takes 0.2 s or more, in which a GPU has nothing to do.
"""

import gc
from collections.abc import Iterator
from contextlib import contextmanager


def set_aside() -> bool:
    """Leave what exists now out of collections; False if somebody did so before, as a fork server does."""
    if gc.get_freeze_count():
        return False
    set_aside_more()
    return True


def set_aside_more() -> None:
    """Leave out what came since, too: kernels and graphs that the first step compiled, say."""
    gc.collect()
    gc.freeze()


@contextmanager
def lasting_objects() -> Iterator[None]:
    """What exists now is left out of collections until the end."""
    ours = set_aside()
    try:
        yield
    finally:
        if ours:
            gc.unfreeze()
