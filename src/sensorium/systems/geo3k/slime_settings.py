"""slime's arguments: a command line, the argument strings of a Python run script, and its YAML of several turns.

--rollout-batch-size 64 --n-samples-per-prompt 8 --num-rollout 3000      → batch: {prompts_per_step: 64, group_size: 8}
max_turns: 3                                                             → rollout.max_turns, and the environment's
"""

import ast
import shlex
from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import Any

from sensorium.recipe.estimators_and_losses import loss_takes
from sensorium.systems.migration.outcomes import (
    ADAMW,
    CLUSTER,
    DROP,
    SCHEDULE,
    STORED,
    TEMPLATE,
    Answer,
    Migration,
    Outcome,
    Rule,
    Setting,
    Sheet,
    aggregate,
    beta,
    choose_estimator,
    choose_loss,
    chosen,
    divide_batch,
    feature,
    listed,
    loggers,
    no_effect,
    no_place,
    of_loss,
    own_reward,
    parsed,
    rows_source,
    run_name,
    switch,
    table,
    where,
)
from sensorium.systems.migration.recognition import SLIME, Given, arguments
from sensorium.vocabulary.errors import RecipeError

KL = {"kl": "k1", "k1": "k1", "k2": "k2", "k3": "k3", "low_var_kl": "k3"}
SEVERAL_TURNS = {
    "max_turns", "rollout_interaction_env_path", "--custom-generate-function-path", "--custom-config-path"
}  # fmt: skip
# slime's own values of arguments that a command leaves out, where a recipe's differ.
DEFAULTS: dict[str, Any] = {
    "--eps-clip": 0.2, "--eps-clip-c": None, "--calculate-per-token-loss": False, "--input-key": "input",
}  # fmt: skip
# Arguments that matter to a run and whose defaults are not filled in.
NO_DEFAULTS = {
    "--n-samples-per-prompt": "batch.group_size", "--rollout-max-response-len": "rollout.max_new_tokens",
    "--lr": "optimizer.lr",
}  # fmt: skip
FIRST = ("--prompt-data", "--eval-prompt-data", "--rollout-batch-size", "--n-samples-per-prompt", "--advantage-estimator")
ENVIRONMENTS = {"examples.geo3k_vlm_multi_turn.env_geo3k": "geo3k"}


def python_arguments(text: str) -> tuple[list[Setting], list[str]]:
    """The arguments that a Python run script puts together as strings, and notes on what it leaves open."""
    reader = _Strings()
    reader.visit(ast.parse(text))
    whole = reader.names.get("train_args", "")
    parts = {name: value for name, value in reader.names.items() if isinstance(value, str) and "--" in value}
    used = whole if isinstance(whole, str) and whole.strip() else " ".join(parts.values())
    unused = [name for name, value in parts.items() if value.strip() not in used]
    try:
        words = shlex.split(used)
    except ValueError:
        words = used.split()
    return arguments(words), [f"the script's {name} are not part of its train_args" for name in unused] + reader.notes


class _Strings(ast.NodeVisitor):
    """The strings and numbers that names are bound to, as far as this is known without running anything."""

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
            self.notes.append(f"lines {node.lineno} to {node.end_lineno} depend on a condition: the first branch was taken")

    def value(self, node: ast.expr) -> Any:
        """The value of an expression, or ``$(expression)`` where it is not known."""
        match node:
            case ast.Constant():
                return node.value
            case ast.Name():
                return self.names.get(node.id, f"$({node.id})")
            case ast.JoinedStr():
                parts = [part.value if isinstance(part, ast.FormattedValue) else part for part in node.values]
                return "".join(str(self.value(part)) for part in parts)
            case ast.BinOp(op=ast.Add()):
                left, right = self.value(node.left), self.value(node.right)
                return left + right if type(left) is type(right) and isinstance(left, str | int) else f"{left}{right}"
            case ast.IfExp():
                for inner in ast.walk(node.test):
                    if isinstance(inner, ast.NamedExpr):
                        self.names[inner.target.id] = self.value(inner.value)
                return self.value(node.body)
            case ast.Call():
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
    folders = [folder for command in script.script.commands if (folder := _download_folder(command.words))]
    downloads = bool(folders) and not any(setting.key == "--prompt-data" for setting in script.options)
    if downloads:  # rows that the script downloads and no argument names are those that the example trains on
        settings.append(Setting("--prompt-data", f"{folders[0]}/train.parquet"))
    migration = migrate_slime(settings, given.text, given.named, script.script.notes)
    if downloads:
        download = Setting("hf download --local-dir", folders[0])
        migration.outcomes = [
            Outcome(download, one.kind, one.text) if one.setting.key == "--prompt-data" else one
            for one in migration.outcomes
        ]
    return migration


