"""Sokoban: push every box onto a target. Boxes can be pushed, not pulled, and one at a time.

``rooms`` makes rooms that can be solved, of a known length of solution, and solves them; ``drawing`` shows one, and
``environment`` puts them together.
"""

from sensorium.envs.sokoban.environment import Sokoban

__all__ = ["Sokoban"]
