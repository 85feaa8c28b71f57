"""NeMo-RL's YAML with its ``defaults`` and overrides.

grpo: {num_prompts_per_step: 32}             → batch.prompts_per_step: 32
policy.tokenizer.video.num_frames=4          → the option video: {frames: 4} of every source
"""

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from sensorium.systems.migration.outcomes import (
    ADAMW,
    CLUSTER,
    DROP,
    ENGINE,
    MICRO,
    PACKED,
    SAMPLED,
    SCHEDULE,
    TEMPLATE,
    TERMS,
    Answer,
    Migration,
    Rule,
    Setting,
    Sheet,
    beta,
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
    of_loss,
    overlong,
    parsed,
    run_name,
    switch,
    table,
    where,
    where_evaluated,
)
from sensorium.systems.migration.recognition import Given, read_with_references
from sensorium.vocabulary.errors import RecipeError

ENDLESS = 1_000_000  # steps that NeMo-RL's configurations give where the epochs are meant to end a run
SOURCES = {"intent-train": "intent", "intent-bench": "intent", "daily-omni": "daily_omni"}
REWARD_TERMS = {"format": "format", "exact_alnum": "exact_alnum", "math_expr": "math", "bbox_giou": "bbox_giou"}
SECTIONS = {"grpo", "policy", "loss_fn", "checkpointing", "cluster", "env", "logger", "reward_penalties"}
# Keys that others depend on.
FIRST = (
    "data.dataset_name", "data.train.dataset_name", "data.validation.dataset_name", "grpo.num_prompts_per_step",
    "grpo.num_generations_per_prompt", "grpo.adv_estimator.name", "loss_fn.use_cispo",
    "loss_fn.sequence_level_importance_ratios",
)  # fmt: skip


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
    config, notes = {}, list(script.script.notes)
    named = next((str(one.value) for one in script.options if one.key == "--config"), "")
    if named:
        folders = [given.folder, *given.folder.parents] if given.folder else []
        place = next((path for path in [*(folder / named for folder in folders), Path(named)] if path.is_file()), None)
        if place is None:
            notes.append(f"the configuration '{named}' was not found, so only the command's overrides are in the table")
        else:
            config, more = read_config(place.read_text(encoding="utf-8"), named, place.parent)
            notes += more
    return migrate_nemo(config, script.overrides, given.named, notes)


def read_config(text: str, named: str, folder: Path | None) -> tuple[dict[str, Any], list[str]]:
    """The keys of a configuration over those of its ``defaults``, and notes on what could not be read."""
    data = read_with_references(text, named)
    if not isinstance(data, dict):
        raise RecipeError(f"{named}: a configuration of NeMo-RL is a mapping of sections.")
    notes: list[str] = []
    parents = data.pop("defaults", None) or []
    inherited: dict[str, Any] = {}
    for parent in listed(parents):
        place = folder / str(parent) if folder is not None else None
        if place is None or not place.is_file():
            notes.append(f"{named}: its defaults '{parent}' cannot be read from here, so their keys are not in the table")
            continue
        below, more = read_config(place.read_text(encoding="utf-8"), str(parent), place.parent)
        inherited |= below
        notes += more
    own = flat(data)
    for key in own:  # a value that replaces a section drops the section's keys
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
    lines = {setting.key: setting.line for setting in overrides}
    found = resolved(dict(config) | {setting.key: setting.value for setting in overrides})
    names = [str(value) for key, value in found.items() if key.endswith("dataset_name")]
    trained = [str(found[key]) for key in ("data.dataset_name", "data.train.dataset_name") if key in found]
    own = bool(names) and all(name in SOURCES for name in trained or names)
    bare = not names and "policy.model_name" not in found  # overrides alone, as the guide prints them
    start = "audio_visual" if own or bare else ""
    sheet = Sheet("NeMo-RL", start, [Setting(key, value, lines.get(key, 0)) for key, value in found.items()], notes)
    if not start:
        sheet.notes.append("NeMo-RL's data sets are not read here: name rows under tasks.train (docs/guides/tasks.md).")
    sheet.settle(RULES, FIRST)
    if not start and "optimizer.weight_decay" not in sheet.changed:
        sheet.put("optimizer.weight_decay", 0.01)
        sheet.notes.append("no weight decay was given: optimizer.weight_decay is 0.01, as in NeMo-RL's configurations.")
    if not start and "rewards.terms" not in sheet.changed:
        sheet.notes.append(
            "no reward function became a term: this recipe has the term math. Others: docs/reference/rewards.md."
        )
    return sheet.finish(named, "policy.model_name")


