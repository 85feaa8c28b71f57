"""TaskMem's rows and the generated clips: history, faces, and what is wrong with a row."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from sensorium.data.causal_history import CausalHistory, parse_memory
from sensorium.data.made_media import encode_clip
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import TaskStream
from sensorium.data.pictures import encode_png
from sensorium.data.planner import GroupOutcome
from sensorium.recipe.registry import build
from sensorium.systems.taskmem.memory_clips import MemoryClips
from sensorium.systems.taskmem.memory_rows import MARK, TaskMemRows
from sensorium.vocabulary.errors import TaskError

ASK = "Watch.\n[Description of the preceding part]: {}\nWrite {}."


def row_of(clip: int, video: str = "v1", step: int | None = None, **more: Any) -> dict[str, Any]:
    blocks = [{"type": "video", "video": "c.mp4"}, {"type": "text", "text": ASK}]
    fields = {"type": "episodic_on_policy", "step": clip if step is None else step, "video_idx": clip}
    return {"id": f"{video}*{clip}", **fields, "episodic_folder": "faces", "input": blocks, **more}


def write_rows(folder: Path, *rows: dict[str, Any]) -> str:
    (folder / "c.mp4").write_bytes(encode_clip(np.zeros((2, 32, 32, 3), np.uint8), 2.0))
    (folder / "p.png").write_bytes(encode_png(np.zeros((8, 8, 3), np.uint8)))
    (folder / "faces" / "v1").mkdir(parents=True, exist_ok=True)
    maps = {
        "0": {"[face_5]": "<face_1>"},
        "1": {"[face_5]": "<face_2>", "[face_6]": "<face_1>"},
        "2": {"[face_6]": "<face_3>"},
    }
    (folder / "faces" / "v1" / "v1_map.json").write_text(json.dumps(maps))
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(folder / "rows.jsonl")


def test_history_is_rewritten_and_filled_in(tmp_path: Path) -> None:
    rows = TaskMemRows(write_rows(tmp_path, *(row_of(clip) for clip in range(3))), MediaStore())
    assert [rows.place_of(i).needs for i in range(3)] == [(), (0,), (0, 1)]
    task = rows.with_history(2, {0: "face 1 sits {}", 1: "<face_1> greets <face_2>"})
    assert task.metadata["history"] == "<face_4> sits {} <face_3> greets <face_4>"
    told = task.messages[0].text
    assert told == f"Watch.\n[Description of the preceding part]: {task.metadata['history']}\nWrite {{}}."
    assert (task.id, len(task.messages[0].media)) == ("v1*2", 1)
    assert rows[0].messages[0].text == "Watch.\n[Description of the preceding part]: \nWrite {}."


def test_a_folder_of_faces_that_is_not_there_is_said(tmp_path: Path) -> None:
    rows = TaskMemRows(write_rows(tmp_path, row_of(0, episodic_folder="face"), row_of(0, video="v2")), MediaStore())
    with pytest.raises(TaskError, match=r"rows.jsonl:1.*'episodic_folder' is 'face', and there is no such folder"):
        rows[0]
    assert rows[1].id == "v2*0", "a video without faces needs no file"


def test_at_most_four_clips_are_needed(tmp_path: Path) -> None:
    rows = TaskMemRows(write_rows(tmp_path, row_of(9, step=7), row_of(9, step=2)), MediaStore())
    assert [rows.place_of(i).needs for i in range(2)] == [(5, 6, 7, 8), (7, 8)]


def test_by_itself_a_row_takes_a_folder_of_memories_or_none(tmp_path: Path) -> None:
    path = write_rows(tmp_path, row_of(0), row_of(1))
    with pytest.raises(TaskError, match="causal_history"):
        TaskMemRows(path, MediaStore())[1]
    assert TaskMemRows(path, MediaStore(), blank_history=True)[1].metadata["history"] == ""
    (tmp_path / "v1.json").write_text(json.dumps({"0": "<face_1> sits"}))
    kept = TaskMemRows(path, MediaStore(), history_folder=str(tmp_path))
    assert kept[1].metadata["history"] == "<face_2> sits"
    (tmp_path / "v1.json").write_text("{}")
    with pytest.raises(TaskError, match="no memory of clip 0"):
        kept[1]
    (tmp_path / "v1.json").write_text('{"0": "sits", "0": "stands"}')
    with pytest.raises(TaskError, match=r"v1\.json.*'0'"):
        kept[1]


def test_pictures_alone_are_read(tmp_path: Path) -> None:
    shown = [{"type": "image", "image": "p.png"}, {"type": "text", "text": ASK}]
    rows = TaskMemRows(write_rows(tmp_path, row_of(0, input=shown)), MediaStore())
    assert rows[0].messages[0].media[0].kind == "picture"


FACTS_ASK = """Write {{"description": ["…"]}}.
[Description of the preceding part]: {}
Known: {}"""


def semantic(clip: int, ask: str = FACTS_ASK, **more: Any) -> dict[str, Any]:
    blocks = [{"type": "video", "video": "c.mp4"}, {"type": "text", "text": ask}]
    return row_of(clip, type="semantic", memory_tag="x", input=blocks) | more


def write_semantic(folder: Path, *rows: dict[str, Any]) -> str:
    path = write_rows(folder, *rows)
    events = {"0": "face 1 sits {}", "1": "<face_1> greets <face_2>", "2": "face 3 leaves", "3": "the future"}
    (folder / "faces" / "v1" / "episodic_x.json").write_text(json.dumps(events))
    return path


def test_a_semantic_row_has_the_events_first_and_the_facts_second(tmp_path: Path) -> None:
    """The texts are those of TaskMem's own loader for these files (vl_dataset.py, commit f0148bc)."""
    rows = TaskMemRows(write_semantic(tmp_path, *(semantic(clip) for clip in range(3))), MediaStore())
    task = rows.with_history(2, {0: ["Face 1 is shy", "tea {0} is drunk"], 1: "(face_2) knows face_1"})
    events = "<face_4> sits {} <face_3> greets <face_4> face 3 leaves"
    facts = '[\n    "<face_4> is shy",\n    "tea {0} is drunk",\n    "<face_4> knows <face_3>"\n]'
    shown = 'Write {"description": ["…"]}.\n[Description of the preceding part]: %s\nKnown: %s'
    assert task.messages[0].text == shown % (events, facts)
    assert (task.metadata["episodic"], task.metadata["history"]) == (events, facts)
    assert rows[0].messages[0].text == shown % ("face 1 sits {}", "[]"), "no clip after its own is shown"
    assert [(rows.place_of(i).needs, rows.place_of(i).facts) for i in range(3)] == [
        ((), True),
        ((0,), True),
        ((0, 1), True),
    ]


