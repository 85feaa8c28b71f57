"""Endpoints that send what no endpoint should: nothing hangs past its deadline, nothing is read without a bound."""

import asyncio
import base64
import gzip
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import JudgesSection
from sensorium.rewards.judges import transport
from sensorium.rewards.judges.answer_forms import JsonAnswer, Number
from sensorium.rewards.judges.client import FIRST_WAIT_S, JudgeClient
from sensorium.rewards.judges.judgements import JudgeRequest, untrusted_message
from sensorium.rewards.judges.transport import endpoints_of, read_config
from sensorium.vocabulary.errors import JudgeFailure, RecipeError

Behave = Callable[[socket.socket], None]


@contextmanager
def raw_server(behave: Behave) -> Iterator[tuple[str, list[bytes]]]:
    """A socket that reads one request a connection and then does as it is told; and the requests it got."""
    listening = socket.create_server(("127.0.0.1", 0))
    got: list[bytes] = []

    def one(connection: socket.socket) -> None:
        with connection:
            data = connection.recv(1 << 16)
            head, _, body = data.partition(b"\r\n\r\n")
            length = int(
                next(line.split(b":")[1] for line in head.split(b"\r\n") if line.lower().startswith(b"content-length"))
            )
            while len(body) < length:
                body += connection.recv(1 << 16)
            got.append(head)
            with suppress(OSError):  # the client hangs up, as it should
                behave(connection)

    def serve() -> None:
        while True:
            try:
                connection, _ = listening.accept()
            except OSError:
                return
            threading.Thread(target=one, args=(connection,), daemon=True).start()

    threading.Thread(target=serve, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{listening.getsockname()[1]}/v1", got
    finally:
        listening.close()


def replying(body: bytes, *headers: str, status: str = "200 OK") -> Behave:
    def behave(connection: socket.socket) -> None:
        head = "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", f"Content-Length: {len(body)}", *headers])
        connection.sendall(f"{head}\r\n\r\n".encode() + body)

    return behave


def completion(text: str, **usage: object) -> bytes:
    message = {"role": "assistant", "content": text}
    choice = {"index": 0, "message": message, "finish_reason": "stop"}
    return json.dumps(
        {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice], "usage": usage or None}
    ).encode()


