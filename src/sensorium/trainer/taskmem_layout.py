"""A run in TaskMem's layout: ``history/VIDEO.json``, ``STEP/VIDEO.json`` and ``global_step_STEP``.

    python -m sensorium.trainer.taskmem_layout RUN FOLDER

The history is that of the last checkpoint. The file of a step and video has every attempt and reward, part by part; steps
whose episodes were thinned out (``logging.full_steps``) have what is left of them. Checkpoints are linked, not copied.
"""

import json
import os
import sys
from collections import defaultdict
from pathlib import Path
from typing import Any

from sensorium.record.checkpoint_files import CheckpointFolder
from sensorium.record.durable import write_whole
from sensorium.record.episode_json import read_groups
from sensorium.record.run_directory import RunDirectory, step_of
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.vocabulary.episode import Episode, Group
from sensorium.vocabulary.errors import RecordError, SensoriumError
from sensorium.vocabulary.score import by_name


def write_layout(run: Path, folder: Path) -> None:
    """Write a run's memories, rewards and checkpoints as TaskMem does; what is there already is replaced."""
    directory = RunDirectory(run.absolute())
    steps = CheckpointFolder(directory.checkpoints).complete()
    if not steps:
        raise RecordError(f"'{run}' has no checkpoint, and the memories are part of one.")
    state = Checkpoints(directory.checkpoints, 1).load(steps[-1])["tasks"]
    if state["planner"] != "causal_history":
        raise RecordError(f"'{run}' was planned by '{state['planner']}', which keeps no memories; causal_history does.")
    for video, memories in latest_history(state["state"]).items():
        _write(folder / "history" / f"{video}.json", {str(clip): memory for clip, memory in memories.items()})
    for path in sorted(directory.episodes.glob("step_*.jsonl")):
        for video, log in step_logs(step_of(path), list(read_groups(path))).items():
            _write(folder / str(step_of(path)) / f"{video}.json", log)
    for step in steps:
        link = folder / f"global_step_{step}"
        link.unlink(missing_ok=True)
        os.symlink(directory.checkpoint_of(step), link)


def latest_history(state: dict[str, Any]) -> dict[str, dict[int, str]]:
    """The memories of every video, of each clip the latest; clips without one are left out."""
    found: dict[str, dict[int, str]] = {}
    for _, video, memories in sorted(state["history"], key=lambda entry: entry[0]):
        found.setdefault(video, {}).update({clip: memory for clip, memory in memories if memory is not None})
    return found


def step_logs(step: int, groups: list[Group]) -> dict[str, dict[str, Any]]:
    """What became of a step's memories, by video."""
    found: dict[str, list[Group]] = defaultdict(list)
    for group in groups:
        found[str(group.task.metadata.get("video_id", group.task.id))].append(group)
    return {
        video: {
            "id": members[0].task.id,
            "type": members[0].task.metadata.get("type", "episodic_on_policy"),
            "global_step": step,
            "items": [_item(group, episode) for group in members for episode in group.episodes],
        }
        for video, members in found.items()
    }


def _item(group: Group, episode: Episode) -> dict[str, Any]:
    asked = "\n".join(message.text for message in group.task.messages)
    return {"input": asked, "response": episode.response, "reward": episode.reward, **by_name(episode.scores)}


def _write(path: Path, content: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, json.dumps(content, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    try:
        write_layout(Path(sys.argv[1]), Path(sys.argv[2]))
    except IndexError:
        sys.exit(__doc__)
    except SensoriumError as problem:
        sys.exit(str(problem))
