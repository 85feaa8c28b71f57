"""An export has the layout of the checkpoint that the run started from, byte by byte where nothing was trained."""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import sensorium as sn
from sensorium.cli.export import export
from sensorium.data.media_store import MediaStore
from sensorium.models.checkpoint_path import describe_source
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.published_layout import match_weights, write_published
from sensorium.models.tiny import make_tiny
from sensorium.models.weight_files import read_weight_file, weight_files
from sensorium.recipe.load import dump_recipe, load_recipe
from sensorium.runs.checkpoint_layout import contents_of
from sensorium.vocabulary.errors import CheckpointError
from tests.families import FAMILY_ROWS, LAYOUTS, make_published

PYTHON_4 = os.environ.get("TRANSFORMERS_4_PYTHON", "")


def opened(folder: Path, dtype: str = "float32") -> Policy:
    return load_policy(str(folder), store=MediaStore(), device="cpu", dtype=dtype)


def saved(policy: Policy, run: Path, source: Path) -> Path:
    """A checkpoint of a run as a trainer leaves it."""
    folder = run / "checkpoints" / "step_000001"
    policy.save(folder)
    (folder / "trainer").mkdir()
    (folder / "trainer" / "state.pt").write_bytes(b"state")
    sizes = {name: content.size for name, content in contents_of(folder).items()}
    (folder / "COMPLETE").write_text(json.dumps({"step": 1, "files": sizes}))
    (run / "source.json").write_text(describe_source(str(source)).to_json())
    return folder


def train(policy: Policy) -> dict[str, torch.Tensor]:
    """Change one weight of each kind in the last layer; returns the model's weights after it."""
    layer = policy.adapter.language_model.layers[-1]
    with torch.no_grad():
        for name, parameter in layer.named_parameters():
            if "mlp" in name or "q_proj" in name:
                parameter.add_(torch.linspace(0, 1, parameter.numel()).view_as(parameter))
    return {name: tensor.clone() for name, tensor in policy.model.state_dict().items()}


def exported(name: str, folder: Path) -> Policy:
    """A look-alike trained a little and exported to ``folder/out``, as the policy that was trained."""
    folder.mkdir()
    source = make_published(name, folder)
    policy = opened(source)
    train(policy)
    export(saved(policy, folder / "run", source), folder / "out")
    return policy


def tensors(folder: Path) -> dict[str, torch.Tensor]:
    return {name: tensor for file in weight_files(folder) for name, tensor in load_file(file.path).items()}


