"""Which figures of a forecast were measured, which are scaled or computed from published peaks, and what nobody has run."""

from collections.abc import Iterator

from sensorium.forecast.machine import Kind
from sensorium.forecast.simulator import Deployment
from sensorium.recipe.schema import ClusterSection, Recipe, ScheduleSection

Note = tuple[str, str, str]


def notes_of(recipe: Recipe, kind: Kind, plan: Deployment, *, given_lengths: bool) -> Iterator[Note]:
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
    if recipe.rollout.max_turns > 1:
        yield "turns", "computed", "an episode of several turns counts as one response; environments' own time is not in it"
    if not given_lengths:
        yield (
            "lengths",
            "assumed",
            "every response fills its budget, every prompt its context; --response-tokens tells better",
        )
    if plan.learners == 1:
        yield "memory", "measured", "the dry run's forecast: within 3 % of W1 and W2 without recomputation, 9 % with"
    else:
        yield "memory of ranks", "computed", "by how FSDP2 spreads the model; not measured on GPUs"
        yield (
            "update on ranks",
            "computed",
            "as one GPU's; on CUDA ranks run stock layers, which are slower than the fused ones measured",
        )
        yield "gather, reduce", "computed", "bytes over 0.7 of the published link rates, beside the computing; not measured"
    if plan.pushed_bytes:
        yield "push", "computed", "weights through a file at 1.06 GB/s, by rates of an Arm host; not measured on GPUs"
    if plan.engines > 1 and "engines" not in ClusterSection.model_fields:
        yield "several engines", "not run", "a run has one engine today: these are simulated"
    if plan.schedule not in ScheduleSection.model_json_schema()["properties"]["name"]["enum"]:
        yield "schedule", "not run", f"'{plan.schedule}' is simulated: the recipe does not know it yet"
    if recipe.rollout.engine.name == "vllm":
        yield (
            "vLLM",
            "scaled",
            "1.64 times the native engine's time, as vLLM 0.25.1 took on W1 (17,900 and 29,400 tokens/s)",
        )
    if not plan.scoring_s:
        yield "scoring", "assumed", "no time at all; --scoring-s says what a judge or reward service takes"
    yield "not in it", "computed", "evaluations, checkpoints, the start of a run and its first steps, which compile"
