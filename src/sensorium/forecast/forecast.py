"""A recipe on so many GPUs of a kind: memory on each, the parts of a step, tokens a second and cost."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import ceil
from typing import Any

from pydantic import BaseModel

from sensorium.forecast.costs import Costs, Push, Recomputation, StepWork, costs_of, work_of
from sensorium.forecast.machine import Kind, assumed, calibration, kind_named, machine, planned_shape
from sensorium.forecast.memory import GpuMemory, engine_memory, fitting_memory, rank_memory, with_checkpointing
from sensorium.forecast.simulator import Deployment, ScheduleName, SimulatedRun, simulate
from sensorium.recipe.plan import (
    BYTES,
    GIB,
    SHARE,
    engine_rows,
    lowering_settings,
    shape_for_tasks,
    trained_parameters,
    vllm_share,
)
from sensorium.recipe.schema import Recipe, ScheduleSection
from sensorium.recipe.shape import ModelShape
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

Note = tuple[str, str, str]


def notes_of(
    recipe: Recipe,
    kind: Kind,
    plan: Deployment,
    work: StepWork,
    *,
    prompts_given: bool,
    responses_given: bool,
    experts: bool,
    unread: str,
) -> Iterator[Note]:
    """What, how it is known, and more of it."""
    if kind.measured:
        yield (
            "rollout, update",
            "measured",
            "on one H200 with 3 B and 7 B shapes in bfloat16; other sizes by operations and bytes",
        )
    else:
        yield (
            "rollout, update",
            "scaled",
            f"from one H200 by the peaks of {kind.title}, at the shares of peaks that were measured there",
        )
    if recipe.model.dtype == "float32":
        yield "model.dtype", "not run", "float32 was not measured on a GPU; seconds are those of bfloat16 arithmetic"
    if experts:
        yield (
            "experts",
            "not run",
            "a mixture of experts was not measured: an update counts the experts a token meets as dense",
        )
    if recipe.rollout.max_turns > 1:
        yield "turns", "computed", "an episode of several turns counts as one response; environments' own time is not in it"
    if work.observed:
        words = f"algorithm.loss_mask is false: all {work.observed:,} tokens of a prompt count as trained in each episode"
        yield "observations", "assumed", words
    if not prompts_given:
        yield "prompts", "assumed", assumed_prompts(work)
    if unread:
        yield "vision tower", "assumed", assumed_media(unread)
    if not responses_given:
        yield "responses", "assumed", f"each fills its budget ({work.response:g} tokens); --response-tokens says the mean"
    if plan.learners == 1:
        yield (
            "memory",
            "measured",
            "the dry run's forecast: on one H200 it was 1 to 15 % above what steps of W1, W2 and W3 took, and 6 and 8 % "
            "below W2 with recomputation (docs/internals/performance.md)",
        )
    else:
        yield "the driver", "computed", "it holds the model too, on a GPU beside these where Ray places the ranks"
        yield "memory of ranks", "computed", "by how FSDP2 spreads the model; not measured on GPUs"
        yield (
            "update on ranks",
            "computed",
            "as one GPU's; on CUDA ranks run stock layers, which are slower than the fused ones measured",
        )
        yield (
            "gather, reduce",
            "computed",
            f"bytes over {assumed('link_share'):g} of the published link rates, beside the computing; not measured",
        )
    if plan.sequence_parallel > 1:
        yield (
            "shared tokens",
            "computed",
            f"{plan.sequence_parallel} ranks wait for each other's keys and values: bytes over these rates; not measured",
        )
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
        yield (
            "vLLM",
            "scaled",
            f"{assumed('vllm_times'):g} times the native engine's time, and {assumed('vllm_check_s'):g} s for the check "
            "after a push, as vLLM 0.25.1 took on W1 (docs/guides/scale_out.md)",
        )
    if not plan.scoring_s:
        yield "scoring", "assumed", "no time at all; --scoring-s says what a judge or reward service takes"
    yield (
        "not in it",
        "computed",
        "warm start, evaluations, checkpoints, the start of a run and its first steps, which compile",
    )


def assumed_prompts(work: StepWork) -> str:
    """What is assumed of prompts, and how to say better."""
    return (
        f"every prompt fills its context ({work.prompt:,} tokens): `sensorium validate RECIPE` measures prompts, "
        "--prompt-tokens says how long the longest is"
    )


def assumed_media(unread: str) -> str:
    """What is assumed of tasks that cannot be read, and why they cannot."""
    return f"the tasks cannot be read here, so prompts are taken to show pictures ({unread.rstrip('.')})"


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
    """Engines and ranks that are more than the groups they share out: a group is sampled by one and learned by one."""
    batch = recipe.batch
    groups = batch.prompts_per_step // batch.updates_per_epoch
    ranks = plan.learners // plan.sequence_parallel
    if ranks > groups:
        each = "a group is one rank's" if plan.sequence_parallel == 1 else "a group is one set of ranks'"
        yield "idle ranks", "computed", f"an update has {groups} groups, and {each}: {ranks - groups} of {ranks} do nothing"
    if plan.engines > batch.prompts_per_step and plan.schedule != "asynchronous":
        idle, prompts = plan.engines - batch.prompts_per_step, batch.prompts_per_step
        yield (
            "idle engines",
            "computed",
            f"a step has {prompts} groups, and a group is one engine's: {idle} of {plan.engines} do nothing",
        )


# Settings are tried one after the other, each on top of those before, until the forecast fits. Then each is taken back
# as far as it still fits. caprl_image on an H100, 71.2 GiB of which may be filled: as it is, without recomputation
# 189.6 GiB + model.gradient_checkpointing=auto 156.9 + batch.tokens_per_microbatch=8192 150.6 +
# rollout.engine.options.max_rows=256, …, 32 110.1, 89.8, 79.7, 74.7 + optimizer.moments=bfloat16 64.9, which fits
# tokens_per_microbatch as it was 67.0, which fits too; anything else taken back does not


@dataclass(frozen=True)
class Saving:
    """Settings by dotted key, and a rank's memory with them."""

    settings: dict[str, Any]
    memory: GpuMemory

    def __str__(self) -> str:
        words = " ".join(f"{key}={str(value).lower()}" for key, value in self.settings.items())
        return f"{words} ({self.memory.total / GIB:.1f} GiB)"


