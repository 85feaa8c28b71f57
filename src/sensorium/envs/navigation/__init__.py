"""First-person navigation: walk to what the instruction names, by what is seen.

``scenes`` makes rooms from seeds and knows where one can walk, ``miniworld`` shows them by MiniWorld's renderer, ``thor``
plays the rooms of AI2-THOR, and ``environment`` is the play that both share.
"""

from sensorium.envs.navigation.environment import Navigation
from sensorium.envs.navigation.thor import ThorNavigation

__all__ = ["Navigation", "ThorNavigation"]
