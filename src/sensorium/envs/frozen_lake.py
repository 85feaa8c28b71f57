"""FrozenLake: walk over a frozen lake to the goal without falling into a hole. The seed decides everything.

Places are counted row by row from the top left, so on this lake of size 4 the goal is place 15:

    SFFF
    FHFH     safe_way(grid, 0) gives (1, 1, 2, 1, 2, 2): Down, Down, Right, Down, Right, Right
    FFFH
    HFFG
"""

from collections import deque
from collections.abc import Mapping
from functools import lru_cache
from typing import Any, Unpack

from sensorium.data.media_store import MediaStore
from sensorium.envs.actions import (
    MAX_PIXELS_ACROSS,
    ActionEnvironment,
    Mark,
    PlayedTurn,
    PlayOptions,
    State,
    describe,
    draw_tiles,
    observation_of,
)
from sensorium.envs.protocol import Observation, within
from sensorium.vocabulary.errors import EnvironmentFailure

NAME = "frozen_lake"
ACTIONS = ("Left", "Down", "Right", "Up")  # gymnasium's, in its order
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))  # rows down and columns right of each action
MAX_TRIES = 10_000
COLOURS = {"F": (205, 228, 245), "H": (24, 30, 66), "G": (52, 168, 83), "S": (244, 200, 66)}
PLAYER = (214, 48, 49)
LEGENDS = {
    "text": "_ is ice, O a hole, S the start, G the goal and P is you.",
    "picture": "Light blue is ice, dark blue a hole, yellow the start, green the goal; the red square is you.",
}

Grid = tuple[str, ...]  # a lake by rows: S start, G goal, F frozen, H hole


@lru_cache(maxsize=4096)
def lake(size: int, p: float, seed: int) -> Grid:
    """The map of a seed, always solvable: gymnasium's map of that seed.

    Maps are drawn until one is solvable. Rows of data may ask for ice so thin that none ever is, so tries are bounded.
    """
    from gymnasium.utils.seeding import np_random

    numbers, _ = np_random(seed)
    chance = min(1.0, p)
    for _ in range(MAX_TRIES):
        cells = numbers.choice(["F", "H"], (size, size), p=[chance, 1 - chance])
        cells[0][0], cells[-1][-1] = "S", "G"
        grid = tuple("".join(row) for row in cells)
        if safe_way(grid, 0) is not None:
            return grid
    raise EnvironmentFailure(
        f"frozen_lake: none of {MAX_TRIES:,} maps of size {size} with p {p:g} can be walked across; raise p, or shrink it."
    )


def safe_way(grid: Grid, place: int) -> tuple[int, ...] | None:
    """The moves of a shortest way to the goal that touches no hole (ties go to the first of ACTIONS), or None."""
    size = len(grid)
    ways: dict[int, tuple[int, ...]] = {place: ()}
    frontier = deque([place])
    while frontier:
        here = frontier.popleft()
        row, column = divmod(here, size)
        if grid[row][column] == "G":
            return ways[here]
        for action, (down, right) in enumerate(MOVES):
            r, c = row + down, column + right
            if 0 <= r < size and 0 <= c < size and grid[r][c] != "H" and r * size + c not in ways:
                ways[r * size + c] = (*ways[here], action)
                frontier.append(r * size + c)
    return None


def draw_text(grid: Grid, place: int) -> str:
    """The lake in letters, the player on it."""
    cells = "".join(grid).translate(str.maketrans("FH", "_O"))
    cells = cells[:place] + "P" + cells[place + 1 :]
    return "\n".join(cells[i : i + len(grid)] for i in range(0, len(cells), len(grid)))


