"""docs/guides/engines.md: its engine samples a run, and the options it lists are those there are."""

import re
from pathlib import Path

import pytest

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.process_engine import ProcessEngine
from sensorium.engines.vllm.vllm_engine import VllmEngine
from sensorium.recipe.registry import parameters_of
from studies.pages import follow

PAGE = Path(__file__).parents[2] / "docs/guides/engines.md"
SMALL = ["batch.prompts_per_step=2", "batch.group_size=2", "evaluation.every=0", "evaluation.at_start=false"]
SMALL += ["health.sight_tasks=0", "threads=1"]
OURS = {"policy", "lockstep", "host"}
"""What a run gives an engine beside the recipe's options."""


def test_the_engine_of_the_page_samples_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    follow(PAGE, tmp_path, lambda words: [*words, *SMALL])
    assert re.search(r"^[1-9]\d* tokens$", capsys.readouterr().out, re.MULTILINE)
    assert (tmp_path / "runs/counted/metrics.jsonl").exists()


def test_every_option_is_on_the_page() -> None:
    text = PAGE.read_text()
    for engine in (NativeEngine, ProcessEngine):
        options = parameters_of(engine).keys() - OURS
        assert options == {option for option in options if f"`{option}`" in text}


def test_every_option_of_vllm_is_on_its_page() -> None:
    text = (PAGE.parent / "scale_out.md").read_text()
    options = parameters_of(VllmEngine).keys() - OURS
    assert options == {option for option in options if f"`{option}`" in text}
