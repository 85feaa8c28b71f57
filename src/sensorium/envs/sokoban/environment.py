"""The Sokoban environment. The seed decides everything: the room, its start, and the noise of demonstrations."""

import random
from collections.abc import Mapping
from typing import Any, Literal

from sensorium.envs.action_prompts import ActionPrompts, sight, turn_result
from sensorium.envs.actions import ActionGrammar
from sensorium.envs.option_checks import one_of, within
from sensorium.envs.pay import TurnPay
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.responses import ResponseFormat
from sensorium.envs.sokoban.drawing import draw_blank, draw_png, draw_text
from sensorium.envs.sokoban.rooms import ACTIONS, Position, Room, room_of, solution
from sensorium.envs.state_description import State, describe, described_parts, instruction, judged
from sensorium.media.store import MediaStore
from sensorium.vocabulary.content import Message, system
from sensorium.vocabulary.errors import EnvironmentFailure

NAME = "sokoban"
MOST_PIXELS_ACROSS = 4096
DEFAULTS = {"size": 6, "boxes": 1, "min_solution": 1, "max_solution": 5, "walls": 0.1}
LEGENDS = {
    "text": "# is wall, _ floor, O a target, X a box, √ a box on a target, P is you, S is you on a target.",
    "picture": "Grey is wall; a green square is a target, a brown one a box, a light green one a box on a target; "
    "the red square is you.",
}


