"""The file of judgements: locked, read-only, of a newer version, claimed by the dead, by clocks that differ."""

import os
import sqlite3
import tempfile
import threading
import time
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import pytest

from sensorium.rewards.judges import transport
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.judges.judgements import AnswerCache, CallRow, StoredAnswer, owner_name
from sensorium.vocabulary.errors import RecordError
from tests.rewards.judges.server import judge_server, section_of
from tests.rewards.judges.test_client import question

CALL = CallRow("k", "judge", "http://127.0.0.1", "answered")


def test_an_answer_is_kept_with_its_call_or_neither_is(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "c.sqlite")
    with pytest.raises(UnicodeEncodeError):
        cache.put("k", "rate/1", StoredAnswer("\ud800", "judge"), CALL)
    assert (cache.calls(), cache.keys()) == ([], [])
    assert cache.claim("k", "me", 600)
    assert cache.put("k", "rate/1", StoredAnswer("yes", "judge"), CALL).text == "yes"
    assert cache.put("k", "rate/1", StoredAnswer("no", "judge"), CALL).text == "yes"
    assert len(cache.calls()) == 2
    assert cache.claim("k", "other", 600), "with the answer the claim ended"
    cache.close()


def test_what_is_known_is_answered_while_another_process_holds_the_file(tmp_path: Path) -> None:
    with judge_server(lambda _: '{"score": 1}') as server:
        client = JudgeClient(section_of(server.url, cache=tmp_path / "c.sqlite"))
        client.ask_now(question("known"))
        with closing(sqlite3.connect(tmp_path / "c.sqlite", isolation_level=None)) as other:
            other.execute("BEGIN IMMEDIATE")
            new = client._submit(client._ask(question("new"), (), ""))
            assert client.ask_now(question("known")).cached
            assert not new.done()
            other.execute("COMMIT")
        assert new.result(600).value == {"score": 1}
        client.close()


def test_a_file_of_a_newer_version_is_refused_before_anything_is_asked(tmp_path: Path) -> None:
    AnswerCache(tmp_path / "c.sqlite").keys()
    with closing(sqlite3.connect(tmp_path / "c.sqlite")) as file:
        assert file.execute("PRAGMA user_version").fetchone() == (1,)
        file.execute("PRAGMA user_version=2")
    with judge_server(lambda _: '{"score": 1}') as server:
        client = JudgeClient(section_of(server.url, cache=tmp_path / "c.sqlite"))
        with pytest.raises(RecordError, match="a newer one wrote it"):
            client.ask_now(question())
        client.close()
        assert server.asked == []


def test_an_offline_run_reads_a_file_where_nothing_can_be_written() -> None:
    with tempfile.TemporaryDirectory() as place, judge_server(lambda _: '{"score": 1}') as server:
        file = Path(place) / "c.sqlite"
        client = JudgeClient(section_of(server.url, cache=file))
        client.ask_now(question())
        client.close()
        os.chmod(file, 0o444)
        os.chmod(place, 0o555)
        child = os.fork()
        if not child:
            if os.getuid() == 0:
                os.setuid(65534)  # to root everything is writable
            code = 0
            for offline in (True, False):
                reading = AnswerCache(file, read_only=offline)
                try:
                    code += not offline if reading.get(question().key) else 2
                except RecordError as error:
                    code += 4 if offline or "must be writable" not in str(error) else 0
            os._exit(code)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        os.chmod(place, 0o755)


def test_the_claim_of_a_process_that_was_killed_and_not_yet_waited_for_is_void(tmp_path: Path) -> None:
    cache, gone = AnswerCache(tmp_path / "c.sqlite"), os.fork()
    if not gone:
        os._exit(0)
    os.waitid(os.P_PID, gone, os.WEXITED | os.WNOWAIT)  # it ended, and is still there
    mine = owner_name("me")
    assert cache.claim("k", mine.replace(f" {os.getpid()} ", f" {gone} "), 600)
    assert cache.claim("k", mine, 600)
    os.waitpid(gone, 0)
    cache.close()


@pytest.mark.parametrize("clock_s", [-300, 7200], ids=["behind", "ahead"])
def test_a_claim_holds_while_it_is_renewed_whatever_the_clock_of_its_owner_says(clock_s: int, tmp_path: Path) -> None:
    cache, lease_s, there = AnswerCache(tmp_path / "c.sqlite"), 0.5, "elsewhere 1 x"
    assert cache.claim("k", there, lease_s)
    renewed, stop = threading.Event(), threading.Event()

    def live() -> None:
        while not stop.wait(0.05):
            cache.renew("k", there, clock_s + lease_s)
            renewed.set()

    living = threading.Thread(target=live)
    living.start()
    assert renewed.wait(60)
    until = time.monotonic() + 2 * lease_s
    while time.monotonic() < until:
        assert not cache.claim("k", "me", 10 * lease_s)
        time.sleep(0.02)
    stop.set()
    living.join()
    while not cache.claim("k", "me", lease_s):
        time.sleep(0.02)
    cache.close()


def test_limits_hold_between_processes_whose_clocks_differ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shared = transport.SharedLimits(tmp_path / "limits.sqlite", {"judge": 60}, {})
    for turn in range(30):
        monkeypatch.setattr(transport, "time", SimpleNamespace(time=lambda turn=turn: 1e9 + 300 * (turn % 2)))
        wait = shared.take("judge", 0)
    assert wait >= 30 - 2 * 6 - 1, "a bucket of six, filled once more when the clock that is ahead came in"
    monkeypatch.setattr(transport, "time", SimpleNamespace(time=lambda: 1e9 - 86_400))
    shared.take("judge", 0)
    monkeypatch.setattr(transport, "time", SimpleNamespace(time=lambda: 1e9 - 86_300))
    assert shared.take("judge", 0) == 0, "a clock that was set back fills the bucket again"
