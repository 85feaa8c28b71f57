"""A recipe means what it says, and what is wrong with it is said once, where it stands, with the way out."""

import subprocess
import sys
from pathlib import Path

import pytest
import yaml as pyyaml
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.recipe import Recipe, dump_recipe, load_recipe, parse_recipe, yaml
from sensorium.recipe.load import shipped_recipes
from sensorium.recipe.registry import resolve
from sensorium.recipe.yaml import read_yaml
from sensorium.vocabulary.errors import RecipeError

GOOD = """\
name: trial
steps: 4
model:
  path: tiny:qwen3_vl
tasks:
  train:
    - source: shapes
      options: {split: train, size: 64}
  evaluate:
    - source: shapes
      options: {split: test, size: 16}
batch:
  prompts_per_step: 4
  group_size: 4
rewards:
  terms:
    - name: exact
    - name: format
      weight: 0.1
optimizer:
  lr: 1e-4
"""


def refused(*overrides: str, text: str = GOOD) -> str:
    """The one paragraph that refuses a recipe."""
    with pytest.raises(RecipeError) as caught:
        parse_recipe(text, "trial.yaml", overrides)
    paragraph = str(caught.value)
    assert "\n" not in paragraph
    return paragraph


def test_every_shipped_recipe_parses_and_comes_back_from_its_dump() -> None:
    recipes = shipped_recipes()
    assert {"shapes", "frozen_lake"} <= set(recipes)
    for name, path in recipes.items():
        recipe = load_recipe(path)
        assert parse_recipe(dump_recipe(recipe), f"{name} dumped") == recipe


