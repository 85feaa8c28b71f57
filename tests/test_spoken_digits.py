"""The spoken-digits study: its checkpoint is both models as they were, and its rows keep speakers apart."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, LlamaForCausalLM, Qwen2AudioForConditionalGeneration

import sensorium as sn
from sensorium.data.sound import encode_wav
from sensorium.models.tiny import make_tiny
from studies import spoken_digits as study

SIZES = {"n_mels": 80, "n_audio_layer": 1, "n_audio_state": 32, "n_audio_head": 2, "n_audio_ctx": 1500}


def small_whisper() -> dict[str, Any]:
    """An encoder in the names of OpenAI's file, and a weight of its decoder."""
    hidden, block = SIZES["n_audio_state"], "encoder.blocks.0."
    shapes = {"encoder.conv1.weight": (hidden, 80, 3), "encoder.conv2.weight": (hidden, hidden, 3)}
    shapes |= {f"{block}attn.{name}.weight": (hidden, hidden) for name in ("query", "key", "value", "out")}
    shapes |= {f"{block}mlp.0.weight": (4 * hidden, hidden), f"{block}mlp.2.weight": (hidden, 4 * hidden)}
    shapes |= {f"{name}.weight": (hidden,) for name in (f"{block}attn_ln", f"{block}mlp_ln", "encoder.ln_post")}
    shapes |= {name.replace("weight", "bias"): (size[0],) for name, size in shapes.items() if "key" not in name}
    shapes |= {"encoder.positional_embedding": (1500, hidden), "decoder.ln.weight": (hidden,)}
    return {"dims": SIZES, "model_state_dict": {name: torch.randn(size).half() for name, size in shapes.items()}}


def test_the_assembled_checkpoint_writes_what_its_language_model_wrote_and_hears(tmp_path: Path) -> None:
    text = make_tiny("llama", tmp_path / "text")
    language, tokenizer = LlamaForCausalLM.from_pretrained(text), AutoTokenizer.from_pretrained(text)
    ids = torch.tensor([tokenizer("Which digit is said?")["input_ids"]])
    with torch.no_grad():
        for weight in language.parameters():
            weight.copy_(weight.bfloat16())  # as they are saved
        expected = language(ids).logits
    folder = study.assemble(small_whisper(), language, tokenizer, tmp_path / "whole")
    whole = Qwen2AudioForConditionalGeneration.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        found = whole(input_ids=ids).logits[..., : expected.shape[-1]]
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)

    for name in ("low", "high"):
        wave = torch.sin(torch.arange(8000) * (0.1 if name == "low" else 0.5)).numpy()
        (tmp_path / f"{name}.wav").write_bytes(encode_wav(wave, 16000))
    model = sn.load(folder)
    low, high = (model.chat([tmp_path / f"{name}.wav", study.QUESTION], max_new_tokens=2) for name in ("low", "high"))
    assert low.logprobs != high.logprobs


def recordings(folder: Path) -> list[Path]:
    speakers = [speaker for several in study.SPEAKERS.values() for speaker in several]
    files = [folder / f"{digit}_{speaker}_0.wav" for digit in range(10) for speaker in speakers]
    for file in files:
        file.write_bytes(file.name.encode())
    return files


def read(place: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in place.read_text().splitlines()]


def clip(row: dict[str, Any]) -> Path:
    return Path(row["messages"][0]["content"][0]["path"])


def test_no_speaker_is_in_two_splits_and_swapped_clips_keep_the_answers(tmp_path: Path) -> None:
    study.write_rows(recordings(tmp_path), [tmp_path / "3_07_0.wav"], tmp_path)
    seen = {split: {row["metadata"]["category"] for row in read(tmp_path / f"{split}.jsonl")} for split in study.SPEAKERS}
    assert seen == {split: set(speakers) for split, speakers in study.SPEAKERS.items()}
    assert sum(map(len, seen.values())) == len(set.union(*seen.values()))
    for split in (*study.SPEAKERS, "transfer"):
        assert all(clip(row).name[0] == row["answer"] == row["demonstration"] for row in read(tmp_path / f"{split}.jsonl"))
    test, swapped = (read(tmp_path / f"{name}.jsonl") for name in ("test", "test_swapped"))
    assert [row["answer"] for row in test] == [row["answer"] for row in swapped]
    assert {clip(row) for row in test} == {clip(row) for row in swapped}
    assert sum(clip(row).name[0] == row["answer"] for row in swapped) < len(swapped) / 2


def test_clips_of_another_digest_are_refused_before_rows_are_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for folder in ("fsdd/recordings", "audiomnist"):
        (tmp_path / folder).mkdir(parents=True)
    recordings(tmp_path / "fsdd/recordings")
    monkeypatch.setattr(study, "DATA", tmp_path)
    with pytest.raises(SystemExit, match=study.FSDD_SHA256):
        study.make_data()
    assert not list(tmp_path.glob("*.jsonl"))
