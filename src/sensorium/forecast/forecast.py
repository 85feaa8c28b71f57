"""A recipe on so many GPUs of a kind: memory on each, the parts of a step, tokens a second and cost."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from math import ceil

from sensorium.forecast.costs import Costs, Push, Recomputation, costs_of
from sensorium.forecast.machine import Kind, assumed, kind_named, machine
from sensorium.forecast.memory import GpuMemory, engine_memory, fitting_memory
from sensorium.forecast.provenance import assumed_media, assumed_prompts, notes_of
from sensorium.forecast.published_shapes import planned_shape
from sensorium.forecast.savings import ways_out
from sensorium.forecast.simulator import Deployment, ScheduleName, SimulatedRun, simulate
from sensorium.forecast.step_work import StepWork, work_of
from sensorium.recipe.plan import BYTES, GIB, engine_rows, shape_for_tasks, trained_parameters
from sensorium.recipe.recomputation import SHARE, vllm_share
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import ModelShape
from sensorium.recipe.traits import estimator_traits
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

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
