"""Videos and sounds in report.html: they play, what the model was given of them is seen, and the page stays small."""

import base64
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.decoder import open_decoder
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.report.page import render_report
from sensorium.runs.episodes import write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary import Episode, Group, Media, MediaSpan, Segment, Status, Task, Thread, Turn, user
from sensorium.vocabulary.decoding import AudioParameters, FrameRule, VideoParameters
from tests.data.clips import middle, numbered, tone

from .test_html import Page

CLIP = encode_clip(numbered(), 8.0, tone())
WAVE = encode_wav(tone(0.5))


def run_with(folder: Path, *media: Media, seen: Sequence[Media] = ()) -> RunDirectory:
    """A run directory with one group of one episode that was shown these; ``seen`` is what its model was given of them."""
    run = RunDirectory(folder).create()
    task = Task("t", (user(*media, "what is this?"),))
    said = Segment("model", (1,), text="a thing", name="m")
    given = Segment("environment", (1,) * len(seen), tuple(MediaSpan(i, item) for i, item in enumerate(seen)))
    thread = Thread((given, said), (False, True))
    episode = Episode("e", "t", "g", 0, (thread,), (Turn(0, task.messages, said, 0, 0),), Status.FINISHED)
    write_episodes(run.episodes_of(1), 1, [Group("g", task, (episode,))])
    return run


def sources(page: Page) -> list[dict[str, str | None]]:
    return page.all("source")


