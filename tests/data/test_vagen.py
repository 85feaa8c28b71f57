"""VAGEN's own files of tasks: its seeds, its settings under our names, and splits that share nothing."""

import json
import random
import re
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sensorium.assembly.playing import EnvironmentMaker
from sensorium.data.media_store import MediaStore
from sensorium.envs.ai2thor import ThorNavigation
from sensorium.envs.frozen_lake import FrozenLake
from sensorium.envs.sokoban import Sokoban
from sensorium.envs.svg import SvgDrawing
from sensorium.recipe.registry import wrong_options
from sensorium.systems.vagen.settings import LEGACY, environment_of, seeds_of
from sensorium.systems.vagen.tasks import VagenTasks
from sensorium.vocabulary.errors import RecipeError, TaskError


def offered(*names: str) -> dict[str, str]:
    return {name: name for name in names}


def written(folder: Path, held: Any) -> str:
    path = folder / "tasks.yaml"
    path.write_text(yaml.safe_dump(held))
    return str(path)


def test_the_seeds_are_those_that_vagen_draws() -> None:
    assert seeds_of(5, [1, 10000, 1], "FrozenLake") == [3768, 111, 7926, 6577, 1360]
    assert seeds_of(3, [1, 10000], "FrozenLake") == [8411, 7888, 5990]
    assert seeds_of(2, [0], "FrozenLake") == [1809629613, 1984054866]
    assert seeds_of(2, 0, "FrozenLake") == [1809629613, 1984054866]
    assert seeds_of(6, [3, 7, 3], "FrozenLake") == [6, 6, 3, 7, 7, 3]
    assert seeds_of(6, [1, 100, 4], "FrozenLake") == [10, 43, 35, 22, 49, 72]
    assert max(seeds_of(20, [1, 10, 2], "x").count(number) for number in range(1, 11)) == 2
    for seed in ([], [1, 2, 3, 4], [True], ["a"], [1, 2, 1]):
        with pytest.raises(RecipeError):
            seeds_of(5, seed, "x")  # type: ignore[arg-type]


def test_a_list_of_seeds(tmp_path: Path) -> None:
    entries = [
        {
            "name": "FrozenLake",
            "n_envs": 3,
            "seed": [1, 10000, 1],
            "max_turns": 4,
            "config": {"is_slippery": False, "size": 5},
        },
        {"name": "Sokoban", "n_envs": 2, "seed_list": [7, 8, 9], "data_source": "boxes", "config": {"dim_room": [6, 6]}},
    ]
    source = VagenTasks(written(tmp_path, {"envs": entries}), MediaStore())
    specs = [source[i].environment for i in range(len(source))]
    assert [(spec.name, spec.seed) for spec in specs if spec] == [
        ("frozen_lake", 3768), ("frozen_lake", 111), ("frozen_lake", 7926), ("sokoban", 7), ("sokoban", 8),
    ]  # fmt: skip
    assert specs[0] is not None
    assert specs[0].options == {
        "max_turns": 4, "prompt": "full", "slippery": False, "size": 5, "view": "text", "max_actions_per_turn": 5,
        "goal_reward": 1.0, "format_reward": 0.02, "response_format": "free_think",
    }  # fmt: skip
    assert source[3].metadata == {"category": "boxes"}
    assert len({source[i].id for i in range(5)}) == 5
    environment = EnvironmentMaker(MediaStore())(source[3])
    assert environment.reset(7)[0][0].role == "system"


def test_legacy_settings_are_split_by_content(tmp_path: Path) -> None:
    config = {"render_mode": "vision", "num_boxes": 1, "max_actions_per_step": 3, "prompt_format": "grounding"}
    path = written(tmp_path, {"boxes": {"env_name": "sokoban", "env_config": config, "train_size": 20, "test_size": 10}})
    train, test = (VagenTasks(path, MediaStore(), split=split) for split in ("train", "test"))  # type: ignore[arg-type]
    assert (len(train), len(test)) == (20, 10)
    seeds = [{source[i].environment.seed for i in range(len(source))} for source in (train, test)]  # type: ignore[union-attr]
    assert not seeds[0] & seeds[1]
    spec = train[0].environment
    assert spec is not None
    assert spec.options == {
        "max_turns": 5, "prompt": "full", "view": "picture", "boxes": 1, "max_actions_per_turn": 3,
        "response_format": "grounding",
    }  # fmt: skip


def test_parquet_rows(tmp_path: Path) -> None:
    rows = [
        {"data_source": "lake", "prompt": [{"content": "", "role": "user"}],
         "extra_info": {"split": split, "env_name": "frozenlake", "env_config": {"size": 4, "p": 0.9}, "seed": seed}}
        for seed, split in enumerate(["train", "train", "test"])
    ]  # fmt: skip
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    train, test = (VagenTasks(str(tmp_path / "rows.parquet"), MediaStore(), split=s) for s in ("train", "test"))  # type: ignore[arg-type]
    assert (len(train), len(test)) == (2, 1)
    assert test[0].environment is not None
    assert (test[0].environment.seed, test[0].environment.options["p"]) == (2, 0.9)