def ways_out(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> str:
    """What to do where a rank does not fit, in a sentence or two."""
    saving = least_settings(recipe, shape, kind, ranks, samples=samples)
    fitting = [str(saving)] if saving.memory.fits(kind) else []
    fitting += more_ranks(recipe, shape, kind, ranks)
    nearest = "" if saving.memory.fits(kind) or not saving.settings else f"Settings bring it down to {saving}. "
    return f"{nearest}What would fit: {'; '.join(fitting)}." if fitting else f"{nearest}It needs a larger GPU."


def least_settings(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int, *, samples: bool) -> Saving:
    """The first settings with which a rank fits; where none are enough, those with which it holds least."""

    def saving(settings: dict[str, Any]) -> Saving:
        changed = recipe
        for key, value in settings.items():
            changed = with_setting(changed, key, value)
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


def with_setting(recipe: Recipe, key: str, value: Any) -> Recipe:
    """The recipe with one dotted key changed."""
    changed: Recipe = _changed(recipe, key.split("."), value)
    return changed


def _changed(section: Any, path: list[str], value: Any) -> Any:
    if not path:
        return value
    name, *inner = path
    if isinstance(section, BaseModel):
        return section.model_copy(update={name: _changed(getattr(section, name), inner, value)})
    return section | {name: _changed(section.get(name), inner, value)}


def more_ranks(recipe: Recipe, shape: ModelShape, kind: Kind, ranks: int) -> list[str]:
    """The fewest ranks, by doubling, among which the recipe fits: as it is, else with whole layers recomputed; or none."""
    recomputed = with_checkpointing(recipe, True)
    for words, changed in (("", recipe), (", with model.gradient_checkpointing=true", recomputed)):
        for count in (2**power for power in range(1, 13) if 2**power > ranks):
            memory = rank_memory(changed, shape, kind, count, samples=False)
            if memory.fits(kind):
                return [f"{count} ranks beside engines on GPUs of their own{words} ({memory.total / GIB:.1f} GiB each)"]
    return []


ENGINE_SHARES = (1 / 8, 1 / 4, 3 / 8, 1 / 2, 5 / 8, 3 / 4, 7 / 8)
"""Shares of the GPUs that are tried for engines where nobody says how many."""


@dataclass(frozen=True)
class Asked:
    """What a plan is asked for, beside the recipe. What is None or 0 is left to the recipe or the planner."""

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


@dataclass(frozen=True)
class Forecast:
    """The answer. ``rank`` and ``engine`` are the memory of one GPU each; ``cost`` is of the whole run, by the price given.

    ``recompute`` is what the recipe says, or what its ``auto`` chose (``by_auto``).
    ``notes`` are (what, measured | scaled | computed | assumed | not run, in a sentence).
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
    """Plan a recipe; raises RecipeError, with the ways out, where it cannot fit.

    ``tasks`` are a few of the recipe's, ``unread`` why there are none: they tell which towers compute anything.
    """
    if asked.gpus < 1:
        raise RecipeError(f"--gpus {asked.gpus}: a plan needs at least one.")
    kind = kind_named(asked.kind)
    shape, source = planned_shape(recipe.model, asked.shape)
    shape = shape_for_tasks(shape, tasks)
    schedule = asked.schedule or recipe.schedule.name
    if asked.prompt_tokens:
        recipe = _shorter(recipe, asked.prompt_tokens)
    staleness = recipe.schedule.max_staleness if asked.staleness is None else asked.staleness
    work = work_of(recipe, asked.prompt_tokens, asked.response_tokens)
    base = Deployment(
        schedule=schedule,
        staleness=staleness,
        scoring_s=asked.scoring_s,
        max_rows=min(recipe.rollout.concurrency or 10**9, engine_rows(recipe)),
        engine_gpus=int(recipe.rollout.engine.options.get("tensor_parallel", 1)),
        sequence_parallel=recipe.cluster.sequence_parallel,
    )
    tried = [_divided(base, asked.gpus, engines) for engines in _engine_counts(asked, base)]
    planned, refusal = [], None
    for deployment in tried:
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
        notes=tuple(
            notes_of(
                recipe,
                kind,
                deployment,
                work,
                prompts_given=asked.prompt_tokens > 0,
                responses_given=asked.response_tokens > 0,
                experts="moe" in shape.family,
                unread=unread,
            )
        ),
    )


def _shorter(recipe: Recipe, prompt_tokens: int) -> Recipe:
    """The recipe with a context that prompts of this length need."""
    rollout = recipe.rollout
    if prompt_tokens >= rollout.max_context_tokens:
        raise RecipeError(
            f"--prompt-tokens {prompt_tokens} leaves no room to write in a context of {rollout.max_context_tokens} "
            "(rollout.max_context_tokens)."
        )
    written = rollout.max_new_tokens * rollout.max_turns
    context = min(rollout.max_context_tokens, prompt_tokens + written)
    return recipe.model_copy(update={"rollout": rollout.model_copy(update={"max_context_tokens": context})})


def _engine_counts(asked: Asked, base: Deployment) -> list[int]:
    """How many engines to try; none where one GPU does it all. What is left must be groups of ranks that share tokens."""
    each, sharing = base.engine_gpus, base.sequence_parallel
    found = _possible_counts(asked, each)
    fitting = [engines for engines in found if (asked.gpus - engines * each) % sharing == 0]
    if not fitting and asked.engines is None and sharing > 1:
        fitting = [n for n in range(1, (asked.gpus - 1) // each + 1) if (asked.gpus - n * each) % sharing == 0]
    if not fitting:
        raise RecipeError(
            f"cluster.sequence_parallel={sharing}: of {asked.gpus} GPU(s) the engines leave no multiple of {sharing} to "
            "learn. Plan with other --gpus or --engines, or leave it out."
        )
    return fitting


def _possible_counts(asked: Asked, each: int) -> list[int]:
    if asked.gpus == 1:
        if asked.engines:
            raise RecipeError("--engines is for several GPUs: a single one samples and learns in turn.")
        return [0]
    if asked.engines is not None:
        if not 0 < asked.engines * each < asked.gpus:
            raise RecipeError(
                f"--engines {asked.engines} of {each} GPU(s) each leave no GPU of {asked.gpus} to learn, or none to "
                f"sample: name 1 to {max(1, (asked.gpus - 1) // each)}."
            )
        return [asked.engines]
    most = (asked.gpus - 1) // each
    if not most:
        raise RecipeError(f"an engine takes {each} GPUs (tensor_parallel), and of {asked.gpus} none is left to learn.")
    return sorted({min(most, max(1, round(share * asked.gpus / each))) for share in ENGINE_SHARES})


def _divided(base: Deployment, gpus: int, engines: int) -> Deployment:
    if not engines:
        return base
    return replace(base, engines=engines, learners=gpus - engines * base.engine_gpus, apart=True)


Planned = tuple[Deployment, Recipe, GpuMemory, GpuMemory | None, SimulatedRun]


def _planned(
    recipe: Recipe, shape: ModelShape, kind: Kind, work: StepWork, deployment: Deployment, asked: Asked, unread: str
) -> Planned:
    """One way to divide the GPUs: what it holds and how long its steps take."""
    assumption = "" if asked.prompt_tokens else f" Here {assumed_prompts(work)}."
    assumption += f" And {assumed_media(unread)}." if unread else ""
    recipe, rank = _fitting_rank(recipe, shape, kind, deployment, assumption)
    engine = None
    if deployment.apart:
        engine = engine_memory(recipe, shape, kind, deployment.engines, deployment.engine_gpus)
        _refuse_large_engine(recipe, shape, kind, deployment, engine)
    size = BYTES[recipe.model.dtype]
    vllm = recipe.rollout.engine.name == "vllm"
    pushed = trained_parameters(recipe, shape) * size if vllm or deployment.apart or deployment.learners > 1 else 0
    check_s = assumed("vllm_check_s") if vllm else 0.0
    deployment = replace(deployment, pushed_bytes=pushed, push=_push(recipe, deployment), check_s=check_s)
    model = costs_of(
        shape,
        number_bytes=size,
        recompute=_way(recipe),
        frozen=recipe.model.freeze,
        lora=bool(recipe.model.lora.rank),
        forwards=_forwards(recipe),
    )
    network = None if asked.network is None else asked.network * 1e9
    host = machine(kind, network=network)
    slower = assumed("vllm_times") if vllm else 1.0
    run = simulate(
        Costs(model, host, deployment.engine_gpus, slower), Costs(model, host), work, deployment, steps=_steps(work)
    )
    return deployment, recipe, rank, engine, run


def _push(recipe: Recipe, deployment: Deployment) -> Push:
    """How weights get to engines: by file, but to vLLM with GPUs of its own by broadcast, and on the GPU of the one learner
    through its memory, unless the recipe says file. Adapters are always a file.
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


def _steps(work: StepWork) -> int:
    """Steps to simulate: few of many episodes are as good as many of few."""
    return max(3, min(8, ceil(20_000 / work.episodes)))


def _way(recipe: Recipe) -> Recomputation:
    way = recipe.model.gradient_checkpointing
    assert way != "auto", "decided before"
    return way


def _fitting_rank(
    recipe: Recipe, shape: ModelShape, kind: Kind, plan: Deployment, assumption: str
) -> tuple[Recipe, GpuMemory]:
    """The recipe with ``auto`` recomputation decided, and a rank's memory; refused with the ways out if it does not fit."""
    decided, memory = fitting_memory(recipe, shape, kind, plan.learners, samples=not plan.apart)
    if memory.fits(kind):
        return decided, memory
    largest = ", ".join(
        f"{use} {amount / GIB:.0f}" for use, amount in sorted(memory.uses.items(), key=lambda one: -one[1])[:4]
    )
    who = "the GPU" if plan.learners == 1 and not plan.apart else f"each of {plan.learners} learner rank(s)"
    raise RecipeError(
        f"{recipe.name} does not fit: {who} would hold {memory.total / GIB:.1f} GiB ({largest} GiB), and 90 % of an "
        f"{kind.title} are {SHARE * kind.memory / GIB:.1f} GiB. "
        + ways_out(decided, shape, kind, plan.learners, samples=not plan.apart)
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
    raise RecipeError(
        f"an engine of {recipe.name} would hold {memory.total / GIB:.0f} GiB on each GPU, of it {held:.0f} of weights and "
        "the rest keys and values of all responses it writes at once: lower rollout.engine.options.max_rows or "
        "rollout.concurrency, or plan with more --engines."
    )


def _forwards(recipe: Recipe) -> float:
    """Forward passes over all tokens that a step makes beside its updates, for each epoch of them."""
    algorithm, batch = recipe.algorithm, recipe.batch
    passes = float(algorithm.kl.coef > 0) + float(batch.updates_per_epoch * batch.epochs_per_step > 1)
    if estimator_traits(algorithm.advantage.name).critic and algorithm.critic.trunk == "own":
        passes += 1 + 3 * batch.epochs_per_step  # its values, and its own training: three times a forward pass
    return passes / batch.epochs_per_step
