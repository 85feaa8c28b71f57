"""Engine and learner must agree: where both compute the same in float32 on a CPU, log-probs differ by rounding alone."""

from collections.abc import Mapping

from sensorium.recipe.schema import Recipe

ROUNDING = 1e-5
"""The largest difference of a log-prob that rounding explains, in units of the logits' scale (at least 1)."""


def disagreement(recipe: Recipe, row: Mapping[str, float]) -> str | None:
    """What is wrong if the engine's log-probs are not the learner's; None if they are, or nothing bounds their difference.

    ``mismatch/relative`` is in the row where float32 is computed on the CPU; in bfloat16 and on a GPU rounding is larger
    and depends on the model. It compares log-probs of the whole policy, so that top-p and top-k are no excuse.
    """
    found = row.get("mismatch/relative", 0.0)
    if found <= ROUNDING or recipe.rollout.engine != "native":
        return None
    return (
        f"ENGINE AND LEARNER DISAGREE: the log-prob of a sampled token differs by {row['mismatch/max']:.1e}, which is "
        f"{found:.1e} of the logits' scale; float32 on a CPU explains {ROUNDING:.0e}. The engine sampled from another "
        "distribution than the one being trained, so ratios and gradients are wrong. No setting should cause this: keep "
        "the run directory and report it. Until then set algorithm.correction.weights: token, and compare with a run "
        "whose model.dtype or model.device is another."
    )