@pytest.mark.parametrize(
    ("held", "problem"),
    [
        ({"envs": [{"name": "Tetris", "n_envs": 1}]}, "unknown environment 'Tetris'"),
        ({"envs": [{"name": "gymnasium", "n_envs": 1, "config": {"id": "x"}}]}, "unknown environment"),
        ({"envs": [{"name": "Sokoban"}]}, "an entry has"),
        ({"envs": [{"name": "Sokoban", "n_envs": 2, "seed_list": [1]}]}, "seed_list has 1"),
        ({"envs": [{"name": "Sokoban", "n_envs": 1, "config": {"search_depth": 3}}]}, "no option 'search_depth'"),
        ({"a": {"env_name": "sokoban", "test_size": 3}}, "no tasks of split 'train'"),
        ([1], "neither"),
    ],
)
def test_what_cannot_be_played_names_the_place(tmp_path: Path, held: Any, problem: str) -> None:
    with pytest.raises(TaskError, match=problem):
        VagenTasks(written(tmp_path, held), MediaStore())


def test_only_its_own_files_are_read(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match="no \\.parquet"):
        VagenTasks(str(tmp_path / "x.json"), MediaStore())
    with pytest.raises(TaskError, match="cannot read"):
        VagenTasks(str(tmp_path / "x.yaml"), MediaStore())
    with pytest.raises(RecipeError, match="env_config"):
        environment_of("x", offered("sokoban"))


def test_pay_for_descriptions_is_translated() -> None:
    def of(**config: Any) -> dict[str, Any]:
        return environment_of(
            {"env_name": "sokoban", "env_config": {"prompt_format": "grounding", **config}}, offered("sokoban")
        )[1]

    usual = {"max_turns": 10**6, "prompt": "full", "max_actions_per_turn": 3, "response_format": "grounding"}
    assert of(use_state_reward=False, grounding_reward_weight=0.3) == usual
    assert of(use_state_reward=True) == usual | {"state_reward": 0.5}
    with pytest.raises(RecipeError, match="differ"):
        of(use_state_reward=True, grounding_reward_weight=0.3)


def test_sokobans_longest_solution_and_structured_descriptions_are_translated() -> None:
    config = {"min_actions_to_succeed": 9, "prompt_format": "grounding_structured", "use_state_reward": True}
    _, options = environment_of({"env_name": "sokoban", "env_config": config}, offered("sokoban"))
    assert (options["max_solution"], options["response_format"]) == (9, "grounding")
    room = Sokoban(MediaStore(), **options)
    room.reset(3)
    said = '{"player": (9, 9), "box": (9, 9)}'
    places = re.findall(r"(\w+) at (\([^)]*\))", room.demonstrate())
    right = "{" + ", ".join(f'"{kind}": {place}' for kind, place in places) + "}"
    answer = "<think><observation>{}</observation><reasoning>…</reasoning></think><answer>Up</answer>"
    paid = [room.step(answer.format(words)).reward for words in (right, said)]
    assert [parts["observation"] for parts in paid if isinstance(parts, dict)] == [0.5, 0.0]
    _, options = environment_of(
        {"env_name": "frozenlake", "env_config": {"min_actions_to_succeed": 5}}, offered("frozen_lake")
    )
    assert FrozenLake(MediaStore(), **options)


def test_settings_that_do_nothing_in_vagen_are_taken_and_do_nothing() -> None:
    """The sokoban that VAGEN wraps ends after max_steps moves, and VAGEN does not look at that."""
    plain = environment_of({"env_name": "sokoban"}, offered("sokoban"))
    config = {"max_steps": 100, "special_token_list": ["<think>", "</think>", "<answer>", "</answer>"]}
    for current in (False, True):
        found = environment_of({"env_name": "sokoban", "env_config": config}, offered("sokoban"), current)
        assert found == environment_of({"env_name": "sokoban"}, offered("sokoban"), current)
    assert "max_steps" not in plain[1]
    walk = environment_of({"env_name": "navigation", "env_config": {"max_steps": 20}}, offered("navigation"))
    assert walk[1]["max_steps"] == 20


