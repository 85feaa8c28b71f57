"""Which arguments the installed vLLM has, and of which types: read from its source, since importing it takes seconds.

class EngineArgs:
    seed: int = ModelConfig.seed                    an integer
    quantization: QuantizationMethods | str | None  anything: not every alternative is a plain type
class AsyncEngineArgs(EngineArgs): …                these too
"""

import ast
from collections.abc import Mapping
from difflib import get_close_matches
from importlib.util import find_spec
from pathlib import Path
from typing import Any

CLASSES = ("EngineArgs", "AsyncEngineArgs")
PLAIN: dict[str, tuple[type, ...]] = {
    "bool": (bool,), "int": (int,), "float": (int, float), "str": (str,), "list": (list, tuple), "dict": (dict,),
    "None": (type(None),),
}  # fmt: skip


def check_arguments(given: Mapping[str, Any], source: Path | None = None) -> str:
    """Refuse an argument that vLLM does not have, or of another type; returns what could not be checked, in a sentence."""
    if not given:
        return ""
    try:
        known = argument_types((source or _source()).read_text())
    except (OSError, SyntaxError, ValueError) as error:
        return f"rollout.engine.options.engine_args were not checked, vLLM will when it starts: {error}"
    for name, value in given.items():
        if name not in known:
            close = get_close_matches(name, known, n=1)
            hint = f"; did you mean '{close[0]}'?" if close else f" among its {len(known)}"
            raise ValueError(f"vLLM has no argument '{name}'{hint}")
        if value is not None and not _is_of(value, known[name]):
            raise ValueError(f"{name} is {value!r}, and vLLM's own type of it is: {known[name]}")
    return ""


def argument_types(source: str) -> dict[str, str]:
    """The arguments that vLLM's module ``arg_utils`` declares, with their types as they are written there."""
    found = {
        field.target.id: ast.unparse(field.annotation)
        for part in ast.parse(source).body
        if isinstance(part, ast.ClassDef) and part.name in CLASSES
        for field in part.body
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
    }
    if not found:
        raise ValueError(f"its source has no class {CLASSES[0]} with arguments")
    return found


def _source() -> Path:
    spec = find_spec("vllm")  # which does not import it
    if spec is None or not spec.submodule_search_locations:
        raise ValueError("vLLM's source was not found")
    return Path(spec.submodule_search_locations[0]) / "engine" / "arg_utils.py"


def _is_of(value: Any, annotation: str) -> bool:
    """False if all alternatives of a type are plain, and the value is of none of them."""
    alternatives = [_plain(part) for part in _alternatives(ast.parse(annotation, mode="eval").body)]
    if any(name not in PLAIN for name in alternatives):
        return True
    if isinstance(value, bool):
        return "bool" in alternatives
    return any(isinstance(value, PLAIN[name]) for name in alternatives)


def _alternatives(node: ast.expr) -> list[ast.expr]:
    if isinstance(node, ast.BinOp) and isinstance(node.op, ast.BitOr):
        return [*_alternatives(node.left), *_alternatives(node.right)]
    return [node]


def _plain(node: ast.expr) -> str:
    """``list`` of ``list[str]``, and the name itself of everything else."""
    return ast.unparse(node.value if isinstance(node, ast.Subscript) else node)
