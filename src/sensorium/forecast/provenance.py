"""Which figures of a forecast were measured, which are scaled or computed from published peaks, and what nobody has run."""

from collections.abc import Iterator

from sensorium.forecast.machine import Kind, assumed, calibration
from sensorium.forecast.simulator import Deployment
from sensorium.forecast.step_work import StepWork
from sensorium.recipe.schema import Recipe, ScheduleSection

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
            "below W2 with recomputation (docs/performance.md)",
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
            "after a push, as vLLM 0.25.1 took on W1 (docs/scale_out.md)",
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
