"""How old what a step trains on is: updates that the policy has had since it wrote it."""

from collections import Counter
from collections.abc import Sequence

from sensorium.learner.credited_episode import CreditedEpisode


def staleness_metrics(schedule: str, samples: Sequence[Sequence[CreditedEpisode]], version: int) -> dict[str, float]:
    """Mean and largest age of what is trained on by weights of ``version``; nothing where it cannot have any.

    With the asynchronous schedule they are of tokens, and ``staleness/share_N`` is the share of tokens that are N updates
    old: of one response some may be older than others.
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
