"""FrozenLake: walk over a frozen lake to the goal without falling into a hole. Gymnasium's dynamics, our pictures.

``maps`` draws lakes and finds safe ways, ``grammar`` reads responses and writes prompts, ``drawing`` shows a lake, ``pay``
says what a turn is worth, and ``environment`` puts them together.
"""

from sensorium.envs.frozen_lake.environment import FrozenLake

__all__ = ["FrozenLake"]
