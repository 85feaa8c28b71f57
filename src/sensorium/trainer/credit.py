"""From scored groups to samples: the advantage of every sampled token, and what a critic is taught."""

import inspect
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import NoReturn

import torch

from sensorium.algorithms.episodes import Credit, Episodes
from sensorium.algorithms.threshold import optimize_threshold
from sensorium.learner.assessment import Assessment
from sensorium.learner.credited_episode import CreditedEpisode, CriticValues
from sensorium.learner.positions import find_positions
from sensorium.recipe.algorithm_sections import AdvantageSection, AlgorithmSection, KLSection
from sensorium.recipe.names import resolve
from sensorium.recipe.traits import estimator_traits
from sensorium.trainer.placement import place
from sensorium.vocabulary.episode import Group, Segment, Status


def credit(
    groups: Sequence[Group],
    assessment: Assessment,
    algorithm: AlgorithmSection,
    *,
    mask_truncated: bool = False,
    greedy: Mapping[str, float] | None = None,
) -> list[list[CreditedEpisode]]:
    """Samples by the recipe's estimator. Masked truncated episodes still count in baselines, but are not trained on."""
    if not groups:
        return []
    episodes = place(groups, assessment, algorithm.kl, greedy)
    if not algorithm.masked:  # the estimators then see all positions as the model's own
        episodes = replace(episodes, written_P=torch.ones_like(episodes.written_P))
    found = estimate(episodes, algorithm.advantage)
    samples = iter(_samples(groups, assessment, found, observed=not algorithm.loss_mask))
    kept = [
        [s for s in (next(samples) for _ in group.episodes) if not (mask_truncated and _truncated(s))] for group in groups
    ]
    return [members for members in kept if members]


def groups_with_signal(
    groups: Sequence[Group], section: AdvantageSection, greedy: Mapping[str, float] | None = None
) -> frozenset[str]:
    """Ids of the groups in which the estimator gives any token an advantage: asked of the estimator, so both agree.

    Where it does not compare groups, those whose members were paid differently. A KL in the reward is no signal.
    """
    if not groups:
        return frozenset()
    traits = estimator_traits(section.name)
    asked = section if traits.compares or traits.greedy else AdvantageSection(name="grpo", std=False)
    positions = find_positions([e for group in groups for e in group.episodes], _no_observation)
    found = estimate(place(groups, Assessment(positions), KLSection(), greedy if traits.greedy else None), asked)
    moved_S = torch.zeros(len(positions.stretches), dtype=torch.bool)
    moved_S[positions.sequences_P[found.advantages_P != 0]] = True
    moved = moved_S.split([len(group.episodes) for group in groups])
    return frozenset(group.id for group, members in zip(groups, moved, strict=True) if bool(members.any()))


def estimate(episodes: Episodes, section: AdvantageSection) -> Credit:
    """The named estimator with those of the recipe's settings that it takes, and the post-step."""
    function = resolve("advantage", section.name, "algorithm.advantage.name")
    settings = section.model_dump()
    taken = {key: settings[key] for key in inspect.signature(function).parameters if key in settings}
    found: Credit = function(episodes, **taken)
    return optimize_threshold(episodes, found) if section.post == "optimize_threshold" else found


def _samples(groups: Sequence[Group], assessment: Assessment, found: Credit, *, observed: bool) -> list[CreditedEpisode]:
    """Cut the step's vectors back into episodes and turns; with ``observed`` into observations, too."""
    episodes = [episode for group in groups for episode in group.episodes]
    positions, values_P, targets_P = assessment.positions, assessment.values_P, found.targets_P
    lengths = [sum(stretch.length for stretch in several) for several in positions.stretches]
    samples, start = [], 0
    for episode, length, stretches in zip(episodes, lengths, positions.stretches, strict=True):
        advantages_P = found.advantages_P[start : start + length].float()
        parts = advantages_P.split([stretch.length for stretch in stretches])
        written, between = (
            tuple(part for part, stretch in zip(parts, stretches, strict=True) if stretch.written == own)
            for own in (True, False)
        )
        critic_values = None
        if values_P is not None and targets_P is not None:
            critic_values = CriticValues(
                values_P[start : start + length].float(), targets_P[start : start + length].float()
            )
        samples.append(CreditedEpisode(episode, written, critic_values, between if observed else ()))
        start += length
    return samples


def _no_observation(segment: Segment) -> NoReturn:
    raise AssertionError("estimators that compare rewards look at no observation")


def _truncated(sample: CreditedEpisode) -> bool:
    return sample.episode.status == Status.TRUNCATED
