"""The tools of one episode: every call gives a result, and what goes wrong is a result that says so.

A tool that overruns its deadline is left behind in its thread, and the model is told. Only a tool that is lost altogether
(a server that died) raises EnvironmentFailure: that is nobody's wrong answer, and costs the episode instead.
"""

from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.envs.tools.arguments import misfit
from sensorium.envs.tools.calls import ToolCall
from sensorium.envs.tools.protocol import Tool, ToolContext, ToolResult
from sensorium.vocabulary.content import Block, Media, Text
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, RecipeError, nearest
from sensorium.vocabulary.plain import attempt, printable, text_of, words
from sensorium.workers.pool import WorkerFailure, WorkerPool

MOST_TEXT = 20_000
"""Characters of a result; what is longer is cut, and says so."""

MOST_PICTURES = 16

_pool = WorkerPool("tool")
"""Threads for all tools of the process; one that hangs is counted, and too many of them are refused."""


def build_tools(named: Sequence[str | Mapping[str, Any]], where: str) -> list[Tool]:
    """Tools by name, or {name, options}; ``{mcp: {…}}`` stands for all tools of a server."""
    from sensorium.recipe.names import build

    tools: list[Tool] = []
    for place, item in enumerate(named):
        at = f"{where}.tools.{place}"
        given: dict[str, Any] = {"name": item} if isinstance(item, str) else dict(item) if isinstance(item, Mapping) else {}
        if set(given) == {"mcp"}:
            from sensorium.envs.tools.mcp import server_tools

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
    """Some tools, what they may look at, and the seconds that a call may take."""

    def __init__(self, tools: Sequence[Tool], context: ToolContext, deadline_s: float = 30.0) -> None:
        self.tools = {tool.spec.name: tool for tool in tools}
        self.context, self.deadline_s = context, deadline_s

    def run(self, call: ToolCall) -> ToolResult:
        """Make a call."""
        if call.problem:
            return ToolResult.error(f"{call.problem}.")
        tool = self.tools.get(call.name)
        if tool is None:
            return ToolResult.error(f"there is no tool '{call.name:.60}'{nearest(call.name[:60], list(self.tools))}")
        if problem := misfit(call.arguments, tool.spec.parameters):
            return ToolResult.error(f"{problem}.")
        result = self._bounded(self._called(tool, call))
        self.context.pictures += [block for block in result.content if isinstance(block, Media) and block.kind == "picture"]
        return result

    def close(self) -> None:
        """Close the tools."""
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
        if error is not None:
            told = printable(str(error)) if isinstance(error, MediaError) else words(error)
            return ToolResult.error(f"the tool '{call.name}' failed: {told}")
        result, strange = attempt(_result, value)
        return ToolResult.error(f"the tool '{call.name}' failed: {words(strange)}") if strange is not None else result

    def _bounded(self, result: ToolResult) -> ToolResult:
        """A result of bounded length: a megabyte of text, or a hundred pictures, would end the episode."""
        left, pictures = MOST_TEXT, MOST_PICTURES
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


def _result(value: Any) -> ToolResult:
    """What a tool returned: a ToolResult, a text, a block or a list of texts and blocks."""
    content: Sequence[Any]
    if isinstance(value, ToolResult):
        content, is_error = value.content, bool(value.is_error)
    else:
        content, is_error = value if isinstance(value, tuple | list) else (value,), False
    blocks = tuple(Text(text_of(block)) if isinstance(block, str) else block for block in content)
    for block in blocks:
        if not isinstance(block, Text | Media):
            raise ValueError(f"it returned {type(block).__name__}, which is neither text nor a medium")
        if isinstance(block, Text):
            text_of(block.text)
    return ToolResult(blocks, is_error)
