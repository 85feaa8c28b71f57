"""Tools that a model may call while it answers: their protocol, how a call is written and checked, and the environment.

A call is ``<tool_call>{"name": "crop", "arguments": {"box": [0, 0, 500, 500]}}</tool_call>``, as Qwen's chat templates and
geo3k ask for it. The name may also be under ``function.name``, the arguments under ``function.arguments`` or the JSON text
of an object. Anything else between these tags is a call with a ``problem``. Reading takes time linear in the text.
"""

import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Literal, Protocol

from sensorium.cluster.pool import WorkerFailure, WorkerPool
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.question import question_of
from sensorium.vocabulary.content import Block, Media, Message, Text, system
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, RecipeError, nearest
from sensorium.vocabulary.json_schema import KEYWORDS, misfit, validator_of
from sensorium.vocabulary.plain import attempt, printable, text_of, words
from sensorium.vocabulary.task import Task

NAME = "tools"
CHECKED = KEYWORDS | {"prefixItems"}  # schema keywords that are checked; the tool checks the others
OPENING = re.compile(r"<tool_call>\s*(?=\{)")
CLOSING = re.compile(r"(?<=\})\s*</tool_call>")
MAX_CALL = 100_000  # characters; a longer call is not read
MAX_TEXT = 20_000  # characters of a result; the rest is cut, and the result says so
MAX_PICTURES = 16

_pool = WorkerPool("tool")  # threads of all tools of the process; too many that hang are refused


@dataclass(frozen=True)
class ToolSpec:
    """How a tool is offered. ``parameters`` is a JSON schema of an object."""

    name: str
    description: str
    parameters: Mapping[str, Any] = field(default_factory=lambda: {"type": "object", "properties": {}})

    def offered(self) -> dict[str, Any]:
        """As chat templates take it."""
        function = {"name": self.name, "description": self.description, "parameters": dict(self.parameters)}
        return {"type": "function", "function": function}


@dataclass(frozen=True)
class ToolResult:
    """What a call returned: text and media in order. An error is shown to the model like any other result."""

    content: tuple[Block, ...]
    is_error: bool = False

    @classmethod
    def error(cls, text: str) -> "ToolResult":
        return cls((Text(f"Error: {text}"),), True)

    @property
    def text(self) -> str:
        return "".join(block.text for block in self.content if isinstance(block, Text))


@dataclass
class ToolContext:
    """What a tool may look at: the store of media, the task, and the pictures shown so far, those of tools included."""

    store: MediaStore
    task: Task
    pictures: list[Media] = field(default_factory=list)


class Tool(Protocol):
    """A tool. ``call`` returns a ToolResult, a text or blocks; what it raises is shown to the model as an error.

    An ``instant`` one is plain computation and runs in place. Any other runs in a thread under a deadline and may be a
    coroutine, unless it has ``own_deadline = True``. A call that overruns its deadline is left behind in its thread. Only
    a tool that is lost altogether (a server that died) raises EnvironmentFailure: that fails the episode.
    """

    spec: ToolSpec
    instant: bool

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        """Carry out a call; the arguments fit the schema."""
        ...

    def close(self) -> None: ...


@dataclass(frozen=True)
class ToolCall:
    """A call as it was written: a name and arguments, or in ``problem`` why it cannot be made."""

    name: str = ""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    problem: str = ""
    is_json: bool = True


def argument_problem(arguments: Mapping[str, Any], schema: Mapping[str, Any]) -> str:
    """What is wrong with arguments, in a sentence; empty if they fit."""
    validator = _validator(json.dumps(schema))
    return "" if validator is None else misfit(dict(arguments), validator)


@lru_cache(maxsize=256)
def _validator(schema: str) -> Any:
    """The validator of a tool's schema; None, with a warning, for an invalid one: other people's servers offer anything."""
    try:
        return validator_of(schema, CHECKED)
    except ValueError as error:
        print(f"tools: arguments are passed on unchecked: {error} ({schema:.200})", file=sys.stderr, flush=True)
        return None


def calls_in(response: str) -> list[ToolCall]:
    """Every call of a response, in order."""
    calls, place = [], 0
    while opening := OPENING.search(response, place):
        closing = CLOSING.search(response, opening.end())
        if closing is None:
            break
        calls.append(_read(response[opening.end() : closing.start()]))
        place = closing.end()
    return calls


def write_call(name: str, arguments: Mapping[str, Any]) -> str:
    """A call as a model writes it."""
    call = json.dumps({"name": name, "arguments": dict(arguments)}, ensure_ascii=False)
    return f"<tool_call>\n{call}\n</tool_call>"


