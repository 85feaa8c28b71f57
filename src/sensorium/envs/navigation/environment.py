"""The play of navigation, with VAGEN's grammar and pay; and the environment that plays it in scenes of MiniWorld."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, Protocol

from sensorium.envs.action_prompts import ActionPrompts, sight, turn_result
from sensorium.envs.actions import ActionGrammar, ActionTurn
from sensorium.envs.navigation.miniworld import Pixels, refuse_missing, view
from sensorium.envs.navigation.scenes import ACTIONS, CURRENT_ACTIONS, Pose, Scene, scene_of
from sensorium.envs.option_checks import one_of, within
from sensorium.envs.pay import TurnPay
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.responses import ResponseFormat
from sensorium.envs.state_description import State, describe, described_parts, judged
from sensorium.media.picture import encode_png
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure

NAME = "navigation"
DEFAULTS = {"rooms": 1, "room_size": 6.0, "things": 3, "success_distance": 1.5, "step_length": 0.5}
MOST_ACROSS = 120
"""Steps from wall to wall: a way is searched for step by step, and a larger floor would take too long."""
RIGHT, LEFT = ACTIONS.index("rotateright"), ACTIONS.index("rotateleft")


class Simulator(Protocol):
    """Somewhere to walk. Actions are numbers of ACTIONS; distances are metres, bearings degrees, to the right positive."""

    def start(self, seed: int) -> str:
        """Begin the task of a seed; returns the instruction."""
        ...

    def act(self, action: int) -> bool:
        """Act; returns whether it worked."""
        ...

    def target(self) -> tuple[float, float]:
        """How far the target is, and its bearing from straight ahead."""
        ...

    def look(self) -> Pixels:
        """What is seen."""
        ...

    def way(self) -> tuple[int, ...]:
        """Actions that lead towards the target; raises EnvironmentFailure where nobody knows."""
        ...

    def ahead(self, actions: tuple[int, ...]) -> tuple[float, float]:
        """Distance and bearing of the target after some actions, which are not taken."""
        ...

    def close(self) -> None:
        """Give everything back."""
        ...


@dataclass(frozen=True)
class NavigationSettings:
    """What the play has in common, wherever it is."""

    name: str
    max_turns: int
    max_steps: int
    max_actions_per_turn: int
    success_distance: float
    view: str
    prompt: str
    response_format: str
    success_reward: float
    format_reward: float
    state_reward: float
    action_names: str
    grammar: str

    def __post_init__(self) -> None:
        one_of(self.name, "action_names", self.action_names, [ACTIONS[0], CURRENT_ACTIONS[0]])
        one_of(self.name, "view", self.view, ["picture", "blank"])
        one_of(self.name, "prompt", self.prompt, ["short", "full"])
        within(self.name, "max_turns", self.max_turns, 1, 10**6)
        within(self.name, "max_steps", self.max_steps, 1, 10**6)
        within(self.name, "max_actions_per_turn", self.max_actions_per_turn, 1, 10**6)
        within(self.name, "success_distance", self.success_distance, 0.1, 100.0)


class NavigationPlay:
    """Walk to what the instruction names, within ``success_distance`` metres, in at most ``max_steps`` actions.

    Pays ``success_reward`` there, ``format_reward`` for each valid and well-formed response, and ``state_reward`` for what
    it says of where the target is: ``target at (3, 2)`` is 3 metres away in the direction of two o'clock.
    """

    instant = False

    def __init__(self, store: MediaStore, simulator: Simulator, settings: NavigationSettings) -> None:
        self.store, self.simulator, self.settings = store, simulator, settings
        full = settings.prompt == "full"
        current = settings.action_names == CURRENT_ACTIONS[0]
        names, tag, separator = (CURRENT_ACTIONS, "action", "|") if current else (ACTIONS, "answer", ",")
        form = ResponseFormat(settings.response_format or ("free_think" if full else "no_think"), tag, settings.grammar)
        self.grammar = ActionGrammar(names, settings.max_actions_per_turn, form, separator=separator)
        self.prompts = ActionPrompts(self.grammar, full=full)
        described = described_parts(settings.name, form, settings.state_reward)
        self.pay = TurnPay({"success": settings.success_reward, "format": settings.format_reward, **described})
        self._instruction = ""
        self._seed = self._turn = self._steps = 0
        self._over = True

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Begin the task of a seed."""
        self._seed, self._turn, self._steps = seed, 0, 0
        self._instruction = self.simulator.start(seed)
        self._over = False
        return (system(self._rules()),), self._shown(f"{self._instruction}\n{self.prompts.opening()}".strip())

    def step(self, response: str) -> StepResult:
        """Take the actions that a response names, until the target is near or the last of them."""
        self._open()
        asked = self.grammar.read(response)
        if self.settings.grammar == "vagen" and not asked.well_formed:
            asked = ActionTurn((), asked.sections)  # VAGEN's navigation, unlike its other environments, then does nothing
        before, made, worked, near = self._state(), 0, True, False
        for action in asked.actions:
            worked = self.simulator.act(action)
            made, self._steps = made + 1, self._steps + 1
            near = self.simulator.target()[0] <= self.settings.success_distance
            if near or self._steps >= self.settings.max_steps:
                break
        self._turn += 1
        out = self._turn >= self.settings.max_turns or self._steps >= self.settings.max_steps
        truncated = not near and out
        self._over = near or truncated
        taken = self.grammar.spell(asked.actions[:made])
        described = judged(asked, before, self._state(), self.pay.worth)
        pay = self.pay.of(success=near, format=asked.well_formed and asked.valid, **described)
        told = "" if worked else "The last action did not work: something is in the way."
        words = "\n".join(filter(None, [self._instruction, told, self.prompts.after(taken)]))
        shown = None if self._over else self._shown(words)
        distance = round(self.simulator.target()[0], 3)
        return turn_result(
            asked, taken, shown, pay, truncated=truncated, success=near, distance=distance, worked=worked, **described
        )

    def demonstrate(self) -> str:
        """The next actions towards the target: turn until it is ahead, then walk."""
        self._open()
        actions = self.simulator.way()[: self.grammar.most_actions]
        now, then = describe(self._state()), describe(_place(*self.simulator.ahead(actions)))
        reason = f"The target is reached by {self.grammar.spell(actions)}."
        return self.grammar.write(actions, think=reason, observation=now, reasoning=reason, prediction=then)

    def close(self) -> None:
        """Give the simulator back."""
        self.simulator.close()

    def _open(self) -> None:
        if self._over:
            raise EnvironmentFailure(f"{self.settings.name}: the walk is over (or has not begun); reset it first.")

    def _state(self) -> State:
        """Where the target is."""
        return _place(*self.simulator.target())

    def _shown(self, words: str) -> Observation:
        pixels = self.simulator.look()
        if self.settings.view == "blank":
            pixels = pixels * 0 + 127
        origin = f"{self.settings.name} seed {self._seed} turn {self._turn}"
        return sight(words, self.store.put(encode_png(pixels), "picture", origin))

    def _rules(self) -> str:
        states = ""
        if self.settings.state_reward and {"observation", "prediction"} & set(self.pay.worth):
            states = (
                "\nSay where the target is by its distance in metres and its direction on the clock, 12 being straight "
                "ahead and 3 to the right, as in: target at (3, 12)."
            )
        names = self.grammar.names
        explained = (
            "You walk through rooms and see what is before you. Walk to what the instruction names, until it is within "
            f"{self.settings.success_distance:g} metres. {names[0]}, {names[1]}, {names[2]} and {names[3]} take a step "
            f"without turning; {names[4]} and {names[5]} turn you by 90 degrees; {names[6]} and {names[7]} tilt your "
            f"view.{states}"
        )
        reason = "It is straight ahead, and there is floor before me."
        thought = {
            "think": reason,
            "reasoning": reason,
            "observation": "target at (3, 12)",
            "prediction": "target at (2, 12)",
        }
        return self.prompts.rules("Walk to it.", explained, (0, 0), **thought)


