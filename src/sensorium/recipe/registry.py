"""The table of names, and how names become things: registered names, ``module:attribute``, and objects that were passed.

Nothing is imported before it is used, and nothing here needs torch. A run directory's ``modules.json`` holds the folders of
modules of the user's own: ``{"my_rewards": "/home/me/exp"}`` for a recipe in ``exp``. A run that is continued elsewhere
looks there too, after the working directory and PYTHONPATH.
"""

import json
import os
import re
import sys
import sysconfig
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from inspect import Parameter, signature
from pathlib import Path
from types import ModuleType, NoneType, UnionType
from typing import Any, Literal, Unpack, get_args, get_origin, get_type_hints

from sensorium.recipe.estimators_and_losses import ESTIMATORS, LOSSES, EstimatorTraits, LossTraits
from sensorium.vocabulary.errors import RecipeError, nearest

FILE = "modules.json"
NAME = re.compile(r"(\w+)(?:\.(\w+)[.\w]*)?:\w+")
NO_MODULES = {"tiny", "package", "python"}  # before the colon of models (tiny:qwen2) and passed objects (python:brevity)


def own_modules(recipe: Mapping[str, Any]) -> dict[str, str]:
    """The folder of each module that a recipe names and that is not installed, by its name. Imports nothing."""
    folders = {name: _folder(name, inner) for name, inner in sorted(_named(recipe))}
    return {name: folder for name, folder in folders.items() if folder and not _installed(folder)}


def look_where_found(run: Path, recipe: Mapping[str, Any]) -> None:
    """Also search for the modules of a run's recipe where they were found when it was last started."""
    found = _found_before(run, recipe)
    sys.path += [folder for folder in dict.fromkeys(found.values()) if folder not in sys.path]
    for name, then, now in _elsewhere(found, recipe):
        warnings.warn(
            f"ATTENTION: '{name}' is loaded from '{now}', but the run in '{run}' found it in '{then}', which has one too.",
            stacklevel=2,
        )


def refuse_loaded_elsewhere(run: Path, recipe: Mapping[str, Any]) -> None:
    """Refuse to continue with a module that another run of this process has loaded from another folder."""
    for name, then, now in _elsewhere(_found_before(run, recipe), recipe):
        if name in sys.modules:
            raise RecipeError(
                f"'{name}' is loaded in this process from '{now}', but the run in '{run}' found it in '{then}', and a "
                "process has one module of a name. Continue the run in a process of its own."
            )


def _found_before(run: Path, recipe: Mapping[str, Any]) -> dict[str, str]:
    path = run / FILE
    if not path.is_file():
        return {}
    try:
        found = json.loads(path.read_bytes())
        folders = {name: found[name] for name, _ in _named(recipe) if name in found}
        return {
            name: folder for name, folder in folders.items() if os.path.isabs(os.fsencode(folder)) and "\0" not in folder
        }
    except (OSError, ValueError, AttributeError, TypeError, RecursionError) as error:
        raise RecipeError(f"'{path}' cannot be read ({error}). Remove it, and name the folders in PYTHONPATH.") from error


def _elsewhere(found: Mapping[str, str], recipe: Mapping[str, Any]) -> Iterator[tuple[str, str, str]]:
    for name, inner in sorted(_named(recipe)):
        then, now = found.get(name, ""), _folder(name, inner)
        there = any(os.path.exists(os.path.join(then, name + end)) for end in ("", ".py"))
        if then and now and there and not os.path.samefile(now, then):
            yield name, then, now


def _named(value: Any) -> set[tuple[str, str]]:  # (outermost package, module in it) of each module:attribute
    if isinstance(value, str):
        found = NAME.fullmatch(value)
        return {(found[1], found[2] or "")} if found and found[1] not in NO_MODULES else set()
    items = value.values() if isinstance(value, Mapping) else value if isinstance(value, list) else ()
    return {named for item in items for named in _named(item)}


