"""The table of names: name → where it lives. Torch-free; what a name stands for is imported when it is built."""

from collections.abc import Mapping, Sequence
from importlib import import_module
from inspect import Parameter, signature
from types import NoneType, UnionType
from typing import Any, Unpack, get_args, get_origin, get_type_hints

from sensorium.recipe.function_signatures import reward_style, takes_context, wrong_function_options
from sensorium.recipe.objects import SCHEME, passed_object
from sensorium.recipe.own_modules import searched_folders
from sensorium.recipe.traits import ESTIMATORS, LOSSES, EstimatorTraits, LossTraits, estimator_places, loss_places
from sensorium.vocabulary.errors import RecipeError, nearest

NAMES: dict[str, dict[str, str]] = {
    "family": {
        "internvl": "sensorium.models.internvl:InternVL",
        "llava_onevision": "sensorium.models.llava_onevision:LlavaOnevision",
        "qwen2_5_omni": "sensorium.models.qwen2_5_omni:Qwen25Omni",
        "qwen2_5_vl": "sensorium.models.qwen2_5_vl:Qwen25VL",
        "qwen3_omni_moe": "sensorium.models.qwen3_omni:Qwen3Omni",
        "qwen3_vl": "sensorium.models.qwen3_vl:Qwen3VL",
        "qwen3_vl_moe": "sensorium.models.qwen3_vl:Qwen3VL",
        "smolvlm": "sensorium.models.smolvlm:SmolVLM",
        "qwen2": "sensorium.models.text:TextModel",
        "qwen3": "sensorium.models.text:TextModel",
    },
    "source": {
        "shapes": "sensorium.tasks.shapes:Shapes",
        "jsonl": "sensorium.tasks.rows:JsonlRows",
        "parquet": "sensorium.tasks.rows:ParquetRows",
        "hub": "sensorium.tasks.hub:HubRows",
        "environments": "sensorium.tasks.environment_tasks:EnvironmentTasks",
        "vagen": "sensorium.tasks.vagen:VagenTasks",
        "svg_files": "sensorium.tasks.svg_files:SvgFiles",
        "intent": "sensorium.tasks.intent:Intent",
        "daily_omni": "sensorium.tasks.daily_omni:DailyOmni",
        "caprl": "sensorium.tasks.caprl:CaptionRows",
        "captioned_shapes": "sensorium.tasks.captioned_shapes:CaptionedShapes",
        "caption_reading": "sensorium.tasks.caption_reading:CaptionReading",
        "sight_and_sound": "sensorium.tasks.sight_and_sound:SightAndSound",
        "taskmem": "sensorium.tasks.taskmem:TaskMemRows",
        "memory_clips": "sensorium.tasks.memory_clips:MemoryClips",
    },
    "planner": {
        "mixture": "sensorium.tasks.planner:MixturePlanner",
        "success_curriculum": "sensorium.tasks.success_curriculum:SuccessCurriculum",
        "causal_history": "sensorium.tasks.causal:CausalHistory",
    },
    "environment": {
        "question": "sensorium.envs.question:Question",
        "frozen_lake": "sensorium.envs.frozen_lake:FrozenLake",
        "sokoban": "sensorium.envs.sokoban:Sokoban",
        "countdown": "sensorium.envs.countdown:Countdown",
        "svg": "sensorium.envs.svg:SvgDrawing",
        "navigation": "sensorium.envs.navigation:Navigation",
        "ai2thor": "sensorium.envs.navigation:ThorNavigation",
        "primitive_skill": "sensorium.envs.primitive_skill:PrimitiveSkills",
        "tools": "sensorium.envs.tools.environment:ToolUse",
        "geo3k": "sensorium.envs.tools.geo3k:Geo3k",
        "geometry": "sensorium.envs.tools.geometry:Geometry",
        "gymnasium": "sensorium.envs.adapters.gymnasium:GymnasiumEnvironment",
        "slime": "sensorium.envs.adapters.slime:SlimeEnvironment",
        "vagen": "sensorium.envs.adapters.vagen:VagenEnvironment",
        "openenv": "sensorium.envs.adapters.openenv:OpenEnvironment",
        "rows": "sensorium.envs.rows:RowsEnvironment",
        "remote": "sensorium.envs.remote.environment:RemoteEnvironment",
        "isolated": "sensorium.envs.remote.isolated:IsolatedEnvironment",
    },
    "tool": {
        "calculator": "sensorium.envs.tools.calculator:Calculator",
        "crop": "sensorium.envs.tools.crop:Crop",
    },
    "similarity": {
        "dino": "sensorium.models.picture_similarity:mean_similarity",
        "dreamsim": "sensorium.models.picture_similarity:dreamsim_similarity",
    },
    "reward": {
        "format": "sensorium.rewards.format:Format",
        "exact": "sensorium.rewards.match:Exact",
        "exact_alnum": "sensorium.rewards.match:exact_alnum",
        "exact_alnum_with_fallback": "sensorium.rewards.match:exact_alnum_with_fallback",
        "choice": "sensorium.rewards.match:Choice",
        "numeric": "sensorium.rewards.match:Numeric",
        "accuracy_by_type": "sensorium.rewards.by_type:AccuracyByType",
        "bbox_iou": "sensorium.rewards.boxes:BoxIoU",
        "bbox_giou": "sensorium.rewards.boxes:BoxGIoU",
        "math": "sensorium.rewards.mathematics:Mathematics",
        "environment": "sensorium.rewards.environment:EnvironmentReward",
        "overlong": "sensorium.rewards.overlong:Overlong",
        "timestamps": "sensorium.rewards.timestamps:Timestamps",
        "token_length": "sensorium.rewards.token_length:TokenLength",
        "judge": "sensorium.rewards.judged:Judge",
        "judge_ranking": "sensorium.rewards.judge_ranking:JudgeRanking",
        "episodic_memory": "sensorium.rewards.episodic_memory:EpisodicMemory",
        "caption_qa": "sensorium.rewards.caption_qa:CaptionQA",
        "caption_judge": "sensorium.rewards.caption_judge:CaptionJudge",
        "remote": "sensorium.rewards.remote:RemoteReward",
    },
    "engine": {
        "native": "sensorium.engines.native.engine:NativeEngine",
        "process": "sensorium.engines.process.engine:ProcessEngine",
        "vllm": "sensorium.engines.vllm.engine:VllmEngine",
    },
    "advantage": estimator_places(),
    "loss": loss_places(),
    "logger": {
        "tensorboard": "sensorium.report.tensorboard:TensorboardLogger",
        "wandb": "sensorium.report.wandb:WandbLogger",
    },
}

