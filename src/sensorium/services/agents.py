"""Agents that know nothing of this package: programs that talk to the policy as to any OpenAI-compatible server.

    POST {base_url}/chat/completions   answered by the policy; the tokens that it sampled are what is trained
    GET  {base_url}/models             the policy
    POST {base_url}/reward             {"reward": 0.5, "success": true}; ends the episode

An episode is one run of the agent, with a ``base_url`` of its own. A request is an observation, its answer the response. A
request that begins with the messages of an earlier one and its answer continues that thread; any other begins a thread of
its own, and all threads of an episode share its reward:

    u1             turn 0, a thread
    u1 a1 u2       turn 1, continues the thread of turn 0
    v1             turn 2, a second thread
    u1 a1 u3       turn 3, a third one, which shares u1 a1 with the first

Requests of an agent are answered one after the other, in the order of their arrival.
"""

import asyncio
import atexit
import base64
import hashlib
import json
import os
import queue
import secrets
import shlex
import shutil
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from contextlib import suppress
from dataclasses import dataclass, field
from functools import cache, partial
from inspect import isawaitable
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Annotated, Any, Literal

from fastapi import Request
from fastapi.responses import StreamingResponse
from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sensorium.cluster.python_process import end_group, end_orphans, last_words, new_mark, temporary_folder
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import Place, messages_of
from sensorium.envs.protocol import Observation, StepResult, one_of
from sensorium.envs.tool_use import calls_in, in_words, write_call
from sensorium.recipe.registry import resolve
from sensorium.services.application import BodyLimit, Refusal, make_application
from sensorium.services.chat import Part, error_body, event, raw_block
from sensorium.vocabulary.content import Media, Message, Text
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, SensoriumError
from sensorium.vocabulary.plain import attempt, json_of, number_of, shown, words
from sensorium.vocabulary.task import Task

NAME = "agent"
MODEL = "policy"
LEAVE_S = 5.0  # for a program to end after it has reported its reward
MOST_BODY = 64 << 20
LOOPBACK = "127.0.0.1"
TASK_VARIABLE = "SENSORIUM_TASK"
OVER = "the episode is over"
WITHOUT_EFFECT = ("temperature", "top_p", "top_k", "seed", "presence_penalty", "frequency_penalty", "reasoning_effort")
STATUSES = {400: "the request is wrong", 410: OVER, 413: "the body is too large"}
PARTS = {"picture": ("image_url", "image/png"), "video": ("video_url", "video/mp4"), "sound": ("audio_url", "audio/wav")}

Json = dict[str, Any]


class Function(BaseModel):
    """A call of an assistant's message."""

    name: str
    arguments: str


class Call(BaseModel):
    """A tool call of an assistant's message."""

    id: str = ""
    function: Function


