"""A recipe on so many GPUs of a kind: memory on each, the parts of a step, tokens a second and cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from pydantic import BaseModel

from sensorium.forecast.costs import (
    Costs,
    GpuMemory,
    Kind,
    Push,
    StepWork,
    assumed,
    calibration,
    costs_of,
    engine_memory,
    fitting_memory,
    kind_named,
    machine,
    planned_shape,
    rank_memory,
    with_checkpointing,
    work_of,
)
from sensorium.forecast.simulator import Deployment, ScheduleName, SimulatedRun, simulate
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.memory_estimate import BYTES, engine_rows, trained_parameters
from sensorium.recipe.model_shape import ModelShape
from sensorium.recipe.plan import GIB, SHARE, lowering_settings, shape_for_tasks, vllm_share
from sensorium.recipe.schema import Recipe, ScheduleSection
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

Note = tuple[str, str, str]
# Shares of the GPUs that are tried for engines if their number is not given.
ENGINE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)


@dataclass(frozen=True)
class Asked:
    """The options of a plan. None or 0: as the recipe says, or the planner chooses."""

    gpus: int
    kind: str
    engines: int | None = None
    schedule: ScheduleName | None = None
    staleness: int | None = None
    prompt_tokens: int = 0
    response_tokens: float = 0.0
    scoring_s: float = 0.0
    price: float | None = None
    network: float | None = None
    shape: str = ""


def _notes_of(
    recipe: Recipe, kind: Kind, plan: Deployment, work: StepWork, asked: Asked, *, experts: bool, unread: str
) -> Iterator[Note]:
    """Each figure, how it is known (measured, scaled, computed, assumed, not run), and a sentence on it."""
    if kind.measured:
        words = "on one H200 with 3 B and 7 B shapes in bfloat16; other sizes by operations and bytes"
        yield "rollout, update", "measured", words
    else:
        words = f"from one H200 by the peaks of {kind.title}, at the shares of peaks that were measured there"
        yield "rollout, update", "scaled", words
    if recipe.model.dtype == "float32":
        yield "model.dtype", "not run", "float32 was not measured on a GPU; seconds are those of bfloat16 arithmetic"
    if experts:
        words = "one step of Qwen3-VL-30B-A3B's shape with adapters on one H200; updates of other batches by operations"
        yield "experts", "measured", words
    if recipe.rollout.max_turns > 1:
        yield "turns", "computed", "an episode of several turns counts as one response; environments' own time is not in it"
    if work.observed:
        words = f"algorithm.loss_mask is false: all {work.observed:,} tokens of a prompt count as trained in each episode"
        yield "observations", "assumed", words
    if not asked.prompt_tokens:
        yield "prompts", "assumed", _assumed_prompts(work)
    if unread:
        yield "vision tower", "assumed", _assumed_media(unread)
    if not asked.response_tokens:
        yield "responses", "assumed", f"each fills its budget ({work.response:g} tokens); --response-tokens says the mean"
    if plan.learners == 1:
        words = (
            "the dry run's forecast: on one H200 it was 1 to 15 % above what steps of W1, W2 and W3 took, and 6 and 8 % "
            "below W2 with recomputation (docs/internals/performance.md)"
        )
        yield "memory", "measured", words
    else:
        yield "the driver", "computed", "it holds the model too, on a GPU beside these where Ray places the ranks"
        yield "memory of ranks", "computed", "by how FSDP2 spreads the model; not measured on GPUs"
        words = "as one GPU's; on CUDA ranks run stock layers, which are slower than the fused ones measured"
        yield "update on ranks", "computed", words
        words = f"bytes over {assumed('link_share'):g} of the published link rates, beside the computing; not measured"
        yield "gather, reduce", "computed", words
    if plan.sequence_parallel > 1:
        shared = f"{plan.sequence_parallel} ranks wait for each other's keys and values"
        yield "shared tokens", "computed", f"{shared}: bytes over these rates; not measured"
    if plan.pushed_bytes:
        yield "push", "computed", _pushed(plan)
    if plan.engines > 1:
        few = plan.engines * plan.engine_gpus <= kind.gpus_per_machine
        beyond = "" if few else "; on several machines Ray places them (cluster.placement=ray), which nobody has run either"
        yield "several engines", "not run", f"not measured on several GPUs{beyond}"
    yield from _idle(recipe, plan)
    if plan.schedule not in ScheduleSection.model_json_schema()["properties"]["name"]["enum"]:
        yield "schedule", "not run", f"'{plan.schedule}' is simulated: the recipe does not know it yet"
    if recipe.rollout.engine.name == "vllm":
        words = (
            f"{assumed('vllm_times'):g} times the native engine's time, and {assumed('vllm_check_s'):g} s for the check "
            "after a push, as vLLM 0.25.1 took on W1 (docs/guides/scale_out.md)"
        )
        yield "vLLM", "scaled", words
    if not plan.scoring_s:
        yield "scoring", "assumed", "no time at all; --scoring-s says what a judge or reward service takes"
    left_out = "warm start, evaluations, checkpoints, the start of a run and its first steps, which compile"
    yield "not in it", "computed", left_out


def _assumed_prompts(work: StepWork) -> str:
    return (
        f"every prompt fills its context ({work.prompt:,} tokens): `sensorium validate RECIPE` measures prompts, "
        "--prompt-tokens says how long the longest is"
    )


def _assumed_media(unread: str) -> str:
    return f"the tasks cannot be read here, so prompts are assumed to show pictures ({unread.rstrip('.')})"


def _pushed(plan: Deployment) -> str:
    if plan.push == "broadcast":
        share = assumed("link_share")
        each = "" if plan.engines == 1 else f", to each of {plan.engines} engines in turn"
        return f"weights by broadcast from one GPU{each}: bytes over {share:g} of the published link rates; not measured"
    if plan.push == "ipc":
        return f"weights through the GPU's memory at {assumed('ipc_bytes') / 1e9:.3g} GB/s, as on W1"
    rate = calibration()["gpu"]["push_bytes"]["value"] / 1e9
    return f"weights through a file at {rate:.3g} GB/s, by rates of an Arm host; not measured on GPUs"


def _idle(recipe: Recipe, plan: Deployment) -> Iterator[Note]:
    batch = recipe.batch
    groups = batch.prompts_per_step // batch.updates_per_epoch
    ranks = plan.learners // plan.sequence_parallel
    if ranks > groups:
        each = "a group is one rank's" if plan.sequence_parallel == 1 else "a group is one set of ranks'"
        yield "idle ranks", "computed", f"an update has {groups} groups, and {each}: {ranks - groups} of {ranks} do nothing"
    if plan.engines > batch.prompts_per_step and plan.schedule != "asynchronous":
        idle = f"{plan.engines - batch.prompts_per_step} of {plan.engines} do nothing"
        words = f"a step has {batch.prompts_per_step} groups, and a group is one engine's: {idle}"
        yield "idle engines", "computed", words


@dataclass(frozen=True)
class Saving:
    """Settings by dotted key, and a rank's memory with them."""

    settings: dict[str, Any]
    memory: GpuMemory

    def __str__(self) -> str:
        words = " ".join(f"{key}={str(value).lower()}" for key, value in self.settings.items())
        return f"{words} ({self.memory.total / GIB:.1f} GiB)"