def _steps(sheet: Sheet, setting: Setting) -> Rule:
    epochs = "grpo.max_num_epochs" in sheet.settings
    if setting.value >= ENDLESS and epochs:
        sheet.put("steps", DROP)
        return no_effect("the epochs end the run (grpo.max_num_epochs)")
    return {"steps": setting.value, **({} if epochs or sheet.start else {"epochs": DROP})}


def _frames(sheet: Sheet, setting: Setting) -> Rule:
    changes = {}
    for side in ("train", "evaluate"):
        for i, source in enumerate(sheet.at(f"tasks.{side}", [])):
            if isinstance(source.get("options", {}).get("video"), dict):
                changes[f"tasks.{side}.{i}.options.video"] = {**source["options"]["video"], "frames": setting.value}
    return changes or no_place("frames are the option video of a source: {frames: N}")


def _dataset(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        if setting.value in SOURCES:
            return {f"tasks.{side}.0.source": SOURCES[setting.value]}
        if sheet.start and side == "evaluate":  # other data than the shipped recipe's
            sheet.put("tasks.evaluate", DROP)
            sheet.put("evaluation", DROP)
        keys = f"tasks.{side}.0.source, and its options path and columns (docs/guides/tasks.md)"
        return no_place(f"this data set has no source here: set {keys}")

    return rule


def _problem_types(side: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        intent = sheet.at(f"tasks.{side}.0.source") == "intent"
        return f"tasks.{side}.0.options.problem_types" if intent else no_place("an option of the source intent")

    return rule


def _terms(sheet: Sheet, setting: Setting) -> Rule:
    given = [one for one in setting.value if isinstance(one, dict)] if isinstance(setting.value, list) else []
    known = [one for one in given if one.get("name") in REWARD_TERMS]
    others = ", ".join(str(one.get("name")) for one in given if one not in known)
    if others:
        sheet.attention.append(
            f"the reward of this recipe lacks NeMo-RL's {others} ({setting.key}): write a term of your own and name it "
            "under rewards.terms (docs/reference/rewards.md)."
        )
    if not known:
        return TERMS
    note = f"no place for {others}: write a term of your own (docs/reference/rewards.md)" if others else ""
    terms = [{"name": REWARD_TERMS[one["name"]], "weight": float(one.get("weight", 1.0))} for one in known]
    return Answer("became", note, {"rewards.terms": terms})


def _shaping(sheet: Sheet, setting: Setting) -> Rule:
    """DAPO's penalty of long responses, the reward term overlong."""
    section, _, part = setting.key.rpartition(".")
    if not sheet.value(f"{section}.enabled", False):
        return no_effect("reward shaping is off")
    if part == "stop_properly_penalty_coef":
        return feature("rollout.mask_truncated leaves truncated responses out of training")
    if sheet.value(f"{section}.stop_properly_penalty_coef") is not None:
        return no_effect("NeMo-RL does not use it where stop_properly_penalty_coef is set")
    options = {
        "max_tokens": sheet.value(f"{section}.max_response_length", sheet.at("rollout.max_new_tokens", 512)),
        "buffer_tokens": sheet.value(f"{section}.overlong_buffer_length", 0),
        "penalty": sheet.value(f"{section}.overlong_buffer_penalty", 1.0),
    }
    names = {
        "max_response_length": "max_tokens", "overlong_buffer_length": "buffer_tokens",
        "overlong_buffer_penalty": "penalty", "enabled": "",
    }  # fmt: skip
    return (
        overlong(sheet, names[part], options) if part in names else feature("the reward term overlong has no such option")
    )


def _logger(name: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        before = sheet.at("logging.loggers", [])
        if setting.value:
            return loggers(sheet, [name])
        return {"logging.loggers": [one for one in before if one != name]} if name in before else no_effect("it is off")

    return rule


def _best(sheet: Sheet, setting: Setting) -> Rule:
    name = str(setting.value or "")
    if not name.startswith("val:") or not sheet.at("tasks.evaluate"):
        return no_place("checkpoint.best names a metric of an evaluation")
    return {"checkpoint.best": f"eval/{name[4:]}" if name in ("val:accuracy", "val:reward") else "eval/reward"}


def _estimator(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value in ("grpo", "reinforce_plus_plus", "gdpo"):
        return choose_estimator(sheet, setting.value)
    return no_place("this estimator does not exist here (algorithm.advantage.name)")


def _loss(name: str) -> Rule:
    return switch(lambda sheet, setting: choose_loss(sheet, name), "it is off")


def _least_rate(sheet: Sheet, setting: Setting) -> Rule:
    rate = sheet.value("policy.megatron_cfg.optimizer.lr")
    if sheet.value("policy.megatron_cfg.scheduler.lr_decay_style", "constant") == "constant" or not rate:
        return no_effect("the rate is constant (lr_decay_style)")
    return {"optimizer.final_lr_share": round(setting.value / rate, 6)}


def _torch_schedule(sheet: Sheet, setting: Setting) -> Rule:
    given = [one for one in setting.value if isinstance(one, dict)] if isinstance(setting.value, list) else []
    linear = next((one for one in given if str(one.get("name", "")).endswith("LinearLR")), None)
    if linear is None:
        return no_place("optimizer.warmup_steps and optimizer.schedule")
    steps = (linear.get("kwargs") or {}).get("total_iters", 0)
    return Answer("became", "the warm-up; after it the rate is constant", {"optimizer.warmup_steps": steps})


def _evaluated(rule: Rule) -> Rule:
    return where_evaluated(rule, no_place("nothing is held out: name rows under tasks.evaluate"))


def _megatron(rule: Rule) -> Rule:
    return where("policy.megatron_cfg.enabled", rule, "Megatron is off (policy.megatron_cfg.enabled)")


def _tensor(rule: Rule) -> Rule:
    why = "Megatron trains, with an optimizer of its own"
    return where("policy.megatron_cfg.enabled", rule, why, default=False, wanted=False)


def _lora(prefix: str) -> dict[str, Rule]:
    modules = switch("model.lora.modules", "adapters are on all linear layers")
    rules = {"dim": "model.lora.rank", "alpha": "model.lora.alpha", "target_modules": modules}
    where_on = {
        name: where(f"{prefix}enabled", rule, "there are no adapters", default=False) for name, rule in rules.items()
    }
    return {**where_on, "*": no_effect("adapters have rank, alpha, groups and modules (model.lora)")}


BETA = beta(("policy.megatron_cfg.optimizer.adam_beta1", "policy.megatron_cfg.optimizer.adam_beta2"))
PPO = no_place("NeMo-RL's PPO is not migrated: algorithm.advantage.name=gae has a critic (algorithm.critic)")
ROWS = no_place("name rows under tasks.train and tasks.evaluate (docs/guides/tasks.md)")
PROCESSOR = no_effect("the model's own processor is used")

TABLE: dict[str, Any] = {
    "grpo.": {
        "num_prompts_per_step": "batch.prompts_per_step",
        "num_generations_per_prompt": "batch.group_size",
        "max_rollout_turns": "rollout.max_turns",
        "max_num_epochs": "epochs",
        "max_num_steps": _steps,
        "normalize_rewards adv_estimator.normalize_rewards": "algorithm.advantage.std",
        "use_leave_one_out_baseline adv_estimator.use_leave_one_out_baseline": "algorithm.advantage.leave_one_out",
        "val_period": _evaluated(count("evaluation.every")),
        "val_at_start": _evaluated("evaluation.at_start"),
        "val_at_end": no_effect("the last step is always measured where any is"),
        "val_start_at": feature("evaluation.every counts from the first step"),
        "max_val_samples": _evaluated(count("evaluation.limit")),
        "val_batch_size": no_effect("all held-out tasks are played at once"),
        "val_num_generations_per_prompt": _evaluated("evaluation.samples"),
        "seed": "seed",
        "overlong_filtering": "rollout.mask_truncated",
        "use_dynamic_sampling": "selection.dynamic",
        "dynamic_sampling_max_gen_batches": where(
            "grpo.use_dynamic_sampling", "selection.max_rounds", "there is no dynamic sampling", default=False
        ),
        "batch_multiplier": lambda sheet, setting: (
            {"selection.oversample": float(setting.value)}
            if setting.value and setting.value > 1
            else no_effect("as many tasks are played as are trained on")
        ),
        "async_grpo.enabled": switch({"schedule.name": "asynchronous"}, "steps follow each other"),
        "async_grpo.max_trajectory_age_steps": where(
            "grpo.async_grpo.enabled", "schedule.max_staleness", "steps follow each other (async_grpo.enabled)"
        ),
        "async_grpo.*": no_effect("schedule: asynchronous pushes weights while responses are open"),
        "adv_estimator.name": _estimator,
        "adv_estimator.minus_baseline": no_effect("a setting of Reinforce++ with baseline, which is an estimator here"),
        "adv_estimator.*": feature("algorithm.advantage"),
        "reward_shaping.*": _shaping,
        "reward_scaling.*": where(
            "grpo.reward_scaling.enabled", feature("weights of rewards.terms"), "reward scaling is off"
        ),
        "advantage_clip_low advantage_clip_high stop_at_validation_* seq_logprob_error_threshold"
        " invalid_tool_call_advantage malformed_thinking_advantage skip_reference_policy_logprobs_calculation"
        " calculate_advantages_on_gpu use_multiple_dataloader group_sampling_* force_on_policy*"
        " deduplicate_multimodal_data debug_payload_metrics": feature("there is no such setting here"),
    },
    "reward_penalties.*": feature(TERMS.text),
    "loss_fn.": {
        "reference_policy_kl_penalty": "algorithm.kl.coef",
        "reference_policy_kl_type": "algorithm.kl.estimator",
        "ratio_clip_min": of_loss("clip_low"),
        "ratio_clip_max": of_loss("clip_high"),
        "ratio_clip_c": of_loss("dual_clip"),
        "token_level_loss": lambda sheet, setting: (
            no_effect("the loss gspo weighs sequences")
            if sheet.at("algorithm.loss.name", "clip") == "gspo"
            else {"algorithm.loss.aggregation": "token_mean" if setting.value else "sequence_mean_token_mean"}
        ),
        "sequence_level_importance_ratios": _loss("gspo"),
        "use_cispo": _loss("cispo"),
        "use_importance_sampling_correction": switch({"algorithm.correction.weights": "token"}, "it is off"),
        "truncated_importance_sampling_ratio": lambda sheet, setting: (
            {"algorithm.correction.high": float(setting.value)}
            if setting.value and sheet.value("loss_fn.use_importance_sampling_correction")
            else no_effect("weights are not bounded by it")
        ),
        "use_kl_in_reward": switch({"algorithm.kl.place": "reward"}, "the KL is in the loss"),
        "kl_*_clamp_value": no_place("KL terms are not clamped"),
        "entropy_coef": "algorithm.loss.entropy_coef",
        "use_on_policy_kl_approximation truncated_importance_sampling_* force_on_policy_ratio disable_ppo_ratio"
        " positive_example_nll_weight": feature("algorithm.loss and algorithm.correction have other settings"),
    },
    "checkpointing.": {
        "enabled": lambda sheet, setting: (
            no_effect("checkpoint.every is the interval of checkpoints") if setting.value else {"checkpoint.every": 0}
        ),
        "checkpoint_dir": "run_dir",
        "save_period": where("checkpointing.enabled", "checkpoint.every", "checkpoints are off (enabled)"),
        "keep_top_k": "checkpoint.keep",
        "metric_name": _best,
        "higher_is_better": no_effect("the best checkpoint is that of the highest value"),
        "checkpoint_must_save_by": feature("a run that is stopped goes on from its last checkpoint (--resume)"),
        "model_save_format save_consolidated save_optimizer pretrained_checkpoint.* model_cache_dir model_repo_id is_peft"
        " peft_config async_save": no_effect("every checkpoint is a Hugging Face model with the run's state"),
    },
    "policy.": {
        "model_name": "model.path",
        "tokenizer.name": no_effect("the model's own tokenizer is used"),
        "tokenizer.video.num_frames": _frames,
        "tokenizer.chat_template_kwargs": TEMPLATE,
        "tokenizer.*": feature("the model's own processor is used"),
        "train_global_batch_size": lambda sheet, setting: divide_batch(sheet, setting.value),
        "train_micro_batch_size generation_batch_size logprob_batch_size logprob_chunk_size": MICRO,
        "max_total_sequence_length": "rollout.max_context_tokens",
        "precision": chosen("model.dtype", ["bfloat16", "float32"], "model.dtype is bfloat16 or float32"),
        "max_grad_norm": "optimizer.clip_norm",
        "make_sequence_length_divisible_by sequence_packing.* dynamic_batching.*": PACKED,
        "offload_optimizer_for_logprob": no_effect("cluster.offload"),
        "hf_config_overrides*": feature("the checkpoint's config.json is used"),
        "draft.*": feature("there is no draft model"),
        "optimizer": no_effect("another optimizer is named"),
        "optimizer.name": ADAMW,
        "optimizer.kwargs.lr": _tensor("optimizer.lr"),
        "optimizer.kwargs.weight_decay": _tensor("optimizer.weight_decay"),
        "optimizer.kwargs.betas": _tensor("optimizer.betas"),
        "optimizer.kwargs.eps": _tensor("optimizer.eps"),
        "optimizer.kwargs.foreach optimizer.kwargs.fused": no_effect("how torch computes AdamW"),
        "scheduler": _tensor(_torch_schedule),
    },
    "policy.dtensor_cfg.lora_cfg.": _lora("policy.dtensor_cfg.lora_cfg."),
    "policy.dtensor_cfg.": {
        "activation_checkpointing": _tensor("model.gradient_checkpointing"),
        "_v2 enabled cpu_offload *parallel* custom_parallel_plan automodel_kwargs* clear_cache_* defer_fsdp_grad_sync"
        " env_vars moe_* *_size *_cfg*": CLUSTER,
    },
    "policy.megatron_cfg.peft.": _lora("policy.megatron_cfg.peft."),
    "policy.megatron_cfg.optimizer.": {
        "lr": _megatron("optimizer.lr"),
        "min_lr": _megatron(_least_rate),
        "weight_decay": _megatron("optimizer.weight_decay"),
        "adam_beta1 adam_beta2": _megatron(BETA),
        "adam_eps": _megatron("optimizer.eps"),
        "clip_grad": _megatron("optimizer.clip_norm"),
        "optimizer bf16 fp16 params_dtype sgd_momentum use_distributed_optimizer use_precision_aware_optimizer"
        " optimizer_cpu_offload optimizer_offload_fraction overlap_cpu_optimizer_d2h_h2d": no_effect(
            "AdamW with float32 masters is the optimizer; optimizer.moments saves memory"
        ),
    },
    "policy.megatron_cfg.scheduler.": {
        "lr_decay_style": _megatron(SCHEDULE),
        "lr_warmup_iters": _megatron("optimizer.warmup_steps"),
        "lr_warmup_init": no_place("the warm-up begins near 0"),
        "start_weight_decay end_weight_decay weight_decay_incr_style lr_decay_iters": no_effect(
            "weight decay is constant, and the schedule ends with the run"
        ),
    },
    "policy.megatron_cfg.": {
        "activation_checkpointing": _megatron("model.gradient_checkpointing"),
        "enabled *parallel* pipeline_* *_pipeline_* sequence_parallel context_* expert_* empty_unused_memory_level"
        " converter_type apply_rope_fusion bias_activation_fusion defer_fp32_logits freeze_moe_* moe_* mtp_* use_*"
        " env_vars* distributed_data_parallel_config.* fp8_cfg.* checkpoint.* model_overrides* force_reconvert_from_hf"
        " recompute_* cuda_graph_* fine_grained_activation_offloading offload_modules gradient_accumulation_fusion"
        " fused_* track_moe_metrics moe_metrics* layernorm_epsilon attention_backend attention_* linear_ce_* *_fusion"
        " masked_softmax*": CLUSTER,
    },
    "policy.automodel_cfg.*": CLUSTER,
    "policy.generation.": {
        "max_new_tokens": "rollout.max_new_tokens",
        "temperature": "rollout.temperature",
        "top_p": "rollout.top_p",
        "top_k": lambda sheet, setting: {"rollout.top_k": max(0, setting.value or 0)},
        "val_temperature": _evaluated("evaluation.temperature"),
        "val_top_*": SAMPLED,
        "stop_strings": switch("rollout.stop", "there are none"),
        "stop_token_ids": feature("rollout.stop takes texts"),
        "backend": name_engine,
        "vllm_cfg.* vllm_kwargs vllm_kwargs.* colocated.* mcore_generation_config.* sglang_cfg.*"
        " sglang_kwargs.* refit_transport refit_cfg.* port_range_* real_quant_export_cpu_offload model_name"
        " _pad_token_id trtllm_cfg.* quant_cfg": ENGINE,
    },
    "policy.*router_replay*": feature("algorithm.router_replay does it with rollout.engine: native"),
    "data.": {
        "dataset_name train.dataset_name": _dataset("train"),
        "validation.dataset_name": _dataset("evaluate"),
        "train.allowed_problem_types": _problem_types("train"),
        "validation.allowed_problem_types": _problem_types("evaluate"),
        "train.data_path": "tasks.train.0.options.path",
        "validation.data_path train validation": ROWS,
        "shuffle": "tasks.shuffle",
        "num_workers": no_effect("rows of the next step are read ahead in a thread"),
        "max_input_seq_length": no_place("rollout.max_context_tokens; what is longer is skipped or refused, never cut"),
        "prompt_file *.prompt_file": feature(
            "a source's option instruction ends its prompts; what the file has before {} belongs into the rows"
        ),
        "system_prompt_file *.system_prompt_file": feature("a source's option system goes before its prompts"),
        "default.env_name": TERMS,
        "default.processor": PROCESSOR,
        "*.split *.split_validation_size *.seed *.subset *.processor *.env_name"
        " *.input_key *.output_key *.download_dir": feature("options of a source (docs/guides/tasks.md)"),
        "use_multiple_dataloader num_prompts_per_dataloader add_bos add_eos add_generation_prompt default.*": feature(
            "tasks.train mixes sources by weight"
        ),
    },
    "env.*.reward_functions": _terms,
    "env.*.num_workers": no_effect("cluster.rewards and cluster.environments start workers"),
    "env.*": feature(
        "environments and reward terms are named in the recipe (docs/guides/environments.md, docs/reference/rewards.md)"
    ),
    "logger.": {
        "wandb_enabled": _logger("wandb"),
        "tensorboard_enabled": _logger("tensorboard"),
        "wandb.project": "logging.project",
        "wandb.name": run_name,
        "mlflow_enabled": _logger("mlflow"),
        "swanlab_enabled": feature("loggers are tensorboard, wandb, mlflow and trackio"),
        "num_val_samples_to_print": feature("the report shows episodes; logging.generations sends them to loggers"),
        "log_dir monitor_gpus gpu_monitoring.* wandb.* swanlab.* tensorboard* mlflow.* log_*": no_effect(
            "console, metrics.jsonl and the report are always written"
        ),
    },
    "cluster.": {"gpus_per_node num_nodes segment_size master_port_range_*": CLUSTER},
    "data_plane.*": no_effect("an internal detail of NeMo-RL"),
    "on_policy_distillation*": feature("there is no distillation"),
    "ppo.* value*": PPO,
    "HF_* TRANSFORMERS_*": no_effect("Hugging Face's libraries read it here, too"),
}
RULES = table(TABLE)