@pytest.fixture(params=LAYOUTS)
def published(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    return make_published(request.param, tmp_path)


def test_an_untrained_model_is_exported_as_the_source_byte_by_byte(published: Path, tmp_path: Path) -> None:
    checkpoint = saved(opened(published), tmp_path / "run", published)
    notes = export(checkpoint, tmp_path / "out")
    assert any("0 weights were changed" in note for note in notes)
    wanted = {path.name: path.read_bytes() for path in published.iterdir() if path.name != "README.md"}
    assert {path.name: path.read_bytes() for path in (tmp_path / "out").iterdir()} == wanted


def test_trained_weights_stand_under_the_sources_names_in_its_shapes(published: Path, tmp_path: Path) -> None:
    policy = opened(published, "bfloat16" if "nested" not in str(tmp_path) else "float32")
    after = train(policy)
    export(saved(policy, tmp_path / "run", published), tmp_path / "out")
    before, exported = tensors(published), tensors(tmp_path / "out")
    assert {name: (t.shape, t.dtype) for name, t in exported.items()} == {n: (t.shape, t.dtype) for n, t in before.items()}
    changed = {name for name in before if not torch.equal(before[name], exported[name])}
    assert changed
    assert all(".layers.1." in name and ("mlp" in name or "q_proj" in name) for name in changed)
    again = opened(tmp_path / "out", policy_dtype(policy)).model.state_dict()
    assert all(torch.equal(again[name], tensor) for name, tensor in after.items())


def policy_dtype(policy: Policy) -> str:
    return str(policy.dtype).removeprefix("torch.")


def test_weights_trained_in_float32_are_rounded_once_and_it_is_said(tmp_path: Path) -> None:
    source = make_published("Qwen2.5-VL-3B", tmp_path)
    policy = opened(source)
    after = train(policy)
    notes = export(saved(policy, tmp_path / "run", source), tmp_path / "out")
    assert any("were rounded from float32 to bfloat16" in note for note in notes)
    again = opened(tmp_path / "out").model.state_dict()
    assert all(torch.equal(again[name], tensor.bfloat16().float()) for name, tensor in after.items())


def test_experts_one_by_one_are_taken_out_of_the_tensor_of_all(tmp_path: Path) -> None:
    fused = {"model.layers.0.mlp.experts.gate_up_proj": torch.randn(3, 8, 5)}
    fused["model.layers.0.mlp.experts.down_proj"] = torch.randn(3, 5, 4)
    single = {}
    for e in range(3):
        gate, up = fused["model.layers.0.mlp.experts.gate_up_proj"][e].chunk(2)
        down = fused["model.layers.0.mlp.experts.down_proj"][e]
        for part, tensor in (("gate", gate), ("up", up), ("down", down)):
            single[f"thinker.model.layers.0.mlp.experts.{e}.{part}_proj.weight"] = tensor.clone()
    for folder, weights in (("run", fused), ("source", {name: t * 0 for name, t in single.items()})):
        (tmp_path / folder).mkdir()
        save_file(weights, tmp_path / folder / "model.safetensors", {"format": "pt"})
    write_published(tmp_path / "run", tmp_path / "source", tmp_path / "out")
    exported = load_file(tmp_path / "out" / "model.safetensors")
    assert exported.keys() == single.keys()
    assert all(torch.equal(exported[name], tensor) for name, tensor in single.items())


@pytest.mark.parametrize(
    ("trained", "published"),
    [
        ("model.vision_tower.encoder.layers.0.mlp.fc1.bias", "vision_tower.vision_model.encoder.layers.0.mlp.fc1.bias"),
        ("model.language_model.norm.weight", "language_model.model.norm.weight"),
        ("lm_head.weight", "language_model.lm_head.weight"),
        ("language_model.model.norm.weight", "language_model.model.model.norm.weight"),  # saved by transformers 5.17
        ("model.image_newline", "image_newline"),
        ("model.text_model.layers.0.mlp.up_proj.weight", "model.text_model.layers.0.mlp.up_proj.weight"),
    ],
)
def test_prefixes_of_other_published_families_are_known(trained: str, published: str, tmp_path: Path) -> None:
    found = []
    for name in (trained, published):
        save_file({name: torch.zeros(2)}, tmp_path / "one.safetensors")
        found.append({tensor.name: tensor for tensor in read_weight_file(tmp_path / "one.safetensors").tensors})
    assert match_weights(*found, tmp_path, tmp_path)[published].name == trained


def test_a_source_that_is_another_model_is_refused_and_nothing_is_left(tmp_path: Path) -> None:
    source = make_published("Qwen3-0.6B", tmp_path)
    checkpoint = saved(opened(source), tmp_path / "run", source)
    (tmp_path / "other").mkdir()
    other = make_published("Qwen2.5-0.5B", tmp_path / "other")
    with pytest.raises(CheckpointError, match=r"has no place for \d+ weights.*--source"):
        export(checkpoint, tmp_path / "out", layout=str(other))
    assert not (tmp_path / "out").exists()
    assert not list(tmp_path.glob(".out*"))


def test_layers_of_the_source_that_were_not_trained_are_not_carried_along(tmp_path: Path) -> None:
    deep = make_tiny("qwen3", tmp_path / "deep", num_hidden_layers=3)
    flat = make_tiny("qwen3", tmp_path / "flat")
    checkpoint = saved(opened(flat), tmp_path / "run", deep)
    with pytest.raises(
        CheckpointError, match=r"has 11 weights that the model in .* lacks: model\.layers\.2 \(11 weights\)"
    ):
        export(checkpoint, tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_weights_that_the_recipe_names_as_unused_are_carried_along(tmp_path: Path) -> None:
    source = make_tiny("qwen3", tmp_path / "source")
    weights = load_file(source / "model.safetensors") | {"value_head.weight": torch.ones(3)}
    save_file(weights, source / "model.safetensors", {"format": "pt"})
    policy = load_policy(str(source), store=MediaStore(), device="cpu", unused_weights=("value_head.",))
    checkpoint = saved(policy, tmp_path / "run", source)
    recipe = load_recipe("shapes", [f"model.path={source}", "model.unused_weights=[value_head.]"])
    (tmp_path / "run" / "recipe.yaml").write_text(dump_recipe(recipe))
    assert "1 weights under 'value_head.' were carried along untouched" in export(checkpoint, tmp_path / "out")
    assert (tmp_path / "out" / "model.safetensors").read_bytes() == (source / "model.safetensors").read_bytes()
    assert sn.load(tmp_path / "out", device="cpu", unused_weights=["value_head."]).policy.family == "qwen3"


def test_where_the_source_is_gone_it_is_said_what_was_written_instead(tmp_path: Path) -> None:
    source = make_published("Qwen3-VL-30B-A3B", tmp_path)
    checkpoint = saved(opened(source), tmp_path / "run", source)
    source.rename(tmp_path / "moved")
    (note,) = export(checkpoint, tmp_path / "out")
    assert note.startswith("ATTENTION")
    assert "is gone" in note
    assert "as it is in the run" in note
    assert (tmp_path / "out" / "config.json").read_bytes() == (checkpoint / "config.json").read_bytes()
    export(checkpoint, tmp_path / "named", layout=str(tmp_path / "moved"))
    assert (tmp_path / "named" / "config.json").read_bytes() == (tmp_path / "moved" / "config.json").read_bytes()


def test_a_run_that_started_from_a_runs_checkpoint_goes_back_to_that_ones_source(tmp_path: Path) -> None:
    source = make_published("Qwen2.5-Omni-7B", tmp_path)
    first = saved(opened(source), tmp_path / "first", source)
    second = saved(opened(first), tmp_path / "second", first)
    export(second, tmp_path / "out")
    assert tensors(tmp_path / "out").keys() == tensors(source).keys()


READER = """
import json, sys, torch
sys.path.append(sys.argv[2])
from export_reader import import_torchvision
kept = import_torchvision()
import transformers
for line in json.loads(sys.argv[1]):
    folder, kind = line
    model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
    tokens = transformers.AutoTokenizer.from_pretrained(folder)("Which colour is the circle?")["input_ids"]
    with torch.no_grad():
        logits = model(torch.tensor([tokens])).logits
    torch.save({"tokens": tokens, "logits": logits}, folder + ".pt")
print(transformers.__version__)
"""


@pytest.mark.skipif(not PYTHON_4, reason="TRANSFORMERS_4_PYTHON names no interpreter that has transformers 4.57")
def test_transformers_4_reads_every_export_and_gives_the_same_logits(tmp_path: Path) -> None:
    import transformers

    read: list[list[str]] = []
    for name, (family, _) in LAYOUTS.items():
        place = tmp_path / name.replace(" ", "_")
        exported(name, place)
        read.append([str(place / "out"), FAMILY_ROWS[family].class_4])
    done = subprocess.run(
        [PYTHON_4, "-c", READER, json.dumps(read), str(Path(__file__).parent)], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert done.stdout.strip().startswith("4.")
    for folder, kind in read:
        theirs: dict[str, Any] = torch.load(f"{folder}.pt")
        model = getattr(transformers, kind).from_pretrained(folder, dtype=torch.float32)
        with torch.no_grad():
            ours = model(torch.tensor([theirs["tokens"]])).logits
        torch.testing.assert_close(
            theirs["logits"], ours, rtol=1e-4, atol=1e-4, msg=lambda text, of=folder: f"{of}: {text}"
        )
