"""Assembling a run from its recipe: everything is named and checked first, then built once."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import cast

import torch
from torch import Tensor

from sensorium.assembly.determinism import make_deterministic
from sensorium.assembly.models import load_model
from sensorium.assembly.playing import EnvironmentMaker, make_scorer, open_store
from sensorium.assembly.workers import RunWorkers, open_engine, open_workers, process_work
from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.pool import EnginePool
from sensorium.engines.protocol import Engine, InFlightEngine
from sensorium.envs.remote.instances import InstancePool
from sensorium.kernels.first_use import count_triton
from sensorium.models.policy import Policy
from sensorium.recipe.schema import Recipe
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.reward_term import without_answer
from sensorium.rewards.scorer import JudgementCache, Scorer
from sensorium.rollout.live import refuse_strange_environments
from sensorium.rollout.play import Rollout
from sensorium.runs.process_table import ProcessRow
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task


@dataclass
class Session:
    """A model that can be played and judged: what training and evaluation have in common."""

    store: MediaStore
    policy: Policy
    engine: Engine
    rollout: Rollout
    scorer: Scorer
    judges: JudgeClient
    workers: RunWorkers = field(default_factory=RunWorkers)
    instances: InstancePool | None = None
    opened: ExitStack = field(default_factory=ExitStack)
    _computed: tuple[int, int, int] = (0, 0, 0)

    def tell_by(self, noted: Callable[[str], None]) -> None:
        """Report by this what is slow or does not work as it should: terms, decoded clips, the engine's decode step."""
        self.scorer.noted = self.rollout.noted = noted
        self.workers.tell_by(noted)
        if self.instances is not None:
            self.instances.noted = noted
        cache = self.policy.chat.decoder.cache
        if cache is not None:
            cache.noted = noted
        tell_by = getattr(self.engine, "tell_by", None)  # some engines have nothing to report
        if tell_by is not None:
            tell_by(noted)

    def take_engine_metrics(self) -> dict[str, float]:
        """What the engine measures about itself, or computed since the last time; and how often workers died."""
        metrics, counters = getattr(self.engine, "metrics", None), getattr(self.engine, "counters", None)
        row: dict[str, float] = {} if metrics is None else metrics()
        if counters is not None:
            computed = counters.prefill_tokens + counters.extension_tokens, counters.decode_steps, counters.decoded_tokens
            tokens, steps, decoded = (now - before for now, before in zip(computed, self._computed, strict=True))
            self._computed = computed
            row |= {"engine/prefill_tokens": tokens, "engine/rows_mean": decoded / max(1, steps)}
        if waits_s := self.rollout.instance_waits_s:
            row["time/instance_wait_mean_s"] = sum(waits_s) / len(waits_s)
            waits_s.clear()
        if self.instances is not None:
            row["worker/instances_replaced"] = float(self.instances.replaced)
            row["worker/rolled_again"] = float(self.rollout.rolled_again)
        return row | self.workers.metrics(self.rollout.rolled_again)

    @property
    def processes(self) -> tuple[ProcessRow, ...]:
        """The processes of engine and workers; none where all is in this one."""
        engine, rows = self.engine, list[ProcessRow]()
        if isinstance(engine, EnginePool):
            for place in engine.places:
                does = process_work(place, f"{len(place.threads)} threads open")
                name, pid, version = f"engine {place.number}", getattr(place.engine, "pid", None), place.engine.version
                rows.append(ProcessRow(name, pid, does, place.replaced, version, lost=bool(place.lost)))
        elif hasattr(engine, "pid"):
            does = "ready" if getattr(engine, "ready", True) else "is being replaced"
            rows.append(ProcessRow("engine", engine.pid, does, getattr(engine, "restarts", 0), engine.version))
        return (*rows, *self.workers.processes)

    def sample_with(self, weights: Mapping[str, Tensor], version: int, *, in_flight: bool = False) -> None:
        """Sample with a learner's weights from now on, with nothing cached from other weights.

        Where the learner trains the engine's own policy, they are in place already. ``in_flight``: responses may be open,
        and continue with them (``Capabilities.in_flight``).
        """
        own = dict(self.policy.model.named_parameters())
        with torch.no_grad():
            for name, weight in weights.items():
                if own[name].data_ptr() != weight.data_ptr():
                    own[name].copy_(weight)
        self.policy.version = version
        if in_flight:
            cast(InFlightEngine, self.engine).push_weights(self.policy, version)
        else:
            self.engine.update_weights(self.policy, version)

    @property
    def lockstep_waited_s(self) -> float:
        """Seconds that requests waited for other episodes so far, because the engine is in lockstep."""
        scheduler = getattr(self.engine, "scheduler", None)
        return 0.0 if scheduler is None else scheduler.waited_s

    def play_eagerly(self) -> None:
        """Wait no longer for slow environments before every token. What is batched together then follows the clock."""
        engine = cast(NativeEngine, self.engine)
        engine.scheduler.stop_lockstep()
        engine.capabilities = replace(engine.capabilities, deterministic=False, lockstep=False)

    def forget_played(self) -> None:
        """Let the engine drop all that it has cached."""
        self.engine.reset_cache()

    def close(self) -> None:
        """Release what terms, environments, engine and the media decoder hold."""
        self.scorer.close()
        self.judges.close()
        self.rollout.close()
        self.engine.close()
        self.policy.chat.decoder.close()
        self.opened.close()