def _download_folder(words: Sequence[str]) -> str:
    """The folder of ``hf download --repo-type dataset NAME --local-dir FOLDER``; empty for other commands."""
    if list(words[:2]) not in (["hf", "download"], ["huggingface-cli", "download"]) or "dataset" not in words:
        return ""
    return words[words.index("--local-dir") + 1] if "--local-dir" in words[:-1] else ""


def migrate_slime(settings: Sequence[Setting], text: str, named: str, notes: Sequence[str] = ()) -> Migration:
    """The recipe of slime's arguments, of its YAML of several turns, or of the variables of its example."""
    keys = {setting.key for setting in settings}
    if not any(fnmatchcase(key, pattern) for key in keys for pattern in RULES):
        raise RecipeError(
            f"{named}: none of slime's arguments is in it. Give the script or the command that has them "
            f"(--hf-checkpoint, --rollout-batch-size, …), or name another trainer with --from."
        )
    example = "geo3k_vlm_multi_turn" in text and "--rollout-batch-size" not in keys  # which names no arguments
    start = "geo3k_multi_turn" if example or keys & SEVERAL_TURNS else ""
    sheet = Sheet("slime", start, settings, notes)
    sheet.settle(RULES, FIRST, {} if start else DEFAULTS)
    own = [place for key, place in NO_DEFAULTS.items() if not start and key not in keys]
    if own:
        sheet.notes.append(f"left out, so the recipe has its own value, which may not be slime's: {', '.join(own)}.")
    return sheet.finish(named, "--hf-checkpoint")


def _held_out(sheet: Sheet, setting: Setting) -> Rule:
    columns = sheet.at("tasks.train.0.options.columns", {"prompt": "prompt"})
    sources: list[dict[str, Any]] = []
    for path in [str(path) for path in listed(setting.value) if "/" in str(path) or "." in str(path)]:
        bare, _, rows = path.partition("@")
        sources.append({"source": rows_source(bare), "options": {"path": bare, "columns": dict(columns)}})
        if rows:
            sheet.notes.append(
                f"{setting.key}: rows {rows} of {bare} are meant; all are taken. Give a file with those alone."
            )
    if not sources:
        return no_place("it names no file; name rows under tasks.evaluate")
    sheet.put("tasks.evaluate", sources)
    return {f"tasks.evaluate.{i}.options.path": one["options"]["path"] for i, one in enumerate(sources)}


def _flat_sources(sheet: Sheet, sides: Sequence[str] = ("train", "evaluate")) -> list[str]:
    """The places of the options ``columns`` of all sources that have them."""
    places = [f"tasks.{side}.{i}.options.columns" for side in sides for i in range(len(sheet.at(f"tasks.{side}", [])))]
    return [place for place in places if sheet.at(place) is not None]


