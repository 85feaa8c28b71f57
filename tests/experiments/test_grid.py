"""The grid that arguments mean, and the names of its runs."""

from typing import Any

import pytest

from sensorium.experiments.experiment import label_of, name_of, points_of, read_arguments, short_names
from sensorium.recipe.yaml import read_yaml, value_text
from sensorium.vocabulary.errors import RecipeError


@pytest.mark.parametrize(
    ("argument", "values"),
    [
        ("seed=0..4", [0, 1, 2, 3, 4]),
        ("seed=7", [7]),
        ("k=-1..1,5", [-1, 0, 1, 5]),
        ("lr=1e-4,3e-4", [1e-4, 3e-4]),
        ("stop=[a,b],[c]", [["a", "b"], ["c"]]),
        ("k={a: 1, b: [2, 3]},null", [{"a": 1, "b": [2, 3]}, None]),
        ("k='a,b',c", ["a,b", "c"]),
        ("k=it's,that's", ["it's", "that's"]),
        ("k=true,false", [True, False]),
    ],
)
def test_values_are_cut_at_commas_outside_brackets_and_quotes(argument: str, values: list[Any]) -> None:
    key = argument.partition("=")[0]
    assert read_arguments([argument]) == ([], {key: values})


def test_one_value_is_shared_unless_its_key_is_swept_already() -> None:
    given = ["steps=20", "stop=[a,b]", "lr=0.1"]
    assert read_arguments(given) == (given, {})
    assert read_arguments(given, ["lr", "seed"]) == (["steps=20", "stop=[a,b]"], {"lr": [0.1]})


@pytest.mark.parametrize("argument", ["seed=4..0", "lr=0.1..0.5", "lr=1,,2", "lr", "=1", "seed=0..9999"])
def test_what_is_no_grid_is_refused_with_the_argument(argument: str) -> None:
    with pytest.raises(RecipeError, match=argument.replace(".", r"\.")):
        read_arguments([argument])
    with pytest.raises(RecipeError, match="given twice"):
        read_arguments(["lr=1", "lr=2,3"])


def test_points_are_all_combinations() -> None:
    points = points_of({"a": [1, 2], "seed": [0, 1]})
    assert points == [{"a": 1, "seed": 0}, {"a": 1, "seed": 1}, {"a": 2, "seed": 0}, {"a": 2, "seed": 1}]
    with pytest.raises(RecipeError, match=r"a has the value 1e-4 twice"):
        points_of({"a": [1e-4, 0.0001]})
    with pytest.raises(RecipeError, match="1,100 runs"):
        points_of({"a": list(range(11)), "seed": list(range(100))})


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (1e-4, "1e-4"),
        (3e-05, "3e-5"),
        (2.5e-7, "2.5e-7"),
        (0.5, "0.5"),
        (0.01, "0.01"),
        (1.0, "1.0"),
        (1e20, "1e20"),
        (7, "7"),
    ],
)
def test_a_number_is_written_as_people_do_and_reads_back(value: float, text: str) -> None:
    assert value_text(value) == text
    assert read_yaml(text, "")[0] == value


def test_a_run_is_named_by_its_settings_and_a_setting_leaves_the_seed_out() -> None:
    keys = ["optimizer.lr", "algorithm.critic.optimizer.lr", "seed"]
    assert short_names(keys) == {keys[0]: "optimizer.lr", keys[1]: "critic.optimizer.lr", "seed": "seed"}
    settings = {"optimizer.lr": 1e-4, "rollout.stop": ["a", "b"], "seed": 3}
    name = name_of(settings, list(settings))
    assert name.startswith("lr=1e-4,stop=a-b-")
    assert name.endswith(",seed=3")
    assert name != name_of(settings | {"rollout.stop": ["a-b"]}, list(settings)), (
        "what looks alike in a name is not the same"
    )
    assert label_of(settings, list(settings)) == 'lr=1e-4 stop=["a", "b"]'
