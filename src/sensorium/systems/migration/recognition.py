"""Whose settings a text holds, and the settings in it: a shell script or command, a Python run script, or a YAML file.

bash run.sh data.train_batch_size=32 actor_rollout_ref.rollout.n=8      → verl
CAPTION_MODEL=/m DATASET=d.jsonl bash scripts/train_caprl.sh            → caprl
python3 train.py --hf-checkpoint /m --rollout-batch-size 64             → slime
grpo: {num_prompts_per_step: 32}                                        → nemo_rl
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sensorium.systems.audio_visual.nemo_rl_settings import migrate_nemo, read_config, read_with_references
from sensorium.systems.caprl.settings import is_caprl, migrate_caprl
from sensorium.systems.geo3k.slime_settings import arguments, data_of_download, migrate_slime, python_arguments, turns_of
from sensorium.systems.migration.outcomes import Migration, Outcome, Setting, flat, parsed
from sensorium.systems.migration.shell import Command, Script
from sensorium.systems.migration.verl import VAGEN_COMMAND, migrate_environments, migrate_verl, split_override
from sensorium.vocabulary.errors import RecipeError

SECTIONED = re.compile(r"[./]|^--config-")
"""In a key: it is of a configuration with sections, not a variable."""
FRAMEWORKS = ("verl", "caprl", "slime", "nemo_rl")
NEMO_SECTIONS = {"grpo", "policy", "loss_fn", "checkpointing", "cluster", "env", "logger", "reward_penalties"}
BUILTINS = (
    "set",
    "cd",
    "echo",
    "sleep",
    "true",
    "exit",
    "shift",
    "unset",
    "trap",
    "wait",
    "return",
    "[",
    "[[",
    "test",
    "ulimit",
)
SLIME = {
    "--hf-checkpoint", "--rollout-batch-size", "--num-rollout", "--advantage-estimator", "--rollout-max-response-len",
    "--prompt-data",
}  # fmt: skip
"""Options by which a command is recognised as slime's."""
OF_LIBRARIES = (
    "HF_", "TRANSFORMERS_", "WANDB_", "VLLM_", "NCCL_", "CUDA_", "PYTHON", "RAY_", "TOKENIZERS_", "OMP_", "TORCH",
    "PYTORCH_", "NVTE_", "GLOO_", "HYDRA_", "no_proxy", "http_proxy", "https_proxy", "HTTP_", "HTTPS_", "MASTER_",
    "SGLANG_", "HCCL_", "ASCEND_", "LD_", "PATH", "TASK_QUEUE_", "CPU_AFFINITY_", "SWANLAB_", "HYDRA", "UCX_",
    "NVSHMEM_", "XDG_", "TRITON_",
)  # fmt: skip
TELLS = {
    "M3_API_CONFIG": "it is read here, too: where the judges' endpoints and keys are (docs/guides/judges.md)",
    "WANDB_API_KEY": "wandb reads it itself; a recipe never holds a key",
    "CUDA_VISIBLE_DEVICES": "it is read here, too",
}


def migrate(text: str, named: str, framework: str = "", folder: Path | None = None) -> Migration:
    """The recipe of a text, and what each of its keys became. ``folder`` is where files that it names are looked for."""
    if framework and framework not in FRAMEWORKS:
        raise RecipeError(f"--from is one of {', '.join(FRAMEWORKS)}, not '{framework}'.")
    if not text.strip():
        raise RecipeError(f"{named} is empty: give a script, a command line or a YAML file of another trainer.")
    data = _yaml(text, named)
    if data is not None and framework in ("", "verl") and _environments(data):
        return migrate_environments(data, named)
    if data is not None and (framework == "slime" or (not framework and "rollout_interaction_env_path" in data)):
        return migrate_slime(turns_of(data), text, named)
    if data is not None and (framework == "nemo_rl" or (not framework and ({*data} & NEMO_SECTIONS or "defaults" in data))):
        config, notes = read_config(text, named, folder)
        return migrate_nemo(config, [], named, notes)
    if data is not None:
        return _migrate_sections(data, text, named, framework)
    if framework in ("", "slime") and _is_python(text, named):
        settings, notes = python_arguments(text)
        return migrate_slime(settings, text, named, notes)
    return _migrate_script(text, named, framework, folder)


