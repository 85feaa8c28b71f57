"""A learner's state that cannot be read is told in one paragraph."""

from pathlib import Path

import pytest

from sensorium.learner.saved_state import read_learner_state, write_learner_state
from sensorium.vocabulary.errors import CheckpointError


def test_a_file_among_the_shards_that_is_none_is_told(tmp_path: Path) -> None:
    write_learner_state({"step": 1}, tmp_path)
    (tmp_path / "shards").mkdir()
    (tmp_path / "shards" / "x.safetensors").write_bytes(b"garbage")
    with pytest.raises(CheckpointError, match="cannot be read"):
        read_learner_state(tmp_path)
