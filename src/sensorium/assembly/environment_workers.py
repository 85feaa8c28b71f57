"""Workers that play the environments of a run: started here or by Ray, and replaced when they die."""

import asyncio
import secrets

from sensorium.envs.protocol import Environment
from sensorium.envs.remote.client import EnvironmentClient, Server
from sensorium.envs.remote.placed import PlacedEnvironment
from sensorium.media.store import MediaStore
from sensorium.recipe.names import needs_a_row, parameters_of, resolve
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.task import Task
from sensorium.workers.hosts import ProcessHost
from sensorium.workers.placed_workers import PlacedWorker, PlacedWorkers

MODULE = "sensorium.services.environment_worker"


class EnvironmentWorkers:
    """``count`` environment services, each in a process of its own, and the client that plays at them."""

    def __init__(
        self,
        host: ProcessHost,
        count: int,
        deadline_s: float,
        *,
        toward: str,
        restarts: int,
        start_s: float,
        hang_s: float = 20.0,
    ) -> None:
        key = secrets.token_urlsafe()
        self._deadline_s = deadline_s
        self._client = EnvironmentClient([], key)
        self._servers: dict[PlacedWorker, Server] = {}
        settings = {"key": key, "deadline_s": deadline_s, "toward": toward}
        self.placed = PlacedWorkers(
            host, MODULE, settings, count, "environment worker", EnvironmentFailure,
            restarts=restarts, start_s=start_s, hang_s=hang_s, changed=self._changed,
        )  # fmt: skip

    def start(self) -> None:
        """Start all."""
        self.placed.start()

    def environment(self, task: Task, store: MediaStore) -> Environment:
        """A task's environment, in one of the workers."""
        spec = task.environment
        assert spec is not None
        kind = resolve("environment", spec.name)
        if needs_a_row(kind) or ("task" in parameters_of(kind) and task.messages):
            raise RecipeError(
                f"task {task.id}: environment '{spec.name}' plays the question of its row, and cluster.environments plays "
                "by seeds alone. Leave cluster.environments out."
            )
        return PlacedEnvironment(store, self._client, spec.name, spec.options, self._deadline_s)

    async def available(self) -> None:
        """Wait until a worker takes episodes. WorkersLost if none is left."""
        if not any(worker.ready for worker in self.placed.workers):
            await asyncio.to_thread(self.placed.wait)

    def close(self) -> None:
        """End all."""
        self.placed.close()
        self._client.close()

    def _changed(self, worker: PlacedWorker, ready: bool) -> None:
        server = self._servers.pop(worker, None)
        if server is not None:
            self._client.drop(server)
        if ready:
            self._servers[worker] = self._client.add(worker.told)
