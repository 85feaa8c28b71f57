"""slime's arguments: a command line, the argument strings of a Python run script, and its YAML of several turns.

--rollout-batch-size 64 --n-samples-per-prompt 8 --num-rollout 3000      → batch: {prompts_per_step: 64, group_size: 8}
max_turns: 3                                                             → rollout.max_turns, and the environment's
"""

import ast
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from sensorium.recipe.traits import loss_takes, loss_traits
from sensorium.systems.migration.outcomes import (
    DROP,
    Migration,
    Outcome,
    Rule,
    Setting,
    Sheet,
    Why,
    beta,
    choose_estimator,
    choose_loss,
    divide_batch,
    feature,
    loggers,
    of_loss,
    parsed,
    run_name,
)
from sensorium.systems.migration.recognition import SLIME, Given, arguments
from sensorium.vocabulary.errors import RecipeError

MEGATRON = Why("no place", "GPUs are divided by the section cluster (docs/guides/scale_out.md)")
SGLANG = Why("no place", "the engine here is native, or vLLM with options of its own (docs/guides/engines.md)")
SHAPE = Why("no effect", "the checkpoint's config.json says how the model is built")
KL = {"kl": "k1", "k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
SEVERAL_TURNS = {
    "max_turns", "rollout_interaction_env_path", "--custom-generate-function-path", "--custom-config-path"
}  # fmt: skip
DEFAULTS: dict[str, Any] = {"--eps-clip": 0.2, "--eps-clip-c": None, "--calculate-per-token-loss": False}
"""slime's own values of arguments that a command leaves out, where a recipe's are others."""
UNSURE = {"--n-samples-per-prompt": "batch.group_size", "--rollout-max-response-len": "rollout.max_new_tokens"}
"""Arguments that a run hangs on and whose defaults are not filled in."""
ENVIRONMENTS = {"examples.geo3k_vlm_multi_turn.env_geo3k": "geo3k"}


def python_arguments(text: str) -> tuple[list[Setting], list[str]]:
    """The arguments that a Python run script puts together as strings, and what is worth saying about it."""
    reader = _Strings()
    reader.visit(ast.parse(text))
    whole = reader.names.get("train_args", "")
    parts = {name: value for name, value in reader.names.items() if isinstance(value, str) and "--" in value}
    used = whole if isinstance(whole, str) and whole.strip() else " ".join(parts.values())
    notes = [
        f"the script's {name} are not part of its train_args" for name, value in parts.items() if value.strip() not in used
    ]
    try:
        words = shlex.split(used)
    except ValueError:
        words = used.split()
    return arguments(words), notes + reader.notes


class _Strings(ast.NodeVisitor):
    """Names that stand for strings and numbers, as far as they can be known without running anything."""

    def __init__(self) -> None:
        self.names: dict[str, Any] = {}
        self.notes: list[str] = []

    def visit_Assign(self, node: ast.Assign) -> None:
        for target in node.targets:
            if isinstance(target, ast.Name):
                self.names[target.id] = self.value(node.value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        if isinstance(node.target, ast.Name) and isinstance(node.op, ast.Add):
            self.names[node.target.id] = f"{self.names.get(node.target.id, '')}{self.value(node.value)}"

    def visit_If(self, node: ast.If) -> None:
        for statement in node.body:
            self.visit(statement)
        if node.orelse and not (isinstance(node.test, ast.Compare) and "__name__" in ast.dump(node.test)):
            self.notes.append(f"lines {node.lineno} to {node.end_lineno} hang on a condition: the first branch was taken")

    def value(self, node: ast.expr) -> Any:
        """What an expression is, or ``$(expression)``."""
        if isinstance(node, ast.Constant):
            return node.value
        if isinstance(node, ast.Name):
            return self.names.get(node.id, f"$({node.id})")
        if isinstance(node, ast.JoinedStr):
            parts = [self.value(part.value if isinstance(part, ast.FormattedValue) else part) for part in node.values]
            return "".join(str(part) for part in parts)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            left, right = self.value(node.left), self.value(node.right)
            return left + right if type(left) is type(right) and isinstance(left, str | int) else f"{left}{right}"
        if isinstance(node, ast.IfExp):
            self.visit_walrus(node.test)
            return self.value(node.body)
        if isinstance(node, ast.Call):
            return self._call(node)
        return f"$({ast.unparse(node)})".replace(" ", "")

    def visit_walrus(self, node: ast.expr) -> None:
        """A name that a condition sets."""
        for inner in ast.walk(node):
            if isinstance(inner, ast.NamedExpr):
                self.names[inner.target.id] = self.value(inner.value)

    def _call(self, node: ast.Call) -> Any:
        name = ast.unparse(node.func)
        if name in ("os.environ.get", "os.getenv", "U.get_bool_env_var") and len(node.args) == 2:
            return self.value(node.args[1])
        if name == "os.path.join":
            return "/".join(str(self.value(arg)) for arg in node.args)
        if name in ("int", "str", "float") and len(node.args) == 1:
            return self.value(node.args[0])
        return f"$({ast.unparse(node)})".replace(" ", "")


def certainty(given: Given) -> int:
    """How sure it is that a text is slime's. Python run scripts are known of nobody else."""
    if given.form == "yaml":
        return 3 * ("rollout_interaction_env_path" in given.data)
    if given.form == "python":
        return 2
    return 2 * any(name in SLIME or name.startswith("SLIME_SCRIPT_") for name in given.script.names)


def migrate(given: Given) -> Migration:
    """The recipe of a command, of a Python run script, or of the YAML of several turns."""
    if given.form == "yaml":
        return migrate_slime([Setting(key, value) for key, value in given.data.items()], given.text, given.named)
    if given.form == "python":
        settings, notes = python_arguments(given.text)
        return migrate_slime(settings, given.text, given.named, notes)
    script = given.script
    settings = [*(one for one in script.variables if one.key.startswith("SLIME_SCRIPT_")), *script.options]
    places = [place for command in script.script.commands if (place := _download_folder(command.words))]
    download = None
    if places and not any(setting.key == "--prompt-data" for setting in script.options):
        download = Setting("hf download --local-dir", places[0])
        settings.append(Setting("--prompt-data", f"{places[0]}/train.parquet"))
    migration = migrate_slime(settings, given.text, given.named, script.script.notes)
    if download:  # rows that the script downloads and no argument names are those that the example trains on
        migration.outcomes = [
            Outcome(download, one.kind, one.text) if one.setting.key == "--prompt-data" else one
            for one in migration.outcomes
        ]
    return migration


def _download_folder(words: Sequence[str]) -> str:
    """Where ``hf download --repo-type dataset NAME --local-dir PLACE`` puts the rows; empty for other commands."""
    if list(words[:2]) not in (["hf", "download"], ["huggingface-cli", "download"]) or "dataset" not in words:
        return ""
    return words[words.index("--local-dir") + 1] if "--local-dir" in words[:-1] else ""


def migrate_slime(settings: Sequence[Setting], text: str, named: str, notes: Sequence[str] = ()) -> Migration:
    """The recipe of slime's arguments, of its YAML of several turns, or of the variables of its example."""
    keys = {setting.key for setting in settings}
    if not any(fnmatchcase(key, pattern) for key in keys for pattern in RULES):
        raise RecipeError(
            f"{named}: none of slime's arguments is in it. Give the script or the command that has them "
            f"(--hf-checkpoint, --rollout-batch-size, …), or say whose it is with another --from."
        )
    example = "geo3k_vlm_multi_turn" in text and "--rollout-batch-size" not in keys  # which names no arguments
    start = "geo3k_multi_turn" if example or keys & SEVERAL_TURNS else ""
    sheet = Sheet("slime", start, settings, notes)
    sheet.fill({} if start else DEFAULTS, ("--rollout-batch-size", "--n-samples-per-prompt", "--advantage-estimator"))
    sheet.settle(RULES)
    own = [place for key, place in UNSURE.items() if not start and key not in keys]
    if own:
        sheet.notes.append(f"left out, so the recipe has its own value, which may not be slime's: {', '.join(own)}.")
    if not sheet.at("model.path"):
        sheet.put("model.path", "MODEL")
        sheet.notes.append("no --hf-checkpoint was given: model.path says MODEL, which no folder is.")
    return sheet.finish(named)


def _data(sheet: Sheet, setting: Setting) -> None:
    path = str(setting.value[0] if isinstance(setting.value, list) else setting.value)
    source = "jsonl" if Path(path).suffix in (".jsonl", ".json") else "parquet"
    sheet.became(setting, {"tasks.train.0.source": source, "tasks.train.0.options.path": path})


def _held_out(sheet: Sheet, setting: Setting) -> None:
    given = setting.value if isinstance(setting.value, list) else [setting.value]
    paths = [str(path) for path in given if "/" in str(path) or "." in str(path)]
    columns = sheet.at("tasks.train.0.options.columns", {"prompt": "prompt"})
    made: list[dict[str, Any]] = []
    for path in paths:
        bare, _, rows = path.partition("@")
        source = "jsonl" if Path(bare).suffix in (".jsonl", ".json") else "parquet"
        made.append({"source": source, "options": {"path": bare, "columns": dict(columns)}})
        if rows:
            sheet.notes.append(
                f"{setting.key}: rows {rows} of {bare} are meant; all are taken. Give a file with those alone."
            )
    if not made:
        sheet.nothing(setting, "no place", "it names no file; name rows under tasks.evaluate")
        return
    sheet.put("tasks.evaluate", made)
    sheet.became(setting, {f"tasks.evaluate.{i}.options.path": one["options"]["path"] for i, one in enumerate(made)})


def _column(part: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        sides = [side for side in ("train", "evaluate") if sheet.at(f"tasks.{side}.0.options.columns") is not None]
        sheet.became(setting, {f"tasks.{side}.0.options.columns.{part}": setting.value for side in sides})

    return rule


def _media_columns(sheet: Sheet, setting: Setting) -> None:
    given = parsed(str(setting.value))
    parts = {"image": "pictures", "video": "videos", "audio": "sounds"}
    if not isinstance(given, dict) or not set(given) <= set(parts):
        sheet.nothing(setting, "no place", "media columns are pictures, videos and sounds (tasks.train.0.options.columns)")
        return
    sheet.became(setting, {f"tasks.train.0.options.columns.{parts[kind]}": column for kind, column in given.items()})


def _reward(sheet: Sheet, setting: Setting) -> None:
    if sheet.at("rewards.terms.0.name") == "environment":
        sheet.nothing(setting, "no effect", "the environment scores the answer by mathematical equality")
    elif setting.value in ("math", "deepscaler", "dapo"):
        sheet.became(setting, {"rewards.terms": [{"name": "math"}]})
    else:
        sheet.nothing(setting, "no place", "choose a reward term (docs/reference/rewards.md); the recipe has math")


def _response(sheet: Sheet, setting: Setting) -> None:
    changes = {"rollout.max_new_tokens": setting.value}
    if sheet.at("rollout.max_turns", 1) > 1:
        changes["rollout.max_episode_tokens"] = setting.value
    sheet.became(setting, changes)


def _estimator(sheet: Sheet, setting: Setting) -> None:
    if setting.value == "gspo":
        sheet.put("algorithm.advantage", {"name": "grpo"})
        choose_loss(sheet, setting, "gspo")
    elif setting.value == "cispo":
        sheet.put("algorithm.advantage", {"name": "grpo"})
        choose_loss(sheet, setting, "cispo")
    elif (name := {"ppo": "gae"}.get(setting.value, setting.value)) in (
        "grpo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"
    ):  # fmt: skip
        choose_estimator(sheet, setting, name)
    else:
        sheet.nothing(setting, "no place", "this estimator is not here (algorithm.advantage.name)")


def _kl_loss(sheet: Sheet, setting: Setting) -> None:
    if not sheet.value("--use-kl-loss"):
        sheet.nothing(setting, "no effect", "there is no KL in the loss (--use-kl-loss)")
    elif setting.key == "--kl-loss-coef":
        sheet.became(setting, {"algorithm.kl.coef": float(setting.value)})
    elif setting.key == "--kl-loss-type":
        if setting.value in KL:
            sheet.became(setting, {"algorithm.kl.estimator": KL[setting.value]})
        else:
            sheet.nothing(setting, "no place", "algorithm.kl.estimator is k1, abs, k2 or k3")
    else:
        sheet.became(setting, {"algorithm.kl.place": "loss"})


def _kl_reward(sheet: Sheet, setting: Setting) -> None:
    if setting.value:
        sheet.became(setting, {"algorithm.kl.place": "reward", "algorithm.kl.coef": float(setting.value)})
    else:
        sheet.nothing(setting, "no effect", "no KL in the reward")


def _clip(sheet: Sheet, setting: Setting) -> None:
    name = sheet.at("algorithm.loss.name", "clip")
    sides = ["low"] if "--eps-clip-high" in sheet.settings else ["low", "high"]
    if not loss_takes(name, "clip_low"):
        sheet.nothing(setting, "no effect", f"the loss {name} has no use for it")
    else:
        sheet.became(setting, {f"algorithm.loss.clip_{side}": setting.value for side in sides})


def _aggregation(sheet: Sheet, setting: Setting) -> None:
    name, wanted = sheet.at("algorithm.loss.name", "clip"), "token_mean" if setting.value else "sequence_mean_token_mean"
    allowed = loss_traits(name).aggregations
    if allowed and wanted not in allowed:
        sheet.nothing(setting, "no place", f"the loss {name} is defined over whole sequences: {allowed[0]}")
    else:
        sheet.became(setting, {"algorithm.loss.aggregation": wanted})


def _recompute(sheet: Sheet, setting: Setting) -> None:
    sheet.became(setting, {"model.gradient_checkpointing": "selective" if setting.value == "selective" else True})


def _turns(sheet: Sheet, setting: Setting) -> None:
    changes = {"rollout.max_turns": setting.value}
    if sheet.at("tasks.train.0.options.environment.name") == "slime":
        changes["tasks.train.0.options.environment.options.args.max_turns"] = setting.value
    else:
        changes["tasks.train.0.options.environment.options.max_turns"] = setting.value
    sheet.became(setting, changes)


def _environment(sheet: Sheet, setting: Setting) -> None:
    name = ENVIRONMENTS.get(str(setting.value))
    if name:
        sheet.became(setting, {"tasks.train.0.options.environment.name": name})
        return
    turns = sheet.value("max_turns", 3)
    made = {"name": "slime", "options": {"path": setting.value, "args": {"max_turns": turns}}}
    sheet.became(setting, {"tasks.train.0.options.environment": made})


def _wandb(sheet: Sheet, setting: Setting) -> None:
    loggers(sheet, setting, ["wandb"])


def _model_name(sheet: Sheet, setting: Setting) -> None:
    sheet.became(
        setting, {"model.path": f"Qwen/{setting.value}" if str(setting.value).startswith("Qwen") else setting.value}
    )


def _oversample(sheet: Sheet, setting: Setting) -> None:
    sheet.became(setting, {"selection.oversample": setting.value / sheet.at("batch.prompts_per_step", 1)})


def _updates(sheet: Sheet, setting: Setting) -> None:
    divide_batch(sheet, setting, setting.value)


def _held(place: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> None:
        if sheet.at("tasks.evaluate") or "--eval-prompt-data" in sheet.settings:
            sheet.became(setting, {place: setting.value})
        else:
            sheet.nothing(setting, "no effect", "nothing is held out (--eval-prompt-data)")

    return rule


def each(names: str, rule: Rule) -> dict[str, Rule]:
    """One rule for several arguments."""
    return {f"--{name}": rule for name in names.split()}


RULES: dict[str, Rule] = {
    "max_turns": _turns,
    "rollout_interaction_env_path": _environment,
    "SLIME_SCRIPT_MODEL_NAME": _model_name,
    "SLIME_SCRIPT_NUM_GPUS": MEGATRON,
    "SLIME_SCRIPT_*": Why("no place", "how slime's example is launched; here: sensorium train RECIPE"),
    "--hf-checkpoint": "model.path",
    "--load": Why("no effect", "weights come from model.path; a run goes on with --resume"),
    "--ref-load": Why("no effect", "the reference is the model as it was when RL began"),
    "--save": "run_dir",
    "--save-interval": "checkpoint.every",
    "--prompt-data": _data,
    "--eval-prompt-data": _held_out,
    "--input-key": _column("prompt"),
    "--label-key": _column("answer"),
    "--multimodal-keys": _media_columns,
    "--apply-chat-template": Why("no effect", "the model's template is always applied"),
    "--apply-chat-template-kwargs": feature("the model's template is applied as it is"),
    "--rollout-shuffle": lambda sheet, setting: sheet.became(setting, {"tasks.shuffle": True}),
    "--rm-type": _reward,
    "--custom-rm-path": feature("a reward of your own is module:function under rewards.terms (docs/reference/rewards.md)"),
    "--custom-generate-function-path": Why(
        "no place", "several turns are an environment's here: geo3k, or slime's own (docs/guides/environments.md)"
    ),
    "--custom-config-path": Why("no place", "run sensorium migrate on this file as well: max_turns and the environment"),
    "--num-rollout": lambda sheet, setting: sheet.became(setting, {"steps": setting.value, "epochs": DROP}),
    "--num-epoch": lambda sheet, setting: (
        sheet.nothing(setting, "no effect", "--num-rollout says how long the run is")
        if "--num-rollout" in sheet.settings
        else sheet.became(setting, {"epochs": setting.value, "steps": DROP})
    ),
    "--rollout-batch-size": "batch.prompts_per_step",
    "--n-samples-per-prompt": "batch.group_size",
    "--global-batch-size": _updates,
    "--num-steps-per-rollout": "batch.updates_per_epoch",
    "--over-sampling-batch-size": _oversample,
    "--dynamic-sampling-filter-path": lambda sheet, setting: sheet.became(setting, {"selection.dynamic": True}),
    "--partial-rollout": feature("schedule: asynchronous plays across updates"),
    "--rollout-max-response-len": _response,
    "--rollout-max-context-len": "rollout.max_context_tokens",
    "--rollout-max-prompt-len": Why("no place", "rollout.max_context_tokens bounds prompt and response together"),
    "--rollout-temperature": "rollout.temperature",
    "--rollout-top-p": "rollout.top_p",
    "--rollout-top-k": lambda sheet, setting: sheet.became(setting, {"rollout.top_k": max(0, setting.value)}),
    "--rollout-stop": lambda sheet, setting: sheet.became(
        setting, {"rollout.stop": setting.value if isinstance(setting.value, list) else [setting.value]}
    ),
    "--rollout-seed": "seed",
    "--seed": "seed",
    "--eval-interval": _held("evaluation.every"),
    "--n-samples-per-eval-prompt": _held("evaluation.samples"),
    "--eval-temperature": _held("evaluation.temperature"),
    "--eval-max-response-len": _held("evaluation.max_new_tokens"),
    "--eval-top-[kp]": Why(
        "no place", "held-out tasks are sampled with the rollout's top_p and top_k; evaluation.temperature=0 is greedy"
    ),
    "--skip-eval-before-train": lambda sheet, setting: sheet.became(setting, {"evaluation.at_start": False}),
    "--advantage-estimator": _estimator,
    "--use-kl-loss": _kl_loss,
    "--kl-loss-coef": _kl_loss,
    "--kl-loss-type": _kl_loss,
    "--kl-coef": _kl_reward,
    "--entropy-coef": lambda sheet, setting: sheet.became(setting, {"algorithm.loss.entropy_coef": float(setting.value)}),
    "--eps-clip": _clip,
    "--eps-clip-high": of_loss("clip_high"),
    "--eps-clip-c": of_loss("dual_clip"),
    "--gamma": "algorithm.advantage.gamma",
    "--lambd": "algorithm.advantage.lam",
    "--calculate-per-token-loss": _aggregation,
    "--disable-grpo-std-normalization": lambda sheet, setting: sheet.became(setting, {"algorithm.advantage.std": False}),
    "--use-tis": lambda sheet, setting: sheet.became(setting, {"algorithm.correction.weights": "token"}),
    "--tis-clip": lambda sheet, setting: (
        sheet.became(setting, {"algorithm.correction.high": setting.value})
        if sheet.value("--use-tis")
        else sheet.nothing(setting, "no effect", "there are no importance weights (--use-tis)")
    ),
    "--optimizer": lambda sheet, setting: (
        sheet.nothing(setting, "no effect", "AdamW is the optimizer")
        if setting.value == "adam"
        else sheet.nothing(setting, "no place", "AdamW is the optimizer")
    ),
    "--lr": "optimizer.lr",
    "--min-lr": Why("no effect", "the rate does not fall; with a schedule: optimizer.final_lr_share"),
    "--lr-decay-style": lambda sheet, setting: (
        sheet.became(setting, {"optimizer.schedule": setting.value})
        if setting.value in ("constant", "linear", "cosine")
        else sheet.nothing(setting, "no place", "optimizer.schedule is constant, linear or cosine")
    ),
    "--lr-warmup-iters": "optimizer.warmup_steps",
    "--weight-decay": "optimizer.weight_decay",
    "--adam-beta[12]": beta(("--adam-beta1", "--adam-beta2")),
    "--adam-eps": "optimizer.eps",
    "--clip-grad": "optimizer.clip_norm",
    "--recompute-granularity": _recompute,
    "--max-tokens-per-gpu": "batch.tokens_per_microbatch",
    **each(
        "use-dynamic-batch-size balance-data log-probs-max-tokens-per-gpu",
        Why("no effect", "micro-batches are packed by tokens"),
    ),
    **each("micro-batch-size ref-micro-batch-size log-probs-chunk-size", Why("no place", "batch.tokens_per_microbatch")),
    **each(
        "recompute-method recompute-num-layers recompute-modules recompute-loss-function",
        Why("no place", "model.gradient_checkpointing: true recomputes every layer, selective the MLPs"),
    ),
    "--use-wandb": _wandb,
    "--wandb-project": "logging.project",
    "--wandb-group": run_name,
    "--wandb-key": Why("no place", "wandb reads WANDB_API_KEY; a recipe never holds a key"),
    **each(
        "disable-wandb-random-suffix wandb-always-use-train-step wandb-team wandb-host wandb-dir wandb-mode wandb-run-id",
        Why("no place", "wandb reads its own environment variables"),
    ),
    "--use-tensorboard": lambda sheet, setting: loggers(sheet, setting, ["tensorboard"]),
    **each("tb-project-name tb-experiment-name", Why("no effect", "TensorBoard's files are in the run directory")),
    "--sglang-*": SGLANG,
    "--router-*": SGLANG,
    "--use-slime-router": SGLANG,
    "--rollout-num-gpus*": MEGATRON,
    "--rollout-health-check-*": SGLANG,
    "--use-fault-tolerance": Why("no effect", "a worker that fails is replaced (cluster.restarts)"),
    **each(
        "actor-num-nodes actor-num-gpus-per-node critic-num-nodes critic-num-gpus-per-node num-gpus-per-node colocate "
        "offload offload-train offload-rollout train-backend tensor-model-parallel-size sequence-parallel "
        "pipeline-model-parallel-size context-parallel-size expert-model-parallel-size expert-tensor-parallel-size "
        "decoder-last-pipeline-num-layers num-layers-per-virtual-pipeline-stage update-weight-buffer-size "
        "distributed-backend distributed-timeout-minutes train-memory-margin-bytes fsdp-* gradient-checkpointing "
        "optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer use-distributed-optimizer "
        "moe-token-dispatcher-type moe-enable-deepep moe-flex-dispatcher-backend megatron-to-hf-mode model-name",
        MEGATRON,
    ),
    **each(
        "attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32 attention-backend "
        "grad-reduce-in-bf16 bf16 fp16 transformer-impl no-check-for-nan-in-loss-and-grad",
        Why("no effect", "there is no dropout here, and sums are taken in float32"),
    ),
    **each(
        "swiglu num-layers hidden-size ffn-hidden-size num-attention-heads use-rotary-position-embeddings "
        "disable-bias-linear normalization norm-epsilon rotary-base group-query-attention num-query-groups kv-channels "
        "qk-layernorm vocab-size untie-embeddings-and-output-weights add-qkv-bias rotary-percent max-position-embeddings "
        "position-embedding-type seq-length make-vocab-size-divisible-by moe-* num-experts spec attention-output-gate "
        "apply-layernorm-1p rope-* mtp-* q-lora-rank kv-lora-rank qk-head-dim qk-pos-emb-head-dim v-head-dim "
        "multi-latent-attention no-rope-fusion use-rope-scaling rotary-scaling-factor mscale mscale-all-dim",
        SHAPE,
    ),
    **each(
        "debug-rollout-only debug-train-only save-debug-rollout-data load-debug-rollout-data",
        feature("episodes are always written; sensorium play and validate need no model"),
    ),
    **each(
        "loss-type custom-loss-function-path rollout-function-path eval-function-path data-source-path",
        feature("the parts that can be your own are sources, environments, rewards, planners and losses"),
    ),
    **each(
        "metadata-key tool-key group-rm reward-key eval-reward-key balance-by-flops start-rollout-id "
        "ci-test ci-disable-kl-checker",
        feature("rows have prompt, media and answer here (docs/guides/tasks.md)"),
    ),
    **each(
        "deterministic-mode use-rollout-routing-replay use-routing-replay use-rollout-logprobs get-mismatch-metrics",
        Why("no effect", "a run repeats where the dry run says so; log-probs of engine and learner are always compared"),
    ),
    **each(
        "no-save-optim no-load-optim no-load-rng finetune rotary-interleaved async-save ckpt-format",
        Why("no effect", "a checkpoint here always holds model, optimizer and the run's state"),
    ),
}
