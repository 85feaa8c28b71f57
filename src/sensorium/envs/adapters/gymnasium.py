"""Any Gymnasium environment: what it renders is shown, as a picture or as text, and actions are names or calls.

The actions of a space are names, or calls whose arguments fill it:

    Box(-1, 1, (2,))                        act(0.5, -1.0)          → array([0.5, -1.0])
    Dict(kind: Discrete(3), at: Box(2,))    act(2, 10, 20)          → {"kind": 2, "at": array([10, 20])}
    the same, with the recipe's actions     click(10, 20)           → {"kind": 2, "at": array([10, 20])}
        {"click(x, y)": {kind: 2, at: [x, y]}, wait: {kind: 0}}

In a recipe's action a name in the place of a value is the parameter of that name, whose type and range are those of the
space there unless it declares a narrower one. What a Dict's action leaves out is the least that the space allows (of
numbers 0, if it allows that).
"""

import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

import numpy as np
from gymnasium import spaces

from sensorium.data.media_store import MediaStore
from sensorium.envs.action_calls import MOST, Call, Parameter, Signature, signature_of
from sensorium.envs.actions import ActionEnvironment, PlayedTurn, observation_of, positions
from sensorium.envs.adapters.content import key_of, picture, success_of, text_form
from sensorium.envs.protocol import Observation, one_of
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

NAME = "gymnasium"


class GymnasiumEnvironment(ActionEnvironment):
    """``id`` as gymnasium.make takes it, after importing ``modules`` that register it; ``make`` are its keywords.

    ``wrappers`` are put around it in order: ``module:Class``, or {module:Class: {keyword: value}}. ``actions`` are names in
    the order of a discrete space, or {name: action}, where {``click(x, y)``: {place: [x, y]}} has parameters; by default
    the names that the environment gives its actions, or of another space one call ``act`` that fills it.
    Positions (x, y, x1, …) are counted by ``coordinates``, in pixels or ``relative``, from 0 to 1000. ``view``
    shows what it renders (``rgb_array``, or ``ansi``; where it renders no text, its observation), or by ``observation`` the
    picture that its observation is or holds. Texts in its observation, such as MiniGrid's mission, are always shown. Its
    rewards, times ``reward_scale``, are the part ``reward``. ``success`` is what its info says, or else that it ended with
    a reward above 0. ``category`` in the info of a reset names the kind of task.
    """

    instant = False
    demonstrates = False
    explains = True
    recipe_only = ("id", "make", "modules", "wrappers")

    def __init__(
        self,
        store: MediaStore,
        id: str,
        make: Mapping[str, Any] | None = None,
        modules: Sequence[str] = (),
        actions: Sequence[str] | Mapping[str, Any] | None = None,
        rules: str = "",
        view: Literal["picture", "text", "observation"] = "picture",
        max_turns: int = 50,
        max_actions_per_turn: int = 1,
        prompt: Literal["short", "full"] = "full",
        response_format: str = "free_think",
        reward_scale: float = 1.0,
        format_reward: float = 0.0,
        wrappers: Sequence[str | Mapping[str, Any]] = (),
        coordinates: Literal["pixels", "relative"] = "pixels",
    ) -> None:
        from sensorium.envs.adapters.gymnasium import actions_of

        views = ["picture", "text", "observation"]
        one_of(NAME, "view", view, views)  # before anything is made for it
        self.rules = rules
        self._environment = _wrapped(_made(id, dict(make or {}), modules, view), wrappers)
        self._renders = getattr(self._environment, "render_mode", None) is not None
        own = getattr(self._environment.unwrapped, "actions", None)
        named, self._taken = actions_of(
            self._environment.action_space, actions, tuple(getattr(own, "__members__", None) or ()), id
        )
        self._last: Any = None
        named = positions(named, coordinates)
        super().__init__(
            NAME, store, named, views, {"reward": reward_scale}, max_turns=max_turns, view=view, prompt=prompt,
            max_actions_per_turn=max_actions_per_turn, response_format=response_format, format_reward=format_reward,
        )  # fmt: skip
        self.name = id  # in messages

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """A hash of what the environment shows first."""
        environment = cls(MediaStore(), **options)
        try:
            head, first = environment.reset(seed)
            return key_of((*head, *first.messages))
        finally:
            environment.close()

    def close(self) -> None:
        self._environment.close()

    def _begin(self, seed: int) -> None:
        self._last, info = self._environment.reset(seed=seed)
        named = info.get("category") if isinstance(info, Mapping) else None
        self.category = named if isinstance(named, str) else ""

    def _play(self, actions: tuple[Any, ...]) -> PlayedTurn:
        total, made, last, terminated, cut = 0.0, 0, 0.0, False, False
        info: Any = {}
        for action in actions:
            self._last, reward, terminated, cut, info = self._environment.step(self._taken(action))
            made, last = made + 1, float(reward)
            total += last
            if terminated or cut:
                break
        known = success_of(info)
        success = bool(terminated and last > 0) if known is None else known
        return PlayedTurn(made, bool(terminated), success, {"reward": total}, cut=bool(cut))

    def _rules(self) -> str:
        explained = self.rules or f"You act in {self.name}."
        return self._system_prompt(explained, explained, self.grammar.example(), think="…", reasoning="…")

    def _shown(self, above: str) -> Observation:
        texts = [value for value in _values(self._last) if isinstance(value, str)]
        rendered = self._environment.render() if self._renders and self.view != "observation" else None
        shown: str | Media
        if self.view == "text":
            if not isinstance(rendered, str) and isinstance(self._last, str):
                texts = []
            shown = text_form(rendered if isinstance(rendered, str) else self._last)
        else:
            pixels = rendered if self.view == "picture" else _picture_in(self._last, self.name)
            shown = picture(self.store, pixels, f"{self.name} seed {self._seed} turn {self._turn}")
        return observation_of("\n".join(filter(None, [above, *texts])), shown)


