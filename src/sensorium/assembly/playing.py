"""What playing tasks takes beside a model, by the recipe: media store, reward terms, tasks, environments, sampling.

Imports no torch: ``play``, ``show`` and ``validate`` have no weights.
"""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from sensorium.data.media_files import MediaLimits
from sensorium.data.media_store import MediaStore, StoredMedia
from sensorium.data.mixture import TaskStream, make_sources
from sensorium.engines.protocol import Sampling
from sensorium.envs.protocol import Environment
from sensorium.envs.question import RecordedEnvironment
from sensorium.envs.remote.instances import START_S, InstancePool, poolable
from sensorium.recipe.registry import build, resolve
from sensorium.recipe.schema import Recipe, RewardsSection, RolloutSection
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.reward_term import RewardContext, build_term
from sensorium.rewards.scorer import JudgementCache, Scorer, term_identity
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import RECORDED, Task

if TYPE_CHECKING:
    from sensorium.assembly.workers import EnvironmentWorkers


def open_store(recipe: Recipe, folder: Path | None = None) -> MediaStore:
    return MediaStore(folder, limits=_limits(recipe))


def stored_media(recipe: Recipe, folder: Path) -> StoredMedia:
    """The media of a folder that nothing may be written to."""
    return StoredMedia(folder, limits=_limits(recipe))


def _limits(recipe: Recipe) -> MediaLimits:
    section = recipe.media
    return MediaLimits(section.max_pixels, section.max_file_mib, section.max_clip_s, section.max_clip_mib)


def make_scorer(
    section: RewardsSection, judgements: JudgementCache | None, store: MediaStore, judges: JudgeClient | None = None
) -> Scorer:
    """The recipe's reward terms behind one scorer."""
    context = RewardContext(store, judges)
    terms = [
        (build_term(term.name, term.options, f"rewards.terms.{i}", context), term.weight)
        for i, term in enumerate(section.terms)
    ]
    names = [term.name for term, _ in terms]
    if len(set(names)) < len(names):
        raise RecipeError(f"rewards.terms: names must differ, got {', '.join(names)}; give one of them an option 'name'.")
    if taken := sorted(set(names) & {"mean", "greedy"}):
        raise RecipeError(f"rewards.terms: the name '{taken[0]}' is that of a metric of all terms; give it another 'name'.")
    return Scorer(
        terms,
        deadline_s=section.deadline_s,
        retries=section.retries,
        retry_wait_s=section.retry_wait_s,
        judgements=judgements,
        identities={
            term.name: term_identity(asked.name, asked.options, getattr(term, "version", ""))
            for (term, _), asked in zip(terms, section.terms, strict=True)
        },
    )


def make_stream(recipe: Recipe, store: MediaStore) -> TaskStream:
    """The training tasks, as an endless stream addressed by position."""
    sections = recipe.tasks.train
    return TaskStream(
        make_sources(recipe.tasks, "train", store),
        [section.weight for section in sections],
        seed=recipe.seed,
        shuffle=recipe.tasks.shuffle,
        on_bad_row=recipe.tasks.on_bad_row,
    )


class EnvironmentMaker:
    """Builds the environment a task is played in: its own, here, in a worker or of a pool, or the single-turn question."""

    def __init__(
        self, store: MediaStore, workers: "EnvironmentWorkers | None" = None, pool: InstancePool | None = None
    ) -> None:
        self.store, self.workers, self.pool = store, workers, pool
        self.start_s = 0.0 if pool is None else 2 * START_S  # to wait for an instance that is being stopped, and to start
        self.question = resolve("environment", "question")

    def instant(self, task: Task) -> bool:
        """True where a task's environment is plain computation, which needs no thread."""
        spec = task.environment
        return (spec is None or spec.name == RECORDED) or (
            not self._by_worker(spec.name) and getattr(resolve("environment", spec.name), "instant", False) is True
        )

    def _by_worker(self, name: str) -> bool:
        """Whether a worker plays it. Servers of its own are asked from here, where their loss is noticed."""
        return self.workers is not None and not hasattr(resolve("environment", name), "available")

    async def available(self, task: Task, noted: Callable[[str], None]) -> None:
        """Wait until a task's environment can be played, if need be for a lost server, of which ``noted`` hears."""
        spec = task.environment
        if spec is None or spec.name == RECORDED:
            return
        if self.workers is not None and self._by_worker(spec.name):
            await self.workers.available()
        else:
            wait = getattr(resolve("environment", spec.name), "available", None)
            if wait is not None:
                await wait(spec.options, noted)

    def __call__(self, task: Task) -> Environment:
        spec = task.environment
        if spec is None:
            return self.question(task)
        if spec.name == RECORDED:
            return RecordedEnvironment(task)
        if self.workers is not None and self._by_worker(spec.name):
            return self.workers.environment(task, self.store)
        if self.pool is not None and poolable(task):
            return self.pool.environment(spec.name, spec.options, self.store)
        return build("environment", spec.name, spec.options, f"task {task.id}", store=self.store, task=task)


def sampling_of(section: RolloutSection, temperature: float | None = None) -> Sampling:
    """The recipe's sampling; evaluation may set its own temperature (0: greedy), and then samples from the whole policy."""
    sampling = Sampling(
        temperature=section.temperature,
        top_p=section.top_p,
        top_k=section.top_k,
        max_new_tokens=section.max_new_tokens,
        stop=section.stop,
        stop_tokens=not section.ignore_stop_tokens,
    )
    return sampling if temperature is None else replace(sampling, temperature=temperature, top_p=1.0, top_k=0)
