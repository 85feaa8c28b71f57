"""ToolUse: a task's question, answered with the help of tools over several turns.

A response that calls tools is answered with what they give; one that calls none is the final answer, and ends it. Reward
terms judge that answer as they judge a question's. What tools and observations say is never scored.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

from sensorium.envs.option_checks import one_of, within
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.question import question_of
from sensorium.envs.tools.calls import calls_in
from sensorium.envs.tools.protocol import ToolContext
from sensorium.envs.tools.toolbox import Toolbox, build_tools
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, Text, system
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.task import Task

NAME = "tools"


class ToolUse:
    """Plays a row's question with ``tools``: names, {name, options}, or {mcp: {command or url}} for a server's tools.

    ``offer`` shows them by the checkpoint's own chat template, and tells results in the role ``tool``; or in words, in the
    system prompt, with results in the role ``user``, for templates that know no tools. Of ``max_turns`` responses the last
    must answer: the one before it is told so.
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
        self.task, self.max_turns, self.max_calls, self.offer, self.system = (
            task,
            max_turns,
            max_calls_per_turn,
            offer,
            system,
        )
        self.toolbox = Toolbox(build_tools(tools, NAME), ToolContext(store, task), deadline_s)
        self.instant = all(getattr(tool, "instant", False) is True for tool in self.toolbox.tools.values())
        self._turn, self._over = 0, True

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """The question, and the tools in the head."""
        head, asked = question_of(self.task)
        self._turn, self._over = 0, False
        self.toolbox.context.pictures = [item for message in asked for item in message.media if item.kind == "picture"]
        offered = [tool.spec.offered() for tool in self.toolbox.tools.values()]
        first = head[0] if head else system(self.system)
        if self.offer == "template":
            head = (Message("system", first.content, json.dumps(offered, ensure_ascii=False)), *head[1:])
        else:
            head = (Message("system", (*first.content, Text(f"\n\n{in_words(offered)}"))), *head[1:])
        return head, Observation(asked)

    def step(self, response: str) -> StepResult:
        """Make the calls of a response, or take it for the answer."""
        if self._over:
            raise EnvironmentFailure(
                f"task {self.task.id}: its answer was given (or nothing was asked yet); reset it first."
            )
        self._turn += 1
        calls = calls_in(response)
        info: dict[str, Any] = {
            "valid": True,
            "calls": len(calls),
            "tools": ", ".join(call.name[:60] for call in calls[:8]),
        }
        if not calls or self._turn >= self.max_turns:
            self._over = True
            return StepResult(None, done=True, truncated=bool(calls), info=info)
        results = [self.toolbox.run(call) for call in calls[: self.max_calls]]
        info["errors"] = sum(result.is_error for result in results)
        left = self.max_turns - self._turn
        told = "" if len(calls) <= self.max_calls else f"\nOnly the first {self.max_calls} calls of a response are made."
        told += "\nThis was the last call: answer now, without calling a tool." if left == 1 else ""
        role: Literal["tool", "user"] = "tool" if self.offer == "template" else "user"
        messages = [Message(role, result.content) for result in results]
        if told:
            messages[-1] = Message(role, (*messages[-1].content, Text(told)))
        if role == "user" and len(messages) > 1:
            messages = [Message(role, tuple(block for message in messages for block in (*message.content, Text("\n"))))]
        return StepResult(Observation(tuple(messages)), info=info)

    def demonstrate(self) -> str:
        """A row's ``demonstration`` has a response for each turn; none is known beyond them."""
        raise EnvironmentFailure(f"task {self.task.id}: its demonstration has no response for turn {self._turn}.")

    def close(self) -> None:
        """Close the tools."""
        self.toolbox.close()


def in_words(offered: Sequence[Mapping[str, Any]]) -> str:
    """Tools for a prompt, and how to call them."""
    listed = "\n".join(json.dumps(tool["function"], ensure_ascii=False) for tool in offered)
    example = '{"name": "…", "arguments": {…}}'
    return f"You may call these tools:\n{listed}\nTo call one, write: <tool_call>{example}</tool_call>"
