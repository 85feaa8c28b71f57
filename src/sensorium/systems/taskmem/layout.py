"""A run in TaskMem's layout: ``STEP/VIDEO.json``, ``history/VIDEO.json`` and ``global_step_STEP``.

With ``logging.layout: taskmem`` a run writes it as it goes, into its own directory. Of a run without that option:

    python -m sensorium.systems.taskmem.layout RUN FOLDER

The file of a step and video has every attempt and reward, part by part. The history has the latest memory of each clip.
Checkpoints are linked, not copied. Each file is whole or absent. A run that was killed may have files of steps past its
last checkpoint; when it goes on, they are removed and the history is that of the checkpoint.
"""

import hashlib
import json
import re
import sys
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensorium.data.causal_history import Memory
from sensorium.runs.checkpoint_layout import CheckpointFolder
from sensorium.runs.durable import write_whole, writing
from sensorium.runs.episodes import read_groups
from sensorium.runs.run_directory import RunDirectory, step_of
from sensorium.systems.taskmem.memory_rows import LONGEST_NAME
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.vocabulary.episode import Episode, Group, by_name
from sensorium.vocabulary.errors import RecordError, SensoriumError

UNSAFE = re.compile(r"[\x00-\x1f\x7f/\\\ud800-\udfff]|%(?=[0-9A-F]{2})")


class TaskMemLayout:
    """Writes the layout into ``folder``, for the run in ``directory``."""

    def __init__(self, directory: RunDirectory, folder: Path) -> None:
        self.directory, self.folder = directory, folder
        self._written: dict[str, dict[str, Memory]] = {}  # the history on disk, by video

    def begin(self, step: int, planner_state: dict[str, Any]) -> None:
        """Reset the folder to a step: drop later logs, and write history and links as of that step."""
        for later in [path for path in self.folder.glob("*") if path.name.isdecimal() and int(path.name) > step]:
            for log in later.glob("*.json"):
                log.unlink()
            if not any(later.iterdir()):
                later.rmdir()
        known = {file_name(video) for video in latest_history(planner_state)}
        for path in (self.folder / "history").glob("*.json"):
            if path.name not in known:
                path.unlink()
        self._written = {}
        self.write_history(planner_state)
        self.link_checkpoints()

    def write_step(self, step: int, groups: Sequence[Group]) -> None:
        """Write the log of a step's memories, a file for each video."""
        for video, log in step_logs(step, groups).items():
            _write(self.folder / str(step) / file_name(video), log)

    def write_history(self, planner_state: dict[str, Any]) -> None:
        """Write the memories of the videos that have new ones."""
        for video, memories in latest_history(planner_state).items():
            plain = {str(clip): memory for clip, memory in memories.items()}
            if self._written.get(video) != plain:
                _write(self.folder / "history" / file_name(video), plain)
                self._written[video] = plain

    def link_checkpoints(self) -> None:
        """Link every existing checkpoint, and no other."""
        steps = CheckpointFolder(self.directory.checkpoints).complete()
        links = {f"global_step_{step}": self.directory.checkpoint_of(step) for step in steps}
        with writing(self.folder):
            self.folder.mkdir(parents=True, exist_ok=True)
            for old in self.folder.glob("global_step_*"):
                if old.is_symlink() and old.name not in links:
                    old.unlink()
            for name, target in links.items():
                link = self.folder / name
                if self.folder == self.directory.path:
                    target = target.relative_to(self.folder)  # the run may be moved
                if not link.is_symlink() or link.readlink() != target:
                    link.unlink(missing_ok=True)
                    link.symlink_to(target, target_is_directory=True)


def write_layout(run: Path, folder: Path) -> None:
    """Write the current memories, rewards and checkpoints of a run in TaskMem's layout; existing files are replaced.

    Steps whose episodes were thinned out (``logging.full_steps``) have what is left of them.
    """
    directory = RunDirectory(run.absolute())
    steps = CheckpointFolder(directory.checkpoints).complete()
    if not steps:
        raise RecordError(f"'{run}' has no checkpoint, and the memories are part of one.")
    state = Checkpoints(directory.checkpoints, 1).load(steps[-1])["tasks"]
    if state["planner"] != "causal_history":
        raise RecordError(f"'{run}' was planned by '{state['planner']}', which keeps no memories; causal_history does.")
    layout = TaskMemLayout(directory, folder.absolute())
    for path in sorted(directory.episodes.glob("step_*.jsonl")):
        layout.write_step(step_of(path), list(read_groups(path)))
    layout.write_history(state["state"])
    layout.link_checkpoints()


def latest_history(state: dict[str, Any]) -> dict[str, dict[int, Memory]]:
    """The memories of every video, of each clip the latest; clips without one are left out."""
    found: dict[str, dict[int, Memory]] = {}
    for _, video, memories in sorted(state["history"], key=lambda entry: entry[0]):
        found.setdefault(video, {}).update({clip: memory for clip, memory in memories if memory is not None})
    return found


def step_logs(step: int, groups: Sequence[Group]) -> dict[str, dict[str, Any]]:
    """The log of a step's memories, by video."""
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        found[str(group.task.metadata.get("video_id", group.task.id))].append(group)
    return {
        video: {
            "id": members[0].task.id,
            "type": members[0].task.metadata.get("type", "episodic_on_policy"),
            "global_step": step,
            "num_items": sum(len(group.episodes) for group in members),
            "items": [_item(group, episode) for group in members for episode in group.episodes],
        }
        for video, members in found.items()
    }


def file_name(video: str) -> str:
    """The file of a video: ``v1.json``, or ``a%2Fb.json`` for ``a/b``.

    Characters that file names cannot have are percent-encoded, and so is a % that looks like such a code. A digest replaces
    the end of a name that is too long.
    """
    name = UNSAFE.sub(lambda found: "".join(f"%{byte:02X}" for byte in found[0].encode(errors="surrogatepass")), video)
    if len(name.encode()) > LONGEST_NAME:
        digest = hashlib.sha256(video.encode(errors="surrogatepass")).hexdigest()[:32]
        name = f"{name.encode()[: LONGEST_NAME - 33].decode(errors='ignore')}-{digest}"
    return f"{name}.json"


def _item(group: Group, episode: Episode) -> dict[str, Any]:
    asked = "\n".join(message.text for message in group.task.messages)
    return {"input": asked, "response": episode.response, "reward": episode.reward, **by_name(episode.scores)}


def _write(path: Path, content: Any) -> None:
    with writing(path):
        path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        write_layout(Path(sys.argv[1]), Path(sys.argv[2]))
    except IndexError:
        sys.exit(__doc__)
    except SensoriumError as problem:
        sys.exit(str(problem))
