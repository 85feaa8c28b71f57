"""A run goes on with the frames it began with, or says why it cannot: the rule of sampling is on record."""

from pathlib import Path

import pytest

from sensorium.assembly.models import recorded_sampling
from sensorium.models.checkpoint_path import CheckpointSource
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.task_loader import refuse_other_frames
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import CheckpointError
from sensorium.vocabulary.task import Task


def film(**asked: object) -> list[Task]:
    parameters = VideoParameters(frames=8, **asked)  # type: ignore[arg-type]
    return [Task("film/1", (user(Media("video", "0" * 64, parameters=parameters), "What?"),))]


def test_a_run_of_a_version_without_the_record_is_refused_unless_its_tasks_say_the_rule(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).create()
    with pytest.raises(CheckpointError, match=r"task 'film/1'.*'official'.*write 'sampling: middle' into .*recipe\.yaml"):
        refuse_other_frames(directory, recorded_sampling(directory), "official", film())
    directory.source.write_text(CheckpointSource("tiny:qwen2_5_vl").to_json())
    with pytest.raises(CheckpointError, match="an earlier version began it"):
        refuse_other_frames(directory, recorded_sampling(directory), "official", film())
    refuse_other_frames(directory, recorded_sampling(directory), "official", film(sampling="middle"))
    refuse_other_frames(directory, recorded_sampling(directory), "official", [Task("text/1", (user("What?"),))])
    refuse_other_frames(directory, recorded_sampling(directory), "middle", film())


def test_a_run_with_the_record_goes_on_by_its_rule_alone(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path).create()
    directory.source.write_text(CheckpointSource("tiny:qwen2_5_vl", sampling="official").to_json())
    refuse_other_frames(directory, recorded_sampling(directory), "official", film())
    with pytest.raises(CheckpointError, match=r"by 'official'.*'film.1'.*'sampling: official'"):
        refuse_other_frames(directory, recorded_sampling(directory), "middle", film())
