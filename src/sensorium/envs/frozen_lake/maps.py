"""Maps of frozen lakes: which one a seed stands for, and the shortest safe way over it.

Places are counted row by row from the top left, so on a lake of size 4 the goal is place 15:

    SFFF
    FHFH      safe_way(grid, 0) gives (1, 1, 2, 1, 2, 2): Down, Down, Right, Down, Right, Right
    FFFH
    HFFG
"""

from collections import deque
from functools import lru_cache

from sensorium.vocabulary.errors import EnvironmentFailure

ACTIONS = ("Left", "Down", "Right", "Up")
"""Gymnasium's actions, in its order."""
MOVES = ((0, -1), (1, 0), (0, 1), (-1, 0))
"""Rows down and columns right of each action."""
MOST_TRIES = 10_000

Grid = tuple[str, ...]
"""A lake by rows: S start, G goal, F frozen, H hole."""


@lru_cache(maxsize=4096)
def lake(size: int, p: float, seed: int) -> Grid:
    """The map a seed stands for, always solvable: gymnasium's map of that seed.

    Maps are drawn until one is solvable. Rows of data may ask for ice so thin that none ever is, so tries are bounded.
    """
    from gymnasium.utils.seeding import np_random

    numbers, _ = np_random(seed)
    chance = min(1.0, p)
    for _ in range(MOST_TRIES):
        cells = numbers.choice(["F", "H"], (size, size), p=[chance, 1 - chance])
        cells[0][0], cells[-1][-1] = "S", "G"
        grid = tuple("".join(row) for row in cells)
        if safe_way(grid, 0) is not None:
            return grid
    raise EnvironmentFailure(
        f"frozen_lake: of {MOST_TRIES:,} maps of size {size} with p {p:g} none can be walked across; raise p, or shrink it."
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
