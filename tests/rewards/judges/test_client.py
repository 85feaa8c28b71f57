"""The client against real servers: cache, single flight, rotation, limits, deadlines, keys."""

import asyncio
import json
import os
import sqlite3
import threading
import time
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav
from sensorium.recipe.schema import JudgesSection
from sensorium.rewards.judges.answer_forms import JsonAnswer, Number
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.judges.judgements import CLOCKS_DIFFER_S, AnswerCache, JudgeRequest, owner_name, untrusted_message
from sensorium.rewards.judges.transport import SharedLimits, endpoints_of
from sensorium.runs.episodes import read_transcripts
from sensorium.vocabulary.content import Message, Text, user
from sensorium.vocabulary.errors import JudgeFailure, JudgeOffline, JudgeRefusal, RecipeError, RecordError
from sensorium.vocabulary.secrets import Secret
from tests.rewards.judges.server import Answer, judge_server, said, section_of

SCORE = JsonAnswer({"score": Number(0, 1)})


def question(text: str = "a cat", **more: Any) -> JudgeRequest:
    return JudgeRequest("judge", (untrusted_message("Rate {text}.", text=text),), "rate/1", SCORE, **more)


def good(request: dict[str, Any]) -> str:
    return '{"score": 1}' if "cat" in said(request) else '{"score": 0}'


async def many(client: JudgeClient, requests: list[JudgeRequest]) -> list[Any]:
    return await asyncio.gather(*(client.ask(request) for request in requests), return_exceptions=True)


def test_equal_questions_are_asked_once_also_by_the_next_client(tmp_path: Path) -> None:
    with judge_server(good) as server:
        client = JudgeClient(section_of(server.url, prices={"judge": {"input": 1.0, "output": 2.0}}), folder=tmp_path)
        found = asyncio.run(many(client, [question()] * 8 + [question("a dog")]))
        assert [answer.value["score"] for answer in found] == [1] * 8 + [0]
        assert len(server.asked) == 2
        row = client.take_metrics()
        assert row["judge/judge/calls"] == 2
        assert row["judge/judge/input_tokens"] == 20
        assert row["judge/judge/cost"] == pytest.approx((20 * 1 + 4 * 2) / 1e6)
        client.ask_now(question(), about=("e1",), term="rate")
        assert client.take_metrics()["judge/judge/cache_hits"] == 1
        client.close()
        again = JudgeClient(section_of(server.url), folder=tmp_path)
        assert again.ask_now(question()).cached
        again.close()
        assert len(server.asked) == 2
    (tmp_path / "damaged.sqlite").write_bytes(b"SQLite format 3" + bytes(600))
    assert "cannot be read" in read_transcripts(tmp_path / "damaged.sqlite", "e1")[0]["answer"]
    (kept,) = read_transcripts(tmp_path / "judge_transcripts.sqlite", "e1")
    assert kept["answer"] == '{"score": 1}'
    assert "a cat" in kept["messages"][0]["content"][0]["text"]


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "other"}, {"prompt": "rate/2"}, {"parameters": {"temperature": 0.5}}, {"draw": 1},
        {"messages": (user("x"),)}, {"form": JsonAnswer({"score": Number(0, 2)})},
    ],
    ids=lambda changed: next(iter(changed)),
)  # fmt: skip
def test_a_judgement_is_known_by_all_that_decides_it(changed: dict[str, Any]) -> None:
    from dataclasses import replace

    assert replace(question(), **changed).key != question().key
    assert question().key == question().key


def test_a_judgement_is_known_by_the_media_that_were_shown() -> None:
    store = MediaStore()
    pictures = [store.put(encode_png(np.full((8, 8, 3), shade, np.uint8)), "picture") for shade in (0, 9)]
    sound = store.put(encode_wav(np.zeros(800, np.float32), 8000), "sound")
    asked = [user("what?"), *(user(media, "what?") for media in (*pictures, sound)), user(*pictures, "what?")]
    asked += [user("what?", pictures[0]), user(*reversed(pictures), "what?")]
    keys = [JudgeRequest("judge", (message,), "p/1").key for message in asked]
    assert len(set(keys)) == len(asked)
    again = MediaStore().put(encode_png(np.full((8, 8, 3), 9, np.uint8)), "picture")
    assert JudgeRequest("judge", (user(again, "what?"),), "p/1").key == keys[2], "by what they hold, not by their object"


