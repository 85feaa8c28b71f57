"""The actions of Gymnasium spaces: by name, or as calls whose arguments fill a space.

    Box(-1, 1, (2,))                        act(0.5, -1.0)          → array([0.5, -1.0])
    Dict(kind: Discrete(3), at: Box(2,))    act(2, 10, 20)          → {"kind": 2, "at": array([10, 20])}
    the same, with the recipe's actions     click(10, 20)           → {"kind": 2, "at": array([10, 20])}
        {"click(x, y)": {kind: 2, at: [x, y]}, wait: {kind: 0}}

In a recipe's action a name in the place of a value is the parameter of that name, whose type and range are those of the
space there unless it declares a narrower one. What a Dict's action leaves out is the least that the space allows (of
numbers 0, if it allows that).
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from gymnasium import spaces

from sensorium.envs.action_calls import MOST, Call, Parameter, Signature, signature_of
from sensorium.vocabulary.errors import RecipeError

MOST_PARAMETERS = 64
ARRAYS = (spaces.Box, spaces.MultiDiscrete, spaces.MultiBinary)
LEFT_OUT = object()

Take = Callable[[Any], Any]  # the environment's action of an action by number, or of a call


def actions_of(
    space: Any, given: Sequence[str] | Mapping[str, Any] | None, own: Sequence[str], id: str
) -> tuple[Any, Take]:
    """The actions of a space (names, or signatures where one has parameters), and what to hand to the environment.

    ``given`` are the recipe's, ``own`` the environment's own names of a discrete space.
    """
    try:
        if isinstance(given, Mapping):
            found = {str(name): _Action(space, signature_of(str(name)), action) for name, action in given.items()}
            return _found(list(found.values()))
        if hasattr(space, "n") and not isinstance(space, spaces.MultiBinary):
            count, first = int(space.n), int(getattr(space, "start", 0))
            names = list(given or own or map(str, range(first, first + count)))
            if len(names) != count:
                raise RecipeError(f"it has {count} actions and {len(names)} are named")
            return tuple(map(str, names)), lambda number: first + number
        template = _names_in(space, "")
        parameters = [Parameter(name, "") for name in _texts(template)]
        signature = Signature("act", tuple(parameters))
        if given:
            signature = signature_of(given[0])
            if isinstance(given, str) or len(given) != 1 or len(signature.parameters) != len(parameters):
                raise RecipeError(
                    f"its actions are {space}: name those you want as in {{'left': [-1.0]}}, or all {len(parameters)} "
                    f"numbers and texts as the parameters of one action, as in ['{signature.name}(a, b, …)']"
                )
            renamed = dict(zip([p.name for p in parameters], [p.name for p in signature.parameters], strict=True))
            template = _renamed(template, renamed)
        elif len(parameters) > MOST_PARAMETERS:
            raise RecipeError(
                f"its actions have {len(parameters)} numbers and texts; name those you want by actions, as in "
                "{'left': [-1.0], 'click(x, y)': {place: [x, y]}}"
            )
        return _found([_Action(space, signature, template)])
    except RecipeError as error:
        raise RecipeError(f"gymnasium: '{id}': {str(error).rstrip('.')}.") from error


def _found(actions: Sequence["_Action"]) -> tuple[Any, Take]:
    if not any(action.signature.parameters for action in actions):
        return tuple(action.signature.name for action in actions), lambda number: actions[number].value({})
    by_name = {action.signature.name: action for action in actions}
    return tuple(action.signature for action in actions), lambda call: by_name[call.name].value(call.arguments)


class _Action:
    """One action: its signature, typed by the space, and the template that its arguments are put into."""

    def __init__(self, space: Any, signature: Signature, template: Any) -> None:
        self.space, self.template = space, template
        declared = {parameter.name: parameter for parameter in signature.parameters}
        self._choices: dict[str, tuple[str, ...]] = {}
        typed: dict[str, Parameter] = {}
        try:
            for name, place in _places(space, template, declared):
                typed[name] = self._typed(typed.get(name, declared[name]), place)
        except (ValueError, TypeError, KeyError, IndexError) as error:
            raise self._unfit(signature, error) from error
        if missing := [name for name in declared if name not in typed]:
            raise RecipeError(f"the action '{signature}' has no place for {missing[0]} in {template!r:.80}")
        self.signature = Signature(signature.name, tuple(typed[name] for name in declared))
        for share in (0.0, 0.5, 1.0):
            call: Call = self.signature.call([share] * len(typed))
            try:
                fits = bool(space.contains(self.value(call.arguments)))
            except (ValueError, TypeError, KeyError, IndexError) as error:
                raise self._unfit(signature, error) from error
            if not fits:
                raise self._unfit(signature)

    def value(self, arguments: Mapping[str, Any]) -> Any:
        """What the environment is given."""
        numbers = {name: self._choices[name].index(value) for name, value in arguments.items() if name in self._choices}
        return _filled(self.space, self.template, {**arguments, **numbers})

    def _typed(self, declared: Parameter, place: Parameter) -> Parameter:
        """A declared parameter by what is allowed at its place: one without a type takes that, another must lie within."""
        name, low, high = declared.name, declared.low, declared.high
        if not declared.kind:
            return Parameter(name, place.kind, place.low, place.high, characters=place.characters)
        if declared.kind == "choice" and place.kind == "whole":
            self._choices[name] = declared.choices
            if place.low <= 0 and len(declared.choices) - 1 <= place.high:
                return declared
        free = declared.kind in ("whole", "number") and (low, high) == (-MOST, MOST)
        if declared.kind == place.kind or (declared.kind, place.kind) == ("whole", "number"):
            if free:
                return Parameter(name, declared.kind, place.low, place.high)
            if place.low <= low and (high <= place.high or declared.kind == "text"):
                most = min(high, place.high)
                return Parameter(name, declared.kind, max(low, place.low), most, characters=place.characters)
        if declared.kind == "choice" and place.kind == "text":
            return declared
        raise RecipeError(f"the parameter {name} is declared as {declared.described()}, and must be {place.described()}")

    def _unfit(self, signature: Signature, error: Exception | None = None) -> RecipeError:
        why = f" ({error})" if error is not None else ""
        return RecipeError(f"the action '{signature}' ({self.template!r:.80}) is none of {self.space}{why}")


def _places(space: Any, template: Any, names: Mapping[str, Any]) -> Iterator[tuple[str, Parameter]]:
    """Each parameter that a template names, with what is allowed at its place."""
    if template is LEFT_OUT:
        return
    if isinstance(space, spaces.Dict):
        if not isinstance(template, Mapping) or (strange := [key for key in template if key not in space.spaces]):
            raise ValueError(
                f"its keys are {', '.join(space.spaces)}, not {strange if isinstance(template, Mapping) else ''}"
            )
        for key, part in template.items():
            yield from _places(space.spaces[key], part, names)
    elif isinstance(space, spaces.Tuple):
        for part, one in zip(space.spaces, template, strict=True):
            yield from _places(part, one, names)
    elif isinstance(space, ARRAYS):
        items = _flat(template)
        if len(items) != int(np.prod(space.shape)):
            raise ValueError(f"it has {len(items)} numbers, and the space {int(np.prod(space.shape))}")
        for place, item in enumerate(items):
            if isinstance(item, str) and item in names:
                yield item, _number_at(space, place)
            elif isinstance(item, str):
                raise ValueError(f"'{item}' is no parameter of it")
    elif isinstance(template, str) and template in names:
        yield template, _number_at(space, 0)


def _number_at(space: Any, place: int) -> Parameter:
    """What is allowed at a place of a space."""
    if isinstance(space, spaces.Text):
        return Parameter("", "text", space.min_length, space.max_length, characters=frozenset(space.character_set))
    if isinstance(space, spaces.Discrete):
        first = int(space.start)
        return Parameter("", "whole", first, first + int(space.n) - 1)
    if isinstance(space, spaces.MultiBinary):
        return Parameter("", "whole", 0, 1)
    if isinstance(space, spaces.MultiDiscrete):
        first = int(space.start.flat[place])
        return Parameter("", "whole", first, first + int(space.nvec.flat[place]) - 1)
    if isinstance(space, spaces.Box):
        # A bound of float32 by its shortest digits: 0.7, not 0.699999988.
        low, high = (float(str(edge.flat[place])) for edge in (space.low, space.high))
        kind = "whole" if space.dtype is not None and np.issubdtype(space.dtype, np.integer) else "number"
        return Parameter("", kind, max(low, -MOST), min(high, MOST))  # type: ignore[arg-type]
    raise ValueError(f"{space} takes no parameter; give it a value")


def _filled(space: Any, template: Any, arguments: Mapping[str, Any]) -> Any:
    """The element of a space that a template is with its arguments."""
    if isinstance(space, spaces.Dict):
        parts = {} if template is LEFT_OUT else template
        return {key: _filled(part, parts.get(key, LEFT_OUT), arguments) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        items = [LEFT_OUT] * len(space.spaces) if template is LEFT_OUT else template
        return tuple(_filled(part, item, arguments) for part, item in zip(space.spaces, items, strict=True))
    if isinstance(space, ARRAYS):
        count = int(np.prod(space.shape))
        items = [_least(_number_at(space, place)) for place in range(count)] if template is LEFT_OUT else _flat(template)
        numbers = [arguments.get(item, item) if isinstance(item, str) else item for item in items]
        return np.array(numbers, space.dtype).reshape(space.shape)
    if template is LEFT_OUT:
        return _least(_number_at(space, 0))
    return arguments.get(template, template) if isinstance(template, str) else template


def _least(allowed: Parameter) -> Any:
    """The value of a part that an action leaves out."""
    if allowed.kind == "text":
        return allowed.value(0.0)
    number = min(max(0.0, allowed.low), allowed.high)
    return int(number) if allowed.kind == "whole" else number


def _names_in(space: Any, name: str) -> Any:
    """A template that names every number and text of a space, by the keys that lead there."""
    if isinstance(space, spaces.Dict):
        return {key: _names_in(part, f"{name}_{key}".strip("_")) for key, part in space.spaces.items()}
    if isinstance(space, spaces.Tuple):
        return [
            _names_in(part, f"{name}_{number}" if name else f"part{number}") for number, part in enumerate(space.spaces, 1)
        ]
    if isinstance(space, ARRAYS):
        count = int(np.prod(space.shape))
        return [f"{name or 'v'}{number}" for number in range(1, count + 1)] if count > 1 else [name or "value"]
    if isinstance(space, spaces.Discrete | spaces.Text):
        return name or "text"
    raise RecipeError(f"its actions are {space}; name some of them, as in actions: {{left: [-1.0]}}")


def _renamed(template: Any, names: Mapping[str, str]) -> Any:
    if isinstance(template, Mapping):
        return {key: _renamed(part, names) for key, part in template.items()}
    return [_renamed(part, names) for part in template] if isinstance(template, list) else names[template]


def _texts(template: Any) -> list[str]:
    """The names in a template, in order."""
    parts = template.values() if isinstance(template, Mapping) else template if isinstance(template, list) else None
    return [template] if parts is None else [name for part in parts for name in _texts(part)]


def _flat(value: Any) -> list[Any]:
    """The items of nested lists, and of arrays; a single item is a list of one."""
    if isinstance(value, np.ndarray):
        return list(value.flat)
    return [item for part in value for item in _flat(part)] if isinstance(value, list | tuple) else [value]
