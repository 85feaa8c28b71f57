"""The metrics of a step: rewards, accuracy and lengths of its episodes; seconds by phase, throughput, peak memory."""

import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch

from sensorium.assembly.session import Session
from sensorium.cluster.pool import WorkerPool
from sensorium.kernels.first_use import compile_seconds, fallbacks
from sensorium.learner.credited_episode import CreditedEpisode
from sensorium.trainer.selection import EMPTY, SET_ASIDE, Selection, masked, zero_variance
from sensorium.vocabulary.episode import Episode, Group, Status, by_name, category_of
from sensorium.vocabulary.metric_names import MOST_CATEGORIES, OTHER_CATEGORIES


class Clock:
    """Times a step's phases and announces which one runs."""

    def __init__(self, session: Session, announce: Callable[[str, int], None]) -> None:
        self.session, self.announce = session, announce
        self.started = time.perf_counter()
        self.seconds: dict[str, float] = {}
        self.patches, self.compiled = session.policy.counters.patches, compile_seconds()
        if torch.cuda.is_available():
            torch.cuda.reset_peak_memory_stats()

    @contextmanager
    def __call__(self, phase: str, total: int = 0) -> Iterator[None]:
        self.announce(phase, total)
        started = time.perf_counter()
        yield
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        self.seconds[phase] = self.seconds.get(phase, 0.0) + time.perf_counter() - started

    def metrics(self, groups: Sequence[Group]) -> dict[str, float]:
        """Seconds by phase, throughput and peak memory."""
        whole = time.perf_counter() - self.started
        episodes = [e for group in groups for e in group.episodes if e.status not in (Status.FAILED, Status.ABORTED)]
        row = {f"time/{phase}_s": seconds for phase, seconds in self.seconds.items()}
        row["time/step_s"] = whole
        if (compiled := compile_seconds() - self.compiled) > 0:
            row["time/compile_s"] = compiled
        row["throughput/episodes_per_s"] = len(episodes) / whole
        row["throughput/tokens_per_s"] = sum(e.sampled_tokens for e in episodes) / whole
        row["throughput/patches_per_s"] = (self.session.policy.counters.patches - self.patches) / whole
        if fallbacks():
            row["throughput/fallbacks"] = fallbacks()
        row["memory/peak_gib"] = peak_memory_gib()
        return row


def peak_memory_gib() -> float:
    """Peak memory: the GPU's of this step, else the process's so far."""
    if torch.cuda.is_available():
        return torch.cuda.max_memory_allocated() / 2**30
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def staleness_metrics(schedule: str, samples: Sequence[Sequence[CreditedEpisode]], version: int) -> dict[str, float]:
    """Mean and largest age, in updates, of what is trained by weights of ``version``; empty if synchronous.

    With the asynchronous schedule ages are of tokens, since those of one response may differ, and ``staleness/share_N`` is
    the share of tokens that are N updates old.
    """
    responses = [turn.response for group in samples for sample in group for turn in sample.episode.turns]
    if schedule == "synchronous" or not responses:
        return {}
    if schedule == "one_step_off":
        ages = [version - response.policy_version for response in responses]
        return {"staleness/mean": sum(ages) / len(ages), "staleness/max": max(ages)}
    tokens: Counter[int] = Counter()
    for response in responses:
        for span in response.version_spans:
            tokens[version - span.version] += span.end - span.start
    total = max(1, tokens.total())
    oldest = max((age for age, count in tokens.items() if count), default=0)
    row = {f"staleness/share_{age}": tokens[age] / total for age in range(oldest + 1)}
    row["staleness/mean"] = sum(age * count for age, count in tokens.items()) / total
    row["staleness/spanning"] = sum(len(response.versions) > 1 for response in responses)
    return row | {"staleness/max": oldest}


def episode_metrics(groups: Sequence[Group], selection: Selection, *, mask_truncated: bool = False) -> dict[str, float]:
    """Rewards by term and by named part, accuracy, lengths and fates. A group masked whole is not trained on."""
    episodes = [episode for group in groups for episode in group.episodes]
    row: dict[str, float] = {}
    _put_mean(row, "reward/mean", [e.reward for e in episodes if e.reward is not None])
    terms: dict[str, list[float]] = defaultdict(list)
    missing: dict[str, int] = defaultdict(int)
    for episode in episodes:
        for name, value in by_name(episode.scores).items():
            if value is not None:
                terms[name].append(value)
        for score in episode.scores:
            missing[score.name] += score.missing
    for name in sorted(terms.keys() | missing.keys()):
        _put_mean(row, f"reward/{name}", terms[name])
        row[f"missing/{name}"] = missing[name]
    for term in sorted({name.partition("/")[0] for name in terms if "/" in name} - terms.keys()):
        _put_mean(row, f"reward/{term}", [value for e in episodes if (value := _sum_of_parts(e, term)) is not None])
    _put_mean(row, "accuracy", [float(e.correct) for e in episodes if e.correct is not None])
    unseen = masked(selection.groups) if mask_truncated else {}
    trained = [group for group in selection.groups if any(e.id not in unseen for e in group.episodes)]
    row["groups/zero_variance"] = zero_variance(trained)
    row["groups/trained"] = len(trained)
    aside = sum(any(selection.fates.get(e.id) in SET_ASIDE for e in group.episodes) for group in groups)
    row["groups/dropped"] = len(groups) - len(selection.groups) - aside
    lengths = [e.sampled_tokens for e in episodes]
    _put_mean(row, "episodes/length_mean", lengths)
    row["episodes/length_max"] = max(lengths, default=0)
    _put_mean(row, "episodes/turns_mean", [len(e.turns) for e in episodes])
    row["episodes/truncated"] = sum(e.status == Status.TRUNCATED for e in episodes)
    row["episodes/out_of_context"] = sum(bool(e.info.get("out_of_context")) for e in episodes)
    row["episodes/empty"] = sum(fate == EMPTY for fate in selection.fates.values())
    if mask_truncated:
        row["episodes/masked"] = len(unseen)
    valid = [turn.info["valid"] for e in episodes for turn in e.turns if isinstance(turn.info.get("valid"), bool)]
    _put_mean(row, "environment/invalid_share", [float(not named) for named in valid])
    row["episodes/failed"] = sum(e.status in (Status.FAILED, Status.ABORTED) for e in episodes)
    row["episodes/dropped"] = sum(fate not in SET_ASIDE for fate in selection.fates.values())
    return row


