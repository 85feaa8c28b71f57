"""Recognises the trainer of a text (shell script, command, Python run script or YAML file) and reads its settings.

bash run.sh data.train_batch_size=32 actor_rollout_ref.rollout.n=8      → verl
CAPTION_MODEL=/m DATASET=d.jsonl bash scripts/train_caprl.sh            → caprl
python3 train.py --hf-checkpoint /m --rollout-batch-size 64             → slime
grpo: {num_prompts_per_step: 32}                                        → nemo_rl
"""

import ast
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from sensorium.recipe.registry import import_system
from sensorium.recipe.yaml import read_yaml
from sensorium.systems.migration.outcomes import Migration, Outcome, Setting, parsed
from sensorium.systems.migration.shell import Command, Script
from sensorium.vocabulary.errors import RecipeError

SECTIONED = re.compile(r"[./]|^--config-")  # a key of a configuration with sections, not a variable
# The module of each trainer has ``certainty(given)``, which is 0 for texts of others, and ``migrate(given)``.
FRAMEWORKS = {
    "caprl": "sensorium.systems.caprl.settings",
    "verl": "sensorium.systems.migration.verl",
    "nemo_rl": "sensorium.systems.audio_visual.nemo_rl_settings",
    "slime": "sensorium.systems.geo3k.slime_settings",
}
BUILTINS = (
    "set", "cd", "echo", "sleep", "true", "exit", "shift", "unset", "trap", "wait", "return", "[", "[[", "test", "ulimit",
)  # fmt: skip
# Options by which a command is recognised as slime's.
SLIME = {
    "--hf-checkpoint", "--rollout-batch-size", "--num-rollout", "--advantage-estimator", "--rollout-max-response-len",
    "--prompt-data",
}  # fmt: skip
OF_LIBRARIES = (
    "HF_", "TRANSFORMERS_", "WANDB_", "VLLM_", "NCCL_", "CUDA_", "PYTHON", "RAY_", "TOKENIZERS_", "OMP_", "TORCH",
    "PYTORCH_", "NVTE_", "GLOO_", "HYDRA_", "no_proxy", "http_proxy", "https_proxy", "HTTP_", "HTTPS_", "MASTER_",
    "SGLANG_", "HCCL_", "ASCEND_", "LD_", "PATH", "TASK_QUEUE_", "CPU_AFFINITY_", "SWANLAB_", "HYDRA", "UCX_",
    "NVSHMEM_", "XDG_", "TRITON_",
)  # fmt: skip
VARIABLES = {
    "M3_API_CONFIG": "it is read here, too: where the judges' endpoints and keys are (docs/guides/judges.md)",
    "WANDB_API_KEY": "wandb reads it itself; a recipe never holds a key",
    "CUDA_VISIBLE_DEVICES": "it is read here, too",
}


@dataclass(frozen=True)
class Given:
    """A text to migrate. ``data`` is the mapping of a YAML text; files that the text names are looked for in ``folder``."""

    text: str
    named: str
    form: Literal["yaml", "python", "script"]
    data: dict[str, Any]
    folder: Path | None

    @cached_property
    def script(self) -> "ScriptSettings":
        """The settings of a shell script."""
        return ScriptSettings(Script(self.text))


def migrate(text: str, named: str, framework: str = "", folder: Path | None = None) -> Migration:
    """The recipe of a text and the outcome of each key. Files that the text names are looked for in ``folder``."""
    if framework and framework not in FRAMEWORKS:
        raise RecipeError(f"--from is one of {', '.join(FRAMEWORKS)}, not '{framework}'.")
    if not text.strip():
        raise RecipeError(f"{named} is empty: give a script, a command line or a YAML file of another trainer.")
    data = _yaml(text, named)
    python = data is None and framework in ("", "slime") and _is_python(text, named)
    given = Given(text, named, "yaml" if data is not None else "python" if python else "script", data or {}, folder)
    trainers: list[Any] = []
    absent: list[str] = []
    for name in [framework] if framework else FRAMEWORKS:
        try:
            trainers.append(import_system(FRAMEWORKS[name], f"migrate --from {name}"))
        except RecipeError as error:
            if framework:
                raise
            absent.append(str(error))
    surest = max(trainers, key=lambda trainer: trainer.certainty(given))
    if not framework and not surest.certainty(given):
        raise RecipeError(" ".join([unrecognised(named), *absent]))
    migration: Migration = surest.migrate(given)
    migration.notes += absent
    if given.form == "script":
        migration.outcomes += given.script.other_outcomes([outcome.setting for outcome in migration.outcomes])
    return migration