def test_offline_answers_from_the_cache_and_fails_loudly_on_the_rest(tmp_path: Path) -> None:
    with judge_server(good) as server:
        client = JudgeClient(section_of(server.url), folder=tmp_path)
        client.ask_now(question())
        client.close()
    offline = JudgeClient(JudgesSection(offline=True, cache=tmp_path / "judges.sqlite"))
    assert offline.ask_now(question()).value == {"score": 1}
    with pytest.raises(JudgeOffline, match="has no answer of 'judge'"):
        offline.ask_now(question("a dog"))
    offline.close()


def test_processes_that_share_a_cache_ask_once(tmp_path: Path) -> None:
    slow = threading.Event()

    def judge(request: dict[str, Any]) -> str:
        slow.wait(600)
        return good(request)

    with judge_server(judge) as server:
        clients = [JudgeClient(section_of(server.url, cache=tmp_path / "shared.sqlite")) for _ in range(3)]
        answers = [client._submit(client._ask(question(), (), "")) for client in clients]  # each has its own claims
        while not server.asked:
            time.sleep(0.01)
        time.sleep(0.2)
        slow.set()
        assert [answer.result(600).value["score"] for answer in answers] == [1, 1, 1]
        for client in clients:
            client.close()
        assert len(server.asked) == 1


def test_a_claim_of_the_dead_is_void_at_once_on_this_machine_and_runs_out_elsewhere(tmp_path: Path) -> None:
    cache = AnswerCache(tmp_path / "c.sqlite")
    gone = os.fork()
    if not gone:
        os._exit(0)
    os.waitpid(gone, 0)
    mine = owner_name("me")
    assert cache.claim("i", mine.replace(f" {os.getpid()} ", f" {gone} "), 600)
    assert cache.claim("i", mine, 600)
    assert not cache.claim("i", owner_name("another client of this process"), 600)
    elsewhere = f"elsewhere {gone} x"
    assert cache.claim("h", elsewhere, 600)
    assert not cache.claim("h", mine, 600)
    cache.renew("h", elsewhere, -1)
    assert not cache.claim("h", mine, 600), "its clock may be behind ours"
    cache.renew("h", elsewhere, -1 - CLOCKS_DIFFER_S)
    assert cache.claim("h", mine, 600)
    assert cache.claim("k", "alive", 600)
    assert not cache.claim("k", "me", 600)
    assert cache.claim("j", "dead", -1 - CLOCKS_DIFFER_S)
    assert cache.claim("j", "me", 600)
    cache.release("j", "dead")
    assert not cache.claim("j", "other", 600)
    cache.close()


def test_a_malformed_answer_is_sent_back_and_a_bounded_number_of_times(tmp_path: Path) -> None:
    answers = iter(["Sure!", '{"score": 7}', '{"score": 0.5}'])
    with judge_server(lambda _: next(answers)) as server:
        client = JudgeClient(section_of(server.url))
        assert client.ask_now(question()).value == {"score": 0.5}
        assert [row.outcome for row in client.cache.calls()] == ["malformed", "malformed", "answered"]
        assert "cannot be used" in server.asked[1]["messages"][-1]["content"]
        client.close()
    answers = iter(["Sure!"] * 3 + ['{"score": 1}'])
    with judge_server(lambda _: next(answers)) as server:
        client = JudgeClient(section_of(server.url), folder=tmp_path)
        with pytest.raises(JudgeFailure, match=r"3 times.*'Sure!'"):
            client.ask_now(question(), about=("e",), term="t")
        assert len(server.asked) == 3
        assert not client.cache.keys()
        (kept,) = read_transcripts(tmp_path / "judge_transcripts.sqlite", "e")
        assert "(no answer: judge 'judge' answered 3 times" in kept["answer"]
        client.ask_now(question(), about=("e",), term="t")
        (kept,) = read_transcripts(tmp_path / "judge_transcripts.sqlite", "e")
        assert kept["answer"] == '{"score": 1}'
        client.close()


