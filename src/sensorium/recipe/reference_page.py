"""What every key of a recipe means, in a line; docs/reference/recipe.md is made of these and of the schema.

Keys are ``Section.field``. A field whose ``Field`` has a description of its own in the schema is not repeated here; a test
holds that every field has exactly one of the two.
"""

from collections.abc import Iterator
from pathlib import Path
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin

from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from sensorium.recipe.schema import NO_LIMIT, Recipe, Section

DESCRIPTIONS = {
    "LoraSection.rank": "rank of the adapters; 0 trains the weights themselves",
    "LoraSection.alpha": "the adapters' output is scaled by alpha / rank",
    "LoraSection.groups": "parts of the model that get adapters: vision, audio, projector, language, head",
    "ModelSection.family": "which adapter reads the checkpoint; auto: by its config.json",
    "ModelSection.dtype": "what it computes in; with bfloat16, updates move weights as float32 masters would",
    "ModelSection.device": "auto (the GPU where there is one), cpu, cuda or cuda:N",
    "ModelSection.freeze": "parts that do not learn: vision, audio, projector, language, head. Of a tower that is frozen "
    "with its projector, features are computed once and kept",
    "ModelSection.gradient_checkpointing": "recompute activations: slower, less memory; selective: on CUDA those of MLPs "
    "only, elsewhere as true; auto: on CUDA as little as the forecast of memory allows, elsewhere none. Towers on CUDA: "
    "always",
    "ModelSection.precision": "fast: engine and learner each sum in the order that is fastest for them; matched: in one "
    "order: they agree on log-probs bit for bit, at a cost (docs/internals/exactness.md; on a CPU: tiny models only)",
    "ModelSection.lora": "low-rank adapters",
    "SourceSection.source": "a registered source (jsonl, parquet, hub, environments, shapes, …) or your own, module:Name",
    "SourceSection.weight": "its share of the mixture, relative to the other sources'",
    "SourceSection.options": "the source's own options; docs/guides/tasks.md lists them",
    "TasksSection.train": "sources to train on; several are mixed by weight",
    "TasksSection.evaluate": "sources of held-out tasks, with the keys of tasks.train; each is played once an evaluation",
    "TasksSection.on_bad_row": "a row that cannot be read stops the run, or is skipped and counted",
    "TasksSection.on_long_prompt": "a prompt that does not fit the context stops the run, or is skipped and counted",
    "TasksSection.shuffle": "pass through each source in a new order every epoch",
    "TasksSection.planner": "what decides which task comes next",
    "PlannerSection.name": "mixture, success_curriculum, causal_history, or your own, module:Name; docs/guides/tasks.md",
    "PlannerSection.options": "the planner's own options",
    "MediaSection.memory_gib": "memory for decoded (a quarter) and preprocessed media (the rest)",
    "BatchSection.prompts_per_step": "tasks a step trains on; one group of episodes for each",
    "BatchSection.group_size": "episodes of each task",
    "BatchSection.epochs_per_step": "passes over a step's episodes",
    "BatchSection.updates_per_epoch": "optimizer updates in a pass; the groups are shared out among them",
    "BatchSection.tokens_per_microbatch": "tokens computed at once; memory, not results, depends on it",
    "RolloutSection.engine": "what samples, or its name alone",
    "EngineSection.name": "native, process (weights of its own in a child process), vllm, or your own, module:Name",
    "EngineSection.options": "of that engine, such as max_rows (responses written at once) of native",
    "RolloutSection.schedule": "lockstep repeats bit for bit; eager does not wait for slow environments, and gives it up; "
    "auto: lockstep, but eager with vLLM, several engines or `schedule: asynchronous`, which cannot repeat",
    "RolloutSection.temperature": "of the policy: the same in sampling and in training",
    "RolloutSection.top_p": "sample from the most likely tokens of this total probability only; 1: from all",
    "RolloutSection.top_k": "sample from so many most likely tokens only; 0: from all",
    "RolloutSection.max_turns": "turns of an episode at most; 1 for questions",
    "RolloutSection.stop": "texts that end a response; they stay part of it",
    "RolloutSection.ignore_stop_tokens": "never sample a stop token, so that every response runs to its budget",
    "ScheduleSection.name": "synchronous; one_step_off: a step is played before the update of the one before it; "
    "asynchronous: groups are played all the time",
    "ScheduleSection.max_staleness": "of asynchronous: steps that a group may be older than the weights that train on it",
    "TermSection.name": "a registered term, or your own class or function, module:Name",
    "TermSection.weight": "what its score counts in the reward; 0: measured only",
    "TermSection.options": "the term's own options; docs/reference/rewards.md lists them",
    "RewardsSection.terms": "the terms; the reward is their weighted sum",
    "RewardsSection.deadline_s": "for one call of a term that is not instant",
    "RewardsSection.retries": "how often a term that failed is asked again",
    "RewardsSection.retry_wait_s": "pause before it is asked again",
    "RewardsSection.on_missing": "an episode without a score is left out alone, or with its whole group",
    "OptimizerSection.lr": "learning rate after warm-up",
    "OptimizerSection.group_lr": "other rates for parts of the model, as in {vision: 1e-6}",
    "OptimizerSection.betas": "AdamW's decay of the two moments",
    "OptimizerSection.eps": "AdamW's epsilon",
    "OptimizerSection.weight_decay": "AdamW's decoupled decay, of matrices; norms and biases have none",
    "OptimizerSection.warmup_steps": "steps in which the rate grows from near 0",
    "OptimizerSection.schedule": "the rate after warm-up: as it is, or down to its final share at the last step",
    "OptimizerSection.final_lr_share": "share of the rate that linear and cosine end at",
    "OptimizerSection.clip_norm": "the gradient's norm is cut down to this",
    "OptimizerSection.moments": "how AdamW's moments are held; bfloat16 (rounded at random) takes half the memory, "
    "8-bit (codes of a logarithmic scale, at random) a quarter",
    "AdvantageSection.name": "the estimator, or your own function, module:Name; docs/reference/algorithms.md",
    "AdvantageSection.std": "divide by the group's standard deviation (false: Dr.GRPO)",
    "AdvantageSection.leave_one_out": "mean and deviation over the other members of the group",
    "AdvantageSection.post": "what is done to advantages afterwards; docs/reference/algorithms.md",
    "LossSection.name": "the loss, or your own function, module:Name; docs/reference/algorithms.md",
    "LossSection.tau_positive": "SAPO's temperature where the advantage is positive",
    "LossSection.tau_negative": "SAPO's temperature where it is negative",
    "LossSection.ratio_cap": "DPPO's largest weight of a token",
    "LossSection.cov_share": "share of the tokens that clip_cov and kl_cov treat apart",
    "LossSection.cov_low": "clip_cov's lower bound of the covariance",
    "LossSection.cov_high": "clip_cov's upper bound of the covariance",
    "LossSection.cov_kl_coef": "kl_cov's weight of the KL at those tokens",
    "LossSection.aggregation": "how tokens become one number; auto: as the loss's paper does",
    "LossSection.aggregation_constant": "the divisor of aggregation: constant",
    "LossSection.entropy_coef": "weight of an entropy bonus",
    "KLSection.coef": "weight; 0: no reference model is kept",
    "KLSection.estimator": "of the KL, token by token; docs/reference/algorithms.md",
    "KLSection.place": "added to the loss, or taken off the reward",
    "KLSection.control": "the coefficient stays, or is moved towards the target",
    "KLSection.target": "KL that adaptive control aims at",
    "KLSection.horizon": "episodes within which adaptive control acts",
    "CorrectionSection.weights": "importance weights old / engine, by token, sequence or geometric mean of one",
    "CorrectionSection.mode": "weights above high are cut down to it, or those outside [low, high] dropped",
    "CorrectionSection.low": "the band's lower edge",
    "CorrectionSection.high": "the cap, or the band's upper edge",
    "CorrectionSection.reject": "leave out sequences whose mean or largest mismatch is too high",
    "CorrectionSection.estimator": "of the mismatch, for reject",
    "CorrectionSection.reject_above": "what is too high",
    "CorrectionSection.engine_logprobs": "log-probs of the whole policy, or of what top-p and top-k left of it",
    "CriticSection.trunk": "a model of its own, or a head on the policy's",
    "CriticSection.path": "checkpoint an own trunk starts from; empty: as the policy when RL begins",
    "CriticSection.trunk_coef": "how much of the value loss a shared trunk sees",
    "CriticSection.warmup_steps": "first steps in which only the critic learns",
    "CriticSection.value_clip": "how far a value may move from its old one; empty: any",
    "CriticSection.freeze": "parts of the critic's trunk that do not learn",
    "CriticSection.optimizer": "the critic's optimizer",
    "AlgorithmSection.advantage": "from scores to advantages",
    "AlgorithmSection.loss": "from advantages to gradients",
    "AlgorithmSection.kl": "a pull back to where RL began",
    "AlgorithmSection.correction": "what is done where engine and learner disagree",
    "AlgorithmSection.critic": "the value model of the gae estimators",
    "SelectionSection.dynamic": "draw more tasks until enough groups have signal",
    "SelectionSection.max_rounds": "how often dynamic draws at most",
    "SelectionSection.variance_share": "train on this share of the groups, those whose rewards vary most",
    "SelectionSection.oversample": "play so many times the tasks, and stop when enough groups are complete",
    "WarmStartSection.steps": "supervised steps before RL; 0: none",
    "WarmStartSection.prompts_per_step": "demonstrations a step",
    "WarmStartSection.optimizer": "the warm start's own optimizer",
    "EvaluationSection.every": "steps between evaluations (of a warm start, only its end); 0: none while it trains",
    "EvaluationSection.at_start": "evaluate before the first step, too",
    "EvaluationSection.temperature": "of evaluation; 0: greedy",
    "EvaluationSection.samples": "attempts at each held-out task",
    "CheckpointSection.keep": "how many of the latest are kept; the best is kept besides",
    "LoggingSection.loggers": "tensorboard, wandb, or your own, module:Name",
    "LoggingSection.project": "the project's name for loggers that have projects",
    "Recipe.seed": "decides order, sampling and fresh weights",
    "Recipe.steps": "steps of RL; may be left out where epochs are given",
    "Recipe.epochs": "passes over the rows of tasks.train; with steps, the earlier end counts; 0: steps alone decide",
    "Recipe.model": "what is trained",
    "Recipe.tasks": "on what",
    "Recipe.media": "how pictures, videos and sounds are decoded and kept; docs/guides/media.md",
    "Recipe.batch": "how much a step is",
    "Recipe.selection": "which groups a step trains on",
    "Recipe.rollout": "how episodes are played",
    "Recipe.schedule": "when a step's episodes are played, or its name alone",
    "Recipe.rewards": "what is paid",
    "Recipe.judges": "models that judge, and where they are reached; docs/guides/judges.md",
    "Recipe.algorithm": "how it learns; docs/reference/algorithms.md",
    "Recipe.optimizer": "of RL",
    "Recipe.warm_start": "SFT before RL",
    "Recipe.evaluation": "held-out tasks while it trains",
    "Recipe.checkpoint": "what is saved",
    "Recipe.logging": "what is written down besides",
    "Recipe.cluster": "processes that learn, sample, play and score beside the driver; docs/guides/scale_out.md",
    "Recipe.health": "when a run that learns nothing stops, and whether the model looks; docs/reference/health.md",
}