class AgentMessage(BaseModel):
    """One message of a request. Clients send back further fields of answers (refusal, audio, …), which are empty."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None
    tool_calls: list[Call] | None = None
    tool_call_id: str | None = None

    @property
    def text(self) -> str:
        """Its text, without media."""
        parts = [{"type": "text", "text": self.content or ""}] if not isinstance(self.content, list) else self.content
        return "".join(str(part.get("text", "")) for part in parts if part.get("type") == "text")

    @property
    def calls(self) -> Sequence[Call]:
        return self.tool_calls or ()

    @property
    def key(self) -> str:
        """Equal for messages that mean the same."""
        others = [part for part in self.content if part.get("type") != "text"] if isinstance(self.content, list) else []
        content = self.content if others else self.text
        calls = [[call.id, call.function.name, call.function.arguments] for call in self.calls]
        role = "system" if self.role == "developer" else self.role
        return hashlib.sha256(json.dumps([role, content, calls, self.tool_call_id or ""]).encode()).hexdigest()


def _named_functions(tools: list[Json] | None) -> list[Json] | None:
    for tool in tools or ():
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if not isinstance(name, str) or not name:
            raise ValueError('a tool is {"type": "function", "function": {"name": "…", …}}')
    return tools


Finite = Annotated[float, Field(allow_inf_nan=False)]


class AgentRequest(BaseModel):
    """A chat completion. How tokens are sampled is the recipe's: ``temperature`` and the like have no effect.

    A field that is null counts as not given, whatever its name: many clients send all fields that they know.
    """

    model_config = ConfigDict(extra="forbid")
    messages: Annotated[list[AgentMessage], Field(min_length=1, max_length=4096)]
    model: str = MODEL
    tools: Annotated[list[Json] | None, AfterValidator(_named_functions)] = None
    tool_choice: Literal["auto", "none"] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    n: Annotated[int, Field(ge=1, le=1)] | None = None
    stream: bool | None = None
    stream_options: dict[str, Any] | None = None
    response_format: dict[Literal["type"], Literal["text"]] | None = None
    logprobs: Literal[False] | None = None
    # without effect
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    seed: int | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    user: str | None = None
    metadata: dict[str, str] | None = None
    store: bool | None = None

    @model_validator(mode="before")
    @classmethod
    def _given(cls, body: Any) -> Any:
        return {key: value for key, value in body.items() if value is not None} if isinstance(body, dict) else body

    @property
    def offered(self) -> str:
        """The tools that the model may call, as JSON."""
        return json.dumps(self.tools, ensure_ascii=False) if self.tools and self.tool_choice != "none" else ""


class Report(BaseModel):
    """What an episode was worth: a number, or numbers by name."""

    model_config = ConfigDict(extra="forbid")
    reward: Finite | Annotated[dict[str, Finite], Field(min_length=1)]
    success: bool | None = None
    info: dict[str, Any] = {}


@dataclass(frozen=True)
class Asked:
    """A request that waits for its answer."""

    request: AgentRequest
    answer: "Future[Json]" = field(default_factory=Future)

    def refuse(self, status: int, why: str) -> None:
        with suppress(InvalidStateError):  # it was answered
            self.answer.set_exception(Refusal(status, why))


@dataclass(frozen=True)
class Ended:
    """The agent's program or function has ended; ``problem`` says how, if not well."""

    problem: str = ""


class Conversations:
    """The requests of an episode and their answers: which one continues which."""

    def __init__(self, store: MediaStore, offer: str = "template") -> None:
        self._store, self._in_words = store, offer == "text"
        self._turns: list[tuple[str, ...]] = []  # tools, and keys of the messages, the answer's included
        self._written: dict[str, str] = {}  # what the model wrote, by the key of the message that was made of it

    def observation(self, asked: AgentRequest) -> Observation:
        """What the model sees of a request. A SensoriumError if the request is wrong."""
        if asked.messages[-1].role == "assistant":
            raise EnvironmentFailure("the last message is the assistant's, so there is nothing to answer.")
        after, new = self._follows(asked)
        messages = self._read(new)
        if after < 0 and asked.offered:
            first = messages[0].role == "system"
            given = messages[0].content if first else ()
            system = Message("system", given, asked.offered)
            if self._in_words:
                system = Message("system", (*given, in_words(asked.tools or ())))
            messages = (system, *messages[first:])
        return Observation(messages, after=after, max_new_tokens=asked.max_completion_tokens or asked.max_tokens or 0)

    def answered(self, asked: AgentRequest, response: str, cut: bool) -> Json:
        """The choice of the reply to a request. Calls of tools are taken out of the text if all of them can be read."""
        number = len(self._turns)
        calls = calls_in(response) if asked.offered else []
        message: Json = {"role": "assistant", "content": response}
        if calls and not any(call.problem for call in calls):
            before, _, _ = response.partition("<tool_call>")
            message["content"] = before.rstrip() or None
            message["tool_calls"] = [
                {
                    "id": f"call_{number}_{place}",
                    "type": "function",
                    "function": {"name": call.name, "arguments": json.dumps(dict(call.arguments), ensure_ascii=False)},
                }
                for place, call in enumerate(calls)
            ]
        key = AgentMessage.model_validate(message).key
        self._turns.append((asked.offered, *(given.key for given in asked.messages), key))
        self._written[key] = response
        finish = "length" if cut else "tool_calls" if "tool_calls" in message else "stop"
        return {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}

    def _follows(self, asked: AgentRequest) -> tuple[int, Sequence[AgentMessage]]:
        """The turn that a request continues, the one with most messages, or -1; and the messages that are new."""
        keys = (asked.offered, *(message.key for message in asked.messages))
        after, new = -1, asked.messages
        for number, turn in enumerate(self._turns):
            rest = asked.messages[len(turn) - 1 :]
            goes_on = keys[: len(turn)] == turn and not any(message.role == "assistant" for message in rest)
            if goes_on and 0 < len(rest) < len(new) + (after >= 0):
                after, new = number, rest
        return after, new

    def _read(self, given: Sequence[AgentMessage]) -> tuple[Message, ...]:
        raw = []
        for message in given:
            content: Any = message.content or ""
            if message.role == "assistant":  # as the model wrote it, where it did
                content = (
                    self._written.get(message.key) or "\n".join([message.text, *map(_written_call, message.calls)]).strip()
                )
            elif isinstance(content, list):
                content = [raw_block(Part.model_validate(part)) for part in content]
            role = "user" if self._in_words and message.role == "tool" else message.role
            raw.append({"role": "system" if role == "developer" else role, "content": content})
        return messages_of(raw, Place("messages", Path("/"), self._store, roots=(), service=True))


