"""PlacedEnvironment: an environment in a worker of the run itself, played like one in this process."""

from collections.abc import Mapping
from typing import Any

from sensorium.envs.remote.client import EnvironmentClient
from sensorium.envs.remote.environment import RemoteEnvironment
from sensorium.media.store import MediaStore

RETRY_S = 60.0
"""How long a reply of a worker that is not known to be dead is asked for again."""


class PlacedEnvironment(RemoteEnvironment):
    """``environment`` with ``options`` at one of a client's servers. Its worker's death is an EnvironmentLost."""

    def __init__(
        self,
        store: MediaStore,
        client: EnvironmentClient,
        environment: str,
        options: Mapping[str, Any],
        deadline_s: float,
    ) -> None:
        self.store, self.environment, self.options = store, environment, dict(options)
        self.deadline_s, self.retry_s = deadline_s, RETRY_S
        self._client = client
        self._session, self._closed, self.waits_for = None, 0, ""
