"""Tasks of captions: CapRL's rows, generated pictures and videos with questions, and which questions are kept."""

import io
import json
import threading
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow
import pytest
from PIL import Image
from pyarrow import parquet

from sensorium.cli.main import main
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.video import decode_video
from sensorium.rewards.terms import timestamp_format
from sensorium.systems.caprl.caption_rows import CaptionRows, question_of
from sensorium.systems.caprl.generated import CaptionedShapes, CaptionReading
from sensorium.systems.caprl.terms import Reading
from sensorium.vocabulary.decoding import FrameRule, VideoParameters
from sensorium.vocabulary.errors import MediaError, TaskError

from ..services import text_reader

ASKED = [
    {"question": "Which colour?", "choices": ["A. blue", "B. red"], "answer": "B"},
    {"question": "Which sky?", "choices": ["blue", "green"], "answer": "blue"},
]


def png(colour: str) -> bytes:
    body = io.BytesIO()
    Image.new("RGB", (32, 32), colour).save(body, "PNG")
    return body.getvalue()


def picture_rows(path: Path) -> Path:
    rows = [
        {
            "id": f"p{i}",
            "image": {"bytes": png(colour), "path": None},
            "prompt": [{"role": "user", "content": "<image>Describe."}],
            "data_source": "image_caption_rl",
            "reward_model": {"style": "rule", "ground_truth": json.dumps(ASKED) if i else ASKED},
        }
        for i, colour in enumerate(["red"])
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), path)
    return path


def test_caprl_video_and_image_rows(tmp_path: Path) -> None:
    (tmp_path / "a.mp4").write_bytes(encode_clip(np.zeros((4, 32, 32, 3), np.uint8), 2))
    row: dict[str, Any] = {
        "prompt": [{"role": "user", "content": "<video>\nDescribe it with timestamps."}],
        "videos": ["a.mp4"],
        "data_source": "video_caption_rl",
        "reward_model": {"ground_truth": ASKED},
    }
    broken = row | {"reward_model": {"ground_truth": [{"question": "?", "choices": ["x"], "answer": "A"}]}}
    lines = [row, broken, row | {"videos": ["gone.mp4"]}]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = CaptionRows(str(tmp_path / "rows.jsonl"), MediaStore(), video={"fps": 2.0})
    task = source[0]
    assert [block.kind for block in task.messages[0].media] == ["video"]
    assert task.messages[0].text.strip() == "Describe it with timestamps."
    assert task.answer is None
    assert task.metadata["questions"][0] == {"question": "Which colour?", "choices": ["blue", "red"], "answer": "B"}
    with pytest.raises(TaskError, match=r"row 1: reward_model\.ground_truth: .*2 to 25 options"):
        source[1]
    with pytest.raises(MediaError, match="gone"):
        source[2]
    (picture,) = CaptionRows(str(picture_rows(tmp_path / "rows.parquet")), MediaStore())
    assert (picture.id, [block.kind for block in picture.messages[0].media]) == ("p0", ["picture"])


def test_questions_with_a_key_twice_are_a_bad_row(tmp_path: Path) -> None:
    truth = json.dumps(ASKED).replace('"answer"', '"answer": "A", "answer"')
    Image.new("RGB", (32, 32)).save(tmp_path / "red.png")
    row = {"id": "p", "image": "red.png", "prompt": "<image>", "reward_model": {"ground_truth": truth}}
    (tmp_path / "rows.jsonl").write_text(json.dumps(row))
    with pytest.raises(TaskError, match=r"row 0: reward_model\.ground_truth: .*'answer'"):
        CaptionRows(str(tmp_path / "rows.jsonl"), MediaStore())[0]


def test_pictures_and_their_questions_agree_and_splits_share_nothing() -> None:
    store = MediaStore()
    for kind in ("picture", "video"):
        seen = {}
        for split in ("train", "test"):
            source = CaptionedShapes(store=store, kind=kind, split=split, size=64, telling=0.5)  # type: ignore[arg-type]
            tasks = [source[i] for i in range(64)]
            seen[split] = {str(task.answer).rpartition("]")[2].strip() for task in tasks}
            for task in tasks:
                answers = [question_of(raw) for raw in task.metadata["questions"]]
                assert all(question.choices[question.answer] in str(task.answer) for question in answers)
                assert timestamp_format(task.demonstration[0]) == float(kind == "video")
            assert {" shape " in task.demonstration[0] for task in tasks} == {True, False}
        assert not seen["train"] & seen["test"]