def _ways_out(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> str:
    saving = _least_settings(recipe, shape, kind, ranks, samples=samples)
    fits = saving.memory.fits(kind)
    fitting = [str(saving)] if fits else []
    counts = [2**power for power in range(1, 13) if 2**power > ranks]
    for words, changed in (("", recipe), (", with model.gradient_checkpointing=true", with_checkpointing(recipe, True))):
        memories = ((count, rank_memory(changed, shape, kind, count, samples=False)) for count in counts)
        if found := next(((count, memory) for count, memory in memories if memory.fits(kind)), None):
            each = f"({found[1].total / GIB:.1f} GiB each)"
            fitting.append(f"{found[0]} ranks beside engines on GPUs of their own{words} {each}")
            break
    nearest = "" if fits or not saving.settings else f"Settings bring it down to {saving}. "
    return f"{nearest}What would fit: {'; '.join(fitting)}." if fitting else f"{nearest}It needs a larger GPU."


def _least_settings(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> Saving:
    """The first settings with which a rank fits; if none suffice, those with which it holds least.

    Settings are added one by one until the forecast fits, then each is taken back as far as it still fits. For example
    caprl_image on an H100, of which 71.2 GiB may be filled: 189.6 GiB; with model.gradient_checkpointing=auto 156.9;
    batch.tokens_per_microbatch=8192 150.6; max_rows=256, …, 32 110.1, …, 74.7; optimizer.moments=bfloat16 64.9, which
    fits. tokens_per_microbatch taken back 67.0, which fits too; the others do not.
    """

    def saving(settings: dict[str, Any]) -> Saving:
        changed = recipe
        for key, value in settings.items():
            changed = _with_setting(changed, key, value)
        return Saving(settings, fitting_memory(changed, shape, kind, ranks, samples=samples)[1])

    ladder = lowering_settings(recipe, ranks, samples=samples)
    found = saving({})
    for key, value in ((key, value) for key, values in ladder.items() for value in values):
        found = saving(found.settings | {key: value})
        if found.memory.fits(kind):
            break
    limit = max(round(SHARE * kind.memory), found.memory.total)
    for key in list(found.settings):
        others = {other: value for other, value in found.settings.items() if other != key}
        weaker = (saving(others), *(saving(found.settings | {key: value}) for value in ladder[key]))
        found = next(one for one in weaker if one.memory.total <= limit)
    return found


def _with_setting(section: Any, key: str, value: Any) -> Any:
    name, _, inner = key.partition(".")
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: _with_setting(getattr(section, name), inner, value) if inner else value})
    return section | {name: _with_setting(section.get(name), inner, value) if inner else value}