class Sokoban:
    """One room, played once: push the boxes onto the targets, in ``min_solution`` to ``max_solution`` moves at best.

    Pays ``step_reward`` for each move, ``box_reward`` for each box pushed onto a target (taken back when it leaves it),
    ``success_reward`` when all are there, ``format_reward`` and ``state_reward`` as FrozenLake does. ``view`` shows the
    room as a picture or text, or shows nothing of it, to see whether a model looks.
    """

    instant = True

    def __init__(
        self,
        store: MediaStore,
        size: int = 6,
        boxes: int = 1,
        min_solution: int = 1,
        max_solution: int = 5,
        walls: float = 0.1,
        max_turns: int = 10,
        max_actions_per_turn: int = 1,
        view: Literal["picture", "text", "blank"] = "picture",
        prompt: Literal["short", "full"] = "short",
        response_format: str = "",
        bare: bool = False,
        cell: int = 28,
        step_reward: float = -0.1,
        box_reward: float = 1.0,
        success_reward: float = 10.0,
        format_reward: float = 0.5,
        state_reward: float = 0.0,
        demonstration_noise: float = 0.0,
        grammar: Literal["own", "vagen"] = "own",
    ) -> None:
        one_of(NAME, "view", view, ["picture", "text", "blank"])
        one_of(NAME, "prompt", prompt, ["short", "full"])
        within(NAME, "size", size, 4, 16)
        within(NAME, "boxes", boxes, 1, 8)
        within(NAME, "min_solution", min_solution, 1, max_solution)
        within(NAME, "max_solution", max_solution, 1, 1000)
        within(NAME, "walls", walls, 0.0, 0.9)
        within(NAME, "max_turns", max_turns, 1, 10**6)
        within(NAME, "max_actions_per_turn", max_actions_per_turn, 1, 10**6)
        within(NAME, "cell", cell, 4, 512)
        within(NAME, "size times cell (the picture's width)", size * cell, 8, MOST_PIXELS_ACROSS)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        self.store, self.max_turns, self.view, self.cell = store, max_turns, view, cell
        self._kind = (size, boxes, min_solution, max_solution, walls)
        form = ResponseFormat(response_format or ("free_think" if prompt == "full" else "no_think"), grammar=grammar)
        self.grammar = ActionGrammar(ACTIONS, max_actions_per_turn, form, bare)
        self.prompts = ActionPrompts(self.grammar, full=prompt == "full")
        described = described_parts(NAME, form, state_reward)
        self.pay = TurnPay(
            {"step": step_reward, "box": box_reward, "success": success_reward, "format": format_reward, **described}
        )
        self.demonstration_noise = demonstration_noise
        self._room: Room | None = None
        self._position = Position((0, 0), frozenset())
        self._seed = self._turn = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What the seed leads to: the room and its start."""
        room, start = room_of(*(options.get(key, value) for key, value in DEFAULTS.items()), seed)
        return draw_text(room, start).replace("\n", "/")

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """A new room at its start."""
        self._room, self._position = room_of(*self._kind, seed)
        self._seed, self._turn, self._over = seed, 0, False
        return (system(self._rules()),), self._observe(self.prompts.opening())

    def step(self, response: str) -> StepResult:
        """Carry out the moves the response names, until the room is solved or the last of them."""
        room = self._open_room()
        asked = self.grammar.read(response)
        before, start, made = self._state(), self._position, 0
        for action in asked.actions:
            self._position = room.after(self._position, action)
            made += 1
            if room.solved(self._position):
                break
        self._turn += 1
        success = room.solved(self._position)
        truncated = not success and self._turn >= self.max_turns
        self._over = success or truncated
        said = self.grammar.spell(asked.actions[:made])
        described = judged(asked, before, self._state(), self.pay.worth)
        placed = len(self._position.boxes & room.targets) - len(start.boxes & room.targets)
        good = asked.well_formed and asked.valid
        pay = self.pay.of(step=made, box=placed, success=success, format=good, **described)
        shown = None if self._over else self._observe(self.prompts.after(said))
        moved = start != self._position
        return turn_result(asked, said, shown, pay, truncated=truncated, success=success, moved=moved, **described)

    def demonstrate(self) -> str:
        """The next moves of a shortest solution; by ``demonstration_noise`` a move at random, keyed by seed and turn."""
        room = self._open_room()
        way = solution(room, self._position)
        if way is None:
            raise EnvironmentFailure(f"sokoban: nothing solves the room of seed {self._seed} from here:\n{self._drawn()}")
        actions = way[: self.grammar.most_actions]
        chance = random.Random(f"sokoban/{self._seed}/{self._turn}")
        if chance.random() < self.demonstration_noise:
            actions = (chance.randrange(len(ACTIONS)),)
        return self.grammar.write(actions, **self._thought(actions))

    def close(self) -> None:
        """Nothing is held."""

    def _open_room(self) -> Room:
        if self._room is None or self._over:
            raise EnvironmentFailure("sokoban: the room is solved, or play has ended or not begun; reset it first.")
        return self._room

    def _rules(self) -> str:
        legend = LEGENDS["text" if self.view == "text" else "picture"]
        states = f"\n{instruction(self._state())}" if {"observation", "prediction"} & set(self.pay.worth) else ""
        explained = (
            "You play Sokoban. Push every box onto a target. You can push a box by walking against it, one at a time, "
            f"and you cannot pull. {legend}{states}"
        )
        example = "player at (1, 1); box at (2, 1); target at (3, 1)"
        after = "player at (2, 1); box at (3, 1); target at (3, 1)"
        reason = "The box is below me and its target below that."
        thought = {"think": reason, "observation": example, "reasoning": reason, "prediction": after}
        return self.prompts.rules("Push the boxes onto the targets.", explained, (1,), **thought)

    def _state(self, position: Position | None = None) -> State:
        """Where things are."""
        assert self._room is not None
        here = position or self._position
        return {"player": frozenset([here.player]), "box": here.boxes, "target": self._room.targets}

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        room, then = self._open_room(), self._position
        for action in actions:
            then = room.after(then, action)
        reason = f"The shortest way goes {self.grammar.spell(actions).lower()}."
        states = {"observation": describe(self._state()), "prediction": describe(self._state(then))}
        return {"think": reason, "reasoning": reason, **states}

    def _drawn(self) -> str:
        assert self._room is not None
        return draw_text(self._room, self._position)

    def _observe(self, words: str) -> Observation:
        assert self._room is not None
        if self.view == "text":
            return sight(words, self._drawn())
        blank = self.view == "blank"
        png = draw_blank(self._room.size, self.cell) if blank else draw_png(self._room, self._position, self.cell)
        return sight(words, self.store.put(png, "picture", f"sokoban seed {self._seed} turn {self._turn}"))