def test_loading_a_recipe_imports_no_torch(tmp_path: Path) -> None:
    path = tmp_path / "trial.yaml"
    path.write_text(GOOD)
    code = (
        "import sys, sensorium.recipe as r; assert 'torch' not in sys.modules, 'import'; "
        "from sensorium.recipe.plan import make_plan; "
        f"make_plan(r.load_recipe({str(path)!r}, ['steps=2'])); "
        "assert 'torch' not in sys.modules, 'load'; assert 'transformers' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=600)


def test_numbers_are_numbers_and_words_are_words() -> None:
    data, _ = read_yaml("[1e-6, 1E5, .5, 010, 0x10, no, on, 1:30, 2024-01-01, true, ~, -3, '7']", "list")
    assert data == [1e-6, 1e5, 0.5, 10, 16, "no", "on", "1:30", "2024-01-01", True, None, -3, "7"]


@pytest.mark.parametrize(
    "text", [GOOD, "a: [1, 0x1f, 007, no, ~]\nb: 'ü\u2028'\n'c':\n- |\n  two\n  lines\n- {d: -1e-6}\n"]
)
def test_a_text_means_the_same_with_and_without_libyaml(text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert pyyaml.__with_libyaml__, "what these tests install has it"
    fast, (value, lines) = yaml._composed(text)[0], read_yaml(text, "text")
    assert isinstance(fast, pyyaml.CSafeLoader)
    monkeypatch.setattr(yaml, "DEEPEST", 0)
    assert not isinstance(yaml._composed(text)[0], pyyaml.CSafeLoader)
    assert read_yaml(text, "text") == (value, lines)


@pytest.mark.parametrize("text", ["[" * 50_000, "- " * 50_000 + "x", "{a: " * 50_000, "? " * 50_000])
def test_a_text_that_is_nested_too_deep_does_not_end_the_process(text: str) -> None:
    with pytest.raises(RecipeError, match="deep"):
        read_yaml(text, "text")


def test_aliases_of_aliases_are_refused() -> None:
    text = "a0: &a0 [1, 2]\n" + "".join(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]\n" for n in range(1, 12))
    with pytest.raises(RecipeError, match="alias"):
        read_yaml(text, "text")


def test_overrides_reach_keys_list_items_and_options() -> None:
    recipe = parse_recipe(
        GOOD,
        "trial.yaml",
        [
            "batch.group_size=8",
            "tasks.train.0.options.size=100",
            "rewards.terms.1.weight=0.5",
            "algorithm.kl={coef: 0.01}",
            "logging.loggers=[tensorboard]",
            "optimizer.lr=3e-5",
            "optimizer.group_lr.vision=1e-6",
            "run_dir=runs/elsewhere",
        ],
    )
    assert recipe.batch.group_size == 8
    assert recipe.tasks.train[0].options == {"split": "train", "size": 100}
    assert recipe.rewards.terms[1].weight == 0.5
    assert recipe.algorithm.kl.coef == 0.01
    assert recipe.logging.loggers == ("tensorboard",)
    assert recipe.optimizer.lr == 3e-5
    assert recipe.optimizer.group_lr == {"vision": 1e-6}
    assert recipe.directory == Path("runs/elsewhere")


@given(
    st.builds(
        dict,
        steps=st.integers(0, 10**6),
        seed=st.integers(0, 2**31),
        lr=st.floats(1e-12, 1.0),
        options=st.dictionaries(
            st.text(min_size=1, max_size=5), st.one_of(st.integers(), st.floats(-1e6, 1e6), st.text(max_size=8))
        ),
    )
)
@settings(max_examples=60, deadline=None)
def test_any_recipe_comes_back_from_its_dump(values: dict) -> None:
    recipe = Recipe.model_validate(
        {
            "name": "any",
            "steps": values["steps"],
            "seed": values["seed"],
            "model": {"path": "tiny:qwen2"},
            "tasks": {"train": [{"source": "tests_of_load:Source", "options": values["options"]}]},
            "rewards": {"terms": [{"name": "tests_of_load:Term"}]},
            "optimizer": {"lr": values["lr"], "betas": [0.9, 0.95]},
        }
    )
    data, _ = read_yaml(dump_recipe(recipe), "dump")
    assert Recipe.model_validate(data) == recipe
    assert data["tasks"]["train"][0]["options"] == values["options"]


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (GOOD.replace("group_size", "groupsize"), "line 14: unknown key 'batch.groupsize'; did you mean 'group_size'?"),
        (GOOD.replace("weight", "wieght"), "line 19: unknown key 'rewards.terms.1.wieght'; did you mean 'weight'?"),
        (GOOD.replace("optimizer:", "optimiser:"), "line 20: unknown key 'optimiser'; did you mean 'optimizer'?"),
        (GOOD.replace("steps: 4", "steps: four"), "trial.yaml, line 2: 'steps' is 'four'; it must be a whole number."),
        (GOOD.replace("steps: 4", "steps: 4.5"), "'steps' is 4.5; it must be a whole number."),
        (GOOD.replace("steps: 4", "steps: '4'"), "'steps' is '4'; it must be a whole number."),
        (GOOD.replace("steps: 4\n", ""), "trial.yaml: the key 'steps' is missing"),
        (GOOD.replace("steps: 4", "steps: -1"), "'steps' is -1; it must be greater than or equal to 0."),
        (GOOD.replace("1e-4", ".nan"), "'optimizer.lr' is nan; it must be"),
        (GOOD.replace("name: trial", "name: a/b"), "'name' is 'a/b'; use letters"),
        (GOOD.replace("  group_size: 4\n", "  group_size: 4\n" * 2), "line 15: 'batch.group_size' was given before"),
        (GOOD + "batch: 3\n", "line 22: 'batch' was given before, on line 12"),
        (GOOD + "critic: {<<: {a: 1}}\n", "line 22: '<<' merges mappings in YAML 1.1"),
        (GOOD.replace("steps: 4", "steps: [4"), "trial.yaml, line 3: not valid YAML"),
        ("- a\n- b\n", "trial.yaml: a recipe is a mapping of keys to values, and this is a list."),
    ],
)  # fmt: skip
def test_what_is_wrong_in_the_file_is_named_with_its_line(text: str, said: str) -> None:
    assert said in refused(text=text)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("rollout.engin.name=x", "override 'rollout.engin.name=x': unknown key 'rollout.engin'; did you mean 'engine'?"),
        ("batch.group_sise=8", "override 'batch.group_sise=8': unknown key 'batch.group_sise'; did you mean 'group_size'?"),
        ("batch.group_size=x", "override 'batch.group_size=x': 'batch.group_size' is 'x'; it must be a whole number."),
        ("batch.group_size", "write it as key=value"),
        ("tasks.train.3.source=shapes", "'tasks.train' is a list and '3' is none of its items; it has 1 items"),
        ("name.first=x", "'name' is a text, so it has no 'first' inside."),
        ("model.dtype=float16", "'model.dtype' is 'float16'; it must be 'float32' or 'bfloat16'."),
        (
            "model.gradient_checkpointing=yes",
            "gradient_checkpointing' is 'yes'; it must be false, true, 'selective' or 'auto'.",
        ),
        ("tasks.train=[]", "'tasks.train' needs at least 1 items and has 0."),
        ("batch.group_size=" + "[" * 5000, "not valid YAML: it is nested too deep"),
        ("tasks.train.0.options.size=many", "source 'shapes' has 'size' as 'many'; it must be a whole number."),
        ("tasks.train.0.options.size=2.5", "it must be a whole number"),
        (f"tasks.train.0.options.size={10**30}", "a whole number of at most 62 bits"),
        (f"steps={10**30}", "'steps' is 1000000000000000000000000000000; it must be at most 1,000,000,000,000."),
        (f"batch.prompts_per_step={10**9}", "episodes a step; a step has at most 1,000,000."),
        ("optimizer.lr=1e-320", "a number here must be between 1e-30 and 1e+30, or 0."),
        ("logging.episodes_gib=1e308", "a number here must be between"),
        ("batch.group_size=[", "override 'batch.group_size=[': not valid YAML"),
    ],
)
def test_what_is_wrong_in_an_override_is_named_with_it(override: str, said: str) -> None:
    assert said in refused(override)


