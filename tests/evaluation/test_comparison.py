"""Two evaluations of the same tasks: the difference is of pairs, and what else differs is said."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.cli.main import main
from sensorium.evaluation.comparison import compare
from sensorium.evaluation.summary import mean_interval, paired_interval
from sensorium.systems.audio_visual.sources import COLUMNS
from sensorium.vocabulary.errors import TaskError
from tests.evaluation.made import evaluated, sample, samples

VERDICTS = st.lists(st.tuples(st.sampled_from([True, False, None]), st.sampled_from([True, False, None])), min_size=1)


@given(VERDICTS)
def test_a_comparison_is_what_plain_loops_find(verdicts: list[tuple[bool | None, bool | None]]) -> None:
    a, b = samples([one for one, _ in verdicts]), samples([other for _, other in verdicts])
    right_a = right_b = only_a = only_b = both = 0
    for one, other in verdicts:
        if one is not None and other is not None:
            both += 1
            right_a += one
            right_b += other
            only_a += one and not other
            only_b += other and not one
    if not both:
        with pytest.raises(TaskError, match="no task was judged in both"):
            compare(a, b)
        return
    found = compare(a, b)
    part = found["all"]
    assert (part["tasks"], part["only_a"], part["only_b"]) == (both, only_a, only_b)
    assert part["difference"] == pytest.approx(part["b"]["accuracy"] - part["a"]["accuracy"])
    assert part["a"]["accuracy"] == right_a / both
    assert part["b"]["accuracy"] == right_b / both
    assert found["not_judged"] == len(verdicts) - both
    assert part["interval"] == list(paired_interval([1.0] * only_b + [-1.0] * only_a + [0.0] * (both - only_a - only_b)))


def test_pairs_see_what_two_intervals_do_not() -> None:
    verdicts = [i % 2 == 0 for i in range(400)]
    better = [right or i % 20 == 1 for i, right in enumerate(verdicts)]
    part = compare(samples(verdicts), samples(better))["all"]
    assert part["a"]["interval"][1] > part["b"]["interval"][0], "apart they cannot be told from each other"
    assert part["interval"][0] > 0
    assert part["p"] < 0.001


def test_several_samples_of_a_task_are_one_pair() -> None:
    a = [sample(i, j, correct=j == 0) for i in range(6) for j in range(4)]
    b = [sample(i, j, correct=j < 2 + (i == 0)) for i in range(6) for j in range(4)]
    part = compare(a, b)["all"]
    assert (part["tasks"], part["only_a"], part["only_b"]) == (6, 0, 6)
    assert part["difference"] == pytest.approx((0.5 + 5 * 0.25) / 6)
    assert part["a"]["interval"] == list(mean_interval([0.25] * 6, 4))


def test_a_task_that_comes_twice_is_two_tasks() -> None:
    a = [sample(0), sample(1, correct=False)]
    twice = [sample(0, **{"category": "all"}), sample(1, correct=True)]
    renamed = [[type(one)(**{**vars(one), "task": "t"}) for one in side] for side in (a, twice)]
    assert compare(*renamed)["all"]["tasks"] == 2
    assert compare(*renamed)["all"]["only_b"] == 1


def test_the_command_prints_and_writes_both_sides_by_category(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    kinds = [list(COLUMNS)[i % 6] for i in range(60)]
    sides = []
    for name, right in (("base", 3), ("after", 2)):
        made = [sample(i, correct=i % right == 0, category=kind) for i, kind in enumerate(kinds)]
        sides.append(str(evaluated(tmp_path / name, made, model=name, columns=COLUMNS)))
    assert main(["compare", *sides]) == 0
    out = capsys.readouterr().out
    lines = [" ".join(line.split()) for line in out.splitlines()]
    assert "all AV alignment comparative context sequence inference reasoning" in lines
    assert any(line.startswith("A accuracy 33.3 % ") for line in lines)
    assert any(line.startswith("B accuracy 50.0 % ") for line in lines)
    assert any(line.startswith("B − A, points +16.7 ") for line in lines)
    assert any(line.startswith("only A right 10 ") for line in lines)
    assert any(line.startswith("only B right 20 ") for line in lines)
    assert f"B: {sides[1]} (after)" in lines
    found = json.loads((tmp_path / "after" / "comparison.json").read_text())
    assert found["all"]["tasks"] == 60
    assert list(found["categories"]) == list(COLUMNS)
    page = (tmp_path / "after" / "comparison.md").read_text()
    assert "|  | all | AV alignment | comparative | context | sequence | inference | reasoning |" in page
    assert "| B − A, points | +16.7 |" in page


def test_what_else_differs_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluated(tmp_path / "a", samples([True, False, None, True]), model="same")
    b = evaluated(tmp_path / "b", samples([True, True, True], question="?"), model="same")
    assert main(["compare", str(a), str(b), "--out", str(tmp_path / "both")]) == 0
    out = capsys.readouterr().out
    assert "Compared on the 3 tasks that both have; 1 are in A only and 0 in B only." in out
    assert "1 tasks that both have are left out" in out
    assert "3 tasks were put to B in other words or with other media than to A." in out
    assert "A and B are the same model" in out
    assert {path.name for path in (tmp_path / "both").iterdir()} == {"comparison.md", "comparison.json"}
    claim = json.loads((b / "evaluation.json").read_text())
    claim["settings"]["temperature"] = 0.7
    (b / "evaluation.json").write_text(json.dumps(claim))
    assert main(["compare", str(a), str(b)]) == 0
    assert "Not only the model differs: temperature is 0.0 for A and 0.7 for B." in capsys.readouterr().out


@pytest.mark.parametrize(
    ("b", "said"),
    [
        ("nowhere", "holds no evaluation"),
        ("unfinished", "not finished"),
        ("others", "no task was judged in both"),
        ("answers", "task t0: its answer is '?' in A and 'B' in B, so these are different questions"),
    ],
)
def test_what_cannot_be_compared_is_refused(b: str, said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a = evaluated(tmp_path / "a", samples([True, False]))
    (evaluated(tmp_path / "unfinished", samples([True])) / "summary.json").unlink()
    evaluated(tmp_path / "others", [sample(7)])
    evaluated(tmp_path / "answers", samples([True, False], answer="B"))
    assert main(["compare", str(a), str(tmp_path / b)]) == 2
    assert said in capsys.readouterr().err


def test_comparing_needs_no_torch(tmp_path: Path) -> None:
    a, b = (str(evaluated(tmp_path / name, samples([True, False]))) for name in "ab")
    code = "import sys; from sensorium.cli.main import main; main(sys.argv[1:]); assert 'torch' not in sys.modules"
    done = subprocess.run([sys.executable, "-c", code, "compare", a, b], capture_output=True, text=True, timeout=600)
    assert done.returncode == 0, done.stderr
