"""The shipped tools: a calculator of exact arithmetic in bounded time, and a crop that enlarges a part of a picture.

The calculator takes numbers, + - * / // % **, parentheses, and with ``functions`` square roots, trigonometry and the like.
Nothing is executed: the text is parsed, and only what is listed here is computed. Tools are named in
``recipe/registry.py``.
"""

import ast
import math
import operator
from collections.abc import Callable, Mapping
from fractions import Fraction
from typing import Any, Literal

from PIL import Image

from sensorium.data.pictures import encode_png
from sensorium.envs.protocol import one_of, within
from sensorium.envs.tool_use import ToolContext, ToolResult, ToolSpec
from sensorium.vocabulary.content import Text

Number = Fraction | float

MAX_CHARACTERS = 500
MAX_BITS = 4096
MAX_EXPONENT = 256

OPERATORS: dict[type, Callable[[Any, Any], Any]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.FloorDiv: operator.floordiv,
    ast.Mod: operator.mod,
}
FUNCTIONS: dict[str, Callable[..., float]] = {
    "sqrt": math.sqrt, "sin": math.sin, "cos": math.cos, "tan": math.tan, "asin": math.asin, "acos": math.acos,
    "atan": math.atan, "atan2": math.atan2, "exp": math.exp, "log": math.log, "radians": math.radians,
    "degrees": math.degrees, "hypot": math.hypot, "abs": abs, "min": min, "max": max, "round": round,
}  # fmt: skip
CONSTANTS = {"pi": math.pi, "e": math.e}


class NotArithmetic(ValueError):
    """The text is no arithmetic that can be evaluated; the message says why, to whoever wrote it."""


def evaluate(text: str, *, functions: bool = False) -> Number:
    """The value of an expression: an exact fraction where only fractions occur, else a float."""
    try:
        return _value(_parsed(text), functions)
    except NotArithmetic:
        raise
    except ZeroDivisionError as error:
        raise NotArithmetic("division by zero") from error
    except (ValueError, OverflowError, TypeError, RecursionError) as error:
        raise NotArithmetic(f"it cannot be evaluated ({error})") from error


def numbers_in(text: str) -> list[Fraction]:
    """The numbers that an expression is made of, in order."""
    return [Fraction(str(node.value)) for node in ast.walk(_parsed(text)) if isinstance(node, ast.Constant)]


def in_words(value: Number) -> str:
    """A value as one would write it: whole, as a decimal where that is exact, else rounded."""
    if isinstance(value, Fraction) and value.denominator == 1:
        return str(value.numerator)
    return f"{float(value):.10g}"


def _parsed(text: str) -> ast.expr:
    if len(text) > MAX_CHARACTERS:
        raise NotArithmetic(f"it is longer than {MAX_CHARACTERS} characters")
    plain = text.strip().replace("×", "*").replace("·", "*").replace("÷", "/").replace("−", "-").replace("^", "**")
    try:
        tree = ast.parse(plain, mode="eval").body
    except (SyntaxError, ValueError, MemoryError, RecursionError) as error:
        raise NotArithmetic("it is not an arithmetic expression") from error
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant):
            if isinstance(node.value, bool) or not isinstance(node.value, int | float):
                raise NotArithmetic(f"{node.value!r:.40} is no number")
            if not math.isfinite(node.value):
                raise NotArithmetic("a number is too large")
    return tree


def _value(node: ast.expr, functions: bool) -> Number:
    if isinstance(node, ast.Constant):
        return Fraction(str(node.value))
    if isinstance(node, ast.UnaryOp) and isinstance(node.op, ast.USub | ast.UAdd):
        value = _value(node.operand, functions)
        return -value if isinstance(node.op, ast.USub) else value
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Pow):
        base, exponent = _value(node.left, functions), _value(node.right, functions)
        if not -MAX_EXPONENT <= exponent <= MAX_EXPONENT:
            raise NotArithmetic(f"an exponent is larger than {MAX_EXPONENT}")
        power: Any = base**exponent
        if isinstance(power, complex):
            raise NotArithmetic("a root of a negative number")
        return _bounded(power)
    if isinstance(node, ast.BinOp) and type(node.op) in OPERATORS:
        return _bounded(OPERATORS[type(node.op)](_value(node.left, functions), _value(node.right, functions)))
    if functions and isinstance(node, ast.Name) and node.id in CONSTANTS:
        return CONSTANTS[node.id]
    if functions and isinstance(node, ast.Call) and not node.keywords and ast.unparse(node.func) in FUNCTIONS:
        return _bounded(FUNCTIONS[ast.unparse(node.func)](*(_value(part, functions) for part in node.args)))
    raise NotArithmetic(f"'{ast.unparse(node)[:40]}' is not allowed in it")