@pytest.mark.parametrize(
    ("override", "said"),
    [
        ("model.family=qwen3vl", "unknown family 'qwen3vl'; did you mean 'qwen3_vl'?"),
        ("model.device=gpu", "unknown device 'gpu'"),
        ("model.path=tiny:qwen3_v", "unknown family 'qwen3_v'; did you mean 'qwen3_vl'?"),
        ("model.path=package:no_such_model", "the package ships no model 'no_such_model'"),
        ("tasks.train.0.source=shape", "unknown source 'shape'; did you mean 'shapes'?"),
        ("tasks.train=[{source: environments, options: {environment: lake}}]", "unknown environment 'lake'; did you mean"),
        ("tasks.evaluate.0.options.splt=test", "source 'shapes' has no option 'splt'; did you mean 'split'?"),
        ("rewards.terms.0.name=exakt", "unknown reward 'exakt'; did you mean 'exact'?"),
        ("rewards.terms.0.name=no_such_module:Term", "cannot load reward 'no_such_module:Term'"),
        ("rollout.engine=natif", "unknown engine 'natif'; did you mean 'native'?"),
        ("algorithm.advantage.name=gpro", "unknown advantage 'gpro'; did you mean 'grpo'?"),
        ("algorithm.loss.name=clipp", "unknown loss 'clipp'; did you mean 'clip'?"),
        ("algorithm.advantage.name=zzz", "registered by the script that trains or resumes (sn.resume)"),
        ("logging.loggers=[tensorbord]", "unknown logger 'tensorbord'; did you mean 'tensorboard'?"),
        ("model.freeze=[visoin]", "unknown parameter group 'visoin'; did you mean 'vision'?"),
        ("optimizer.group_lr.langage=1e-3", "unknown parameter group 'langage'; did you mean 'language'?"),
        ("warm_start.optimizer={group_lr: {heads: 1e-3}}", "unknown parameter group 'heads'; did you mean 'head'?"),
    ],
)  # fmt: skip
def test_unknown_names_are_refused_with_the_nearest(override: str, said: str) -> None:
    paragraph = refused(override)
    assert said in paragraph
    assert paragraph.startswith(f"override '{override}': ")


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        (["batch.group_size=1"], "group_size must be at least 2"),
        (["batch.group_size=1", "algorithm.advantage.name=rloo"], "rloo compares the episodes of a group"),
        (["selection.max_rounds=3"], "max_rounds 3 does nothing: only dynamic sampling draws in rounds"),
        (["selection={dynamic: true, variance_share: 0.5}"], "variance_share drops some of them again. Keep one"),
        (
            ["selection.dynamic=true", "batch.group_size=1", "algorithm.advantage.name=gae"],
            "a group of one never has signal",
        ),
        (["selection.variance_share=0.5", "batch.group_size=1", "algorithm.advantage.name=gae"], "never vary"),
        (["batch.updates_per_epoch=3"], "updates_per_epoch 3 does not divide prompts_per_step 4"),
        (["logging.generations=8", "evaluation.every=2"], "Add wandb to it"),
        (["logging={loggers: [wandb], generations: 8}"], "only evaluations have generations"),
        (["rollout.max_new_tokens=4096"], "leaves no room for a prompt"),
        (
            ["rollout.engine={name: native, options: {max_context: 4095}}"],
            "hold 4095 tokens, and rollout.max_context_tokens is 4096",
        ),
        (
            ["rollout.engine={name: vllm, options: {max_context: 512}}"],
            "hold 512 tokens, and rollout.max_context_tokens is 4096",
        ),
        (["evaluation.every=2", "tasks.evaluate=[]"], "tasks.evaluate names no source"),
        (["evaluation={temperature: 0, samples: 4}"], "at temperature 0 every sample is the same"),
        (["model.freeze=[vision, projector, language]"], "every part of the model is frozen"),
        (["model.path=tiny:qwen2", "model.freeze=[language]"], "every part of the model is frozen"),
        (
            ["model.path=tiny:qwen2_5_omni", "model.freeze=[vision, audio, projector, language]"],
            "every part of the model is frozen",
        ),
        (["model.path=package:shapes", "model.freeze=[vision, projector, language]"], "every part of the model is frozen"),
        (["model.freeze=[vision]", "optimizer.group_lr.vision=1e-4"], "has a learning rate here and is frozen"),
        (["optimizer.group_lr.vision=0"], "must be above 0"),
        (["optimizer.betas=[0.9, 1.0]"], "both betas must lie in [0, 1)"),
        (["algorithm.loss.aggregation_constant=64"], "aggregation_constant 64.0 does nothing"),
        (["rewards.terms.1.name=exact"], "the term 'exact' occurs twice"),
        (["rewards.terms.0.weight=0", "rewards.terms.1.weight=0"], "every term has weight 0"),
    ],
)
def test_keys_that_contradict_each_other_are_refused(overrides: list[str], said: str) -> None:
    assert said in refused(*overrides)


