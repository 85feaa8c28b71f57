"""Daily-Omni, read from a look-alike with real files."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from sensorium.evaluation.evaluate import summarize
from sensorium.media.audio import DecodedAudio
from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.media.video import DecodedVideo
from sensorium.recipe.names import build
from sensorium.tasks.choices import lettered
from sensorium.tasks.daily_omni import COLUMNS, DailyOmni
from sensorium.tasks.lookalikes import make_daily_omni
from sensorium.tasks.source import table_columns
from sensorium.vocabulary import Episode, Group, Score, Status
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("daily")
    make_daily_omni(folder, 12)
    return folder


@pytest.fixture
def folder(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "daily")


def opened(folder: Path, **options: Any) -> DailyOmni:
    built = build("source", "daily_omni", {"path": str(folder), **options}, "tasks.evaluate.0", store=MediaStore())
    assert isinstance(built, DailyOmni)
    return built


def test_a_question_shows_the_video_and_sounds_the_wave(folder: Path) -> None:
    source = opened(folder, video={"frames": 32})
    task = source[5]
    row = json.loads((folder / "qa.json").read_text())[5]
    lines = task.messages[0].text.splitlines()
    assert lines[:5] == [row["Question"], *row["Choice"]]
    assert "<answer>" in lines[5]
    assert task.answer == row["Answer"]
    video, sound = Decoder(source.store).get_many(task.messages[0].media)
    assert isinstance(video, DecodedVideo)
    assert video.frames.shape[0] == 32
    assert isinstance(sound, DecodedAudio)
    assert len(sound.samples) == 32000
    assert len(source) == 12
    assert len(opened(folder, limit=3)) == 3


def test_the_wave_is_heard_inside_the_video_where_that_is_asked_for(folder: Path) -> None:
    blocks, one = (
        opened(folder)[5].messages[0].media,
        opened(folder, video={"use_audio_in_video": True})[5].messages[0].media,
    )
    assert [item.kind for item in one] == ["video"]
    assert one[0].sound == blocks[1]
    with pytest.raises(RecipeError, match=r"option 'sound' does nothing with video: \{use_audio_in_video: true\}"):
        opened(folder, video={"use_audio_in_video": True}, sound={"end": 1.0})


def test_categories_are_the_columns_of_the_published_table(folder: Path) -> None:
    source = opened(folder)
    tasks = [source[i] for i in range(len(source))]
    episode = Episode("e", "t", "g", 0, (), (), Status.FINISHED, scores=(Score("choice", 1.0, correct=True),))
    groups = [Group(str(i), task, (episode,)) for i, task in enumerate(tasks[::-1])]
    summary = summarize(groups, "daily_omni", columns=table_columns([source]))
    assert list(summary["categories"]) == list(COLUMNS)
    assert list(summary["columns"].values()) == [
        "AV alignment", "comparative", "context", "sequence", "inference", "reasoning",
    ]  # fmt: skip
    assert all((found["accuracy"], found["tasks"]) == (1.0, 2) for found in summary["categories"].values())


def test_several_questions_about_one_video_share_its_medium(folder: Path) -> None:
    source = opened(folder)
    assert len({media for i in range(len(source)) for media in source[i].messages[0].media}) == 8


@pytest.mark.parametrize(
    ("change", "what"),
    [
        ({"Question": ""}, "'Question' is missing"),
        ({"Choice": ["A. one"]}, "answer blind"),
        ({"Choice": "A"}, "'Choice' must be a list"),
        ({"Answer": None}, "'Answer' is missing"),
        ({"video_id": "v9"}, "cannot read the video"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_row(folder: Path, change: dict[str, Any], what: str) -> None:
    rows = json.loads((folder / "qa.json").read_text())
    rows[2] |= change
    (folder / "qa.json").write_text(json.dumps(rows))
    with pytest.raises((TaskError, MediaError), match=rf"qa\.json, row 2.*{what}"):
        opened(folder)[2]


def test_a_missing_wave_or_folder_is_named(folder: Path) -> None:
    (folder / "Videos" / "v1" / "v1_audio.wav").unlink()
    with pytest.raises(MediaError, match=r"qa\.json, row 1, sound 'v1': cannot read the sound"):
        opened(folder)[1]
    (folder / "Videos").rename(folder / "videos.unpacked")
    with pytest.raises(TaskError, match="no folder 'Videos'"):
        opened(folder)


@pytest.mark.parametrize(
    ("options", "shown"),
    [
        (["A. x", "B. y"], ["A. x", "B. y"]),
        (["(A) x", "(B) y"], ["(A) x", "(B) y"]),
        (["x", " y "], ["A. x", "B. y"]),
        (["A dog", "A cat"], ["A. A dog", "B. A cat"]),
    ],
)
def test_options_are_lettered_where_they_are_not(options: list[str], shown: list[str]) -> None:
    assert lettered(options) == shown