def _bounded(value: Any) -> Number:
    if isinstance(value, int):
        value = Fraction(value)
    assert isinstance(value, Fraction | float)
    if isinstance(value, float):
        too_large = not math.isfinite(value)
    else:
        too_large = max(value.numerator.bit_length(), value.denominator.bit_length()) > MAX_BITS
    if too_large:
        raise NotArithmetic("a number in it gets too large")
    return value


def _object_schema(required: str, **properties: dict[str, Any]) -> dict[str, Any]:
    return {"type": "object", "properties": properties, "required": [required], "additionalProperties": False}


class Calculator:
    """Evaluates an expression."""

    instant = True

    def __init__(self) -> None:
        expression = {"type": "string", "description": "such as 2 * (3 + 4) / 7 or sqrt(2)"}
        offered = f"Works out an expression: + - * / // % ** and {', '.join(FUNCTIONS)}, pi, e. Angles are in radians."
        self.spec = ToolSpec("calculator", offered, _object_schema("expression", expression=expression))

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        try:
            return ToolResult((Text(in_words(evaluate(arguments["expression"], functions=True))),))
        except NotArithmetic as error:
            return ToolResult.error(f"{error}.")

    def close(self) -> None:
        """Nothing to release."""


MIN_SIDE = 4  # pixels of a part's shorter side, of the picture it is cut from


class Crop:
    """Cuts a box [left, top, right, bottom] out of a picture and enlarges it until its longer side has ``side`` pixels.

    ``coordinates`` are ``relative`` (0 to 1000 across the picture, as Qwen3-VL counts) or ``pixels`` (as Qwen2.5-VL does).
    Pictures are numbered from 0 as they were shown; what the tool cuts out is numbered on, so a part can be cut again.
    """

    instant = True

    def __init__(self, coordinates: Literal["relative", "pixels"] = "relative", side: int = 448) -> None:
        one_of("crop", "coordinates", coordinates, ["relative", "pixels"])
        within("crop", "side", side, 16, 4096)
        self.coordinates, self.side = coordinates, side
        unit = "from 0 to 1000 across the picture" if coordinates == "relative" else "in pixels"
        box = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
        box["description"] = f"left, top, right, bottom, {unit}"
        picture = {"type": "integer", "description": "which picture, 0 is the first (default)"}
        offered = "Looks again at a part of a picture: cuts out a box and enlarges it."
        self.spec = ToolSpec("crop", offered, _object_schema("box", box=box, picture=picture))

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> ToolResult:
        number = int(arguments.get("picture", 0))
        if not 0 <= number < len(context.pictures):
            shown = len(context.pictures)
            return ToolResult.error(f"there is no picture {number}; {shown} were shown, 0 to {shown - 1}.")
        source = context.pictures[number]
        picture = context.store.picture(source)
        box = self._pixels(arguments["box"], picture.width, picture.height)
        if min(box[2] - box[0], box[3] - box[1]) < MIN_SIDE:
            return ToolResult.error(f"the box {arguments['box']} holds fewer than {MIN_SIDE} pixels a side of the picture.")
        part = picture.crop(box)
        scale = self.side / max(part.size)
        if scale > 1:
            size = (max(1, round(part.width * scale)), max(1, round(part.height * scale)))
            part = part.resize(size, Image.Resampling.BICUBIC)
        origin = f"{source.name}, cut to {', '.join(map(str, box))}"
        media = context.store.put(encode_png(part), "picture", origin)
        return ToolResult((Text(f"Picture {len(context.pictures)}, cut out of picture {number}:\n"), media))

    def close(self) -> None:
        """Nothing to release."""

    def _pixels(self, box: list[float], width: int, height: int) -> tuple[int, int, int, int]:
        """The box in whole pixels, within the picture, its corners in order."""
        unit = (width / 1000, height / 1000) if self.coordinates == "relative" else (1.0, 1.0)
        across = sorted(_clipped(box[i], width / unit[0]) * unit[0] for i in (0, 2))
        down = sorted(_clipped(box[i], height / unit[1]) * unit[1] for i in (1, 3))
        return int(across[0]), int(down[0]), round(across[1]), round(down[1])


def _clipped(value: float, most: float) -> float:
    return 0.0 if math.isnan(value) else min(max(value, 0.0), most)