def test_settings_of_navigation_are_translated_and_its_task_files_are_not_guessed() -> None:
    config = {"prompt_format": "free_think", "success_threshold": 1.5, "resolution": 255, "fov": 100, "step_length": 0.5}
    name, options = environment_of({"env_name": "navigation", "env_config": config}, offered("navigation", "ai2thor"))
    given = {
        "success_distance": 1.5,
        "side": 255,
        "field_of_view": 100,
        "step_length": 0.5,
        "response_format": "free_think",
    }
    assert (name, options) == ("navigation", {"max_turns": 10**6, "prompt": "full", **given})
    assert wrong_options("environment", name, options) == ("", "")
    with pytest.raises(RecipeError, match=r"ai2thor=FILE\.yaml"):
        environment_of({"env_name": "navigation", "env_config": {"eval_set": "base"}}, offered("navigation"))


def today(folder: Path, *entries: Any, **more: Any) -> tuple[str, dict[str, Any], int]:
    """Of an entry of today's list: the environment, its options, and the first seed."""
    source = VagenTasks(written(folder, {"envs": list(entries)}), MediaStore(), **more)
    spec = source[0].environment
    assert spec is not None
    return spec.name, spec.options, spec.seed


def test_sokoban_of_today_is_played_with_its_own_defaults(tmp_path: Path) -> None:
    entry = {
        "name": "Sokoban", "n_envs": 1, "seed": [1, 10000, 1], "max_turns": 5,
        "config": {"render_mode": "vision", "min_solution_steps": [1, 5], "prompt_format": "free_wm"},
    }  # fmt: skip
    name, options, seed = today(tmp_path, entry)
    assert (name, seed) == ("sokoban", seeds_of(1, [1, 10000, 1], "Sokoban")[0])
    assert options == {
        "max_turns": 5, "prompt": "full", "max_actions_per_turn": 3, "success_reward": 1.0, "format_reward": 0.1,
        "step_reward": 0.0, "box_reward": 0.0, "view": "picture", "response_format": "free_wm", "min_solution": 1,
        "max_solution": 5,
    }  # fmt: skip
    room = EnvironmentMaker(MediaStore())(VagenTasks(written(tmp_path, {"envs": [entry]}), MediaStore())[0])
    room.reset(seed)
    result = room.step("<observation>o</observation>So <answer>Up</answer> then <prediction>p</prediction>")
    assert result.info["format"]
    assert result.reward == {"success": 0.0, "format": 0.1}


def test_navigation_of_today_goes_to_the_task_file_that_the_recipe_names(tmp_path: Path) -> None:
    pose = {"position": {"x": 0, "y": 0, "z": 0}, "rotation": 0, "horizon": 0}
    task = {"scene": "FloorPlan1", "instruction": "go", "target_position": {"x": 1, "z": 1}, "agentPose": pose}
    (tmp_path / "base.json").write_text(json.dumps({"tasks": [task]}))
    client = {"base_urls": "http://localhost:8000", "timeout": 120, "retries": 3}
    config = {**client, "eval_set": "base", "prompt_format": "eval_mode", "max_actions_per_step": 5}
    entry = {"name": "RemoteEnv", "n_envs": 1, "data_source": "navigation", "seed": [0, 30], "config": config}
    with pytest.raises(TaskError, match=r"ai2thor: \{tasks"):
        today(tmp_path, entry)
    tasks = str(tmp_path / "{eval_set}.json")
    name, options, seed = today(tmp_path, entry, options={"ai2thor": {"tasks": tasks}})
    assert (name, seed) == ("ai2thor", seeds_of(1, [0, 30], "RemoteEnv")[0])
    assert options == {
        "max_turns": 5, "prompt": "full", "action_names": "move_forward", "success_reward": 1.0, "format_reward": 0.01,
        "success_distance": 1.0, "step_length": 0.3, "response_format": "eval_mode", "max_actions_per_turn": 5,
        "tasks": tasks, "eval_set": "base",
    }  # fmt: skip
    assert json.loads(ThorNavigation.content_key(seed, options)) == task
    with pytest.raises(RecipeError, match=r"common_sense\.json"):
        ThorNavigation(MediaStore(), **options | {"eval_set": "common_sense"})
    with pytest.raises(RecipeError, match=r"Write \{eval_set\}"):
        ThorNavigation(MediaStore(), str(tmp_path / "base.json"), eval_set="common_sense")
    config["eval_set"] = "../etc/passwd"
    with pytest.raises(TaskError, match="name of a task file"):
        today(tmp_path, entry, options={"ai2thor": {"tasks": tasks}})
    with pytest.raises(RecipeError, match="name of a task file"):
        ThorNavigation(MediaStore(), tasks, eval_set="../etc/passwd")