def _written_call(call: Call) -> str:
    arguments, error = attempt(json.loads, call.function.arguments)
    return write_call(call.function.name, arguments if error is None and isinstance(arguments, dict) else {})


class AgentEnvironment:
    """One run of ``command`` (a program), or of ``function`` (module:name), for each episode.

    The program gets OPENAI_BASE_URL, OPENAI_API_KEY and OPENAI_MODEL, and in SENSORIUM_TASK the path of a JSON file with
    id, seed, messages, answer and metadata of its task. A function is called with ``task`` (the same object), ``base_url``
    and ``api_key`` in a thread, may be a coroutine, and may return the reward: a number, or what ``/reward`` takes.
    ``offer`` shows the tools of its requests by the checkpoint's own chat template, or as text in the system prompt.
    """

    instant = False
    recipe_only = ("command", "function")

    def __init__(
        self,
        store: MediaStore,
        task: Task | None = None,
        command: str = "",
        function: str = "",
        offer: Literal["template", "text"] = "template",
    ) -> None:
        one_of(NAME, "offer", offer, ["template", "text"])
        if bool(command) == bool(function):
            raise RecipeError(f"{NAME}: give either command, a program and its arguments, or function, module:name.")
        self.store, self.task, self.offer, self.command = store, task, offer, shlex.split(command)
        self.function = resolve("agent", function, NAME) if function else None
        if command and shutil.which(self.command[0]) is None:
            raise RecipeError(f"{NAME}: there is no program '{self.command[0]}' (command: {command}).")
        self._gateway = _gateway()
        self._run: _AgentRun | None = None

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        return str(seed)

    @property
    def last_words(self) -> str:
        """A sentence with the last lines that the program printed."""
        return "" if self._run is None else self._run.last_words

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Start the agent; its first request is the first observation."""
        self.close()
        self._run = run = _AgentRun(self._gateway, Conversations(self.store, self.offer))
        run.start(self._task_json(seed), self.command, self.function)
        first = run.next()
        if first.observation is None:
            raise EnvironmentFailure(f"the agent ended before it had asked the model anything.{run.last_words}")
        return (), first.observation

    def response_usage(self, prompt_tokens: int, tokens: int, cut: bool) -> None:
        if self._run is not None:
            self._run.usage = prompt_tokens, tokens, cut

    def step(self, response: str) -> StepResult:
        """Answer the request; what comes of it is the next request, or the end."""
        if self._run is None:
            raise EnvironmentFailure("the agent has not begun, or has ended; reset it first.")
        self._run.answer(response)
        return self._run.next()

    def close(self) -> None:
        run, self._run = self._run, None
        if run is not None:
            run.close()

    def _task_json(self, seed: int) -> Json:
        task = self.task or Task(f"seed-{seed}")
        messages = [{"role": message.role, "content": list(map(self._part, message.content))} for message in task.messages]
        known = {"answer": json_of(task.answer), "metadata": json_of(dict(task.metadata))}
        return {"id": task.id, "seed": seed, "messages": messages, **known}

    def _part(self, block: Text | Media) -> Json:
        if isinstance(block, Text):
            return {"type": "text", "text": block.text}
        kind, mime = PARTS[block.kind]
        data = base64.b64encode(self.store.shown_bytes(block)).decode()
        return {"type": kind, kind: {"url": f"data:{mime};base64,{data}"}}


class _AgentRun:
    """An agent at work: what it asks and reports comes as events, in order."""

    def __init__(self, gateway: "_Gateway", talks: Conversations) -> None:
        self._gateway, self._talks = gateway, talks
        self.usage: tuple[int, int, bool] | None = None  # of the last answer, where it is known
        self.one_at_a_time = asyncio.Lock()
        self.unread: tuple[AgentRequest, Json] | None = None  # a request whose client had left before it was answered
        self._key = secrets.token_urlsafe(16)
        self._events: queue.SimpleQueue[Asked | Report | Ended] = queue.SimpleQueue()
        self._pending: Asked | None = None
        self._over = self._closed = False
        self._process: subprocess.Popen[bytes] | None = None
        self._mark = ""
        self._folder = TemporaryDirectory(prefix="agent-", dir=temporary_folder())
        self._log = Path(self._folder.name, "output.txt")

    @property
    def last_words(self) -> str:
        return last_words(self._log.read_text(errors="replace")) if self._log.exists() else ""

    def start(self, task: Json, command: Sequence[str], function: Callable[..., Any] | None) -> None:
        base_url = self._gateway.open(self._key, self)
        if function is not None:
            call = partial(function, task=task, base_url=base_url, api_key=self._key)
            threading.Thread(target=self._call, args=(call,), name="agent", daemon=True).start()
            return
        file = Path(self._folder.name, "task.json")
        file.write_text(json.dumps(task, ensure_ascii=False))
        self._mark, value = new_mark()
        direct = ",".join(filter(None, [os.environ.get("NO_PROXY", ""), LOOPBACK]))
        variables = {
            self._mark: value,
            "OPENAI_BASE_URL": base_url,
            "OPENAI_API_KEY": self._key,
            "OPENAI_MODEL": MODEL,
            "NO_PROXY": direct,
            "no_proxy": direct,
            TASK_VARIABLE: str(file),
        }
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                list(command),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                env=os.environ | variables,
                start_new_session=True,
            )
        threading.Thread(target=self._watch, args=(self._process,), name="agent", daemon=True).start()

    def put(self, event: Asked | Report) -> None:
        """From the gateway: a request, or the reward."""
        self._events.put(event)

    def next(self) -> StepResult:
        """Wait for what the agent does next."""
        while True:
            event = self._events.get()
            if isinstance(event, Report):
                self._over = True
                return StepResult(None, reward=event.reward, done=True, success=event.success, info=event.info)
            if isinstance(event, Ended):
                self._over = True
                if event.problem:
                    raise EnvironmentFailure(f"the agent {event.problem}")
                return StepResult(None, done=True)
            try:
                observation = self._talks.observation(event.request)
            except (SensoriumError, Refusal, ValueError) as error:
                event.refuse(400, str(error))
                continue
            self._pending = event
            if self._closed:
                event.refuse(410, OVER)
            return StepResult(observation)

    def answer(self, response: str) -> None:
        asked, self._pending = self._pending, None
        assert asked is not None, "a step follows a request"
        usage, cut = None, False
        if self.usage is not None:
            prompt, tokens, cut = self.usage
            usage = {"prompt_tokens": prompt, "completion_tokens": tokens, "total_tokens": prompt + tokens}
        asked.answer.set_result({"choices": [self._talks.answered(asked.request, response, cut)], "usage": usage})

    def close(self) -> None:
        """Refuse what it still asks, and end the program with all that it started; one that has reported may end itself."""
        self._gateway.close(self._key)
        self._closed = True  # before the others look: whoever comes later refuses by itself
        if self._pending is not None:
            self._pending.refuse(410, OVER)
        self._events.put(Ended("was closed"))  # for a thread that waits for the agent
        with suppress(queue.Empty):
            while True:
                event = self._events.get_nowait()
                if isinstance(event, Asked):
                    event.refuse(410, OVER)
                elif isinstance(event, Ended):
                    self._events.put(event)
                    break
        if self._process is not None:
            with suppress(subprocess.TimeoutExpired):
                self._process.wait(LEAVE_S if self._over else 0)
            self._process.kill()
            self._process.wait()
            end_group(self._process.pid, self._mark)
        self._folder.cleanup()

    def _watch(self, process: "subprocess.Popen[bytes]") -> None:
        code = process.wait()
        how = f"was killed by signal {-code}" if code < 0 else f"ended with exit code {code}"
        self._events.put(Ended("" if code == 0 or self._closed else f"{how}.{self.last_words}"))

    def _call(self, call: Callable[[], Any]) -> None:
        async def result(value: Any) -> Any:
            return await value

        try:
            value = call()
            value = asyncio.run(result(value)) if isawaitable(value) else value
            if value is not None:
                self._events.put(_report_of(value))
            self._events.put(Ended())
        except BaseException as error:
            lines = traceback.format_exception(error)
            self._events.put(Ended(f"raised {words(error)}.{last_words(''.join(lines))}"))


def _report_of(value: Any) -> Report:
    """The report that a function returned; a ValueError says what is wrong with it."""
    try:
        return Report.model_validate(value if isinstance(value, Mapping) else {"reward": number_of(value)})
    except ValidationError as error:
        problems = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors())
        raise ValueError(f"{shown(value)} is no reward ({problems})") from None


class _Gateway:
    """The server of this process, to which all its agents talk."""

    def __init__(self) -> None:
        import uvicorn

        self._runs: dict[str, _AgentRun] = {}
        listening = socket.create_server((LOOPBACK, 0), backlog=1024)
        self._address = f"http://{LOOPBACK}:{listening.getsockname()[1]}"
        server = uvicorn.Server(uvicorn.Config(self._application(), log_level="warning"))
        threading.Thread(target=server.run, args=([listening],), name="agent gateway", daemon=True).start()
        atexit.register(self._close_all)  # after Ctrl-C nobody waits for episodes to close

    def open(self, key: str, run: _AgentRun) -> str:
        """Take requests of a run from now on; returns its base_url."""
        self._runs[key] = run
        return f"{self._address}/{key}/v1"

    def close(self, key: str) -> None:
        self._runs.pop(key, None)

    def _close_all(self) -> None:
        for run in list(self._runs.values()):
            run.close()

    def _known(self, key: str) -> _AgentRun:
        if key not in self._runs:
            raise Refusal(410, OVER)
        return self._runs[key]

    def _application(self) -> Any:
        app, declared = make_application("Sensorium agents", "", None, STATUSES, error_body)
        app.add_middleware(BodyLimit, most=MOST_BODY)

        @app.post("/{key}/v1/chat/completions", **declared)
        async def complete(key: str, body: AgentRequest, connection: Request) -> Any:
            run = self._known(key)
            if given := tuple(name for name in WITHOUT_EFFECT if getattr(body, name) is not None):
                _report_without_effect(given)
            async with run.one_at_a_time:
                self._known(key)
                if run.unread is not None and run.unread[0] == body:
                    answer = run.unread[1]
                else:
                    asked = Asked(body)
                    run.put(asked)
                    if key not in self._runs:  # closed meanwhile
                        asked.refuse(410, OVER)
                    answer = await asyncio.wrap_future(asked.answer)
                run.unread = (body, answer) if await connection.is_disconnected() else None
            return _reply(body, answer)

        @app.get("/{key}/v1/models", **declared)
        async def models(key: str) -> Json:
            self._known(key)
            return {"object": "list", "data": [{"id": MODEL, "object": "model", "created": 0, "owned_by": "sensorium"}]}

        @app.post("/{key}/v1/reward", **declared)
        async def reward(key: str, body: Report) -> Json:
            self._known(key).put(body)
            return {"status": "ok"}

        return app


def _reply(asked: AgentRequest, answer: Json) -> Any:
    head = {"id": f"chatcmpl-{secrets.token_hex(12)}", "created": int(time.time()), "model": MODEL}
    if not asked.stream:
        return {**head, "object": "chat.completion", **answer}
    (choice,) = answer["choices"]
    delta = dict(choice["message"])
    if "tool_calls" in delta:
        delta["tool_calls"] = [{"index": place, **call} for place, call in enumerate(delta["tool_calls"])]
    empty = {"index": 0, "delta": {}, "finish_reason": choice["finish_reason"]}
    parts: list[Json] = [{"choices": [{"index": 0, "delta": delta, "finish_reason": None}]}, {"choices": [empty]}]
    if (asked.stream_options or {}).get("include_usage"):
        parts.append({"choices": [], "usage": answer["usage"]})
    events = [event({**head, "object": "chat.completion.chunk", **part}) for part in parts]
    return StreamingResponse(iter([*events, event("[DONE]")]), media_type="text/event-stream")


@cache
def _report_without_effect(options: tuple[str, ...]) -> None:
    print(
        f"ATTENTION: an agent asks for {', '.join(options)}, which has no effect: the policy is sampled as the recipe's "
        "section rollout says. Reported once.",
        file=sys.stderr,
        flush=True,
    )


@cache
def _gateway() -> _Gateway:
    for line in end_orphans():
        print(f"ATTENTION: ended a process that a killed run had left: {line}", file=sys.stderr, flush=True)
    return _Gateway()
