"""A checkpoint is complete or absent, whatever moment the process is killed at."""

import os
import signal
import sys
from pathlib import Path

import pytest
import torch

from sensorium.assembly.local_learner import LocalLearner
from sensorium.data.media_store import MediaStore
from sensorium.learner.saved_state import load_state, save_state
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer import checkpoint
from sensorium.trainer.checkpoint import Best, Checkpoints
from sensorium.vocabulary.errors import CheckpointError, NonFiniteModel, RecordError

from .small import small

WATCHED = ("open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree", "os.listdir", "os.scandir")


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    folder = tmp_path_factory.mktemp("tiny")
    make_tiny("qwen2_5_vl", folder)
    return load_policy(str(folder), store=MediaStore(), device="cpu")


@pytest.fixture(scope="module")
def learner(policy: Policy, tmp_path_factory: pytest.TempPathFactory) -> LocalLearner:
    folder = tmp_path_factory.mktemp("run")
    return LocalLearner(small(folder / "run"), policy, RunDirectory(folder / "run"))


@pytest.fixture(scope="module")
def plain_learner(tmp_path_factory: pytest.TempPathFactory) -> LocalLearner:
    """Of a model that is saved in few files."""
    folder = tmp_path_factory.mktemp("plain")
    policy = load_policy(str(make_tiny("qwen2", folder / "tiny", num_hidden_layers=1)), store=MediaStore(), device="cpu")
    return LocalLearner(small(folder / "run"), policy, RunDirectory(folder / "run"))


def save_and_die_at(event: int, checkpoints: Checkpoints, learner: LocalLearner) -> bool:
    """Save step 2 in a child that kills itself at the n-th file-system event; True if it lived to the end."""
    child = os.fork()
    if child == 0:
        left = event

        def hook(name: str, args: tuple[object, ...]) -> None:
            nonlocal left
            reading = name == "open" and str(args[1]).startswith("r")
            if name in WATCHED and not reading:
                left -= 1
                if left == 0:
                    os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(hook)
        checkpoints.save(2, learner, {"step": 2}, None)
        os._exit(0)
    _, status = os.waitpid(child, 0)
    return not os.WIFSIGNALED(status)


def test_a_kill_at_any_write_point_leaves_a_complete_checkpoint(plain_learner: LocalLearner, tmp_path: Path) -> None:
    torch.set_num_threads(1)
    checkpoints = Checkpoints(tmp_path, keep=1)
    event, lived = 1, False
    seen: set[int] = set()
    complete: list[int] = []
    while not lived:
        checkpoints = Checkpoints(tmp_path, keep=1)
        if complete == [1]:
            checkpoints.clear_after(1)  # what the killed save left
        else:
            checkpoints.clear_after(0)
            checkpoints.save(1, plain_learner, {"step": 1}, None)
        lived = save_and_die_at(event, checkpoints, plain_learner)
        complete = checkpoints.complete()
        assert complete, f"killed at event {event}: no complete checkpoint is left"
        assert checkpoints.load(complete[-1]) == {"step": complete[-1]}
        seen.add(complete[-1])
        event += 1
    assert event > 10, "the save was hardly interrupted"
    assert seen == {1, 2}, "kills before and after the rename were both tried"


