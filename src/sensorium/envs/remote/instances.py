"""A pool of environment instances: each in a process of its own, started once and reset for every episode.

Invariants:
- At most ``size`` instances exist. One belongs to one episode until that ends; then it waits for the next episode of the
  same environment and options, or makes room for an instance of another.
- What an episode sees does not depend on its instance, if ``reset(seed)`` leaves nothing of earlier episodes.
- An instance whose environment raised, overran its deadline or lost its process is stopped, and another takes its place.
- ``close`` stops all. If this process is killed, each instance notices and stops itself (``isolated.py``); if both are
  killed, the next pool on this machine ends what is left (``end_orphans``).

Example, of size 1 with episodes a and b: a starts the instance, b waits; a ends, b resets the instance and plays.
"""

import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from sensorium.cluster.python_process import ProcessLost, end_orphans
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.isolated import CLOSE_S, EnvironmentProcess
from sensorium.envs.remote.wire import Json, WireError, keep, reset_from_json, step_from_json
from sensorium.recipe.registry import SCHEME, needs_a_row, parameters_of, resolve
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.errors import EnvironmentFailure, EnvironmentLost, RecipeError
from sensorium.vocabulary.task import Task

START_S = 120.0  # for an instance to start, or to become free beyond what the rollout waits for
STOP_S = CLOSE_S + 5.0  # for an instance to end by itself
MARGIN_S = 5.0  # a call is given up by who waits for it, and this long after that by the pool


def poolable(task: Task) -> bool:
    """Whether a task's environment can be an instance of a pool: it plays from seeds and is no plain computation."""
    spec = task.environment
    if spec is None:
        return False
    kind = resolve("environment", spec.name)
    plain = getattr(kind, "instant", False) is True or getattr(kind, "stands_for", False)
    return not (plain or needs_a_row(kind) or ("task" in parameters_of(kind) and task.messages))


class Instance:
    """An environment with its options in a process of its own."""

    def __init__(self, name: str, options: Mapping[str, Any]) -> None:
        self.name, self.options = name, dict(options)
        self.process: EnvironmentProcess | None = None

    def is_of(self, name: str, options: Mapping[str, Any]) -> bool:
        return self.name == name and self.options == options

    def start(self) -> None:
        """Start the process, and the environment in it. RecipeError if its options are refused."""
        self.process = EnvironmentProcess()
        try:
            body, _ = self.process.ask({"op": "build", "environment": self.name, "options": self.options}, START_S)
        except (ProcessLost, WireError) as gone:
            raise EnvironmentFailure(f"environment '{self.name}' could not be started: {gone}") from gone
        if "error" in body:
            raise (RecipeError if body.get("refused") else EnvironmentFailure)(body["error"])

    def stop(self, *, in_order: bool = True) -> None:
        """End the process and whatever it started; ``in_order`` the environment closes itself first."""
        if self.process is not None and in_order:
            self.process.end_in_order(STOP_S)
        elif self.process is not None:
            self.process.end()


