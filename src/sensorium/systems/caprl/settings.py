"""The environment variables of CapRL's training script, as overrides of the recipes caprl_image and caprl_video.

    CAPTION_MODEL=/captioner DATASET=rows.jsonl SAVE_DIR=/runs BATCH_SIZE=64 sensorium train caprl_video --caprl-env
    → model.path="/captioner" tasks.train.0.options.path="rows.jsonl" batch.prompts_per_step=64 epochs=3 run_dir=…

A variable is used, or reported with the reason why it has no effect. The script samples up to ROLLOUT_RESPONSE_LENGTH
tokens after prompts of up to ROLLOUT_PROMPT_LENGTH, in a context of ROLLOUT_MAX_MODEL_LEN, and sets
data.filter_overlong_prompts=False, so that MAX_PROMPT_LENGTH limits nothing.
"""

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sensorium.recipe.load import load_recipe
from sensorium.recipe.registry import wrong_options
from sensorium.recipe.schema import Recipe, RolloutSection
from sensorium.systems.migration import verl
from sensorium.systems.migration.outcomes import (
    DROP,
    Answer,
    Migration,
    Setting,
    Sheet,
    no_effect,
    no_place,
    parsed,
    unset,
)
from sensorium.systems.migration.recognition import OF_LIBRARIES, Given, unrecognised
from sensorium.vocabulary.errors import RecipeError

NEEDED = ("CAPTION_MODEL", "DATASET", "SAVE_DIR")
PORT, EPOCHS = 18889, 3


def whole(text: str) -> int:
    number = int(text)
    if number < 1:
        raise ValueError("1 or more is needed")
    return number


def interval(text: str) -> int:
    """Steps between checkpoints; 0 and -1 mean none, as in verl."""
    return max(0, int(text))


def number(text: str) -> float:
    """A finite number."""
    value = float(text)
    if not math.isfinite(value):
        raise ValueError("a finite number is needed")
    return value


KEYS: dict[str, tuple[str, Callable[[str], Any]]] = {
    "CAPTION_MODEL": ("model.path", str),
    "DATASET": ("tasks.train.0.options.path", str),
    "BATCH_SIZE": ("batch.prompts_per_step", whole),
    "ROLLOUT_N": ("batch.group_size", whole),
    "SAVE_FREQ": ("checkpoint.every", interval),
    "MAX_ACTOR_CKPT_TO_KEEP": ("checkpoint.keep", whole),
    "ACTOR_LR": ("optimizer.lr", number),
    "LR_WARMUP_STEPS": ("optimizer.warmup_steps", interval),
    "PPO_MAX_TOKEN_LEN_PER_GPU": ("batch.tokens_per_microbatch", whole),
    "WANDB_PROJECT": ("logging.project", str),
}
OF_TERMS: dict[str, tuple[str, str, Callable[[str], Any]]] = {
    "FORMAT_REWARD_WEIGHT": ("timestamps", "weight", number),
    "REWARD_LENGTH_WEIGHT": ("token_length", "weight", number),
    "REWARD_LENGTH_L1": ("token_length", "options.full_until", interval),
    "REWARD_LENGTH_L2": ("token_length", "options.none_from", whole),
}
OF_VERL = "it sets up verl or vLLM, which do not run here"
OF_SERVICE = "it is for the reward service (sensorium serve reward)"
OF_CLIENT = "it sets up CapRL's client; the term remote sends each group in one request and logs its transcripts"
OF_OTHERS = {
    OF_SERVICE: "REWARD_MODEL REWARD_WORKER_BASE REWARD_NUM_WORKERS REWARD_QA_NUM REWARD_SHUFFLE_QA REWARD_TP"
    " FORMAT_MAX_MINUTE JUDGE_MAX_MODEL_LEN",
    OF_CLIENT: "REWARD_VLLM_URLS REWARD_VLLM_MODEL REWARD_LOG_TO_FILE REWARD_LOG_DIR REWARD_ALL_QA REWARD_JUDGE_BATCH_SIZE"
    " REWARD_JUDGE_BATCH_TIMEOUT REWARD_QA_BATCH_SIZE REWARD_QA_BATCH_TIMEOUT",
    OF_VERL: "VERL_ROOT ACTOR_STRATEGY ROLLOUT_MAX_NUM_BATCHED_TOKENS LOG_PROB_MAX_TOKEN_LEN_PER_GPU"
    " REF_LOG_PROB_MAX_TOKEN_LEN_PER_GPU",
}
# Variables of CapRL's scripts that change nothing in a recipe, and why.
WITHOUT_EFFECT = {
    "MAX_PROMPT_LENGTH": "CapRL's script filters no row by it. ROLLOUT_PROMPT_LENGTH is the limit of prompts",
    "ROLLOUT_GPU_MEMORY_UTILIZATION": "the native engine uses the free memory. With rollout.engine=vllm set "
    "rollout.engine.options.gpu_share, which counts beside the learner",
    "ROLLOUT_AGENT_NUM_WORKERS": "all episodes of a step are sampled at once. rollout.concurrency limits them",
    "MAX_CKPT_TO_KEEP": "MAX_ACTOR_CKPT_TO_KEEP is the number of checkpoints that stay",
    "TRAINER_LOGGER": "console and metrics.jsonl are always written. logging.loggers names others",
    "CONDA_ENV": "activate the environment of sensorium yourself",
    "REWARD_TASK": f"{OF_SERVICE}. The recipe chooses: caprl_image or caprl_video",
    **{name: why for why, names in OF_OTHERS.items() for name in names.split()},
}