HEAD = """# Every key of a recipe

Made from the schema by `make docs`; a test holds it up to date. A recipe is a YAML file. Every key can be set on the
command line as `key=value` with the dots you see here (`batch.group_size=16`; `tasks.train.0.weight=2` for an item of a
list), and in Python as `sn.train(recipe, batch={"group_size": 16})`. Unknown keys are refused with the nearest right one.
`sensorium train RECIPE --dry-run` prints a recipe with every default written out. Keys without a default must be given.
"""
WORDS = {str: "text", int: "whole number", float: "number", bool: "true or false", Path: "path", Any: "anything"}
MACHINE_WORD = 2**63 - 1
LIMITS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


def reference() -> str:
    """The page."""
    return HEAD + "\n" + "\n".join(_sections(Recipe, "", _places()))


def description(section: type[Section], name: str) -> str:
    """What a key means."""
    return section.model_fields[name].description or DESCRIPTIONS[f"{section.__name__}.{name}"]


def _places() -> dict[type[Section], str]:
    """Where each section has its table: at the place with the fewest dots."""
    found: dict[type[Section], str] = {Recipe: ""}
    layer = dict(found)
    while layer:
        below = {inner: place for section, prefix in layer.items() for inner, place, _ in _inside(section, prefix)}
        layer = {section: place for section, place in below.items() if section not in found}
        found |= layer
    return found


