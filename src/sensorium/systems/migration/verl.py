"""verl's overrides, and those of systems on it: TaskMem (reward_kwargs, algorithm.mode), VAGEN (rollout_manager), CapRL.

bash run.sh data.train_batch_size=32 actor_rollout_ref.rollout.n=8 …        → batch: {prompts_per_step: 32, group_size: 8}
"""

import copy
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.registry import import_system, wrong_options
from sensorium.systems.migration.outcomes import (
    ADAMW,
    DROP,
    ENGINE,
    LOGGERS,
    MICRO,
    PACKED,
    SAMPLED,
    STORED,
    TEMPLATE,
    TERMS,
    Answer,
    Migration,
    Rule,
    Setting,
    Sheet,
    aggregate,
    choose_estimator,
    choose_loss,
    chosen,
    count,
    divide_batch,
    feature,
    flat,
    listed,
    loggers,
    name_engine,
    no_effect,
    no_place,
    of_critic,
    of_loss,
    of_vllm,
    overlong,
    own_reward,
    rows_source,
    run_name,
    switch,
    table,
    unset,
    where,
    where_evaluated,
)
from sensorium.systems.migration.recognition import Given

ESTIMATORS = {
    "gae": "gae", "grpo": "grpo", "rloo": "rloo", "opo": "opo", "remax": "remax", "gpg": "gpg", "grpo_passk": "pass_at_k",
    "gdpo": "gdpo", "reinforce_plus_plus": "reinforce_plus_plus", "rloo_vectorized": "rloo", "grpo_vectorized": "grpo",
    "reinforce_plus_plus_baseline": "reinforce_plus_plus_baseline", "masked_gae": "masked_gae",
    "turn_wise_gae": "turn_wise_gae", "bi_level_gae": "bi_level_gae",
}  # fmt: skip
LOSSES = {
    "vanilla": "clip", "gspo": "gspo", "gpg": "gpg", "clip_cov": "clip_cov", "kl_cov": "kl_cov", "geo_mean": "gmpo",
    "cispo": "cispo", "sapo": "sapo", "dppo_tv": "dppo",
}  # fmt: skip
AGGREGATIONS = {
    "token-mean": "token_mean", "seq-mean-token-sum": "sequence_mean_token_sum",
    "seq-mean-token-mean": "sequence_mean_token_mean",
}  # fmt: skip
KL = {"kl": "k1", "k1": "k1", "abs": "abs", "mse": "k2", "k2": "k2", "low_var_kl": "k3", "k3": "k3"}
DTYPES = {"bfloat16": "bfloat16", "bf16": "bfloat16", "float32": "float32", "fp32": "float32"}
# Columns of media: verl's keys and their values where a command leaves them out.
MEDIA_KEYS = {"pictures": ("data.image_key", "images"), "videos": ("data.video_key", "videos")}
SEEING = re.compile(r"vl(?!lm)|omni|vision|llava", re.IGNORECASE)  # in the names of models that take pictures
VAGEN_RECIPES = {
    "svg": "vagen_svg", "sokoban": "vagen_sokoban", "frozenlake": "vagen_frozen_lake", "frozen_lake": "vagen_frozen_lake",
    "navigation": "vagen_navigation",
}  # fmt: skip
VAGEN_COMMAND = re.compile(r"-m\s+vagen\.\w|\bvagen/\S*main_ppo\.py")
TASKMEM_REWARD = {
    "think_length_threshold", "think_penalty", "memory_token_threshold", "memory_length_threshold", "usefulness_scale",
    "correct_reward", "wrong_reward", "format_penalty",
}  # fmt: skip
# Keys that others depend on.
FIRST = (
    "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "data.train_batch_size",
    "rollout_manager.n_trajectory", "actor_rollout_ref.rollout.n", "trainer.total_training_steps", "data.train_files",
    "data.val_files", "data.max_response_length", "data.max_prompt_length", "trainer.logger",
    "actor_rollout_ref.rollout.name",
)  # fmt: skip
# verl's own values of keys that a command leaves out, where a recipe's differ or GENERAL has them.
DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "actor_rollout_ref.actor.optim.lr": 1e-6,
    "actor_rollout_ref.actor.optim.weight_decay": 0.01,
    "actor_rollout_ref.actor.fsdp_config.dtype": "bfloat16",
    "actor_rollout_ref.model.enable_gradient_checkpointing": True,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "trainer.val_before_train": True,
    "trainer.total_epochs": 30,
}


def system_of(settings: Mapping[str, Any], text: str) -> str:
    """The shipped recipe that a set of overrides belongs to; empty for verl's own examples."""
    rewards = {key.rpartition(".")[2] for key in settings if key.startswith("reward_model.reward_kwargs.")}
    if rewards & TASKMEM_REWARD or "algorithm.mode" in settings or "M3_API_CONFIG" in text:
        return "taskmem"
    if str(settings.get("data.input_type", "")) in ("image", "video"):
        return f"caprl_{settings['data.input_type']}"
    estimator = settings.get("algorithm.adv_estimator")
    turns = any(key.startswith("rollout_manager.") for key in settings) or "algorithm.high_level_gamma" in settings
    if turns or estimator in ("bi_level_gae", "masked_gae", "turn_wise_gae") or VAGEN_COMMAND.search(text):
        words = text.lower().replace("-", "_")
        found = next((recipe for word, recipe in VAGEN_RECIPES.items() if word in words), "vagen_svg")
        return "vagen_trico_svg" if estimator == "bi_level_gae" and found == "vagen_svg" else found
    return ""


