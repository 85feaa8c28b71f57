"""Face ids from clip to clip: boundary-aware, deterministic, collision-free."""

import json
import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.systems.taskmem.memory_rows import read_face_maps, rewrite_faces
from sensorium.vocabulary.errors import TaskError

MAPS = {3: {7: 1, 8: 2}, 4: {8: 1}, 5: {8: 4}}


def test_the_example_of_the_page() -> None:
    found = rewrite_faces({3: "<face_1> waves to face 2", 4: "<face_1> leaves"}, MAPS, 5)
    assert found == {3: "<face_5> waves to <face_4>", 4: "<face_4> leaves"}


@pytest.mark.parametrize(
    "spelling",
    ["<face_1>", "<face 1>", "face_1", "Face 1", "[face_1]", "< FACE-1 >", "face1", "(face_1)", "<face_1", "face_1>"],
)
def test_every_spelling_of_a_face_is_taken(spelling: str) -> None:
    assert rewrite_faces({4: f"so {spelling} leaves"}, MAPS, 5) == {4: "so <face_4> leaves"}


@pytest.mark.parametrize("text", ["a surface 3 of stone", "interface_1", "preface 2", "faces 1 and 2", "to face the 3"])
def test_what_is_no_face_stays(text: str) -> None:
    assert rewrite_faces({4: text}, MAPS, 5) == {4: text}


def test_a_number_that_nobody_has_is_no_face() -> None:
    text = f"<face_{'9' * 5000}> meets <face_0001>"
    assert rewrite_faces({4: text}, MAPS, 5) == {4: text.replace("<face_0001>", "<face_4>")}


def test_ids_are_exchanged_in_one_pass() -> None:
    maps = {1: {10: 1, 20: 2}, 2: {10: 2, 20: 1}}
    assert rewrite_faces({1: "<face_1> <face_2> <face_1>"}, maps, 2) == {1: "<face_2> <face_1> <face_2>"}


def test_fresh_ids_come_after_locals_with_gaps_and_do_not_collide() -> None:
    maps = {1: {1: 1, 2: 2, 3: 3}, 2: {3: 9, 1: 2}}
    assert rewrite_faces({1: "<face_2> <face_3> <face_1>"}, maps, 2) == {1: "<face_10> <face_9> <face_2>"}


def test_an_id_that_no_map_knows_is_a_person_of_its_own() -> None:
    found = rewrite_faces({3: "<face_9> and <face_1>", 4: "<face_9>"}, MAPS, 5)
    assert found == {3: "<face_5> and <face_6>", 4: "<face_7>"}


ids = st.integers(0, 12)
maps_of = st.dictionaries(st.integers(0, 5), st.dictionaries(ids, ids, max_size=4), max_size=6)


@given(maps_of, st.dictionaries(st.integers(0, 4), st.lists(ids, max_size=5), max_size=5))
def test_people_stay_apart_and_the_same(maps: dict[int, dict[int, int]], said: dict[int, list[int]]) -> None:
    memories = {clip: " ".join(f"<face_{n}>" for n in numbers) for clip, numbers in said.items()}
    found = rewrite_faces(memories, maps, 5)
    assert found == rewrite_faces(dict(reversed(memories.items())), maps, 5)
    names: dict[object, str] = {}
    for clip, numbers in said.items():
        inverse = {local: person for person, local in sorted(maps.get(clip, {}).items(), reverse=True)}
        for number, name in zip(numbers, re.findall(r"<face_\d+>", found[clip]), strict=True):
            who: object = inverse.get(number, ("strange", clip, number))
            assert names.setdefault(who, name) == name
            if who in maps.get(5, {}):
                assert name == f"<face_{maps[5][who]}>"  # type: ignore[index]
    here = maps.get(5, {})
    elsewhere = {name for who, name in names.items() if who not in here}
    assert len(elsewhere) == sum(who not in here for who in names)
    assert not elsewhere & {f"<face_{local}>" for local in here.values()}


def test_maps_are_read_and_bad_ones_refused(tmp_path: Path) -> None:
    path = tmp_path / "m.json"
    assert read_face_maps(path) == {}
    path.write_text(json.dumps({"3": {"[face_7]": "<face_1>"}}))
    assert read_face_maps(path) == {3: {7: 1}}
    for wrong in ("{", "[]", '{"3": {"x": "<face_1>"}}', '{"a": {}}', '{"3": {}, "3": {"[face_7]": "<face_1>"}}'):
        path.write_text(wrong)
        with pytest.raises(TaskError, match="face maps"):
            read_face_maps(path)