def test_a_fresh_number_is_none_that_the_clip_itself_uses(tmp_path: Path) -> None:
    path = write_semantic(tmp_path, semantic(1))
    (tmp_path / "faces" / "v1" / "episodic_x.json").write_text(json.dumps({"0": "face 9 waits", "1": "<face_3> comes"}))
    assert TaskMemRows(path, MediaStore()).with_history(0, {}).metadata["episodic"] == "<face_4> waits <face_3> comes"


def test_the_facts_of_earlier_clips_come_from_the_policy_or_a_folder(tmp_path: Path) -> None:
    path = write_semantic(tmp_path, *(semantic(clip) for clip in range(2)))
    planner = CausalHistory(TaskStream([TaskMemRows(path, MediaStore())], [1.0], seed=0, shuffle=False))
    (first,) = planner.draw(1).tasks
    said = ("no JSON", '</think>{"description": ["<face_1> is shy", "it rains"]}')
    planner.observe([GroupOutcome(first.id, (0.0, 0.0), (None, None), said)])
    again = CausalHistory(TaskStream([TaskMemRows(path, MediaStore())], [1.0], seed=0, shuffle=False))
    again.load_state_dict(json.loads(json.dumps(planner.state_dict())))
    (second,) = again.draw(1).tasks
    assert json.loads(second.metadata["history"]) == ["<face_2> is shy", "it rains"]
    (tmp_path / "v1.json").write_text(json.dumps({"0": ["<face_1> is shy", "it rains"]}))
    assert TaskMemRows(path, MediaStore(), history_folder=str(tmp_path))[1].messages == second.messages


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"memory_tag": ""}, "'memory_tag'"),
        ({"episodic_folder": None}, "'episodic_folder'"),
        ({"memory_tag": "y"}, "episodic_y.json"),
        ({"video_idx": 7, "step": 1}, "no memory of clip 6"),
        ({"input": [{"type": "text", "text": "[Description of the preceding part]: {}"}]}, "second"),
        ({"input": [{"type": "text", "text": "[Description of the preceding part]: {} {} {}"}]}, "second"),
        ({"input": [{"type": "text", "text": '[Description of the preceding part]: {} {} {"a": 1}'}]}, "twice"),
        ({"input": [{"type": "text", "text": "[Description of the preceding part]: {} {:>99999999999}"}]}, "twice"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_with_a_semantic_row_is_said(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_semantic(tmp_path, semantic(1) | change)
    with pytest.raises(TaskError, match=problem) as refused:
        TaskMemRows(path, MediaStore()).with_history(0, {})
    assert "rows.jsonl:1" in str(refused.value)


def test_a_video_has_one_kind_of_memory(tmp_path: Path) -> None:
    with pytest.raises(TaskError, match=r"rows.jsonl:1.*'v1'"):
        TaskMemRows(write_semantic(tmp_path, row_of(0), semantic(1)), MediaStore())


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ({"id": "v1"}, "VIDEO\\*KEY"),
        ({"id": "../x*1"}, "VIDEO\\*KEY"),
        ({"id": "v\0*1"}, "'id'.*printable"),
        ({"id": "v\ud800*1"}, "'id'.*printable"),
        ({"id": "v" * 300 + "*1"}, "'id'.*200"),
        ({"type": "other"}, "'type' is 'other'"),
        ({"step": "1"}, "'step' must be a whole number"),
        ({"step": 3}, "before the first"),
        ({"input": []}, "input|content|text block"),
        ({"input": [{"type": "text", "text": "no mark {}"}]}, "Description of the preceding part"),
        ({"input": [{"type": "text", "text": MARK}], "video_idx": 1, "step": 1}, "after it a {}"),
        ({"input": [{"type": "video", "video": "c.mp4"}]}, "no text block"),
    ],
    ids=lambda value: str(value)[:20],
)
def test_what_is_wrong_with_a_row_is_said(change: dict[str, Any], problem: str, tmp_path: Path) -> None:
    path = write_rows(tmp_path, row_of(0) | change)
    with pytest.raises(TaskError, match=problem) as refused:
        TaskMemRows(path, MediaStore(), blank_history=True)[0]
    assert "rows.jsonl:1" in str(refused.value)