@dataclass(frozen=True)
class Forecast:
    """``rank`` and ``engine`` are the memory of one GPU each; ``hours`` and ``cost`` are of the whole run.

    ``recompute`` is the recipe's setting, or what its ``auto`` chose (``by_auto``). ``notes`` are those of ``notes_of``.
    """

    recipe: str
    kind: Kind
    model: str
    parameters: int
    work: StepWork
    deployment: Deployment
    recompute: bool | str
    by_auto: bool
    rank: GpuMemory
    engine: GpuMemory | None
    run: SimulatedRun
    hours: float | None
    cost: float | None
    notes: tuple[tuple[str, str, str], ...]


def forecast(recipe: Recipe, asked: Asked, tasks: Sequence[Task] = (), unread: str = "") -> Forecast:
    """Plan a recipe; raises RecipeError, with the ways out, if it cannot fit.

    ``tasks`` are a few of the recipe's, by which towers compute anything; ``unread`` is why there are none.
    """
    if asked.gpus < 1:
        raise RecipeError(f"--gpus {asked.gpus}: a plan needs at least one.")
    kind = kind_named(asked.kind)
    shape, source = planned_shape(recipe.model, asked.shape)
    shape = shape_for_tasks(shape, tasks)
    if asked.prompt_tokens:
        rollout = recipe.rollout
        if asked.prompt_tokens >= rollout.max_context_tokens:
            raise RecipeError(
                f"--prompt-tokens {asked.prompt_tokens} leaves no room to write in a context of "
                f"{rollout.max_context_tokens} (rollout.max_context_tokens)."
            )
        context = min(rollout.max_context_tokens, asked.prompt_tokens + rollout.max_new_tokens * rollout.max_turns)
        recipe = recipe.model_copy(update={"rollout": rollout.model_copy(update={"max_context_tokens": context})})
    work = work_of(recipe, asked.prompt_tokens, asked.response_tokens)
    base = Deployment(
        schedule=asked.schedule or recipe.schedule.name,
        staleness=recipe.schedule.max_staleness if asked.staleness is None else asked.staleness,
        scoring_s=asked.scoring_s,
        max_rows=min(recipe.rollout.concurrency or 10**9, engine_rows(recipe)),
        engine_gpus=int(recipe.rollout.engine.options.get("tensor_parallel", 1)),
        sequence_parallel=recipe.cluster.sequence_parallel,
    )
    planned, refusal = [], None
    for engines in _engine_counts(asked, base):
        learners = asked.gpus - engines * base.engine_gpus
        deployment = replace(base, engines=engines, learners=learners, apart=True) if engines else base
        try:
            planned.append(_planned(recipe, shape, kind, work, deployment, asked, unread))
        except RecipeError as error:
            refusal = refusal or error
    if not planned:
        assert refusal is not None
        raise refusal
    by_auto = recipe.model.gradient_checkpointing == "auto"
    deployment, recipe, rank, engine, run = min(planned, key=lambda found: found[-1].step_s)
    hours = None if recipe.counts_rows else recipe.steps * run.step_s / 3600
    return Forecast(
        recipe=recipe.name,
        kind=kind,
        model=source,
        parameters=shape.total,
        work=work,
        deployment=deployment,
        recompute=recipe.model.gradient_checkpointing,
        by_auto=by_auto,
        rank=rank,
        engine=engine,
        run=run,
        hours=hours,
        cost=None if asked.price is None or hours is None else asked.price * asked.gpus * hours,
        notes=tuple(_notes_of(recipe, kind, deployment, work, asked, experts="moe" in shape.family, unread=unread)),
    )


