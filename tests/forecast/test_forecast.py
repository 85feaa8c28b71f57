"""Plans of recipes: memory of ranks as FSDP2 spreads it, refusals with ways out that hold, and what is said of figures."""

import re
import types
from importlib.util import find_spec

import pytest

from sensorium.forecast.costs import (
    assumed,
    costs_of,
    fitting_memory,
    kind_named,
    kinds,
    planned_shape,
    published_configs,
    rank_memory,
)
from sensorium.forecast.forecast import Asked, forecast
from sensorium.recipe.load import load_recipe
from sensorium.recipe.memory_estimate import estimate_memory, hybrid_layer_bytes, stock_hybrid_bytes, stock_layer_bytes
from sensorium.recipe.model_shape import shape_by_config
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import RecipeError

PUBLISHED = {
    "Qwen2.5-VL-3B": 3.75, "Qwen2.5-VL-7B": 8.29, "Qwen2.5-VL-32B": 33.5, "Qwen2.5-VL-72B": 73.4, "Qwen3-VL-2B": 2.13,
    "Qwen3-VL-4B": 4.44, "Qwen3-VL-8B": 8.77, "Qwen3-VL-32B": 33.4, "Qwen3-VL-30B-A3B": 31.1, "Qwen3-VL-235B-A22B": 236,
    "Qwen2.5-7B": 7.62, "Qwen3-8B": 8.19, "Qwen2.5-Omni-7B": 8.93,
}  # fmt: skip
"""Billions of parameters, as model pages state them (of Omni the thinker)."""
GIB = 1 << 30


H200 = kind_named("h200")


def recipe(*overrides: str) -> Recipe:
    small = ["model.path=Qwen/Qwen2.5-VL-3B-Instruct", "rollout.max_context_tokens=8192", "steps=1000", "epochs=0"]
    return load_recipe("caprl_image", ["model.gradient_checkpointing=false", *small, *overrides])


@pytest.mark.parametrize("name", list(published_configs()))
def test_published_shapes_have_the_published_number_of_parameters(name: str) -> None:
    assert shape_by_config(published_configs()[name]).total / 1e9 == pytest.approx(PUBLISHED[name], rel=0.005)


def test_attention_costs_by_the_queries_of_all_heads_where_they_are_wider_than_the_stream() -> None:
    wide = shape_by_config(published_configs()["Qwen3-VL-4B"])
    assert (wide.hidden, wide.queries, costs_of(wide).queries) == (2560, 4096, 4096)
    narrow = shape_by_config(published_configs()["Qwen2.5-VL-7B"])
    assert narrow.queries == narrow.hidden == costs_of(narrow).queries