def test_small_clips_are_embedded_whole_and_play(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    video = store.put(CLIP, "video", "row 1", middle(frames=3))
    sound = store.put(WAVE, "sound", "row 2")
    track = store.put(CLIP, "sound", "row 3")
    page = Page(render_report(run_with(tmp_path, video, sound, track)))
    assert [len(page.all(element)) for element in ("video", "audio")] == [1, 2]
    assert all("controls" in element for element in (*page.all("video"), *page.all("audio")))
    assert [source["type"] for source in sources(page)] == ["video/mp4", "audio/wav", "audio/mp4"]
    heads, bodies = zip(*((source["src"] or "").split(",", 1) for source in sources(page)), strict=True)
    assert heads == ("data:video/mp4;base64", "data:audio/wav;base64", "data:audio/mp4;base64")
    assert [base64.b64decode(body) for body in bodies] == [CLIP, WAVE, CLIP]


def test_what_the_model_was_given_is_shown_with_its_times(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    few = store.put(CLIP, "video", "row 1", middle(frames=3))
    many = store.put(CLIP, "video", "row 2", middle(frames=20, start=1.0, end=2.0))
    sound = store.put(WAVE, "sound", "row 3", AudioParameters(8000))
    page = Page(render_report(run_with(tmp_path, few, many, sound)))
    for told in ("0.50 s", "1.50 s", "2.50 s", "3 frames of 64 × 48 from 3.00 s", "row 1"):
        assert told in page.text
    assert "20 frames of 64 × 48 from 1.00 to 2.00 of 3.00 s, 8 shown" in page.text
    assert "0.50 s at 8 kHz" in page.text
    strips = [image for image in page.all("image") if (image["id"] or "").startswith("s")]
    assert [(strip["width"], strip["height"]) for strip in strips] == [("192", "48"), ("512", "48")]
    used = [use["href"] for use in page.all("use")]
    assert [used.count(f"#{strip['id']}") for strip in strips] == [3, 8]
    assert any((source["src"] or "").endswith("#t=1,2") for source in sources(page))
    [wave] = [svg for svg in page.all("svg") if svg.get("class") == "wave"]
    assert wave["aria-label"] == "loudness over 0.50 seconds, 0.50 at most"


def test_a_clip_is_shown_as_the_family_saw_and_heard_it(tmp_path: Path) -> None:
    video = MediaStore(tmp_path / "media").put(CLIP, "video", "row 1", VideoParameters(use_audio_in_video=True))
    seen = video.resolved(FrameRule("official", 32, 1024, 2048, 1 << 20))
    page = Page(render_report(run_with(tmp_path, video, seen=seen.parts)))
    assert "6 frames of 32 × 32 from 3.00 s" in page.text
    assert "s at 16 kHz" in page.text
    assert len([svg for svg in page.all("svg") if svg.get("class") == "wave"]) == 1


def test_large_clips_lie_beside_the_page_and_are_never_loaded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(tmp_path / "media")
    video = store.put(CLIP, "video", "row 1", middle(frames=2, start=0.5))
    sound = store.put(WAVE, "sound", "row 2")
    monkeypatch.setattr("sensorium.report.album.CLIP_BYTES", 1000)
    monkeypatch.setattr(MediaStore, "bytes_of", lambda *_: pytest.fail("it was loaded"))
    text = render_report(run_with(tmp_path, video, sound))
    page = Page(text)
    assert [source["src"] for source in sources(page)] == [f"media/{video.hash}#t=0.5", f"media/{sound.hash}"]
    assert all((tmp_path / (source["src"] or "").partition("#")[0]).is_file() for source in sources(page))
    assert [source["type"] for source in sources(page)] == ["video/mp4", "audio/wav"]
    assert "2 frames of 64 × 48" in page.text
    assert len(text) < 30_000


def test_what_is_embedded_stays_within_the_bound(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    media = [store.put(encode_clip(numbered(8 + i)), "video", f"row {i}", middle(frames=2)) for i in range(12)]
    sizes = [store.size_of(item) for item in media]
    run = run_with(tmp_path, *media)
    plain = len(render_report(run, media_bytes=0))
    bound = 4 * max(sizes)
    bounded = render_report(run, media_bytes=bound)
    linked = [source["src"] for source in sources(Page(bounded)) if (source["src"] or "").startswith("media/")]
    assert 0 < len(linked) < 12
    assert len(bounded) < plain + bound + 12 * 1000
    assert "video/mp4" in bounded


def test_a_broken_or_missing_clip_is_named_and_the_page_goes_on(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    broken = store.put(CLIP[:-3000], "video", "row 7")
    gone = Media("sound", "ab" * 32, "row 8")
    page = Page(render_report(run_with(tmp_path, broken, gone, store.put(WAVE, "sound"))))
    assert "row 7" in page.text
    assert "sound abababab: " in page.text
    assert "row 8" in page.text
    assert "0.50 s at 16 kHz" in page.text


def test_a_page_finds_what_its_run_has_decoded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    store = MediaStore(tmp_path / "run" / "media")
    video = store.put(CLIP, "video", "row 1", middle(frames=3))
    shared = {"default": tmp_path / "run" / "decoded", "shared": tmp_path / "shared"}
    for folder in shared.values():
        open_decoder(store, folder, cache_gib=1, memory_gib=0, threads=1).get(video)
    run = run_with(tmp_path / "run", video)
    monkeypatch.setattr("sensorium.data.decoder.decode", lambda *_: pytest.fail("it was decoded again"))
    assert "3 frames" in Page(render_report(run)).text
    (tmp_path / "run" / "recipe.yaml").write_text(f"name: r\nmodel: {{path: x}}\nmedia: {{cache: {shared['shared']}}}\n")
    for entry in shared["default"].iterdir():
        entry.unlink()
    assert "3 frames" in Page(render_report(run)).text


def test_a_page_decodes_without_a_cache_and_leaves_none_behind(tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    run = run_with(tmp_path, store.put(CLIP, "video", "row 1", middle(frames=3)))
    assert "3 frames" in Page(render_report(run)).text
    assert not run.decoded.exists()


def test_names_of_clips_are_text_and_never_markup(tmp_path: Path) -> None:
    evil = '<script>alert("x")</script>'
    video = MediaStore(tmp_path / "media").put(CLIP, "video", evil, middle(frames=1))
    page = Page(render_report(run_with(tmp_path, video)))
    assert evil in page.text
    assert len(page.all("script")) == 1


def test_episodes_keep_what_was_asked_of_a_clip(tmp_path: Path) -> None:
    from sensorium.runs.episodes import read_groups

    asked: Any = middle(fps=3.0, max_frames=4, start=0.5)
    video = MediaStore(tmp_path / "media").put(CLIP, "video", "row 1", asked)
    run = run_with(tmp_path, video, Media("sound", "ab" * 32, "", AudioParameters(8000, end=2.0)))
    [group] = read_groups(run.episodes_of(1))
    assert group.task.messages[0].media[0] == video
    assert group.task.messages[0].media[0].parameters == asked
    assert group.task.messages[0].media[1].parameters == AudioParameters(8000, end=2.0)
