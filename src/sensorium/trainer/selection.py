"""Select the groups to train on, with a fate for all other episodes. Missing is not zero: no score, no training."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import pvariance

from sensorium.algorithms.advantages import alike
from sensorium.vocabulary.episode import Episode, Group, Status, unusable

NO_SIGNAL = "dropped: nobody in its group has an advantage (all rewards are the same, or nobody leads)"
UNUSED = "unused: enough other groups were complete before"
TOO_ALIKE = "dropped: the rewards of other groups vary more (selection.variance_share)"
EMPTY = "dropped: nothing was written, so there is no token to credit"
MASKED = "masked: a budget cut it off, so it is not trained on (rollout.mask_truncated), but counts in its group's baseline"
SET_ASIDE = frozenset({NO_SIGNAL, UNUSED, TOO_ALIKE})  # fates of groups that could have been trained on


@dataclass(frozen=True)
class Selection:
    """Groups to train on, and the fates of all other episodes (episode id → reason)."""

    groups: tuple[Group, ...] = ()
    fates: dict[str, str] = field(default_factory=dict)

    def without(self, reasons: Mapping[str, str]) -> "Selection":
        """Leave out groups, by id, each for its reason."""
        kept = tuple(group for group in self.groups if group.id not in reasons)
        fates = {e.id: reasons[group.id] for group in self.groups if group.id in reasons for e in group.episodes}
        return Selection(kept, self.fates | fates)

    def joined(self, other: "Selection") -> "Selection":
        """Both together, this one's groups first."""
        return Selection(self.groups + other.groups, self.fates | other.fates)


def select(groups: Sequence[Group], on_missing: str, *, smallest: int) -> Selection:
    """Drop episodes that failed or have no reward, by policy, and groups left with fewer than ``smallest``."""
    kept, fates = [], {}
    for group in groups:
        bad = {e.id: why_unfit(e) for e in group.episodes}
        fit = tuple(e for e in group.episodes if not bad[e.id])
        fates.update({id: why for id, why in bad.items() if why})
        if on_missing == "drop_group" and len(fit) < len(group.episodes):
            fates.update({e.id: "dropped: another member of its group has no score" for e in fit})
        elif len(fit) < smallest:
            fates.update({e.id: f"dropped: of its group {len(fit)} can be trained on, {smallest} are needed" for e in fit})
        else:
            kept.append(Group(group.id, group.task, fit))
    return Selection(tuple(kept), fates)


def why_unfit(episode: Episode) -> str:
    """Why an episode cannot be trained on; empty if it can."""
    if episode.status in (Status.FAILED, Status.ABORTED):
        return f"{episode.status}: {episode.failure}"
    if not episode.sampled_tokens:
        return EMPTY
    if episode.reward is None:
        missing = [f"{s.name} ({s.reason})" for s in episode.scores if s.missing and s.weight != 0]
        return f"dropped: no score for {', '.join(missing) or 'anything'}"
    weighed = [(s.name, s.value) for s in episode.scores if s.weight != 0 and s.value is not None]
    bad = [f"{name} gave {value:g}" for name, value in weighed if unusable(value)]
    if bad or unusable(episode.reward):
        return f"dropped: no number to train on ({', '.join(bad) or f'in all {episode.reward:g}'})"
    return ""


def masked(groups: Sequence[Group]) -> dict[str, str]:
    """The fate of every truncated member, where truncated episodes are masked."""
    return {e.id: MASKED for group in groups for e in group.episodes if e.status == Status.TRUNCATED}


def first(selection: Selection, wanted: int, ranks: Mapping[str, tuple[int, int]]) -> Selection:
    """At most ``wanted`` groups: those of the lowest rank, by their order among equals."""
    by_rank = sorted(selection.groups, key=lambda group: ranks[group.id])
    return selection.without({group.id: UNUSED for group in by_rank[wanted:]})


def most_varied(selection: Selection, wanted: int) -> Selection:
    """At most ``wanted`` groups, and one at least: those whose rewards vary most, by their order among equals."""

    def variance(group: Group) -> float:
        return pvariance([e.reward for e in group.episodes if e.reward is not None])

    by_variance = sorted(selection.groups, key=variance, reverse=True)
    return selection.without({group.id: TOO_ALIKE for group in by_variance[max(1, wanted) :]})


def zero_variance(groups: Sequence[Group]) -> int:
    """How many groups have members with equal rewards, by the estimators' own measure of a difference."""
    return sum(alike([e.reward for e in group.episodes if e.reward is not None]) for group in groups)
