"""Any Gymnasium environment: what it renders is shown, as a picture or as text, and actions are names or calls."""

import os
import threading
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import Any, Literal

from sensorium.data.media_store import MediaStore
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
    the names that the environment gives its actions, or of another space one call ``act`` that fills it (``spaces.py``).
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
        from sensorium.envs.adapters.spaces import actions_of

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
