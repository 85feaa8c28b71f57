"""verl's overrides, and those of systems on it: TaskMem (reward_kwargs, algorithm.mode), VAGEN (rollout_manager), CapRL.

bash run.sh data.train_batch_size=32 actor_rollout_ref.rollout.n=8 …        → batch: {prompts_per_step: 32, group_size: 8}
"""

import copy
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.recipe.names import import_system, wrong_options
from sensorium.recipe.traits import estimator_traits, loss_traits
from sensorium.systems.migration.outcomes import (
    DROP,
    Migration,
    Rule,
    Setting,
    Sheet,
    Why,
    choose_estimator,
    choose_loss,
    chosen,
    divide_batch,
    each,
    feature,
    flat,
    loggers,
    of_critic,
    of_loss,
    run_name,
    scaled,
    unset,
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
VAGEN_RECIPES = {
    "svg": "vagen_svg", "sokoban": "vagen_sokoban", "frozenlake": "vagen_frozen_lake", "frozen_lake": "vagen_frozen_lake",
    "navigation": "vagen_navigation",
}  # fmt: skip

VAGEN_COMMAND = re.compile(r"-m\s+vagen\.\w|\bvagen/\S*main_ppo\.py")
"""A command that starts VAGEN."""

TASKMEM_REWARD = {
    "think_length_threshold", "think_penalty", "memory_token_threshold", "memory_length_threshold", "usefulness_scale",
    "correct_reward", "wrong_reward", "format_penalty",
}  # fmt: skip

PARALLEL = Why(
    "no place", "GPUs are divided by the section cluster (learners, engines, sequence_parallel; docs/guides/scale_out.md)"
)
ENGINE = Why(
    "no place", "the engine here decides it; rollout.engine=vllm takes options of its own (docs/guides/engines.md)"
)
MICRO = Why("no place", "micro-batches are packed by tokens here: batch.tokens_per_microbatch")
OFFLOAD = Why("no place", "cluster.offload keeps weights and moments of several learners in the machine's memory")
PACKED = Why("no effect", "sequences are always packed without padding here")
LAUNCH = Why("no place", "how verl is launched; here: sensorium train RECIPE")
MEASURED = Why("no place", "profiling; metrics time/* and throughput/* are always written")
NOTHING_HELD_OUT = "nothing is held out: name rows under tasks.evaluate first (data.val_files)"
STORED = Why("no effect", "a checkpoint here always holds model, optimizer and the run's state")


def system_of(settings: Mapping[str, Any], text: str) -> str:
    """The shipped recipe that a set of overrides belongs to; empty for verl's own examples."""
    paid = {key.rpartition(".")[2] for key in settings if key.startswith("reward_model.reward_kwargs.")}
    if paid & TASKMEM_REWARD or "algorithm.mode" in settings or "M3_API_CONFIG" in text:
        return "taskmem"
    if str(settings.get("data.input_type", "")) in ("image", "video"):
        return f"caprl_{settings['data.input_type']}"
    turns = any(key.startswith("rollout_manager.") for key in settings) or "algorithm.high_level_gamma" in settings
    turns = turns or settings.get("algorithm.adv_estimator") in ("bi_level_gae", "masked_gae", "turn_wise_gae")
    if turns or VAGEN_COMMAND.search(text):
        named = [recipe for word, recipe in VAGEN_RECIPES.items() if word in text.lower().replace("-", "_")]
        found = named[0] if named else "vagen_svg"
        trico = settings.get("algorithm.adv_estimator") == "bi_level_gae" and found == "vagen_svg"
        return "vagen_trico_svg" if trico else found
    return ""


def certainty(given: Given) -> int:
    """How sure it is that a text is verl's, or of a system on it."""
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
    given = {setting.key: setting.value for setting in settings}
    start = system_of(given, text)
    sheet = Sheet("verl", start, settings, notes)
    if not start:
        sheet.put("optimizer.weight_decay", 0.01)
        sheet.put("tasks.train.0.options.columns.answer", "reward_model.ground_truth")
        sheet.notes.append(
            "verl chooses rewards by a row's data_source; this recipe has the term math. Others: docs/reference/rewards.md."
        )
    bounded = {"trainer.total_epochs"} if sheet.value("trainer.total_training_steps") else set()
    sheet.fill({} if start else {key: value for key, value in DEFAULTS.items() if key not in bounded}, FIRST)
    sheet.settle({**(VAGEN if start.startswith("vagen") else {}), **RULES})
    if start in ("vagen_svg", "vagen_trico_svg") and "svg" not in text.lower():
        sheet.notes.append(
            f"no environment of VAGEN's is named: the recipe has that of {start} (docs/guides/systems/vagen.md)."
        )
    size = "actor_rollout_ref.actor.ppo_mini_batch_size"
    if size in sheet.filled and sheet.outcomes[size].kind == "no place":
        sheet.notes.append(f"{size} was left out, which is {DEFAULTS[size]} in verl: {sheet.outcomes[size].text}.")
    if not start and not sheet.at("model.path"):
        sheet.put("model.path", "MODEL")
        sheet.notes.append("no actor_rollout_ref.model.path was given: model.path says MODEL, which no folder is.")
    return sheet.finish(named)


def _files(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        paths = [str(path) for path in (setting.value if isinstance(setting.value, list) else [setting.value])]
        if any(unset(path) for path in paths):
            sheet.nothing(setting, "no place", f"its value is not in the file: set tasks.{side}.0.options.path yourself")
            return
        options = dict(sheet.at("tasks.train.0.options", {}))
        source = sheet.at("tasks.train.0.source")
        if sheet.start.startswith("vagen"):
            source, options = "vagen", {"split": "train" if side == "train" else "test"}
            options["max_turns"] = sheet.value("rollout_manager.max_turns", sheet.at("rollout.max_turns", 5))
        elif source in ("parquet", "jsonl"):
            source = "jsonl" if Path(paths[0]).suffix in (".jsonl", ".json") else "parquet"
        options.pop("path", None)
        made = [{"source": source, "options": {"path": path, **copy.deepcopy(options)}} for path in paths]
        sheet.put(f"tasks.{side}", made)
        sheet.became(setting, {f"tasks.{side}.{i}.options.path": path for i, path in enumerate(paths)}, f"source {source}")

    return rule


def _column(part: str, usual: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if "columns" in sheet.at("tasks.train.0.options", {}):
            sides = [side for side in ("train", "evaluate") if sheet.at(f"tasks.{side}.0.options.columns") is not None]
            sheet.became(setting, {f"tasks.{side}.0.options.columns.{part}": setting.value for side in sides})
        elif setting.value == usual:
            sheet.nothing(setting, "no effect", f"the source {sheet.at('tasks.train.0.source')} reads this column")
        else:
            why = f"the source {sheet.at('tasks.train.0.source')} reads '{usual}'; rename the column"
            sheet.nothing(setting, "no place", why)

    return rule


def _context(sheet: Sheet, setting: Setting) -> None:
    if sheet.start.startswith("vagen") and setting.key == "data.max_prompt_length":
        sheet.nothing(setting, "no place", "a whole episode is bounded instead: rollout.max_context_tokens")
        return
    response, prompt = sheet.value("data.max_response_length"), sheet.value("data.max_prompt_length")
    changes = {"rollout.max_new_tokens": setting.value} if setting.key == "data.max_response_length" else {}
    most = sheet.value("actor_rollout_ref.rollout.max_model_len")
    if isinstance(response, int) and isinstance(prompt, int) and not sheet.start.startswith("vagen") and not most:
        changes["rollout.max_context_tokens"] = prompt + response
    elif not changes:
        changes = {"rollout.max_context_tokens": setting.value + sheet.at("rollout.max_new_tokens", 64)}
    sheet.became(setting, changes)


def _truncation(sheet: Sheet, setting: Setting) -> None:
    if sheet.value("data.filter_overlong_prompts", False):
        sheet.nothing(setting, "no effect", "long prompts are left out before (data.filter_overlong_prompts)")
    elif setting.value == "error":
        sheet.became(setting, {"tasks.on_long_prompt": "refuse"})
    else:
        sheet.nothing(setting, "no place", "prompts are never cut; tasks.on_long_prompt: skip leaves long ones out")


def _filter_long(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"tasks.on_long_prompt": "skip"})
    else:
        sheet.nothing(setting, "no effect", "rows are not filtered by length before the run")


def _mini_batch(sheet: Sheet, setting: Setting) -> None:
    group = 1 if sheet.start.startswith("vagen") else sheet.at("batch.group_size", 8)
    divide_batch(sheet, setting, setting.value * group)


def _group(sheet: Sheet, setting: Setting) -> None:
    if "rollout_manager.n_trajectory" in sheet.settings and setting.key != "rollout_manager.n_trajectory":
        sheet.nothing(setting, "no effect", "rollout_manager.n_trajectory says how many episodes a task has")
    else:
        sheet.became(setting, {"batch.group_size": setting.value})


def _kl_loss(sheet: Sheet, setting: Setting) -> None:
    if not sheet.value("actor_rollout_ref.actor.use_kl_loss", False):
        own = setting.key.endswith("use_kl_loss")
        in_reward = sheet.at("algorithm.kl.place") == "reward" and sheet.at("algorithm.kl.coef")
        if own and not in_reward and sheet.at("algorithm.kl.coef"):
            sheet.became(setting, {"algorithm.kl.coef": 0.0})
        else:
            sheet.nothing(setting, "no effect", "there is no KL in the loss (actor.use_kl_loss)")
        return
    coef = sheet.value("actor_rollout_ref.actor.kl_loss_coef", 0.001)
    kind = str(sheet.value("actor_rollout_ref.actor.kl_loss_type", "low_var_kl")).removesuffix("+")
    if kind not in KL:
        sheet.nothing(
            setting, "no place", f"the KL '{kind}' is not known here; algorithm.kl.estimator: {', '.join(set(KL.values()))}"
        )
    elif setting.key.endswith("use_kl_loss"):
        sheet.became(setting, {"algorithm.kl.place": "loss"})
    elif setting.key.endswith("coef"):
        sheet.became(setting, {"algorithm.kl.coef": coef})
    else:
        sheet.became(setting, {"algorithm.kl.estimator": KL[kind]})


def _kl_reward(sheet: Sheet, setting: Setting) -> None:
    old = sheet.start.startswith("vagen") and not sheet.value("actor_rollout_ref.actor.use_kl_loss", False)
    if not sheet.value("algorithm.use_kl_in_reward", old):
        sheet.nothing(setting, "no effect", "there is no KL in the reward (algorithm.use_kl_in_reward)")
    elif setting.key.endswith("use_kl_in_reward"):
        coef = sheet.value("algorithm.kl_ctrl.kl_coef", 0.001)
        sheet.became(setting, {"algorithm.kl.place": "reward", "algorithm.kl.coef": coef})
    elif setting.key.endswith("kl_penalty"):
        chosen("algorithm.kl.estimator", KL, "this estimator of the KL is not known here")(sheet, setting)
    else:
        name = {"kl_coef": "coef", "type": "control", "target_kl": "target", "horizon": "horizon"}[
            setting.key.split(".")[-1]
        ]
        sheet.became(setting, {f"algorithm.kl.{name}": setting.value})


def _warmup_share(sheet: Sheet, setting: Setting) -> None:
    place = "algorithm.critic.optimizer" if setting.key.startswith("critic.") else "optimizer"
    if not setting.value:
        sheet.nothing(setting, "no effect", "no warm-up")
    elif isinstance(sheet.at("steps"), int):
        sheet.became(setting, {f"{place}.warmup_steps": int(setting.value * sheet.at("steps"))})
    else:
        sheet.nothing(setting, "no place", f"a share of steps that follow from epochs; set {place}.warmup_steps yourself")


def _estimator(sheet: Sheet, setting: Setting) -> None:
    if setting.value not in ESTIMATORS:
        sheet.nothing(setting, "no place", f"this estimator is not here; those that are: {', '.join(ESTIMATORS)}")
    else:
        choose_estimator(sheet, setting, ESTIMATORS[setting.value])


def _loss_mode(sheet: Sheet, setting: Setting) -> None:
    if setting.value not in LOSSES:
        sheet.nothing(setting, "no place", f"this loss is not here; those that are: {', '.join(LOSSES)}")
    else:
        choose_loss(sheet, setting, LOSSES[setting.value])


def _of_estimator(option: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        name = sheet.at("algorithm.advantage.name", "grpo")
        options = [option]
        if option == "lam" and "algorithm.high_level_lam" not in sheet.settings:  # VAGEN's one lam is both
            options.append("turn_lam")
        taken = [one for one in options if one in estimator_traits(name).settings]
        if taken:
            sheet.became(setting, {f"algorithm.advantage.{one}": setting.value for one in taken})
        else:
            sheet.nothing(setting, "no effect", f"the estimator {name} has no use for it")

    return rule


def _clip_both(sheet: Sheet, setting: Setting) -> None:
    changes = {}
    for side in ("low", "high"):
        if f"actor_rollout_ref.actor.clip_ratio_{side}" not in sheet.settings:
            changes[f"algorithm.loss.clip_{side}"] = setting.value
    if changes:
        sheet.became(setting, changes)
    else:
        sheet.nothing(setting, "no effect", "clip_ratio_low and clip_ratio_high are given")


def _loggers(sheet: Sheet, setting: Setting) -> None:
    names = setting.value if isinstance(setting.value, list) else [setting.value]
    loggers(sheet, setting, [str(name) for name in names])


def _epochs(sheet: Sheet, setting: Setting) -> None:
    steps = {} if sheet.value("trainer.total_training_steps") else {"steps": DROP}
    sheet.became(setting, {"epochs": setting.value, **steps})


def _steps(sheet: Sheet, setting: Setting) -> None:
    if setting.value is None or setting.value == -1:
        sheet.nothing(setting, "no effect", "the epochs say how long the run is")
        return
    epochs = {} if "trainer.total_epochs" in sheet.settings else {"epochs": DROP}
    sheet.became(setting, {"steps": setting.value, **epochs})


def _held_out(sheet: Sheet, setting: Setting) -> None:
    """How held-out tasks are answered: greedily, unless ``do_sample`` and a temperature are given."""
    section, usual = "actor_rollout_ref.rollout.val_kwargs", sheet.at("evaluation.temperature", 0.0)
    samples = sheet.value(f"{section}.do_sample", bool(sheet.start))
    temperature = float(sheet.value(f"{section}.temperature", usual)) if samples else 0.0
    if not sheet.at("tasks.evaluate"):
        sheet.nothing(setting, "no place", NOTHING_HELD_OUT)
    elif setting.key.endswith(".n"):
        note = "answers are greedy, so more would be the same; do_sample=True with a temperature samples them"
        alike = not temperature and setting.value != 1
        sheet.became(setting, {"evaluation.samples": 1 if alike else setting.value}, note if alike else "")
    elif setting.key.endswith("temperature") and not samples:
        sheet.nothing(setting, "no effect", "answers are greedy without val_kwargs.do_sample=True")
    else:
        sheet.became(setting, {"evaluation.temperature": temperature})


def _evaluated(place: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if not sheet.at("tasks.evaluate"):
            sheet.nothing(setting, "no place", NOTHING_HELD_OUT)
        elif place == "logging.generations" and "wandb" not in sheet.value("trainer.logger", []):
            sheet.nothing(setting, "no effect", "generations are sent to wandb only, which trainer.logger does not name")
        else:
            sheet.became(setting, {place: max(0, setting.value) if type(setting.value) is int else setting.value})

    return rule


def _frozen(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"model.freeze": ["vision"]})
    else:
        sheet.nothing(setting, "no effect", "everything learns")


def _lora_modules(sheet: Sheet, setting: Setting) -> None:
    if setting.value == "all-linear":
        sheet.nothing(setting, "no effect", "adapters are on all linear layers")
    else:
        names = setting.value if isinstance(setting.value, list) else [setting.value]
        sheet.became(setting, {"model.lora.modules": names})


def _lora_alpha(sheet: Sheet, setting: Setting) -> None:
    if sheet.value("actor_rollout_ref.model.lora_rank", 0):
        sheet.became(setting, {"model.lora.alpha": setting.value})
    else:
        sheet.nothing(setting, "no effect", "there are no adapters (lora_rank 0)")


def _sequence_parallel(sheet: Sheet, setting: Setting) -> None:
    if setting.value in (1, None):
        sheet.nothing(setting, "no effect", "tokens are not shared")
    else:
        sheet.nothing(
            setting, "no place", f"cluster.sequence_parallel={setting.value} with cluster.learners, a multiple of it"
        )


def _turns(sheet: Sheet, setting: Setting) -> None:
    changes = {"rollout.max_turns": setting.value}
    for side in ("train", "evaluate"):
        for i, source in enumerate(sheet.at(f"tasks.{side}", [])):
            inner = "options.options.max_turns" if source["source"] == "environments" else "options.max_turns"
            changes[f"tasks.{side}.{i}.{inner}"] = setting.value
    sheet.became(setting, changes)


def _mask(option: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        from sensorium.recipe.schema import AlgorithmSection

        if option in AlgorithmSection.model_fields:
            sheet.became(setting, {f"algorithm.{option}": bool(setting.value)})
        elif setting.value:
            sheet.nothing(setting, "no effect", "only what the model wrote is trained on and credited, always")
        else:
            sheet.nothing(setting, "no place", "only what the model wrote is trained on and credited")

    return rule


def _offloading(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.nothing(setting, OFFLOAD.kind, OFFLOAD.text)
    else:
        sheet.nothing(setting, "no effect", "weights and moments stay on the GPU")


def _correction(sheet: Sheet, setting: Setting) -> None:
    if setting.value in ("token", "sequence", "geometric"):
        sheet.became(setting, {"algorithm.correction.weights": setting.value})
    else:
        feature("algorithm.correction.weights is token, sequence or geometric")(sheet, setting)


def _correction_high(sheet: Sheet, setting: Setting) -> None:
    if sheet.value("algorithm.rollout_correction.rollout_is"):
        sheet.became(setting, {"algorithm.correction.high": setting.value})
    else:
        sheet.nothing(setting, "no effect", "there are no importance weights (rollout_is)")


def _aggregation(sheet: Sheet, setting: Setting) -> None:
    name = sheet.at("algorithm.loss.name", "clip")
    allowed = loss_traits(name).aggregations
    if setting.value not in AGGREGATIONS:
        sheet.nothing(setting, "no place", "this way to sum tokens is not here (algorithm.loss.aggregation)")
    elif allowed and AGGREGATIONS[setting.value] not in allowed:
        sheet.nothing(setting, "no place", f"the loss {name} is defined over whole sequences: {allowed[0]}")
    else:
        sheet.became(setting, {"algorithm.loss.aggregation": AGGREGATIONS[setting.value]})


def _reward_option(sheet: Sheet, setting: Setting) -> None:
    option, term = setting.key.split(".", 2)[2], sheet.at("rewards.terms.0.name")
    wrong, _ = wrong_options("reward", term, {**sheet.at("rewards.terms.0.options", {}), option: setting.value})
    if wrong == option:
        sheet.nothing(setting, "unknown", f"the reward {term} has no such option; nothing was made of it")
    else:
        sheet.became(setting, {f"rewards.terms.0.options.{option}": setting.value})


FIRST = (
    "algorithm.adv_estimator", "actor_rollout_ref.actor.policy_loss.loss_mode", "data.train_batch_size",
    "rollout_manager.n_trajectory", "actor_rollout_ref.rollout.n", "trainer.total_training_steps", "data.train_files",
    "data.val_files", "data.max_response_length", "data.max_prompt_length", "trainer.logger",
)  # fmt: skip
"""Keys on which others depend."""

DEFAULTS: dict[str, Any] = {
    "algorithm.adv_estimator": "gae",
    "data.train_batch_size": 1024,
    "data.max_prompt_length": 512,
    "data.max_response_length": 512,
    "actor_rollout_ref.rollout.n": 1,
    "actor_rollout_ref.rollout.val_kwargs.do_sample": False,
    "actor_rollout_ref.actor.ppo_mini_batch_size": 256,
    "actor_rollout_ref.actor.clip_ratio_c": 3.0,
    "critic.optim.lr": 1e-5,
    "critic.optim.weight_decay": 0.01,
    "trainer.val_before_train": True,
    "trainer.total_epochs": 30,
}
"""verl's own values of keys that a command leaves out, where a recipe's are others."""

VAGEN: dict[str, Rule] = {
    "env": lambda sheet, setting: (
        sheet.nothing(setting, "became", f"the recipe that the migration starts from: {sheet.start}")
        if VAGEN_RECIPES.get(str(setting.value).lower()) == sheet.start
        else sheet.nothing(setting, "no place", "name the environment under tasks.train (docs/guides/environments.md)")
    ),
    "rollout_manager.max_turns": _turns,
    "rollout_manager.window_size": "rollout.window",
    "rollout_manager.use_multi_turn_reward": "rewards.terms.0.options.per_turn",
    "rollout_manager.use_loss_mask": _mask("loss_mask"),
    "rollout_manager.use_gae_mask": _mask("gae_mask"),
    "rollout_manager.n_trajectory": _group,
    "rollout_manager.n_gpus_per_node": PARALLEL,
    "rollout_manager.base_url": Why("no place", "environment: remote names servers (docs/guides/environments.md)"),
    "rollout_manager.use_service": Why("no place", "environment: remote plays on servers (docs/guides/environments.md)"),
    "rollout_manager.timeout": "rollout.environment_deadline_s",
    "data.max_trajectory_length": "rollout.max_context_tokens",
}
RULES: dict[str, Rule] = {
    "data.train_files": _files("train"),
    "data.val_files": _files("evaluate"),
    "data.train_batch_size": "batch.prompts_per_step",
    "data.gen_batch_size": Why(
        "no place", "selection.oversample and selection.dynamic draw more tasks than are trained on"
    ),
    "data.val_batch_size": Why("no effect", "all held-out tasks are played at once"),
    "data.max_prompt_length": _context,
    "data.max_response_length": _context,
    "data.truncation": _truncation,
    "data.filter_overlong_prompts": _filter_long,
    "data.filter_overlong_prompts_workers": Why("no effect", "prompts are measured as they are drawn"),
    "data.shuffle": "tasks.shuffle",
    "data.seed": "seed",
    "data.dataloader_num_workers": Why("no effect", "rows of the next step are read ahead in a thread, in their order"),
    "data.image_key": _column("pictures", "images"),
    "data.video_key": _column("videos", "videos"),
    "data.prompt_key": _column("prompt", "prompt"),
    "data.input_type": Why("became", "the recipe that the migration starts from"),
    "data.val_max_samples": _evaluated("evaluation.limit"),
    "data.train_max_samples": feature("give a file with fewer rows"),
    "data.custom_cls.*": feature("a source of your own is module:Class under tasks.train (docs/guides/tasks.md)"),
    "data.return_raw_chat": Why("no effect", "templates are applied by the model's chat processor"),
    **each(
        "data",
        "return_raw_input_ids return_full_prompt return_multi_modal_inputs",
        Why("no effect", "how verl hands data on"),
    ),
    "data.apply_chat_template_kwargs*": feature("the model's template is applied as it is"),
    "data.trust_remote_code": feature("no code of a data set is run"),
    "data.sampler.*": feature("tasks.planner decides which task comes next"),
    "data.reward_fn_key": Why("no place", "reward terms are named under rewards.terms"),
    "data.tokenizer": feature("the model's own tokenizer is used"),
    "data.*tool_config_path": feature("tools are options of the environment tools (docs/guides/environments.md)"),
    "data.validation_shuffle": Why("no effect", "the order of held-out tasks changes nothing"),
    "data.image_patch_size": Why("no effect", "the model's own processor knows it"),
    "data.use_shm": feature("rows are read where they lie"),
    "actor_rollout_ref.model.path": "model.path",
    "actor_rollout_ref.model.enable_gradient_checkpointing": "model.gradient_checkpointing",
    "actor_rollout_ref.model.use_remove_padding": PACKED,
    "actor_rollout_ref.model.use_fused_kernels": Why(
        "no effect", "fused kernels are used where they agree with the stock layers"
    ),
    "actor_rollout_ref.model.fused_kernel_options.*": Why("no effect", "fused kernels are chosen here"),
    "actor_rollout_ref.model.use_liger": Why("no effect", "fused kernels of our own are used"),
    "actor_rollout_ref.model.use_shm": feature("weights are read where they lie"),
    "actor_rollout_ref.model.lora_rank": "model.lora.rank",
    "actor_rollout_ref.model.lora_alpha": _lora_alpha,
    "actor_rollout_ref.model.lora.rank": "model.lora.rank",
    "actor_rollout_ref.model.lora.alpha": "model.lora.alpha",
    "actor_rollout_ref.model.target_modules": _lora_modules,
    "actor_rollout_ref.model.exclude_modules": feature("model.lora.modules names the layers that get adapters"),
    "actor_rollout_ref.model.lora_adapter_path": feature(
        "merge the adapter first and name the merged folder as model.path"
    ),
    "actor_rollout_ref.model.lora.*": feature("adapters have rank, alpha, groups and modules (model.lora)"),
    "actor_rollout_ref.model.enable_activation_offload": feature("model.gradient_checkpointing saves this memory"),
    "actor_rollout_ref.model.trust_remote_code": feature("no code of a checkpoint is run"),
    "actor_rollout_ref.model.custom_chat_template": feature("the checkpoint's template is used"),
    "actor_rollout_ref.model.external_lib": feature("a family of your own is module:Class in model.family"),
    "actor_rollout_ref.model.override_config.*": feature("the checkpoint's config.json is used"),
    "actor_rollout_ref.model.mtp.*": feature("multi-token prediction is not trained"),
    "actor_rollout_ref.model.*_path": feature("config and tokenizer come with model.path"),
    "actor_rollout_ref.model.tiled_mlp.*": feature("model.gradient_checkpointing saves this memory"),
    "actor_rollout_ref.model.freeze_*": feature("model.freeze names the groups that do not learn"),
    "actor_rollout_ref.hybrid_engine": Why("no effect", "engine and learner share the GPU, or are placed by cluster"),
    "actor_rollout_ref.nccl_timeout": Why("no place", "cluster.reply_s bounds a rank's step"),
    "actor_rollout_ref.actor.optim.lr": "optimizer.lr",
    "actor_rollout_ref.actor.optim.weight_decay": "optimizer.weight_decay",
    "actor_rollout_ref.actor.optim.betas": "optimizer.betas",
    "actor_rollout_ref.actor.optim.clip_grad": "optimizer.clip_norm",
    "actor_rollout_ref.actor.grad_clip": "optimizer.clip_norm",
    "actor_rollout_ref.actor.optim.lr_warmup_steps": scaled("optimizer.warmup_steps"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": _warmup_share,
    "actor_rollout_ref.actor.optim.min_lr_ratio": "optimizer.final_lr_share",
    "actor_rollout_ref.actor.optim.lr_scheduler_type": "optimizer.schedule",
    "actor_rollout_ref.actor.optim.lr_decay_style": "optimizer.schedule",
    "actor_rollout_ref.actor.optim.warmup_style": "optimizer.schedule",
    "actor_rollout_ref.actor.optim.total_training_steps": Why(
        "no effect", "trainer.total_training_steps or the epochs count"
    ),
    "actor_rollout_ref.actor.optim.optimizer*": Why("no effect", "AdamW is the optimizer"),
    **each(
        "actor_rollout_ref.actor.optim",
        "num_cycles override_optimizer_config* lr_warmup_init min_lr lr_decay_steps lr_wsd_* "
        "use_checkpoint_opt_param_scheduler",
        feature("AdamW has lr, betas, eps, weight_decay, warm-up and schedule (optimizer)"),
    ),
    "actor_rollout_ref.actor.ppo_mini_batch_size": _mini_batch,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": "batch.tokens_per_microbatch",
    "actor_rollout_ref.actor.ppo_micro_batch_size*": MICRO,
    "actor_rollout_ref.actor.*use_dynamic_bsz": Why("no effect", "micro-batches are always packed by tokens"),
    "actor_rollout_ref.actor.clip_ratio": _clip_both,
    "actor_rollout_ref.actor.clip_ratio_low": of_loss("clip_low"),
    "actor_rollout_ref.actor.clip_ratio_high": of_loss("clip_high"),
    "actor_rollout_ref.actor.clip_ratio_c": of_loss("dual_clip"),
    "actor_rollout_ref.actor.tau_pos": of_loss("tau_positive"),
    "actor_rollout_ref.actor.tau_neg": of_loss("tau_negative"),
    "actor_rollout_ref.actor.loss_agg_mode": _aggregation,
    "actor_rollout_ref.actor.loss_scale_factor": feature("algorithm.loss.aggregation_constant"),
    "actor_rollout_ref.actor.policy_loss.loss_mode": _loss_mode,
    "actor_rollout_ref.actor.policy_loss.clip_cov_ratio": of_loss("cov_share"),
    "actor_rollout_ref.actor.policy_loss.clip_cov_lb": of_loss("cov_low"),
    "actor_rollout_ref.actor.policy_loss.clip_cov_ub": of_loss("cov_high"),
    "actor_rollout_ref.actor.policy_loss.kl_cov_ratio": of_loss("cov_share"),
    "actor_rollout_ref.actor.policy_loss.ppo_kl_coef": of_loss("cov_kl_coef"),
    "actor_rollout_ref.actor.entropy_coeff": "algorithm.loss.entropy_coef",
    "actor_rollout_ref.actor.use_kl_loss": _kl_loss,
    "actor_rollout_ref.actor.kl_loss_coef": _kl_loss,
    "actor_rollout_ref.actor.kl_loss_type": _kl_loss,
    "actor_rollout_ref.actor.ppo_epochs": "batch.epochs_per_step",
    "actor_rollout_ref.actor.shuffle": feature("groups keep their order within a step"),
    "actor_rollout_ref.actor.freeze_vision_tower": _frozen,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _sequence_parallel,
    "actor_rollout_ref.actor.strategy": PARALLEL,
    "actor_rollout_ref.actor.checkpoint.*": STORED,
    "actor_rollout_ref.actor.*offload*": _offloading,
    "actor_rollout_ref.actor.fsdp_config.model_dtype": Why(
        "no place", "model.dtype; moments and remainders keep float32 masters"
    ),
    "actor_rollout_ref.actor.fsdp_config.*": PARALLEL,
    "actor_rollout_ref.actor.megatron.*": PARALLEL,
    "actor_rollout_ref.actor.profiler.*": MEASURED,
    "actor_rollout_ref.actor.*profile*": MEASURED,
    "actor_rollout_ref.actor.router_replay.*": feature("model.precision: matched lets engine and learner agree"),
    "actor_rollout_ref.actor.entropy_*": Why("no effect", "entropy is computed in chunks"),
    "actor_rollout_ref.actor.calculate_*": Why("no effect", "entropy is always measured"),
    "actor_rollout_ref.actor.use_torch_compile": Why("no effect", "kernels are chosen here"),
    "actor_rollout_ref.actor.use_prefix_grouper": Why("no effect", "a group's prompt is always computed once"),
    "actor_rollout_ref.actor.data_loader_seed": Why("no effect", "updates keep the order of the draws"),
    **each(
        "actor_rollout_ref.actor",
        "use_remove_padding use_fused_kernels",
        Why("no effect", "packing and kernels are chosen here"),
    ),
    **each(
        "actor_rollout_ref.actor",
        "rollout_n load_weight sum_pi_squared_checkpointing",
        Why("no effect", "how verl works inside"),
    ),
    "actor_rollout_ref.ref.*offload*": _offloading,
    "actor_rollout_ref.ref.log_prob_*": MICRO,
    **each(
        "actor_rollout_ref.ref",
        "strategy fsdp_config.* megatron.* profiler.* ulysses_sequence_parallel_size rollout_n",
        PARALLEL,
    ),
    **each(
        "actor_rollout_ref.ref",
        "use_torch_compile entropy_* router_replay.* model.* load_weight",
        Why("no effect", "the reference is computed like the policy"),
    ),
    "actor_rollout_ref.rollout.n": _group,
    "actor_rollout_ref.rollout.temperature": "rollout.temperature",
    "actor_rollout_ref.rollout.top_p": "rollout.top_p",
    "actor_rollout_ref.rollout.top_k": scaled("rollout.top_k"),
    "actor_rollout_ref.rollout.do_sample": Why("no effect", "responses are always sampled"),
    "actor_rollout_ref.rollout.ignore_eos": "rollout.ignore_stop_tokens",
    "actor_rollout_ref.rollout.max_model_len": "rollout.max_context_tokens",
    "actor_rollout_ref.rollout.response_length": "rollout.max_new_tokens",
    "actor_rollout_ref.rollout.prompt_length": Why(
        "no place", "rollout.max_context_tokens bounds prompt and response together"
    ),
    "actor_rollout_ref.rollout.calculate_log_probs": Why("no effect", "the engine's log-probs are always kept"),
    "actor_rollout_ref.rollout.log_prob_*": MICRO,
    **each("actor_rollout_ref.rollout.val_kwargs", "temperature n do_sample", _held_out),
    "actor_rollout_ref.rollout.val_kwargs.*": Why(
        "no place", "held-out tasks are sampled with the rollout's top_p and top_k"
    ),
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": "rollout.max_turns",
    "actor_rollout_ref.rollout.multi_turn.*": feature(
        "several turns are an environment's: tools, geo3k, … (docs/guides/environments.md)"
    ),
    "actor_rollout_ref.rollout.agent.num_workers": Why(
        "no effect", "all episodes of a step are played at once (rollout.concurrency)"
    ),
    "actor_rollout_ref.rollout.agent.*": feature("an agent loop is an environment here (docs/guides/environments.md)"),
    "actor_rollout_ref.rollout.mode": Why("no effect", "episodes are always played asynchronously"),
    "actor_rollout_ref.rollout.over_sample_rate": feature("selection.oversample"),
    "actor_rollout_ref.rollout.tensor_model_parallel_size": PARALLEL,
    "actor_rollout_ref.rollout.*parallel_size": PARALLEL,
    "actor_rollout_ref.rollout.trace.*": feature("episodes are written to the run directory"),
    **each(
        "actor_rollout_ref.rollout",
        "name dtype gpu_memory_utilization enforce_eager free_cache_engine enable_chunked_prefill enable_prefix_caching "
        "max_num_batched_tokens max_num_seqs load_format disable_log_stats engine_kwargs.* cudagraph_capture_sizes "
        "layered_summon logprobs_mode scheduling_policy multi_stage_wake_up checkpoint_engine.* skip_rollout skip_dump_dir "
        "skip_tokenizer_init enable_rollout_routing_replay profiler.* prometheus.* quantization quantization_config_file "
        "mtp.* limit_images update_weights_bucket_megabytes disable_log_requests enable_sleep_mode swap_space",
        ENGINE,
    ),
    "critic.optim.lr": of_critic("algorithm.critic.optimizer.lr"),
    "critic.optim.weight_decay": of_critic("algorithm.critic.optimizer.weight_decay"),
    "critic.optim.lr_warmup_steps": of_critic("algorithm.critic.optimizer.warmup_steps"),
    "critic.optim.lr_warmup_steps_ratio": _warmup_share,
    "critic.optim.lr_scheduler_type": of_critic("algorithm.critic.optimizer.schedule"),
    "critic.grad_clip": of_critic("algorithm.critic.optimizer.clip_norm"),
    "critic.optim.clip_grad": of_critic("algorithm.critic.optimizer.clip_norm"),
    **each(
        "critic.optim",
        "betas min_lr* num_cycles optimizer* override_optimizer_config* warmup_style total_training_steps lr_decay_*",
        feature("algorithm.critic.optimizer has lr, betas, weight_decay, warm-up and schedule"),
    ),
    "critic.model.path": of_critic("algorithm.critic.path"),
    "critic.cliprange_value": of_critic("algorithm.critic.value_clip"),
    "critic.model.enable_gradient_checkpointing": Why("no effect", "the critic does as model.gradient_checkpointing says"),
    "critic.model.use_remove_padding": PACKED,
    "critic.*offload*": _offloading,
    "critic.model.*": feature("the critic is built like the policy"),
    "critic.*micro_batch_size*": MICRO,
    "critic.*max_token_len_per_gpu": MICRO,
    "critic.*use_dynamic_bsz": Why("no effect", "micro-batches are always packed by tokens"),
    "critic.ppo_[em]*": Why("no place", "the critic learns from the batches of the policy"),
    **each(
        "critic",
        "strategy megatron.* checkpoint.* profiler.* ulysses_sequence_parallel_size rollout_n nccl_timeout load_weight",
        PARALLEL,
    ),
    **each(
        "critic",
        "enable shuffle data_loader_seed loss_agg_mode",
        Why("no effect", "the estimator decides, and the policy's order"),
    ),
    "reward_model.reward_kwargs.overlong_buffer_cfg.*": feature("add the reward term overlong (docs/reference/rewards.md)"),
    "reward_model.reward_kwargs.max_resp_len": Why("no place", "an option of the reward term overlong"),
    "reward_model.reward_kwargs.*": _reward_option,
    "reward_model.reward_manager": Why("no place", "reward terms are named under rewards.terms"),
    "reward_model.launch_reward_fn_async": Why("no effect", "groups are scored as they complete"),
    "reward_model.*": feature(
        "a model that scores is a judge or a reward server (docs/guides/judges.md, docs/guides/services.md)"
    ),
    "reward.*": feature("reward terms are named under rewards.terms (docs/reference/rewards.md)"),
    "reward_manager.*": feature("reward terms are named under rewards.terms (docs/reference/rewards.md)"),
    "custom_reward_function.*": feature(
        "a reward of your own is module:function under rewards.terms (docs/reference/rewards.md)"
    ),
    "algorithm.adv_estimator": _estimator,
    "algorithm.mode": chosen(
        "algorithm.advantage.post", {"optimize_threshold": "optimize_threshold"}, "only optimize_threshold is known"
    ),
    "algorithm.gamma": _of_estimator("gamma"),
    "algorithm.lam": _of_estimator("lam"),
    "algorithm.high_level_gamma": _of_estimator("turn_gamma"),
    "algorithm.high_level_lam": _of_estimator("turn_lam"),
    "algorithm.norm_adv_by_std_in_grpo": _of_estimator("std"),
    "algorithm.use_kl_in_reward": _kl_reward,
    "algorithm.kl_penalty": _kl_reward,
    "algorithm.kl_ctrl.*": _kl_reward,
    "algorithm.filter_groups.enable": "selection.dynamic",
    "algorithm.filter_groups.max_num_gen_batches": lambda sheet, setting: (
        sheet.became(setting, {"selection.max_rounds": setting.value})
        if setting.value and setting.value > 0
        else sheet.nothing(setting, "no place", "rounds are bounded here: selection.max_rounds")
    ),
    "algorithm.filter_groups.metric": Why("no effect", "a group without variance of its reward is left out"),
    "algorithm.rollout_correction.rollout_is": _correction,
    "algorithm.rollout_correction.rollout_is_threshold": _correction_high,
    "algorithm.rollout_correction.*": feature("algorithm.correction"),
    "algorithm.rollout_is*": feature("algorithm.correction"),
    "algorithm.use_pf_ppo": feature("there is no such reweighting"),
    "algorithm.pf_ppo.*": Why("no effect", "there is no such reweighting"),
    "trainer.total_epochs": _epochs,
    "trainer.total_training_steps": _steps,
    "trainer.save_freq": scaled("checkpoint.every"),
    "trainer.test_freq": _evaluated("evaluation.every"),
    "trainer.val_before_train": _evaluated("evaluation.at_start"),
    "trainer.val_only": feature("sensorium eval RECIPE --model CHECKPOINT"),
    "trainer.logger": _loggers,
    "trainer.project_name": "logging.project",
    "trainer.experiment_name": run_name,
    "trainer.default_local_dir": "run_dir",
    "trainer.n_gpus_per_node": PARALLEL,
    "trainer.nnodes": PARALLEL,
    "trainer.critic_warmup": of_critic("algorithm.critic.warmup_steps"),
    "trainer.val_generations_to_log_to_wandb": _evaluated("logging.generations"),
    "trainer.log_val_generations": _evaluated("logging.generations"),
    "trainer.max_actor_ckpt_to_keep": "checkpoint.keep",
    "trainer.max_critic_ckpt_to_keep": Why("no effect", "a checkpoint holds policy and critic"),
    "trainer.resume_mode": Why("no place", "a run goes on with sensorium train RUN --resume"),
    "trainer.resume_from_path": feature("a run goes on with sensorium train RUN --resume"),
    "trainer.balance_batch": Why("no effect", "micro-batches are packed by tokens"),
    "trainer.*data_dir": Why("no effect", "episodes and evaluations are always written to the run directory"),
    "trainer.device": Why("no place", "model.device; auto takes a GPU where there is one"),
    "trainer.default_hdfs_dir": feature("runs are written to a folder (run_dir)"),
    **each(
        "trainer",
        "esi_redundant_time del_local_ckpt_after_load ray_wait_register_center_timeout use_legacy_worker_impl use_v1 "
        "remove_previous_ckpt_in_save worker_timing rollout_keep* log_freq npu_profile* profile_steps use_reward_loop",
        Why("no effect", "how verl's trainer works inside"),
    ),
    "global_profiler.*": MEASURED,
    "ray_kwargs.*": Why("no place", "cluster.placement: ray, and cluster.address"),
    "ray_init.*": Why("no place", "cluster.placement: ray, and cluster.address"),
    "transfer_queue.*": Why("no effect", "how verl hands data on inside"),
    "--config-*": LAUNCH,
    "hydra.*": LAUNCH,
}
