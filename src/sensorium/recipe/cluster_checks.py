"""What a recipe's cluster section can get wrong beside its types."""

from collections.abc import Iterator

from sensorium.recipe.schema import Recipe

OWN_WEIGHTS = ("process", "vllm")


def cluster_problems(recipe: Recipe) -> Iterator[tuple[str, str]]:
    """Several engines need weights of their own each, and episodes that do not wait for each other."""
    section, rollout = recipe.cluster, recipe.rollout
    if section.engines > 1 and rollout.engine.name == "native":
        yield (
            "cluster.engines",
            f"{section.engines} engines need weights of their own each, and the native engine samples with the learner's: "
            f"use rollout.engine: {' or '.join(OWN_WEIGHTS)}.",
        )
    elif section.engines > 1 and rollout.schedule == "lockstep":
        yield (
            "cluster.engines",
            "lockstep is one order of all episodes in one engine, and several engines follow the clock: set "
            "rollout.schedule: eager.",
        )
