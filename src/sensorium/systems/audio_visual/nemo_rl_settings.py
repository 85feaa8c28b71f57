"""NeMo-RL's YAML with its ``defaults`` and overrides.

grpo: {num_prompts_per_step: 32}             → batch.prompts_per_step: 32
policy.tokenizer.video.num_frames=4          → the option video: {frames: 4} of every source
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.systems.migration.outcomes import (
    DROP,
    Migration,
    Rule,
    Setting,
    Sheet,
    Why,
    beta,
    choose_estimator,
    choose_loss,
    chosen,
    divide_batch,
    each,
    feature,
    flat,
    loggers,
    of_loss,
    parsed,
    run_name,
)
from sensorium.systems.migration.recognition import Given, read_with_references
from sensorium.vocabulary.errors import RecipeError

PARALLEL = Why("no place", "GPUs are divided by the section cluster (docs/guides/scale_out.md)")
ENGINE = Why(
    "no place", "the engine here decides it; rollout.engine=vllm takes options of its own (docs/guides/engines.md)"
)
MICRO = Why("no place", "micro-batches are packed by tokens here: batch.tokens_per_microbatch")
PACKED = Why("no effect", "sequences are always packed without padding here")
ENDLESS = 1_000_000
"""Steps that NeMo-RL's configurations give where the epochs are meant to end a run."""
SOURCES = {"intent-train": "intent", "intent-bench": "intent", "daily-omni": "daily_omni"}
FIRST = (
    "data.dataset_name", "data.train.dataset_name", "data.validation.dataset_name", "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt", "grpo.adv_estimator.name", "loss_fn.use_cispo",
    "loss_fn.sequence_level_importance_ratios",
)  # fmt: skip
"""Keys on which others depend."""
TERMS = {"format": "format", "exact_alnum": "exact_alnum", "math_expr": "math", "bbox_giou": "bbox_giou"}


SECTIONS = {"grpo", "policy", "loss_fn", "checkpointing", "cluster", "env", "logger", "reward_penalties"}


def certainty(given: Given) -> int:
    """How sure it is that a text is NeMo-RL's."""
    if given.form == "yaml":
        return 2 * bool({*given.data} & SECTIONS or "defaults" in given.data)
    if given.form == "python":
        return 0
    sure = {"grpo", "policy", "loss_fn", "checkpointing"} & given.script.roots or "--config" in given.script.names
    return 2 if sure else int("cluster" in given.script.roots)


def migrate(given: Given) -> Migration:
    """The recipe of a configuration, or of a command that names one and has overrides."""
    if given.form == "yaml":
        config, notes = read_config(given.text, given.named, given.folder)
        return migrate_nemo(config, [], given.named, notes)
    script = given.script
    config, notes = _named_config(script.options, given.folder)
    return migrate_nemo(config, script.overrides, given.named, [*script.script.notes, *notes])


