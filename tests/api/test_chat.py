"""sn.load(checkpoint).chat(…): what it takes, what it gives back."""

import asyncio
from collections.abc import Iterator
from io import BytesIO
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

import sensorium as sn
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import Shapes
from sensorium.data.sound import encode_wav


@pytest.fixture(scope="module")
def model() -> Iterator[sn.Model]:
    loaded = sn.load("package:shapes", device="cpu")
    yield loaded
    loaded.close()


@pytest.fixture(scope="module")
def shown() -> tuple[str, Image.Image]:
    """A question about a picture that the shipped model can answer, and the picture."""
    store = MediaStore()
    task = Shapes(store=store, split="test", size=4, picture_size=64)[0]
    (media,) = task.messages[-1].media
    return task.messages[-1].text, store.picture(media)


def test_a_picture_may_be_an_image_a_path_bytes_or_a_block(
    model: sn.Model, shown: tuple[str, Image.Image], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    question, picture = shown
    picture.save(tmp_path / "picture.png")
    buffer = BytesIO()
    picture.save(buffer, "PNG")
    monkeypatch.chdir(tmp_path)
    replies = [
        model.chat([form, question], max_new_tokens=6)
        for form in (
            picture,
            tmp_path / "picture.png",
            buffer.getvalue(),
            {"type": "image", "path": "picture.png"},
            {"type": "image", "image": picture},
        )
    ]
    assert len({tuple(reply.tokens) for reply in replies}) == 1
    assert all(reply.logprobs == pytest.approx(replies[0].logprobs, abs=1e-5) for reply in replies)
    conversation = [{"role": "user", "content": [picture, {"type": "text", "text": question}]}]
    assert model.chat(conversation, max_new_tokens=6) == replies[0]


def test_a_path_or_bytes_of_a_sound_or_video_is_what_its_block_is(tmp_path: Path) -> None:
    tone = np.sin(np.arange(8000) / 5).astype(np.float32)
    frames = np.zeros((8, 64, 64, 3), np.uint8)
    frames[4:] = 255
    files = {"sound.wav": encode_wav(tone), "sound.m4a": encode_clip(samples=tone), "video": encode_clip(frames)}
    model = sn.load("tiny:qwen2_5_omni", device="cpu")
    try:
        for name, data in files.items():
            (tmp_path / name).write_bytes(data)
            block = {"type": "video" if name == "video" else "audio", "path": str(tmp_path / name)}
            forms = (block, tmp_path / name) if name == "sound.m4a" else (block, tmp_path / name, data)
            replies = [model.chat([form, "What is it?"], max_new_tokens=2) for form in forms]
            assert len({reply.logprobs for reply in replies}) == 1
            assert replies[0].logprobs != model.chat(["What is it?"], max_new_tokens=2).logprobs
    finally:
        model.close()


def test_a_reply_is_text_with_tokens_and_log_probs(model: sn.Model, shown: tuple[str, Image.Image]) -> None:
    reply = model.chat([shown[1], shown[0]], max_new_tokens=2)
    assert isinstance(reply, str)
    assert reply.finish == "length"
    assert model.chat([shown[1], shown[0]], max_tokens=2).tokens == reply.tokens
    with pytest.raises(sn.SensoriumError, match="max_tokens"):
        model.chat([shown[1], shown[0]], max_tokens=2, max_new_tokens=2)
    assert len(reply.tokens) == len(reply.logprobs) == 2
    assert all(logprob <= 0 for logprob in reply.logprobs)
    blank = model.chat([Image.new("RGB", (64, 64), "white"), shown[0]], max_new_tokens=2)
    assert blank.logprobs != reply.logprobs, "the picture is seen"


def test_chat_works_inside_a_loop_and_repeats_by_seed(model: sn.Model, shown: tuple[str, Image.Image]) -> None:
    async def cell(seed: int) -> sn.Reply:
        return model.chat([shown[1], shown[0]], temperature=2.0, max_new_tokens=6, seed=seed)

    replies = [asyncio.run(cell(seed)) for seed in (0, 0, 1, 2, 3)]
    assert replies[0].tokens == replies[1].tokens
    assert len({reply.tokens for reply in replies}) > 1


def test_a_greedy_reply_is_what_transformers_generates_from_the_same_checkpoint(
    model: sn.Model, shown: tuple[str, Image.Image], tmp_path: Path
) -> None:
    """A picture, and a conversation with a system prompt and an earlier reply, through the stock processor and model."""
    from transformers import AutoModelForImageTextToText, AutoProcessor

    model.policy.save(tmp_path)
    processor, stock = AutoProcessor.from_pretrained(tmp_path), AutoModelForImageTextToText.from_pretrained(tmp_path)
    said = [("system", "Be brief."), ("user", "One?"), ("assistant", "One."), ("user", "Two?")]
    asked = {"type": "image", "image": shown[1]}, {"type": "text", "text": shown[0]}
    conversations = [
        [{"role": "user", "content": list(asked)}],
        [{"role": role, "content": [{"type": "text", "text": text}]} for role, text in said],
    ]
    for conversation in conversations:
        inputs = processor.apply_chat_template(
            conversation, tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt"
        )
        generated = stock.generate(**inputs, max_new_tokens=8, do_sample=False)[0, inputs["input_ids"].shape[1] :]
        assert model.chat(conversation, max_new_tokens=8).tokens == tuple(generated.tolist())


def test_what_cannot_be_said_is_refused_by_name(model: sn.Model, tmp_path: Path) -> None:
    with pytest.raises(sn.SensoriumError, match="chat takes a text"):
        model.chat([])
    with pytest.raises(sn.SensoriumError, match="role 'usr'"):
        model.chat([{"role": "usr", "content": "?"}])
    with pytest.raises(sn.SensoriumError, match=r"none\.png"):
        model.chat([tmp_path / "none.png", "?"])
    for alone in (Path("a.wav"), b"RIFF", Image.new("RGB", (4, 4))):
        with pytest.raises(sn.SensoriumError, match=r"in a list.*chat\(\["):
            model.chat(alone)
    for strange in (np.zeros((8, 8, 3), np.uint8), np.zeros(16, np.float32), 7):
        with pytest.raises(sn.SensoriumError, match=rf"block 0.*{type(strange).__name__}.*PIL.*Path.*bytes"):
            model.chat([strange, "?"])
    with pytest.raises(sn.SensoriumError, match="no run"):
        sn.load(tmp_path)


def test_the_name_of_a_media_file_as_a_string_is_refused(
    model: sn.Model, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("cat.PNG", "clip.wav", "clip.mp4"):
        with pytest.raises(sn.SensoriumError, match=rf"give Path\('{name}'\)"):
            model.chat([name, "What is it?"])
    for name in ("the clip.wav", "no suffix"):  # names with spaces are words, unless there is such a file
        assert model.chat([name], max_new_tokens=1).tokens
        Path(name).write_bytes(encode_wav(np.zeros(1600, np.float32)))
        for given in (name, [name, "?"], [{"role": "user", "content": name}]):
            with pytest.raises(sn.SensoriumError, match=rf"give Path\('{name}'\)"):
                model.chat(given)
    Path("notes").write_text("no medium")
    with pytest.raises(sn.SensoriumError, match="no picture, video or sound"):
        model.chat([Path("notes"), "?"])
    monkeypatch.setenv("HOME", str(tmp_path))
    with pytest.raises(sn.SensoriumError, match="as words"):
        model.chat(["~/no suffix", "?"])
    assert model.chat(["notes"], max_new_tokens=1).tokens
    assert model.chat(["What is cat.png", "Which?"], max_new_tokens=1).tokens
    assert model.chat([{"type": "text", "text": "cat.png"}], max_new_tokens=1).tokens
