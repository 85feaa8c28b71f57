"""What a reward term may ask for when it is built."""

from dataclasses import dataclass

from sensorium.judges.client import JudgeClient
from sensorium.media.store import MediaStore


@dataclass(frozen=True)
class RewardContext:
    """Given to a term whose constructor (or function) has a keyword-only parameter ``context``.

    ``store`` gives the pictures, videos and sounds that a task or an environment showed, ``judges`` asks the models of the
    recipe's section ``judges``.
    """

    store: MediaStore
    judges: JudgeClient | None = None
