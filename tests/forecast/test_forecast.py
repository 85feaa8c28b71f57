"""Plans of recipes: memory of ranks as FSDP2 spreads it, refusals with ways out that hold, and what is said of figures."""

import re

import pytest

from sensorium.forecast.forecast import Asked, forecast
from sensorium.forecast.machine import kind_named, kinds
from sensorium.forecast.memory import rank_memory
from sensorium.forecast.published_shapes import planned_shape, published_configs
from sensorium.recipe.load import load_recipe
from sensorium.recipe.plan import estimate_memory
from sensorium.recipe.schema import Recipe
from sensorium.recipe.shape import shape_by_config
from sensorium.vocabulary.errors import RecipeError

PUBLISHED = {
    "Qwen2.5-VL-3B": 3.75, "Qwen2.5-VL-7B": 8.29, "Qwen2.5-VL-32B": 33.5, "Qwen2.5-VL-72B": 73.4, "Qwen3-VL-2B": 2.13,
    "Qwen3-VL-4B": 4.44, "Qwen3-VL-8B": 8.77, "Qwen3-VL-32B": 33.4, "Qwen3-VL-30B-A3B": 31.1, "Qwen3-VL-235B-A22B": 236,
    "Qwen2.5-7B": 7.62, "Qwen3-8B": 8.19, "Qwen2.5-Omni-7B": 8.93,
}  # fmt: skip
"""Billions of parameters, as model pages state them (of Omni the thinker)."""
GIB = 1 << 30


def recipe(*overrides: str) -> Recipe:
    return load_recipe("caprl_image", ["model.gradient_checkpointing=false", *overrides])


@pytest.mark.parametrize("name", list(published_configs()))
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert shape_by_config(published_configs()[name]).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_a_single_gpu_holds_what_the_dry_run_says() -> None:
    one = recipe("model.gradient_checkpointing=true")
    shape, source = planned_shape(one.model)
    assert source == "the published sizes of Qwen2.5-VL-3B"
    assert rank_memory(one, shape, 1, samples=True).uses == estimate_memory(one, shape)


def test_ranks_share_weights_moments_and_gradients_and_gather_the_root_and_two_layers() -> None:
    one = recipe("algorithm.kl.coef=0.1")
    shape, _ = planned_shape(one.model)
    two, eight = (rank_memory(one, shape, ranks, samples=False).uses for ranks in (2, 8))
    for use in ("weights", "gradients", "optimizer moments", "remainders of fp32 masters", "reference model"):
        assert two[use] == pytest.approx(4 * eight[use], rel=1e-6), use
    assert eight["optimizer moments"] == pytest.approx(shape.total * 8 / 8, rel=1e-6)
    assert two["gathered root and layers"] == eight["gathered root and layers"]
    root = shape.vocabulary * shape.hidden + shape.parameters["projector"]
    assert eight["gathered root and layers"] > 2 * root
    frozen = rank_memory(recipe("model.freeze=[vision]"), shape, 8, samples=False).uses
    assert frozen["frozen tower"] == 2 * shape.parameters["vision"], "a frozen tower is whole on every rank"
    offloaded = rank_memory(recipe("cluster.offload=true", "cluster.learners=8"), shape, 8, samples=False)
    assert (
        offloaded.host
        == sum(eight[use] for use in ("weights", "gradients", "optimizer moments")) + eight["remainders of fp32 masters"]
    )
    assert "weights" not in offloaded.uses


def test_what_does_not_fit_is_refused_and_the_ways_out_fit() -> None:
    with pytest.raises(RecipeError, match=r"does not fit.*What would fit") as refused:
        forecast(recipe(), Asked(gpus=1, kind="a100", shape="Qwen2.5-VL-7B"))
    words = str(refused.value)
    ranks = int(re.search(r"(\d+) ranks", words)[1])
    keeps = ["model.gradient_checkpointing=true"] if "with model.gradient_checkpointing=true" in words else []
    shape = shape_by_config(published_configs()["Qwen2.5-VL-7B"])
    assert rank_memory(recipe(*keeps), shape, ranks, samples=False).fits(kind_named("a100"))
    half = rank_memory(recipe(*keeps), shape, ranks // 2, samples=ranks == 2)
    assert not half.fits(kind_named("a100"))


def test_auto_recomputation_is_decided_by_the_memory_of_the_kind() -> None:
    auto = recipe("model.gradient_checkpointing=auto", "optimizer.moments=bfloat16", "batch.prompts_per_step=16")
    large, small = (forecast(auto, Asked(gpus=4, kind=kind, engines=1)) for kind in ("b200", "l40s"))
    assert (large.recompute, small.recompute) == (False, True)
    assert large.rank.total > small.rank.total


def test_every_kind_is_planned_and_only_the_h200_is_called_measured() -> None:
    for kind in kinds():
        asked = Asked(gpus=16, kind=kind, response_tokens=300, prompt_tokens=800, engines=8)
        found = forecast(recipe("model.gradient_checkpointing=true", "batch.prompts_per_step=32"), asked)
        how = {what: how for what, how, _ in found.notes}
        assert how["rollout, update"] == ("measured" if kind == "h200" else "scaled")
        assert how["gather, reduce"] == "computed"
        assert "experts" not in how
        assert found.cost is None
        assert found.deployment.gpus == 16


def test_what_nobody_has_run_is_said() -> None:
    asked = Asked(gpus=64, kind="h200", engines=8, schedule="asynchronous", shape="Qwen3-VL-30B-A3B", response_tokens=300)
    found = forecast(recipe("model.gradient_checkpointing=true", "batch.prompts_per_step=64"), asked)
    assert {what for what, how, _ in found.notes if how == "not run"} == {"experts", "several engines"}
    assert found.run.stale_max <= recipe().schedule.max_staleness


def test_cost_is_price_times_gpu_hours() -> None:
    found = forecast(recipe("model.gradient_checkpointing=true"), Asked(gpus=4, kind="b200", price=3.0))
    assert found.cost == pytest.approx(4 * 3.0 * found.hours)
    assert found.hours == pytest.approx(found.run.step_s * recipe().steps / 3600)


@pytest.mark.parametrize(
    ("asked", "says"),
    [
        (Asked(gpus=0, kind="h200"), "at least one"),
        (Asked(gpus=8, kind="h201"), "h200"),
        (Asked(gpus=8, kind="h200", engines=8), "no GPU of 8 to learn"),
        (Asked(gpus=1, kind="h200", engines=1), "in turn"),
        (Asked(gpus=8, kind="h200", shape="Qwen2.5-VL-8B"), "Qwen2.5-VL-7B"),
        (Asked(gpus=8, kind="h200", response_tokens=1e6), "more than an episode"),
    ],
)
def test_what_cannot_be_planned_is_refused_with_what_to_do(asked: Asked, says: str) -> None:
    with pytest.raises(RecipeError, match=says):
        forecast(recipe(), asked)


def test_a_model_that_no_name_is_known_of_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"not on this disk.*--shape"):
        forecast(recipe("model.path=someone/else"), Asked(gpus=1, kind="h200"))