@dataclass
class CaprlSettings:
    """Overrides by variable (also those of CapRL's defaults), and the reasons why other variables have no effect."""

    given: Mapping[str, str]
    overrides: dict[str, list[str]] = field(default_factory=dict)
    without_effect: dict[str, str] = field(default_factory=dict)

    def take(self, name: str, key: str, value: Any) -> None:
        """Set a key of the recipe. Values are JSON, so that a name such as 7 or null stays a text."""
        self.overrides.setdefault(name, []).append(f"{key}={json.dumps(value, ensure_ascii=False)}")

    def read(self, name: str, kind: Callable[[str], Any], default: Any = None) -> Any:
        """The value of a variable, or the default; a RecipeError names the variable."""
        if name not in self.given:
            return default
        try:
            return kind(self.given[name])
        except ValueError as error:
            what = "a number" if kind is number else "a whole number"
            raise RecipeError(f"--caprl-env: {name} is '{self.given[name]:.40}'; it must be {what} ({error}).") from error

    def notices(self) -> list[str]:
        """One line for each variable without effect."""
        return [f"{name}={self.given[name]} has no effect: {why}." for name, why in self.without_effect.items()]


def caprl_settings(
    environment: Mapping[str, str], path: str, recipe: Recipe, changed: Sequence[str] = (), *, files: bool = True
) -> CaprlSettings:
    """The variables as changes of a recipe (``path`` names its file); ``changed``: overrides of the command line.

    Without ``files`` the data set need not exist, as where a script is migrated on another machine.
    """
    given = {name: value.strip() for name, value in environment.items() if value.strip()}
    if lacking := [name for name in NEEDED if name not in given]:
        raise RecipeError(f"--caprl-env: the environment variable {lacking[0]} is needed and not set.")
    if files and not Path(given["DATASET"]).is_file():
        raise RecipeError(f"--caprl-env: DATASET '{given['DATASET']}' is no file. It is one JSONL or Parquet file.")
    source, own_rows = recipe.tasks.train[0].source, any(key.startswith("tasks.train") for key in changed)
    if not own_rows and wrong_options("source", source, {"path": ""})[0] == "path":
        raise RecipeError(
            f"--caprl-env: DATASET '{given['DATASET']}' cannot be read by '{path}': its tasks.train.0 has the source "
            f"'{source}', which has no option path. Name a recipe with the source caprl (caprl_image, "
            "caprl_video), or train this one without --caprl-env."
        )
    found = CaprlSettings(given)
    found.without_effect.update({name: why for name, why in WITHOUT_EFFECT.items() if name in given})
    for name, (key, kind) in KEYS.items():
        if name in given:
            found.take(name, key, found.read(name, kind))
    run = given.get("RUN_NAME", Path(path).stem)
    found.take("RUN_NAME", "name", run)
    found.take("SAVE_DIR", "run_dir", str(Path(given["SAVE_DIR"]) / run))
    found.take("TOTAL_EPOCHS", "epochs", found.read("TOTAL_EPOCHS", whole, EPOCHS))
    found.take("TOTAL_EPOCHS", "steps", None)
    _lengths(found, recipe.rollout)
    _rewards(found, [term.name for term in recipe.rewards.terms])
    if logging := [name for name in given if name.startswith("WANDB_")]:
        found.take(logging[0], "logging.loggers", list(dict.fromkeys([*recipe.logging.loggers, "wandb"])))
        for name in logging[1:]:
            found.overrides.setdefault(name, [])
    if given.get("SAVE_HF_MODEL", "True").lower() not in ("1", "true", "yes"):
        found.without_effect["SAVE_HF_MODEL"] = "every checkpoint is a Hugging Face model"
    gpus = len(given.get("CUDA_VISIBLE_DEVICES", "").split(","))
    one = recipe.cluster.learners == recipe.cluster.engines == 1 and not any(key.startswith("cluster") for key in changed)
    if gpus > 1 and one:
        found.without_effect["CUDA_VISIBLE_DEVICES"] = (
            f"the run uses the first of {gpus} GPUs; cluster.learners, cluster.engines use more (docs/guides/scale_out.md)"
        )
    return found


