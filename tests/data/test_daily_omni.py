"""Daily-Omni, read from a look-alike with real files."""

import gzip
import io
import json
import shutil
import tarfile
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import table_columns
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.evaluation.evaluate import summarize
from sensorium.recipe.registry import build
from sensorium.systems.audio_visual.generated import make_daily_omni
from sensorium.systems.audio_visual.sources import COLUMNS, LETTER, DailyOmni, lettered
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
    assert task.messages[0].text == "\n".join([row["Question"], *row["Choice"]]) + f" {LETTER}"
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
    with pytest.raises(RecipeError, match=r"option 'sound' .*\{use_audio_in_video: true\}"):
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
    with pytest.raises(TaskError, match="folder 'Videos'"):
        opened(folder)


def pack(folder: Path, *more: tarfile.TarInfo, mode: str = "w") -> None:
    """Put the folder Videos into Videos.tar, with some other members."""
    with tarfile.open(folder / "Videos.tar", mode) as archive:  # type: ignore[call-overload]
        archive.add(folder / "Videos", "Videos")
        for member in more:
            archive.addfile(member)
    shutil.rmtree(folder / "Videos")


def test_the_archive_is_unpacked_once_and_finished_after_a_kill(folder: Path) -> None:
    shown = opened(folder)[5].messages[0]
    pack(folder)
    assert opened(folder)[5].messages[0] == shown
    clip, kept = folder / "Videos/v1/v1_video.mp4", folder / "Videos/v0/v0_video.mp4"
    whole, touched = clip.read_bytes(), kept.stat().st_mtime_ns
    clip.unlink()
    opened(folder)
    assert not clip.exists(), "the marker says that it was unpacked"
    clip.write_bytes(whole[:10])
    (folder / ".Videos.tar.unpacked").unlink()
    opened(folder)
    assert (clip.read_bytes(), kept.stat().st_mtime_ns) == (whole, touched)
    assert not list(folder.rglob("*.mp4.*"))


def test_an_archive_with_links_or_ways_outside_or_only_half_of_itself_is_refused(folder: Path) -> None:
    whole = shutil.copytree(folder, folder.parent / "whole")
    link, far = tarfile.TarInfo("Videos/link"), tarfile.TarInfo("../far.mp4")
    link.type, link.linkname = tarfile.SYMTYPE, "/etc"
    hard = tarfile.TarInfo("Videos/hard")
    hard.type, hard.linkname = tarfile.LNKTYPE, "Videos/v0/v0_video.mp4"
    for member in (link, hard, far, tarfile.TarInfo("/far.mp4")):
        shutil.rmtree(folder)
        shutil.copytree(whole, folder)
        pack(folder, member)
        with pytest.raises(TaskError, match=r"Videos\.tar: its member"):
            opened(folder)
        assert not (folder / "Videos").exists(), "nothing is written"
        assert not (folder.parent / "far.mp4").exists()
    packed = (folder / "Videos.tar").read_bytes()
    for broken in (packed[: len(packed) // 2], b"no tar", gzip.compress(packed)):
        (folder / "Videos.tar").write_bytes(broken)
        with pytest.raises(TaskError, match=r"Videos\.tar: cannot unpack"):
            opened(folder)
        assert not (folder / ".Videos.tar.unpacked").exists()


def test_an_archive_whose_holes_unpack_to_too_much_is_refused(folder: Path) -> None:
    """A sparse member is a few bytes in the archive and as large as it states on the disk."""
    holes = tarfile.TarInfo("Videos/large.mp4")
    table = b"1\n0\n0\n".ljust(512, b"\0")
    holes.size, sparse = len(table), {"major": "1", "minor": "0", "realsize": str(2**45), "name": "Videos/large.mp4"}
    holes.pax_headers = {f"GNU.sparse.{key}": value for key, value in sparse.items()}
    with tarfile.open(folder / "Videos.tar", "w", format=tarfile.PAX_FORMAT) as archive:
        archive.addfile(holes, io.BytesIO(table))
    with pytest.raises(TaskError, match="would unpack to"):
        opened(folder)
    assert not (folder / "Videos/large.mp4").exists()


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
