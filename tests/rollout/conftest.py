"""What tests of rollouts share."""

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny


@pytest.fixture(scope="package")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    """A tiny model that sees; nothing trains it."""
    return load_policy(str(make_tiny("qwen2_5_vl", tmp_path_factory.mktemp("tiny"))), store=MediaStore(), device="cpu")