def _lengths(found: CaprlSettings, rollout: RolloutSection) -> None:
    """Response and context. MAX_RESPONSE_LENGTH counts where the script's own limit of responses is not set."""
    given = found.given
    name = "ROLLOUT_RESPONSE_LENGTH" if "ROLLOUT_RESPONSE_LENGTH" in given else "MAX_RESPONSE_LENGTH"
    response = found.read(name, whole, rollout.max_new_tokens)
    if name in given:
        found.take(name, "rollout.max_new_tokens", response)
    if name != "MAX_RESPONSE_LENGTH" and "MAX_RESPONSE_LENGTH" in given:
        found.without_effect["MAX_RESPONSE_LENGTH"] = "ROLLOUT_RESPONSE_LENGTH is the limit of responses"
    most = found.read("ROLLOUT_MAX_MODEL_LEN", whole, rollout.max_context_tokens)
    prompt = found.read("ROLLOUT_PROMPT_LENGTH", whole, most)
    for one in ("ROLLOUT_PROMPT_LENGTH", "ROLLOUT_MAX_MODEL_LEN"):
        if one in given:
            found.take(one, "rollout.max_context_tokens", min(prompt + response, most))


def _rewards(found: CaprlSettings, terms: Sequence[str]) -> None:
    """The server, its mode, and the weights and options of the terms beside it."""
    given = found.given
    mode = given.get("REWARD_SCORE_MODE", "qa").lower()
    if mode not in ("qa", "vl_judge"):
        raise RecipeError(f"--caprl-env: REWARD_SCORE_MODE is '{mode:.40}'; there are qa and vl_judge.")
    servers = [name for name in ("REWARD_REMOTE_URL", "REWARD_NODE_IP", "REWARD_PORT") if name in given]
    if "remote" not in terms:
        names = [name for name in (*servers, "REWARD_SCORE_MODE") if name in given]
        found.without_effect.update(dict.fromkeys(names, "the recipe has no reward term 'remote'"))
    else:
        at = f"rewards.terms.{terms.index('remote')}.options"
        if servers:
            found.take(servers[0], f"{at}.servers", _addresses(found))
            for name in servers[1:]:
                if servers[0] == "REWARD_REMOTE_URL":
                    found.without_effect[name] = "REWARD_REMOTE_URL is the address"
                else:
                    found.overrides.setdefault(name, [])
        if "REWARD_SCORE_MODE" in given:
            found.take("REWARD_SCORE_MODE", f"{at}.mode", mode)
    for variable, (term, key, kind) in OF_TERMS.items():
        if variable not in given:
            continue
        if term not in terms:
            found.without_effect[variable] = f"the recipe has no reward term '{term}'"
        elif mode == "vl_judge" and term == "timestamps":
            found.without_effect[variable] = "CapRL rewards no timestamps with REWARD_SCORE_MODE=vl_judge"
        else:
            found.take(variable, f"rewards.terms.{terms.index(term)}.{key}", found.read(variable, kind))
    if mode == "vl_judge" and "timestamps" in terms:
        found.take("REWARD_SCORE_MODE", f"rewards.terms.{terms.index('timestamps')}.weight", 0.0)
    if given.get("REWARD_LENGTH_TOKENIZER_PATH", given["CAPTION_MODEL"]) != given["CAPTION_MODEL"]:
        found.without_effect["REWARD_LENGTH_TOKENIZER_PATH"] = (
            "captions are counted in the tokens that CAPTION_MODEL sampled"
        )


def _addresses(found: CaprlSettings) -> list[str]:
    """The reward servers, with the address composed as the script does."""
    if address := found.given.get("REWARD_REMOTE_URL", ""):
        if "?" in address:
            raise RecipeError(
                "--caprl-env: REWARD_REMOTE_URL has a query (?…). An address is written into the run's recipe.yaml, and a "
                "key does not belong there: leave ?token= out and set the environment variable SENSORIUM_SERVICE_KEY."
            )
        return [url.strip() for url in address.split(",") if url.strip()]
    node, port = found.given.get("REWARD_NODE_IP", "127.0.0.1"), found.read("REWARD_PORT", int, PORT)
    if not 1 <= port <= 65535:
        raise RecipeError(f"--caprl-env: REWARD_PORT is {port}; ports are 1 to 65535.")
    if node.count(":") > 1 and not set(node) & set("[/"):
        node = f"[{node}]"  # IPv6
    elif "/" in node or (":" in node and not node.startswith("[")):
        raise RecipeError(
            f"--caprl-env: REWARD_NODE_IP is '{node:.80}'; it is an address or a name alone. The port is REWARD_PORT, and "
            "a whole address REWARD_REMOTE_URL."
        )
    return [f"http://{node}:{port}"]


