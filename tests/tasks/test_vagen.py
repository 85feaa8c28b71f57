"""VAGEN's own files of tasks: its seeds, its settings under our names, and splits that share nothing."""

from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import yaml

from sensorium.assembly.session import EnvironmentMaker
from sensorium.media.store import MediaStore
from sensorium.recipe.names import wrong_options
from sensorium.recipe.vagen_settings import environment_of, seeds_of
from sensorium.tasks.vagen import VagenTasks
from sensorium.vocabulary.errors import RecipeError, TaskError


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
    assert specs[0].options == {"max_turns": 4, "prompt": "full", "slippery": False, "size": 5}
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
        environment_of("x", ["sokoban"])


def test_pay_for_descriptions_is_translated() -> None:
    offered = ["sokoban", "frozen_lake"]

    def of(**config: Any) -> dict[str, Any]:
        return environment_of({"env_name": "sokoban", "env_config": {"prompt_format": "grounding", **config}}, offered)[1]

    usual = {"max_turns": 10**6, "prompt": "full", "response_format": "grounding"}
    assert of(use_state_reward=False, grounding_reward_weight=0.3) == usual
    assert of(use_state_reward=True) == usual | {"state_reward": 0.5}
    with pytest.raises(RecipeError, match="differ"):
        of(use_state_reward=True, grounding_reward_weight=0.3)


def test_settings_of_navigation_are_translated_and_its_task_files_are_not_guessed() -> None:
    config = {"prompt_format": "free_think", "success_threshold": 1.5, "resolution": 255, "fov": 100, "step_length": 0.5}
    name, options = environment_of({"env_name": "navigation", "env_config": config}, ["navigation", "ai2thor"])
    given = {
        "success_distance": 1.5,
        "side": 255,
        "field_of_view": 100,
        "step_length": 0.5,
        "response_format": "free_think",
    }
    assert (name, options) == ("navigation", {"max_turns": 10**6, "prompt": "full", **given})
    assert wrong_options("environment", name, options) == ("", "")
    with pytest.raises(RecipeError, match="environment ai2thor with tasks"):
        environment_of({"env_name": "navigation", "env_config": {"eval_set": "base"}}, ["navigation"])
