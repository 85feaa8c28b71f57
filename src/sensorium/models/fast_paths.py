"""Fast ways to compute are held against a reference on first use; where one fails, the slower way is said and counted."""

import warnings

_taken: list[str] = []


def fall_back(reason: str) -> None:
    """Say that something is computed the slower way from now on, and why; counted for ``throughput/fallbacks``."""
    note_fallback(reason)
    warnings.warn(reason, stacklevel=3)


def note_fallback(reason: str) -> None:
    """Count a fallback that is said elsewhere."""
    _taken.append(reason)


def fallbacks() -> int:
    """How many fast ways this process has given up so far."""
    return len(_taken)