GIVEN = {
    "source": ("store",),
    "environment": ("store", "task"),
    "planner": ("stream", "store"),
    "engine": ("policy", "lockstep", "host"),
}
"""What the trainer gives beside the options of a recipe, by kind.

A planner is given those it has a parameter for, and so is an environment: ``task`` only if it names it.
"""

PARAMETER_GROUPS = ("vision", "audio", "projector", "language", "head")
"""The named parts of a model that can be frozen or given a learning rate of their own."""


def register(kind: str, name: str, place: str, **traits: Any) -> None:
    """Add a name of your own: ``register("reward", "brevity", "my_package.terms:Brevity")``.

    ``traits`` say what an estimator or a loss needs: ``register("advantage", "mine", "my_package:mine", critic=True)``.
    """
    table(kind)[name] = place
    if kind == "advantage":
        ESTIMATORS[name] = EstimatorTraits(**traits)
    elif kind == "loss":
        LOSSES[name] = LossTraits(**traits)
    elif traits:
        raise TypeError(f"a {kind} has no traits such as {', '.join(traits)}; only estimators (advantage) and losses do")


def table(kind: str) -> dict[str, str]:
    """The names of one kind."""
    return NAMES[kind]


def check(kind: str, name: str, where: str) -> None:
    """Refuse an unknown name with the nearest right one. ``module:attribute`` names a thing of the user's own."""
    problem = wrong_name(kind, name)
    if problem:
        raise RecipeError(f"{where}: {problem}")


def wrong_name(kind: str, name: str) -> str:
    """What is wrong with a name, in a sentence; empty if it is known. Imports nothing."""
    if name in table(kind) or ":" in name:
        return ""
    known = nearest(name, list(table(kind)))
    own = (
        f"A {kind} of your own is written module:attribute, or registered by the script that trains or resumes (sn.resume)."
    )
    return f"unknown {kind} '{name}'{known}" + ("" if "did you mean" in known else f" {own}")