class Navigation(NavigationPlay):
    """Navigation in one room, or four that are joined, with coloured things, drawn by MiniWorld on the CPU or a GPU."""

    def __init__(
        self,
        store: MediaStore,
        rooms: int = 1,
        room_size: float = 6.0,
        things: int = 3,
        side: int = 224,
        field_of_view: float = 100.0,
        success_distance: float = 1.5,
        step_length: float = 0.5,
        max_turns: int = 10,
        max_steps: int = 30,
        max_actions_per_turn: int = 5,
        view: Literal["picture", "blank"] = "picture",
        prompt: Literal["short", "full"] = "short",
        response_format: str = "",
        success_reward: float = 10.0,
        format_reward: float = 0.5,
        state_reward: float = 0.0,
        action_names: Literal["moveahead", "move_forward"] = "moveahead",
        grammar: Literal["own", "vagen"] = "own",
    ) -> None:
        refuse_missing()
        within(NAME, "room_size", room_size, 3.0, 50.0)
        within(NAME, "things", things, 1, 10)
        within(NAME, "side", side, 16, 1024)
        within(NAME, "field_of_view", field_of_view, 10.0, 150.0)
        within(NAME, "step_length", step_length, 0.1, 0.7)
        one_of(NAME, "rooms", str(rooms), ["1", "4"])
        across = (room_size if rooms == 1 else 2 * room_size + 2) / step_length
        within(NAME, "room_size (all rooms, in steps across)", round(across), 1, MOST_ACROSS)
        settings = NavigationSettings(
            NAME, max_turns, max_steps, max_actions_per_turn, success_distance, view, prompt, response_format,
            success_reward, format_reward, state_reward, action_names, grammar,
        )  # fmt: skip
        kind = (rooms, float(room_size), things, float(success_distance), float(step_length))
        super().__init__(store, SceneSimulator(kind, side, field_of_view), settings)

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: what stands where, and where the walker stands and looks."""
        rooms, size, things, near, step = (options.get(key, value) for key, value in DEFAULTS.items())
        scene = scene_of(rooms, float(size), things, float(near), float(step), seed)
        return repr((scene.rooms, scene.things, scene.start))


class SceneSimulator:
    """Scenes of seeds, looked at through MiniWorld. ``kind`` is what ``scene_of`` takes before the seed."""

    def __init__(self, kind: tuple[int, float, int, float, float], side: int, degrees: float) -> None:
        self.kind, self.side, self.degrees = kind, side, degrees
        self._scene: Scene | None = None
        self._pose = Pose((0.0, 0.0), 0.0)

    def start(self, seed: int) -> str:
        """The scene of a seed."""
        self._scene = scene_of(*self.kind, seed)
        self._pose = self._scene.start
        return f"Walk to the {self._scene.target.name}."

    def act(self, action: int) -> bool:
        """Walk, turn or tilt the view."""
        self._pose, worked = self.scene.after(self._pose, action, self.kind[4])
        return worked

    def target(self) -> tuple[float, float]:
        """Distance and bearing of the target."""
        return self.scene.distance(self._pose), self.scene.bearing(self._pose)

    def look(self) -> Pixels:
        """What is seen."""
        return view(self.scene, self._pose, self.side, self.degrees)

    def way(self) -> tuple[int, ...]:
        """Turn until the target is ahead, then walk the shortest way."""
        bearing = self.scene.bearing(self._pose)
        if abs(bearing) > 45:
            return (RIGHT,) if bearing > 0 else (LEFT,)
        return self.scene.way(self._pose, self.kind[3], self.kind[4])

    def ahead(self, actions: tuple[int, ...]) -> tuple[float, float]:
        """Distance and bearing after some actions."""
        pose = self._pose
        for action in actions:
            pose, _ = self.scene.after(pose, action, self.kind[4])
        return self.scene.distance(pose), self.scene.bearing(pose)

    def close(self) -> None:
        """Nothing is held: the renderer is shared."""

    @property
    def scene(self) -> Scene:
        """The scene that was started."""
        if self._scene is None:
            raise EnvironmentFailure(f"{NAME}: it has not begun; reset it first.")
        return self._scene


def _place(distance: float, bearing: float) -> State:
    """Distance and bearing as descriptions name them: whole metres, and hours of the clock."""
    hour = round(bearing / 30) % 12
    return {"target": frozenset([(round(distance), hour or 12)])}
