"""IntentTrain and IntentBench, read from look-alikes with real files."""

import json
import shutil
import time
import zipfile
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.decoder import Decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.recipe.registry import build
from sensorium.systems.audio_visual.generated import make_intent
from sensorium.systems.audio_visual.sources import Intent
from sensorium.vocabulary.content import Text
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import MediaError, RecipeError, TaskError
from tests.data.clips import numbered


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("intent")
    make_intent(folder, 6, problem_types=["multiple choice", "judge", "emer_ov_mc"])
    return folder


@pytest.fixture
def train(made: Path, tmp_path: Path) -> Path:
    return shutil.copytree(made, tmp_path / "intent")


def opened(folder: Path, **options: Any) -> Intent:
    built = build("source", "intent", {"path": str(folder), **options}, "tasks.train.0", store=MediaStore())
    assert isinstance(built, Intent)
    return built


def rewrite(folder: Path, change: dict[str, Any] | None, row: int = 0, manifest: str = "emer_rewrite.json") -> None:
    rows = json.loads((folder / manifest).read_text())
    rows[row] = (
        None if change is None else {key: value for key, value in {**rows[row], **change}.items() if value is not ...}
    )
    (folder / manifest).write_text(json.dumps(rows))


def test_the_sound_is_heard_inside_the_video_where_that_is_asked_for(train: Path) -> None:
    (video,) = opened(train, video={"use_audio_in_video": True})[0].messages[0].media
    assert video.sound == opened(train)[0].messages[0].media[1]
    with pytest.raises(RecipeError, match="contradict each other"):
        opened(train, video={"use_audio_in_video": True}, with_sound=False)


def test_only_allowed_types_are_read_and_by_default_multiple_choice(train: Path) -> None:
    assert len(opened(train)) == 4
    assert {task.metadata["type"] for task in map(opened(train).__getitem__, range(4))} == {"multiple choice"}
    assert len(opened(train, problem_types=["multiple choice", "judge"])) == 8
    assert len(opened(train, problem_types=["judge"], manifests=["emer_rewrite.json"], limit=1)) == 1
    with pytest.raises(RecipeError, match="did you mean 'multiple choice'"):
        opened(train, problem_types=["multiple choise"])
    with pytest.raises(TaskError, match="no row has a problem_type among numerical"):
        opened(train, problem_types=["numerical"])


def test_video_and_sound_are_two_blocks_before_the_question(train: Path) -> None:
    source = opened(train, video={"frames": 8}, sound={"sample_rate": 8000})
    task = source[0]
    text = task.messages[0].content[2]
    assert [media.kind for media in task.messages[0].media] == ["video", "sound"]
    assert isinstance(text, Text)
    row = json.loads((train / "emer_rewrite.json").read_text())[0]
    asked = "First reason briefly between <think> </think> tags, then output only the single option letter (e.g., A, B, C, "
    asked += "D, ...) between <answer> </answer> tags. Format example: <think>your reasoning</think><answer>A</answer>"
    assert text.text == row["problem"] + " Options:\n" + "\n".join(row["options"]) + " " + asked
    assert task.answer == row["answer"] in "ABCD"
    clip, heard = Decoder(source.store).get_many(task.messages[0].media)
    assert isinstance(clip, DecodedVideo)
    assert clip.frames.shape == (8, 336, 336, 3)  # enlarged to the least that Qwen models are shown
    assert isinstance(heard, DecodedAudio)
    assert (heard.sample_rate, round(heard.duration_s, 1)) == (8000, 2.0)
    assert task.messages[0].media[0].parameters == VideoParameters(frames=8)


def test_every_row_of_a_look_alike_can_be_read_and_seen(train: Path) -> None:
    source = opened(train, problem_types=["multiple choice", "judge", "emer_ov_mc"], video={"frames": 2})
    tasks = [source[i] for i in range(len(source))]
    assert len({task.id for task in tasks}) == len(tasks) == 12
    media = [item for task in tasks for item in task.messages[0].media]
    assert not [found for found in Decoder(source.store).get_many(media) if isinstance(found, MediaError)]
    endings = {task.metadata["type"]: task.messages[0].text.splitlines()[-1] for task in tasks}
    assert len(set(endings.values())) == 3, "each type is told what to give as its answer"


def test_the_benchmark_has_one_manifest(tmp_path: Path) -> None:
    make_intent(tmp_path, 5, bench=True)
    assert {source_task.metadata["manifest"] for source_task in map(opened(tmp_path).__getitem__, range(1))} == {"qa.json"}
    types = ["multiple choice", "emer_ov_mc", "numerical", "judge", "free-form"]
    assert len(opened(tmp_path, problem_types=types)) == 5


def test_the_sound_may_be_left_out_and_the_instruction_replaced(train: Path) -> None:
    task = opened(train, with_sound=False, instruction="Just the letter.")[0]
    assert [media.kind for media in task.messages[0].media] == ["video"]
    assert task.messages[0].text.endswith("\nJust the letter.")


