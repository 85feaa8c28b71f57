"""Plain Python functions as rewards: which of the signatures one has, told by the names of its parameters.

``def brevity(task, episode, scale=1.0)`` is asked episode by episode, ``def ranks(task, episodes)`` about a whole group;
``def brevity(prompts, completions, **columns)`` is TRL's form, asked with lists. Everything else under ``module:name`` is a
class, or a function that builds a term.
"""

from collections.abc import Callable, Mapping
from inspect import Parameter, signature
from typing import Any, Literal

from sensorium.vocabulary.errors import nearest

Style = Literal["episode", "episodes", "completions", ""]

WRAPPING = {
    "episode": ("name", "instant"),
    "episodes": ("name", "instant"),
    "completions": ("name", "instant", "messages", "group"),
}
"""Options that the wrapper of a function takes itself, unless the function has a parameter of that name."""


def reward_style(target: Any) -> Style:
    """How a reward function wants to be called; empty for a class, or a function that builds a reward term."""
    if isinstance(target, type) or not callable(target):
        return ""
    parameters = list(parameters_of(target))
    if "completions" in parameters:
        return "completions"
    if parameters[:2] == ["task", "episodes"]:
        return "episodes"
    return "episode" if parameters[:2] == ["task", "episode"] else ""


def takes_context(target: Any) -> bool:
    """True for a class or function with a keyword-only parameter ``context``: it is given one, and it is no option."""
    parameter = parameters_of(target).get("context") if callable(target) else None
    return parameter is not None and parameter.kind == Parameter.KEYWORD_ONLY


def parameters_of(target: Callable[..., Any]) -> dict[str, Parameter]:
    """The parameters of a callable by name; none where Python cannot tell (some built-in functions)."""
    try:
        return dict(signature(target).parameters)
    except (TypeError, ValueError):
        return {}


def wrong_function_options(name: str, target: Any, style: Style, options: Mapping[str, Any]) -> tuple[str, str]:
    """Which option of a recipe a reward function does not take, and why; both empty if all fit."""
    parameters = parameters_of(target)
    given = ["prompts", "completions", "completion_ids"] if style == "completions" else list(parameters)[:2]
    given += ["context"] if takes_context(target) else []
    own = [p.name for p in parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
    known = [*(key for key in own if key not in given), *WRAPPING[style]]
    open_ended = any(p.kind == p.VAR_KEYWORD for p in parameters.values())
    for option in options:
        if option in given or (option not in known and not open_ended):
            return option, f"reward function '{name}' has no option '{option}'{nearest(option, known)}"
    if style != "completions":
        for key in own:
            if key not in given and key not in options and parameters[key].default is Parameter.empty:
                return key, f"reward function '{name}' needs the option '{key}'."
    return "", ""