def _inside(section: type[Section], prefix: str) -> Iterator[tuple[type[Section], str, FieldInfo]]:
    """The sections inside one, with their places; for a list of sections the first that has the kind."""
    seen: set[type[Section]] = set()
    for name, field in section.model_fields.items():
        inner = _inner(field.annotation)
        if inner is not None and inner not in seen:
            seen.add(inner)
            yield inner, f"{prefix}{name}." + ("N." if get_origin(field.annotation) is tuple else ""), field


def _sections(section: type[Section], prefix: str, places: dict[type[Section], str]) -> Iterator[str]:
    """A section's table, then those of the sections inside it; one that has its table elsewhere is referred to."""
    yield f"## {prefix.rstrip('.') or 'The recipe'}\n"
    yield " ".join((section.__doc__ or "").split()).replace("``", "`") + "\n"
    yield "| key | type | default | |\n|---|---|---|---|"
    for name, field in section.model_fields.items():
        kind, default = _type(field), _default(field)
        yield f"| `{prefix}{name}` | {kind} | {default} | {description(section, name)} |"
    yield ""
    for inner, place, field in _inside(section, prefix):
        if places[inner] == place:
            yield from _sections(inner, place, places)
        else:
            yield from _again(inner, place, places[inner], field)


def _again(section: type[Section], place: str, first: str, field: FieldInfo) -> Iterator[str]:
    """A section that has its table elsewhere: only what differs."""
    made = field.default if isinstance(field.default, Section) else None
    plain = section() if made is not None else None
    changed = [] if made is None else [n for n in section.model_fields if getattr(made, n) != getattr(plain, n)]
    differs = "".join(f"; the default of `{place}{name}` is `{_show(getattr(made, name))}`" for name in changed)
    yield f"## {place.rstrip('.')}\n"
    yield f"The same keys as `{first.rstrip('.')}`{differs}.\n"