def open_session(recipe: Recipe, policy: Policy, judgements: JudgementCache | None, folder: Path | None = None) -> Session:
    """Everything around a loaded policy; judges store their files in ``folder``, the run directory."""
    store = policy.chat.store
    if policy.device.type == "cuda":
        count_triton()
    judges = JudgeClient(recipe.judges, store, folder)
    scorer = make_scorer(recipe.rewards, judgements, store, judges)
    with ExitStack() as opened:
        workers = open_workers(recipe, scorer, opened)
        engine, host = open_engine(recipe, policy, folder)
        opened.callback(host.close)
        pool = None
        if recipe.environments.pool and workers.environments is None:
            pool = InstancePool(recipe.environments.pool, recipe.rollout.environment_deadline_s)
            opened.callback(pool.close)
        make = EnvironmentMaker(store, workers.environments, pool)
        rollout = Rollout(policy.chat, engine, recipe.rollout, make, recipe.environments.pool)
        return Session(store, policy, engine, rollout, scorer, judges, workers, pool, opened.pop_all())


@contextmanager
def model_session(recipe: Recipe, model: str, folder: Path | None = None) -> Iterator[Session]:
    """A session with any model instead of the recipe's, to be measured with the recipe's seed.

    Judges store their files in ``folder``.
    """
    make_deterministic(recipe)
    session = open_session(recipe, load_model(recipe, model, open_store(recipe)), None, folder)
    try:
        yield session
    finally:
        session.close()


def refuse_strange_tasks(session: Session, tasks: Sequence[Task]) -> None:
    """Before anything is played, refuse tasks and environments with media that model or engine cannot take."""
    rollout = session.rollout
    rollout.refuse_strange(tasks)
    refuse_strange_environments(
        tasks, rollout.make_environment, session.policy.chat, session.engine, rollout.section.environment_deadline_s
    )


def refuse_unanswered(session: Session, training: Sequence[Task], held_out: Sequence[Task]) -> list[str]:
    """Notes on tasks without the answer that a term compares with; refused where no training task has one."""
    found = []
    for where, tasks in (("tasks.train", training), ("tasks.evaluate", held_out)):
        if problem := without_answer(session.scorer.terms, tasks):
            found.append(f"{where}: {problem}")
    weighty = [(term, weight) for term, weight in session.scorer.terms if weight]
    if training and all(task.answer is None for task in training) and without_answer(weighty, training):
        raise TaskError(found[0])
    return found
