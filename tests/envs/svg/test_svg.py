"""The SVG environment: what is shown, what is paid by name, which pictures it plays with."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.data.environment_tasks import EnvironmentTasks, SvgFiles
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import decode_picture
from sensorium.data.rows import JsonlRows
from sensorium.envs.svg import draw, pixel_similarity, state_of, structural_similarity, target_code
from sensorium.recipe.registry import build, wrong_options
from sensorium.vocabulary import Task
from sensorium.vocabulary.content import Media, Text
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, TaskError

CIRCLE = '<svg viewBox="0 0 96 96"><circle cx="48" cy="48" r="20" fill="red"/></svg>'


def made(store: MediaStore | None = None, task: Task | None = None, **options: Any) -> Any:
    return build("environment", "svg", options, "x", store=store or MediaStore(), task=task)


def test_the_demonstration_draws_the_picture_and_is_paid_in_full() -> None:
    environment = made(response_format="grounding_worldmodeling", prompt="full", state_reward=0.25, side=64)
    head, first = environment.reset(5)
    assert "Say where shapes are" in head[0].content[0].text
    result = environment.step(environment.demonstrate())
    parts = {"format": 0.5, "pixel": 1.0, "structural": 1.0, "observation": 0.25, "prediction": 0.25}
    assert (result.reward, result.done, result.success) == (parts, False, None)
    (again,) = [block for block in result.observation.messages[0].content if isinstance(block, Media)]
    assert again.hash == first.messages[0].content[-1].hash
    result = environment.step(environment.demonstrate())
    assert (result.done, result.success, result.info["similarity"]) == (True, True, 1.0)
    with pytest.raises(EnvironmentFailure, match="reset it first"):
        environment.step("")


def test_an_answer_without_svg_that_is_drawn_ends_it_and_earns_nothing() -> None:
    for said, told in (("<answer>a circle</answer>", "no SVG"), ("<answer><svg><script/></svg></answer>", "refused")):
        environment = made(side=32)
        environment.reset(0)
        result = environment.step(said)
        assert (result.done, result.success, sum(result.reward.values())) == (True, False, 0.0)
        assert told in result.info["told"]


def test_the_last_answer_counts_and_code_outside_of_one_earns_no_format() -> None:
    environment = made(side=32, max_turns=5)
    environment.reset(0)
    right = environment.demonstrate()
    assert environment.step(right + "<answer><svg/></answer>").reward == {"format": 0.0, "pixel": 0.0, "structural": 0.0}
    assert environment.step(target_code(3, 4, 0)).reward == {"format": 0.0, "pixel": 1.0, "structural": 1.0}


def test_likeness_is_above_an_empty_canvas_and_grows_with_the_drawing() -> None:
    target, empty = draw(CIRCLE, 64), np.full((64, 64, 3), 255, np.uint8)
    moved, recoloured = draw(CIRCLE.replace("48", "60"), 64), draw(CIRCLE.replace("red", "blue"), 64)
    assert pixel_similarity(target, empty) == structural_similarity(target, empty) == 0.0
    assert pixel_similarity(target, target) == structural_similarity(target, target) == 1.0
    assert 0 < pixel_similarity(target, moved) < 1
    assert structural_similarity(target, moved) < 0.5 < structural_similarity(target, recoloured)
    assert pixel_similarity(empty, empty) == structural_similarity(empty, empty) == 1.0


def test_pictures_of_seeds_are_what_their_state_says_and_the_sides_share_none() -> None:
    assert state_of(CIRCLE, 3) == {"circle": frozenset({(1, 1)})}
    code = '<svg viewBox="0 0 64 64"><rect x="36" y="4" width="20" height="20"/><polygon points="16,40 30,60 2,60"/></svg>'
    assert state_of(code, 2) == {"rect": frozenset({(0, 1)}), "polygon": frozenset({(1, 0)})}
    store, options = MediaStore(), {"grid": 1, "shapes": 1, "side": 16}
    sides = [EnvironmentTasks("svg", store, options, split, 20) for split in ("train", "test")]  # type: ignore[arg-type]
    drawn = [{draw(target_code(1, 1, seed), 48).tobytes() for seed in tasks.seeds} for tasks in sides]
    assert [len(pictures) for pictures in drawn] == [20, 20]
    assert not drawn[0] & drawn[1]


def test_rows_bring_a_picture_or_code(tmp_path: Path) -> None:
    Image.new("RGB", (10, 20), "blue").save(tmp_path / "blue.png")
    rows = [
        {
            "messages": [{"role": "user", "content": [{"type": "image", "image": "blue.png"}]}],
            "environment": {"name": "svg"},
        },
        {"answer": CIRCLE, "environment": {"name": "svg", "options": {"side": 40}}},
        {"answer": "<svg><script/></svg>", "environment": {"name": "svg"}},
    ]
    (tmp_path / "rows.jsonl").write_text("\n".join(map(json.dumps, rows)))
    store = MediaStore()
    tasks = JsonlRows(str(tmp_path / "rows.jsonl"), store)
    blue = made(store, tasks[0], side=40)
    blue.reset(0)
    result = blue.step(
        '<answer><svg viewBox="0 0 40 40"><rect x="15" y="10" width="10" height="20" fill="blue"/></svg></answer>'
    )
    assert result.reward == {"format": 0.5, "pixel": 1.0, "structural": 1.0}
    with pytest.raises(EnvironmentFailure, match="no SVG code"):
        blue.demonstrate()
    circle = made(store, tasks[1], side=40)
    circle.reset(0)
    assert CIRCLE in circle.demonstrate()
    assert circle.step(circle.demonstrate()).reward["pixel"] == 1.0
    with pytest.raises(EnvironmentFailure, match="cannot be drawn: <script>"):
        made(store, tasks[2]).reset(0)
    with pytest.raises(EnvironmentFailure, match="state_reward needs"):
        made(store, tasks[0], state_reward=1.0, response_format="grounding").reset(0)


def test_a_folder_of_files_is_split_by_content(tmp_path: Path) -> None:
    for seed in range(12):
        (tmp_path / f"{seed}.svg").write_text(target_code(3, 4, seed))
        (tmp_path / f"again_{seed}.svg").write_text(target_code(3, 4, seed) + "\n")
    Image.new("RGB", (4, 4), "red").save(tmp_path / "red.png")
    store = MediaStore()
    sides = [SvgFiles(str(tmp_path), store, {"side": 32}, split) for split in ("train", "test", "all")]  # type: ignore[arg-type]
    ids = [{tasks[n].id for n in range(len(tasks))} for tasks in sides]
    assert not ids[0] & ids[1]
    assert len(ids[2]) == len(ids[0]) + len(ids[1]) == 13
    picture = next(sides[2][n] for n in range(13) if sides[2][n].id == "red.png")
    environment = made(store, picture, **dict(picture.environment.options))  # type: ignore[union-attr]
    shown = environment.reset(0)[1].messages[0].content[0]
    assert decode_picture(store.bytes_of(shown), "x").size == (32, 32)
    (tmp_path / "half.svg").write_text("<svg>")
    with pytest.raises(TaskError, match=r"half\.svg: there is no complete"):
        SvgFiles(str(tmp_path), store)
    (tmp_path / "half.svg").unlink()
    (tmp_path / "link.svg").symlink_to("/etc/hostname")
    with pytest.raises(TaskError, match="leads out of its folder"):
        SvgFiles(str(tmp_path), store)
    with pytest.raises(TaskError, match="is no folder"):
        SvgFiles(str(tmp_path / "none"), store)


def test_a_blank_view_shows_nothing_of_the_picture() -> None:
    store = MediaStore()
    shown = {made(store, view="blank", side=32).reset(seed)[1].messages[0].content[-1] for seed in (1, 2)}
    assert len(shown) == 1


def test_vision_models_are_terms_of_their_own(tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.Dinov2Config(
        hidden_size=16, num_hidden_layers=1, num_attention_heads=2, mlp_ratio=2, image_size=28, patch_size=14
    )
    transformers.Dinov2Model(config).save_pretrained(tmp_path / "dino")
    sizes = {"size": {"shortest_edge": 28}, "crop_size": {"height": 28, "width": 28}}
    transformers.BitImageProcessor(**sizes).save_pretrained(tmp_path / "dino")
    paths = {"dino_path": str(tmp_path / "dino"), "dreamsim_path": str(tmp_path / "dino")}
    environment = made(side=32, dino_weight=0.5, dreamsim_weight=5.0, pixel_weight=0.0, structural_weight=0.0, **paths)
    environment.reset(1)
    assert environment.step(environment.demonstrate()).reward == pytest.approx(
        {"format": 0.5, "dino": 0.5, "dreamsim": 5.0}
    )
    other = environment.step(f"<answer>{CIRCLE}</answer>").reward
    assert 0 <= other["dino"] < 0.5
    assert 0 <= other["dreamsim"] < 5.0
    broken = made(side=32, dino_weight=1.0, dino_path=str(tmp_path))
    broken.reset(1)
    with pytest.raises(RecipeError, match=r"no config\.json"):
        broken.step(f"<answer>{CIRCLE}</answer>")


def test_options_that_cannot_work_are_refused() -> None:
    with pytest.raises(RecipeError, match="dreamsim_path"):
        made(dreamsim_weight=5.0)
    with pytest.raises(RecipeError, match="shapes"):
        made(grid=2, shapes=5)
    assert wrong_options("environment", "svg", {"task": "x"})[0] == "task"


def test_short_prompts_are_short() -> None:
    head, first = made(side=32).reset(0)
    assert head[0].content == (Text("Draw this as SVG."),)
    assert len(first.messages[0].content) == 1


def test_a_drawing_of_another_shape_is_centred_on_white() -> None:
    for size in ("20 10", "10 20"):
        pixels = draw(f'<svg viewBox="0 0 {size}"><rect width="20" height="20" fill="red"/></svg>', 8)
        line = (pixels if size == "20 10" else pixels.transpose(1, 0, 2))[:, 4].tolist()
        assert line == [[255, 255, 255]] * 2 + [[255, 0, 0]] * 4 + [[255, 255, 255]] * 2