def _named_config(options: Sequence[Setting], folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The configuration that a command names, where it can be read."""
    named = next((str(one.value) for one in options if one.key == "--config"), "")
    if not named:
        return {}, []
    for place in [Path(named)] if folder is None else [folder / named, *(up / named for up in folder.parents), Path(named)]:
        if place.is_file():
            return read_config(place.read_text(encoding="utf-8"), named, place.parent)
    return {}, [f"the configuration '{named}' is not here, so only the overrides of the command are in the table"]


def read_config(text: str, named: str, folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The keys of a configuration over those of its ``defaults``, references resolved; and what could not be read."""
    data = read_with_references(text, named)
    if not isinstance(data, dict):
        raise RecipeError(f"{named}: a configuration of NeMo-RL is a mapping of sections.")
    notes: list[str] = []
    parents = data.pop("defaults", None) or []
    inherited: dict[str, Any] = {}
    for parent in parents if isinstance(parents, list) else [parents]:
        place = folder / str(parent) if folder is not None else None
        if place is None or not place.is_file():
            notes.append(f"{named}: its defaults '{parent}' cannot be read from here, so their keys are not in the table")
            continue
        below, more = read_config(place.read_text(encoding="utf-8"), str(parent), place.parent)
        inherited |= below
        notes += more
    own = flat(data)
    for key in own:  # what replaces a section drops what was in it
        inherited = {old: value for old, value in inherited.items() if not old.startswith(f"{key}.")}
    return inherited | own, notes


def resolved(data: Mapping[str, Any]) -> dict[str, Any]:
    """The keys with references such as ``${policy.precision}`` and ``${mul:a, b}`` replaced where they are known."""

    def value_of(value: Any, depth: int = 0) -> Any:
        if not isinstance(value, str) or "${" not in value or depth > 20:
            return value
        if (whole := re.fullmatch(r"\$\{([\w.]+)\}", value)) and whole[1] in data:
            return value_of(data[whole[1]], depth + 1)
        inner = re.sub(r"\$\{([\w.]+)\}", lambda one: str(value_of(data.get(one[1], one[0]), depth + 1)), value)
        if product := re.fullmatch(r"\$\{mul:\s*(\d+),\s*(\d+)\}", inner.replace('"', "")):
            return int(product[1]) * int(product[2])
        return inner if inner == value else parsed(inner)

    return {key: value_of(value) for key, value in data.items()}


def migrate_nemo(
    config: Mapping[str, Any], overrides: Sequence[Setting], named: str, notes: Sequence[str] = ()
) -> Migration:
    """The recipe of a configuration and its overrides."""
    given = dict(config) | {setting.key: setting.value for setting in overrides}
    lines = {setting.key: setting.line for setting in overrides}
    found = resolved(given)
    names = [str(value) for key, value in found.items() if key.endswith("dataset_name")]
    trained = [str(found[key]) for key in ("data.dataset_name", "data.train.dataset_name") if key in found]
    own = bool(names) and all(name in SOURCES for name in trained or names)
    bare = not names and "policy.model_name" not in found  # overrides alone, as the guide prints them
    start = "audio_visual" if own or bare else ""
    sheet = Sheet("NeMo-RL", start, [Setting(key, value, lines.get(key, 0)) for key, value in found.items()], notes)
    if not start:
        sheet.put("optimizer.weight_decay", 0.01)
        sheet.notes.append("its data sets are not read here: name rows under tasks.train (docs/guides/tasks.md).")
    sheet.fill({}, FIRST)
    sheet.settle(RULES)
    if not start and "rewards.terms" not in sheet.changed:
        sheet.notes.append(
            "no reward function became a term: this recipe has the term math. Others: docs/reference/rewards.md."
        )
    if not sheet.at("model.path"):
        sheet.put("model.path", "MODEL")
        sheet.notes.append("no policy.model_name was given: model.path says MODEL, which no folder is.")
    return sheet.finish(named)


def _where(key: str, rule: Rule, why: str, usual: bool = True, wanted: bool = True) -> Rule:
    """A rule that counts where another key is on (``wanted``) or off. ``usual``: what that key is where it is left out."""

    def chosen_rule(sheet: Sheet, setting: Setting) -> None:
        if bool(sheet.value(key, usual)) is wanted:
            sheet.apply(rule, setting)
        else:
            sheet.nothing(setting, "no effect", why)

    return chosen_rule


def _megatron(rule: Rule) -> Rule:
    return _where("policy.megatron_cfg.enabled", rule, "Megatron is off (policy.megatron_cfg.enabled)")


def _tensor(rule: Rule) -> Rule:
    why = "Megatron trains, with an optimizer of its own"
    return _where("policy.megatron_cfg.enabled", rule, why, usual=False, wanted=False)


def _lora(section: str, rule: Rule) -> Rule:
    return _where(f"{section}.enabled", rule, "there are no adapters", usual=False)


def _steps(sheet: Sheet, setting: Setting) -> None:
    if setting.value >= ENDLESS and "grpo.max_num_epochs" in sheet.settings:
        sheet.nothing(setting, "no effect", "the epochs end the run (grpo.max_num_epochs)")
        sheet.put("steps", DROP)
    else:
        sheet.became(setting, {"steps": setting.value})
        if "grpo.max_num_epochs" not in sheet.settings and not sheet.start:
            sheet.put("epochs", DROP)


def _updates(sheet: Sheet, setting: Setting) -> None:
    divide_batch(sheet, setting, setting.value)


def _frames(sheet: Sheet, setting: Setting) -> None:
    changes = {}
    for side in ("train", "evaluate"):
        for i, source in enumerate(sheet.at(f"tasks.{side}", [])):
            if isinstance(source.get("options", {}).get("video"), dict):
                changes[f"tasks.{side}.{i}.options.video"] = {**source["options"]["video"], "frames": setting.value}
    if changes:
        sheet.became(setting, changes)
    else:
        sheet.nothing(setting, "no place", "frames are the option video of a source: {frames: N}")


def _dataset(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if setting.value in SOURCES:
            sheet.became(setting, {f"tasks.{side}.0.source": SOURCES[setting.value]})
        else:
            if sheet.start and side == "evaluate":  # other data than the shipped recipe's
                sheet.put("tasks.evaluate", DROP)
                sheet.put("evaluation", DROP)
            set_it = f"set tasks.{side}.0.source, and its options path and columns (docs/guides/tasks.md)"
            sheet.nothing(setting, "no place", f"this data set has no source here: {set_it}")

    return rule


def _problem_types(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if sheet.at(f"tasks.{side}.0.source") == "intent":
            sheet.became(setting, {f"tasks.{side}.0.options.problem_types": setting.value})
        else:
            sheet.nothing(setting, "no place", "an option of the source intent")

    return rule


def _terms(sheet: Sheet, setting: Setting) -> None:
    given = setting.value if isinstance(setting.value, list) else []
    made = [
        {"name": TERMS[one["name"]], "weight": float(one.get("weight", 1.0))}
        for one in given
        if isinstance(one, dict) and one.get("name") in TERMS
    ]
    others = [str(one.get("name")) for one in given if isinstance(one, dict) and one.get("name") not in TERMS]
    if made:
        note = f"no place for {', '.join(others)}: write a term of your own (docs/reference/rewards.md)" if others else ""
        sheet.became(setting, {"rewards.terms": made}, note)
    else:
        sheet.nothing(setting, "no place", "reward terms are named under rewards.terms (docs/reference/rewards.md)")


def _logger(name: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if setting.value:
            loggers(sheet, setting, [name])
        elif name in sheet.at("logging.loggers", []):
            sheet.became(setting, {"logging.loggers": [one for one in sheet.at("logging.loggers") if one != name]})
        else:
            sheet.nothing(setting, "no effect", "it is off")

    return rule


def _saves(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.nothing(setting, "no effect", "checkpoints are written as checkpoint.every says")
    else:
        sheet.became(setting, {"checkpoint.every": 0})


def _best(sheet: Sheet, setting: Setting) -> None:
    name = str(setting.value or "")
    if name.startswith("val:") and sheet.at("tasks.evaluate"):
        sheet.became(
            setting, {"checkpoint.best": f"eval/{name[4:]}" if name in ("val:accuracy", "val:reward") else "eval/reward"}
        )
    else:
        sheet.nothing(setting, "no place", "checkpoint.best names a metric of an evaluation")


def _estimator(sheet: Sheet, setting: Setting) -> None:
    if setting.value in ("grpo", "reinforce_plus_plus", "gdpo"):
        choose_estimator(sheet, setting, setting.value)
    else:
        sheet.nothing(setting, "no place", "this estimator is not here (algorithm.advantage.name)")


def _loss(name: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if setting.value:
            choose_loss(sheet, setting, name)
        else:
            sheet.nothing(setting, "no effect", "it is off")

    return rule


def _token_level(sheet: Sheet, setting: Setting) -> None:
    if sheet.at("algorithm.loss.name", "clip") == "gspo":
        sheet.nothing(setting, "no effect", "the loss gspo weighs sequences")
    else:
        sheet.became(setting, {"algorithm.loss.aggregation": "token_mean" if setting.value else "sequence_mean_token_mean"})


def _asynchronous(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"schedule.name": "asynchronous"})
    else:
        sheet.nothing(setting, "no effect", "steps follow each other")


def _correction(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"algorithm.correction.weights": "token"})
    else:
        sheet.nothing(setting, "no effect", "it is off")


def _correction_high(sheet: Sheet, setting: Setting) -> None:
    if setting.value and sheet.value("loss_fn.use_importance_sampling_correction"):
        sheet.became(setting, {"algorithm.correction.high": float(setting.value)})
    else:
        sheet.nothing(setting, "no effect", "weights are not bounded by it")


def _kl_place(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"algorithm.kl.place": "reward"})
    else:
        sheet.nothing(setting, "no effect", "the KL is in the loss")


def _schedule(sheet: Sheet, setting: Setting) -> None:
    names = {"constant": "constant", "linear": "linear", "cosine": "cosine"}
    chosen("optimizer.schedule", names, "optimizer.schedule is constant, linear or cosine")(sheet, setting)


def _least_rate(sheet: Sheet, setting: Setting) -> None:
    rate = sheet.value("policy.megatron_cfg.optimizer.lr")
    if sheet.value("policy.megatron_cfg.scheduler.lr_decay_style", "constant") == "constant" or not rate:
        sheet.nothing(setting, "no effect", "the rate is constant (lr_decay_style)")
    else:
        sheet.became(setting, {"optimizer.final_lr_share": round(setting.value / rate, 6)})


def _torch_schedule(sheet: Sheet, setting: Setting) -> None:
    given = setting.value if isinstance(setting.value, list) else []
    linear = [one for one in given if isinstance(one, dict) and str(one.get("name", "")).endswith("LinearLR")]
    if linear:
        steps = (linear[0].get("kwargs") or {}).get("total_iters", 0)
        sheet.became(setting, {"optimizer.warmup_steps": steps}, "the warm-up; after it the rate is constant")
    else:
        sheet.nothing(setting, "no place", "optimizer.warmup_steps and optimizer.schedule")


def _dtype(sheet: Sheet, setting: Setting) -> None:
    chosen("model.dtype", {"bfloat16": "bfloat16", "float32": "float32"}, "model.dtype is bfloat16 or float32")(
        sheet, setting
    )


def _modules(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"model.lora.modules": setting.value})
    else:
        sheet.nothing(setting, "no effect", "adapters are on all linear layers")


def _top_k(sheet: Sheet, setting: Setting) -> None:
    sheet.became(setting, {"rollout.top_k": max(0, setting.value or 0)})


def _limit(place: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if sheet.at("tasks.evaluate"):
            sheet.became(setting, {place: setting.value or 0 if place.endswith(("limit", "every")) else setting.value})
        else:
            sheet.nothing(setting, "no place", "nothing is held out: name rows under tasks.evaluate")

    return rule


def _rounds(sheet: Sheet, setting: Setting) -> None:
    if sheet.value("grpo.use_dynamic_sampling"):
        sheet.became(setting, {"selection.max_rounds": setting.value})
    else:
        sheet.nothing(setting, "no effect", "there is no dynamic sampling")


def _multiplier(sheet: Sheet, setting: Setting) -> None:
    if setting.value and setting.value > 1:
        sheet.became(setting, {"selection.oversample": float(setting.value)})
    else:
        sheet.nothing(setting, "no effect", "as many tasks are played as are trained on")


ADAM = "policy.megatron_cfg.optimizer"
BETA = beta((f"{ADAM}.adam_beta1", f"{ADAM}.adam_beta2"))
RULES: dict[str, Rule] = {
    "grpo.num_prompts_per_step": "batch.prompts_per_step",
    "grpo.num_generations_per_prompt": "batch.group_size",
    "grpo.max_rollout_turns": "rollout.max_turns",
    "grpo.max_num_epochs": "epochs",
    "grpo.max_num_steps": _steps,
    "grpo.normalize_rewards": "algorithm.advantage.std",
    "grpo.use_leave_one_out_baseline": "algorithm.advantage.leave_one_out",
    "grpo.val_period": _limit("evaluation.every"),
    "grpo.val_at_start": _limit("evaluation.at_start"),
    "grpo.val_at_end": Why("no effect", "the last step is always measured where any is"),
    "grpo.val_start_at": feature("evaluation.every counts from the first step"),
    "grpo.max_val_samples": _limit("evaluation.limit"),
    "grpo.val_batch_size": Why("no effect", "all held-out tasks are played at once"),
    "grpo.val_num_generations_per_prompt": _limit("evaluation.samples"),
    "grpo.seed": "seed",
    "grpo.overlong_filtering": "rollout.mask_truncated",
    "grpo.use_dynamic_sampling": "selection.dynamic",
    "grpo.dynamic_sampling_max_gen_batches": _rounds,
    "grpo.batch_multiplier": _multiplier,
    "grpo.async_grpo.enabled": _asynchronous,
    "grpo.async_grpo.max_trajectory_age_steps": _where(
        "grpo.async_grpo.enabled", "schedule.max_staleness", "steps follow each other (async_grpo.enabled)"
    ),
    "grpo.async_grpo.*": Why("no effect", "schedule: asynchronous pushes weights while responses are open"),
    "grpo.adv_estimator.name": _estimator,
    "grpo.adv_estimator.normalize_rewards": "algorithm.advantage.std",
    "grpo.adv_estimator.use_leave_one_out_baseline": "algorithm.advantage.leave_one_out",
    "grpo.adv_estimator.minus_baseline": Why(
        "no effect", "a setting of Reinforce++ with baseline, which is an estimator here"
    ),
    "grpo.adv_estimator.*": feature("algorithm.advantage"),
    "grpo.reward_shaping.*": _where(
        "grpo.reward_shaping.enabled", feature("the reward term overlong"), "reward shaping is off"
    ),
    "grpo.reward_scaling.*": _where(
        "grpo.reward_scaling.enabled", feature("weights of rewards.terms"), "reward scaling is off"
    ),
    **each(
        "grpo",
        "advantage_clip_low advantage_clip_high stop_at_validation_* seq_logprob_error_threshold "
        "invalid_tool_call_advantage "
        "malformed_thinking_advantage skip_reference_policy_logprobs_calculation calculate_advantages_on_gpu "
        "use_multiple_dataloader group_sampling_* force_on_policy* deduplicate_multimodal_data debug_payload_metrics",
        feature("there is no such setting here"),
    ),
    "reward_penalties.*": feature("reward terms are named under rewards.terms (docs/reference/rewards.md)"),
    "loss_fn.reference_policy_kl_penalty": "algorithm.kl.coef",
    "loss_fn.reference_policy_kl_type": "algorithm.kl.estimator",
    "loss_fn.ratio_clip_min": of_loss("clip_low"),
    "loss_fn.ratio_clip_max": of_loss("clip_high"),
    "loss_fn.ratio_clip_c": of_loss("dual_clip"),
    "loss_fn.token_level_loss": _token_level,
    "loss_fn.sequence_level_importance_ratios": _loss("gspo"),
    "loss_fn.use_cispo": _loss("cispo"),
    "loss_fn.use_importance_sampling_correction": _correction,
    "loss_fn.truncated_importance_sampling_ratio": _correction_high,
    "loss_fn.use_kl_in_reward": _kl_place,
    "loss_fn.kl_*_clamp_value": Why("no place", "KL terms are not clamped"),
    "loss_fn.entropy_coef": "algorithm.loss.entropy_coef",
    **each(
        "loss_fn",
        "use_on_policy_kl_approximation truncated_importance_sampling_* force_on_policy_ratio disable_ppo_ratio "
        "positive_example_nll_weight",
        feature("algorithm.loss and algorithm.correction have other settings"),
    ),
    "checkpointing.enabled": _saves,
    "checkpointing.checkpoint_dir": "run_dir",
    "checkpointing.save_period": _where("checkpointing.enabled", "checkpoint.every", "checkpoints are off (enabled)"),
    "checkpointing.keep_top_k": "checkpoint.keep",
    "checkpointing.metric_name": _best,
    "checkpointing.higher_is_better": Why("no effect", "the best checkpoint is that of the highest value"),
    "checkpointing.checkpoint_must_save_by": feature("a run that is stopped goes on from its last checkpoint (--resume)"),
    **each(
        "checkpointing",
        "model_save_format save_consolidated save_optimizer pretrained_checkpoint.* model_cache_dir "
        "model_repo_id is_peft peft_config async_save",
        Why("no effect", "every checkpoint is a Hugging Face model with the run's state"),
    ),
    "policy.model_name": "model.path",
    "policy.tokenizer.name": Why("no effect", "the model's own tokenizer is used"),
    "policy.tokenizer.video.num_frames": _frames,
    "policy.tokenizer.chat_template_kwargs": feature("the model's template is applied as it is"),
    "policy.tokenizer.*": feature("the model's own processor is used"),
    "policy.train_global_batch_size": _updates,
    **each("policy", "train_micro_batch_size generation_batch_size logprob_batch_size logprob_chunk_size", MICRO),
    "policy.max_total_sequence_length": "rollout.max_context_tokens",
    "policy.precision": _dtype,
    "policy.max_grad_norm": "optimizer.clip_norm",
    "policy.make_sequence_length_divisible_by": PACKED,
    "policy.sequence_packing.*": PACKED,
    "policy.dynamic_batching.*": PACKED,
    "policy.offload_optimizer_for_logprob": Why("no effect", "cluster.offload"),
    "policy.hf_config_overrides*": feature("the checkpoint's config.json is used"),
    "policy.draft.*": feature("there is no draft model"),
    "policy.optimizer": Why("no effect", "another optimizer is named"),
    "policy.optimizer.name": Why("no effect", "AdamW is the optimizer"),
    "policy.optimizer.kwargs.lr": _tensor("optimizer.lr"),
    "policy.optimizer.kwargs.weight_decay": _tensor("optimizer.weight_decay"),
    "policy.optimizer.kwargs.betas": _tensor("optimizer.betas"),
    "policy.optimizer.kwargs.eps": _tensor("optimizer.eps"),
    **each("policy.optimizer.kwargs", "foreach fused", Why("no effect", "how torch computes AdamW")),
    "policy.scheduler": _tensor(_torch_schedule),
    "policy.dtensor_cfg.activation_checkpointing": _tensor("model.gradient_checkpointing"),
    "policy.dtensor_cfg.lora_cfg.dim": _lora("policy.dtensor_cfg.lora_cfg", "model.lora.rank"),
    "policy.dtensor_cfg.lora_cfg.alpha": _lora("policy.dtensor_cfg.lora_cfg", "model.lora.alpha"),
    "policy.dtensor_cfg.lora_cfg.target_modules": _lora("policy.dtensor_cfg.lora_cfg", _modules),
    "policy.dtensor_cfg.lora_cfg.*": Why("no effect", "adapters have rank, alpha, groups and modules (model.lora)"),
    **each(
        "policy.dtensor_cfg",
        "_v2 enabled cpu_offload *parallel* custom_parallel_plan automodel_kwargs* clear_cache_* defer_fsdp_grad_sync "
        "env_vars moe_* *_size *_cfg*",
        PARALLEL,
    ),
    "policy.megatron_cfg.activation_checkpointing": _megatron("model.gradient_checkpointing"),
    "policy.megatron_cfg.peft.dim": _lora("policy.megatron_cfg.peft", "model.lora.rank"),
    "policy.megatron_cfg.peft.alpha": _lora("policy.megatron_cfg.peft", "model.lora.alpha"),
    "policy.megatron_cfg.peft.target_modules": _lora("policy.megatron_cfg.peft", _modules),
    "policy.megatron_cfg.peft.*": Why("no effect", "adapters have rank, alpha, groups and modules (model.lora)"),
    f"{ADAM}.lr": _megatron("optimizer.lr"),
    f"{ADAM}.min_lr": _megatron(_least_rate),
    f"{ADAM}.weight_decay": _megatron("optimizer.weight_decay"),
    f"{ADAM}.adam_beta1": _megatron(BETA),
    f"{ADAM}.adam_beta2": _megatron(BETA),
    f"{ADAM}.adam_eps": _megatron("optimizer.eps"),
    f"{ADAM}.clip_grad": _megatron("optimizer.clip_norm"),
    **each(
        ADAM,
        "optimizer bf16 fp16 params_dtype sgd_momentum use_distributed_optimizer use_precision_aware_optimizer "
        "optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d",
        Why("no effect", "AdamW with float32 masters is the optimizer; optimizer.moments saves memory"),
    ),
    "policy.megatron_cfg.scheduler.lr_decay_style": _megatron(_schedule),
    "policy.megatron_cfg.scheduler.lr_warmup_iters": _megatron("optimizer.warmup_steps"),
    "policy.megatron_cfg.scheduler.lr_warmup_init": Why("no place", "the warm-up begins near 0"),
    **each(
        "policy.megatron_cfg.scheduler",
        "start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_iters",
        Why("no effect", "weight decay is constant, and the schedule ends with the run"),
    ),
    **each(
        "policy.megatron_cfg",
        "enabled *parallel* pipeline_* *_pipeline_* sequence_parallel context_* expert_* empty_unused_memory_level "
        "converter_type apply_rope_fusion bias_activation_fusion defer_fp32_logits freeze_moe_* moe_* mtp_* "
        "use_* env_vars* "
        "distributed_data_parallel_config.* fp8_cfg.* checkpoint.* model_overrides* force_reconvert_from_hf recompute_* "
        "cuda_graph_* fine_grained_activation_offloading offload_modules gradient_accumulation_fusion fused_* "
        "track_moe_metrics moe_metrics* layernorm_epsilon attention_backend attention_* linear_ce_* *_fusion "
        "masked_softmax*",
        PARALLEL,
    ),
    "policy.automodel_cfg.*": PARALLEL,
    "policy.generation.max_new_tokens": "rollout.max_new_tokens",
    "policy.generation.temperature": "rollout.temperature",
    "policy.generation.top_p": "rollout.top_p",
    "policy.generation.top_k": _top_k,
    "policy.generation.val_temperature": _limit("evaluation.temperature"),
    "policy.generation.val_top_*": Why("no place", "held-out tasks are sampled with the rollout's top_p and top_k"),
    "policy.generation.stop_strings": lambda sheet, setting: (
        sheet.became(setting, {"rollout.stop": setting.value})
        if setting.value
        else sheet.nothing(setting, "no effect", "there are none")
    ),
    "policy.generation.stop_token_ids": feature("rollout.stop takes texts"),
    **each(
        "policy.generation",
        "backend vllm_cfg.* vllm_kwargs vllm_kwargs.* colocated.* mcore_generation_config.* sglang_cfg.* sglang_kwargs.* "
        "refit_transport refit_cfg.* port_range_* real_quant_export_cpu_offload model_name _pad_token_id "
        "trtllm_cfg.* quant_cfg",
        ENGINE,
    ),
    "policy.*router_replay*": feature("model.precision: matched lets engine and learner agree"),
    "data.dataset_name": _dataset("train"),
    "data.train.dataset_name": _dataset("train"),
    "data.validation.dataset_name": _dataset("evaluate"),
    "data.train.allowed_problem_types": _problem_types("train"),
    "data.validation.allowed_problem_types": _problem_types("evaluate"),
    "data.train.data_path": "tasks.train.0.options.path",
    "data.validation.data_path": Why("no place", "name rows under tasks.evaluate"),
    **each(
        "data", "train validation", Why("no place", "name rows under tasks.train and tasks.evaluate (docs/guides/tasks.md)")
    ),
    "data.shuffle": "tasks.shuffle",
    "data.num_workers": Why("no effect", "rows of the next step are read ahead in a thread"),
    "data.max_input_seq_length": Why(
        "no place", "rollout.max_context_tokens; what is longer is skipped or refused, never cut"
    ),
    "data.default.prompt_file": feature("a source's option instruction ends its prompts"),
    "data.default.system_prompt_file": feature("a source's option system goes before its prompts"),
    "data.default.env_name": Why("no place", "reward terms are named under rewards.terms"),
    "data.default.processor": Why("no effect", "the model's own processor is used"),
    **each(
        "data.*",
        "split split_validation_size seed subset prompt_file system_prompt_file processor env_name input_key "
        "output_key download_dir",
        feature("options of a source (docs/guides/tasks.md)"),
    ),
    **each(
        "data",
        "use_multiple_dataloader num_prompts_per_dataloader add_bos add_eos add_generation_prompt default.*",
        feature("tasks.train mixes sources by weight"),
    ),
    "env.*.reward_functions": _terms,
    "env.*.num_workers": Why("no effect", "cluster.rewards and cluster.environments start workers"),
    "env.*": feature(
        "environments and reward terms are named in the recipe (docs/guides/environments.md, docs/reference/rewards.md)"
    ),
    "logger.wandb_enabled": _logger("wandb"),
    "logger.tensorboard_enabled": _logger("tensorboard"),
    "logger.wandb.project": "logging.project",
    "logger.wandb.name": run_name,
    **each("logger", "mlflow_enabled swanlab_enabled", feature("loggers are wandb and tensorboard")),
    "logger.num_val_samples_to_print": feature("the report shows episodes; logging.generations sends them to wandb"),
    **each(
        "logger",
        "log_dir monitor_gpus gpu_monitoring.* wandb.* swanlab.* tensorboard* mlflow.* log_*",
        Why("no effect", "console, metrics.jsonl and the report are always written"),
    ),
    **each("cluster", "gpus_per_node num_nodes segment_size master_port_range_*", PARALLEL),
    "data_plane.*": Why("no effect", "how NeMo-RL hands data on inside"),
    "on_policy_distillation*": feature("there is no distillation"),
    "ppo.*": Why("no place", "NeMo-RL's PPO is not migrated: algorithm.advantage.name=gae has a critic (algorithm.critic)"),
    "value*": Why(
        "no place", "NeMo-RL's PPO is not migrated: algorithm.advantage.name=gae has a critic (algorithm.critic)"
    ),
    "HF_*": Why("no effect", "Hugging Face's libraries read it here, too"),
    "TRANSFORMERS_*": Why("no effect", "Hugging Face's libraries read it here, too"),
}
