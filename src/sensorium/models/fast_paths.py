"""Fast ways to compute are held against a reference on first use; where one fails, the slower way is said and counted."""

import warnings
from functools import cache

_taken: list[str] = []


def fall_back(reason: str) -> None:
    """Say that something is computed the slower way from now on, and why; counted for ``throughput/fallbacks``."""
    note_fallback(reason)
    warnings.warn(reason, stacklevel=3)


@cache
def without_compiled_parts(reason: str) -> None:
    """Say, once, that nothing can be compiled for the CPU, and why."""
    fall_back(
        "the model computes without its compiled parts, so on the CPU updates are slower, by a third or more, and small "
        "models are sampled more slowly, up to three times. A run that was begun with compiled parts goes on from here "
        "with other last bits than it would have had. "
        f"{reason[:1].upper()}{reason[1:]}. To have compiled parts, install a C compiler (cc, gcc or clang), or name one "
        "by the environment variable CC."
    )


def note_fallback(reason: str) -> None:
    """Count a fallback that is said elsewhere."""
    _taken.append(reason)


def fallbacks() -> int:
    """How many fast ways this process has given up so far."""
    return len(_taken)


def given_up() -> tuple[str, ...]:
    """Why, for each of them."""
    return tuple(_taken)
