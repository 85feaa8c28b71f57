"""Several engines as one. Each has its own weights in its own processes, on this machine or others.

A new group goes to the engine with the fewest open groups, and all its episodes to the same one, which computes their
prompt once. For example, with two engines:

    groups a b c begin    a → 0, b → 1, c → 0
    engine 0 dies         open responses of a and c are sampled again by 1; meanwhile another engine 0 starts
    group d begins        d → 0, as soon as that is ready

Invariants: all engines that take requests have weights of one version. A response comes from one engine: nothing is kept
from one that died. Turns that an episode has finished stay, because they are tokens.
"""

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace

from sensorium.cluster.python_process import HostedProcess, last_words
from sensorium.engines.protocol import Engine, LiveEpisodes, Request, Response, WeightSource
from sensorium.vocabulary.errors import EngineLost


def process_lost(process: HostedProcess) -> EngineLost:
    """The error when an engine's process has ended."""
    return EngineLost(
        f"the engine process (pid {process.pid}) {process.ending()}, so nothing more can be sampled. Resume the run from "
        f"its last checkpoint.{last_words(process.log_text())}"
    )


@dataclass(eq=False)
class PooledEngine:
    """A place of the pool and the engine in it. ``ready``: it takes requests. ``starting``: its coming replacement.

    ``lost``: it is gone for good, and why. Neither ready nor lost: it is being replaced.
    """

    number: int
    engine: Engine
    starting: Engine | None = None
    ready: bool = False
    lost: str = ""
    replaced: int = 0
    answered: int = 0
    threads: set[str] = field(default_factory=set)


