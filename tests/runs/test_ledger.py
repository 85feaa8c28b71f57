"""The ledger remembers judgements and deadlines across a rewind, and forgets steps."""

import sqlite3
from pathlib import Path

from sensorium.runs.ledger import Ledger
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


def test_old_steps_keep_counts_of_fates_and_a_rewind_drops_those_too(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2, 3):
        ledger.plan(step, 0, 1)
        ledger._write(
            "INSERT INTO episodes VALUES (?, ?, 'g', 't', 'ok', 1.0, ?)",
            [(step, f"{step}/{i}", "trained" if i else "dropped") for i in range(3)],
        )
    ledger.compact(2)
    assert ledger.fates(1) == {}
    assert ledger.old_fates(1) == {"trained": 2, "dropped": 1}
    assert len(ledger.fates(3)) == 3
    ledger.compact(2)
    assert ledger.old_fates(2) == {"trained": 2, "dropped": 1}, "to compact again changes nothing"
    ledger.rewind(2)
    assert ledger.old_fates(2) == {}
    assert ledger.old_fates(1) == {"trained": 2, "dropped": 1}


def test_judgements_go_when_no_checkpoint_could_ask_for_them_again(tmp_path) -> None:
    ledger = Ledger(tmp_path / "ledger.sqlite")
    for step in (1, 2):
        ledger.plan(step, 0, 1)
        ledger.put(f"of {step}", (Score("a", 1.0),))
        ledger.keep_deadlines({(f"of {step}", 0): "late"})
    ledger.forget_judgements(1)
    assert ledger.get("of 1") is None
    assert ledger.get("of 2") == (Score("a", 1.0),)
    assert list(ledger.deadlines()) == [("of 2", 0)]


def test_a_ledger_of_an_earlier_version_is_taken_over(tmp_path) -> None:
    db = sqlite3.connect(tmp_path / "ledger.sqlite")
    db.execute("CREATE TABLE judgements (key TEXT PRIMARY KEY, scores TEXT NOT NULL)")
    db.execute("CREATE TABLE deadlines (episode TEXT, turn INTEGER, reason TEXT, PRIMARY KEY (episode, turn))")
    db.execute("INSERT INTO deadlines VALUES ('e', 1, 'late')")
    db.commit()
    db.close()
    ledger = Ledger(tmp_path / "ledger.sqlite")
    assert ledger.deadlines() == {("e", 1): "late"}
    ledger.put("k", (Score("a", 1.0),))
    assert ledger.get("k") == (Score("a", 1.0),)