def certainty(given: Given) -> int:
    """How sure it is that a text is verl's, or that of a system on it."""
    if given.form == "yaml":
        sections = ("actor_rollout_ref.", "data.", "trainer.", "algorithm.", "rollout_manager.")
        return 3 if _environments(given.data) else int(any(key.startswith(sections) for key in flat(given.data)))
    if given.form == "python":
        return 0
    script = given.script
    if {"actor_rollout_ref", "trainer", "rollout_manager", "critic", "reward_model"} & script.roots:
        return 2
    weak = {"data", "algorithm"} & script.roots or VAGEN_COMMAND.search(given.text) or "M3_API_CONFIG" in script.names
    return int(bool(weak))


def migrate(given: Given) -> Migration:
    """The recipe of a script's overrides, of a YAML of verl's sections, or of VAGEN's environments."""
    if given.form == "script":
        return migrate_verl(given.script.overrides, given.text, given.named, given.script.script.notes)
    if _environments(given.data):
        vagen = import_system("sensorium.systems.vagen.settings", "VAGEN's env_config.yaml")
        return vagen.migrate_environments(given.data, given.named)
    return migrate_verl([Setting(key, value) for key, value in flat(given.data).items()], given.text, given.named)


def _environments(data: Mapping[str, Any]) -> bool:
    return all(isinstance(entry, dict) and "env_name" in entry for entry in data.values())


def migrate_verl(settings: Sequence[Setting], text: str, named: str, notes: Sequence[str] = ()) -> Migration:
    """The recipe of verl's overrides."""
    start = system_of({setting.key: setting.value for setting in settings}, text)
    sheet = Sheet("verl", start, settings, notes)
    defaults = {} if start else dict(DEFAULTS)
    if sheet.value("trainer.total_training_steps"):
        defaults.pop("trainer.total_epochs", None)
    if not start:
        sheet.put("tasks.train.0.options.columns.answer", "reward_model.ground_truth")
        sheet.notes.append(
            "verl chooses rewards by a row's data_source; this recipe has the term math. Others: docs/reference/rewards.md."
        )
    sheet.settle({**(VAGEN if start.startswith("vagen") else {}), **RULES}, FIRST, defaults)
    if not start:
        _default_columns(sheet)
    if start in ("vagen_svg", "vagen_trico_svg") and "svg" not in text.lower():
        sheet.notes.append(
            f"no environment of VAGEN is named: the recipe has that of {start} (docs/guides/systems/vagen.md)."
        )
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if size in sheet.filled and sheet.outcomes[size].kind == "no place":
        sheet.notes.append(f"{size} was left out, which is {DEFAULTS[size]} in verl: {sheet.outcomes[size].text}.")
    return sheet.finish(named, "actor_rollout_ref.model.path")


def _default_columns(sheet: Sheet) -> None:
    """Name the columns that verl reads by default where rows have them: those that a file has, or that the model needs.

    /a.parquet is on this machine and has the column images       → columns.pictures=images
    it is not here, and the model is Qwen2.5-VL-7B-Instruct       → columns.pictures=images, with a note
    it is not here, and nothing names a model that sees           → a note
    """
    sees = bool(SEEING.search(str(sheet.at("model.path", ""))))
    taken: dict[str, bool] = {}  # by column: whether a file has it, or it is a guess
    open_columns: set[str] = set()
    for part, (key, column) in MEDIA_KEYS.items():
        if key in sheet.settings:
            continue
        for side in ("train", "evaluate"):
            for i, source in enumerate(sheet.at(f"tasks.{side}", [])):
                known = _columns_of(source["options"]["path"])
                if known is None and not (sees and part == "pictures"):
                    open_columns.add(part)
                elif known is None or column in known:
                    sheet.put(f"tasks.{side}.{i}.options.columns.{part}", column)
                    taken[part] = taken.get(part, True) and known is not None
    for part, certain in taken.items():
        key, column = MEDIA_KEYS[part]
        also = "" if certain else f" Remove columns.{part} if the rows have none: a column that is not there is refused."
        sheet.notes.append(f"{key} was left out, which is {column} in verl: the option columns.{part} is {column}.{also}")
    if left := sorted(open_columns - set(taken)):
        names = " and ".join(f"{part}: {MEDIA_KEYS[part][1]}" for part in left)
        sheet.notes.append(
            f"verl reads media from the columns images and videos where rows have them; this recipe does not read {names}. "
            "Where rows have them, add this to the option columns of each source."
        )


