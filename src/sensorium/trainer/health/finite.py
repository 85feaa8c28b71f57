"""A model that can no longer give finite log-probs is never measured or saved, and never trained any further.

The learner is asked where a model is about to be evaluated or saved, and where the engine could not sample from it. So a
step that goes well pays nothing for it.
"""

from collections.abc import Callable, Sequence

from sensorium.learner.protocol import RunLearner
from sensorium.vocabulary.errors import NonFiniteModel

Complete = Callable[[], Sequence[int]]
"""Finds the steps with a complete checkpoint."""


def refuse_ruined(learner: RunLearner, step: int, complete: Complete) -> None:
    """Raise if the model, as the update of ``step`` left it, must not be saved."""
    problem = learner.problem()
    if problem:
        way_out = _way_out(complete())
        raise NonFiniteModel(f"after step {step} the model {problem}, so it is ruined and was not saved. {way_out}")


def _way_out(complete: Sequence[int]) -> str:
    kept = ", ".join(map(str, complete)) or "none"
    return (
        f"Complete checkpoints are of step: {kept}. Lower optimizer.lr or optimizer.clip_norm (of a warm start: "
        "warm_start.optimizer) and start a new run, from one of them if you like (model.path)."
    )
