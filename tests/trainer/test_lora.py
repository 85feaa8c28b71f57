"""Runs with adapters: complete checkpoints, a reference without a copy, and kept batches that come back exactly."""

from functools import wraps
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

from sensorium.cli.main import main
from sensorium.recipe.schema import Recipe
from sensorium.report.watcher import Watcher
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.checkpoint import replay
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NonFiniteUpdate
from tests.recipes import parsed, quick

RECIPE = quick(
    "adapted",
    model={"path": "package:shapes", "lora": {"rank": 4, "groups": ["vision", "language"]}},
    rewards={"terms": [{"name": "tests.trainer.test_failures:ByIndex"}]},
    algorithm={"kl": {"coef": 0.1}, "loss": {"aggregation": "token_mean"}},
    optimizer={"lr": 1e-2},
)


def recipe(folder: Path, **changes: Any) -> Recipe:
    return parsed(RECIPE, folder, **changes)


class Breaker(Watcher):
    """Makes the loss not a number after a step."""

    def __init__(self, after: int) -> None:
        self.after, self.broken = after, False

    def stepped(self, step: int, metrics: Any) -> None:
        self.broken = step == self.after


def test_a_run_leaves_whole_models_and_a_kept_batch_is_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sensorium.algorithms.losses as clip

    directory = train(recipe(tmp_path / "run"))
    rows = read_metrics(directory / "metrics.jsonl")
    assert rows[0]["policy/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert rows[1]["policy/kl_ref"] > 0
    assert not (directory / "reference").exists()
    _is_a_whole_model(directory, tmp_path)

    right, breaker = clip.clip, Breaker(after=1)

    @wraps(right)
    def wrong(*tokens: Any, **settings: Any) -> Any:
        found = right(*tokens, **settings)
        return type(found)(found.loss_N * float("nan"), found.clipped_N) if breaker.broken else found

    monkeypatch.setattr(clip, "clip", wrong)
    with pytest.raises(NonFiniteUpdate, match="sensorium replay"):
        train(recipe(tmp_path / "broken"), watchers=[breaker])
    kept = tmp_path / "broken/kept/step_000002"
    with pytest.raises(NonFiniteUpdate):
        replay(kept)
    breaker.broken = False
    again = replay(kept)
    assert again["policy/grad_norm"] > 0
    assert again.items() <= rows[1].items()


def _is_a_whole_model(directory: Path, tmp_path: Path) -> None:
    """What a run leaves behind loads without peft, and its adapter with it; both are the same model."""
    from peft import PeftModel
    from transformers import AutoModelForImageTextToText

    from sensorium.models.checkpoint_path import find_checkpoint

    merged, adapter = tmp_path / "merged", tmp_path / "adapter"
    assert main(["export", str(directory), str(merged), "--as-trained"]) == 0  # the source is in bfloat16
    assert main(["export", str(directory), str(adapter), "--adapter"]) == 0
    base = find_checkpoint("package:shapes")
    names = load_file(Path(base) / "model.safetensors").keys()
    assert load_file(merged / "model.safetensors").keys() == names
    one = AutoModelForImageTextToText.from_pretrained(merged, dtype=torch.float32)
    plain = AutoModelForImageTextToText.from_pretrained(base, dtype=torch.float32)
    untouched = {name: p.clone() for name, p in plain.named_parameters()}
    other = PeftModel.from_pretrained(plain, adapter).merge_and_unload()
    moved = set()
    for name, parameter in one.named_parameters():
        torch.testing.assert_close(parameter, other.get_parameter(name), rtol=0, atol=1e-6)
        if not torch.equal(parameter, untouched[name]):
            moved.add(name)
    assert any("language_model" in name for name in moved)
    assert any("visual.blocks" in name for name in moved)
    assert not any("merger" in name or "embed" in name or "norm" in name for name in moved)


def test_after_a_warm_start_the_former_adapters_are_the_reference(tmp_path: Path) -> None:
    warm = {"steps": 1, "prompts_per_step": 4, "optimizer": {"lr": 1e-2}}
    directory = train(recipe(tmp_path / "run", warm_start=warm))
    rows = read_metrics(directory / "metrics.jsonl")
    assert rows[1]["policy/kl_ref"] == pytest.approx(0, abs=1e-9)
    assert rows[2]["policy/kl_ref"] > 0
    assert sorted(path.name for path in (directory / "reference").iterdir()) == [
        "adapter_config.json",
        "adapter_model.safetensors",
    ]
    former = load_file(directory / "reference/adapter_model.safetensors")
    latter = load_file(directory / "checkpoints/step_000003/adapter/adapter_model.safetensors")
    assert former.keys() == latter.keys()
    assert any(tensor.any() for name, tensor in former.items() if "lora_B" in name)
    assert not all(torch.equal(former[name], latter[name]) for name in former)
