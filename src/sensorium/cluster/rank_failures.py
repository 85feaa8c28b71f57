"""What the failures of ranks mean for the run."""

from collections.abc import Mapping, Sequence

from sensorium.cluster.messages import Answer, error_of
from sensorium.vocabulary.errors import LearnerLost, SensoriumError


def common_error(errors: Mapping[int, Answer], ranks: int) -> SensoriumError | None:
    """The error that every rank has met, such as an update that is not finite; None if they differ."""
    if len(errors) == ranks and len({answer.kind for answer in errors.values()}) == 1:
        return error_of(errors[0], 0)
    return None


def refuse_other_versions(answers: Sequence[Answer]) -> None:
    """Refuse ranks that run another version of Python, torch or of this package than the driver."""
    from sensorium.cluster.rank import versions

    own = versions()
    for rank, answer in enumerate(answers):
        for name, version in answer.versions.items():
            if version != own[name]:
                raise LearnerLost(
                    f"rank {rank} of the learner runs {name} {version}, and the driver {own[name]}. Their numbers and "
                    "messages may differ; install the same versions on all machines of the cluster."
                )
