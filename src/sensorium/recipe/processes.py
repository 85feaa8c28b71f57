"""The processes that a recipe places beside the driver, in words, and what they take before they hold anything."""

from collections.abc import Iterator, Mapping
from typing import Any

MIB = 1 << 20
WITH_TORCH = 460 * MIB
"""Of a driver, a learner rank or an engine of ours: 450 to 466 MiB resident after steps of a tiny model."""
WORKER = 75 * MIB
"""Of a worker, which imports no torch: 57 (rewards) and 76 MiB (environments)."""
VLLM_ACTOR, VLLM_WORKER = 710 * MIB, 640 * MIB
"""Of vLLM 0.32 on a CPU: our actor, and each process that computes. Measured on Linux x86-64, as the others."""


def interpreter_bytes(recipe: Mapping[str, Any]) -> dict[str, int]:
    """The machine's memory that Python and its libraries take, by part; weights and all else come on top."""
    taken = {"driver": WITH_TORCH}
    engine = (recipe.get("rollout") or {}).get("engine")
    for kind, count, told in _placed(recipe.get("cluster") or {}, section_name(engine, "native")):
        if kind == "vllm":
            sharing = (engine.get("options") or {}).get("tensor_parallel") if isinstance(engine, Mapping) else None
            taken[told] = count * (VLLM_ACTOR + (sharing if isinstance(sharing, int) else 1) * VLLM_WORKER)
        else:
            taken[told] = count * (WORKER if kind == "worker" else WITH_TORCH)
    return taken


def placed_processes(recipe: Mapping[str, Any]) -> tuple[str, ...]:
    """What a recipe, as a mapping, places beside the driver, as in ``2 engines (vllm)``; often nothing."""
    engine = section_name((recipe.get("rollout") or {}).get("engine"), "native")
    return tuple(told for _, _, told in _placed(recipe.get("cluster") or {}, engine))


def computing_processes(recipe: Mapping[str, Any]) -> dict[str, int]:
    """Those of them that compute with a model, by what they are called: learner ranks and engines, not workers."""
    engine = section_name((recipe.get("rollout") or {}).get("engine"), "native")
    return {told: count for kind, count, told in _placed(recipe.get("cluster") or {}, engine) if kind != "worker"}


def placed_by(recipe: Mapping[str, Any]) -> str:
    """Who places them, where it is not the driver itself: an addition to the list."""
    return ", placed by Ray" if (recipe.get("cluster") or {}).get("placement") == "ray" else ""


def section_name(section: Any, default: str) -> str:
    """The name of a section that may be given by its name alone."""
    return str(section.get("name", default)) if isinstance(section, Mapping) else str(section or default)


def _placed(cluster: Mapping[str, Any], engine: str) -> Iterator[tuple[str, int, str]]:
    """Kind, number and words of each part: learner, vllm, engine or worker."""
    learners = int(cluster.get("learners", 1))
    if learners > 1 or cluster.get("placement") == "ray":
        yield "learner", learners, _counted(learners, "learner rank")
    if engine != "native":
        engines = int(cluster.get("engines", 1))
        yield "vllm" if engine == "vllm" else "engine", engines, f"{_counted(engines, 'engine')} ({engine})"
    for kind in ("environments", "rewards"):
        if count := int(cluster.get(kind, 0)):
            yield "worker", count, _counted(count, f"{kind[:-1]} worker")


def _counted(count: int, name: str) -> str:
    return f"{count} {name}{'' if count == 1 else 's'}"
