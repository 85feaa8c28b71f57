"""A run that an earlier version began, before the packages were regrouped, goes on with today's code.

``stored_run.tar.xz`` holds ``model`` (33,744 weights), ``recipe.yaml`` and ``stored_run``: the recipe's run, killed in the
update of its last step, with the checkpoint of step 2 of 3.
"""

import tarfile
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file

import sensorium as sn
from sensorium.cli.main import main
from sensorium.report.page import write_report
from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import read_credits_of, read_episodes
from sensorium.runs.metrics import read_metrics, repeatable
from sensorium.runs.run_directory import RunDirectory

ARCHIVE = Path(__file__).with_name("stored_run.tar.xz")
CLOSE = {"rel": 1e-3, "abs": 1e-5}  # Kernels of another CPU may differ in the last bits.


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> tuple[RunDirectory, RunDirectory, RunDirectory]:
    """The run as it was stored, the stored run resumed, and the same recipe trained from its beginning."""
    folder = tmp_path_factory.mktemp("stored")
    for name in ("before", "now"):
        with tarfile.open(ARCHIVE) as archive:
            archive.extractall(folder / name, filter="data")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder / "now")
        assert main(["train", "stored_run", "--resume"]) == 0
        assert main(["train", "recipe.yaml", "run_dir=whole"]) == 0
    places = ("before/stored_run", "now/stored_run", "now/whole")
    before, resumed, whole = (RunDirectory(folder / place) for place in places)
    return before, resumed, whole


def weights(run: RunDirectory, step: int) -> dict[str, torch.Tensor]:
    return load_file(run.checkpoint_of(step) / "model.safetensors")


def common(wanted: dict[str, Any], found: dict[str, Any]) -> dict[str, Any]:
    """What a row of today's code holds of the metrics there were when the run was stored."""
    return {name: value for name, value in wanted.items() if name in found}


def test_a_stored_run_continues_as_an_uninterrupted_run_does(runs: tuple[RunDirectory, RunDirectory, RunDirectory]) -> None:
    before, resumed, whole = runs
    stored, again, expected = (read_metrics(run.metrics) for run in runs)
    assert [row["step"] for row in stored] == [1, 2]
    assert again[:2] == stored, "the rows of earlier steps stay as they are"
    assert [row["step"] for row in again] == [row["step"] for row in expected] == [1, 2, 3]
    for found, wanted in zip(again, expected, strict=True):
        assert repeatable(found) == pytest.approx(common(repeatable(wanted), found), **CLOSE)
    learned, uninterrupted, begun = weights(resumed, 3), weights(whole, 3), weights(before, 2)
    assert learned.keys() == uninterrupted.keys()
    for name, tensor in uninterrupted.items():
        torch.testing.assert_close(learned[name], tensor, rtol=1e-3, atol=1e-5)
    assert any(not tensor.equal(learned[name]) for name, tensor in begun.items()), "step 3 trained"
    if all(tensor.equal(weights(whole, 2)[name]) for name, tensor in begun.items()):
        # This processor computes as the one that stored the run: the rest repeats bit for bit, too.
        assert all(tensor.equal(learned[name]) for name, tensor in uninterrupted.items())
        for found, wanted in zip(again, expected, strict=True):
            assert repeatable(found) == common(repeatable(wanted), found)
        for found_row, wanted_row in zip(*(read_rows(run.episodes_of(2)) for run in (resumed, whole)), strict=True):
            assert found_row == common(wanted_row, found_row)
        assert resumed.episodes_of(3).read_bytes() == whole.episodes_of(3).read_bytes()


def test_what_a_stored_run_holds_is_read(runs: tuple[RunDirectory, RunDirectory, RunDirectory], tmp_path: Path) -> None:
    """Episodes with their pictures and advantages, metrics, evaluations, checkpoint and report."""
    before = runs[0]
    episodes = list(read_episodes(before.episodes_of(2)))
    assert [(step, task.id, episode.index, episode.reward) for step, task, episode in episodes] == [
        (2, "shapes/train/0/2", 0, 0.0),
        (2, "shapes/train/0/2", 1, 1.0),
        (2, "shapes/train/0/5", 0, 0.0),
        (2, "shapes/train/0/5", 1, 1.0),
    ]
    assert all(episode.sampled_tokens == 6 for _, _, episode in episodes)
    shown = {block.hash for _, task, _ in episodes for message in task.messages for block in message.media}
    assert len(shown) == 2
    assert all((before.media / hash).is_file() for hash in shown)
    credits = read_credits_of(read_rows(before.episodes_of(2)))
    assert [credits[episode.id].fate for _, _, episode in episodes] == ["trained"] * 4
    assert [len(turn) for credit in credits.values() for turn in credit.advantages] == [6] * 4
    run = sn.Run(before.path)
    assert run.metrics["policy/grad_norm"] == pytest.approx([4.264245510101318, 1.3192912340164185])
    assert [(row["step"], row["tasks"]) for row in run.evaluations] == [(1, 2), (2, 2)]
    assert run.checkpoint == run.last_checkpoint == before.checkpoint_of(2)
    page = write_report(before).read_text()
    assert "How many are blue?" in page
    assert "parity" in page