def test_svg_needs_the_folders_of_its_models_from_the_recipe(tmp_path: Path) -> None:
    config = {
        "prompt_format": LEGACY, "split": "train", "dino_weight": 0.5, "structural_weight": 0.0, "dreamsim_weight": 0.0,
        "device": {"dino": 0, "dreamsim": 0},
    }  # fmt: skip
    path = written(tmp_path, {"env1": {"env_name": "svg", "env_config": config, "train_size": 2, "test_size": 0}})
    with pytest.raises(TaskError, match=r"options: \{svg: \{dino_path: folder\}\}"):
        VagenTasks(path, MediaStore())
    source = VagenTasks(path, MediaStore(), options={"svg": {"dino_path": "models/dino", "device": "cpu"}})
    spec = source[0].environment
    assert spec is not None
    assert (len(source), spec.name) == (2, "svg")
    assert spec.options == {
        "max_turns": 5, "prompt": "full", "response_format": LEGACY, "pixel_weight": 0.0, "structural_weight": 0.0,
        "dino_weight": 0.5, "dreamsim_weight": 0.0, "dino_path": "models/dino", "device": "cpu",
    }  # fmt: skip


def test_svg_plays_the_rows_of_vagens_data_set(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A local folder stands for the data set of that name: the library looks there before it asks the hub."""
    folder = tmp_path / "starvector" / "svg-icons-simple"
    folder.mkdir(parents=True)
    drawn = [f'<svg viewBox="0 0 8 8"><circle cx="4" cy="4" r="{radius}" fill="red"/></svg>' for radius in range(1, 8)]
    for split, codes in (("train", drawn[:5]), ("test", drawn[5:])):
        rows = [{"Filename": f"{number}.svg", "Svg": code} for number, code in enumerate(codes)]
        pq.write_table(pa.Table.from_pylist(rows), folder / f"{split}-00000-of-00001.parquet")
    monkeypatch.chdir(tmp_path)
    config = {
        "dataset_name": "starvector/svg-icons-simple", "data_dir": "data", "seed": 42, "split": "test",
        "prompt_format": "free_think",
    }  # fmt: skip
    rows = [
        {"data_source": "svg", "extra_info": {"env_name": "svg", "env_config": config, "seed": seed}} for seed in range(4)
    ]
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "rows.parquet")
    source = VagenTasks(str(tmp_path / "rows.parquet"), MediaStore())
    for seed in range(4):
        environment = EnvironmentMaker(MediaStore())(source[seed])
        environment.reset(seed)
        meant = drawn[5:][random.Random(seed).randint(0, 1)]
        assert meant in environment.demonstrate()
        spec = source[seed].environment
        assert spec is not None
        assert SvgDrawing.content_key(seed, spec.options) == meant
    with pytest.raises(TaskError):
        SvgDrawing(MediaStore(), dataset="starvector/svg-icons-simple", dataset_split="other")
    with pytest.raises(TaskError, match="Code"):
        SvgDrawing(MediaStore(), dataset="starvector/svg-icons-simple", dataset_column="Code")


def test_primitive_skills_need_the_modules_that_register_them(tmp_path: Path) -> None:
    config = {"env_id": "AlignTwoCube", "prompt_format": "wm", "action_sep": "|", "render_mode": "vision"}
    entry = {"name": "RemoteEnv", "n_envs": 1, "data_source": "AlignTwoCube", "seed": [0, 5000], "config": config}
    with pytest.raises(TaskError, match="name the modules that register it"):
        today(tmp_path, entry)
    name, options, _ = today(tmp_path, entry, options={"primitive_skill": {"modules": ["cubes"], "render_backend": "cpu"}})
    assert name == "primitive_skill"
    assert options == {
        "max_turns": 5, "prompt": "full", "id": "AlignTwoCube", "response_format": "wm", "view": "picture",
        "format_reward": 0.1, "modules": ["cubes"], "render_backend": "cpu",
    }  # fmt: skip
    config["env_id"] = "os:system"
    with pytest.raises(TaskError, match="env_id is one of AlignTwoCube"):
        today(tmp_path, entry, options={"primitive_skill": {"modules": ["cubes"]}})


@pytest.mark.parametrize(
    ("name", "config", "problem"),
    [
        ("navigation", {"format_reward": 0.5}, "per_turn_format_reward"),
        ("navigation", {"multiview": True}, "multiview: True has no counterpart"),
        ("navigation", {"action_sep": ","}, "separated by '|'"),
        ("svg", {"dataset_name": "../secret/rows"}, "a data set of the hub"),
        ("FrozenLake", {"special_token_list": ["Left"]}, "special_token_list"),
        ("FrozenLake", {"slip_prob": 0.02}, "slip_prob: 0.02 has no counterpart"),
        ("FrozenLake", {"prompt_format": "grounding_symbolic"}, "Use grounding."),
    ],
)
def test_what_has_no_counterpart_is_refused_with_the_cause(name: str, config: dict[str, Any], problem: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(problem)):
        environment_of({"env_name": name, "env_config": config}, offered("navigation", "svg", "frozen_lake"), current=True)
