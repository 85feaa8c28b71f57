"""Watchers (console, tensorboard, wandb): the trainer calls them during a run, and they never change it."""

import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.runs.metrics import Notice
from sensorium.vocabulary.episode import Group

Metrics = Mapping[str, float]
# An evaluation's summary: name, tasks, episodes, accuracy, interval [low, high], reward, terms {name: mean}, categories
# {name: {accuracy, interval, tasks, reward, terms}}, length_mean, failed, missing, and of k > 1 samples mean@k, best@k and
# majority@k {value, interval}. ``accuracy`` and ``reward`` are None if nothing was judged.
Summary = Mapping[str, Any]


@dataclass(frozen=True)
class RunStart:
    """The start of a run: ``first`` steps are done already (of a resumed run); the first ``warm_start`` are supervised."""

    name: str
    steps: int
    first: int = 0
    warm_start: int = 0
    episodes_per_step: int = 0
    facts: tuple[str, ...] = ()
    recipe: Mapping[str, Any] = field(default_factory=dict)


class Watcher:
    """Base of watchers: methods may be left out. ``shown``: a person sees its notes at once."""

    shown = False

    def started(self, run: RunStart) -> None:
        """The run starts or continues."""

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """A step enters a phase (rollout, score, update, evaluate, …) of ``total`` items, 0 if unknown."""

    def progress(self, done: int) -> None:
        """So many items of the phase are done."""

    def stepped(self, step: int, metrics: Metrics) -> None:
        """A step is over; these are its metrics."""

    def evaluated(self, step: int, summary: Summary) -> None:
        """An evaluation is over."""

    def generated(self, step: int, groups: Sequence[Group], store: MediaStore) -> None:
        """The episodes of an evaluation; the store has their media."""

    def began(self, group: Group) -> None:
        """The first group of RL was played and scored."""

    def diagnosed(self, notice: Notice) -> None:
        """Something is wrong with the run, still, or no longer."""

    def noted(self, text: str) -> None:
        """Something worth a line happened."""

    def attention(self, text: str) -> None:
        """Note something important: also on stderr if no person sees notes."""
        if not self.shown:
            print(text, file=sys.stderr)
        self.noted(text)

    def finished(self) -> None:
        """The run is over, well or not: release resources."""


def _to_each(method: str) -> Any:
    def call(self: "Watchers", *values: Any, **named: Any) -> None:
        for watcher in self.watchers:
            getattr(watcher, method)(*values, **named)

    return call


class Watchers(Watcher):
    """Several watchers as one."""

    def __init__(self, watchers: Iterable[Watcher] = ()) -> None:
        self.watchers = tuple(watchers)
        self.shown = any(watcher.shown for watcher in self.watchers)

    started = _to_each("started")
    phase = _to_each("phase")
    progress = _to_each("progress")
    stepped = _to_each("stepped")
    evaluated = _to_each("evaluated")
    generated = _to_each("generated")
    began = _to_each("began")
    diagnosed = _to_each("diagnosed")
    noted = _to_each("noted")
    finished = _to_each("finished")
