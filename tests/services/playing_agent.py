"""Agents on the openai package alone: a program, and functions that run in a thread."""

import base64
import json
import os
import queue
import subprocess
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache, partial
from io import BytesIO
from typing import Any

from PIL import Image

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "look",
            "description": "Look again.",
            "parameters": {"type": "object", "properties": {"where": {"type": "string"}}},
        },
    }
]


@cache
def connections() -> Any:
    """Shared by all episodes; programs that do without openai are spared its import."""
    from openai import DefaultHttpxClient

    return DefaultHttpxClient()


@contextmanager
def asking(base_url: str, api_key: str) -> Iterator[Any]:
    from openai import OpenAI

    yield OpenAI(base_url=base_url, api_key=api_key, max_retries=0, http_client=connections()).chat.completions.create


def picture(seed: int) -> dict[str, Any]:
    """A small picture as a data URL."""
    held = BytesIO()
    Image.new("RGB", (56, 56), ["red", "green", "blue"][seed % 3]).save(held, "PNG")
    url = f"data:image/png;base64,{base64.b64encode(held.getvalue()).decode()}"
    return {"type": "image_url", "image_url": {"url": url}}


def talk(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """A conversation with a picture, another beside it, and the first one continued twice, from the same place."""
    with asking(base_url, api_key) as ask:
        messages: list[Any] = [
            {"role": "system", "content": "Say what you see."},
            {"role": "user", "content": [picture(task["seed"]), {"type": "text", "text": "Which colour?"}]},
        ]
        first = ask(model="policy", messages=messages, temperature=0.2)
        messages.append(first.choices[0].message)
        aside = ask(model="policy", messages=[{"role": "user", "content": f"Seed {task['seed']}?"}], max_tokens=2)
        assert aside.usage.prompt_tokens > 0
        told = []
        for word in ("sure", "really"):
            told.append(
                ask(model="policy", messages=[*messages, {"role": "user", "content": word}]).choices[0].message.content
            )
        return float(len(first.choices[0].message.content or "") % 2) + 0.5 * (told[0] != told[1])


async def called(task: dict[str, Any], base_url: str, api_key: str) -> dict[str, Any]:
    """Offers a tool, and answers every call of it; a wrong request is refused, and the episode goes on."""
    from openai import BadRequestError

    with asking(base_url, api_key) as ask:
        messages: list[Any] = [{"role": "user", "content": "Look twice."}]
        try:
            ask(model="policy", messages=messages, n=2)
            raise AssertionError("n=2 was answered")
        except BadRequestError:
            pass
        calls = 0
        for _ in range(2):
            choice = ask(model="policy", messages=messages, tools=TOOLS).choices[0]  # type: ignore[call-overload]
            messages.append(choice.message)
            for call in choice.message.tool_calls or ():
                calls += 1
                where = json.loads(call.function.arguments)["where"]
                messages.append({"role": "tool", "tool_call_id": call.id, "content": f"nothing at {where}"})
            if choice.finish_reason != "tool_calls":
                break
        return {"reward": {"calls": calls}, "success": calls == 1, "info": {"calls": calls}}


def uncounted(task: dict[str, Any], base_url: str, api_key: str) -> float:
    with asking(base_url, api_key) as ask:
        answer = ask(model="policy", messages=[{"role": "user", "content": "?"}])
    assert answer.usage is None
    return float(len(answer.choices[0].message.content or "") % 2)


LEFT = threading.Event()  # the impatient agent no longer waits for its first answer


def impatient(task: dict[str, Any], base_url: str, api_key: str) -> float:
    """Gives up its first request and sends it again."""
    from openai import APITimeoutError

    question: list[Any] = [{"role": "user", "content": "Anyone?"}]
    with asking(base_url, api_key) as ask:
        try:
            ask(model="policy", messages=question, timeout=0.2)
        except APITimeoutError:
            LEFT.set()
        first = ask(model="policy", messages=question).choices[0].message.content
        second = ask(model="policy", messages=question).choices[0].message.content
        return float((first, second) == ("answer 0", "answer 1"))


def _status(base_url: str, path: str, body: dict[str, Any]) -> int:
    data = json.dumps(body).encode()
    request = urllib.request.Request(f"{base_url}/{path}", data, {"Content-Type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=10) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code
    except TimeoutError:
        return 0


def careless(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Sends what cannot be meant, and fields that are null."""
    message = {"role": "user", "content": "?"}

    status = partial(_status, base_url)
    tools: list[dict[str, Any]] = [{}, {"type": "function"}, {"type": "function", "function": {"name": ""}}]
    assert [status("chat/completions", {"messages": [message], "tools": [tool]}) for tool in tools] == [400] * 3
    assert status("chat/completions", {"messages": [message], "stop": None, "function_call": None}) == 200
    assert [status("reward", {"reward": value}) for value in (float("nan"), float("inf"), {}, "much")] == [400] * 4
    assert status("reward", {"reward": 0.5}) == 200


LATE: queue.SimpleQueue[int] = queue.SimpleQueue()  # statuses of what is asked after the reward


def late(task: dict[str, Any], base_url: str, api_key: str) -> None:
    """Goes on asking after it has reported its reward."""
    question = {"messages": [{"role": "user", "content": "?"}]}
    _status(base_url, "chat/completions", question)
    _status(base_url, "reward", {"reward": 1})
    for _ in range(2):
        LATE.put(_status(base_url, "chat/completions", question))


def repeats(task: dict[str, Any], base_url: str, api_key: str) -> float:
    with asking(base_url, api_key) as ask:
        ask(model="policy", messages=task["messages"])
    return 1.0


def crashes(task: dict[str, Any], base_url: str, api_key: str) -> float:
    with asking(base_url, api_key) as ask:
        ask(model="policy", messages=[{"role": "user", "content": "?"}])
    raise ZeroDivisionError("no reward")


def silent(task: dict[str, Any], base_url: str, api_key: str) -> float:
    return 1.0


def main(mode: str) -> None:
    with open(os.environ["SENSORIUM_TASK"]) as file:
        task = json.load(file)
    url = os.environ["OPENAI_BASE_URL"]
    if mode != "answer":
        _status(url, "chat/completions", {"messages": task["messages"]})
    if mode == "spawn":  # a browser, say
        child = subprocess.Popen(["sleep", "600"], start_new_session=True)
        with open("child", "w") as file:
            file.write(str(child.pid))
    if mode == "crash":
        sys.exit("the agent gives up")
    if mode == "hang":
        print("going to sleep", flush=True)
        threading.Event().wait()
    if mode == "answer":
        from openai import OpenAI

        reply = OpenAI().chat.completions.create(model=os.environ["OPENAI_MODEL"], messages=task["messages"], stream=True)
        text = "".join(part.choices[0].delta.content or "" for part in reply if part.choices)
        assert _status(url, "reward", {"reward": float(task["answer"] in text)}) == 200


if __name__ == "__main__":
    main(sys.argv[1])
