"""Families that hear and see nothing learn to name tones, by demonstrations and rewards; runs are checked and exported.

The task: rows of a JSONL file, each with the WAV of a high or a low tone and the question which of the two it is.
"""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.cli.export import export
from sensorium.cli.main import main
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.models.load import load_policy
from sensorium.recipe.schema import Recipe
from sensorium.runs.metrics import read_metrics
from sensorium.systems.audio_visual.generated import tone_samples
from sensorium.trainer.run import train
from sensorium.vocabulary.content import user
from tests.families import ONLY_HEARING, stock_class
from tests.models.stock_pair import Pair, close
from tests.recipes import parsed, quick


def tones(folder: Path, name: str, variants: range) -> dict[str, Any]:
    """A source of rows about tones, whose files are made here."""
    folder.mkdir(parents=True, exist_ok=True)
    rows = []
    for variant in variants:
        for tone in ("low", "top"):
            (folder / f"{tone}-{variant}.wav").write_bytes(encode_wav(tone_samples(tone, variant, 0.2)))
            blocks = [{"type": "audio", "path": f"{tone}-{variant}.wav"}, {"type": "text", "text": "Which tone?"}]
            row = {"messages": [{"role": "user", "content": blocks}], "answer": tone}
            rows.append(row | {"demonstration": f"<answer>{tone}</answer>"})
    (folder / f"{name}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return {"source": "jsonl", "options": {"path": str(folder / f"{name}.jsonl")}}


def recipe(family: str, folder: Path) -> Recipe:
    """A warm start on demonstrations, then GRPO."""
    made = quick(
        "tones",
        model={"path": f"tiny:{family}", "device": "cpu"},
        tasks={
            "train": [tones(folder, "train", range(16))],
            "evaluate": [tones(folder, "held_out", range(16, 24))],
        },
        steps=8,
        warm_start={"steps": 8, "prompts_per_step": 16, "optimizer": {"lr": 3e-3}},
        batch={"prompts_per_step": 8, "group_size": 8},
        rollout={"max_new_tokens": 5},
        rewards={"terms": [{"name": "exact"}]},
        optimizer={"lr": 1e-3},
        evaluation={"every": 8, "at_start": True},
    )
    return parsed(made, folder / "run")


@pytest.mark.parametrize("family", ONLY_HEARING)
def test_tones_are_learned_by_demonstrations_and_rewards_and_the_export_is_read_by_the_stock_class(
    family: str, tmp_path: Path
) -> None:
    train(recipe(family, tmp_path))
    rows = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert all(row["mismatch/max"] < 1e-4 for row in rows if "mismatch/max" in row)
    rewarded = [row["reward/mean"] for row in rows if "reward/mean" in row]
    assert len(rewarded) == 8
    assert rewarded[0] > 0.3, "the demonstrations have taught the form of an answer"
    assert sum(rewarded[-2:]) - sum(rewarded[:2]) > 0.4, rewarded
    assert rows[-1]["eval/accuracy"] >= 0.9, "of 16 held-out tones"

    export(tmp_path / "run" / "checkpoints" / f"step_{len(rows):06d}", tmp_path / "out")
    policy = load_policy(str(tmp_path / "out"), store=MediaStore(), device="cpu")
    pair = Pair(policy, stock_class(family).from_pretrained(tmp_path / "out", dtype=torch.float32).eval(), tmp_path)
    question = [user(pair.tone(1, 0.7), "Which tone?")]
    with torch.no_grad():
        close(pair.got([policy.chat.render(question)]), pair.want(pair.inputs(question)))


@pytest.mark.parametrize("family", ONLY_HEARING)
def test_a_dry_run_counts_the_tower_without_torch_and_validation_finds_sounds_it_cannot_hear(
    family: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = tmp_path / "tones.yaml"
    asked = recipe(family, tmp_path)
    place.write_text(json.dumps(asked.model_dump(mode="json", exclude_unset=True)))
    # The demonstrations have fewer bytes than that, so no tokenizer is loaded to count their tokens.
    code = "import sys; from sensorium.cli.main import main; code = main(sys.argv[1:]); "
    code += "assert 'torch' not in sys.modules; sys.exit(code)"
    done = subprocess.run(
        [sys.executable, "-c", code, "train", str(place), "--dry-run", "rollout.max_new_tokens=64"],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "parameters 623.1 k" in " ".join(done.stdout.split())
    assert main(["validate", str(place)]) == 0
    capsys.readouterr()
    for tone in ("low", "top"):
        (tmp_path / f"{tone}-3.wav").write_bytes(encode_wav(tone_samples(tone, 3, 30.5)))
    assert main(["validate", str(place)]) == 1
    told = capsys.readouterr().out
    assert "low-3.wav" in told
    assert "30.5 s" in told