SERVICE = "start_reward_serve_rm.sh"
SERVICE_VARIABLES = (
    "REWARD_MODEL", "REWARD_PORT", "REWARD_WORKER_BASE", "REWARD_NUM_WORKERS", "REWARD_QA_NUM", "REWARD_SCORE_MODE",
    "REWARD_TASK", "FORMAT_REWARD_WEIGHT", "CUDA_VISIBLE_DEVICES",
)  # fmt: skip
# Further variables by which a script is recognised as CapRL's.
KNOWN = (
    *NEEDED, *WITHOUT_EFFECT, *SERVICE_VARIABLES, *KEYS, *OF_TERMS, "TOTAL_EPOCHS", "RUN_NAME", "SAVE_HF_MODEL",
    "REWARD_NODE_IP", "REWARD_REMOTE_URL", "MAX_RESPONSE_LENGTH", "REWARD_LENGTH_TOKENIZER_PATH", "ROLLOUT_PROMPT_LENGTH",
    "ROLLOUT_RESPONSE_LENGTH", "ROLLOUT_MAX_MODEL_LEN",
)  # fmt: skip


def certainty(given: Given) -> int:
    """How sure it is that a text is one of CapRL's scripts."""
    if given.form != "script":
        return 0
    names = {"CAPTION_MODEL", "REWARD_TASK", "REWARD_MODEL", "data.input_type"} & given.script.names
    return 3 if "train_caprl.sh" in given.text or SERVICE in given.text or names else 0


def migrate(given: Given) -> Migration:
    """The recipe of a script. Of the variables of libraries only WANDB's and the GPUs' are used."""
    if given.form != "script":
        if verl.certainty(given) == 1:  # sections of verl
            return verl.migrate(given)
        raise RecipeError(unrecognised(given.named))
    script, counting = given.script, ("WANDB_", "CUDA_VISIBLE_DEVICES")
    own = [one for one in script.variables if one.key.startswith(counting) or not one.key.startswith(OF_LIBRARIES)]
    return migrate_caprl(own, script.overrides, given.text, given.named, script.script.notes)


def migrate_caprl(
    variables: Sequence[Setting], overrides: Sequence[Setting], text: str, named: str, notes: Sequence[str] = ()
) -> Migration:
    """The recipe of CapRL's variables, and of overrides that its script passes to verl."""
    given = {setting.key: setting for setting in variables}
    image = "REWARD_TASK" in given and str(given["REWARD_TASK"].value) == "image"
    image = image or any((setting.key, setting.value) == ("data.input_type", "image") for setting in overrides)
    start = "caprl_image" if image else "caprl_video"
    sheet = Sheet("CapRL++", start, [*variables, *overrides], notes)
    trains = SERVICE not in text or "train_caprl.sh" in text
    for setting in variables:
        if not trains and setting.key in SERVICE_VARIABLES:
            sheet.apply(no_place("of the reward service: sensorium serve reward reads this variable itself"), setting)
        elif unset(setting.value):
            sheet.apply(no_place(f"its value is not in the file ({setting.shown})"), setting)
    taken = {key: str(one.value) for key, one in given.items() if key not in sheet.outcomes}
    lacking = [name for name in NEEDED if name not in taken]
    recipe = load_recipe(start)
    needed = {"CAPTION_MODEL": recipe.model.path, "DATASET": sheet.at("tasks.train.0.options.path"), "SAVE_DIR": "runs"}
    settings = caprl_settings({**{name: needed[name] for name in lacking}, **taken}, start, recipe, files=False)
    for name, changed in settings.overrides.items():
        parts = {place: parsed(value) for place, _, value in (one.partition("=") for one in changed)}
        parts = {place: DROP if (place, value) == ("steps", None) else value for place, value in parts.items()}
        if name in taken:
            sheet.apply(Answer("became", "" if parts else "used together with a variable above", parts), given[name])
        elif name not in (*lacking, "RUN_NAME"):
            for place, value in parts.items():  # a default of CapRL's script
                sheet.put(place, value)
    for name, why in settings.without_effect.items():
        sheet.apply(no_effect(why), given[name])
    for name in taken:
        if name not in sheet.outcomes and name in KNOWN:
            sheet.apply(no_effect("the recipe does the same"), given[name])
    if lacking and trains:
        sheet.notes.append(f"CapRL's script needs {', '.join(lacking)}, which are not given; the recipe has its own there.")
    sheet.settle(verl.RULES)
    return sheet.finish(named)
