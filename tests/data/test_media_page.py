"""The page about media: its code runs, its rows and options are what the sources take, its defaults are the code's."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import layout_of
from sensorium.data.rows import JsonlRows
from sensorium.data.sound import encode_wav
from sensorium.models.encoding import COUNTS
from sensorium.recipe.registry import wrong_options
from sensorium.recipe.schema import MediaSection
from sensorium.vocabulary.decoding import MIDDLE, AudioParameters, FrameRule, VideoParameters
from tests.data.clips import numbered, tone

PAGE = (Path(__file__).parents[2] / "docs/guides/media.md").read_text()


def block(language: str, holding: str = "") -> str:
    """The block of a language on the page that holds some text."""
    (found,) = [text for text in re.findall(rf"```{language}\n(.*?)```", PAGE, re.DOTALL) if holding in text]
    assert isinstance(found, str)
    return found


def test_the_code_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {}
    exec(block("python"), names)
    assert names["video"].frames.shape == (32, 336, 336, 3)
    assert "<answer>" in capsys.readouterr().out


def test_the_row_is_read(tmp_path: Path) -> None:
    (tmp_path / "clips").mkdir()
    (tmp_path / "clips" / "1.mp4").write_bytes(encode_clip(numbered(64)))
    (tmp_path / "clips" / "1.wav").write_bytes(encode_wav(tone(0.1)))
    (tmp_path / "rows.jsonl").write_text(block("json").replace("\n", ""))
    task = JsonlRows(str(tmp_path / "rows.jsonl"), MediaStore())[0]
    video, sound = task.messages[0].media
    assert video.parameters == VideoParameters(frames=8, start=2.5, end=7.5)
    assert sound.parameters == AudioParameters()


def test_the_options_are_known() -> None:
    for name in ("hub", "intent"):
        section = yaml.safe_load(block("yaml", f"source: {name}"))
        assert wrong_options("source", section["source"], section["options"]) == ("", "")
    section = yaml.safe_load(block("yaml", "source: hub"))
    assert layout_of(section["options"]["columns"], media_first=section["options"]["media_first"])


def test_the_settings_and_metrics_of_a_run_are_told_as_they_are() -> None:
    said = yaml.safe_load(block("yaml", "cache:"))["media"]
    usual = MediaSection()
    assert said | {"cache": None} == usual.model_dump()
    assert MediaSection.model_validate(said)
    metrics = re.findall(r"`media/(\w+)`", PAGE)
    assert set(metrics) >= {*COUNTS, "cache_gib", "memory_gib"} - {"tower_hits", "tower_evictions"}


def test_the_defaults_are_told_as_they_are() -> None:
    usual = VideoParameters()
    assert (usual.fps, usual.max_frames, usual.sampling) == (2.0, 768, None)
    official = usual.resolved(FrameRule())
    assert (official.sampling, official.min_frames) == ("official", 4)
    for number in (*MIDDLE.values(), AudioParameters().sample_rate):
        assert f"{number:,}" in PAGE
