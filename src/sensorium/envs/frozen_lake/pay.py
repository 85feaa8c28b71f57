"""What a turn on the lake is worth."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Pay:
    """``goal`` for reaching it, ``format`` for each response that is valid and written as asked."""

    goal: float
    format: float

    def of(self, *, reached: bool, well_formed: bool) -> float | dict[str, float]:
        """The parts by name; where the form is not paid, the goal's part is all there is and needs no name."""
        if not self.format:
            return float(self.goal * reached)
        return {"goal": float(self.goal * reached), "format": float(self.format * well_formed)}
