"""The study of parity: its verdicts, and one tiny step of each system on the same rows."""

import json
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from torch import Tensor

from studies import parity
from studies.parity import PROBLEMS, SYSTEMS, compare, compare_tensors, verdict, write_batch, write_rows
from tests.tiny_models import make_tiny

TINY = {name: replace(problem, steps=1, prompts=2, group=4) for name, problem in PROBLEMS.items()}


@pytest.mark.parametrize(
    ("differences", "word"),
    [
        ([0.01, -0.01, 0.02, -0.02, 0.0], "equivalent within 0.05"),
        ([0.0, 0.0, 0.0], "equivalent within 0.05"),
        ([0.020, 0.021, 0.022, 0.019], "equivalent within 0.05"),  # not 0, but nobody would care
        ([0.10, 0.12, 0.09, 0.11], "differs"),
        ([-0.10, -0.12, -0.09, -0.11], "differs"),
        ([0.04, 0.06, 0.05, 0.045], "differs"),  # it leaves the margin and excludes 0
        ([0.2, -0.2, 0.15, -0.1], "undecided"),
        ([0.0], "undecided"),
    ],
)
def test_a_verdict_is_that_of_the_interval_and_the_margin(differences: list[float], word: str) -> None:
    found = verdict(differences)
    assert found["verdict"] == word
    assert found["seeds"] == len(differences)
    assert found["mean"] == pytest.approx(sum(differences) / len(differences))


def test_only_seeds_that_all_systems_have_are_compared() -> None:
    runs = [
        {"seed": seed, "system": system, "sampled": 0.5 + 0.1 * (system == "trl") + 0.001 * seed, "greedy": 0.6}
        for seed in (1, 0, 2)
        for system in SYSTEMS
    ]
    found = compare([*runs, {"seed": 3, "system": "trl", "sampled": 0.0, "greedy": 0.0}])
    assert found["sampled"]["systems"]["trl"]["range"] == pytest.approx([0.6, 0.602])
    assert found["sampled"]["differences"]["sensorium - trl"]["mean"] == pytest.approx(-0.1)
    assert found["sampled"]["differences"]["sensorium - trl"]["verdict"] == "differs"
    assert found["greedy"]["differences"]["sensorium - one_file"]["verdict"] == "equivalent within 0.05"
    assert compare(runs[:2]) == {}


def test_the_page_quotes_the_committed_results() -> None:
    page = (parity.ROOT / "studies/README.md").read_text()
    for name in PROBLEMS:
        stored = json.loads((parity.RESULTS / f"parity_{name}.json").read_text())
        assert stored["comparison"] == json.loads(json.dumps(compare(stored["runs"])))
        assert len({run["seed"] for run in stored["runs"]}) >= 10
        for measure, found in stored["comparison"].items():
            means = " | ".join(f"{found['systems'][system]['mean']:.3f}" for system in SYSTEMS)
            apart = found["differences"]["sensorium - trl"]
            low, high = apart["interval"]
            difference = f"{apart['mean']:+.3f} [{low:+.3f}, {high:+.3f}], {apart['seeds']} seeds"
            before, word = stored["before"][measure], apart["verdict"].split()[0]
            assert f"| {name}, {measure} | {before:.3f} | {means} | {difference} | {word} |" in page


def test_sums_are_held_out_and_rows_repeat(tmp_path: Path) -> None:
    known, held_out = set(parity.sums(False)), set(parity.sums(True))
    assert not known & held_out
    assert len(known | held_out) == 90 * 90
    for problem in TINY.values():
        paths = [write_rows(problem, tmp_path / f"{problem.name}{i}", 8, seed) for i, seed in enumerate((0, 0, 1))]
        first, again, other = (path.read_text() for path in paths)
        assert first == again != other


def test_the_page_of_studies_quotes_the_gradients() -> None:
    root = Path(parity.__file__).parent
    found, text = json.loads((root / "results/parity_gradient.json").read_text()), (root / "README.md").read_text()
    for pair in ("sensorium - one_file", "sensorium - trl", "one_file, no mask - trl"):
        assert " | ".join(f"{found[name][pair]['relative']:.1e}" for name in PROBLEMS) in text, pair
        assert all(found[name][pair]["only in one"] == [] for name in PROBLEMS)


def start_of(name: str, folder: Path) -> Path:
    return PROBLEMS[name].start(folder) if name == "shapes" else make_tiny("qwen3", folder / "start")


def weights(folder: Path) -> dict[str, Tensor]:
    from safetensors.torch import load_file

    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("name", PROBLEMS)
def test_a_step_of_sensorium_and_of_the_example_samples_and_learns_the_same(name: str, tmp_path: Path) -> None:
    problem, start = TINY[name], start_of(name, tmp_path)
    rows = write_rows(problem, tmp_path / "rows", problem.prompts, seed=0)
    ends, curves = {}, {}
    for system in ("sensorium", "one_file"):
        out = tmp_path / system
        out.mkdir()
        curves[system] = parity.RUNNERS[system](problem, start, rows, 0, out)
        ends[system] = weights(out / "model")
        found = parity.evaluate(problem, start, out / "model", parity.read_rows(rows))
        assert set(found) == {"sampled", "greedy"}
    assert len(curves["sensorium"]) == 1
    assert curves["sensorium"] == pytest.approx(curves["one_file"])
    assert ends["sensorium"].keys() == ends["one_file"].keys()
    for key, tensor in ends["one_file"].items():
        assert ends["sensorium"][key].dtype == torch.float32
        # The first step of Adam is the gradient's sign: where that is next to 0, it may be either.
        apart = (ends["sensorium"][key] - tensor).abs() > 0.1 * problem.lr
        assert apart.float().mean() < 0.02, key


@pytest.mark.parametrize("name", PROBLEMS)
def test_first_gradients_agree(name: str, tmp_path: Path) -> None:
    problem, start = TINY[name], start_of(name, tmp_path)
    write_batch(problem, start, tmp_path / "batch", prompts=2)
    batch = json.loads((tmp_path / "batch" / "batch.json").read_text())
    if not any(any(row) for row in batch["advantages_PG"]):  # a random model is never right
        batch["advantages_PG"] = [[1.0, -1.0, 0.5, -0.5]] * 2
        (tmp_path / "batch" / "batch.json").write_text(json.dumps(batch))
    found = {
        system: compute(problem, start, tmp_path / "batch")
        for system, compute in parity.GRADIENTS.items()
        if system != "trl" or find_spec("trl")
    }
    same = [("sensorium", "one_file"), *([("one_file, no mask", "trl")] if "trl" in found else [])]
    for one, other in same:
        compared = compare_tensors(found[one], found[other])
        assert compared["relative"] < 1e-4, (one, other)
        assert compared["only in one"] == []
    # What TRL leaves in the softmax does matter for a model that writes special tokens.
    assert compare_tensors(found["one_file, no mask"], found["one_file"])["relative"] > 1e-6