class CategoryAccuracy:
    """Accuracy by kind of task: ``accuracy/NAME`` for the first names that a run meets, ``accuracy/other`` for the rest.

    A run that meets a single kind, which is no level of a source, has none of these. A checkpoint holds ``names``, so that
    a resumed run bounds alike.
    """

    def __init__(self) -> None:
        self.names: list[str] = []

    def row(self, groups: Sequence[Group]) -> dict[str, float]:
        """The metrics of a step."""
        verdicts: dict[str, list[float]] = defaultdict(list)
        for group in groups:
            name = category_of(group.task, *group.episodes)
            known = [float(e.correct) for e in group.episodes if e.correct is not None]
            if not name or not known:
                continue
            if name not in self.names and len(self.names) < MOST_CATEGORIES:
                self.names.append(name)
            verdicts[name if name in self.names else OTHER_CATEGORIES] += known
        if len(self.names) < 2 and not any("level" in group.task.metadata for group in groups):
            return {}
        return {f"accuracy/{name}": sum(known) / len(known) for name, known in sorted(verdicts.items())}


def length_metrics(groups: Sequence[Group], fates: Mapping[str, str]) -> dict[str, float]:
    """Lengths of the episodes that are trained on, and of those that are not."""
    row: dict[str, float] = {}
    for name, dropped in (("kept", False), ("dropped", True)):
        lengths = [e.sampled_tokens for group in groups for e in group.episodes if (e.id in fates) == dropped]
        _put_mean(row, f"episodes/{name}_length_mean", lengths)
        if lengths:
            row[f"episodes/{name}_length_max"] = max(lengths)
    return row


def environment_metrics(pool: WorkerPool, episodes: int) -> dict[str, float]:
    """Calls of environments in threads since the last row, for so many episodes; empty where there were none."""
    counted = pool.take_counters()
    if not counted.calls:
        return {}
    return {
        "environment/places": max(1, min(pool.size, counted.most_callers)),
        "time/environment_episode_s": counted.ran_s / max(1, episodes),
        "time/environment_mean_s": counted.ran_s / counted.calls,
        "time/environment_max_s": counted.ran_most_s,
        "time/environment_wait_max_s": counted.waited_most_s,
        "environment/hung": pool.hung,
    }


def environments_busy(row: Mapping[str, float], episodes: int) -> dict[str, float]:
    """How many environments were in a call on average over a whole step, as a share of those that could be."""
    if "environment/places" not in row:
        return {}
    possible_s = row["environment/places"] * row["time/step_s"]
    return {"time/environments_busy": min(1.0, row["time/environment_episode_s"] * episodes / possible_s)}


GIB = 1 << 30
FIRST_NOTED_GIB = 2.0  # size of a run's media at which a note is made, then at each doubling


class MediaMeter:
    """Counts decoded, preprocessed and encoded media between the rows of a run; empty for a text-only policy."""

    def __init__(self, session: Session) -> None:
        self._session, self._before = session, session.policy.media_counts
        self._row: dict[str, float] = {}
        self._noted_gib = FIRST_NOTED_GIB

    def lap(self, name: str = "media") -> None:
        """Add what was counted since the last lap to the counts under a name."""
        now = self._session.policy.media_counts
        for key, count in now.since(self._before).items():
            self._row[f"{name}/{key}"] = self._row.get(f"{name}/{key}", 0) + count
        self._before = now

    @contextmanager
    def pause(self) -> Iterator[None]:
        """Count nothing within this."""
        self.lap()
        yield
        self._before = self._session.policy.media_counts

    def notes(self) -> list[str]:
        """A note if the media store has doubled since the last one."""
        size = self._session.store.stored_bytes / GIB
        if size < self._noted_gib:
            return []
        while self._noted_gib <= size:
            self._noted_gib *= 2
        folder = self._session.store.folder
        return [
            f"'{folder}' holds {size:.1f} GiB of media: every picture that tasks and environments show is kept, for the "
            "report and for resuming, and nothing bounds it. See that the disk has room."
        ]

    def row(self) -> dict[str, float]:
        """The counts since the last row, and the sizes now."""
        self.lap()
        row, self._row = self._row, {}
        sizes = {f"media/{key}": size for key, size in self._before.sizes.items()}
        sizes["media/store_gib"] = self._session.store.stored_bytes / GIB
        return row | sizes if len(self._session.policy.chat.modalities) > 1 else {}


def _sum_of_parts(episode: Episode, term: str) -> float | None:
    """The sum of a term's named parts for an episode; None where one is missing.

    Parts of weight 0 do not count, unless all have weight 0.
    """
    parts = [score for score in episode.scores if score.name.startswith(f"{term}/")]
    values = [score.value for score in parts if score.weight != 0 or not any(part.weight for part in parts)]
    return sum(value for value in values if value is not None) if values and None not in values else None


def _put_mean(row: dict[str, float], name: str, values: Sequence[float]) -> None:
    if values:
        row[name] = sum(values) / len(values)
