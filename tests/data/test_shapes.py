"""Shapes: the same task everywhere, honest splits, balanced answers, pictures that can be taken away."""

import hashlib
import io
from collections import Counter

import numpy as np
import pytest
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import ANSWERS, COLOURS, KINDS, PLACES, Shapes, ShapesScene
from sensorium.vocabulary.errors import TaskError
from sensorium.vocabulary.task import Task


def pixels(store: MediaStore, task: Task) -> np.ndarray:
    (media,) = task.messages[0].media
    return np.array(Image.open(io.BytesIO(store.bytes_of(media))).convert("RGB"))


def truth(scene: ShapesScene) -> str:
    """The answer read off the scene by someone who did not make it."""
    word = scene.question.rstrip("?").split()[-1]
    found = [thing for thing in scene.things if word in (thing.colour, thing.shape)]
    if scene.kind == "count":
        return str(len(found))
    (thing,) = found
    return {"colour": thing.colour, "shape": thing.shape, "place": PLACES[thing.quarter]}[scene.kind]


@pytest.mark.parametrize("split", ["train", "test"])
def test_every_question_has_exactly_one_right_answer(split: str) -> None:
    source = Shapes(store=MediaStore(), split=split, size=800)
    for index in range(800):
        scene = source.scene(index)
        assert truth(scene) == scene.answer
        assert len({thing.quarter for thing in scene.things}) == len(scene.things)


def test_the_picture_shows_the_scene() -> None:
    store = MediaStore()
    source = Shapes(store=store, size=200)
    for index in range(200):
        picture_HWC = pixels(store, source[index])
        assert picture_HWC.shape == (56, 56, 3)
        shown = {
            (2 * row + column, colour)
            for colour, rgb in COLOURS.items()
            for row in range(2)
            for column in range(2)
            if (picture_HWC[28 * row : 28 * row + 28, 28 * column : 28 * column + 28] == rgb).all(-1).sum() > 20
        }
        assert shown == {(thing.quarter, thing.colour) for thing in source.scene(index).things}


def test_the_four_shapes_are_told_apart_by_their_area() -> None:
    store = MediaStore()
    source = Shapes(store=store, size=4000, kinds=["shape"], picture_size=112)
    areas: dict[str, list[float]] = {shape: [] for shape in ANSWERS["shape"]}
    for index in range(100):
        task = source[index]
        (thing,) = [t for t in source.scene(index).things if t.colour == task.messages[0].text.rstrip("?").split()[-1]]
        rows, columns = np.nonzero((pixels(store, task) == COLOURS[thing.colour]).all(-1))
        box = (np.ptp(rows) + 1) * (np.ptp(columns) + 1)
        areas[thing.shape].append(len(rows) / box)
    means = {shape: float(np.mean(values)) for shape, values in areas.items()}
    assert means["square"] > 0.99 > means["circle"] > 0.7 > means["cross"] > means["triangle"] > 0.4


def test_an_index_gives_the_same_task_on_every_machine() -> None:
    one, two = MediaStore(), MediaStore()
    first, second = Shapes(store=one, size=64), Shapes(store=two, size=64)
    later = second[63]
    assert [first[i] for i in range(64)] == [second[i] for i in range(64)]
    assert first[63] == later
    digest = hashlib.sha256("".join(first[i].messages[0].media[0].hash for i in range(64)).encode()).hexdigest()
    assert digest[:16] == "393f0f63c79615ae"
    assert first[0] != Shapes(store=one, size=64, seed=1)[0]


def test_train_and_test_share_no_scene_and_no_picture() -> None:
    store = MediaStore()
    train, test = (Shapes(store=store, split=split, size=3000) for split in ("train", "test"))
    scenes = [{frozenset(source.scene(i).things) for i in range(3000)} for source in (train, test)]
    assert not scenes[0] & scenes[1]
    hashes = [{source[i].messages[0].media[0].hash for i in range(500)} for source in (train, test)]
    assert not hashes[0] & hashes[1]


def test_answers_are_balanced_so_that_guessing_gets_a_quarter() -> None:
    source = Shapes(store=MediaStore(), split="test", size=4000)
    scenes = [source.scene(index) for index in range(4000)]
    assert Counter(scene.kind for scene in scenes) == dict.fromkeys(KINDS, 1000)
    for kind in KINDS:
        answers = Counter(scene.answer for scene in scenes if scene.kind == kind)
        assert set(answers) == set(ANSWERS[kind])
        assert max(answers.values()) < 320
    by_question: dict[str, Counter[str]] = {}
    for scene in scenes:
        by_question.setdefault(scene.question, Counter())[scene.answer] += 1
    best = sum(max(counts.values()) for counts in by_question.values())
    assert best / 4000 < 0.34


def test_a_listing_names_what_stands_in_each_quarter() -> None:
    source = Shapes(store=MediaStore(), size=50, kinds=["list"])
    for index in range(50):
        things = {thing.quarter: thing for thing in source.scene(index).things}
        for quarter, words in enumerate(source[index].answer.split(", ")):
            assert words == (f"{things[quarter].colour} {things[quarter].shape}" if quarter in things else "none")


def test_a_blank_picture_shows_nothing_and_a_swapped_one_something_else() -> None:
    store = MediaStore()
    own, blank, swapped = (Shapes(store=store, size=200, picture=picture) for picture in ("own", "blank", "swapped"))
    for index in range(200):
        assert len(np.unique(pixels(store, blank[index]).reshape(-1, 3), axis=0)) == 1
        assert swapped[index].messages[0].media != own[index].messages[0].media
        assert blank[index].messages[0].text == swapped[index].messages[0].text == own[index].messages[0].text
        assert blank[index].answer == swapped[index].answer == own[index].answer
        assert len({own[index].id, blank[index].id, swapped[index].id}) == 3


def test_demonstrations_are_right_except_where_guesses_were_asked_for() -> None:
    source = Shapes(store=MediaStore(), size=1000, guessed=["count", "place"])
    right: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    for index in range(1000):
        task = source[index]
        (told,) = task.demonstration
        assert told.removeprefix("<answer>").removesuffix("</answer>") in ANSWERS[task.metadata["category"]]
        right[task.metadata["category"]].append(told == f"<answer>{task.answer}</answer>")
    assert all(right["colour"] + right["shape"])
    for kind in ("count", "place"):
        assert 0.15 < np.mean(right[kind]) < 0.35


@pytest.mark.parametrize(
    "options",
    [
        {"kinds": ["color"]},
        {"split": "tests"},
        {"picture": "blanked"},
        {"guessed": ["x"]},
        {"size": 0},
        {"picture_size": 4097},
    ],
)
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(TaskError):
        Shapes(store=MediaStore(), **options)  # type: ignore[arg-type]
