"""``sensorium show``: the prompt with its tokens, the media as the model sees them, the demonstration and its rewards."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.cli.main import main
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.sound import encode_wav
from sensorium.models.load_chat import load_chat_processor
from sensorium.models.prepared_media import seen_frames
from sensorium.report.album import contact_sheet, waveform

FRAMES = np.repeat(np.array([[250, 10, 10], [10, 250, 10], [10, 10, 250], [250, 250, 10]], np.uint8), 64 * 64, axis=0)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rows with a picture, a video and a sound, one without a demonstration, and a term that asks a judge."""
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (80, 60), (200, 30, 30)).save("red.png")
    Path("clip.mp4").write_bytes(encode_clip(FRAMES.reshape(4, 64, 64, 3), fps=2))
    tone = 0.5 * np.sin(np.arange(16000) / 5).astype(np.float32)
    Path("tone.wav").write_bytes(encode_wav(tone, 8000))
    shown = [{"type": "image", "path": "red.png"}, {"type": "video", "path": "clip.mp4", "frames": 4}]
    asked = [*shown, {"type": "audio", "path": "tone.wav"}, "What <|im_end|> is it?"]
    rows: list[dict[str, Any]] = [
        {"id": "17", "messages": [{"role": "user", "content": asked}]},
        {"id": "plain", "messages": [{"role": "user", "content": "Why?"}], "answer": "B"},
    ]
    rows[0] |= {"answer": "A", "demonstration": "<answer>A</answer>"}
    Path("rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    terms = [{"name": "exact", "weight": 0.5}, {"name": "judge", "options": {"model": "m", "prompt": "Is it good?"}}]
    given = {
        "name": "seen",
        "steps": 1,
        "model": {"path": "tiny:qwen2_5_omni"},
        "tasks": {"train": [{"source": "jsonl", "options": {"path": "rows.jsonl"}}]},
        "rewards": {"terms": terms},
    }
    Path("seen.json").write_text(json.dumps(given))
    return "seen.json"


def test_a_task_is_shown_with_its_tokens_media_and_rewards(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", recipe, "--task", "0", "--out", "out"]) == 0
    text = capsys.readouterr().out
    lines = text.splitlines()
    (counts,) = (line for line in lines if line.startswith("tokens: "))
    numbers = {kind: int(count) for count, kind in (part.split() for part in counts[8:].partition(";")[0].split(", "))}
    assert set(numbers) == {"text", "picture", "video", "sound"}
    assert f"; {sum(numbers.values())} in all" in counts
    assert f"<|IMAGE|>×{numbers['picture']}" in text
    assert "What <|im_end|> is it?" in text
    assert "80 x 60 pixels, seen as 84 x 56 pixels" in text
    (video,) = (line for line in lines if line.startswith("video 1"))
    assert "4 frames" in video
    assert "at 0.00, 0.50, 1.00, 1.50 s" in video
    assert "2.00 s at 16,000 samples a second, the loudest 0.5" in text
    assert "exact: +1 × 0.5" in text
    assert any("judge: not asked" in line for line in lines)
    assert {file.name for file in Path("out").iterdir()} == {"picture_1.png", "video_1.png", "sound_1.png", "sound_1.wav"}
    assert Image.open("out/picture_1.png").size == (84, 56)
    assert np.allclose(np.asarray(Image.open("out/picture_1.png")), (200, 30, 30), atol=1)


def test_augmented_media_are_shown_beside_the_originals(recipe: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["show", recipe, "tasks.augment={picture: {brightness: 0.5}, sound: {gain: -6}}", "--out", "out"]) == 0
    shown = capsys.readouterr().out
    assert shown.count("augmented: brightness 0.5") == shown.count("augmented: gain -6.0") == 1
    names = {file.name for file in Path("out").iterdir()}
    assert {"picture_1.png", "picture_1_original.png", "sound_1.wav", "sound_1_original.wav", "video_1.png"} <= names
    assert "video_1_original.png" not in names
    for name, colour in (("picture_1_original", (200, 30, 30)), ("picture_1", (100, 15, 15))):
        assert np.allclose(np.asarray(Image.open(f"out/{name}.png")), colour, atol=1)


def test_ids_and_numbers_choose_tasks_and_the_media_of_the_last_one_are_gone(
    recipe: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["show", recipe, "--task", "17", "--out", "out"]) == 0
    assert "task 17 (tasks.train, number 0)" in capsys.readouterr().out
    assert main(["show", recipe, "--task", "plain", "--out", "out"]) == 0
    shown = capsys.readouterr().out
    assert "task plain (tasks.train, number 1)" in shown
    assert "no demonstration" in shown
    assert "Why?" in shown
    assert main(["show", recipe, "--task", "18"]) == 2
    assert "2 tasks" in capsys.readouterr().err


def test_an_environment_shows_its_first_observation_and_the_turns_of_its_demonstration(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    small = ["tasks.evaluate.0.options.size=3", "tasks.train.0.options.size=3"]
    assert main(["show", "frozen_lake", *small, "--task", "1"]) == 0
    shown = capsys.readouterr().out
    name = shown.split("task ")[1].split()[0]
    assert f"seed {name.rpartition('-')[2]}" in shown
    turns = shown.count("as the model reads it")
    assert turns == shown.count("── demonstration") > 1
    assert len(list(Path("runs/show/frozen_lake").glob("picture_*.png"))) == turns
    assert "in all: 1, judged right" in shown
    assert main(["play", "frozen_lake", *small, "--task", name, "--demonstrate", "--pictures", "none"]) == 0
    assert f"task {name}" in capsys.readouterr().out


@pytest.mark.parametrize(("family", "size"), [("qwen3_vl", (96, 64)), ("internvl", None)])
def test_what_the_tower_takes_becomes_the_picture_again(family: str, size: tuple[int, int] | None) -> None:
    store = MediaStore()
    chat = load_chat_processor(f"tiny:{family}", store=store)
    drawn = np.zeros((64, 96, 3), np.uint8)
    drawn[:32, :48], drawn[32:, 48:] = (255, 0, 0), (0, 0, 255)
    media = store.put_picture(encode_png(drawn), "drawn")
    frames = seen_frames(chat, media)
    chat.decoder.close()
    assert frames
    if size is not None:
        (frame,) = frames
        assert frame.size == size
        assert np.abs(np.asarray(frame).astype(int) - drawn).max() <= 1
    else:  # the last tile is the whole view
        seen = np.asarray(frames[-1])
        assert seen[0, 0].tolist() == [255, 0, 0]
        assert seen[-1, -1].tolist() == [0, 0, 255]


def test_sheets_hold_every_frame_and_waveforms_the_loud_part() -> None:
    frames = [Image.new("RGB", (60, 40), (10 * i, 0, 0)) for i in range(1, 8)]
    sheet = np.asarray(contact_sheet(frames, [f"{i} s" for i in range(7)]))
    assert {10 * i for i in range(1, 8)} <= set(sheet[..., 0][(sheet[..., 1] == 0) & (sheet[..., 2] == 0)].tolist())
    sound = np.zeros(16000, np.float32)
    sound[8000:] = 0.9
    drawn = np.asarray(waveform(sound, 16000))
    high = (drawn[:40] == (40, 110, 170)).all(-1).any(0)
    assert not high[:470].any()
    assert high[490:].all()
