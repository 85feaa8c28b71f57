"""Runs whose episodes are sampled by several engines in processes of their own, and what happens when one is killed."""

from pathlib import Path

import pytest

from sensorium.recipe.schema import Recipe
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.runs.process_table import read_processes
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import EngineLost, RecipeError
from tests.cluster.killed_engine import kill_an_engine
from tests.trainer.small import small

STREAM = ("schedule.name=asynchronous", "algorithm.correction.weights=token")


def shared_out(folder: Path, *overrides: str) -> Recipe:
    return small(folder, "cluster.engines=2", "rollout.engine.name=process", "rollout.schedule=eager", *overrides)


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("overrides", [(), STREAM], ids=["synchronous", "asynchronous"])
def test_a_killed_engine_is_replaced_and_its_episodes_are_sampled_again(
    overrides: tuple[str, ...], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kill_an_engine(monkeypatch)
    run = train(shared_out(tmp_path / "run", *overrides))
    rows = read_metrics(run / "metrics.jsonl")
    assert [row["groups/trained"] for row in rows] == [2, 2, 2]
    assert rows[-1]["engine/replaced"] == 1
    assert rows[-1]["engine/sampled_again"] >= 1
    assert all(row["episodes/failed"] == 0 for row in rows)
    assert all(row.get("staleness/max", 0) <= 2 for row in rows)
    told = read_processes(run)
    assert told is not None
    assert told.ended
    assert [row.part for row in told.rows] == ["driver", "engine 0", "engine 1"]
    assert [row.restarts for row in told.rows] == [0, 1, 0]
    ledger = Ledger(run / "ledger.sqlite")
    fates = [fate for step in (1, 2, 3) for fate in ledger.fates(step).values()]
    ledger.close()
    assert fates == ["trained"] * 12, "each episode once"


@pytest.mark.parametrize(
    ("overrides", "facts"),
    [(["rollout.engine.name=native"], "native"), (["rollout.schedule=lockstep"], "rollout.schedule: eager")],
)
def test_what_several_engines_cannot_do_is_refused(overrides: list[str], facts: str, tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=rf"cluster\.engines.*{facts}"):
        shared_out(tmp_path / "run", *overrides)


@pytest.mark.usefixtures("forked_python")
def test_an_engine_that_never_starts_is_told_in_time_and_leaves_nothing(tmp_path: Path) -> None:
    recipe = shared_out(tmp_path / "run", "rollout.engine.options.start_s=0.001")
    with pytest.raises(EngineLost, match=r"did not answer 'start' within 0.001 s and was ended.*start_s for its start"):
        train(recipe)
    assert not recipe.directory.exists()