def _migrate_sections(data: Mapping[str, Any], text: str, named: str, framework: str) -> Migration:
    """A YAML of verl's sections, or one that nobody knows."""
    found = flat(data)
    verl = any(
        key.startswith(("actor_rollout_ref.", "data.", "trainer.", "algorithm.", "rollout_manager.")) for key in found
    )
    if framework != "verl" and not verl:
        raise RecipeError(_unrecognised(named))
    return migrate_verl([Setting(key, value) for key, value in found.items()], text, named)


def _migrate_script(text: str, named: str, framework: str, folder: Path | None) -> Migration:
    script = Script(text)
    overrides, options, variables, others = _settings(script)
    names = {setting.key for setting in [*variables, *overrides]}
    kind = framework or _kind(text, {setting.key for setting in overrides}, {setting.key for setting in options}, names)
    if not kind:
        raise RecipeError(_unrecognised(named))
    if kind == "caprl":
        migration = migrate_caprl(_own(variables, text), overrides, text, named, script.notes)
        taken = {outcome.setting.key for outcome in migration.outcomes}
    elif kind == "slime":
        own = [one for one in variables if one.key.startswith("SLIME_SCRIPT_")]
        migration = migrate_slime([*own, *options], text, named, script.notes)
        taken = {setting.key for setting in own}
        _take_download(migration, script, named, text, own, options)
    elif kind == "nemo_rl":
        config, notes = _nemo_config(options, overrides, folder)
        migration = migrate_nemo(
            config, [one for one in overrides if one.key != "--config"], named, [*script.notes, *notes]
        )
        taken = set()
    else:
        migration = migrate_verl(overrides, text, named, script.notes)
        taken = set()
    migration.outcomes += [_of_variable(one) for one in variables if one.key not in taken]
    told = {outcome.setting.key for outcome in migration.outcomes}
    inside = [Setting(name, value) for name, value in script.variables.items() if name not in told]
    migration.outcomes += [Outcome(one, "no effect", "not exported: it counts where the script uses it") for one in inside]
    unused = [Setting(name, " ".join(items)) for name, items in script.arrays.items() if name not in script.used]
    migration.outcomes += [Outcome(one, "no effect", "no command of the script takes this array") for one in unused]
    migration.outcomes += [_of_command(command) for command in others]
    return migration


def _own(variables: list[Setting], text: str) -> list[Setting]:
    """Variables that are CapRL's, or may be: those of libraries are told apart, WANDB's and the GPUs' count."""
    kept = ("WANDB_", "CUDA_VISIBLE_DEVICES")
    return [one for one in variables if one.key.startswith(kept) or not one.key.startswith(OF_LIBRARIES)]


def _take_download(
    migration: Migration, script: Script, named: str, text: str, own: list[Setting], options: list[Setting]
) -> None:
    """Rows that the script downloads and no argument names are those that the example trains on."""
    places = [place for command in script.commands if (place := data_of_download(command.words))]
    if not places or any(setting.key == "--prompt-data" for setting in options):
        return
    made = migrate_slime(
        [*own, *options, Setting("--prompt-data", f"{places[0]}/train.parquet")], text, named, script.notes
    )
    download = Setting("hf download --local-dir", places[0])
    for i, outcome in enumerate(made.outcomes):
        if outcome.setting.key == "--prompt-data":
            made.outcomes[i] = Outcome(download, outcome.kind, outcome.text)
    migration.text, migration.recipe, migration.problem, migration.outcomes, migration.kept = (
        made.text, made.recipe, made.problem, made.outcomes, made.kept
    )  # fmt: skip


