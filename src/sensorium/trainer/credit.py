"""From scored groups to what is trained: who is dropped and why, and the advantage of every sampled token."""

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from sensorium.learner.learner import Sample
from sensorium.recipe.names import resolve
from sensorium.recipe.schema import AdvantageSection
from sensorium.vocabulary.episode import Episode, Group, Status


@dataclass(frozen=True)
class Selection:
    """Groups left to train on, and what became of everybody else (episode id → reason)."""

    groups: tuple[Group, ...]
    fates: dict[str, str] = field(default_factory=dict)


def select(groups: Sequence[Group], on_missing: str) -> Selection:
    """Drop episodes that failed or have no total, by policy; groups left with fewer than two members are not trained."""
    kept, fates = [], {}
    for group in groups:
        bad = {e.id: _why_unfit(e) for e in group.episodes}
        fit = tuple(e for e in group.episodes if not bad[e.id])
        fates.update({id: why for id, why in bad.items() if why})
        if on_missing == "drop_group" and len(fit) < len(group.episodes):
            fates.update({e.id: "dropped: another member of its group has no score" for e in fit})
        elif len(fit) < 2:
            fates.update({e.id: "dropped: the only member left in its group" for e in fit})
        else:
            kept.append(Group(group.id, group.task, fit))
    return Selection(tuple(kept), fates)


def _why_unfit(episode: Episode) -> str:
    if episode.status in (Status.FAILED, Status.ABORTED):
        return f"{episode.status}: {episode.failure}"
    if not episode.turns:
        return "dropped: nothing was written"
    if episode.reward is None:
        missing = [f"{s.name} ({s.reason})" for s in episode.scores if s.missing and s.weight != 0]
        return f"dropped: no score for {', '.join(missing) or 'anything'}"
    return ""


def credit(groups: Sequence[Group], section: AdvantageSection, *, mask_truncated: bool) -> list[list[Sample]]:
    """The advantage of every sampled token, by the recipe's estimator. Masked episodes still count in the baseline."""
    estimator = resolve("advantage", section.name)
    samples = []
    for group in groups:
        rewards_G = torch.tensor([e.reward for e in group.episodes], dtype=torch.float64)
        advantages_G = estimator(rewards_G, std=section.std, leave_one_out=section.leave_one_out)
        members = [
            Sample(episode, _broadcast(episode, float(advantage)))
            for episode, advantage in zip(group.episodes, advantages_G, strict=True)
            if not (mask_truncated and episode.status == Status.TRUNCATED)
        ]
        if members:
            samples.append(members)
    return samples


def _broadcast(episode: Episode, advantage: float) -> tuple[torch.Tensor, ...]:
    return tuple(torch.full((len(turn.response.tokens),), advantage) for turn in episode.turns)


def zero_variance(groups: Sequence[Group]) -> int:
    """How many groups give no signal: all members were paid the same."""
    return sum(len({e.reward for e in group.episodes}) == 1 for group in groups)
