"""FrozenLake: walk over a frozen lake to the goal without falling into a hole. Gymnasium's dynamics, our pictures.

``maps`` makes lakes and finds safe ways, ``drawing`` shows a lake, and ``environment`` puts them together.
"""

from sensorium.envs.frozen_lake.environment import FrozenLake

__all__ = ["FrozenLake"]