@pytest.mark.parametrize("kind", ["episodic_on_policy", "semantic"])
def test_a_row_of_step_0_needs_no_place_for_a_history(kind: str, tmp_path: Path) -> None:
    first = row_of(0, type=kind, memory_tag="x", input=[{"type": "text", "text": f"{MARK} nothing yet."}])
    assert TaskMemRows(write_semantic(tmp_path, first), MediaStore())[0].messages[0].text == f"{MARK} nothing yet."


def test_generated_clips_are_told_apart_and_true(tmp_path: Path) -> None:
    source: MemoryClips = build("source", "memory_clips", {"videos": 16, "together": 8}, store=MediaStore())
    truths = source.truths()
    assert len(truths) == 48
    for index in (0, 9, 23, 40):
        task = source[index]
        assert truths[task.messages[0].media[0].hash].description == task.answer == parse_memory(task.demonstration[0])
    colours = {task.metadata["video_id"]: task.answer.partition(">")[2] for task in map(source.__getitem__, range(8))}
    for index in range(8, 24):
        task = source[index]
        assert colours[task.metadata["video_id"]] in task.metadata["history"]
        assert f"<face_{task.answer[6]}>" in task.metadata["history"]
    blank = MemoryClips(store=MediaStore(), videos=16, history="blank")
    assert blank[23].metadata["history"] == ""


def test_the_planner_tells_generated_clips_what_was_written() -> None:
    source = MemoryClips(store=MediaStore(), videos=8)
    planner = CausalHistory(TaskStream([source], [1.0], seed=0, shuffle=False))
    tasks = planner.draw(8).tasks
    said = '</think>{"description": "<face_1> pink away"}'
    planner.observe([GroupOutcome(task.id, (0.0,), (None,), (said,)) for task in tasks])
    assert all("pink away" in task.metadata["history"] for task in planner.draw(8).tasks)


@pytest.mark.parametrize(
    "fence",
    ["```json\n%s\n```", "\n\n```\n%s```\n", "%s", " ```JSON %s ``` ", "```json\n%s", "%s\n```", "json\n%s", "`%s`"],
)
def test_a_memory_may_stand_in_a_fence_of_backticks(fence: str) -> None:
    assert parse_memory("hm</think>" + fence % '{"description": "a `red` square"}') == "a `red` square"
    assert parse_memory("hm</think>" + fence % '{"description": "a"} and more') is None
    assert parse_memory("hm</think>" + fence % '{"description": "half a character: \\ud800"}') is None
    assert parse_memory("hm</think>" + fence % '{"description": "a whole one: \\ud83d\\ude00"}') == "a whole one: 😀"
