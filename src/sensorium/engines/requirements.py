"""What a recipe asks of its engine, held against what the engine can do."""

from sensorium.engines.protocol import Capabilities
from sensorium.recipe.schema import RolloutSection
from sensorium.vocabulary.errors import RecipeError


def refuse_unable(
    capabilities: Capabilities, section: RolloutSection, precision: str = "fast", *, lockstep: bool = True
) -> None:
    """Raise for the first thing that a recipe's rollout section or ``model.precision`` asks for and its engine lacks."""
    engine = section.engine.name
    if precision == "matched" and not capabilities.matched:
        raise RecipeError(
            f"model.precision is 'matched', and engine '{engine}' does not compute as the learner does. Use "
            "rollout.engine: native or process, or model.precision: fast."
        )
    asked = {
        "temperature": section.temperature != 1,
        "top_p": section.top_p < 1,
        "top_k": section.top_k > 0,
        "stop": bool(section.stop),
        "ignore_stop_tokens": section.ignore_stop_tokens,
    }
    for option, wanted in asked.items():
        if wanted and option not in capabilities.sampling:
            able = ", ".join(sorted(capabilities.sampling)) or "none"
            raise RecipeError(
                f"rollout.{option} is {getattr(section, option)!r}, and engine '{engine}' does not follow it (of the "
                f"sampling options it follows: {able}). Leave it at its default, or use another rollout.engine."
            )
    if lockstep and not capabilities.deterministic:
        raise RecipeError(
            f"rollout.schedule is lockstep, which promises that a run repeats, and engine '{engine}' is not deterministic. "
            "Set rollout.schedule: eager, or use another rollout.engine."
        )