def _columns_of(path: str) -> list[str] | None:
    """The columns of a file of rows; None if it is not on this machine or cannot be read."""
    place = Path(path).expanduser()
    try:
        if rows_source(path) == "parquet":
            from pyarrow.parquet import read_schema

            return list(read_schema(place).names)
        with place.open(encoding="utf-8") as file:
            return list(json.loads(file.readline(1 << 20)))
    except (OSError, ValueError, TypeError):  # pyarrow's error of a broken file is a ValueError
        return None


def _files(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        paths = [str(path) for path in listed(setting.value)]
        if any(unset(path) for path in paths):
            return no_place(f"its value is not in the file: set tasks.{side}.0.options.path yourself")
        source, options = sheet.at("tasks.train.0.source"), dict(sheet.at("tasks.train.0.options", {}))
        if sheet.start.startswith("vagen"):
            turns = sheet.value("rollout_manager.max_turns", sheet.at("rollout.max_turns", 5))
            source, options = "vagen", {"split": "train" if side == "train" else "test", "max_turns": turns}
        elif source in ("parquet", "jsonl"):
            source = rows_source(paths[0])
        options.pop("path", None)
        rows = [{"source": source, "options": {"path": path, **copy.deepcopy(options)}} for path in paths]
        sheet.put(f"tasks.{side}", rows)
        changes = {f"tasks.{side}.{i}.options.path": path for i, path in enumerate(paths)}
        return Answer("became", f"source {source}", changes)

    return rule


def _column(part: str, default: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        if setting.value in (None, "", "null"):
            return no_effect("no column is named")
        if "columns" in sheet.at("tasks.train.0.options", {}):
            rows = [
                f"tasks.{side}.{i}" for side in ("train", "evaluate") for i in range(len(sheet.at(f"tasks.{side}", [])))
            ]
            named = [row for row in rows if sheet.at(f"{row}.options.columns") is not None]
            return {f"{row}.options.columns.{part}": setting.value for row in named}
        source = sheet.at("tasks.train.0.source")
        if setting.value == default:
            return no_effect(f"the source {source} reads this column")
        return no_place(f"the source {source} reads '{default}'; rename the column")

    return rule


def _context(sheet: Sheet, setting: Setting) -> Rule:
    vagen = sheet.start.startswith("vagen")
    if vagen and setting.key == "data.max_prompt_length":
        return no_place("a whole episode is bounded instead: rollout.max_context_tokens")
    response, prompt = sheet.value("data.max_response_length"), sheet.value("data.max_prompt_length")
    changes = {"rollout.max_new_tokens": setting.value} if setting.key == "data.max_response_length" else {}
    both = isinstance(response, int) and isinstance(prompt, int)
    if both and not vagen and not sheet.value("actor_rollout_ref.rollout.max_model_len"):
        changes["rollout.max_context_tokens"] = prompt + response
    elif not changes:
        changes["rollout.max_context_tokens"] = setting.value + sheet.at("rollout.max_new_tokens", 64)
    return changes


def _truncation(sheet: Sheet, setting: Setting) -> Rule:
    if sheet.value("data.filter_overlong_prompts", False):
        return no_effect("long prompts are left out before (data.filter_overlong_prompts)")
    if setting.value == "error":
        return {"tasks.on_long_prompt": "refuse"}
    return no_place("prompts are never cut; tasks.on_long_prompt: skip leaves long ones out")


def _mini_batch(sheet: Sheet, setting: Setting) -> Rule:
    group = 1 if sheet.start.startswith("vagen") else sheet.at("batch.group_size", 8)
    return divide_batch(sheet, setting.value * group)


def _group(sheet: Sheet, setting: Setting) -> Rule:
    if "rollout_manager.n_trajectory" in sheet.settings and setting.key != "rollout_manager.n_trajectory":
        return no_effect("rollout_manager.n_trajectory is the number of episodes of a task")
    return "batch.group_size"


def _kl_loss(sheet: Sheet, setting: Setting) -> Rule:
    switches = setting.key.endswith("use_kl_loss")
    if not sheet.value("actor_rollout_ref.actor.use_kl_loss", False):
        if switches and sheet.at("algorithm.kl.coef") and sheet.at("algorithm.kl.place") != "reward":
            return {"algorithm.kl.coef": 0.0}
        return no_effect("there is no KL in the loss (actor.use_kl_loss)")
    kind = str(sheet.value("actor_rollout_ref.actor.kl_loss_type", "low_var_kl")).removesuffix("+")
    if kind not in KL:
        return no_place(f"the KL '{kind}' is not known here; algorithm.kl.estimator: {', '.join(sorted(set(KL.values())))}")
    if switches:
        return {"algorithm.kl.place": "loss"}
    return "algorithm.kl.coef" if setting.key.endswith("coef") else {"algorithm.kl.estimator": KL[kind]}


def _kl_reward(sheet: Sheet, setting: Setting) -> Rule:
    old = sheet.start.startswith("vagen") and not sheet.value("actor_rollout_ref.actor.use_kl_loss", False)
    name = setting.key.split(".")[-1]
    if not sheet.value("algorithm.use_kl_in_reward", old):
        return no_effect("there is no KL in the reward (algorithm.use_kl_in_reward)")
    if name == "use_kl_in_reward":
        return {"algorithm.kl.place": "reward", "algorithm.kl.coef": sheet.value("algorithm.kl_ctrl.kl_coef", 0.001)}
    if name == "kl_penalty":
        return chosen("algorithm.kl.estimator", KL, "this estimator of the KL is not known here")
    return "algorithm.kl." + {"kl_coef": "coef", "type": "control", "target_kl": "target", "horizon": "horizon"}[name]


def _warmup_share(sheet: Sheet, setting: Setting) -> Rule:
    place = f"{'algorithm.critic.' if setting.key.startswith('critic.') else ''}optimizer.warmup_steps"
    if not setting.value:
        return no_effect("no warm-up")
    if isinstance(sheet.at("steps"), int):
        return {place: int(setting.value * sheet.at("steps"))}
    return no_place(f"a share of steps that follow from epochs; set {place} yourself")


def _estimator(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value not in ESTIMATORS:
        return no_place(f"this estimator does not exist here; those that do: {', '.join(ESTIMATORS)}")
    return choose_estimator(sheet, ESTIMATORS[setting.value])


def _loss_mode(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value not in LOSSES:
        return no_place(f"this loss does not exist here; those that do: {', '.join(LOSSES)}")
    return choose_loss(sheet, LOSSES[setting.value])


def _aggregation(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value not in AGGREGATIONS:
        return no_place("this way to sum tokens does not exist here (algorithm.loss.aggregation)")
    return aggregate(sheet, AGGREGATIONS[setting.value])


def _of_estimator(option: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        name = sheet.at("algorithm.advantage.name", "grpo")
        both = option == "lam" and "algorithm.high_level_lam" not in sheet.settings  # VAGEN's one lam is both
        options = [option, "turn_lam"] if both else [option]
        taken = [one for one in options if one in estimator_traits(name).settings]
        if not taken:
            return no_effect(f"the estimator {name} does not use it")
        return {f"algorithm.advantage.{one}": setting.value for one in taken}

    return rule


def _clip_both(sheet: Sheet, setting: Setting) -> Rule:
    sides = [side for side in ("low", "high") if f"actor_rollout_ref.actor.clip_ratio_{side}" not in sheet.settings]
    if not sides:
        return no_effect("clip_ratio_low and clip_ratio_high are given")
    return {f"algorithm.loss.clip_{side}": setting.value for side in sides}


def _loggers(sheet: Sheet, setting: Setting) -> Rule:
    return loggers(sheet, [str(name) for name in listed(setting.value)], add=sheet.framework != "verl")


def _epochs(sheet: Sheet, setting: Setting) -> Rule:
    steps = {} if sheet.value("trainer.total_training_steps") else {"steps": DROP}
    return {"epochs": setting.value, **steps}


def _steps(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value is None or setting.value == -1:
        return no_effect("the epochs give the length of the run")
    return {"steps": setting.value, **({} if "trainer.total_epochs" in sheet.settings else {"epochs": DROP})}


def _held_out(sheet: Sheet, setting: Setting) -> Rule:
    """How held-out tasks are answered: greedily, unless ``do_sample`` and a temperature are given."""
    prefix = "actor_rollout_ref.rollout.val_kwargs"
    samples = sheet.value(f"{prefix}.do_sample", bool(sheet.start))
    temperature = sheet.value(f"{prefix}.temperature", sheet.at("evaluation.temperature", 0.0))
    temperature = float(temperature) if samples else 0.0
    if setting.key.endswith(".n"):
        if temperature or setting.value == 1:
            return "evaluation.samples"
        note = "answers are greedy, so more would be the same; do_sample=True with a temperature samples them"
        return Answer("became", note, {"evaluation.samples": 1})
    if setting.key.endswith("temperature") and not samples:
        return no_effect("answers are greedy without val_kwargs.do_sample=True")
    return {"evaluation.temperature": temperature}


def _generations(sheet: Sheet, setting: Setting) -> Rule:
    if not set(sheet.value("trainer.logger", [])) & {*LOGGERS}:
        return no_effect("generations are sent to loggers, and trainer.logger names none that is known here")
    return count("logging.generations")


def _evaluated(rule: Rule) -> Rule:
    return where_evaluated(rule, no_place("nothing is held out: name rows under tasks.evaluate first (data.val_files)"))


def _lora_modules(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value == "all-linear":
        return no_effect("adapters are on all linear layers")
    return {"model.lora.modules": listed(setting.value)}


def _sequence_parallel(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value in (1, None):
        return no_effect("tokens are not shared")
    return no_place(f"cluster.sequence_parallel={setting.value} with cluster.learners, a multiple of it")


def _turns(sheet: Sheet, setting: Setting) -> Rule:
    changes = {"rollout.max_turns": setting.value}
    for side in ("train", "evaluate"):
        for i, source in enumerate(sheet.at(f"tasks.{side}", [])):
            inner = "options.options.max_turns" if source["source"] == "environments" else "options.max_turns"
            changes[f"tasks.{side}.{i}.{inner}"] = setting.value
    return changes


def _offload(sheet: Sheet, setting: Setting) -> Rule:
    if not setting.value:
        return no_effect("weights and moments stay on the GPU")
    return no_place("cluster.offload keeps weights and moments of several learners in the machine's memory")


def _correction(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value in ("token", "sequence", "geometric"):
        return "algorithm.correction.weights"
    return feature("algorithm.correction.weights is token, sequence or geometric")


def _reward_option(sheet: Sheet, setting: Setting) -> Rule:
    option, term = setting.key.split(".", 2)[2], sheet.at("rewards.terms.0.name")
    wrong, _ = wrong_options("reward", term, {**sheet.at("rewards.terms.0.options", {}), option: setting.value})
    if wrong == option:
        return Answer("unknown", f"the reward {term} has no such option; it was ignored")
    return f"rewards.terms.0.options.{option}"


def _overlong(sheet: Sheet, setting: Setting) -> Rule:
    """verl's penalty of long responses: ``overlong_buffer`` of its DAPO recipe, ``overlong_buffer_cfg`` since."""
    section, _, part = setting.key.rpartition(".")
    kwargs = "reward_model.reward_kwargs"
    if part == "max_resp_len":
        section = f"{kwargs}.overlong_buffer_cfg"
    if not sheet.value(f"{section}.enable", False):
        return no_effect(f"the penalty of long responses is off ({section}.enable)")
    if part == "log":
        return no_effect("every reward term is a metric")
    options = {
        "max_tokens": sheet.value(f"{kwargs}.max_resp_len", sheet.at("rollout.max_new_tokens", 512)),
        "buffer_tokens": sheet.value(f"{section}.len", 0),
        "penalty": sheet.value(f"{section}.penalty_factor", 1.0),
    }
    names = {"max_resp_len": "max_tokens", "len": "buffer_tokens", "penalty_factor": "penalty", "enable": ""}
    return (
        overlong(sheet, names[part], options) if part in names else feature("the reward term overlong has no such option")
    )


def _reward_function(sheet: Sheet, setting: Setting) -> Rule:
    if not setting.key.endswith(".path"):
        return feature("of your own reward function: see ATTENTION; its arguments are options of its term")
    function = sheet.value(setting.key.removesuffix("path") + "name", "compute_score")
    return own_reward(sheet, setting, f"{Path(str(setting.value)).stem}:{function}")


def _reward_model(sheet: Sheet, setting: Setting) -> Rule:
    scored = "a model that scores is a judge or a reward server (docs/guides/judges.md, docs/guides/services.md)"
    if setting.value is True:
        names = " and ".join(term["name"] for term in sheet.at("rewards.terms", []))
        sheet.attention.append(f"the reward of this recipe is {names}, and lacks verl's reward model: {scored}.")
    return feature(scored)


def _rounds(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value and setting.value > 0:
        return "selection.max_rounds"
    return no_place("rounds are bounded here: selection.max_rounds")


def _environment(sheet: Sheet, setting: Setting) -> Rule:
    if VAGEN_RECIPES.get(str(setting.value).lower()) == sheet.start:
        return Answer("became", f"the recipe that the migration starts from: {sheet.start}")
    return no_place("name the environment under tasks.train (docs/guides/environments.md)")


PARALLEL = no_place(
    "GPUs are divided by the section cluster (learners, engines, sequence_parallel; docs/guides/scale_out.md)"
)
LAUNCH = no_place("how verl is launched; here: sensorium train RECIPE")
MEASURED = no_place("profiling; metrics time/* and throughput/* are always written")
BY_TOKENS = no_effect("micro-batches are always packed by tokens")
KERNELS = no_effect("packing and kernels are chosen here")
INSIDE = no_effect("an internal detail of verl")
CORRECTION = feature("algorithm.correction")
RAY = no_place("cluster.placement: ray, and cluster.address")
SAVES_MEMORY = feature("model.gradient_checkpointing saves this memory")
RESUME = "a run goes on with sensorium train RUN --resume"

VAGEN_TABLE: dict[str, Any] = {
    "env": _environment,
    "data.max_trajectory_length": "rollout.max_context_tokens",
    "rollout_manager.": {
        "max_turns": _turns,
        "window_size": "rollout.window",
        "use_multi_turn_reward": "rewards.terms.0.options.per_turn",
        "use_loss_mask": lambda sheet, setting: {"algorithm.loss_mask": bool(setting.value)},
        "use_gae_mask": lambda sheet, setting: {"algorithm.gae_mask": bool(setting.value)},
        "n_trajectory": _group,
        "n_gpus_per_node": PARALLEL,
        "base_url": no_place("environment: remote names servers (docs/guides/environments.md)"),
        "use_service": no_place("environment: remote plays on servers (docs/guides/environments.md)"),
        "timeout": "rollout.environment_deadline_s",
    },
}
VAGEN = table(VAGEN_TABLE)
TABLE: dict[str, Any] = {
    "data.": {
        "train_files": _files("train"),
        "val_files": _files("evaluate"),
        "train_batch_size": "batch.prompts_per_step",
        "gen_batch_size": no_place("selection.oversample and selection.dynamic draw more tasks than are trained on"),
        "val_batch_size": no_effect("all held-out tasks are played at once"),
        "max_prompt_length max_response_length": _context,
        "truncation": _truncation,
        "filter_overlong_prompts": switch({"tasks.on_long_prompt": "skip"}, "rows are not filtered by length"),
        "filter_overlong_prompts_workers": no_effect("prompts are measured as they are drawn"),
        "shuffle": "tasks.shuffle",
        "seed": "seed",
        "dataloader_num_workers": no_effect("rows of the next step are read ahead in a thread, in their order"),
        "image_key": _column("pictures", "images"),
        "video_key": _column("videos", "videos"),
        "prompt_key": _column("prompt", "prompt"),
        "input_type": Answer("became", "the recipe that the migration starts from"),
        "val_max_samples": _evaluated(count("evaluation.limit")),
        "train_max_samples": feature("give a file with fewer rows"),
        "custom_cls.*": feature("a source of your own is module:Class under tasks.train (docs/guides/tasks.md)"),
        "return_raw_chat": no_effect("templates are applied by the model's chat processor"),
        "return_raw_input_ids return_full_prompt return_multi_modal_inputs": INSIDE,
        "apply_chat_template_kwargs*": TEMPLATE,
        "trust_remote_code": feature("no code of a data set is run"),
        "sampler.*": feature("tasks.planner decides which task comes next"),
        "reward_fn_key": TERMS,
        "tokenizer": feature("the model's own tokenizer is used"),
        "*tool_config_path": feature("tools are options of the environment tools (docs/guides/environments.md)"),
        "validation_shuffle": no_effect("the order of held-out tasks changes nothing"),
        "image_patch_size": no_effect("the model's own processor knows it"),
        "use_shm": feature("rows are read from their files"),
    },
    "actor_rollout_ref.model.": {
        "path": "model.path",
        "enable_gradient_checkpointing": "model.gradient_checkpointing",
        "use_remove_padding": PACKED,
        "use_fused_kernels fused_kernel_options.* use_liger": no_effect("fused kernels are chosen here"),
        "use_shm": feature("weights are read from their files"),
        "lora_rank lora.rank": "model.lora.rank",
        "lora_alpha": where(
            "actor_rollout_ref.model.lora_rank",
            "model.lora.alpha",
            "there are no adapters (lora_rank 0)",
            default=False,
        ),
        "lora.alpha": "model.lora.alpha",
        "target_modules": _lora_modules,
        "exclude_modules": feature("model.lora.modules names the layers that get adapters"),
        "lora_adapter_path": feature("merge the adapter first and name the merged folder as model.path"),
        "lora.*": feature("adapters have rank, alpha, groups and modules (model.lora)"),
        "enable_activation_offload tiled_mlp.*": SAVES_MEMORY,
        "trust_remote_code": feature("no code of a checkpoint is run"),
        "custom_chat_template": feature("the checkpoint's template is used"),
        "external_lib": feature("a family of your own is module:Class in model.family"),
        "override_config.*": feature("the checkpoint's config.json is used"),
        "mtp.*": feature("multi-token prediction is not trained"),
        "*_path": feature("config and tokenizer come with model.path"),
        "freeze_*": feature("model.freeze names the groups that do not learn"),
    },
    "actor_rollout_ref.hybrid_engine": no_effect("engine and learner share the GPU, or are placed by cluster"),
    "actor_rollout_ref.nccl_timeout": no_place("cluster.reply_s bounds a rank's step"),
    "actor_rollout_ref.actor.": {
        "optim.lr": "optimizer.lr",
        "optim.weight_decay": "optimizer.weight_decay",
        "optim.betas": "optimizer.betas",
        "optim.clip_grad grad_clip": "optimizer.clip_norm",
        "optim.lr_warmup_steps": count("optimizer.warmup_steps"),
        "optim.lr_warmup_steps_ratio": _warmup_share,
        "optim.min_lr_ratio": "optimizer.final_lr_share",
        "optim.lr_scheduler_type optim.lr_decay_style optim.warmup_style": "optimizer.schedule",
        "optim.total_training_steps": no_effect("trainer.total_training_steps or the epochs count"),
        "optim.optimizer*": ADAMW,
        "optim.num_cycles optim.override_optimizer_config* optim.lr_warmup_init optim.min_lr optim.lr_decay_steps"
        " optim.lr_wsd_* optim.use_checkpoint_opt_param_scheduler": feature(
            "AdamW has lr, betas, eps, weight_decay, warm-up and schedule (optimizer)"
        ),
        "ppo_mini_batch_size": _mini_batch,
        "ppo_max_token_len_per_gpu": "batch.tokens_per_microbatch",
        "ppo_micro_batch_size*": MICRO,
        "*use_dynamic_bsz": BY_TOKENS,
        "clip_ratio": _clip_both,
        "clip_ratio_low": of_loss("clip_low"),
        "clip_ratio_high": of_loss("clip_high"),
        "clip_ratio_c": of_loss("dual_clip"),
        "tau_pos": of_loss("tau_positive"),
        "tau_neg": of_loss("tau_negative"),
        "loss_agg_mode": _aggregation,
        "loss_scale_factor": feature("algorithm.loss.aggregation_constant"),
        "policy_loss.loss_mode": _loss_mode,
        "policy_loss.clip_cov_ratio policy_loss.kl_cov_ratio": of_loss("cov_share"),
        "policy_loss.clip_cov_lb": of_loss("cov_low"),
        "policy_loss.clip_cov_ub": of_loss("cov_high"),
        "policy_loss.ppo_kl_coef": of_loss("cov_kl_coef"),
        "entropy_coeff": "algorithm.loss.entropy_coef",
        "use_kl_loss kl_loss_coef kl_loss_type": _kl_loss,
        "ppo_epochs": "batch.epochs_per_step",
        "shuffle": feature("groups keep their order within a step"),
        "freeze_vision_tower": switch({"model.freeze": ["vision"]}, "everything learns"),
        "ulysses_sequence_parallel_size": _sequence_parallel,
        "checkpoint.*": STORED,
        "*offload*": _offload,
        "fsdp_config.dtype": chosen("model.dtype", DTYPES, "model.dtype is bfloat16 or float32"),
        "fsdp_config.model_dtype": no_place("model.dtype; moments and remainders keep float32 masters"),
        "strategy fsdp_config.* megatron.*": PARALLEL,
        "profiler.* *profile*": MEASURED,
        "router_replay.*": feature("algorithm.router_replay does it with rollout.engine: native"),
        "entropy_* calculate_*": no_effect("entropy is always measured, in chunks"),
        "use_prefix_grouper": no_effect("a group's prompt is always computed once"),
        "data_loader_seed": no_effect("updates keep the order of the draws"),
        "use_torch_compile use_remove_padding use_fused_kernels": KERNELS,
        "rollout_n load_weight sum_pi_squared_checkpointing": INSIDE,
    },
    "actor_rollout_ref.ref.": {
        "*offload*": _offload,
        "log_prob_*": MICRO,
        "strategy fsdp_config.* megatron.* profiler.* ulysses_sequence_parallel_size rollout_n": PARALLEL,
        "use_torch_compile entropy_* router_replay.* model.* load_weight": no_effect(
            "the reference is computed like the policy"
        ),
    },
    "actor_rollout_ref.rollout.": {
        "n": _group,
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "top_k": count("rollout.top_k"),
        "do_sample": no_effect("responses are always sampled"),
        "ignore_eos": "rollout.ignore_stop_tokens",
        "max_model_len": "rollout.max_context_tokens",
        "response_length": "rollout.max_new_tokens",
        "prompt_length": no_place("rollout.max_context_tokens bounds prompt and response together"),
        "calculate_log_probs": no_effect("the engine's log-probs are always kept"),
        "log_prob_*": MICRO,
        "val_kwargs.temperature val_kwargs.n val_kwargs.do_sample": _evaluated(_held_out),
        "val_kwargs.*": SAMPLED,
        "multi_turn.max_assistant_turns": "rollout.max_turns",
        "multi_turn.*": feature("an environment plays several turns: tools, geo3k, … (docs/guides/environments.md)"),
        "agent.num_workers": no_effect("all episodes of a step are played at once (rollout.concurrency)"),
        "agent.*": feature("an agent loop is an environment here (docs/guides/environments.md)"),
        "mode": no_effect("episodes are always played asynchronously"),
        "over_sample_rate": feature("selection.oversample"),
        "*parallel_size": PARALLEL,
        "trace.*": feature("episodes are written to the run directory"),
        "name": name_engine,
        "gpu_memory_utilization": no_place(
            "the native engine uses the free memory; with rollout.engine=vllm: rollout.engine.options.gpu_share, which "
            "counts beside the learner"
        ),
        "enforce_eager": of_vllm("eager"),
        "max_num_seqs": of_vllm("max_rows"),
        "dtype free_cache_engine enable_chunked_prefill enable_prefix_caching"
        " max_num_batched_tokens load_format disable_log_stats engine_kwargs.* cudagraph_capture_sizes"
        " layered_summon logprobs_mode scheduling_policy multi_stage_wake_up checkpoint_engine.* skip_rollout skip_dump_dir"
        " skip_tokenizer_init enable_rollout_routing_replay profiler.* prometheus.* quantization quantization_config_file"
        " mtp.* limit_images update_weights_bucket_megabytes disable_log_requests enable_sleep_mode swap_space": ENGINE,
    },
    "critic.": {
        "optim.lr": of_critic("optimizer.lr"),
        "optim.weight_decay": of_critic("optimizer.weight_decay"),
        "optim.lr_warmup_steps": of_critic("optimizer.warmup_steps"),
        "optim.lr_warmup_steps_ratio": _warmup_share,
        "optim.lr_scheduler_type": of_critic("optimizer.schedule"),
        "grad_clip optim.clip_grad": of_critic("optimizer.clip_norm"),
        "optim.betas optim.min_lr* optim.num_cycles optim.optimizer* optim.override_optimizer_config* optim.warmup_style"
        " optim.total_training_steps optim.lr_decay_*": feature(
            "algorithm.critic.optimizer has lr, betas, weight_decay, warm-up and schedule"
        ),
        "model.path": of_critic("path"),
        "cliprange_value": of_critic("value_clip"),
        "model.enable_gradient_checkpointing": no_effect("model.gradient_checkpointing is the critic's, too"),
        "model.use_remove_padding": PACKED,
        "*offload*": _offload,
        "model.*": feature("the critic is built like the policy"),
        "*micro_batch_size* *max_token_len_per_gpu": MICRO,
        "*use_dynamic_bsz": BY_TOKENS,
        "ppo_[em]*": no_place("the critic learns from the batches of the policy"),
        "strategy megatron.* checkpoint.* profiler.* ulysses_sequence_parallel_size rollout_n nccl_timeout"
        " load_weight": PARALLEL,
        "enable shuffle data_loader_seed loss_agg_mode": no_effect("the estimator decides, and the policy's order"),
    },
    "reward_model.": {
        "overlong_buffer.* reward_kwargs.overlong_buffer_cfg.* reward_kwargs.max_resp_len": _overlong,
        "reward_kwargs.*": _reward_option,
        "reward_manager": TERMS,
        "launch_reward_fn_async": no_effect("groups are scored as they complete"),
        "enable": _reward_model,
        "*": feature("a model that scores is a judge or a reward server (docs/guides/judges.md, docs/guides/services.md)"),
    },
    "custom_reward_function.* reward.custom_reward_function.*": _reward_function,
    "reward.* reward_manager.*": feature(TERMS.text),
    "algorithm.": {
        "adv_estimator": _estimator,
        "mode": chosen("algorithm.advantage.post", ["optimize_threshold"], "only optimize_threshold is known"),
        "gamma": _of_estimator("gamma"),
        "lam": _of_estimator("lam"),
        "high_level_gamma": _of_estimator("turn_gamma"),
        "high_level_lam": _of_estimator("turn_lam"),
        "norm_adv_by_std_in_grpo": _of_estimator("std"),
        "use_kl_in_reward kl_penalty kl_ctrl.*": _kl_reward,
        "filter_groups.enable": "selection.dynamic",
        "filter_groups.max_num_gen_batches": _rounds,
        "filter_groups.metric": no_effect("a group without variance of its reward is left out"),
        "rollout_correction.rollout_is": _correction,
        "rollout_correction.rollout_is_threshold": where(
            "algorithm.rollout_correction.rollout_is",
            "algorithm.correction.high",
            "there are no importance weights (rollout_is)",
            default=False,
        ),
        "rollout_correction.* rollout_is*": CORRECTION,
        "use_pf_ppo": feature("there is no such reweighting"),
        "pf_ppo.*": no_effect("there is no such reweighting"),
    },
    "trainer.": {
        "total_epochs": _epochs,
        "total_training_steps": _steps,
        "save_freq": count("checkpoint.every"),
        "test_freq": _evaluated(count("evaluation.every")),
        "val_before_train": _evaluated("evaluation.at_start"),
        "val_only": feature("sensorium eval RECIPE --model CHECKPOINT"),
        "logger": _loggers,
        "project_name": "logging.project",
        "experiment_name": run_name,
        "default_local_dir": "run_dir",
        "n_gpus_per_node nnodes": PARALLEL,
        "critic_warmup": of_critic("warmup_steps"),
        "val_generations_to_log_to_wandb log_val_generations": _evaluated(_generations),
        "max_actor_ckpt_to_keep": "checkpoint.keep",
        "max_critic_ckpt_to_keep": no_effect("a checkpoint holds policy and critic"),
        "resume_mode": no_place(RESUME),
        "resume_from_path": feature(RESUME),
        "balance_batch": BY_TOKENS,
        "*data_dir": no_effect("episodes and evaluations are always written to the run directory"),
        "device": no_place("model.device; auto takes a GPU where there is one"),
        "default_hdfs_dir": feature("runs are written to a folder (run_dir)"),
        "esi_redundant_time del_local_ckpt_after_load ray_wait_register_center_timeout use_legacy_worker_impl use_v1"
        " remove_previous_ckpt_in_save worker_timing rollout_keep* log_freq npu_profile* profile_steps"
        " use_reward_loop": INSIDE,
    },
    "global_profiler.*": MEASURED,
    "ray_kwargs.* ray_init.*": RAY,
    "transfer_queue.*": INSIDE,
    "--config-* hydra.*": LAUNCH,
}
RULES = table(TABLE)
