"""RemoteEnvironment: an environment at an environment service, played like one in this process."""

import os
from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult, within
from sensorium.envs.remote.client import EnvironmentClient, RemoteSession, shared_client
from sensorium.envs.remote.wire import reset_from_json, step_from_json
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure

KEY = "SENSORIUM_SERVICE_KEY"


class RemoteEnvironment:
    """``environment`` with ``options`` at one of ``servers`` (addresses). The key is read from SENSORIUM_SERVICE_KEY.

    A call takes at most ``deadline_s``; a lost reply is asked for again for ``retry_s``, and never acts twice.
    """

    instant = False
    stands_for = True
    recipe_only = ("servers",)

    def __init__(
        self,
        store: MediaStore,
        servers: str | Sequence[str],
        environment: str,
        options: Mapping[str, Any] | None = None,
        deadline_s: float = 60.0,
        retry_s: float = 30.0,
    ) -> None:
        within("remote", "deadline_s", deadline_s, 0.001, 86_400)
        within("remote", "retry_s", retry_s, 0.0, 86_400)
        self.store, self.environment, self.options = store, environment, dict(options or {})
        self.deadline_s, self.retry_s = deadline_s, retry_s
        self._client = shared_client([servers] if isinstance(servers, str) else servers, os.environ.get(KEY, ""))
        self._session: RemoteSession | None = None
        self._closed = 0
        self.waits_for = ""

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """What a seed leads to, by the server's own environment."""
        remote = cls(MediaStore(), **options)
        asked = remote._client.content_keys(remote.environment, remote.options, [seed], remote.deadline_s)
        return str(remote._client.run(asked)[0])

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        """Open a session by the seed. One that is closed meanwhile, from another thread, is given back when it opens."""
        self.close()
        closed = self._closed
        opening = self._client.open(self.environment, self.options, seed, self.store, self.deadline_s, self._wait)
        session, reply = self._client.run(opening)
        self._session, self.waits_for = session, ""
        if self._closed != closed:
            self.close()
            raise EnvironmentFailure(f"remote environment '{self.environment}': it was closed before it began.")
        return reset_from_json(reply)

    def step(self, response: str) -> StepResult:
        """Act there, once."""
        return step_from_json(self._client.run(self._known().step(response, self.deadline_s, self.retry_s)))

    def demonstrate(self) -> str:
        """A good response from here, by the server's environment."""
        said: str = self._client.run(self._known().demonstrate(self.deadline_s))
        return said

    def close(self) -> None:
        """Give the session back."""
        self._closed += 1
        session, self._session = self._session, None
        if session is not None:
            self._client.run(session.close(self.deadline_s))

    def _wait(self, why: str) -> None:
        self.waits_for = why

    def _known(self) -> RemoteSession:
        if self._session is None:
            raise EnvironmentFailure(f"remote environment '{self.environment}': it has not begun; reset it first.")
        return self._session


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