def test_a_video_shows_its_thing_from_its_second_on() -> None:
    store = MediaStore()
    task = CaptionedShapes(store=store, kind="video", size=1)[0]
    (media,) = task.messages[0].media
    assert isinstance(media.parameters, VideoParameters)
    asked = media.parameters.resolved(FrameRule(multiple=32))
    clip = decode_video(store.source_of(media), asked, "clip", store.limits)
    assert clip.frames.shape == (10, 64, 64, 3), "frames stay as small as pictures"
    second = int(str(task.answer)[5])
    moved = [float(np.abs(frame.astype(int) - clip.frames[0]).max()) > 60 for frame in clip.frames]
    assert moved == [time_s >= second for time_s in clip.times_s.tolist()]


def test_600_held_out_tasks_show_500_different_pictures() -> None:
    source = CaptionedShapes(store=MediaStore(), split="test", size=600)
    assert len({source[i].messages[0].media[0].hash for i in range(600)}) >= 500


def test_swapped_pictures_are_no_better_than_chance() -> None:
    own = CaptionedShapes(store=MediaStore(), split="test", size=512)
    swapped = CaptionedShapes(store=MediaStore(), split="test", size=512, picture="swapped")
    assert own[0].messages[0].media != swapped[0].messages[0].media
    same: Counter[str] = Counter()
    for i in range(512):
        other = str(own[(i + 257) % 512].answer).split()
        same.update(name for name, word in own.scene(i).facts.items() if word in other)
    assert all(0.15 < same[name] / 512 < 0.4 for name in ("colour", "shape"))


@pytest.mark.parametrize(
    "options", [{}, {"wording": "free"}, {"choices": [2, 3, 4]}, {"form": "open"}, {"form": "spelled"}]
)
def test_a_reader_is_taught_what_the_caption_tells(options: dict[str, Any]) -> None:
    source = CaptionReading(store=MediaStore(), kind="video", size=400, **options)
    letters: Counter[Any] = Counter()
    for i in range(400):
        task, told = source[i], source.parts(i)
        caption, _, *shown = task.messages[0].text.split("\n")
        words = caption.replace("[00:0", " ").replace("[0:0", " ").translate(str.maketrans(',]"', "   ")).split()
        facts = {name: value in words for name, value in source.scene(i).facts.items()}
        assert facts == {name: name in told for name in facts}
        letters[task.answer] += 1
        assert task.demonstration == (task.answer,)
        if options.get("form") == "open":
            assert not shown
            assert task.answer == "can not answer" or task.answer in words
        else:
            right = next((line for line in shown[:-1] if line[3:] in words), shown[-1])
            assert task.answer == (right if options.get("form") == "spelled" else right[0])
    if not options:
        assert set(letters) == set("ABCDE")
        assert max(letters[letter] for letter in "ABCD") < 2 * min(letters[letter] for letter in "ABCD")


def test_a_reader_of_plain_captions_is_asked_as_the_service_asks_it() -> None:
    scene, task = CaptionReading(store=MediaStore(), size=1, telling=1.0).scene(0), CaptionReading(store=MediaStore())[0]
    asked = [Reading("reader", draws=64, prompt="short").requests(scene.caption(), scene.questions())]
    assert task.messages[0].text.split("\n")[1:] in [one.messages[0].text.split("\n")[1:] for one, _ in asked[0]]


def test_the_answer_stays_true_where_the_caption_is_another() -> None:
    own, blank, swapped = (
        CaptionReading(store=MediaStore(), size=64, telling=1.0, caption=caption)  # type: ignore[arg-type]
        for caption in ("own", "blank", "swapped")
    )
    tasks = {source.caption: [source[i] for i in range(64)] for source in (own, blank, swapped)}
    heads = {name: [task.messages[0].text.split("\n")[0] for task in found] for name, found in tasks.items()}
    assert len({tuple(task.answer for task in found) for found in tasks.values()}) == 1
    assert set(heads["blank"]) == {'""'}
    assert heads["swapped"] == heads["own"][33:] + heads["own"][:33]


def test_a_reader_is_asked_about_chosen_facts_only() -> None:
    source = CaptionReading(store=MediaStore(), kind="video", size=32, facts=["second"])
    assert {source[i].messages[0].text.split("\n")[1] for i in range(32)} == {"When does it come?"}
    with pytest.raises(TaskError, match="no fact 'second' of a picture"):
        CaptionReading(store=MediaStore(), facts=["second"])


@pytest.mark.parametrize(
    "wrong", [{"form": "opne"}, {"wording": "other"}, {"prompt": "shor"}, {"choices": [5]}, {"choices": []}]
)
def test_a_reader_cannot_be_taught_what_there_is_not(wrong: dict[str, Any]) -> None:
    with pytest.raises(TaskError, match=r"caption_reading: (there is no|choices are)"):
        CaptionReading(store=MediaStore(), **wrong)


