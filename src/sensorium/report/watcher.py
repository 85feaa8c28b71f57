"""Watchers: what looks on while a run goes. The trainer tells; a watcher shows, and never changes the run.

Console, tensorboard and wandb are watchers. A watcher overrides only what it cares about.
"""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.runs.metrics import Notice
from sensorium.vocabulary.episode import Group

Metrics = Mapping[str, float]
Summary = Mapping[str, Any]
"""An evaluation's summary: name, tasks, episodes, accuracy, interval [low, high], reward, terms {name: mean}, categories
{name: {accuracy, interval, tasks, reward, terms}}, length_mean, failed, missing, and of k > 1 samples mean@k, best@k and
majority@k {value, interval}. ``accuracy`` and ``reward`` are None where none was judged."""


@dataclass(frozen=True)
class RunStart:
    """What is known when a run starts. ``first`` is the number of steps already behind it (a resumed run's are not 0).

    The first ``warm_start`` steps are supervised.
    """

    name: str
    steps: int
    first: int = 0
    warm_start: int = 0
    episodes_per_step: int = 0
    facts: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)


class Watcher:
    """Looks on. Every method may be left out. ``shown``: a person sees what it is told, at once."""

    shown = False

    def started(self, run: RunStart) -> None:
        """The run begins, or goes on."""

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """A step enters a phase (rollout, score, update, evaluate, …) of ``total`` items where that is known."""

    def progress(self, done: int) -> None:
        """So many items of the phase are done."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """A step is over; these are its metrics."""

    def evaluated(self, step: int, summary: Summary) -> None:
        """An evaluation is over."""

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        """These are the episodes of an evaluation; the store has their media."""

    def began(self, group: Group) -> None:
        """RL has begun: this is the first group that was played and scored."""

    def diagnosed(self, notice: Notice) -> None:
        """Something is wrong with the run, still, or no longer."""

    def noted(self, text: str) -> None:
        """Something worth a line happened."""

    def attention(self, text: str) -> None:
        """Note what nobody may miss: it goes to stderr where no person sees notes."""
        if not self.shown:
            print(text, file=sys.stderr)
        self.noted(text)

    def finished(self) -> None:
        """The run is over, well or not: give everything back."""


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self.watchers = tuple(watchers)
        self.shown = any(watcher.shown for watcher in self.watchers)

    def started(self, run: RunStart) -> None:
        for watcher in self.watchers:
            watcher.started(run)

    def phase(self, step: int, name: str, total: int = 0) -> None:
        for watcher in self.watchers:
            watcher.phase(step, name, total)

    def progress(self, done: int) -> None:
        for watcher in self.watchers:
            watcher.progress(done)

    def stepped(self, step: int, metrics: Metrics) -> None:
        for watcher in self.watchers:
            watcher.stepped(step, metrics)

    def evaluated(self, step: int, summary: Summary) -> None:
        for watcher in self.watchers:
            watcher.evaluated(step, summary)

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        for watcher in self.watchers:
            watcher.generated(step, groups, store)

    def began(self, group: Group) -> None:
        for watcher in self.watchers:
            watcher.began(group)

    def diagnosed(self, notice: Notice) -> None:
        for watcher in self.watchers:
            watcher.diagnosed(notice)

    def noted(self, text: str) -> None:
        for watcher in self.watchers:
            watcher.noted(text)

    def finished(self) -> None:
        for watcher in self.watchers:
            watcher.finished()