class InstancePool:
    """At most ``size`` instances, whose calls may take ``deadline_s``. ``noted`` reports what goes wrong.

    ``started`` and ``replaced`` count instances that were started and that were stopped because an episode broke them.
    """

    def __init__(self, size: int, deadline_s: float) -> None:
        self.size, self.deadline_s = size, deadline_s
        self.noted: Callable[[str], None] = lambda text: print(f"ATTENTION: {text}", file=sys.stderr, flush=True)
        self.started = self.replaced = 0
        self._all: list[Instance] = []
        self._idle: list[Instance] = []
        self._state = threading.Condition()
        self._closed = False
        if left := end_orphans():
            self.noted(f"ended {len(left)} processes that a killed run had left on this machine: {', '.join(left)}")

    def environment(self, name: str, options: Mapping[str, Any], store: MediaStore) -> "PooledEnvironment":
        """An instance for one episode, idle or new. Waits while all are in use."""
        if name.startswith(SCHEME):
            raise RecipeError(
                f"environment '{name}' is a Python object of this process, and environments.pool starts each instance in a "
                "process of its own. Put it into a module that can be imported, or leave environments.pool out."
            )
        instance, outdated = self._reserve(name, options)
        if outdated is not None:
            outdated.stop()
        if instance.process is None:
            try:
                instance.start()
            except BaseException:
                self._remove(instance)
                instance.stop(in_order=False)
                raise
            self.started += 1
        return PooledEnvironment(self, instance, store)

    def give_back(self, instance: Instance) -> None:
        """Its episode is over, and it is sound."""
        with self._state:
            if not self._closed:
                self._idle.append(instance)
                self._state.notify()
                return
        instance.stop()

    def replace(self, instance: Instance, why: str, *, in_order: bool) -> None:
        """Stop an instance that its episode broke; whoever needs it next starts another."""
        with self._state:
            self.replaced += not self._closed
            first = self.replaced == 1 and not self._closed
        if first:
            self.noted(
                f"an instance of environment '{instance.name}' is stopped, and another will take its place, because an "
                f"episode broke it: {why}. Further ones are counted (worker/instances_replaced)."
            )
        instance.stop(in_order=in_order)
        self._remove(instance)

    def close(self) -> None:
        """Stop all instances at once, those in use included, and start no more."""
        with self._state:
            self._closed, left = True, self._all
            self._all, self._idle = [], []
            self._state.notify_all()
        stopping = [threading.Thread(target=instance.stop, daemon=True) for instance in left]
        for thread in stopping:
            thread.start()
        for thread in stopping:
            thread.join()

    def _reserve(self, name: str, options: Mapping[str, Any]) -> tuple[Instance, Instance | None]:
        """An instance, not started if it is new; and one of another kind that must be stopped before, if any."""
        until, outdated = time.monotonic() + START_S, None
        with self._state:
            while not self._idle and len(self._all) >= self.size and not self._closed:
                if not self._state.wait(until - time.monotonic()):
                    raise EnvironmentFailure(f"none of {self.size} instances (environments.pool) was free in {START_S:g} s")
            if self._closed:
                raise EnvironmentFailure("the pool of environments is closed")
            for instance in reversed(self._idle):
                if instance.is_of(name, options):
                    self._idle.remove(instance)
                    return instance, None
            if len(self._all) >= self.size:
                outdated = self._idle.pop(0)
                self._all.remove(outdated)
            instance = Instance(name, options)
            self._all.append(instance)
        return instance, outdated

    def _remove(self, instance: Instance) -> None:
        with self._state:
            if instance in self._all:
                self._all.remove(instance)
            self._state.notify()


class PooledEnvironment:
    """An instance while one episode has it; ``asking`` while a call is under way."""

    instant = False

    def __init__(self, pool: InstancePool, instance: Instance, store: MediaStore) -> None:
        self._pool, self._store = pool, store
        self._instance: Instance | None = instance
        self._name = f"environment '{instance.name}'"
        self.asking, self._failed = False, ""

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return reset_from_json(self._ask({"op": "reset", "seed": seed}))

    def step(self, response: str) -> StepResult:
        return step_from_json(self._ask({"op": "step", "response": response}))

    def demonstrate(self) -> str:
        return str(self._ask({"op": "demonstrate"}))

    def close(self) -> None:
        """Give the instance back. One that failed is stopped; one that hangs, which another thread waits for, is killed."""
        instance, self._instance = self._instance, None
        if instance is None or instance.process is None:
            return
        if self.asking:
            instance.process.kill()  # the thread that waits for it does the rest
        elif self._failed:
            self._pool.replace(instance, self._failed, in_order=True)
        else:
            self._pool.give_back(instance)

    def _ask(self, operation: Json) -> Any:
        instance = self._instance
        if instance is None or instance.process is None:
            raise EnvironmentFailure(f"{self._name} was closed.")
        self.asking = True
        try:
            body, media = instance.process.ask(operation, self._pool.deadline_s + MARGIN_S)
        except (ProcessLost, WireError, OSError, ValueError) as gone:  # the latter two of pipes that were closed meanwhile
            closed, self._instance = self._instance is None, None
            why = f"{operation['op']} took too long" if closed else f"its process is lost in {operation['op']}: {gone}"
            self._pool.replace(instance, why, in_order=False)
            raise (EnvironmentFailure if closed else EnvironmentLost)(f"{self._name}: {why}") from gone
        finally:
            self.asking = False
        if "error" in body:
            if operation["op"] != "demonstrate":
                self._failed = body["error"]
            raise EnvironmentFailure(f"{self._name}: {body['error']}")
        keep(media, self._store, self._name)
        return body["value"]
