"""A KL coefficient that follows what it sees: up where the policy drifts too far, down where it hardly moves."""

from dataclasses import dataclass
from math import isfinite

STEEPEST = 0.2


@dataclass
class AdaptiveKL:
    """The coefficient, moved towards the one that holds the KL at ``target``. Only ``coef`` changes and is state."""

    coef: float
    target: float
    horizon: float

    def update(self, observed: float, episodes: int) -> None:
        """coef *= 1 + clip(observed/target - 1, ±0.2)·episodes/horizon, after a step of so many episodes."""
        if STEEPEST * episodes >= self.horizon:
            raise ValueError(
                f"a KL horizon of {self.horizon:g} is too short for steps of {episodes} episodes: one step could take the "
                f"whole coefficient away. Set algorithm.kl.horizon well above {STEEPEST * episodes:g}."
            )
        if not isfinite(observed):
            raise ValueError(f"the KL to the reference is {observed}; the coefficient cannot follow it.")
        error = min(max(observed / self.target - 1, -STEEPEST), STEEPEST)
        self.coef *= 1 + error * episodes / self.horizon

    def state_dict(self) -> dict[str, float]:
        """What a checkpoint keeps."""
        return {"coef": self.coef}

    def load_state_dict(self, state: dict[str, float]) -> None:
        """Go on where ``state`` was taken."""
        self.coef = state["coef"]
