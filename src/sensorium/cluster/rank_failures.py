"""What the answers and failures of ranks mean for the run."""

import re
from collections.abc import Mapping, Sequence

from sensorium.cluster.messages import Answer, error_of
from sensorium.vocabulary.errors import LearnerLost, SensoriumError
from sensorium.workers.versions import refuse_other_versions as refuse_other

WAITED = re.compile(r"Timed out waiting|Connection closed by peer|Watchdog caught collective", re.IGNORECASE)
"""What a rank says that waited for another one: no cause, if that one is silent."""


class SharedError(Exception):
    """An error that every rank has met alike: they are all as they were. ``error`` is what to raise."""

    def __init__(self, error: SensoriumError) -> None:
        super().__init__(str(error))
        self.error = error


def judged(answers: Mapping[int, Answer], size: int, lost: Sequence[str], asked: str, limit_s: float) -> list[Answer]:
    """The answers of all ranks in order; or the error they add up to. ``lost``: how ranks ended, in words.

    Raises SharedError where all ranks can go on, and an error of ours where none can.
    """
    errors = {rank: answer for rank, answer in answers.items() if answer.error}
    if lost:
        raise LearnerLost(lost[0])
    if len(errors) == size and len({answer.kind for answer in errors.values()}) == 1:
        raise SharedError(error_of(errors[0], 0))
    silent = [rank for rank in range(size) if rank not in answers]
    causes = {rank: answer for rank, answer in errors.items() if not (silent and WAITED.search(answer.error))}
    if causes:
        rank, answer = min(causes.items())
        raise error_of(answer, rank)
    if silent:
        key = "start_s" if asked == "open" else "reply_s"
        raise LearnerLost(
            f"of the learner's {size} ranks, {', '.join(map(str, silent))} did not answer '{asked}' within {limit_s:g} s; "
            f"all were ended. Raise cluster.{key} if the model is that slow."
        )
    return [answers[rank] for rank in range(size)]


def refuse_other_versions(answers: Sequence[Answer]) -> None:
    """Refuse ranks that run another version of Python, torch or of this package than the driver."""
    for rank, answer in enumerate(answers):
        refuse_other(answer.versions, f"rank {rank} of the learner", LearnerLost)