def _made(id: str, options: dict[str, Any], modules: Sequence[str], view: str) -> Any:
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    try:
        if "miniworld" in modules:
            os.environ.setdefault("PYGLET_HEADLESS", "1")  # it looks for a display when it is imported
            refuse_thread_bound("miniworld")
        for module in modules:
            import_module(module)
        place = gymnasium.spec(id).entry_point
        refuse_thread_bound(place)
        creator = load_env_creator(place) if isinstance(place, str) else place
        modes = (getattr(creator, "metadata", None) or {}).get("render_modes", ()) or ("rgb_array", "ansi")
        wanted = {"picture": "rgb_array", "text": "ansi"}.get(view, "")
        if view == "picture" and wanted not in modes:
            raise RecipeError(f"{NAME}: '{id}' renders no picture (rgb_array); use view: text.")
        return gymnasium.make(id, **{**({"render_mode": wanted} if wanted in modes else {}), **options})
    except RecipeError:
        raise
    except Exception as error:  # whatever the environment's own code raises
        raise RecipeError(f"{NAME}: '{id}' cannot be made: {words(error)}") from error


def _wrapped(environment: Any, wrappers: Sequence[str | Mapping[str, Any]]) -> Any:
    """The environment in its wrappers, the first one innermost."""
    for wrapper in wrappers:
        named = {wrapper: {}} if isinstance(wrapper, str) else dict(wrapper)
        for path, options in named.items():
            module, _, name = path.partition(":")
            try:
                environment = getattr(import_module(module), name)(environment, **(options or {}))
            except Exception as error:  # whatever the wrapper's own code raises
                raise RecipeError(f"{NAME}: the wrapper '{path}' (module:Class) cannot be used: {words(error)}") from error
    return environment


def _picture_in(observation: Any, id: str) -> Any:
    """The picture that an observation is or holds: bytes in the shape height, width, 3."""
    for value in _values(observation):
        if getattr(value, "ndim", 0) == 3 and value.shape[2] == 3 and str(value.dtype) == "uint8":
            return value
    raise EnvironmentFailure(
        f"{NAME}: the observation of '{id}' holds no picture (height, width, 3 bytes); use view: picture or text, or a "
        "wrapper that makes one, as minigrid.wrappers:RGBImgPartialObsWrapper does."
    )


def refuse_thread_bound(place: Any) -> None:
    """Refuse MiniWorld outside the main thread of a process: its pictures are silently wrong there."""
    if str(place).split(".")[0] == "miniworld" and threading.current_thread() is not threading.main_thread():
        raise RecipeError(
            f"{NAME}: MiniWorld draws correctly only in the main thread of a process, one environment at a time. Use a "
            "process of its own (environment: isolated, options: {environment: gymnasium, options: {…}}), or navigation."
        )


def _values(observation: Any) -> Sequence[Any]:
    return tuple(observation.values()) if isinstance(observation, Mapping) else (observation,)


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