def wrong_options(kind: str, name: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Which option is wrong, and why in a sentence; both empty if all fit. Imports the thing, builds nothing."""
    target = resolve(kind, name)
    if kind == "reward" and (style := reward_style(target)):
        return wrong_function_options(name, target, style, options)
    given = ("context",) if kind == "reward" and takes_context(target) else GIVEN.get(kind, ())
    return _unfit(kind, name, target, options, given)


def resolve(kind: str, name: str, where: str = "") -> Any:
    """Import what a name stands for."""
    check(kind, name, where or kind)
    if name.startswith(SCHEME):
        return passed_object(kind, name, where)
    at = f"{where}: " if where else ""
    module, _, attribute = table(kind).get(name, name).partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's own may do anything, and ':' alone names none
        source = "" if name == f"{module}:{attribute}" else f" from '{module}:{attribute}'"
        raise RecipeError(f"{at}cannot load {kind} '{name}'{source}: {_why_not_loaded(module, error)}") from error


def _why_not_loaded(module: str, error: BaseException) -> str:
    """Why a module cannot be imported, in a sentence, with the way out where there is one."""
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing and module.split(".")[0] != missing.split(".")[0]:
        return f"{error}. Install the package that provides '{missing}'."
    if missing:
        return (
            f"{error}. Modules of your own are looked for beside the recipe, in the working directory, on PYTHONPATH, and, "
            f"where a run goes on, where it found them: here in {_quoted(searched_folders())}. Put the module's folder on "
            "PYTHONPATH."
        )
    if isinstance(error, SystemExit):
        return f"'{module}' ends the program when it is imported (sys.exit, {error.code!r}); put that under a main guard."
    return f"{error}." if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}."


def _quoted(folders: Sequence[str]) -> str:
    return ", ".join(f"'{folder}'" for folder in folders) or "no folder"


def build(kind: str, name: str, options: Mapping[str, Any], where: str = "", **given: Any) -> Any:
    """Build a named thing from its options; a wrong option is refused with the right ones."""
    target = resolve(kind, name, where)
    _, problem = _unfit(kind, name, target, options, tuple(given))
    if problem:
        raise RecipeError(f"{where or kind}: {problem}")
    optional = {"planner": ("stream", "store"), "environment": ("task",), "engine": ("host",)}.get(kind, ())
    given = {key: value for key, value in given.items() if key not in optional or key in signature(target).parameters}
    try:
        return target(**given, **options)
    except (TypeError, ValueError, ArithmeticError, LookupError, AttributeError) as error:
        said = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{where or kind}: {kind} '{name}' cannot be built with these options: {said}.") from error


def _unfit(kind: str, name: str, target: Any, options: Mapping[str, Any], given: Sequence[str]) -> tuple[str, str]:
    """Which option does not fit what a name stands for, and why; ``given`` are the parts that the caller provides."""
    parameters = {key: p for key, p in parameters_of(target).items() if key not in given}
    named = {key: p for key, p in parameters.items() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)}
    if not any(p.kind == p.VAR_KEYWORD for p in parameters.values()):
        for option in options:
            if option not in named:
                known = nearest(option, list(named)) if named else "; it has none."
                return option, f"{kind} '{name}' has no option '{option}'{known}"
    for key, parameter in named.items():
        if parameter.default is parameter.empty and key not in options:
            return key, f"{kind} '{name}' needs the option '{key}'."
        if key in options and (wanted := _wanted(parameter.annotation, options[key])):
            return key, f"{kind} '{name}' has '{key}' as {options[key]!r:.60}; it must be {wanted}."
    return "", ""


def parameters_of(target: Any) -> dict[str, Parameter]:
    """What a class or function can be given by name; options that it takes as ``**options: Unpack[…]`` each by its own."""
    found: dict[str, Parameter] = {}
    for parameter in signature(target).parameters.values():
        if parameter.kind == Parameter.VAR_KEYWORD and get_origin(parameter.annotation) is Unpack:
            (options,) = get_args(parameter.annotation)
            for key, kind in get_type_hints(options).items():
                found[key] = Parameter(key, Parameter.KEYWORD_ONLY, default=None, annotation=kind)
        else:
            found[parameter.name] = parameter
    return found


def needs_a_row(kind: Any) -> bool:
    """Whether an environment plays the questions of rows only: one that can do without a ``task`` plays from seeds too."""
    task = parameters_of(kind).get("task")
    return task is not None and task.default is Parameter.empty


def closed_options(kind: Any) -> tuple[str, ...]:
    """The options of an environment that only a recipe may set."""
    return tuple(getattr(kind, "recipe_only", ()))


def plays_for_anybody(kind: Any) -> bool:
    """Whether an environment plays from seeds without an option that only a recipe may set."""
    parameters = parameters_of(kind)
    needed = (parameters[key] for key in closed_options(kind) if key in parameters)
    return not needs_a_row(kind) and all(parameter.default is not Parameter.empty for parameter in needed)


def _wanted(annotation: Any, value: Any) -> str:
    """What an option must be where its annotation is a plain type and its value is not of it; empty if it fits."""
    kinds: dict[Any, tuple[str, Any]] = {
        int: ("a whole number", int),
        float: ("a number", int | float),
        bool: ("true or false", bool),
        str: ("a text", str),
    }
    if isinstance(annotation, UnionType):
        if value is None and NoneType in get_args(annotation):
            return ""
        others = [kind for kind in get_args(annotation) if kind is not NoneType]
        annotation = others[0] if len(others) == 1 else annotation
    by_name = {kind.__name__: kind for kind in kinds}
    words, kind = kinds.get(by_name.get(annotation) if isinstance(annotation, str) else annotation, ("", object))
    if not isinstance(value, kind) or (isinstance(value, bool) and words in ("a whole number", "a number")):
        return words
    return f"{words} of at most 62 bits" if words and isinstance(value, int) and value.bit_length() > 62 else ""