def _column(part: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        held_out = setting.key.startswith("--eval-")
        own = f"--eval-{setting.key[2:]}" in sheet.settings  # of held-out rows
        sides = ["evaluate"] if held_out else ["train"] if own else ["train", "evaluate"]
        changes = {f"{place}.{part}": setting.value for place in _flat_sources(sheet, sides)}
        return changes or no_effect("nothing is held out (--eval-prompt-data)" if held_out else "no rows are flat")

    return rule


def _media_columns(sheet: Sheet, setting: Setting) -> Rule:
    given = parsed(str(setting.value))
    parts = {"image": "pictures", "video": "videos", "audio": "sounds"}
    if not isinstance(given, dict) or not set(given) <= set(parts):
        return no_place("media columns are pictures, videos and sounds (tasks.train.0.options.columns)")
    places = _flat_sources(sheet)
    return {f"{place}.{parts[kind]}": column for place in places for kind, column in given.items()}


def _temperature(sheet: Sheet, setting: Setting) -> Rule:
    held_out = sheet.at("tasks.evaluate") or "--eval-prompt-data" in sheet.settings
    if not held_out or "--eval-temperature" in sheet.settings:
        return "rollout.temperature"
    note = "slime samples held-out tasks with it, too, where --eval-temperature is left out"
    return Answer("became", note, {"rollout.temperature": setting.value, "evaluation.temperature": setting.value})


def _own_reward(sheet: Sheet, setting: Setting) -> Rule:
    module, _, function = str(setting.value).rpartition(".")
    return own_reward(sheet, setting, f"{module}:{function}")


def _reward(sheet: Sheet, setting: Setting) -> Rule:
    if sheet.at("rewards.terms.0.name") == "environment":
        return no_effect("the environment scores the answer by mathematical equality")
    if setting.value in ("math", "deepscaler", "dapo"):
        return {"rewards.terms": [{"name": "math"}]}
    if "--custom-rm-path" not in sheet.settings:
        sheet.attention.append(
            f"the reward of this recipe is math, and slime's {setting.shown} (--rm-type) is no term here: choose a term or "
            "write your own (docs/reference/rewards.md), and name it under rewards.terms."
        )
    return no_place("choose a reward term (docs/reference/rewards.md); the recipe has math")


def _response(sheet: Sheet, setting: Setting) -> Rule:
    changes = {"rollout.max_new_tokens": setting.value}
    if sheet.at("rollout.max_turns", 1) > 1:
        changes["rollout.max_episode_tokens"] = setting.value
    return changes


def _estimator(sheet: Sheet, setting: Setting) -> Rule:
    if setting.value in ("gspo", "cispo"):
        sheet.put("algorithm.advantage", {"name": "grpo"})
        return choose_loss(sheet, setting.value)
    name = "gae" if setting.value == "ppo" else setting.value
    if name in ("grpo", "gae", "reinforce_plus_plus", "reinforce_plus_plus_baseline"):
        return choose_estimator(sheet, name)
    return no_place("this estimator does not exist here (algorithm.advantage.name)")


def _of_kl(rule: Rule) -> Rule:
    return where("--use-kl-loss", rule, "there is no KL in the loss (--use-kl-loss)", default=False)


def _clip(sheet: Sheet, setting: Setting) -> Rule:
    name = sheet.at("algorithm.loss.name", "clip")
    sides = ["low"] if "--eps-clip-high" in sheet.settings else ["low", "high"]
    if not loss_takes(name, "clip_low"):
        return no_effect(f"the loss {name} does not use it")
    return {f"algorithm.loss.clip_{side}": setting.value for side in sides}


def _turns(sheet: Sheet, setting: Setting) -> Rule:
    environment = "tasks.train.0.options.environment"
    inner = "options.args.max_turns" if sheet.at(f"{environment}.name") == "slime" else "options.max_turns"
    return {"rollout.max_turns": setting.value, f"{environment}.{inner}": setting.value}


def _environment(sheet: Sheet, setting: Setting) -> Rule:
    if name := ENVIRONMENTS.get(str(setting.value)):
        return {"tasks.train.0.options.environment.name": name}
    options = {"path": setting.value, "args": {"max_turns": sheet.value("max_turns", 3)}}
    return {"tasks.train.0.options.environment": {"name": "slime", "options": options}}


def _held(place: str) -> Rule:
    def rule(sheet: Sheet, setting: Setting) -> Rule:
        held = sheet.at("tasks.evaluate") or "--eval-prompt-data" in sheet.settings
        return place if held else no_effect("nothing is held out (--eval-prompt-data)")

    return rule


SGLANG = no_place("the engine here is native, or vLLM with options of its own (docs/guides/engines.md)")
BY_TOKENS = no_place("batch.tokens_per_microbatch")
TABLE: dict[str, Any] = {
    "max_turns": _turns,
    "rollout_interaction_env_path": _environment,
    "SLIME_SCRIPT_MODEL_NAME": lambda sheet, setting: {
        "model.path": f"Qwen/{setting.value}" if str(setting.value).startswith("Qwen") else setting.value
    },
    "SLIME_SCRIPT_NUM_GPUS": CLUSTER,
    "SLIME_SCRIPT_*": no_place("how slime's example is launched; here: sensorium train RECIPE"),
    "--": {
        "hf-checkpoint": "model.path",
        "load": no_effect("weights come from model.path; a run goes on with --resume"),
        "ref-load": no_effect("the reference is the model before RL"),
        "save": "run_dir",
        "save-interval": "checkpoint.every",
        "prompt-data": lambda sheet, setting: {
            "tasks.train.0.source": rows_source(str(listed(setting.value)[0])),
            "tasks.train.0.options.path": str(listed(setting.value)[0]),
        },
        "eval-prompt-data": _held_out,
        "input-key": _column("prompt"),
        "label-key": _column("answer"),
        "eval-input-key": _column("prompt"),
        "eval-label-key": _column("answer"),
        "multimodal-keys": _media_columns,
        "apply-chat-template": no_effect("the model's template is always applied"),
        "apply-chat-template-kwargs": TEMPLATE,
        "rollout-shuffle": {"tasks.shuffle": True},
        "rm-type": _reward,
        "custom-rm-path": _own_reward,
        "eval-custom-rm-path": feature("held-out tasks are scored by the same reward terms"),
        "custom-generate-function-path": no_place(
            "several turns are an environment's here: geo3k, or slime's own (docs/guides/environments.md)"
        ),
        "custom-config-path": no_place("run sensorium migrate on this file, too: max_turns and the environment"),
        "num-rollout": lambda sheet, setting: {"steps": setting.value, "epochs": DROP},
        "num-epoch": lambda sheet, setting: (
            no_effect("--num-rollout gives the length of the run")
            if "--num-rollout" in sheet.settings
            else {"epochs": setting.value, "steps": DROP}
        ),
        "rollout-batch-size": "batch.prompts_per_step",
        "n-samples-per-prompt": "batch.group_size",
        "global-batch-size": lambda sheet, setting: divide_batch(sheet, setting.value),
        "num-steps-per-rollout": "batch.updates_per_epoch",
        "over-sampling-batch-size": lambda sheet, setting: {
            "selection.oversample": setting.value / sheet.at("batch.prompts_per_step", 1)
        },
        "dynamic-sampling-filter-path": {"selection.dynamic": True},
        "partial-rollout": feature("schedule: asynchronous plays across updates"),
        "rollout-max-response-len": _response,
        "rollout-max-context-len": "rollout.max_context_tokens",
        "rollout-max-prompt-len": no_place("rollout.max_context_tokens bounds prompt and response together"),
        "rollout-temperature": _temperature,
        "rollout-top-p": "rollout.top_p",
        "rollout-top-k": lambda sheet, setting: {"rollout.top_k": max(0, setting.value)},
        "rollout-stop": lambda sheet, setting: {"rollout.stop": listed(setting.value)},
        "rollout-seed seed": "seed",
        "eval-interval": _held("evaluation.every"),
        "n-samples-per-eval-prompt": _held("evaluation.samples"),
        "eval-temperature": _held("evaluation.temperature"),
        "eval-max-response-len": _held("evaluation.max_new_tokens"),
        "eval-max-context-len": _held("evaluation.max_context_tokens"),
        "eval-max-prompt-len": no_place("evaluation.max_context_tokens bounds prompt and response together"),
        "eval-top-[kp]": no_place(
            "held-out tasks are sampled with the rollout's top_p and top_k; evaluation.temperature=0 is greedy"
        ),
        "skip-eval-before-train": {"evaluation.at_start": False},
        "advantage-estimator": _estimator,
        "use-kl-loss": _of_kl({"algorithm.kl.place": "loss"}),
        "kl-loss-coef": _of_kl(lambda sheet, setting: {"algorithm.kl.coef": float(setting.value)}),
        "kl-loss-type": _of_kl(chosen("algorithm.kl.estimator", KL, "algorithm.kl.estimator is k1, abs, k2 or k3")),
        "kl-coef": switch(
            lambda sheet, setting: {"algorithm.kl.place": "reward", "algorithm.kl.coef": float(setting.value)},
            "no KL in the reward",
        ),
        "entropy-coef": lambda sheet, setting: {"algorithm.loss.entropy_coef": float(setting.value)},
        "eps-clip": _clip,
        "eps-clip-high": of_loss("clip_high"),
        "eps-clip-c": of_loss("dual_clip"),
        "gamma": "algorithm.advantage.gamma",
        "lambd": "algorithm.advantage.lam",
        "calculate-per-token-loss": lambda sheet, setting: aggregate(
            sheet, "token_mean" if setting.value else "sequence_mean_token_mean"
        ),
        "disable-grpo-std-normalization": {"algorithm.advantage.std": False},
        "use-tis": {"algorithm.correction.weights": "token"},
        "tis-clip": where(
            "--use-tis", "algorithm.correction.high", "there are no importance weights (--use-tis)", default=False
        ),
        "optimizer": lambda sheet, setting: ADAMW if setting.value == "adam" else no_place(ADAMW.text),
        "lr": "optimizer.lr",
        "min-lr": no_effect("the rate does not fall; with a schedule: optimizer.final_lr_share"),
        "lr-decay-style": SCHEDULE,
        "lr-warmup-iters": "optimizer.warmup_steps",
        "weight-decay": "optimizer.weight_decay",
        "adam-beta[12]": beta(("--adam-beta1", "--adam-beta2")),
        "adam-eps": "optimizer.eps",
        "clip-grad": "optimizer.clip_norm",
        "recompute-granularity": lambda sheet, setting: {
            "model.gradient_checkpointing": "selective" if setting.value == "selective" else True
        },
        "max-tokens-per-gpu": "batch.tokens_per_microbatch",
        "use-dynamic-batch-size balance-data log-probs-max-tokens-per-gpu": no_effect("micro-batches are packed by tokens"),
        "micro-batch-size ref-micro-batch-size log-probs-chunk-size": BY_TOKENS,
        "recompute-method recompute-num-layers recompute-modules recompute-loss-function": no_place(
            "model.gradient_checkpointing: true recomputes every layer, selective the MLPs"
        ),
        "use-wandb": lambda sheet, setting: loggers(sheet, ["wandb"]),
        "wandb-project": "logging.project",
        "wandb-group": run_name,
        "wandb-key": no_place("wandb reads WANDB_API_KEY; a recipe never holds a key"),
        "disable-wandb-random-suffix wandb-always-use-train-step wandb-team wandb-host wandb-dir wandb-mode"
        " wandb-run-id": no_place("wandb reads its own environment variables"),
        "use-tensorboard": lambda sheet, setting: loggers(sheet, ["tensorboard"]),
        "tb-project-name tb-experiment-name": no_effect("TensorBoard's files are in the run directory"),
        "sglang-* router-* use-slime-router rollout-health-check-*": SGLANG,
        "use-fault-tolerance": no_effect("a worker that fails is replaced (cluster.restarts)"),
        "rollout-num-gpus* actor-num-nodes actor-num-gpus-per-node critic-num-nodes critic-num-gpus-per-node"
        " num-gpus-per-node colocate offload offload-train offload-rollout train-backend tensor-model-parallel-size"
        " sequence-parallel pipeline-model-parallel-size context-parallel-size expert-model-parallel-size"
        " expert-tensor-parallel-size decoder-last-pipeline-num-layers num-layers-per-virtual-pipeline-stage"
        " update-weight-buffer-size distributed-backend distributed-timeout-minutes train-memory-margin-bytes fsdp-*"
        " gradient-checkpointing optimizer-cpu-offload overlap-cpu-optimizer-d2h-h2d use-precision-aware-optimizer"
        " use-distributed-optimizer moe-token-dispatcher-type moe-enable-deepep moe-flex-dispatcher-backend"
        " megatron-to-hf-mode model-name": CLUSTER,
        "attention-dropout hidden-dropout accumulate-allreduce-grads-in-fp32 attention-softmax-in-fp32"
        " attention-backend grad-reduce-in-bf16 bf16 fp16 transformer-impl"
        " no-check-for-nan-in-loss-and-grad": no_effect("there is no dropout here, and sums are taken in float32"),
        "swiglu num-layers hidden-size ffn-hidden-size num-attention-heads use-rotary-position-embeddings"
        " disable-bias-linear normalization norm-epsilon rotary-base group-query-attention num-query-groups"
        " kv-channels qk-layernorm vocab-size untie-embeddings-and-output-weights add-qkv-bias rotary-percent"
        " max-position-embeddings position-embedding-type seq-length make-vocab-size-divisible-by moe-* num-experts"
        " spec attention-output-gate apply-layernorm-1p rope-* mtp-* q-lora-rank kv-lora-rank qk-head-dim"
        " qk-pos-emb-head-dim v-head-dim multi-latent-attention no-rope-fusion use-rope-scaling"
        " rotary-scaling-factor mscale mscale-all-dim": no_effect("the checkpoint's config.json has the model's shape"),
        "debug-rollout-only debug-train-only save-debug-rollout-data load-debug-rollout-data": feature(
            "episodes are always written; sensorium play and validate need no model"
        ),
        "loss-type custom-loss-function-path rollout-function-path eval-function-path data-source-path": feature(
            "the parts that can be your own are sources, environments, rewards, planners and losses"
        ),
        "metadata-key tool-key group-rm reward-key eval-reward-key balance-by-flops start-rollout-id ci-test"
        " ci-disable-kl-checker": feature("rows have prompt, media and answer here (docs/guides/tasks.md)"),
        "deterministic-mode use-rollout-routing-replay use-routing-replay use-rollout-logprobs"
        " get-mismatch-metrics": no_effect(
            "the dry run says whether a run repeats; log-probs of engine and learner are always compared"
        ),
        "no-save-optim no-load-optim no-load-rng finetune rotary-interleaved async-save ckpt-format": STORED,
    },
}
RULES = table(TABLE)
