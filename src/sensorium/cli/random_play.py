"""Responses without a model: actions by chance where an environment names them, else words; and a call of each tool."""

import random
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from sensorium.engines.protocol import Request
from sensorium.envs.actions import ActionGrammar
from sensorium.envs.protocol import Environment
from sensorium.envs.tools.calls import ToolCall
from sensorium.envs.tools.toolbox import Toolbox
from sensorium.rollout.live import MakeEnvironment
from sensorium.vocabulary.plain import attempt, words
from sensorium.vocabulary.task import Task

WORDS = ("", "yes", "42", "<answer>1</answer>", "\\boxed{2}", "I do not know.", "<think>hm</think><answer>A</answer>")
EXAMPLES: dict[str, Any] = {"string": "1", "integer": 1, "number": 1.0, "boolean": True, "object": {}, "array": []}


class RandomPlay:
    """Plays by chance, the same for the same task. ``make`` builds its environments, so that their actions are known."""

    def __init__(self, make: MakeEnvironment) -> None:
        self._make = make
        self._grammars: dict[str, ActionGrammar | None] = {}

    def make(self, task: Task) -> Environment:
        """A task's environment."""
        environment = self._make(task)
        grammar = getattr(environment, "grammar", None)
        self._grammars[task.id] = grammar if isinstance(grammar, ActionGrammar) else None
        return environment

    @property
    def action_names(self) -> tuple[str, ...]:
        """The actions of the environments that were made, by name."""
        return tuple(dict.fromkeys(name for grammar in self._grammars.values() if grammar for name in grammar.names))

    def answer(self, request: Request) -> str:
        """Any response; one in eight is words where there are actions."""
        episode, _, turn = request.name.rpartition("/")
        task = episode.split("/", 3)[-1].rpartition("/")[0]
        chance = random.Random(f"validate/{task}/{turn}")
        grammar = self._grammars.get(task)
        if grammar is None or chance.random() < 1 / 8:
            return chance.choice(WORDS)
        count = chance.randint(1, min(3, grammar.most_actions))
        actions = [chance.randrange(len(grammar.names)) for _ in range(count)]
        return grammar.write(actions, **dict.fromkeys(("think", "observation", "reasoning", "prediction"), "?"))


def try_tools(tasks: Sequence[Task], make: MakeEnvironment) -> Iterator[tuple[str, str, bool]]:
    """Call each tool of the first environment that has tools, with arguments that fit its schema: (name, reply, good).

    One that says that it ``changes`` things is not called.
    """
    for task in tasks[:1]:
        environment, error = attempt(make, task)
        toolbox = getattr(environment, "toolbox", None) if error is None else None
        if not isinstance(toolbox, Toolbox):
            continue
        _, begun = attempt(environment.reset, task.environment.seed if task.environment else 0)
        if begun is not None:
            continue  # it fails in play too, and is found there
        for name, tool in toolbox.tools.items():
            if getattr(tool, "changes", False) is True:
                yield name, "not called: its server says that it changes things", True
                continue
            reply, failed = attempt(toolbox.run, ToolCall(name, example_arguments(tool.spec.parameters)))
            if failed is not None:
                yield name, words(failed), False
            else:
                told = " ".join(reply.text.split())[:80] or f"{len(reply.content)} blocks"
                yield name, f"replies: {told}", not reply.is_error
        attempt(environment.close)


def example_arguments(schema: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments that fit a JSON schema, roughly: the required ones, by their types, enums and defaults."""
    properties = schema.get("properties", {})
    return {name: _example(properties.get(name, {})) for name in schema.get("required", ())}


def _example(schema: Mapping[str, Any]) -> Any:
    for key in ("default", "const"):
        if key in schema:
            return schema[key]
    if schema.get("enum"):
        return schema["enum"][0]
    kind = schema.get("type", "string")
    kind = kind[0] if isinstance(kind, list) else kind
    if kind == "object":
        return example_arguments(schema)
    if kind == "array":
        least = max(int(schema.get("minItems", 1)), 1)
        items = [_example(schema.get("items", {})) for _ in range(least)]
        if all(isinstance(item, int | float) for item in items):
            low = schema.get("items", {}).get("minimum", 0)
            return [type(item)(low + 10 * place) for place, item in enumerate(items)]
        return items
    if "minimum" in schema:
        return schema["minimum"]
    return EXAMPLES.get(kind, "1")