@lru_cache(maxsize=4096)
def draw_png(grid: Grid, place: int | None, cell: int) -> bytes:
    """The lake in flat colours, a square of ``cell`` pixels per place, the player (if any) a smaller square on it."""
    marks = [] if place is None else [Mark(*divmod(place, len(grid)), cell // 7, PLAYER)]
    return draw_tiles([[COLOURS[letter] for letter in row] for row in grid], marks, cell)


class FrozenLake(ActionEnvironment):
    """One lake, walked once; ``goal_reward`` is given at the goal.

    A response names its moves as in ``<answer>Left, Down</answer>``, or with ``bare`` in the words alone.
    """

    def __init__(
        self,
        store: MediaStore,
        size: int = 4,
        p: float = 0.8,
        slippery: bool = False,
        bare: bool = False,
        cell: int = 28,
        goal_reward: float = 1.0,
        demonstration_noise: float = 0.0,
        **play: Unpack[PlayOptions],
    ) -> None:
        within(NAME, "size", size, 2, 64)
        within(NAME, "p", p, 0.01, 1.0)
        within(NAME, "cell", cell, 4, 512)
        within(NAME, "size times cell (the picture's width)", size * cell, 8, MAX_PIXELS_ACROSS)
        within(NAME, "demonstration_noise", demonstration_noise, 0.0, 1.0)
        options: dict[str, Any] = {"max_turns": 12, "format_reward": 0.0, **play}
        super().__init__(NAME, store, ACTIONS, ["picture", "text", "blank"], {"goal": goal_reward}, bare=bare, **options)
        self.size, self.p, self.slippery, self.cell = size, p, slippery, cell
        self.demonstration_noise = demonstration_noise
        self._walk: Any = None
        self._grid: Grid = ()
        self._place = 0

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The map of a seed. Equal maps are the same environment, whatever their seeds."""
        return "/".join(lake(options.get("size", 4), options.get("p", 0.8), seed))

    def close(self) -> None:
        if self._walk is not None:
            self._walk.close()
            self._walk = None

    def _begin(self, seed: int) -> None:
        from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv

        self.close()
        self._grid = lake(self.size, self.p, seed)
        self._walk = FrozenLakeEnv(desc=list(self._grid), is_slippery=self.slippery)
        self._place = int(self._walk.reset(seed=seed)[0])

    def _play(self, actions: tuple[int, ...]) -> PlayedTurn:
        start, reached, ended = self._place, False, False
        for action in actions:
            place, reward, ended, _, _ = self._walk.step(action)
            self._place, reached = int(place), reward > 0
            if ended:
                break
        return PlayedTurn(len(actions), ended, reached, {"goal": reached}, {"moved": start != self._place})

    def _rules(self) -> str:
        legend = LEGENDS["text" if self.view == "text" else "picture"]
        slip = " The ice is slippery: you may slide sideways." if self.slippery else ""
        explained = (
            "You walk over a frozen lake. Reach the goal without falling into a hole. "
            f"{legend}{slip}{self._state_instruction()}"
        )
        reason = "The goal is below me and the ice is safe."  # of an example: it must not reveal the actual lake
        before, after = "player at (0, 0); goal at (3, 3)", "player at (1, 0); goal at (3, 3)"
        thought = {"think": reason, "observation": before, "reasoning": reason, "prediction": after}
        return self._system_prompt("Walk to the goal.", explained, (1,), **thought)

    def _state(self) -> State:
        size = len(self._grid)
        holes = frozenset((r, c) for r, row in enumerate(self._grid) for c, letter in enumerate(row) if letter == "H")
        player = frozenset([divmod(self._place, size)])
        return {"player": player, "goal": frozenset([(size - 1, size - 1)]), "hole": holes}

    def _way(self) -> tuple[int, ...]:
        way = safe_way(self._grid, self._place)
        if way is None:
            raise EnvironmentFailure(
                f"frozen_lake: no safe way leads from place {self._place} of {self._grid} to the goal."
            )
        return way

    def _thought(self, actions: tuple[int, ...]) -> dict[str, str]:
        row, column = divmod(self._place, (size := len(self._grid)))
        for action in actions:  # on ice that does not slip
            down, right = MOVES[action]
            row, column = min(max(row + down, 0), size - 1), min(max(column + right, 0), size - 1)
            if self._grid[row][column] in "GH":
                break
        reason, state = f"The safe way goes {self.grammar.spell(actions).lower()}.", self._state()
        after = describe({**state, "player": frozenset([(row, column)])})
        return {"think": reason, "observation": describe(state), "reasoning": reason, "prediction": after}

    def _shown(self, above: str) -> Observation:
        if self.view == "text":
            return observation_of(above, draw_text(self._grid, self._place))
        blank = self.view == "blank"
        grid = ("F" * self.size,) * self.size if blank else self._grid
        png = draw_png(grid, None if blank else self._place, self.cell)
        return observation_of(above, self.store.put(png, "picture", f"frozen_lake seed {self._seed} turn {self._turn}"))