def in_words(offered: Sequence[Mapping[str, Any]]) -> Text:
    """Tools as a part of the system prompt, for templates that know none."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offered)
    example = '<tool_call>{"name": "…", "arguments": {…}}</tool_call>'
    return Text(f"\n\nYou may call these tools:\n{listed}\nTo call one, write: {example}")


def _read(text: str) -> ToolCall:
    if len(text) > MAX_CALL:
        return ToolCall(problem=f"the call is longer than {MAX_CALL} characters", is_json=False)
    try:
        call = json.loads(text, parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        return ToolCall(problem=f"the call is not JSON: {error}", is_json=False)
    function = call.get("function")
    inner = function if isinstance(function, Mapping) else {}
    name, arguments = call.get("name", inner.get("name")), call.get("arguments", inner.get("arguments", {}))
    if not isinstance(name, str) or not name:
        return ToolCall(problem='the call has no "name"')
    if isinstance(arguments, str):
        try:
            arguments = json.loads(arguments, parse_constant=_refuse_constant)
        except (ValueError, RecursionError) as error:
            return ToolCall(name, problem=f'the "arguments" are text that is not JSON: {error}')
    if not isinstance(arguments, Mapping):
        return ToolCall(name, problem='the "arguments" must be an object')
    return ToolCall(name, arguments)


def _refuse_constant(name: str) -> float:
    raise ValueError(f"{name} is no JSON")


def build_tools(named: Sequence[str | Mapping[str, Any]], where: str) -> list[Tool]:
    """Tools by name, or {name, options}; ``{mcp: {…}}`` stands for all tools of a server."""
    from sensorium.recipe.registry import build

    tools: list[Tool] = []
    for place, item in enumerate(named):
        at = f"{where}.tools.{place}"
        given: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else {}
        if set(given) == {"mcp"}:
            from sensorium.envs.mcp import server_tools

            tools += server_tools(given["mcp"], at)
        elif "name" in given and set(given) <= {"name", "options"}:
            tools.append(build("tool", str(given["name"]), given.get("options") or {}, at))
        else:
            raise RecipeError(f"{at}: a tool is a name, {{name, options}} or {{mcp: {{…}}}}, not {item!r:.60}.")
    names = [tool.spec.name for tool in tools]
    if doubled := sorted({name for name in names if names.count(name) > 1}):
        raise RecipeError(f"{where}.tools: two tools are called '{doubled[0]}'; leave one out.")
    return tools


class Toolbox:
    """Some tools, what they may look at, and the deadline of a call."""

    def __init__(self, tools: Sequence[Tool], context: ToolContext, deadline_s: float = 30.0) -> None:
        self.tools = {tool.spec.name: tool for tool in tools}
        self.context, self.deadline_s = context, deadline_s

    def run(self, call: ToolCall) -> ToolResult:
        if call.problem:
            return ToolResult.error(f"{call.problem}.")
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult.error(f"there is no tool '{call.name:.60}'{nearest(call.name[:60], list(self.tools))}")
        if problem := argument_problem(call.arguments, tool.spec.parameters):
            return ToolResult.error(f"{problem}.")
        result = _bounded(self._called(tool, call))
        self.context.pictures += [block for block in result.content if isinstance(block, Media) and block.kind == "picture"]
        return result

    def close(self) -> None:
        for tool in self.tools.values():
            attempt(getattr(tool, "close", lambda: None))

    def _called(self, tool: Tool, call: ToolCall) -> ToolResult:
        if getattr(tool, "instant", False) is True or getattr(tool, "own_deadline", False) is True:
            value, error = attempt(tool.call, call.arguments, self.context)
        else:
            try:
                made = _pool.call_now(lambda: tool.call(call.arguments, self.context), self.deadline_s)
            except WorkerFailure as overdue:
                return ToolResult.error(f"the tool '{call.name}' {overdue}.")
            value, error = made.value, made.error
        if isinstance(error, EnvironmentFailure):
            raise error
        if error is None:
            value, error = attempt(_result, value)
        if error is None:
            result: ToolResult = value
            return result
        reason = printable(str(error)) if isinstance(error, MediaError) else words(error)
        return ToolResult.error(f"the tool '{call.name}' failed: {reason}")


def _result(value: Any) -> ToolResult:
    """What a tool returned: a ToolResult, a text, a block or a list of texts and blocks."""
    content: Any = value if isinstance(value, tuple | list) else (value,)
    is_error = False
    if isinstance(value, ToolResult):
        content, is_error = value.content, bool(value.is_error)
    blocks = tuple(Text(text_of(block)) if isinstance(block, str) else block for block in content)
    for block in blocks:
        if not isinstance(block, Text | Media):
            raise ValueError(f"it returned {type(block).__name__}, which is neither text nor a medium")
        if isinstance(block, Text):
            text_of(block.text)
    return ToolResult(blocks, is_error)


def _bounded(result: ToolResult) -> ToolResult:
    """A result of bounded length: a megabyte of text, or a hundred pictures, would end the episode."""
    left, pictures = MAX_TEXT, MAX_PICTURES
    kept: list[Block] = []
    for block in result.content:
        if isinstance(block, Media):
            pictures -= 1
            if pictures >= 0:
                kept.append(block)
        elif left > 0:
            cut = len(block.text) > left
            kept.append(Text(block.text[:left] + "\n[cut off here]") if cut else block)
            left -= len(block.text)
    return ToolResult(tuple(kept) or (Text("(nothing)"),), result.is_error)


class ToolUse:
    """Plays a row's question with ``tools``: names, {name, options}, or {mcp: {command or url}} for a server's tools.

    A response without a call is the final answer, which reward terms judge as they judge a question's. ``offer`` shows the
    tools by the checkpoint's own chat template, with results in the role ``tool``; or as text in the system prompt, with
    results in the role ``user``, for templates that know no tools. Of ``max_turns`` responses the last must answer: the
    result before it says so.
    """

    instant = False
    recipe_only = ("tools",)

    def __init__(
        self,
        store: MediaStore,
        task: Task,
        tools: Sequence[str | Mapping[str, Any]] = (),
        max_turns: int = 4,
        max_calls_per_turn: int = 4,
        offer: Literal["template", "text"] = "template",
        system: str = "Use the tools where they help. When you know the answer, give it without calling a tool.",
        deadline_s: float = 30.0,
    ) -> None:
        one_of(NAME, "offer", offer, ["template", "text"])
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "max_calls_per_turn", max_calls_per_turn, 1, 64)
        within(NAME, "deadline_s", deadline_s, 0.001, 86_400)
        if not tools:
            raise RecipeError("tools: the environment has none; name some, as in tools: [calculator, crop].")
        self.task, self.max_turns, self.max_calls, self.system = task, max_turns, max_calls_per_turn, system
        self.role: Literal["tool", "user"] = "tool" if offer == "template" else "user"
        self.toolbox = Toolbox(build_tools(tools, NAME), ToolContext(store, task), deadline_s)
        self.instant = all(getattr(tool, "instant", False) is True for tool in self.toolbox.tools.values())
        self._turn, self._over = 0, True

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        head, asked = question_of(self.task)
        self._turn, self._over = 0, False
        self.toolbox.context.pictures = [item for message in asked for item in message.media if item.kind == "picture"]
        offered = [tool.spec.offered() for tool in self.toolbox.tools.values()]
        first = head[0] if head else system(self.system)
        if self.role == "tool":
            return (Message("system", first.content, json.dumps(offered, ensure_ascii=False)), *head[1:]), Observation(
                asked
            )
        return (Message("system", (*first.content, in_words(offered))), *head[1:]), Observation(asked)

    def step(self, response: str) -> StepResult:
        """Make the calls of a response, or take it as the answer."""
        if self._over:
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer was given (or nothing was asked yet); reset it first."
            )
        self._turn += 1
        calls = calls_in(response)
        called = ", ".join(call.name[:60] for call in calls[:8])
        info: dict[str, Any] = {"valid": True, "calls": len(calls), "tools": called}
        if not calls or self._turn >= self.max_turns:
            self._over = True
            return StepResult(None, done=True, truncated=bool(calls), info=info)
        results = [self.toolbox.run(call) for call in calls[: self.max_calls]]
        info["errors"] = sum(result.is_error for result in results)
        note = "" if len(calls) <= self.max_calls else f"\nOnly the first {self.max_calls} calls of a response are made."
        if self._turn + 1 == self.max_turns:
            note += "\nThis was the last call: answer now, without calling a tool."
        contents = [result.content for result in results]
        if note:
            contents[-1] = (*contents[-1], Text(note))
        if self.role == "user" and len(contents) > 1:
            contents = [tuple(block for content in contents for block in (*content, Text("\n")))]
        return StepResult(Observation(tuple(Message(self.role, content) for content in contents)), info=info)

    def demonstrate(self) -> str:
        """A row's ``demonstration`` has a response for each turn; none is known beyond them."""
        raise EnvironmentFailure(f"task {self.task.id}: its demonstration has no response for turn {self._turn}.")

    def close(self) -> None:
        self.toolbox.close()
