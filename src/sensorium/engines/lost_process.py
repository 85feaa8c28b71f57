"""The error of an engine whose process has ended."""

from sensorium.vocabulary.errors import EngineLost
from sensorium.workers.hosts import HostedProcess
from sensorium.workers.python_process import last_words


def process_lost(process: HostedProcess) -> EngineLost:
    """What to raise when an engine's process is gone."""
    return EngineLost(
        f"the engine process (pid {process.pid}) {process.ending()}, so nothing more can be sampled. Resume the run from "
        f"its last checkpoint.{last_words(process.log_text())}"
    )
