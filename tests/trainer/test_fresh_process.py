"""What only a fresh interpreter shows of a run without clips: what it imports, and what it leaves in the temp folder."""

import os
import subprocess
import sys
from pathlib import Path

CODE = """
import sys
import sensorium.trainer.run, sensorium.engines.native.engine
from sensorium.models.checkpoint_place import find_checkpoint
print(find_checkpoint("tiny:qwen2"))
print("av" in sys.modules)
"""


def test_nothing_of_pyav_is_imported_and_a_tiny_model_is_removed_at_the_end(tmp_path: Path) -> None:
    surroundings = os.environ | {"TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", CODE], env=surroundings, capture_output=True, text=True, check=True)
    made, imported = done.stdout.split()
    assert Path(made).parent == tmp_path
    assert not list(tmp_path.glob("sensorium-*"))
    assert imported == "False"
