"""The table of names: name → where it lives. Torch-free; what a name stands for is imported when it is built."""

from collections.abc import Mapping
from importlib import import_module
from typing import Any

from sensorium.vocabulary.errors import RecipeError, nearest

NAMES: dict[str, dict[str, str]] = {
    "family": {
        "qwen2_5_vl": "sensorium.models.qwen2_5_vl:Qwen25VL",
        "qwen3_vl": "sensorium.models.qwen3_vl:Qwen3VL",
        "qwen2": "sensorium.models.text:TextModel",
        "qwen3": "sensorium.models.text:TextModel",
    },
    "source": {
        "shapes": "sensorium.tasks.shapes:Shapes",
        "jsonl": "sensorium.tasks.rows:JsonlRows",
        "parquet": "sensorium.tasks.rows:ParquetRows",
        "worlds": "sensorium.tasks.worlds:Worlds",
    },
    "environment": {
        "question": "sensorium.envs.question:Question",
        "frozen_lake": "sensorium.envs.frozen_lake:FrozenLake",
    },
    "reward": {
        "format": "sensorium.rewards.format:Format",
        "exact": "sensorium.rewards.match:Exact",
        "choice": "sensorium.rewards.match:Choice",
        "numeric": "sensorium.rewards.match:Numeric",
        "math": "sensorium.rewards.mathematics:Mathematics",
        "environment": "sensorium.rewards.environment:EnvironmentReward",
    },
    "engine": {
        "native": "sensorium.engines.native.engine:NativeEngine",
        "scripted": "sensorium.engines.scripted:ScriptedEngine",
    },
    "advantage": {"grpo": "sensorium.algorithms.grpo:advantages"},
    "loss": {"clip": "sensorium.algorithms.clip:loss", "likelihood": "sensorium.algorithms.likelihood:loss"},
    "logger": {
        "tensorboard": "sensorium.report.tensorboard:TensorboardLogger",
        "wandb": "sensorium.report.wandb:WandbLogger",
    },
}


def register(kind: str, name: str, place: str) -> None:
    """Add a name of your own: ``register("reward", "brevity", "my_package.terms:Brevity")``."""
    table(kind)[name] = place


def table(kind: str) -> dict[str, str]:
    """The names of one kind."""
    return NAMES[kind]


def check(kind: str, name: str, where: str) -> None:
    """Refuse an unknown name with the nearest right one. ``module:attribute`` names a thing of the user's own."""
    if name not in table(kind) and ":" not in name:
        raise RecipeError(f"{where}: unknown {kind} '{name}'{nearest(name, list(table(kind)))}")


def resolve(kind: str, name: str, where: str = "") -> Any:
    """Import what a name stands for."""
    check(kind, name, where or kind)
    module, _, attribute = table(kind).get(name, name).partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (ImportError, AttributeError) as error:
        raise RecipeError(f"{where or kind}: cannot load {kind} '{name}' from '{module}:{attribute}': {error}.") from error


def build(kind: str, name: str, options: Mapping[str, Any], where: str = "", **given: Any) -> Any:
    """Build a named thing from its options; a wrong option is refused with the right ones."""
    import inspect

    target = resolve(kind, name, where)
    known = [p for p in inspect.signature(target).parameters if p not in given]
    for option in options:
        if option not in known:
            raise RecipeError(f"{where}: {kind} '{name}' has no option '{option}'{nearest(option, known)}")
    try:
        return target(**given, **options)
    except TypeError as error:
        raise RecipeError(f"{where}: {kind} '{name}': {error}.") from error
