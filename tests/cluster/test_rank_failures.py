"""What answers and deaths of ranks add up to, each in one paragraph; and clusters that cannot be used."""

import os
import sys
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.checkpoint.api import CheckpointException

from sensorium.assembly import ranks as ranks_module
from sensorium.assembly.ranks import Answer, SharedError, failed, judged
from sensorium.cluster.ray_host import connect, refuse_small, send_token, short
from sensorium.vocabulary.errors import LearnerLost, ModelError, NonFiniteUpdate, RecipeError

FINE = Answer(1)


def test_answers_come_in_the_order_of_the_ranks() -> None:
    assert judged({1: Answer("b"), 0: Answer("a")}, 2, [], "step", 1.0) == [Answer("a"), Answer("b")]


def test_an_error_of_all_ranks_leaves_them_alive() -> None:
    bad = failed(NonFiniteUpdate("loss nan"))
    with pytest.raises(SharedError) as shared:
        judged({0: bad, 1: bad}, 2, [], "step", 1.0)
    assert isinstance(shared.value.error, NonFiniteUpdate)


def test_an_error_of_one_rank_is_raised_as_it_was() -> None:
    with pytest.raises(ModelError, match="no such token"):
        judged({0: FINE, 1: failed(ModelError("no such token"))}, 2, [], "step", 1.0)
    with pytest.raises(LearnerLost, match=r"rank 1 of the learner failed: RuntimeError\('out of memory'\)"):
        judged({0: FINE, 1: failed(RuntimeError("out of memory"))}, 2, [], "step", 1.0)


def test_a_death_explains_the_errors_of_those_who_were_left() -> None:
    left = failed(RuntimeError("Connection closed by peer"))
    with pytest.raises(LearnerLost, match="rank 1 was killed"):
        judged({0: left}, 2, ["rank 1 was killed by SIGKILL."], "step", 1.0)


def test_a_rank_that_waited_for_a_silent_one_is_not_the_cause() -> None:
    waited = failed(RuntimeError("unbound_buffer.cc:129] Timed out waiting 6000ms for send operation to complete"))
    with pytest.raises(LearnerLost, match="of the learner's 2 ranks, 1 did not answer 'weights'"):
        judged({0: waited}, 2, [], "weights", 6.0)


def test_ranks_that_cannot_write_a_checkpoint_are_named_with_their_own_error() -> None:
    error = CheckpointException("write", {1: (OSError(28, "No space left on device"), StackSummary())})
    with pytest.raises(SharedError, match=r"failed: OSError\(28, 'No space left on device'\) on rank 1$"):
        judged({0: failed(error), 1: failed(error)}, 2, [], "save_state", 1.0)


def test_silent_ranks_are_named_with_the_key_to_raise() -> None:
    with pytest.raises(LearnerLost, match=r"3 ranks, 0, 2 did not answer 'open' within 5 s.*cluster.start_s"):
        judged({1: FINE}, 3, [], "open", 5.0)


def test_a_cluster_that_is_too_small_is_refused_before_anything_waits() -> None:
    needs = {"GPU": {"cluster.learners": 2.0, "cluster.engines": 2.0}}
    refuse_small({"GPU": 4.0}, needs)
    with pytest.raises(RecipeError, match=r"has 0 GPUs, and .* needs 4 \(cluster.learners 2, cluster.engines 2\)"):
        refuse_small({"CPU": 8.0}, needs)


def test_without_ray_the_way_out_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(RecipeError, match=r"pip install 'sensorium\[ray\]'"):
        connect("", {"CPU": {"cluster.learners": 2.0}})


@pytest.mark.parametrize(
    ("variables", "mode"),
    [
        ({}, None),
        ({"RAY_AUTH_TOKEN": "t"}, "token"),
        ({"RAY_AUTH_TOKEN": "t", "RAY_AUTH_MODE": "disabled"}, "disabled"),
    ],
)
def test_a_token_is_sent_to_a_cluster_by_address(
    variables: dict[str, str], mode: str | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Ray 2.60 sends it to "auto" alone, so a driver with the right token was turned away."""
    for name in ("RAY_AUTH_MODE", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    for name, value in {"HOME": str(tmp_path), **variables}.items():
        monkeypatch.setenv(name, value)
    send_token()
    assert os.environ.get("RAY_AUTH_MODE") == mode


def test_what_ray_says_is_told_with_the_cause_at_its_end() -> None:
    buried = 'The actor died in its creation task, ray::RankActor.__init__()\n  File "x.py", line 3\nImportError: no y'
    assert short(RuntimeError(buried)).endswith("RankActor.__init__(). ImportError: no y.")
    assert short(RuntimeError("cannot connect\nmore of it")) == "cannot connect."


class OneRank:
    """Ranks that write weights where they are told to."""

    def ask(self, name: str, *given: Any) -> Answer:
        self.file = Path(given[0])
        save_file({"w": torch.ones(2)}, self.file)
        return Answer()


@pytest.mark.parametrize(("address", "room", "place"), [("", True, "memory"), ("", False, "disk"), ("auto", True, "disk")])
def test_weights_come_through_memory_only_where_there_is_room(
    address: str, room: bool, place: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container's shared memory is 64 MiB: a model beyond it goes by the disk, as it does between machines."""
    (tmp_path / "memory").mkdir()
    (tmp_path / "disk").mkdir()
    monkeypatch.setattr(ranks_module, "memory_folder", lambda size: tmp_path / "memory" if room and size == 24 else None)
    monkeypatch.setattr(ranks_module, "GroupCosts", lambda policy: None)
    policy = SimpleNamespace(model=torch.nn.Linear(2, 2), version=0)
    recipe = SimpleNamespace(cluster=SimpleNamespace(address=address))
    given: Any = (recipe, SimpleNamespace(policy=policy), None, ranks := OneRank(), tmp_path / "disk")
    assert ranks_module.ShardedLearner(*given).weights()["w"].tolist() == [1, 1]
    assert ranks.file.parent.name == place
    assert not ranks.file.exists()
