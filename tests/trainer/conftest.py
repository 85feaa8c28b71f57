"""With ``LEARNER=thread`` in the environment, the tests of the trainer run with a learner that shares nothing with it."""

import os

import pytest

from sensorium.trainer import run
from tests.trainer.threaded import ThreadedLearner


@pytest.fixture(autouse=True)
def chosen_learner(monkeypatch: pytest.MonkeyPatch) -> None:
    """The learner of this process, unless another one is asked for."""
    if os.environ.get("LEARNER") == "thread":
        monkeypatch.setattr(run, "local_learner", ThreadedLearner)