@pytest.mark.parametrize("written", [repr, json.dumps])
def test_options_may_be_the_text_of_a_list(train: Path, written: Any) -> None:
    as_list = opened(train)[0].messages[0].text
    options = json.loads((train / "emer_rewrite.json").read_text())[0]["options"]
    rewrite(train, {"options": written(options)})
    assert opened(train)[0].messages[0].text == as_list
    for wrong in ("[" * 5000, "__import__('os')", "{'A': 1}", "['A', 2]", "A. one B. two"):
        rewrite(train, {"options": wrong})
        with pytest.raises(TaskError, match="'options' must be a list"):
            opened(train)[0]


def test_the_archive_is_unpacked_once_and_again_when_it_changes(train: Path) -> None:
    opened(train)
    clip = train / "videos" / "emer_rewrite_0.mp4"
    (train / "emer_rewrite_1.mp4").unlink()
    touched = clip.stat().st_mtime_ns
    opened(train)
    assert not (train / "emer_rewrite_1.mp4").exists(), "the marker says it was unpacked"
    time.sleep(0.01)
    with zipfile.ZipFile(train / "videos.zip", "a") as archive:
        archive.writestr("videos/more.mp4", b"more")
    opened(train)
    assert (train / "videos" / "more.mp4").read_bytes() == b"more"
    assert (train / "emer_rewrite_1.mp4").exists()
    assert clip.stat().st_mtime_ns == touched, "what is whole is left alone"


def test_an_unpacking_that_was_killed_is_finished(train: Path) -> None:
    opened(train)
    (train / ".videos.zip.unpacked").unlink()
    clip = train / "videos" / "emer_rewrite_0.mp4"
    whole = clip.read_bytes()
    clip.write_bytes(whole[:10])
    opened(train)
    assert clip.read_bytes() == whole
    assert not list(train.rglob("*.mp4.*"))


def test_archives_that_are_broken_or_reach_outside_are_refused(train: Path) -> None:
    with zipfile.ZipFile(train / "videos.zip", "w") as archive:
        archive.writestr("../outside.mp4", b"x")
    with pytest.raises(TaskError, match=r"videos\.zip: its member '\.\./outside\.mp4'"):
        opened(train)
    (train / "videos.zip").write_bytes(b"PK broken")
    with pytest.raises(TaskError, match=r"videos\.zip: cannot unpack"):
        opened(train)


@pytest.mark.parametrize(
    ("change", "what"),
    [
        (None, "a row is an object"),
        ({"problem": ""}, "'problem' is missing"),
        ({"answer": ...}, "'answer' is missing"),
        ({"options": []}, "answer blind"),
        ({"options": "A. yes"}, "'options' must be a list"),
        ({"video": ...}, "neither 'video' nor 'path'"),
        ({"video": "gone.mp4"}, "no video 'gone.mp4'"),
        ({"data_type": "image"}, "data_type 'image'"),
    ],
)
def test_a_bad_row_is_an_error_that_names_file_and_row(train: Path, change: dict[str, Any] | None, what: str) -> None:
    rewrite(train, change)
    source = opened(train)
    with pytest.raises(TaskError, match=rf"emer_rewrite\.json, row 0: .*{what}"):
        source[0]
    drawn = TaskStream([source], [1], seed=0, shuffle=False, on_bad_row="skip").draw(0, 3)
    assert [skip.row for skip in drawn.skipped] == [0]


def test_a_video_without_sound_is_found_when_decoded_and_named(train: Path) -> None:
    source = opened(train)
    (train / "videos" / "emer_rewrite_0.mp4").write_bytes(encode_clip(numbered(8)))
    found = Decoder(source.store).get_many(source[0].messages[0].media)
    assert isinstance(found[0], DecodedVideo)
    assert isinstance(found[1], MediaError)
    assert "emer_rewrite.json, row 0, sound of 'emer_rewrite_0.mp4': has no audio track" in str(found[1])


def test_folders_and_manifests_that_are_not_there_are_named(tmp_path: Path, train: Path) -> None:
    with pytest.raises(TaskError, match=r"holds none of emer_rewrite\.json"):
        opened(tmp_path / "nowhere")
    with pytest.raises(TaskError, match=r"gone\.json: cannot read"):
        opened(train, manifests=["gone.json"])
    for body, what in (("{", "no JSON"), ("{}", "a list of rows"), ('[{"answer": "A", "answer": "B"}]', "'answer'")):
        (train / "bad.json").write_text(body)
        with pytest.raises(TaskError, match=rf"bad\.json: .*{what}"):
            opened(train, manifests=["bad.json"])


@pytest.mark.parametrize("number", [float("nan"), float("inf")])
def test_an_answer_that_is_no_finite_number_is_a_bad_row(number: float, train: Path) -> None:
    rewrite(train, {"answer": number, "unread": number})
    source = opened(train)
    with pytest.raises(TaskError, match=r"emer_rewrite\.json, row 0: 'answer'"):
        source[0]
    rewrite(train, {"answer": 7})
    assert opened(train)[0].answer == "7", "what is in a field that nobody reads does no harm"


def test_a_look_alike_is_the_same_every_time(tmp_path: Path) -> None:
    for name in ("one", "two"):
        make_intent(tmp_path / name, 2)
    for file in ("emer_rewrite.json", "social_iq_v2_rewrite.json", "videos.zip"):
        assert (tmp_path / "one" / file).read_bytes() == (tmp_path / "two" / file).read_bytes()