def test_an_endpoint_that_takes_no_schema_is_asked_without() -> None:
    def judge(request: dict[str, Any]) -> Answer | str:
        return Answer("response_format is unknown", 400) if "response_format" in request else good(request)

    with judge_server(judge) as server:
        client = JudgeClient(section_of(server.url))
        assert client.ask_now(question()).value == {"score": 1}
        client.ask_now(question("a dog"))
        assert ["response_format" in request for request in server.asked] == [True, False, False]
        client.close()


def test_whether_a_schema_is_taken_is_known_of_each_endpoint() -> None:
    def without(request: dict[str, Any]) -> Answer | str:
        return Answer("unknown", 400) if "response_format" in request or "dog" in said(request) else good(request)

    with judge_server(without) as plain, judge_server(good) as full:
        client = JudgeClient(section_of(plain.url, full.url))
        for i in range(4):
            client.ask_now(question(f"cat {i}"))
        assert ["response_format" in request for request in plain.asked] == [True, False, False]
        assert ["response_format" in request for request in full.asked] == [True, True]
        client.close()
    with judge_server(without) as alone:
        client = JudgeClient(section_of(alone.url))
        with pytest.raises(JudgeRefusal):  # refused with a schema and without: the schema was not the cause
            client.ask_now(question("a dog"))
        client.ask_now(question("a cat"))
        assert ["response_format" in request for request in alone.asked] == [True, False, True, False]
        client.close()


def test_a_refusal_is_final_and_a_fallback_stands_in(tmp_path: Path) -> None:
    with judge_server(lambda _: Answer("too long", 413)) as refusing, judge_server(good) as other:
        section = section_of(refusing.url)
        client = JudgeClient(section)
        with pytest.raises(JudgeRefusal, match="413: too long"):
            client.ask_now(question())
        assert len(refusing.asked) == 1
        client.close()
        two = JudgesSection(
            endpoints={"judge": [{"base_url": refusing.url}], "spare": [{"base_url": other.url}]},
            fallbacks={"judge": ["spare"]},
        )
        client = JudgeClient(two, folder=tmp_path)
        answer = client.ask_now(question())
        assert answer.model == "spare"
        assert answer.value == {"score": 1}
        assert client.ask_now(question()).cached
        assert len(other.asked) == 1
        client.close()


def test_retry_after_is_kept_and_the_other_endpoint_asked_meanwhile() -> None:
    moments: list[float] = []

    def limited(_: dict[str, Any], wait_s: str = "0.6") -> Answer | str:
        moments.append(time.monotonic())
        return Answer("slow down", 429, {"Retry-After": wait_s}) if len(moments) == 1 else '{"score": 1}'

    with judge_server(limited) as server:
        client = JudgeClient(section_of(server.url))
        assert client.ask_now(question()).value == {"score": 1}
        assert moments[1] - moments[0] >= 0.59
        client.close()
    moments.clear()
    with judge_server(lambda asked: limited(asked, "600")) as first, judge_server(good) as second:
        client = JudgeClient(section_of(first.url, second.url))
        assert client.ask_now(question()).value == {"score": 1}
        assert len(first.asked) == len(second.asked) == 1
        client.close()


def test_load_goes_to_the_endpoint_with_the_fewest_open_calls() -> None:
    gate = threading.Event()

    def slow(request: dict[str, Any]) -> str:
        gate.wait(600)
        return good(request)

    with judge_server(slow) as first, judge_server(slow) as second:
        client = JudgeClient(section_of(first.url, second.url))
        waiting = [client._submit(client._ask(question(f"cat {i}"), (), "")) for i in range(8)]
        while len(first.asked) + len(second.asked) < 8:
            time.sleep(0.01)
        assert len(first.asked) == len(second.asked) == 4
        gate.set()
        assert all(one.result(600).value == {"score": 1} for one in waiting)
        client.close()