@pytest.mark.parametrize(("heads", "kv_heads"), [(2, 1), (8, 2)])
def test_a_stock_layer_keeps_what_autograd_saves_of_it(heads: int, kv_heads: int) -> None:
    import torch
    from transformers import Qwen3Config
    from transformers.models.qwen3.modeling_qwen3 import Qwen3DecoderLayer, Qwen3RotaryEmbedding

    tokens = 64
    sizes = {"hidden_size": 64, "intermediate_size": 160, "num_attention_heads": heads, "num_key_value_heads": kv_heads}
    config = Qwen3Config(**sizes, head_dim=32, num_hidden_layers=1, vocab_size=32)
    config._attn_implementation = "sdpa"
    layer = Qwen3DecoderLayer(config, 0).to(torch.bfloat16)
    stream = torch.zeros(1, tokens, 64, dtype=torch.bfloat16, requires_grad=True)
    rotation = Qwen3RotaryEmbedding(config)(stream, torch.arange(tokens)[None])
    whole = [*layer.parameters(), *rotation]
    apart = {tensor.untyped_storage().data_ptr() for tensor in whole}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        layer(stream, position_embeddings=rotation)
    kept = sum(one.untyped_storage().nbytes() for place, one in saved.items() if place not in apart) / tokens
    shape = shape_by_config(config.to_dict() | {"model_type": "qwen3", "tie_word_embeddings": True})
    assert kept <= stock_layer_bytes(shape) <= 1.1 * kept


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("layer_type", ["linear_attention", "full_attention"])
def test_a_layer_of_a_hybrid_keeps_what_autograd_saves_of_it(
    layer_type: str, fused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With kernels in the place of flash-linear-attention and flash attention that save what those save."""
    if find_spec("triton") is None:
        pytest.skip("triton is not installed")
    import torch
    from transformers import Qwen3_5TextConfig
    from transformers.models.qwen3_5.modeling_qwen3_5 import Qwen3_5DecoderLayer, Qwen3_5TextRotaryEmbedding

    from sensorium.kernels import layer_ops
    from sensorium.kernels.layer_ops import mixer_of
    from sensorium.learner import tree_states
    from sensorium.learner.token_runs import TokenRun, arrange_levels
    from sensorium.learner.tree_attention import LevelAttention
    from sensorium.models.delta_net import hand_over_states
    from sensorium.models.fused import FusedLayer

    class Rule(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value, decay, beta, state):  # type: ignore[no-untyped-def]
            inverses = query.new_zeros(1, query.shape[1], value.shape[2], 64)
            ctx.save_for_backward(query.clone(), key.clone(), value, decay.clone(), beta, inverses)
            runs = 1 if state is None else len(state)
            return value.clone(), torch.zeros(runs, value.shape[2], query.shape[3], value.shape[3])

    class Flash(torch.autograd.Function):
        @staticmethod
        def forward(ctx, query, key, value):  # type: ignore[no-untyped-def]
            out = query.transpose(1, 2).clone()
            ctx.save_for_backward(query.clone(), key.clone(), value, out)
            return out

    class Kernels(LevelAttention):
        def __call__(self, layer, query, key, value, scaling):  # type: ignore[no-untyped-def]
            return Flash.apply(query, key, value)

    monkeypatch.setattr(tree_states, "usable", lambda *given: True)
    monkeypatch.setattr(tree_states, "fla_chunks", lambda *given, final: Rule.apply(*given[:6]))
    monkeypatch.setattr(layer_ops, "interpreted", True)
    sizes = {"hidden_size": 96, "intermediate_size": 200, "num_attention_heads": 2, "num_key_value_heads": 1}
    config = Qwen3_5TextConfig(**sizes, num_hidden_layers=1, layer_types=[layer_type], linear_num_key_heads=1, head_dim=64,
                               linear_num_value_heads=2, vocab_size=32)  # fmt: skip
    config._attn_implementation = "sensorium"
    layer = Qwen3_5DecoderLayer(config, 0).to(torch.bfloat16)
    hand_over_states(types.SimpleNamespace(layers=[layer]))
    prompt = TokenRun(400, None)
    attention = Kernels(arrange_levels([prompt, TokenRun(200, prompt), TokenRun(200, prompt)]), torch.device("cpu"))
    stream = torch.randn(1, 800, 96).to(torch.bfloat16).requires_grad_()
    rotation = Qwen3_5TextRotaryEmbedding(config)(stream, torch.arange(800).expand(3, 1, -1))
    apart = {tensor.untyped_storage().data_ptr() for tensor in [*layer.parameters(), *rotation]}
    saved: dict[int, torch.Tensor] = {}

    def save(tensor: torch.Tensor) -> torch.Tensor:
        return saved.setdefault(tensor.untyped_storage().data_ptr(), tensor)

    with torch.autograd.graph.saved_tensors_hooks(save, lambda tensor: tensor):
        given = {"position_embeddings": rotation, "sensorium_attention": attention}
        FusedLayer(mixer_of(layer))(stream.float(), **given) if fused else layer(stream, **given)
    kept = sum(one.untyped_storage().nbytes() for place, one in saved.items() if place not in apart) / 800
    text = config.to_dict() | {"layer_types": ["linear_attention"]}  # so that there is one, whose size is known
    shape = shape_by_config({"model_type": "qwen3_5", "text_config": text, "tie_word_embeddings": True, "vision_config": {
        "hidden_size": 8, "intermediate_size": 8, "depth": 0, "patch_size": 16, "num_position_embeddings": 1,
        "out_hidden_size": 96,
    }})  # fmt: skip
    found = (hybrid_layer_bytes if fused else stock_hybrid_bytes)(shape)[layer_type == "full_attention"]
    assert 0.97 * kept <= found <= 1.1 * kept


def test_a_single_gpu_holds_what_the_dry_run_says() -> None:
    one = recipe("model.gradient_checkpointing=true")
    shape, source = planned_shape(one.model)
    assert source == "the published sizes of Qwen2.5-VL-3B"
    assert rank_memory(one, shape, H200, 1, samples=True).uses == estimate_memory(one, shape)


def test_ranks_share_weights_moments_and_gradients_and_gather_the_root_and_two_layers() -> None:
    one = recipe("algorithm.kl.coef=0.1")
    shape, _ = planned_shape(one.model)
    two, eight = (rank_memory(one, shape, H200, ranks, samples=False).uses for ranks in (2, 8))
    for use in ("weights", "gradients", "optimizer moments", "remainders of fp32 masters", "reference model"):
        assert two[use] == pytest.approx(4 * eight[use], rel=1e-6), use
    assert eight["optimizer moments"] == pytest.approx(shape.total * 8 / 8, rel=1e-6)
    assert two["gathered root and layers"] == eight["gathered root and layers"]
    root = shape.vocabulary * shape.hidden + shape.parameters["projector"]
    assert eight["gathered root and layers"] > 2 * root
    frozen = rank_memory(recipe("model.freeze=[vision]"), shape, H200, 8, samples=False).uses
    assert frozen["frozen tower"] == 2 * shape.parameters["vision"], "a frozen tower is whole on every rank"
    offloaded = rank_memory(recipe("cluster.offload=true", "cluster.learners=8"), shape, H200, 8, samples=False)
    assert (
        offloaded.host
        == sum(eight[use] for use in ("weights", "gradients", "optimizer moments")) + eight["remainders of fp32 masters"]
    )
    assert "weights" not in offloaded.uses


def test_ranks_that_share_tokens_keep_a_share_of_the_activations_and_gather_keys_and_values() -> None:
    one, four = (
        load_recipe("caprl_video", ["model.gradient_checkpointing=false", "batch.prompts_per_step=8", *changes])
        for changes in ([], ["cluster.learners=8", "cluster.sequence_parallel=4"])
    )
    shape, _ = planned_shape(one.model)
    alone, sharing = (rank_memory(found, shape, H200, 8, samples=False).uses for found in (one, four))
    assert sharing["activations"] == pytest.approx(alone["activations"] / 4, rel=1e-3)
    tokens = max(four.batch.tokens_per_microbatch, four.rollout.max_context_tokens)
    assert sharing["gathered keys and values"] == tokens * 2 * shape.key_values * 12
    assert "gathered keys and values" not in alone
    planned = forecast(four, Asked(gpus=16, kind="h200"))
    assert planned.deployment.learners % 4 == 0
    assert planned.rank.uses["gathered keys and values"] == sharing["gathered keys and values"]
    assert any(what == "shared tokens" for what, _, _ in planned.notes)
    with pytest.raises(RecipeError, match=r"leave no multiple of 4 to learn"):
        forecast(four, Asked(gpus=4, kind="h200"))


def test_sharing_tokens_is_a_way_out_where_a_context_is_too_long() -> None:
    changes = ["rollout.max_context_tokens=163840", "model.gradient_checkpointing=true", "model.freeze=[vision]"]
    long = load_recipe("caprl_video", changes)
    with pytest.raises(RecipeError, match=r"What would fit: .*cluster\.sequence_parallel=2 \([\d.]+ GiB\)"):
        forecast(long, Asked(gpus=16, kind="h100", engines=8))


def test_what_does_not_fit_is_refused_and_the_ways_out_fit() -> None:
    with pytest.raises(RecipeError, match=r"does not fit.*What would fit") as refused:
        forecast(recipe(), Asked(gpus=1, kind="a100", shape="Qwen2.5-VL-7B"))
    words = str(refused.value)
    assert "`sensorium validate RECIPE` measures prompts" in words, "the context is assumed to be full"
    ranks = int(re.search(r"(\d+) ranks", words)[1])
    keeps = ["model.gradient_checkpointing=true"] if "with model.gradient_checkpointing=true" in words else []
    shape = shape_by_config(published_configs()["Qwen2.5-VL-7B"])
    assert rank_memory(recipe(*keeps), shape, H200, ranks, samples=False).fits(kind_named("a100"))
    half = rank_memory(recipe(*keeps), shape, H200, ranks // 2, samples=ranks == 2)
    assert not half.fits(kind_named("a100"))


@pytest.mark.parametrize(
    ("kind", "model"), [("h100", "Qwen2.5-VL-3B"), ("l40s", "Qwen2.5-VL-3B"), ("h200", "Qwen2.5-VL-7B")]
)
def test_settings_that_are_named_make_it_fit_and_none_of_them_can_be_left_out(kind: str, model: str) -> None:
    asked = Asked(gpus=1, kind=kind, shape=model, prompt_tokens=800)
    with pytest.raises(RecipeError, match="What would fit: ") as refused:
        forecast(recipe(), asked)
    settings, held = re.search(r"What would fit: (\S+=.*?) \((\S+) GiB\)", str(refused.value)).groups()
    found = forecast(recipe(*settings.split()), asked)
    assert found.rank.total / GIB == pytest.approx(float(held), abs=0.06)
    for setting in settings.split():
        with pytest.raises(RecipeError, match="does not fit"):
            forecast(recipe(*(other for other in settings.split() if other != setting)), asked)


def test_where_no_settings_fit_the_least_memory_is_told() -> None:
    with pytest.raises(RecipeError, match="does not fit") as refused:
        forecast(recipe(), Asked(gpus=1, kind="rtx4090", shape="Qwen2.5-VL-32B"))
    settings, held = re.search(r"Settings bring it down to (.*?) \((\S+) GiB\)", str(refused.value)).groups()
    assert "model.lora.rank=16" in settings
    shape = shape_by_config(published_configs()["Qwen2.5-VL-32B"])
    _, memory = fitting_memory(recipe(*settings.split()), shape, kind_named("rtx4090"), 1, samples=True)
    assert memory.total / GIB == pytest.approx(float(held), abs=0.06)
    assert not memory.fits(kind_named("rtx4090"))


def test_lengths_are_said_to_be_assumed_where_nobody_gives_them() -> None:
    for lengths, assumed_ones in (
        ({}, {"prompts", "responses"}),
        ({"prompt_tokens": 800}, {"responses"}),
        ({"prompt_tokens": 800, "response_tokens": 300.0}, set()),
    ):
        notes = forecast(
            recipe("model.gradient_checkpointing=true"), Asked(gpus=8, kind="h200", engines=4, **lengths)
        ).notes
        assert {what for what, how, _ in notes if how == "assumed"} - {"scoring"} == assumed_ones


def test_auto_recomputation_is_decided_by_the_memory_of_the_kind() -> None:
    auto = recipe("model.gradient_checkpointing=auto", "optimizer.moments=bfloat16", "batch.prompts_per_step=16")
    large, small = (forecast(auto, Asked(gpus=4, kind=kind, engines=1)) for kind in ("b200", "l40s"))
    assert (large.recompute, small.recompute) == (False, True)
    assert large.by_auto
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
    assert {what for what, how, _ in found.notes if how == "not run"} == {"several engines"}
    assert found.run.stale_max <= recipe().schedule.max_staleness


def test_engines_and_ranks_beyond_the_groups_of_a_step_are_said_to_be_idle() -> None:
    changes = ("model.gradient_checkpointing=true", "batch.prompts_per_step=8")
    found = forecast(recipe(*changes), Asked(gpus=32, kind="h200", engines=12, response_tokens=100))
    told = {what: words for what, _, words in found.notes}
    assert "an update has 8 groups" in told["idle ranks"]
    assert "12 of 20 do nothing" in told["idle ranks"]
    assert "4 of 12 do nothing" in told["idle engines"]
    enough = forecast(recipe(*changes), Asked(gpus=8, kind="h200", engines=3, response_tokens=100))
    assert not [what for what, _, _ in enough.notes if what.startswith("idle")]


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


def pushed(push: str, engines: int = 2, *overrides: str) -> float:
    engine = f"rollout.engine={{name: vllm, options: {{gpu_share: 0.9, push: {push}}}}}"
    asked = Asked(gpus=8, kind="h200", engines=engines, response_tokens=300)
    changes = ("rollout.schedule=eager", "model.gradient_checkpointing=true", *overrides)
    return forecast(recipe(engine, *changes), asked).run.push_s - assumed("vllm_check_s")


def test_a_push_is_counted_as_the_recipe_says() -> None:
    by_file, by_broadcast = pushed("file"), pushed("broadcast")
    assert by_broadcast < by_file / 10, "over links between GPUs, not through a file"
    assert pushed("auto") == by_broadcast
    assert pushed("broadcast", engines=4) == pytest.approx(2 * by_broadcast), "one GPU sends to each engine"
    assert pushed("broadcast", 2, "model.lora.rank=8") == pushed("file", 2, "model.lora.rank=8")
    with pytest.raises(RecipeError, match=r"push is ipc.* use broadcast"):
        pushed("ipc")


def test_vllm_on_the_learners_gpu_is_pushed_through_its_memory_and_then_checked() -> None:
    engine = "rollout.engine={name: vllm, options: {gpu_share: 0.2}}"
    changes = ("rollout.schedule=eager", "model.gradient_checkpointing=true", "batch.prompts_per_step=8")
    found = forecast(recipe(engine, *changes), Asked(gpus=1, kind="h200", response_tokens=300))
    assert found.deployment.push == "ipc"
    assert found.rank.uses["vLLM"] == pytest.approx(0.2 * H200.memory)
    assert "keys and values" not in found.rank.uses, "they are in its share"
    assert found.run.push_s == pytest.approx(0.267 + 0.457, rel=0.01), "as measured on W1"
    assert any(part == "push" and "memory" in sentence for part, _, sentence in found.notes)


def test_memory_of_a_kind_is_what_torch_reports_not_the_gigabytes_of_the_datasheet() -> None:
    assert H200.memory / GIB == pytest.approx(139.8)
    sold_as = {"h200": 141, "h100": 80, "a100": 80, "b200": 180, "h20": 96, "l40s": 48, "rtx4090": 24}
    assert sold_as.keys() == kinds().keys()
    for name, gigabytes in sold_as.items():
        assert 0.92 * gigabytes < kinds()[name].memory / GIB < gigabytes, name


def test_observations_that_are_trained_take_their_part_of_an_update() -> None:
    def planned(turns: int, mask: bool) -> tuple[float, int, set[str]]:
        fitting = ["model.gradient_checkpointing=true", "rollout.max_new_tokens=64"]
        made = recipe(f"rollout.max_turns={turns}", f"algorithm.loss_mask={str(mask).lower()}", *fitting)
        found = forecast(made, Asked(gpus=8, kind="h200", engines=4))
        return found.run.update_s, found.work.observed, {what for what, _, _ in found.notes}

    (masked_s, none, _), (trained_s, observed, notes) = planned(4, True), planned(4, False)
    assert (none, observed) == (0, 8192 - 4 * 64)
    assert trained_s > 1.01 * masked_s
    assert "observations" in notes
    assert planned(1, False) == planned(1, True), "nothing is observed after the only response"
