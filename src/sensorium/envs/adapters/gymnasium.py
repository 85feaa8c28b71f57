"""Any Gymnasium environment with actions that have names: what it renders is shown, as a picture or as text."""

import os
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import ActionGrammar, ActionPrompts, TurnPay, sight, turn_result
from sensorium.envs.adapters.content import key_of, picture, said, success_of
from sensorium.envs.protocol import Observation, StepResult, one_of, within
from sensorium.envs.responses import ResponseFormat
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import words

NAME = "gymnasium"


class GymnasiumEnvironment:
    """``id`` as gymnasium.make takes it, after importing ``modules`` that register it; ``make`` are its keywords.

    ``wrappers`` are put around it in order: ``module:Class``, or {module:Class: {keyword: value}}. ``actions`` are names in
    the order of a discrete space, or {name: action}; by default the names that the environment gives its actions. ``view``
    shows what it renders (``rgb_array``, or ``ansi``; where it renders no text, its observation), or by ``observation`` the
    picture that its observation is or holds. Texts in its observation, such as MiniGrid's mission, are always shown. Pays
    its rewards as the part ``reward``, times ``reward_scale``. ``success`` is what its info says, or else that it ended
    with a reward above 0.
    """

    instant = False
    demonstrates = False
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
    ) -> None:
        one_of(NAME, "view", view, ["picture", "text", "observation"])
        one_of(NAME, "prompt", prompt, ["short", "full"])
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        self.store, self.id, self.rules, self.view, self.max_turns = store, id, rules, view, max_turns
        self._environment = _wrapped(_made(id, dict(make or {}), modules, view), wrappers)
        self._renders = getattr(self._environment, "render_mode", None) is not None
        named = _named(self._environment, actions, id)
        self._values = tuple(named.values())
        self.grammar = ActionGrammar(tuple(named), max_actions_per_turn, ResponseFormat(response_format))
        self.prompts = ActionPrompts(self.grammar, full=prompt == "full")
        self.pay = TurnPay({"reward": reward_scale, "format": format_reward})
        self._last: Any = None
        self._seed = self._turn = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What a seed leads to: what the environment shows first."""
        environment = cls(MediaStore(), **options)
        try:
            head, first = environment.reset(seed)
            return key_of((*head, *first.messages))
        finally:
            environment.close()

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Start by the seed."""
        self._last, _ = self._environment.reset(seed=seed)
        self._seed, self._turn, self._over = seed, 0, False
        explained = self.rules or f"You act in {self.id}."
        rules = self.prompts.rules(explained, explained, (0,), think="…", reasoning="…")
        return (system(rules),), self._shown(self.prompts.opening())

    def step(self, response: str) -> StepResult:
        """Take the actions that a response names, until it ends or the last of them."""
        if self._over:
            raise EnvironmentFailure(f"{self.id}: it is over (or has not begun); reset it first.")
        asked = self.grammar.read(response)
        paid, made, last, terminated, cut = 0.0, 0, 0.0, False, False
        info: Any = {}
        for action in asked.actions:
            self._last, reward, terminated, cut, info = self._environment.step(self._values[action])
            made, last = made + 1, float(reward)
            paid += last
            if terminated or cut:
                break
        self._turn += 1
        truncated = bool(not terminated and (cut or self._turn >= self.max_turns))
        self._over = bool(terminated or truncated)
        known = success_of(info)
        success = bool(terminated and last > 0) if known is None else known
        taken = self.grammar.spell(asked.actions[:made])
        pay = self.pay.of(reward=paid, format=asked.well_formed and asked.valid)
        shown = None if self._over else self._shown(self.prompts.after(taken))
        return turn_result(asked, taken, shown, pay, truncated=truncated, success=success)

    def demonstrate(self) -> str:
        """Nobody knows a good action here."""
        raise EnvironmentFailure(f"{self.id}: there is no demonstration; warm start from rows that have one.")

    def close(self) -> None:
        """Close the environment."""
        self._environment.close()

    def _shown(self, above: str) -> Observation:
        texts = [value for value in _values(self._last) if isinstance(value, str)]
        rendered = self._environment.render() if self._renders and self.view != "observation" else None
        if self.view in ("picture", "observation"):
            pixels = rendered if self.view == "picture" else _picture_in(self._last, self.id)
            shown = picture(self.store, pixels, f"{self.id} seed {self._seed} turn {self._turn}")
            return sight("\n".join(filter(None, [above, *texts])), shown)
        if not isinstance(rendered, str) and isinstance(self._last, str):
            texts = []
        return sight("\n".join(filter(None, [above, *texts])), said(rendered if isinstance(rendered, str) else self._last))


def _made(id: str, options: dict[str, Any], modules: Sequence[str], view: str) -> Any:
    import gymnasium

    try:
        if "miniworld" in modules:
            os.environ.setdefault("PYGLET_HEADLESS", "1")  # it looks for a display when it is imported
            refuse_thread_bound("miniworld")
        for module in modules:
            import_module(module)
        refuse_thread_bound(gymnasium.spec(id).entry_point)
        modes = _render_modes(id)
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
    """Refuse what draws right only in the main thread of a process: MiniWorld's pictures are silently wrong elsewhere."""
    if str(place).split(".")[0] == "miniworld" and threading.current_thread() is not threading.main_thread():
        raise RecipeError(
            f"{NAME}: MiniWorld draws right only in the main thread of a process, one environment at a time. Play it in a "
            "process of its own: environment: isolated, options: {environment: gymnasium, options: {…}}; or use navigation."
        )


def _render_modes(id: str) -> Sequence[str]:
    """How an environment can render, by its class."""
    import gymnasium
    from gymnasium.envs.registration import load_env_creator

    place = gymnasium.spec(id).entry_point
    creator = load_env_creator(place) if isinstance(place, str) else place
    modes: Sequence[str] = (getattr(creator, "metadata", None) or {}).get("render_modes", ())
    return modes or ("rgb_array", "ansi")


def _named(environment: Any, given: Sequence[str] | Mapping[str, Any] | None, id: str) -> dict[str, Any]:
    """The actions by name."""
    space = environment.action_space
    if isinstance(given, Mapping):
        for name, action in given.items():
            if _fitting(space, action) is None:
                raise RecipeError(f"{NAME}: the action '{name}' ({action!r:.60}) is none of {space} of '{id}'.")
        return {str(name): _fitting(space, action) for name, action in given.items()}
    count, first = int(getattr(space, "n", 0)), int(getattr(space, "start", 0))
    if not hasattr(space, "n"):
        raise RecipeError(f"{NAME}: the actions of '{id}' are {space}; name some of them, as in actions: {{left: [-1.0]}}.")
    own = getattr(environment.unwrapped, "actions", None)
    names = list(given or (getattr(own, "__members__", None) or {}) or map(str, range(first, first + count)))
    if len(names) != count:
        raise RecipeError(f"{NAME}: '{id}' has {count} actions and {len(names)} are named.")
    return {str(name): first + number for number, name in enumerate(names)}


def _fitting(space: Any, action: Any) -> Any:
    """An action as a space takes it, lists as arrays; None if it does not fit."""
    import numpy as np

    if isinstance(action, list):
        action = np.asarray(action, getattr(space, "dtype", None))
    return action if space.contains(action) else None


def _values(observation: Any) -> Sequence[Any]:
    return tuple(observation.values()) if isinstance(observation, Mapping) else (observation,)