def test_a_slow_judge_is_waited_for_within_its_deadlines() -> None:
    gate = threading.Event()

    def slow(request: dict[str, Any]) -> str:
        gate.wait(600)
        return good(request)

    with judge_server(slow) as server:
        client = JudgeClient(section_of(server.url, deadline_s=0.2, total_deadline_s=1.0))
        with pytest.raises(JudgeFailure, match="did not answer within"):
            client.ask_now(question())
        gate.set()
        client.close()


def test_limits_are_shared_through_the_file(tmp_path: Path) -> None:
    one, two = (SharedLimits(tmp_path / "l.sqlite", {"judge": 0.1}, {"judge": 100}) for _ in range(2))
    began = time.time()
    waits = [limits.take("judge", 1) for limits in (one, two) * 2]
    two.give_back("judge", 1)
    waits.append(one.take("judge", 1))
    one.settle("judge", 1, 10_001)
    tokens = two.take("judge", 1)
    spent = time.time() - began
    for wait, expected in zip(waits, [0, 600, 1200, 1800, 1800], strict=True):
        assert expected - spent - 1 <= wait <= expected
    assert tokens >= 5000 - spent
    assert one.take("other", 5) == 0.0


def test_a_limit_that_leaves_no_call_is_said(tmp_path: Path) -> None:
    with judge_server(good) as server:
        section = section_of(server.url, requests_per_minute={"judge": 0.01}, total_deadline_s=60.0)
        client = JudgeClient(section, folder=tmp_path)
        assert client.ask_now(question()).value == {"score": 1}
        with pytest.raises(JudgeFailure, match="its limit a minute"):
            client.ask_now(question("a dog"))
        client.close()
        assert len(server.asked) == 1


KEY = "sk-topsecret-1234567890"


def test_keys_are_sent_and_written_nowhere(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    echo = Answer(f"Incorrect API key provided: {KEY}", 401)
    with judge_server(good) as server, judge_server(lambda _: echo) as refusing:
        section = JudgesSection(
            endpoints={
                "judge": [{"base_url": server.url, "api_key_env": "THE_KEY"}],
                "closed": [{"base_url": refusing.url, "api_key_env": "THE_KEY"}],
            }
        )
        client = JudgeClient(section, folder=tmp_path)
        client.ask_now(question(), about=("e",), term="t")
        with pytest.raises(JudgeRefusal, match="environment variable THE_KEY") as refused:
            client.ask_now(question().asked_of("closed"))
        assert server.keys == [f"Bearer {KEY}"]
        assert KEY not in str(refused.value)
        client.close()
    assert KEY not in section.model_dump_json()
    assert KEY not in repr(client.endpoints)
    assert not any(KEY.encode() in path.read_bytes() for path in tmp_path.rglob("*") if path.is_file())
    with pytest.raises(TypeError):
        json.dumps(Secret(KEY))


def test_a_key_in_a_file_of_an_earlier_version_is_masked_when_it_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("THE_KEY", KEY)
    asked = JudgeRequest("judge", (untrusted_message("Rate {text}.", text="a cat"),), "p/1")
    with judge_server(good) as server:
        section = JudgesSection(endpoints={"judge": [{"base_url": server.url, "api_key_env": "THE_KEY"}]})
        client = JudgeClient(section, folder=tmp_path)
        client.ask_now(asked, about=("e",), term="t")
        with sqlite3.connect(client.cache.path) as file:
            file.execute("UPDATE answers SET text = ?", (f"your key is {KEY}",))
        client.close()
        again = JudgeClient(section, folder=tmp_path)
        answer = again.ask_now(asked)
        again.close()
        assert len(server.asked) == 1, "the second answer came from the file"
    assert (answer.value, answer.text) == ("your key is ***", "your key is ***")


def test_the_reference_config_with_objects_and_lists(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with judge_server(good) as server:
        azure = {"azure_endpoint": server.url.removesuffix("/v1"), "api_version": "2024-03-01", "api_key": KEY}
        (tmp_path / "api_config.json").write_text(json.dumps({"judge": azure, "two": [azure, azure]}))
        monkeypatch.setenv("M3_API_CONFIG", str(tmp_path / "api_config.json"))
        assert {model: len(found) for model, found in endpoints_of(JudgesSection()).items()} == {"judge": 1, "two": 2}
        client = JudgeClient(JudgesSection())
        assert client.ask_now(question()).value == {"score": 1}
        assert server.paths[0].startswith("/openai/deployments/judge/chat/completions?api-version=2024-03-01")
        assert server.keys == [KEY]
        assert KEY not in repr(client.endpoints)
        client.close()


def test_the_default_config_is_read_where_nothing_else_names_endpoints(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("M3_API_CONFIG", raising=False)
    monkeypatch.chdir(tmp_path)
    assert endpoints_of(JudgesSection()) == {}
    azure = {"azure_endpoint": "http://127.0.0.1:9", "api_version": "2024-03-01", "api_key": KEY}
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "api_config.json").write_text(json.dumps({"_comment": "a template", "gpt-4o": azure}))
    assert list(endpoints_of(JudgesSection())) == ["gpt-4o"]
    own = JudgesSection(endpoints={"judge": [{"base_url": "http://127.0.0.1:9/v1"}]})
    assert list(endpoints_of(own)) == ["judge"], "a recipe that names its endpoints means those"
    (tmp_path / "other.json").write_text(json.dumps({"two": azure}))
    monkeypatch.setenv("M3_API_CONFIG", "other.json")
    assert list(endpoints_of(JudgesSection())) == ["two"]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("{", "is no JSON"),
        ('{"_m": []}', "an endpoint"),
        ("[]", "must be an object"),
        ('{"m": []}', "an endpoint"),
        ('{"m": {"azure_endpoint": "x"}}', "api_version"),
        ('{"m": {"url": "x"}}', "unknown key 'url'"),
    ],
)
def test_a_wrong_config_is_refused(text: str, problem: str, tmp_path: Path) -> None:
    path = tmp_path / "c.json"
    path.write_text(text)
    with pytest.raises(RecipeError, match=problem):
        endpoints_of(JudgesSection(config=path))


