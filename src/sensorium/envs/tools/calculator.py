"""A calculator: exact arithmetic, square roots, trigonometry."""

from collections.abc import Mapping
from typing import Any

from sensorium.envs.arithmetic import FUNCTIONS, NotArithmetic, evaluate, in_words
from sensorium.envs.tools.protocol import ToolContext, ToolResult, ToolSpec
from sensorium.vocabulary.content import Text


class Calculator:
    """Works out an expression."""

    instant = True

    def __init__(self) -> None:
        expression = {"type": "string", "description": "such as 2 * (3 + 4) / 7 or sqrt(2)"}
        self.spec = ToolSpec(
            "calculator",
            f"Works out an expression: + - * / // % ** and {', '.join(FUNCTIONS)}, pi, e. Angles are in radians.",
            {
                "type": "object",
                "properties": {"expression": expression},
                "required": ["expression"],
                "additionalProperties": False,
            },
        )

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        """The value of the expression."""
        try:
            return ToolResult((Text(in_words(evaluate(arguments["expression"], functions=True))),))
        except NotArithmetic as error:
            return ToolResult.error(f"{error}.")

    def close(self) -> None:
        """Nothing is held."""
