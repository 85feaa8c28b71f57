"""``sensorium plan``: a page for people, JSON for programs, no torch."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensorium.cli.main import main
from sensorium.data.pictures import indexed_png
from sensorium.data.sound import encode_wav

SMALL = ["model.path=Qwen/Qwen2.5-VL-3B-Instruct", "rollout.max_context_tokens=8192", "steps=1000", "epochs=0"]
ASKED = ["plan", "caprl_image", *SMALL, "--gpus", "8", "--kind", "h100", "--response-tokens", "300", "--engines", "3"]


def test_the_page_names_memory_parts_speed_and_what_was_measured(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(ASKED) == 0
    page = capsys.readouterr().out
    for words in (
        "3 engines, 5 learner ranks",
        "optimizer moments",
        "weight push",
        "sampled tokens/s",
        "scaled",
        "not measured",
    ):
        assert words in page, words
    assert "no cost is shown" in page
    keys = "cluster.learners=5 cluster.engines=3 rollout.engine.name=process cluster.placement=ray"
    assert f"placed by {keys}" in " ".join(page.split()), "the run that this is a plan of"
    assert main([*ASKED, *keys.split()]) == 0, "which is a recipe"
    assert "placed by" not in capsys.readouterr().out
    assert main([*ASKED[:-2], "cluster.learners=7", "cluster.placement=ray"]) == 0
    told = "the recipe asks for 7 learner ranks and 1 engines; this is the fastest division"
    assert told in " ".join(capsys.readouterr().out.split())
    assert main([*ASKED, "--price", "2"]) == 0
    page = capsys.readouterr().out
    assert "at 2 a GPU hour" in page
    assert "no cost is shown" not in page


def test_what_auto_chose_is_said_to_be_its_choice(capsys: pytest.CaptureFixture[str]) -> None:
    for way, told in (("auto", "auto chose true"), ("true", "true")):
        assert main([*ASKED[:-2], "--engines", "4", f"model.gradient_checkpointing={way}"]) == 0
        assert f"(model.gradient_checkpointing: {told})" in " ".join(capsys.readouterr().out.split())


def test_json_has_the_same_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, "--json", "--schedule", "asynchronous", "--staleness", "2"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["deployment"]["engines"] == 3
    assert found["deployment"]["schedule"] == "asynchronous"
    assert found["rank"]["total"] == sum(found["rank"]["uses"].values())
    assert found["run"]["step_s"] > 0
    assert found["cost"] is None


def test_a_mistake_is_one_paragraph(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "caprl_image", "--gpus", "1", "--kind", "l40s"]) == 2
    said = capsys.readouterr().err
    assert said.startswith("error: ")
    assert "does not fit" in said
    assert main([*ASKED, "--price", "-1"]) == 2


@pytest.mark.parametrize(
    ("given", "told"),
    [
        (["--gpus", "100000000000"], "--gpus 1e+11: a plan takes a number up to 10,000"),
        (["--staleness", "1000000000", "--schedule", "asynchronous"], "--staleness 1e+09"),
        (["--price", "nan"], "--price nan"),
        (["--scoring-s", "inf"], "--scoring-s inf"),
        (["--network", "0"], "leave it out"),
        (["rollout.engine.name=vllm", "rollout.engine.options={max_rows: abc}"], "max_rows is 'abc'"),
        (["rollout.engine.name=vllm", "rollout.engine.options={tensor_parallel: 0}"], "tensor_parallel is 0"),
    ],
)
def test_numbers_that_no_plan_can_mean_are_refused(given: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([*ASKED, *given]) == 2
    assert told in capsys.readouterr().err


def test_an_engine_gets_as_many_rows_as_fit_unless_the_recipe_says(capsys: pytest.CaptureFixture[str]) -> None:
    given = ["plan", "taskmem", "--gpus", "8", "--kind", "h200"]
    assert main(given) == 0
    (rows,) = re.findall(r"rollout.engine.options.max_rows=(\d+)", capsys.readouterr().out)
    assert main([*given, f"rollout.engine.options.max_rows={2 * int(rows)}"]) == 2
    assert f"({rows} fits)" in capsys.readouterr().err
    assert main([*given, f"rollout.engine.options.max_rows={rows}"]) == 0
    assert "max_rows" not in capsys.readouterr().out


def test_planning_imports_no_torch() -> None:
    code = "import sys; from sensorium.cli.main import main; main(sys.argv[1:]); sys.exit('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code, *ASKED], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("kind", ["sound", "picture"])
def test_the_vision_tower_counts_only_where_tasks_show_something(
    kind: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.wav").write_bytes(encode_wav(np.zeros(1600, np.float32)))
    (tmp_path / "a.png").write_bytes(indexed_png(np.zeros((8, 8), np.uint8), [(0, 0, 0), (9, 9, 9)]))
    medium, mark = {"sound": ("a.wav", "<audio>"), "picture": ("a.png", "<image>")}[kind]
    rows, gone = tmp_path / "rows.jsonl", tmp_path / "gone.jsonl"
    rows.write_text(json.dumps({"prompt": f"{mark}What is it?", "answer": "A", "media": [medium]}))

    def planned(path: Path) -> dict[str, Any]:
        options = {"path": str(path), "columns": {"prompt": "prompt", "answer": "answer", f"{kind}s": "media"}}
        sources = [
            f"tasks.{side}={json.dumps([{'source': 'jsonl', 'options': options}])}" for side in ("train", "evaluate")
        ]
        asked = [*sources, "model.path=tiny:qwen2_5_omni", "--gpus", "1", "--kind", "h200", "--json"]
        assert main(["plan", "sight_and_sound", *asked]) == 0
        found: dict[str, Any] = json.loads(capsys.readouterr().out)
        return found

    found, unread = planned(rows), planned(gone)
    assert ("vision tower" in found["rank"]["uses"]) == (kind == "picture")
    assert "vision tower" not in {note["what"] for note in found["notes"]}
    assert "vision tower" in unread["rank"]["uses"]
    assert [str(gone) in note["words"] for note in unread["notes"] if note["what"] == "vision tower"] == [True]