def _settings(script: Script) -> tuple[list[Setting], list[Setting], list[Setting], list[Command]]:
    """Overrides (a.b=c), options (--a b), variables, and commands that hold none of them."""
    overrides: list[Setting] = []
    options: list[Setting] = []
    others: list[Command] = []
    variables = [Setting(name, script.variables.get(name, f"${name}"), line) for name, line in script.exported.items()]
    for command in script.commands:
        variables += [Setting(name, value, command.line) for name, value in command.variables.items()]
        found = [pair for word in command.words if (pair := split_override(word))]
        launches = any("main_ppo" in word for word in command.words)
        if not launches and not any(
            SECTIONED.search(key) for key, _ in found if key[0] != "~"
        ):  # NAME=value of other commands
            found = []
        overrides += [Setting(key, parsed(value), command.line) for key, value in found]
        words = list(command.words)
        if "--" in words:  # ray job submit … -- python3 train.py …
            words = words[words.index("--") + 1 :]
        trains = any(word.endswith(("train.py", "train_async.py")) for word in words) or bool(SLIME & set(words))
        config = [
            i for i, word in enumerate(words) if word.split("=")[0] in ("--config", "-c") and "run_" in " ".join(words)
        ]
        if trains and any(word.startswith("--") for word in words):
            options += arguments(words, command.line)
        elif config:
            value = words[config[0]].partition("=")[2] or words[config[0] + 1]
            options.append(Setting("--config", value, command.line))
        elif not found and not command.words[0].startswith("#"):
            others.append(command)
    loose = {name: value for name, value in script.variables.items() if name not in script.exported}
    known = {setting.key for setting in variables}
    variables += [
        Setting(name, value) for name, value in loose.items() if name.startswith("SLIME_SCRIPT_") and name not in known
    ]
    if not overrides and not options:
        variables += [Setting(name, value) for name, value in loose.items() if name not in known and name.isupper()]
    return overrides, options, variables, others


def _kind(text: str, overrides: set[str], options: set[str], variables: set[str]) -> str:
    if is_caprl(dict.fromkeys(variables), text) or "data.input_type" in overrides:
        return "caprl"
    roots = {key.partition(".")[0] for key in overrides}
    if {"actor_rollout_ref", "trainer", "rollout_manager", "critic", "reward_model"} & roots:
        return "verl"
    if {"grpo", "policy", "loss_fn", "checkpointing"} & roots or "--config" in options:
        return "nemo_rl"
    if SLIME & options or any(name.startswith("SLIME_SCRIPT_") for name in variables):
        return "slime"
    if {"data", "algorithm"} & roots or VAGEN_COMMAND.search(text):
        return "verl"
    return "verl" if "M3_API_CONFIG" in variables else "nemo_rl" if "cluster" in roots else ""


def _nemo_config(options: list[Setting], overrides: list[Setting], folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The configuration that a command names, where it can be read."""
    given = next((str(one.value) for one in options if one.key == "--config"), "")
    if not given:
        return {}, []
    for place in [Path(given)] if folder is None else [folder / given, *(up / given for up in folder.parents), Path(given)]:
        if place.is_file():
            return read_config(place.read_text(encoding="utf-8"), given, place.parent)
    return {}, [f"the configuration '{given}' is not here, so only the overrides of the command are in the table"]


def _of_variable(setting: Setting) -> Outcome:
    if setting.key in TELLS:
        return Outcome(setting, "no effect", TELLS[setting.key])
    if setting.key.startswith(OF_LIBRARIES):
        return Outcome(setting, "no effect", "a variable of a library or of the machine; set it here, too, if it is needed")
    return Outcome(setting, "unknown", "a variable that is not known here; nothing was made of it")


def _of_command(command: Command) -> Outcome:
    words = " ".join(command.words)
    setting = Setting("$ " + (words if len(words) <= 60 else words[:57] + "…"), "", command.line)
    if command.words[0] in ("source", "."):
        return Outcome(
            setting, "no place", "the file was not read: what it sets is not in the table. Join the two files for that"
        )
    if command.words[0] in BUILTINS:
        return Outcome(setting, "no effect", "of the script alone")
    return Outcome(setting, "no place", "a command of set-up or launch; a recipe holds none")


def _yaml(text: str, named: str) -> dict[str, Any] | None:
    """A mapping of YAML; None for a script."""
    if not named.endswith((".yaml", ".yml")) and not any(
        line.rstrip().endswith(":") or ": " in line for line in text.splitlines()
    ):
        return None
    try:
        data = read_with_references(text, named)
    except RecipeError:
        if named.endswith((".yaml", ".yml")):
            raise
        return None
    return data if isinstance(data, dict) and all(isinstance(key, str) for key in data) else None


def _environments(data: Mapping[str, Any]) -> bool:
    return all(isinstance(entry, dict) and "env_name" in entry for entry in data.values())


def _is_python(text: str, named: str) -> bool:
    if named.endswith(".sh"):
        return False
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return named.endswith(".py") or any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)


def _unrecognised(named: str) -> str:
    return (
        f"{named}: this is none of the scripts, command lines and configurations that are recognised: verl's overrides "
        "(TaskMem, VAGEN), CapRL's variables, slime's arguments, NeMo-RL's YAML. Say whose it is: --from "
        f"{' | '.join(FRAMEWORKS)}."
    )
