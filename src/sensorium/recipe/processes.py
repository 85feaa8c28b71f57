"""The processes that a recipe places beside the driver, in words."""

from collections.abc import Iterator, Mapping
from typing import Any


def placed_processes(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """What a recipe, as a mapping, places beside the driver, as in ``2 engines (vllm)``; often nothing."""
    return tuple(_placed(recipe.get("cluster") or {}, section_name((recipe.get("rollout") or {}).get("engine"), "native")))


def placed_by(recipe: Mapping[str, Any]) -> str:
    """Who places them, where it is not the driver itself: an addition to the list."""
    return ", placed by Ray" if (recipe.get("cluster") or {}).get("placement") == "ray" else ""


def section_name(section: Any, default: str) -> str:
    """The name of a section that may be given by its name alone."""
    return str(section.get("name", default)) if isinstance(section, Mapping) else str(section or default)


def _placed(cluster: Mapping[str, Any], engine: str) -> Iterator[str]:
    learners = int(cluster.get("learners", 1))
    if learners > 1 or cluster.get("placement") == "ray":
        yield _counted(learners, "learner rank")
    if engine != "native":
        yield f"{_counted(int(cluster.get('engines', 1)), 'engine')} ({engine})"
    for kind in ("environments", "rewards"):
        if count := int(cluster.get(kind, 0)):
            yield _counted(count, f"{kind[:-1]} worker")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