def drip(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 100000\r\n\r\n")
    while True:
        connection.sendall(b" ")
        time.sleep(0.05)


def endless(connection: socket.socket) -> None:
    connection.sendall(b"HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nTransfer-Encoding: chunked\r\n\r\n")
    while True:
        connection.sendall(b"10000\r\n" + b" " * 0x10000 + b"\r\n")


def cut(connection: socket.socket) -> None:
    connection.sendall(b'HTTP/1.1 200 OK\r\nContent-Type: application/json\r\nContent-Length: 500\r\n\r\n{"choices": [')


JSON = "Content-Type: application/json"
BOMB = gzip.compress(b" " * (64 << 20))
CASES: dict[str, tuple[Behave, str]] = {
    "a byte now and then": (drip, "did not answer within 0.4 s"),
    "a body without an end": (endless, "more than 16 MiB"),
    "a bomb": (replying(BOMB, JSON, "Content-Encoding: gzip"), "unpacks to more than 16 MiB"),
    "packed as nobody asked": (replying(b"x", JSON, "Content-Encoding: br"), "packed as 'br'"),
    "closed in the middle": (cut, "cannot be reached"),
    "a page": (replying(b"<html>welcome</html>", "Content-Type: text/html"), "answered"),
    "redirected to a file": (replying(b"", "Location: file:///etc/passwd", status="307 Temporary Redirect"), "307"),
    "infinite": (replying(completion('{"score": 1e999}'), JSON), "too large for a number"),
    "not a number": (replying(completion('{"score": NaN}'), JSON), "not as asked"),
    "nested without an end": (replying(b"[" * 100_000, JSON), "answered strangely: RecursionError"),
    "an answer of a megabyte": (replying(completion("x{" * (1 << 19) + "x"), JSON), "1,048,577 characters"),
    "a key twice": (replying(completion('{"score": 1, "score": 0}'), JSON), "given twice"),
}


def question() -> JudgeRequest:
    message = untrusted_message("Is {text} true?", text="a cat")
    return JudgeRequest("judge", (message,), "test/1", JsonAnswer({"score": Number(0, 1)}))


def section(url: str, **changes: float) -> JudgesSection:
    settings = {"deadline_s": 20, "total_deadline_s": 20, "retries": 0, "malformed_retries": 0, **changes}
    return JudgesSection(endpoints={"judge": [{"base_url": url}]}, **settings)


@pytest.mark.parametrize("name", CASES)
def test_a_hostile_reply_is_no_score_and_takes_no_longer_than_the_deadline(name: str) -> None:
    behave, told = CASES[name]
    with raw_server(behave) as (url, _):
        client = JudgeClient(section(url, **({"deadline_s": 0.4} if behave is drip else {})))
        started = time.monotonic()
        with pytest.raises(JudgeFailure, match=told):
            client.ask_now(question())
        assert time.monotonic() - started < 15
        assert client.cache.keys() == []
        assert client.meter.take_metrics()["judge/judge/failures"] == 1
        client.close()


@pytest.mark.parametrize("rest", ["31536000", "Fri, 31 Dec 9999 23:59:59 GMT"])
def test_who_asks_for_a_year_of_rest_is_not_waited_for(rest: str) -> None:
    with raw_server(replying(b"{}", JSON, f"Retry-After: {rest}", status="503 Away")) as (url, asked):
        client = JudgeClient(section(url, retries=5))
        started = time.monotonic()
        with pytest.raises(JudgeFailure, match="within 20 s in all"):
            client.ask_now(question())
        assert time.monotonic() - started < 10
        client.close()
    assert len(asked) == 1


def test_neither_a_question_nor_a_key_follows_a_redirect_to_another_host() -> None:
    with raw_server(replying(completion('{"score": 1}'), JSON)) as (other, stolen):
        away = replying(b"", f"Location: {other}/chat/completions", status="307 Temporary Redirect")
        with raw_server(away) as (url, asked):
            client = JudgeClient(section(url))
            with pytest.raises(JudgeFailure, match="307"):
                client.ask_now(question())
            client.close()
    assert len(asked) == 1
    assert stolen == []


@pytest.mark.parametrize("rest", ["0", "0.001", "Wed, 21 Oct 2015 07:28:00 GMT"])
def test_who_asks_for_no_rest_and_refuses_again_does_not_use_up_the_retries_in_a_moment(rest: str) -> None:
    with raw_server(replying(b"{}", JSON, f"Retry-After: {rest}", status="429 Busy")) as (url, asked):
        client = JudgeClient(section(url, retries=1))
        started = time.monotonic()
        with pytest.raises(JudgeFailure, match="429"):
            client.ask_now(question())
        assert time.monotonic() - started > FIRST_WAIT_S / 2
        client.close()
    assert len(asked) == 2


KEY = "sk-0123456789abcdef0123456789"
ESCAPED = "".join(f"\\u{ord(character):04x}" for character in KEY)
SENT_BACK = {
    "in an error, cut": replying(json.dumps({"error": {"message": "x" * 180 + KEY}}).encode(), JSON, status="400 Bad"),
    "in an answer": replying(completion(f'{{"score": 1, "why": "{KEY}"}}'), JSON),
    "in JSON escapes": replying(completion(f'{{"score": 1, "why": "{ESCAPED}"}}'), JSON),
    "quoted for URLs": replying(completion(f'{{"score": 1, "why": "{KEY.replace("-", "%2D")}"}}'), JSON),
    "in base64": replying(completion(f'{{"score": 1, "why": "{base64.b64encode(KEY.encode()).decode()}"}}'), JSON),
    "in an answer that is none": replying(completion(f"I know {KEY}"), JSON),
}


@pytest.mark.parametrize("where", SENT_BACK)
def test_a_key_that_is_sent_back_is_kept_nowhere(where: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE_KEY", KEY)
    with raw_server(SENT_BACK[where]) as (url, got):
        settings = section(url)
        endpoint = settings.endpoints["judge"][0].model_copy(update={"api_key_env": "JUDGE_KEY"})
        client = JudgeClient(settings.model_copy(update={"endpoints": {"judge": (endpoint,)}}), folder=tmp_path)
        try:
            answer = client.ask_now(question(), about=("e1",), term="t")
            told = f"{answer.text} {answer.value}"
        except JudgeFailure as failure:
            told = str(failure)
        client.close()
    assert KEY.encode() in got[0], "it was sent"
    assert KEY[:8] not in told
    spellings = (
        KEY[:8],
        KEY.replace("-", "%2D"),
        base64.b64encode(KEY.encode()).decode()[:8],
        "".join(f"\\u{ord(c):04x}" for c in KEY),
    )
    assert not any(spelling in told for spelling in spellings)
    assert not any(spelling.encode() in path.read_bytes() for path in tmp_path.iterdir() for spelling in spellings)


def test_a_key_that_no_request_can_carry_is_refused_and_not_told(monkeypatch: pytest.MonkeyPatch) -> None:
    for key in (f"{KEY}\nsecond line", f"{KEY}…"):
        monkeypatch.setenv("JUDGE_KEY", key)
        (endpoint,) = endpoints_of(
            JudgesSection(endpoints={"judge": [{"base_url": "http://127.0.0.1:9/v1", "api_key_env": "JUDGE_KEY"}]})
        )["judge"]
        with pytest.raises(RecipeError, match="environment variable JUDGE_KEY, has a character") as refused:
            endpoint.secret()
        assert KEY[:8] not in str(refused.value)


@pytest.mark.parametrize("address", ["127.0.0.1:9/v1", "ftp://127.0.0.1/v1", "http:///v1", "http://127.0.0.1:99999/v1"])
def test_an_address_that_cannot_be_asked_is_refused(address: str) -> None:
    with pytest.raises(ValueError, match="an address such as"):
        section(address)


def test_half_a_character_in_an_answer_is_kept_as_its_escape(tmp_path: Path) -> None:
    with raw_server(replying(completion('{"score": 1, "why": "\ud800"}'), JSON)) as (url, _):
        client = JudgeClient(section(url), folder=tmp_path)
        assert client.ask_now(question(), about=("e1",)).text == '{"score": 1, "why": "\\ud800"}'
        assert [row.outcome for row in client.cache.calls()] == ["answered"]
        client.close()


def test_tokens_that_no_one_can_have_used_are_not_counted() -> None:
    body = completion('{"score": 1}', prompt_tokens=10**30, completion_tokens=-5, total_tokens=1)
    with raw_server(replying(body, JSON)) as (url, _):
        client = JudgeClient(section(url))
        assert client.ask_now(question()).value == {"score": 1}
        (row,) = client.cache.calls()
        assert (row.outcome, row.input_tokens, row.output_tokens) == ("answered", 0, 0)
        client.close()


def test_a_packed_answer_is_read() -> None:
    packed = gzip.compress(completion('{"score": 0.5}'))
    with raw_server(replying(packed, JSON, "Content-Encoding: gzip")) as (url, _):
        client = JudgeClient(section(url))
        assert asyncio.run(client.ask(question())).value == {"score": 0.5}
        client.close()
    assert transport.unpacked(b"{}", "identity") == b"{}"


@pytest.mark.parametrize("address", ["http://me:hush@127.0.0.1:9/v1", "http://127.0.0.1:9/v1?api-key=hush"])
def test_an_address_that_holds_a_key_is_refused(address: str, tmp_path: Path) -> None:
    (tmp_path / "api.json").write_text(json.dumps({"judge": {"base_url": address}}))
    with pytest.raises(RecipeError, match="holds no key, user or query") as refused:
        read_config(tmp_path / "api.json")
    assert "hush" not in str(refused.value)
    with pytest.raises(RecipeError, match="holds no key, user or query"):
        load_recipe("shapes", [f"judges.endpoints={{judge: [{{base_url: '{address}'}}]}}"])


def test_endpoints_that_are_named_twice_are_refused_and_none_is_dropped(tmp_path: Path) -> None:
    row = '"judge": {"base_url": "http://127.0.0.1:9/v1", "api_key": "hush"}'
    (tmp_path / "api.json").write_text(f"{{{row}, {row}}}")
    with pytest.raises(RecipeError, match=r"api\.json.*'judge'") as refused:
        read_config(tmp_path / "api.json")
    assert "hush" not in str(refused.value)