class ScriptSettings:
    """Overrides (a.b=c), options (--a b) and variables of a script, and commands that hold none of them."""

    def __init__(self, script: Script) -> None:
        self.script = script
        self.overrides: list[Setting] = []
        self.options: list[Setting] = []
        self.others: list[Command] = []
        exported = script.exported.items()
        self.variables = [Setting(name, script.variables.get(name, f"${name}"), line) for name, line in exported]
        for command in script.commands:
            self.variables += [Setting(name, value, command.line) for name, value in command.variables.items()]
            self._take(command)
        known = {*script.exported, *(setting.key for setting in self.variables)}
        bare = not self.overrides and not self.options
        for name, value in script.variables.items():
            if name not in known and (name.startswith("SLIME_SCRIPT_") or (bare and name.isupper())):
                self.variables.append(Setting(name, value))

    @cached_property
    def roots(self) -> set[str]:
        """The sections that overrides are in: data of data.train_batch_size."""
        return {setting.key.partition(".")[0] for setting in self.overrides}

    @cached_property
    def names(self) -> set[str]:
        """The keys of variables, overrides and options."""
        return {setting.key for setting in [*self.variables, *self.overrides, *self.options]}

    def _take(self, command: Command) -> None:
        found = [pair for word in command.words if (pair := split_override(word))]
        launches = any("main_ppo" in word for word in command.words)
        if not launches and not any(SECTIONED.search(key) for key, _ in found if key[0] != "~"):
            found = []  # NAME=value of other commands
        self.overrides += [Setting(key, parsed(value), command.line) for key, value in found]
        words = list(command.words)
        if "--" in words:  # ray job submit … -- python3 train.py …
            words = words[words.index("--") + 1 :]
        trains = any(word.endswith(("train.py", "train_async.py")) for word in words) or bool(SLIME & set(words))
        runs = "run_" in " ".join(words)
        config = [i for i, word in enumerate(words) if runs and word.split("=")[0] in ("--config", "-c")]
        if trains and any(word.startswith("--") for word in words):
            self.options += arguments(words, command.line)
        elif config:
            value = words[config[0]].partition("=")[2] or words[config[0] + 1]
            self.options.append(Setting("--config", value, command.line))
        elif not found and not command.words[0].startswith("#"):
            self.others.append(command)

    def other_outcomes(self, settled: Sequence[Setting]) -> list[Outcome]:
        """The outcomes of variables, arrays and commands that have no outcome by the trainer's rules."""
        outcomes = [_of_variable(one) for one in self.variables if one not in settled]
        keys = {one.key for one in [*settled, *self.variables]}
        inside = [Setting(name, value) for name, value in self.script.variables.items() if name not in keys]
        outcomes += [Outcome(one, "no effect", "not exported: it counts where the script uses it") for one in inside]
        arrays = self.script.arrays.items()
        unused = [Setting(name, " ".join(items)) for name, items in arrays if name not in self.script.used]
        outcomes += [Outcome(one, "no effect", "no command of the script takes this array") for one in unused]
        return outcomes + [_of_command(command) for command in self.others]


def arguments(words: Sequence[str], line: int = 0) -> list[Setting]:
    """``--key value…`` as settings: several values are a list, none is true. Words before the first option are left out."""
    found: list[tuple[str, list[str]]] = []
    for word in words:
        if word.startswith("--") and len(word) > 2:
            key, equals, value = word.partition("=")
            found.append((key, [value] if equals else []))
        elif found:
            found[-1][1].append(word)
    values = [(key, [parsed(value) if key != "--multimodal-keys" else value for value in given]) for key, given in found]
    return [Setting(key, True if not given else given[0] if len(given) == 1 else given, line) for key, given in values]


def split_override(word: str) -> tuple[str, str] | None:
    """Key and value of an override such as ``++a.b=1``, of a deletion (``~a.b``) or of a group (``env=x``); else None."""
    if deleted := re.fullmatch(r"(~[A-Za-z_][\w./@-]*)(?:=.*)?", word, re.DOTALL):
        return deleted[1], ""
    found = re.fullmatch(
        r"(?:\+\+?)?((?:--config-(?:path|name|dir))|[A-Za-z_][\w-]*(?:[./][\w@-]+)*)=(.*)", word, re.DOTALL
    )
    return (found[1], found[2]) if found else None


def read_with_references(text: str, named: str) -> Any:
    """The value of a YAML text with references such as ``${a.b}`` without quotes, also in lists."""
    try:
        return read_yaml(text, named)[0]
    except RecipeError:
        bare = re.compile(r"(?<=[\[,{\s])(\$\{[^{}\"']*(?:\{[^{}]*\}[^{}]*)*\})(?=\s*[,\]}])")
        return read_yaml(bare.sub(r'"\1"', text), named)[0]


def _of_variable(setting: Setting) -> Outcome:
    if setting.key in VARIABLES:
        return Outcome(setting, "no effect", VARIABLES[setting.key])
    if setting.key.startswith(OF_LIBRARIES):
        return Outcome(setting, "no effect", "a variable of a library or of the machine; set it here, too, if it is needed")
    return Outcome(setting, "unknown", "a variable that is not known here; it was ignored")


def _of_command(command: Command) -> Outcome:
    words = " ".join(command.words)
    setting = Setting("$ " + (words if len(words) <= 60 else words[:57] + "…"), "", command.line)
    if command.words[0] in ("source", "."):
        return Outcome(setting, "no place", "the file was not read, so its settings are missing here. Join the two files")
    if command.words[0] in BUILTINS:
        return Outcome(setting, "no effect", "of the script alone")
    return Outcome(setting, "no place", "a command of set-up or launch; a recipe holds none")


def _yaml(text: str, named: str) -> dict[str, Any] | None:
    """The mapping of a YAML text; None for other texts."""
    named_so = named.endswith((".yaml", ".yml"))
    if not named_so and not any(line.rstrip().endswith(":") or ": " in line for line in text.splitlines()):
        return None
    try:
        data = read_with_references(text, named)
    except RecipeError:
        if named_so:
            raise
        return None
    return data if isinstance(data, dict) and all(isinstance(key, str) for key in data) else None


def _is_python(text: str, named: str) -> bool:
    if named.endswith(".sh"):
        return False
    try:
        tree = ast.parse(text)
    except SyntaxError:
        return False
    return named.endswith(".py") or any(isinstance(node, ast.Import | ast.ImportFrom) for node in tree.body)


def unrecognised(named: str) -> str:
    """The error for a text of no known trainer."""
    return (
        f"{named}: the trainer is not recognised. Known are verl's overrides (TaskMem, VAGEN), CapRL's variables, slime's "
        f"arguments and NeMo-RL's YAML. Name the trainer: --from {' | '.join(FRAMEWORKS)}."
    )