class Seeing(text_reader.Reader):
    """A model that sees red, and knows without looking that the sky is blue."""

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = body["messages"][-1]["content"]
        text = content if isinstance(content, str) else content[-1]["text"]
        known = "blue" if "sky" in text else "red" if not isinstance(content, str) else "can not answer"
        letter = next((line[0] for line in text.split("\n") if line[1:] == f") {known}"), "")
        if not letter:
            return self.reply(400, {"error": {"message": f"where is {known}?"}})
        choice = {"index": 0, "message": {"role": "assistant", "content": letter}, "finish_reason": "stop"}
        self.reply(200, {"id": "x", "object": "chat.completion", "created": 0, "model": "m", "choices": [choice]})


@pytest.fixture(scope="module")
def seeing() -> Iterator[str]:
    server = text_reader.Server(("127.0.0.1", 0), Seeing)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    server.shutdown()


def curated(*arguments: object, capsys: pytest.CaptureFixture[str]) -> tuple[int, str]:
    """The exit code of ``sensorium curate``, and what it says on one line."""
    code = main(["curate", *map(str, arguments)])
    told = capsys.readouterr()
    return code, " ".join((told.out + told.err).split())


def test_curation_keeps_what_needs_the_picture(tmp_path: Path, seeing: str, capsys: pytest.CaptureFixture[str]) -> None:
    rows, out = picture_rows(tmp_path / "rows.parquet"), tmp_path / "kept.parquet"
    code, told = curated(rows, out, "--reader", seeing, "--draws", 3, capsys=capsys)
    assert code == 0
    assert "2 questions of 1 rows: 1 kept, in 1 rows; 0 could not be tried. Of the 2 tried, 2 were answered with" in told
    assert "and 1 without it" in told
    (task,) = CaptionRows(str(out), MediaStore())
    assert [question["question"] for question in task.metadata["questions"]] == ["Which colour?"]
    found = json.loads((tmp_path / "kept.parquet.curation.json").read_text())
    assert [(one["seen"], one["blind"]) for one in found[0]["questions"]] == [(1.0, 0.0), (1.0, 1.0)]
    assert curated(rows, out, "--reader", seeing, capsys=capsys)[0] == 2


def picture_lines(folder: Path, *questions: Any) -> Path:
    """JSONL rows of pictures in files, one for each list of questions."""
    (folder / "red.png").write_bytes(png("red"))
    truths = ({"image": "red.png", "prompt": "<image>", "reward_model": {"ground_truth": one}} for one in questions)
    rows = [json.dumps({"id": str(i), **one}) for i, one in enumerate(truths)]
    (folder / "rows.jsonl").write_text("\n".join(rows))
    return folder / "rows.jsonl"


def test_curation_that_keeps_nothing_tells_its_rates(
    tmp_path: Path, seeing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    unknown = {"question": "Which colour?", "choices": ["blue", "green"], "answer": "blue"}
    rows, out = picture_lines(tmp_path, ["no question"], [ASKED[1]], [ASKED[1], unknown]), tmp_path / "kept.jsonl"
    code, told = curated(rows, out, "--reader", seeing, "--draws", 1, capsys=capsys)
    assert code == 2
    assert "no question is kept" in told
    assert "3 questions of 3 rows: 0 kept, in 0 rows; 1 could not be tried, the first because:" in told
    assert "Of the 2 tried, 2 were answered with the picture or video" in told
    assert "and 2 without it" in told
    assert "1 rows could not be read, the first because:" in told
    assert not out.exists()
    assert len(json.loads((tmp_path / "kept.jsonl.curation.json").read_text())) == 3


def test_curation_that_cannot_begin_says_so_at_once(
    tmp_path: Path, seeing: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows, nobody = picture_lines(tmp_path, [ASKED[0]]), "http://127.0.0.1:9/v1"
    code, told = curated(rows, tmp_path / "kept.jsonl", "--reader", nobody, "--draws", 1, capsys=capsys)
    assert code == 2
    assert f"{nobody} answered none of the first 1 questions" in told
    code, told = curated(rows, tmp_path / "other" / "kept.jsonl", "--reader", nobody, capsys=capsys)
    assert code == 2
    assert "such as 'red.png', which would lead nowhere" in told
    code, told = curated(rows, tmp_path / "kept.jsonl", "--reader", nobody, "--seen-above", 1, capsys=capsys)
    assert code == 2
    assert "--seen-above 1 and --blind-below 0.25 keep no question whatever is answered" in told
    rows = picture_lines(tmp_path, "no questions at all", "neither")
    code, told = curated(rows, tmp_path / "kept.jsonl", "--reader", seeing, capsys=capsys)
    assert code == 2
    assert "none of the 2 rows can be read, the first because:" in told
