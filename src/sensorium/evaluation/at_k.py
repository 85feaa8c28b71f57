"""Several samples of one task as one number: the mean, the best, and what the majority says.

A sample that was not judged (it failed, or its judge did) is left out; a task without judged samples has no number.
"""

from collections import Counter
from collections.abc import Sequence

from sensorium.evaluation.sample import Sample


def mean_at_k(samples: Sequence[Sample]) -> float | None:
    """The share of right samples."""
    verdicts = _verdicts(samples)
    return sum(verdicts) / len(verdicts) if verdicts else None


def best_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if any sample is right (pass@k), else 0."""
    verdicts = _verdicts(samples)
    return float(any(verdicts)) if verdicts else None


def majority_at_k(samples: Sequence[Sample]) -> float | None:
    """1 if the answer most samples gave is right, else 0.

    Of answers given equally often the one that was given first wins. A sample without an answer does not vote; if none
    votes, the task is wrong. An answer is as right as the first sample that gave it.
    """
    judged = [sample for sample in samples if sample.correct is not None]
    if not judged:
        return None
    votes = Counter(sample.extracted for sample in judged if sample.extracted is not None)
    if not votes:
        return 0.0
    [(winner, _)] = votes.most_common(1)
    return float(next(sample.correct is True for sample in judged if sample.extracted == winner))


def _verdicts(samples: Sequence[Sample]) -> list[bool]:
    return [sample.correct for sample in samples if sample.correct is not None]