@pytest.mark.parametrize(
    "overrides",
    [
        ["batch.group_size=1", "algorithm.advantage.name=remax", "selection.dynamic=true"],
        ["batch.group_size=1", "algorithm.advantage.name=reinforce_plus_plus", "selection.oversample=1.5"],
        ["selection={dynamic: true, max_rounds: 9, oversample: 2}"],
        ["selection={variance_share: 0.5, oversample: 2}"],
    ],
)
def test_selections_that_make_sense_stand(overrides: list[str]) -> None:
    recipe = parse_recipe(GOOD, "trial.yaml", overrides)
    assert parse_recipe(dump_recipe(recipe), "dumped") == recipe


def test_a_window_wider_than_an_episode_keeps_all_turns() -> None:
    """VAGEN's own settings have it: window_size 3 and max_turns 2."""
    assert parse_recipe(GOOD, "trial.yaml", ["rollout.window=3", "rollout.max_turns=2"]).rollout.window == 3


def test_freezing_all_but_the_ear_leaves_something_to_train() -> None:
    frozen = "model.freeze=[vision, projector, language]"
    for model in (["model.path=tiny:qwen2_5_omni"], ["model.path=Some/Omni"]):
        parse_recipe(GOOD, "trial.yaml", [*model, frozen])


def test_a_part_that_the_model_has_not_cannot_be_frozen() -> None:
    assert "vision" in refused("model.path=tiny:qwen2_5_vl", "model.freeze=[audio]")
    parse_recipe(GOOD, "trial.yaml", ["model.path=Some/Model", "model.freeze=[audio]"])


def test_several_problems_make_one_paragraph() -> None:
    paragraph = refused("steps=x", "seed=y", "batch.sise=3")
    assert paragraph.startswith("3 problems. (1) ")
    assert paragraph.count("override '") == 3


def test_a_value_that_is_of_none_of_several_types_is_one_problem() -> None:
    with pytest.raises(RecipeError, match=r"model\.chat_template_kwargs\.enable_thinking") as caught:
        parse_recipe(GOOD, "trial.yaml", ["model.chat_template_kwargs.enable_thinking=[1]"])
    assert "problems" not in str(caught.value)


def test_a_recipe_that_is_not_there_is_named_with_the_shipped_ones(tmp_path: Path) -> None:
    with pytest.raises(RecipeError, match=r"no recipe file 'recipes/shape\.yaml'.*did you mean 'shapes'"):
        load_recipe("recipes/shape.yaml")