def _folder(name: str, inner: str = "") -> str:
    try:
        spec = find_spec(name)
    except (ImportError, ValueError):  # ValueError: a module that was made by hand
        return ""
    if spec is None:
        return ""
    places = [*spec.submodule_search_locations] if spec.submodule_search_locations else [spec.origin or ""]
    held = [place for place in places if any(os.path.exists(os.path.join(place, inner + end)) for end in ("", ".py"))]
    place = (held if inner and held else places)[0]  # a package without __init__.py may lie in several folders
    return os.path.dirname(os.path.abspath(place)) if os.path.exists(place) else ""


def _installed(folder: str) -> bool:
    place = Path(folder)
    return (
        place.is_relative_to(sysconfig.get_path("stdlib"))
        or place == Path(sys.executable).parent
        or place.suffix == ".zip"
        or bool({"site-packages", "dist-packages"} & set(place.parts))
    )


# A function of my_rewards.py is ``my_rewards:brevity`` in the recipe. A lambda, or one typed into a notebook, is
# ``python:brevity``: only the process that passed it knows it, so it must be passed again to resume the run.
SCHEME = "python:"
_passed: dict[str, dict[str, Any]] = {}


def importable_name(thing: Any) -> str:
    """``module:Name`` of a class or function that any process can import; empty for lambdas, local and notebook ones."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or module == "__main__" or not name or "." in name or "<" in name:
        return ""
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is thing else ""


def own_name(thing: Any) -> str:
    """The name of an object, or of its class."""
    name = str(getattr(thing, "__name__", "") or type(thing).__name__)
    return "lambda" if name == "<lambda>" else name


def pass_object(kind: str, wanted: str, thing: Any, taken: Collection[str] = ()) -> str:
    """Register an object in this process; returns its name for the recipe. Names in ``taken`` get a number."""
    name, count = f"{SCHEME}{wanted}", 1
    while name in taken:
        count += 1
        name = f"{SCHEME}{wanted}_{count}"
    _passed.setdefault(kind, {})[name] = thing
    return name


def _passed_object(kind: str, name: str, where: str = "") -> Any:
    try:
        return _passed[kind][name]
    except KeyError:
        argument = {"reward": "rewards=[…]", "planner": "tasks={'planner': …}"}.get(kind, "tasks=…")
        raise RecipeError(
            f"{where or kind}: '{name}' is a Python object that was passed when the run began; a file cannot hold it. "
            f"Pass it again, as in sensorium.resume(run_dir, {argument}), or put it into a module that can be "
            "imported and start the run with that."
        ) from None


# ``def brevity(task, episode, scale=1.0)`` is called for each episode, ``def ranks(task, episodes)`` for a whole group;
# ``def brevity(prompts, completions, **columns)`` is TRL's form, with lists. Anything else builds a term.
Style = Literal["episode", "episodes", "completions", ""]
# Options that the wrapper of a function takes itself, unless the function has a parameter of that name.
WRAPPING = {
    "episode": ("name", "instant"),
    "episodes": ("name", "instant"),
    "completions": ("name", "instant", "messages", "group"),
}


def reward_style(target: Any) -> Style:
    """How a reward function is called; empty for a class, or a function that builds a reward term."""
    if isinstance(target, type) or not callable(target):
        return ""
    parameters = list(function_parameters(target))
    if "completions" in parameters:
        return "completions"
    if parameters[:2] == ["task", "episodes"]:
        return "episodes"
    return "episode" if parameters[:2] == ["task", "episode"] else ""


def takes_context(target: Any) -> bool:
    """True for a class or function with a keyword-only parameter ``context``, which the caller provides."""
    parameter = function_parameters(target).get("context") if callable(target) else None
    return parameter is not None and parameter.kind == Parameter.KEYWORD_ONLY


def function_parameters(target: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a callable by name; none where Python cannot tell (some built-in functions)."""
    try:
        return dict(signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def wrong_function_options(name: str, target: Any, style: Style, options: Mapping[str, Any]) -> tuple[str, str]:
    """Which option of a recipe a reward function does not take, and why; both empty if all fit."""
    parameters = function_parameters(target)
    given = ["prompts", "completions", "completion_ids"] if style == "completions" else list(parameters)[:2]
    given += ["context"] if takes_context(target) else []
    own = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [*(key for key in own if key not in given), *WRAPPING[style]]
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option in given or (option not in known and not open_ended):
            return option, f"reward function '{name}' has no option '{option}'{nearest(option, known)}"
    if style != "completions":
        for key in own:
            if key not in given and key not in options and parameters[key].default is Parameter.empty:
                return key, f"reward function '{name}' needs the option '{key}'."
    return "", ""


NAMES: dict[str, dict[str, str]] = {
    "family": {
        "general": "sensorium.models.general_path:General",
        "glm4v": "sensorium.models.families.glm4v:Glm4v",
        "internvl": "sensorium.models.families.internvl:InternVL",
        "llava_onevision": "sensorium.models.families.llava_onevision:LlavaOnevision",
        "qwen2_audio": "sensorium.models.families.qwen2_audio:Qwen2Audio",
        "qwen2_5_omni": "sensorium.models.families.qwen2_5_omni:Qwen25Omni",
        "qwen2_5_vl": "sensorium.models.families.qwen2_5_vl:Qwen25VL",
        "qwen3_5": "sensorium.models.families.qwen3_5:Qwen35",
        "qwen3_5_moe": "sensorium.models.families.qwen3_5:Qwen35Moe",
        "qwen3_omni_moe": "sensorium.models.families.qwen3_omni:Qwen3Omni",
        "qwen3_vl": "sensorium.models.families.qwen3_vl:Qwen3VL",
        "qwen3_vl_moe": "sensorium.models.families.qwen3_vl:Qwen3VLMoe",
        "smolvlm": "sensorium.models.families.smolvlm:SmolVLM",
        "llama": "sensorium.models.families.text:Llama",
        "qwen2": "sensorium.models.families.text:Qwen2",
        "qwen3": "sensorium.models.families.text:Qwen3",
    },
    "source": {
        "shapes": "sensorium.data.shapes:Shapes",
        "jsonl": "sensorium.data.rows:JsonlRows",
        "parquet": "sensorium.data.rows:ParquetRows",
        "hub": "sensorium.data.rows:HubRows",
        "environments": "sensorium.data.environment_tasks:EnvironmentTasks",
        "vagen": "sensorium.systems.vagen.tasks:VagenTasks",
        "svg_files": "sensorium.data.environment_tasks:SvgFiles",
        "intent": "sensorium.systems.audio_visual.sources:Intent",
        "daily_omni": "sensorium.systems.audio_visual.sources:DailyOmni",
        "caprl": "sensorium.systems.caprl.caption_rows:CaptionRows",
        "captioned_shapes": "sensorium.systems.caprl.generated:CaptionedShapes",
        "caption_reading": "sensorium.systems.caprl.generated:CaptionReading",
        "sight_and_sound": "sensorium.systems.audio_visual.generated:SightAndSound",
        "taskmem": "sensorium.systems.taskmem.memory_rows:TaskMemRows",
        "memory_clips": "sensorium.systems.taskmem.memory_clips:MemoryClips",
    },
    "planner": {
        "mixture": "sensorium.data.planner:MixturePlanner",
        "success_curriculum": "sensorium.data.planner:SuccessCurriculum",
        "level_curriculum": "sensorium.data.planner:LevelCurriculum",
        "causal_history": "sensorium.data.causal_history:CausalHistory",
    },
    "environment": {
        "question": "sensorium.envs.question:Question",
        "frozen_lake": "sensorium.envs.frozen_lake:FrozenLake",
        "sokoban": "sensorium.envs.sokoban:Sokoban",
        "countdown": "sensorium.envs.countdown:Countdown",
        "svg": "sensorium.envs.svg:SvgDrawing",
        "navigation": "sensorium.envs.navigation:Navigation",
        "ai2thor": "sensorium.envs.ai2thor:ThorNavigation",
        "primitive_skill": "sensorium.envs.primitive_skill:PrimitiveSkills",
        "tools": "sensorium.envs.tool_use:ToolUse",
        "geo3k": "sensorium.systems.geo3k.environment:Geo3k",
        "geometry": "sensorium.systems.geo3k.environment:Geometry",
        "gymnasium": "sensorium.envs.adapters.gymnasium:GymnasiumEnvironment",
        "slime": "sensorium.systems.geo3k.slime_adapter:SlimeEnvironment",
        "vagen": "sensorium.systems.vagen.adapter:VagenEnvironment",
        "openenv": "sensorium.envs.adapters.openenv:OpenEnvironment",
        "rows": "sensorium.envs.question:RowsEnvironment",
        "agent": "sensorium.services.agents:AgentEnvironment",
        "remote": "sensorium.envs.remote.client:RemoteEnvironment",
        "isolated": "sensorium.envs.remote.isolated:IsolatedEnvironment",
    },
    "agent": {},
    "environment_routes": {
        "openenv": "sensorium.services.openenv_routes:openenv_routes",
        "vagen": "sensorium.systems.vagen.routes:vagen_routes",
        "vagen_legacy": "sensorium.systems.vagen.routes:legacy_routes",
    },
    "tool": {
        "calculator": "sensorium.envs.shipped_tools:Calculator",
        "crop": "sensorium.envs.shipped_tools:Crop",
    },
    "similarity": {
        "dino": "sensorium.models.picture_similarity:mean_similarity",
        "dreamsim": "sensorium.models.picture_similarity:dreamsim_similarity",
    },
    "reward": {
        "format": "sensorium.rewards.terms:Format",
        "exact": "sensorium.rewards.terms:Exact",
        "exact_alnum": "sensorium.rewards.terms:exact_alnum",
        "exact_alnum_with_fallback": "sensorium.rewards.terms:exact_alnum_with_fallback",
        "choice": "sensorium.rewards.terms:Choice",
        "numeric": "sensorium.rewards.terms:Numeric",
        "gsm8k": "sensorium.rewards.terms:Gsm8k",
        "accuracy_by_type": "sensorium.systems.audio_visual.by_type:AccuracyByType",
        "bbox_iou": "sensorium.rewards.terms:BoxIoU",
        "bbox_giou": "sensorium.rewards.terms:BoxGIoU",
        "math": "sensorium.rewards.terms:Mathematics",
        "environment": "sensorium.rewards.terms:EnvironmentReward",
        "overlong": "sensorium.rewards.terms:Overlong",
        "timestamps": "sensorium.rewards.terms:Timestamps",
        "token_length": "sensorium.rewards.terms:TokenLength",
        "judge": "sensorium.rewards.judge_terms:Judge",
        "judge_ranking": "sensorium.rewards.judge_terms:JudgeRanking",
        "episodic_memory": "sensorium.systems.taskmem.reward:EpisodicMemory",
        "caption_qa": "sensorium.systems.caprl.terms:CaptionQA",
        "caption_judge": "sensorium.systems.caprl.terms:CaptionJudge",
        "remote": "sensorium.systems.caprl.remote:RemoteReward",
    },
    "engine": {
        "native": "sensorium.engines.native.native_engine:NativeEngine",
        "process": "sensorium.engines.process_engine:ProcessEngine",
        "vllm": "sensorium.engines.vllm.vllm_engine:VllmEngine",
    },
    "advantage": {name: f"sensorium.algorithms.advantages:{name}" for name in ESTIMATORS},
    "loss": {name: f"sensorium.algorithms.losses:{name}" for name in LOSSES},
    "layout": {"taskmem": "sensorium.systems.taskmem.layout:TaskMemLayout"},
    "logger": {
        "tensorboard": "sensorium.report.watcher:TensorboardLogger",
        "wandb": "sensorium.report.watcher:WandbLogger",
        "mlflow": "sensorium.report.watcher:MlflowLogger",
        "trackio": "sensorium.report.watcher:TrackioLogger",
    },
}


@cache
def _absent(package: str) -> str:
    found = find_spec(package)
    if found is not None and found.origin is not None:  # a folder without __init__.py has no origin
        return ""
    return f"is part of the package {package}, which this installation does not have. Install all of sensorium for it."


def import_system(module: str, what: str) -> ModuleType:
    """Import a module of a system; if its folder was removed, the error names ``what`` needs it, and the package."""
    if problem := _absent(_system_of(module)):
        raise RecipeError(f"{what} {problem}")
    return import_module(module)


def _system_of(place: str) -> str:
    return ".".join(place.split(".")[:3])


# Names of systems whose folder was removed, with the package; they are removed from the table.
ABSENT = {
    (kind, name): _system_of(place)
    for kind, places in NAMES.items()
    for name, place in places.items()
    if place.startswith("sensorium.systems.") and _absent(_system_of(place))
}
for _kind, _name in ABSENT:
    del NAMES[_kind][_name]

# Parameters that the trainer provides, beside a recipe's options; planners and environments may leave them out.
GIVEN = {
    "source": ("store",),
    "environment": ("store", "task"),
    "planner": ("stream", "store"),
    "engine": ("policy", "lockstep", "host"),
}

# Parts of a model that can be frozen or have their own learning rate.
PARAMETER_GROUPS = ("vision", "audio", "projector", "language", "head")


def register(kind: str, name: str, place: str, **traits: Any) -> None:
    """Add a name of your own: ``register("reward", "brevity", "my_package.terms:Brevity")``.

    ``traits`` are what an estimator or a loss needs: ``register("advantage", "mine", "my_package:mine", critic=True)``.
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
    if problem := wrong_name(kind, name):
        raise RecipeError(f"{where}: {problem}")


def wrong_name(kind: str, name: str) -> str:
    """What is wrong with a name; empty if it is known. Imports nothing."""
    if name in table(kind) or ":" in name:
        return ""
    if package := ABSENT.get((kind, name)):
        return f"{kind} '{name}' {_absent(package)}"
    known = nearest(name, list(table(kind)))
    own = (
        f"A {kind} of your own is written module:attribute, or registered by the script that trains or resumes (sn.resume)."
    )
    return f"unknown {kind} '{name}'{known}" + ("" if "did you mean" in known else f" {own}")


def wrong_options(kind: str, name: str, options: Mapping[str, Any]) -> tuple[str, str]:
    """Which option is wrong, and why; both empty if all fit. Imports the thing, builds nothing."""
    target = resolve(kind, name)
    if kind == "reward" and (style := reward_style(target)):
        return wrong_function_options(name, target, style, options)
    given = ("context",) if kind == "reward" and takes_context(target) else GIVEN.get(kind, ())
    return _unfit(kind, name, target, options, given)


def resolve(kind: str, name: str, where: str = "") -> Any:
    """Import the thing of a name."""
    check(kind, name, where or kind)
    if name.startswith(SCHEME):
        return _passed_object(kind, name, where)
    at = f"{where}: " if where else ""
    module, _, attribute = table(kind).get(name, name).partition(":")
    try:
        return getattr(import_module(module), attribute)
    except (Exception, SystemExit) as error:  # a module of the user's own may do anything, and ':' alone names none
        source = "" if name == f"{module}:{attribute}" else f" from '{module}:{attribute}'"
        raise RecipeError(f"{at}cannot load {kind} '{name}'{source}: {_why_not_loaded(module, error)}") from error


def _why_not_loaded(module: str, error: BaseException) -> str:
    missing = error.name if isinstance(error, ModuleNotFoundError) and error.name else ""
    if missing and module.split(".")[0] != missing.split(".")[0]:
        return f"{error}. Install the package that provides '{missing}'."
    if missing:
        folders = [
            folder for folder in dict.fromkeys(folder or os.getcwd() for folder in sys.path) if os.path.isabs(folder)
        ]
        searched = ", ".join(f"'{folder}'" for folder in folders if not _installed(folder)) or "no folder"
        return (
            f"{error}. Modules of your own are searched for beside the recipe, in the working directory, on PYTHONPATH, "
            f"and, for a run that is continued, where it found them: here in {searched}. Put the module's folder on "
            "PYTHONPATH."
        )
    if isinstance(error, SystemExit):
        return f"'{module}' ends the program when it is imported (sys.exit, {error.code!r}); put that under a main guard."
    return f"{error}." if isinstance(error, ImportError | AttributeError) else f"{type(error).__name__}: {error}."


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
        why = f"{type(error).__name__}: {error}"
        raise RecipeError(f"{where or kind}: {kind} '{name}' cannot be built with these options: {why}.") from error


def _unfit(kind: str, name: str, target: Any, options: Mapping[str, Any], given: Sequence[str]) -> tuple[str, str]:
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
    """The parameters of a class or function by name, with those inside ``**options: Unpack[…]``."""
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
    """Whether an environment plays only questions of rows: one without a required ``task`` plays from seeds too."""
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