def _engine_counts(asked: Asked, base: Deployment) -> list[int]:
    """How many engines to try; 0 if one GPU does it all. Other GPUs must form groups of ranks that share tokens."""
    each, sharing = base.engine_gpus, base.sequence_parallel
    most = (asked.gpus - 1) // each
    if asked.gpus == 1 and asked.engines:
        raise RecipeError("--engines is for several GPUs: a single one samples and learns in turn.")
    if asked.gpus == 1:
        found = [0]
    elif asked.engines is not None:
        if not 0 < asked.engines * each < asked.gpus:
            raise RecipeError(
                f"--engines {asked.engines} of {each} GPU(s) each leave no GPU of {asked.gpus} to learn, or none to "
                f"sample: name 1 to {max(1, most)}."
            )
        found = [asked.engines]
    elif not most:
        raise RecipeError(f"an engine takes {each} GPUs (tensor_parallel), and of {asked.gpus} none is left to learn.")
    else:
        found = sorted({min(most, max(1, round(share * asked.gpus / each))) for share in ENGINE_SHARES})
    fitting = [engines for engines in found if (asked.gpus - engines * each) % sharing == 0]
    if not fitting and asked.engines is None and sharing > 1:
        fitting = [n for n in range(1, most + 1) if (asked.gpus - n * each) % sharing == 0]
    if not fitting:
        raise RecipeError(
            f"cluster.sequence_parallel={sharing}: of {asked.gpus} GPU(s) the engines leave no multiple of {sharing} to "
            "learn. Plan with other --gpus or --engines, or leave it out."
        )
    return fitting


Planned = tuple[Deployment, Recipe, GpuMemory, GpuMemory | None, SimulatedRun]


def _planned(
    recipe: Recipe, shape: ModelShape, kind: Kind, work: StepWork, deployment: Deployment, asked: Asked, unread: str
) -> Planned:
    assumption = "" if asked.prompt_tokens else f" Here {_assumed_prompts(work)}."
    assumption += f" And {_assumed_media(unread)}." if unread else ""
    recipe, rank = _fitting_rank(recipe, shape, kind, deployment, assumption)
    engine = None
    if deployment.apart:
        rollout, engine = recipe.rollout, engine_memory(recipe, shape, kind, deployment.engines, deployment.engine_gpus)
        fewer = (
            None
            if engine.fits(kind) or "max_rows" in rollout.engine.options
            else _with_fewer_rows(recipe, shape, kind, deployment)
        )
        if fewer is not None:  # the recipe leaves the number to us
            recipe, engine = fewer, engine_memory(fewer, shape, kind, deployment.engines, deployment.engine_gpus)
            deployment = replace(deployment, max_rows=min(deployment.max_rows, engine_rows(recipe)))
        _refuse_large_engine(recipe, shape, kind, deployment, engine)
    size = BYTES[recipe.model.dtype]
    vllm = recipe.rollout.engine.name == "vllm"
    pushed = trained_parameters(recipe, shape) * size if vllm or deployment.apart or deployment.learners > 1 else 0
    check_s = assumed("vllm_check_s") if vllm else 0.0
    deployment = replace(deployment, pushed_bytes=pushed, push=_push(recipe, deployment), check_s=check_s)
    way = recipe.model.gradient_checkpointing
    assert way != "auto", "decided by fitting_memory"
    algorithm, batch = recipe.algorithm, recipe.batch
    passes = float(algorithm.kl.coef > 0) + float(batch.updates_per_epoch * batch.epochs_per_step > 1)
    if estimator_traits(algorithm.advantage.name).critic and algorithm.critic.trunk == "own":
        passes += 1 + 3 * batch.epochs_per_step  # its values, and its training: three times a forward pass
    forwards, lora = passes / batch.epochs_per_step, bool(recipe.model.lora.rank)
    model = costs_of(shape, number_bytes=size, recompute=way, frozen=recipe.model.freeze, lora=lora, forwards=forwards)
    host = machine(kind, network=None if asked.network is None else asked.network * 1e9)
    sampling = Costs(model, host, deployment.engine_gpus, assumed("vllm_times") if vllm else 1.0)
    steps = max(3, min(8, ceil(20_000 / work.episodes)))  # few of many episodes are as good as many of few
    run = simulate(sampling, Costs(model, host), work, deployment, steps=steps)
    return deployment, recipe, rank, engine, run