class EnginePool:
    """``count`` engines that ``make`` builds by the number of their place. At most ``restarts`` are replaced in all.

    ``joins_at_push``: a replacement takes requests only after the next push of weights. Where the policy is trained while
    engines sample, the weights it starts with may be half of an update.
    """

    def __init__(self, make: Callable[[int], Engine], count: int, restarts: int = 3, joins_at_push: bool = False) -> None:
        self._make, self._restarts_left, self._joins_at_push = make, restarts, joins_at_push
        self._places = [PooledEngine(number, make(number)) for number in range(count)]
        self.capabilities = replace(
            self._places[0].engine.capabilities, deterministic=False, lockstep=False, own_weights=True
        )
        self.version = self._places[0].engine.version
        self.replaced = self.sampled_again = 0
        self._groups: dict[str, PooledEngine] = {}
        self._replacing: list[Future[None]] = []
        self._changing = threading.RLock()
        self._workers = ThreadPoolExecutor(count, "engines")
        self._noted: Callable[[str], None] = lambda sentence: None
        self._closed = False

    @property
    def pids(self) -> list[int | None]:
        return [getattr(place.engine, "pid", None) for place in self._places]

    def start(self) -> None:
        """Start all in parallel; the first that cannot start ends the others."""
        starting = [self._workers.submit(place.engine.start) for place in self._places]
        try:
            for future in starting:
                future.result()
        except BaseException:
            for future in starting:
                future.exception()  # until it has started, it cannot be ended
            self.close()
            raise
        for place in self._places:
            place.ready = True

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report lost engines by this, and what the first engine reports."""
        self._noted = noted
        tell_by = getattr(self._places[0].engine, "tell_by", None)
        if tell_by is not None:
            tell_by(noted)

    async def generate(self, request: Request, episodes: LiveEpisodes | None = None) -> Response:
        """Write one response with the engine of its group, or with another if that is lost meanwhile."""
        while True:
            place = self._place_of(request.thread)
            engine = place.engine
            try:
                response = await engine.generate(request, None)
                place.answered += 1
                return response
            except EngineLost as lost:
                self.sampled_again += 1
                self._lose(place, engine, lost)

    def release(self, thread: str) -> None:
        """The thread will not be continued."""
        group = group_of(thread)
        place = self._groups.get(group)
        if place is None:
            return
        place.threads.discard(thread)
        place.engine.release(thread)
        if not any(group_of(other) == group for other in place.threads):
            del self._groups[group]

    def update_weights(self, source: WeightSource, version: int) -> None:
        """Sample with these weights from now on, all engines. No response may be open."""
        self._on_all(lambda engine: engine.update_weights(source, version), version)

    def push_weights(self, source: WeightSource, version: int) -> None:
        """As ``update_weights``, with responses open. From any thread."""
        self._on_all(lambda engine: engine.push_weights(source, version), version)  # type: ignore[attr-defined]

    def reset_cache(self) -> None:
        """Keep nothing of earlier rollouts."""
        self._on_all(lambda engine: engine.reset_cache(), self.version)

    def metrics(self) -> dict[str, float]:
        """Engines that are ready and that were replaced, responses sampled again, and responses of each engine."""
        row = {
            "engine/ready": float(sum(place.ready for place in self._places)),
            "engine/replaced": float(self.replaced),
            "engine/sampled_again": float(self.sampled_again),
        }
        for place in self._places:
            row[f"engine/answered_{place.number}"] = float(place.answered)
            place.answered = 0
        first = getattr(self._places[0].engine, "metrics", None)
        return row if first is None else first() | row

    @property
    def places(self) -> tuple[PooledEngine, ...]:
        return tuple(self._places)

    def close(self) -> None:
        """End all engines, also those that are starting."""
        self._closed = True
        for place in self._places:
            if (starting := place.starting) is not None:
                starting.close()
        with self._changing:
            for place in self._places:
                place.ready = False
                place.engine.close()
        self._workers.shutdown()

    def _place_of(self, thread: str) -> PooledEngine:
        """The engine of a thread's group; a new group goes to the one with the fewest groups."""
        group = group_of(thread)
        place = self._groups.get(group)
        if place is None or not place.ready:
            ready = [one for one in self._places if one.ready]
            if not ready:
                raise EngineLost(
                    "none of cluster.engines is left that takes requests. Resume the run from its last checkpoint."
                )
            held = list(self._groups.values())
            if place is not None:
                place.threads = {other for other in place.threads if group_of(other) != group}
            place = self._groups[group] = min(ready, key=lambda one: (held.count(one), one.number))
        place.threads.add(thread)
        return place

    def _lose(self, place: PooledEngine, engine: Engine, lost: EngineLost) -> None:
        """An engine is gone: replace it while the others go on, if restarts are left."""
        with self._changing:
            if place.engine is not engine or not place.ready or self._closed:
                return  # another request has reported it
            place.ready = False
            alone = not any(one.ready for one in self._places)
            coming = [] if self._joins_at_push else [future for future in self._replacing if not future.done()]
            again = self._restarts_left > 0 and not (alone and self._joins_at_push)
            if again:
                self._restarts_left -= 1
                self.replaced += 1
                place.replaced += 1
            else:
                place.lost = "no other has the weights" if self._restarts_left else "cluster.restarts are used up"
                if alone and not coming:
                    raise lost
        if again:
            self._noted(f"engine {place.number} is lost and is replaced; its open responses are sampled again. {lost}")
            if alone:
                self._replace(place)
            else:
                self._replacing = [*coming, self._workers.submit(self._replace, place)]
            return
        self._noted(f"engine {place.number} is lost, and cluster.restarts are used up: the others go on. {lost}")
        engine.close()
        if alone:
            wait(coming)  # for those that are starting in other places
            if not any(one.ready for one in self._places):
                raise lost

    def _replace(self, place: PooledEngine) -> None:
        """Start another engine in a place, again while restarts are left if it fails.

        It fails the comparison with the policy if it got weights in the middle of an update, for example.
        """
        place.engine.close()
        while True:
            fresh = place.starting = self._make(place.number)
            try:
                fresh.start()
                break
            except Exception as error:
                if self._closed:
                    return
                with self._changing:
                    again = self._restarts_left > 0
                    self._restarts_left -= again
                place.lost = "" if again else "it could not be replaced"
                next_try = " It is tried again." if again else ""
                self._noted(f"engine {place.number} could not be replaced: {error}{next_try}")
                if not again:
                    return
            finally:
                place.starting = None
        with self._changing:
            if self._closed:
                fresh.close()
                return
            place.engine, place.threads = fresh, set()
            place.ready = fresh.version == self.version and not self._joins_at_push

    def _on_all(self, call: Callable[[Engine], None], version: int) -> None:
        """Call something on all engines at once; a lost one is replaced, and one that waited for weights is ready."""
        with self._changing:
            running = [one for one in self._places if one.ready or getattr(one.engine, "pid", None) is not None]
            futures = [(place, place.engine, self._workers.submit(call, place.engine)) for place in running]
            lost = []
            for place, engine, future in futures:
                try:
                    future.result()
                    place.ready = True
                except EngineLost as error:
                    lost.append((place, engine, error))
            self.version = version
        for place, engine, why in lost:
            self._lose(place, engine, why)


def group_of(thread: str) -> str:
    """The group in a thread's name, which rollouts form as ``group/episode#thread``."""
    return thread.rpartition("#")[0].rpartition("/")[0] or thread
