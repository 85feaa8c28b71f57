"""The ledger remembers judgements and deadlines across a rewind, and forgets steps."""

from pathlib import Path

from sensorium.trainer.ledger import Ledger
from sensorium.vocabulary import Episode, Group, Score, Status, Task


def episode(id: str, reward: float | None) -> Episode:
    return Episode(id, "t", "g", 0, (), (), Status.FINISHED, scores=(Score("exact", reward),))


def test_judgements_come_back_whole_also_missing_ones(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    scores = (
        Score("judge", 0.25, weight=0.5, correct=True),
        Score("think", None, scope="span", turn=1, span=(3, 9), reason="timed out"),
    )
    ledger.put("k", scores)
    ledger.close()
    again = Ledger(tmp_path / "ledger.sqlite")
    assert again.get("k") == scores
    assert again.get("other") is None


def test_rewind_drops_steps_but_keeps_judgements_and_deadlines(tmp_path: Path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2, 3):
        ledger.plan(step, step * 8, step * 8 + 8)
        group = Group("g", Task("t"), (episode(f"a{step}", 1.0), episode(f"b{step}", None)))
        ledger.record(step, [group], {f"b{step}": "dropped: no score for exact"})
        ledger.advance(step, "trained")
    ledger.put("k", (Score("judge", 1.0),))
    ledger.keep_deadlines({("a3", 2): "too slow"})
    ledger.rewind(3)
    assert ledger.states() == {1: "trained", 2: "trained"}
    assert ledger.fates(2) == {"a2": "trained", "b2": "dropped: no score for exact"}
    assert ledger.fates(3) == {}
    assert ledger.get("k") == (Score("judge", 1.0),)
    assert ledger.deadlines() == {("a3", 2): "too slow"}