def test_a_killed_save_is_cleared_and_the_next_one_succeeds(learner: LocalLearner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    checkpoints.save(1, learner, {"step": 1}, None)
    assert not save_and_die_at(8, checkpoints, learner)
    checkpoints.clear_after(1)
    checkpoints.save(2, learner, {"step": 2}, None)
    assert checkpoints.complete() == [1, 2]
    assert not list(tmp_path.glob(".*"))


def test_retention_keeps_the_newest_and_the_best(learner: LocalLearner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    for step in range(1, 6):
        checkpoints.save(step, learner, {"step": step}, Best(2, 0.9) if step >= 2 else None)
    assert checkpoints.complete() == [2, 4, 5]
    assert checkpoints.best() == Best(2, 0.9)


def test_a_checkpoint_with_a_short_file_is_not_complete(learner: LocalLearner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, keep=2)
    path = checkpoints.save(1, learner, {"step": 1}, None)
    weights = next(path.glob("*.safetensors"))
    weights.write_bytes(weights.read_bytes()[:-1])
    assert checkpoints.complete() == []
    with pytest.raises(CheckpointError, match="not complete"):
        checkpoints.load(1)


def test_a_checkpoint_loads_with_transformers_and_gives_the_same_logits(
    policy: Policy, learner: LocalLearner, tmp_path: Path
) -> None:
    from transformers import AutoModelForImageTextToText

    path = Checkpoints(tmp_path, keep=1).save(1, learner, {"step": 1}, None)
    loaded = AutoModelForImageTextToText.from_pretrained(path)
    ids_BT = torch.arange(300, 340)[None]
    with torch.no_grad():
        ours = policy.model(input_ids=ids_BT, mm_token_type_ids=torch.zeros_like(ids_BT)).logits
        theirs = loaded(input_ids=ids_BT, mm_token_type_ids=torch.zeros_like(ids_BT)).logits
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_a_model_that_is_not_finite_does_not_take_a_good_checkpoints_place(
    number: float, policy: Policy, learner: LocalLearner, tmp_path: Path
) -> None:
    checkpoints = Checkpoints(tmp_path, keep=1)
    checkpoints.save(1, learner, {"step": 1}, None)
    weight = policy.model.lm_head.weight
    was = weight.data[0, 0].item()
    try:
        weight.data[0, 0] = number
        with pytest.raises(NonFiniteModel, match=r"after step 2 .* Complete checkpoints are of step: 1\."):
            checkpoints.save(2, learner, {"step": 2}, None)
    finally:
        weight.data[0, 0] = was
    assert [path.name for path in tmp_path.iterdir()] == ["step_000001"]


class Payload:
    """What a pickle runs when it is read."""

    def __init__(self, command: str) -> None:
        self.command = command

    def __reduce__(self) -> tuple[object, tuple[str]]:
        return os.system, (self.command,)


def test_a_state_that_would_run_code_is_refused_and_nothing_runs(learner: LocalLearner, tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path / "checkpoints", keep=1)
    path = checkpoints.save(1, learner, {"step": 1}, None)
    torch.save({"step": Payload(f"touch {tmp_path / 'ran'}")}, path / "trainer" / "state.pt")
    with pytest.raises(CheckpointError, match=r"state\.pt' holds Python objects.*refused.*older version"):
        load_state(path / "trainer" / "state.pt")
    assert not (tmp_path / "ran").exists()
    with pytest.raises(CheckpointError, match=r"not complete: trainer/state\.pt has"):
        checkpoints.load(1)


def test_a_state_of_an_older_version_is_refused_with_what_to_do(tmp_path: Path) -> None:
    torch.save({"best": Best(1, 0.5)}, tmp_path / "state.pt")
    with pytest.raises(CheckpointError, match=r"go on with that version, or start a new run from the weights"):
        load_state(tmp_path / "state.pt")


def test_a_state_cut_short_is_one_paragraph(tmp_path: Path) -> None:
    save_state({"tensor": torch.zeros(1000)}, tmp_path / "state.pt")
    data = (tmp_path / "state.pt").read_bytes()
    for size in (0, 10, len(data) // 2, len(data) - 1):
        (tmp_path / "state.pt").write_bytes(data[:size])
        with pytest.raises(CheckpointError, match=r"state\.pt' "):
            load_state(tmp_path / "state.pt")


@pytest.mark.parametrize(
    ("said", "way_out"),
    [
        ("Error while serializing: I/O error: No space left on device (os error 28)", "The disk is full"),
        ("[enforce fail at inline_container.cc:672] . unexpected pos 3956608 vs 3956560", "ulimit -f"),
    ],
)
def test_a_failed_write_in_a_library_tells_the_way_out(said: str, way_out: str, tmp_path: Path) -> None:
    """The probe that follows such an error may succeed: the library wrote more than it does."""
    with pytest.raises(RecordError, match=way_out), checkpoint._writing(tmp_path):
        raise RuntimeError(said)