def _type(field: FieldInfo) -> str:
    found = [(sign, getattr(one, key)) for one in field.metadata for key, sign in LIMITS.items() if hasattr(one, key)]
    limits = [f"{sign} {_show(limit)}" for sign, limit in found if abs(limit) < MACHINE_WORD]
    return ", ".join([_words(field.annotation), *limits])


def _words(annotation: Any) -> str:
    origin, parts = get_origin(annotation), get_args(annotation)
    if annotation in WORDS:
        return WORDS[annotation]
    if origin is Literal:
        return " or ".join(f"`{str(part).lower() if isinstance(part, bool) else part}`" for part in parts)
    if origin in (Union, UnionType):
        return f"{_words(next(part for part in parts if part is not type(None)))}, or empty"
    if origin is tuple and Ellipsis not in parts:
        return f"{len(parts)} {_words(parts[0])}s"
    if origin is tuple:
        return "list of sections" if _inner(annotation) else f"list of {_words(parts[0])}s"
    return "mapping" if origin is dict else "section"


def _default(field: FieldInfo) -> str:
    if field.default is PydanticUndefined or field.default == NO_LIMIT:
        return "—"
    return "" if isinstance(field.default, Section) else f"`{_show(field.default)}`"


def _show(value: Any) -> str:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, tuple):
        return f"[{', '.join(_show(item) for item in value)}]"
    if isinstance(value, float):
        return f"{value:g}"
    return "empty" if value in (None, "") else str(value)


def _inner(annotation: Any) -> type[Section] | None:
    if isinstance(annotation, type) and issubclass(annotation, Section):
        return annotation
    return next((found for part in get_args(annotation) if (found := _inner(part))), None)


if __name__ == "__main__":
    print(reference(), end="")
