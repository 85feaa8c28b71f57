"""Bounds of the numbers that engines take as options; torch-free."""

from collections.abc import Mapping
from math import isfinite
from typing import Any

MOST_S = 1e7
"""Seconds that any wait may be given, some hundred days: clocks and sockets overflow at much more."""
SECONDS = {"patience_s": (0.001, MOST_S), "start_s": (0.001, MOST_S), "reply_s": (0.001, MOST_S)}


def check_limits(options: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse what is no number, or none between the least and the most of its name. None stands for the default."""
    for name, (least, most) in limits.items():
        value = options.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < least:
            raise ValueError(f"{name} is {value!r}; it must be {least:g} at least")
        if value > most:
            raise ValueError(f"{name} is {value!r}; it must be {most:g} at most")