def test_a_recipe_cannot_hold_a_key_and_a_missing_one_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="api_key"):
        JudgesSection(endpoints={"judge": [{"base_url": "http://x", "api_key": KEY}]})
    monkeypatch.delenv("NO_KEY", raising=False)
    client = JudgeClient(JudgesSection(endpoints={"judge": [{"base_url": "http://x", "api_key_env": "NO_KEY"}]}))
    with pytest.raises(RecipeError, match="NO_KEY, which is not set"):
        client.ask_now(question())
    with pytest.raises(RecipeError, match="no endpoint for the model 'judgo'; did you mean 'judge'"):
        client.refuse_unknown("judgo")
    client.close()


def test_half_characters_are_asked_about_at_once(tmp_path: Path) -> None:
    with judge_server(good) as server:
        client = JudgeClient(section_of(server.url, retries=0))
        message = Message("user", (Text("Is \ud800 true?"),))
        assert client.ask_now(JudgeRequest("judge", (message,), "rate/1", SCORE)).value == {"score": 0}
        assert said(server.asked[0]) == "Is \\ud800 true?"
        client.close()


def test_who_joins_a_question_under_way_is_counted_as_who_finds_it_in_the_cache(tmp_path: Path) -> None:
    with judge_server(good) as server:
        online = JudgeClient(section_of(server.url, cache=tmp_path / "c.sqlite"))
        asyncio.run(many(online, [question()] * 5))
        counted = online.take_metrics()
        assert (counted["judge/judge/calls"], counted["judge/judge/cache_hits"]) == (1, 4)
        online.close()


def test_a_cache_whose_answers_were_changed_ends_the_run(tmp_path: Path) -> None:
    with judge_server(good) as server:
        client = JudgeClient(section_of(server.url, cache=tmp_path / "c.sqlite"))
        client.ask_now(question())
        client.close()
        with closing(sqlite3.connect(tmp_path / "c.sqlite")) as db:
            db.execute("UPDATE answers SET text = 'maybe'")
            db.commit()
        again = JudgeClient(section_of(server.url, cache=tmp_path / "c.sqlite"))
        with pytest.raises(RecordError, match="an answer that is not in its form"):
            again.ask_now(question())
        again.close()
        assert len(server.asked) == 1
