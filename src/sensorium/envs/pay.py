"""What a turn is worth, by named parts: ``TurnPay({"goal": 10, "format": 0.5}).of(goal=1)`` = {"goal": 10, "format": 0}."""

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True)
class TurnPay:
    """How much each part of the pay is worth. A part that is worth nothing is not paid, and a lone part needs no name."""

    worth: Mapping[str, float]

    def of(self, **amounts: float) -> float | dict[str, float]:
        """The pay of a turn in which each part was earned so many times (or so well); those not given, not at all."""
        unknown = set(amounts) - set(self.worth)
        assert not unknown, f"no part of the pay is called {', '.join(unknown)}"
        parts = {name: float(worth * amounts.get(name, 0.0)) for name, worth in self.worth.items() if worth}
        if len(parts) == 1:
            return next(iter(parts.values()))
        return parts or 0.0
