"""What a recipe says of adapters is checked and counted before any model is loaded."""

from pathlib import Path

import pytest

from sensorium.recipe import parse_recipe
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.memory_estimate import estimate_memory
from sensorium.recipe.model_shape import ends_in, linears_by_config, read_shape
from sensorium.recipe.plan import make_plan
from sensorium.recipe.schema import LoraSection
from sensorium.vocabulary.errors import RecipeError

from .test_load import GOOD, refused
from .test_plan import checkpoint, recipe


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model.lora.alpha=8.0"], "alpha does nothing at rank 0; give model.lora.rank"),
        (["model.lora.groups=[vision]"], "groups does nothing at rank 0"),
        (["model.lora.modules=[q_proj]"], "modules does nothing at rank 0"),
        (["model.lora.rank=-1"], "must be greater than or equal to 0"),
        (["model.lora={rank: 8, groups: [langauge]}"], "unknown parameter group 'langauge'; did you mean 'language'?"),
        (["model.lora={rank: 8, groups: []}"], "names no part of the model"),
        (["model.lora.rank=8", "model.freeze=[language]"], "'language' is adapted here and frozen by model.freeze"),
        (["model.lora.rank=8", "optimizer.group_lr.vision=1e-4"], "'vision' has a learning rate here, but no adapters"),
        (["model.lora.rank=8", "warm_start.optimizer.group_lr.head=1e-4"], "only those of language learn"),
    ],
)
def test_contradictions_are_refused(overrides: list[str], says: str) -> None:
    assert says in refused(*overrides)


def test_sound_adapters_pass() -> None:
    parse_recipe(GOOD, "trial.yaml", ["model.lora={rank: 8, groups: [vision, language]}", "optimizer.group_lr.vision=1e-4"])
    parse_recipe(GOOD, "trial.yaml", ["model.lora.rank=8", "model.freeze=[vision]"])
    with pytest.raises(RecipeError):
        parse_recipe(GOOD, "trial.yaml", ["model.lora.dropout=0.1"])


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize(
    "modules", [(), ("q_proj", "down_proj", "qkv", "mlp.2", "linear_fc2", "attn.v", "fc1", "audio_tower.proj")]
)
def test_adapters_are_counted_from_files_and_config_as_they_are_made(
    family: str, modules: tuple[str, ...], tmp_path: Path
) -> None:
    path = checkpoint(tmp_path, family)
    import json

    import transformers

    from sensorium.models.lora import linear_layers
    from sensorium.recipe.registry import resolve

    config = json.loads((path / "config.json").read_text())
    groups = resolve("family", family).groups
    model = getattr(transformers, FAMILIES[family].model_class).from_pretrained(path)
    shape = read_shape(str(path))
    assert shape is not None
    for group, layers in linear_layers(model, groups).items():
        section = LoraSection(rank=3, groups=(group,), modules=modules)
        chosen = [model.get_submodule(name) for name in layers if ends_in(name, modules)]
        expected = sum(3 * (layer.in_features + layer.out_features) for layer in chosen)
        assert shape.adapters(section) == expected, group
        by_config = [layer for layer in linears_by_config(config) if layer.group == group and ends_in(layer.name, modules)]
        assert sum(3 * (layer.inputs + layer.outputs) for layer in by_config) == expected, group


def test_a_plan_with_adapters_trains_only_them_and_keeps_no_copy(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path, "qwen3_vl"))
    shape = read_shape(path)
    assert shape is not None
    model = {"path": path, "dtype": "bfloat16", "lora": {"rank": 4, "groups": ["vision", "language"]}}
    planned = recipe(path, model=model, algorithm={"kl": {"coef": 0.1}})
    adapters = make_plan(planned).trainable
    assert 0 < adapters == shape.adapters(planned.model.lora) < shape.total / 5
    memory = estimate_memory(planned, shape)
    assert memory["weights"] == (shape.total + adapters) * 2
    assert memory["gradients"] == adapters * 4
    assert memory["optimizer moments"] == adapters * 8
    assert memory["remainders of fp32 masters"] == adapters * 2
    assert "reference model" not in memory
    assert "former adapters" not in memory
    warm = recipe(path, model=model, algorithm={"kl": {"coef": 0.1}}, warm_start={"steps": 2})
    assert estimate_memory(warm, shape)["former adapters"] == adapters * 2
