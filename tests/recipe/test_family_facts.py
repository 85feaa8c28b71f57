"""The facts of a family: read by its name without torch, and the same as what transformers builds."""

import subprocess
import sys

import pytest
from safetensors import safe_open

from sensorium.models.checkpoint_path import find_checkpoint
from sensorium.recipe.family_facts import FAMILIES, FamilyFacts, is_unloaded
from sensorium.recipe.model_shape import count_parameters, tiny_config, tower_tensors
from sensorium.recipe.registry import NAMES, register


def test_the_facts_of_every_family_are_read_without_torch() -> None:
    code = (
        "import sys; from sensorium.recipe.family_facts import FAMILIES; facts = dict(FAMILIES); assert len(facts) > 9; "
        "assert not {'torch', 'transformers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)


@pytest.mark.parametrize("family", FAMILIES)
def test_tensors_of_the_towers_are_those_of_the_checkpoint(family: str) -> None:
    with safe_open(f"{find_checkpoint(f'tiny:{family}')}/model.safetensors", "pt") as file:
        stored = {name.removeprefix("model."): file.get_slice(name).get_shape() for name in file.keys()}  # noqa: SIM118
    facts = FAMILIES[family]
    towers = {name: shape for name, shape in stored.items() if any(part in name for part, _ in facts.parts)}
    assert tower_tensors(tiny_config(family)) == towers
    assert bool(towers) is facts.has_towers


def test_a_family_of_ones_own_may_do_without_facts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(NAMES, "family", dict(NAMES["family"]))
    register("family", "mine", "sensorium.models.families.text:TextModel")
    assert FAMILIES.get("mine") is None
    register("family", "ours", "sensorium.models.families.text:Qwen2")
    assert isinstance(FAMILIES.get("ours"), FamilyFacts)


@pytest.mark.parametrize(
    ("name", "left_out"),
    [
        ("talker.codec_head.weight", True),
        ("thinker.talker.weight", False),
        ("vision_tower.vision_model.head.probe", True),
        ("model.mtp.0.weight", True),
        ("own.layer.weight", True),
        ("lm_head.weight", False),
    ],
)
def test_weights_that_are_left_out_on_purpose(name: str, left_out: bool) -> None:
    assert is_unloaded(name, ["own."]) is left_out


def test_towers_of_a_family_without_facts_are_estimated_by_their_blocks() -> None:
    config = tiny_config("qwen2_5_vl")
    known, guessed = (count_parameters(config | {"model_type": name}) for name in ("qwen2_5_vl", "someones"))
    assert 0 < guessed["vision"] < known["vision"]
    assert guessed["language"] == pytest.approx(known["language"], rel=0.01)
    assert tower_tensors({"model_type": "someones"}) == {}