def test_a_shipped_recipe_is_found_by_its_name() -> None:
    assert load_recipe("shapes").model_dump() == load_recipe(shipped_recipes()["shapes"]).model_dump()


def test_recipes_cannot_be_changed_and_a_good_one_stands() -> None:
    recipe = parse_recipe(GOOD, "trial.yaml")
    with pytest.raises(ValueError, match="frozen"):
        recipe.batch.group_size = 2
    assert recipe.directory == Path("runs/trial")


def test_a_module_that_ends_the_program_when_imported_is_one_paragraph(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "ending_module.py").write_text("import sys\nsys.exit('not today')\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    said = refused("rewards.terms.0.name=ending_module:Term")
    assert "cannot load reward 'ending_module:Term': 'ending_module' ends the program when it is imported" in said
    assert "'not today'" in said


def test_a_package_that_an_environment_lacks_is_told_once_with_the_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "lacking_module.py").write_text("import no_such_package_at_all\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    source = "[{source: environments, options: {environment: 'lacking_module:World'}}]"
    said = refused(f"tasks.train={source}", f"tasks.evaluate={source}")
    assert said.count("no_such_package_at_all") == 2, "in the cause and in the way out"
    assert "cannot load environment 'lacking_module:World': No module named 'no_such_package_at_all'. Install" in said


def test_a_source_may_be_called_by_its_former_name() -> None:
    text = dump_recipe(load_recipe("frozen_lake"))
    assert "source: environments" in text
    assert parse_recipe(text.replace("source: environments", "source: worlds"), "before") == parse_recipe(text, "now")


@pytest.mark.parametrize(("key", "says"), [("min_p", "top_p"), ("repetition_penalty", "off-policy at every token")])
def test_kinds_of_sampling_that_are_not_supported_say_why(key: str, says: str) -> None:
    with pytest.raises(RecipeError, match=rf"'rollout\.{key}' is not supported: .*{says}"):
        load_recipe("shapes", [f"rollout.{key}=0.1"])


@pytest.mark.parametrize("place", ["{}", "evaluation.{}"])
def test_they_say_so_wherever_sampling_is_looked_for(place: str) -> None:
    with pytest.raises(RecipeError, match=r"min_p' is not supported: the engine truncates by rollout\.top_p") as error:
        load_recipe("shapes", [f"{place.format('min_p')}=0.1"])
    assert ("Sampling options belong in the section rollout." in str(error.value)) == (place == "{}")


def test_options_of_sampling_at_the_top_are_told_where_they_belong() -> None:
    with pytest.raises(
        RecipeError, match=r"unknown key 'top_p': sampling options belong in rollout; write rollout\.top_p\."
    ):
        load_recipe("shapes", ["top_p=0.9"])


def test_the_options_of_a_section_may_follow_its_name_alone() -> None:
    recipe = load_recipe("shapes", ["rollout.engine=process", "rollout.engine.options.max_rows=3", "tasks.planner=mixture"])
    assert recipe.rollout.engine.name == "process"
    assert recipe.rollout.engine.options == {"max_rows": 3}


def test_a_misspelt_recipe_or_run_is_refused_with_the_nearest_beside_it(tmp_path: Path) -> None:
    (tmp_path / "textures.yaml").write_text("name: x\n")
    with pytest.raises(RecipeError, match=r"no recipe file '.*texturs\.yaml'; did you mean '.*textures\.yaml'\? Give a"):
        load_recipe(tmp_path / "texturs.yaml")
    (tmp_path / "digits").mkdir()
    (tmp_path / "digits" / "recipe.yaml").write_text("name: x\n")
    with pytest.raises(RecipeError, match=r"; runs in '.*'.* Known: digits"):
        load_recipe(tmp_path / "nope")


def test_modules_of_the_users_own_are_found_beside_the_recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "beside_the_recipe.py").write_text("class Brief:\n    name = 'brief'\n    instant = True\n")
    (tmp_path / "mine" / "own.yaml").write_text(
        "name: own\nsteps: 1\nmodel: {path: 'tiny:qwen2'}\ntasks: {train: [{source: shapes}]}\n"
        "rewards: {terms: [{name: 'beside_the_recipe:Brief'}]}\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", [*sys.path])
    recipe = load_recipe("mine/own.yaml")
    assert resolve("reward", recipe.rewards.terms[0].name).name == "brief"
    assert "beside the recipe" in refused("rewards.terms.0.name=not_beside_it:Brief")
