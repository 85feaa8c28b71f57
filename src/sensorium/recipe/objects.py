"""Python objects that a recipe names: as ``module:Name`` where any process can import them, else as ``python:NAME``.

Example: ``def brevity(task, episode)`` in my_rewards.py is ``my_rewards:brevity`` in the recipe. The same function typed
into a notebook, or a lambda, is ``python:brevity``: only the process that passed it knows it, so a resumed run needs it
passed again, and says so.
"""

import sys
from collections.abc import Collection
from typing import Any

from sensorium.vocabulary.errors import RecipeError

SCHEME = "python:"
_passed: dict[str, dict[str, Any]] = {}


def importable_name(thing: Any) -> str:
    """``module:Name`` of a class or function that any process can import; empty for lambdas, local and notebook ones."""
    module, name = getattr(thing, "__module__", None), getattr(thing, "__qualname__", "")
    if not module or module == "__main__" or not name or "." in name or "<" in name:
        return ""
    return f"{module}:{name}" if getattr(sys.modules.get(module), name, None) is thing else ""


def own_name(thing: Any) -> str:
    """What to call an object: its own name, or that of its class."""
    name = str(getattr(thing, "__name__", "") or type(thing).__name__)
    return "lambda" if name == "<lambda>" else name


def pass_object(kind: str, wanted: str, thing: Any, taken: Collection[str] = ()) -> str:
    """Keep an object for this process; returns the name a recipe has for it. Names in ``taken`` get a number."""
    name, count = f"{SCHEME}{wanted}", 1
    while name in taken:
        count += 1
        name = f"{SCHEME}{wanted}_{count}"
    _passed.setdefault(kind, {})[name] = thing
    return name


def passed_object(kind: str, name: str, where: str = "") -> Any:
    """What was passed under a name in this process; what was not is an error that says how to pass it again."""
    try:
        return _passed[kind][name]
    except KeyError:
        raise RecipeError(
            f"{where or kind}: '{name}' is a Python object that was passed when the run began; a file cannot hold it. "
            f"Pass it again, as in sensorium.resume(run_dir, {_argument(kind)}), or put it into a module that can be "
            "imported and start the run with that."
        ) from None


def _argument(kind: str) -> str:
    return {"reward": "rewards=[…]", "planner": "tasks={'planner': …}"}.get(kind, "tasks=…")