def _push(recipe: Recipe, deployment: Deployment) -> Push:
    """By file; to vLLM on its own GPUs by broadcast, on the learner's GPU through its memory (unless the recipe says file).

    Adapters are always pushed by file.
    """
    engine = recipe.rollout.engine
    asked = engine.options.get("push", "auto") if engine.name == "vllm" else "file"
    if asked == "ipc" and deployment.apart:
        raise RecipeError(
            "rollout.engine.options.push is ipc, which shares the memory of one GPU, and here engines have GPUs of their "
            "own: use broadcast, file or auto."
        )
    if asked == "file" or recipe.model.lora.rank:
        return "file"
    if deployment.apart:
        return "broadcast"
    return "ipc" if asked in ("auto", "ipc") and deployment.learners == 1 else "file"


def _fitting_rank(
    recipe: Recipe, shape: ModelShape, kind: Kind, plan: Deployment, assumption: str
) -> tuple[Recipe, GpuMemory]:
    decided, memory = fitting_memory(recipe, shape, kind, plan.learners, samples=not plan.apart)
    if memory.fits(kind):
        return decided, memory
    uses = sorted(memory.uses.items(), key=lambda one: -one[1])[:4]
    largest = ", ".join(f"{use} {amount / GIB:.0f}" for use, amount in uses)
    who = "the GPU" if plan.learners == 1 and not plan.apart else f"each of {plan.learners} learner rank(s)"
    raise RecipeError(
        f"{recipe.name} does not fit: {who} would hold {memory.total / GIB:.1f} GiB ({largest} GiB), and 90 % of an "
        f"{kind.title} are {SHARE * kind.memory / GIB:.1f} GiB. "
        + _ways_out(decided, shape, kind, plan.learners, samples=not plan.apart)
        + assumption
    )


def _refuse_large_engine(recipe: Recipe, shape: ModelShape, kind: Kind, plan: Deployment, memory: GpuMemory) -> None:
    if memory.fits(kind) and memory.uses.get("keys and values", 0) > 0:
        return
    held = memory.uses["weights"] / GIB
    if held > 0.9 * kind.memory / GIB:
        raise RecipeError(
            f"an engine of {recipe.name} would hold {held:.0f} GiB of weights on each GPU, and an {kind.title} has "
            f"{kind.memory / GIB:.0f}: share the model among GPUs (rollout.engine.name=vllm "
            f"rollout.engine.options.tensor_parallel={2 * plan.engine_gpus})."
        )
    if recipe.rollout.engine.name == "vllm":
        raise RecipeError(
            f"vLLM may take {vllm_share(recipe)} of the GPU, and the weights alone are "
            f"{held:.0f} GiB: set rollout.engine.options.gpu_share=0.9 where engines have GPUs of their own."
        )
    fewer = _with_fewer_rows(recipe, shape, kind, plan)
    raise RecipeError(
        f"an engine of {recipe.name} would hold {memory.total / GIB:.0f} GiB on each GPU, of it {held:.0f} of weights and "
        "the rest keys and values of all responses it writes at once: lower rollout.engine.options.max_rows "
        f"{'' if fewer is None else f'({engine_rows(fewer)} fits) '}or rollout.concurrency, or plan with more --engines."
    )


def _with_fewer_rows(recipe: Recipe, shape: ModelShape, kind: Kind, plan: Deployment) -> Recipe | None:
    """The recipe with the most of the halves of its rows that fit; None where rows are not what takes the memory."""
    rollout, rows = recipe.rollout, engine_rows(recipe)
    while (rows := rows // 2) > 0 and rollout.engine.name != "vllm":
        engine = rollout.engine.model_copy(update={"options": {**rollout.engine.options, "max_rows": rows}})
        fewer = recipe.model_copy(update={"rollout": rollout.model_copy(update={"engine": engine})})
        if engine_memory(fewer, shape, kind, plan.engines, plan.engine_gpus).fits(kind):
            return fewer
    return None
