"""A run writes down the advantages it trained with, the fate of every episode, and why scores are missing."""

from pathlib import Path
from typing import Any

import pytest

from sensorium.runs.durable import read_rows
from sensorium.runs.episodes import read_credits_of
from sensorium.runs.metrics import read_metrics
from sensorium.trainer import loop
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import RewardFailure
from tests.trainer.small import small

HERE = "tests.trainer.test_recorded_credit"


class Absent:
    """Judges every other attempt, and says why not the others."""

    name = "absent"
    instant = True

    def score(self, task: Any, episode: Any) -> float:
        if episode.index == 0:
            raise RewardFailure("the judge was out")
        return 1.0


def test_the_advantages_on_record_are_those_of_the_update(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    trained: dict[str, list[list[float]]] = {}

    def watched(*arguments: Any, **settings: Any) -> Any:
        samples = credit(*arguments, **settings)
        trained.update({s.episode.id: [a.tolist() for a in s.advantages] for group in samples for s in group})
        return samples

    credit = loop.credit
    monkeypatch.setattr(loop, "credit", watched)
    terms = [{"name": "tests.trainer.small:ByParity"}, {"name": f"{HERE}:Absent", "weight": 0}]
    train(small(tmp_path / "run", "steps=1", rewards={"terms": terms}))
    rows = list(read_rows(tmp_path / "run/episodes/step_000001.jsonl"))
    assert len(rows) == len(trained) == 4
    for row in rows:
        (turn,) = trained[row["episode"]["id"]]
        assert len(set(turn)) == 1
        assert row["advantages"] == [pytest.approx(turn[0], rel=1e-8)]
        assert row["fate"] == "trained"
        assert row.get("missing") == ({"absent": "the judge was out"} if row["episode"]["index"] == 0 else None)
    assert {row["advantages"][0] > 0 for row in rows} == {True, False}

    (metrics,) = read_metrics(tmp_path / "run/metrics.jsonl")
    credits = read_credits_of(rows).values()
    entropies, mismatches = (
        [value for credit in credits for turn in turns(credit) for value in turn]
        for turns in (lambda credit: credit.entropies, lambda credit: credit.mismatches)
    )
    assert len(entropies) == len(mismatches) == metrics["packing/trained_tokens"]
    assert sum(entropies) / len(entropies) == pytest.approx(metrics["policy/entropy"], abs=1e-4)
    assert max(map(abs, mismatches)) == pytest.approx(metrics["mismatch/max"], rel=0.01)
