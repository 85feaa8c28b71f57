"""`sensorium migrate`: what commands and configurations of other trainers become, and that no key gets lost."""

import io
import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml
from hypothesis import example, given, settings
from hypothesis import strategies as st

from sensorium.cli.main import main
from sensorium.recipe.load import load_recipe, parse_recipe
from sensorium.recipe.schema import Recipe
from sensorium.systems.migration.outcomes import Migration, Setting
from sensorium.systems.migration.recognition import Script, migrate
from sensorium.systems.migration.verl import RULES, migrate_verl
from sensorium.vocabulary.errors import RecipeError

GIVEN = Path(__file__).parent / "given"
"""The commands and configurations that the pages of the five systems print."""
EXPECTED = json.loads((Path(__file__).parent / "expected.json").read_text())
STARTS = {
    "taskmem_run.sh": "taskmem", "taskmem_setup.sh": "taskmem", "taskmem_logging.sh": "taskmem",
    "caprl_setup.sh": "caprl_video", "caprl_reward.sh": "caprl_video", "caprl_train.sh": "caprl_video",
    "caprl_remote.sh": "caprl_video", "caprl_defaults.sh": "caprl_video", "caprl_image_service.sh": "caprl_image",
    "caprl_image.sh": "caprl_image", "geo3k.sh": "geo3k_multi_turn", "geo3k_turns.yaml": "geo3k_multi_turn",
    "vagen_svg.sh": "vagen_trico_svg", "vagen_environments.yaml": "vagen_frozen_lake", "nemo_overrides.sh": "audio_visual",
    "nemo_intent.yaml": "audio_visual",
}  # fmt: skip


def of(name: str) -> Migration:
    return migrate((GIVEN / name).read_text(), str(GIVEN / name), folder=GIVEN)


def recipe_of(found: Migration) -> Recipe:
    assert found.problem == ""
    return parse_recipe(found.text, "migrated")


def kinds(found: Migration) -> dict[str, str]:
    return {outcome.setting.key: outcome.kind for outcome in found.outcomes}


@pytest.mark.parametrize("name", sorted(path.name for path in GIVEN.iterdir()))
def test_every_printed_block_becomes_a_recipe_without_an_unknown_key(name: str) -> None:
    found = of(name)
    assert found.start == STARTS[name]
    assert recipe_of(found) == found.recipe
    assert "unknown" not in kinds(found).values()


@pytest.mark.parametrize("name", sorted(path.name for path in GIVEN.iterdir()))
def test_every_printed_block_becomes_the_stored_recipe(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", "/home/user")  # a block of slime's names a folder below it
    assert of(name).recipe.model_dump(mode="json", exclude_defaults=True) == EXPECTED["blocks"][name]


@pytest.mark.parametrize("given_key", sorted(EXPECTED["verl"]))
def test_a_key_of_verl_becomes_the_key_that_means_the_same(given_key: str) -> None:
    key, _, value = given_key.partition("=")
    (outcome,) = [
        outcome
        for outcome in migrate_verl([Setting(key, yaml.safe_load(value))], "", "x").outcomes
        if outcome.setting.key == key
    ]
    assert (outcome.kind, outcome.text) == ("became", EXPECTED["verl"][given_key])


def test_columns_are_those_of_every_file() -> None:
    settings = [
        Setting("data.train_files", ["a.parquet", "b.parquet"]),
        Setting("data.val_files", ["c.parquet", "d.parquet"]),
        Setting("data.image_key", "images"),
        Setting("data.prompt_key", "question"),
    ]
    recipe = migrate_verl(settings, "", "x").recipe
    sources = [*recipe.tasks.train, *recipe.tasks.evaluate]
    assert [source.options["path"] for source in sources] == [f"{name}.parquet" for name in "abcd"]
    assert [source.options["columns"]["pictures"] for source in sources] == ["images"] * 4
    assert [source.options["columns"]["prompt"] for source in sources] == ["question"] * 4


@pytest.mark.parametrize("name", sorted(path.name for path in GIVEN.iterdir() if path.suffix == ".sh"))
def test_no_key_is_lost(name: str) -> None:
    text = re.sub(r"#.*", "", (GIVEN / name).read_text())
    keys = set(re.findall(r"(?<!\S)([A-Z_0-9]+|\w+\.[\w.]+)=(?=\S)", text)) | set(re.findall(r"export (\w+)=", text))
    told = set(kinds(of(name)))
    assert keys - told == set()
    programs = {line.split()[0] for line in text.splitlines() if re.match(r"(git|cp|pip|conda|hf|python) ", line)}
    assert programs <= {key.split()[1] for key in told if key.startswith("$ ")}


def test_taskmem() -> None:
    recipe = recipe_of(of("taskmem_run.sh"))
    assert (recipe.batch.prompts_per_step, recipe.batch.group_size) == (32, 8)
    assert recipe.tasks.train[0].options["path"] == "/path/to/train.jsonl"
    assert recipe.tasks.evaluate[0].source == "taskmem"
    assert not recipe.tasks.shuffle
    assert (recipe.algorithm.loss.name, recipe.algorithm.advantage.post) == ("gspo", "optimize_threshold")
    options = recipe.rewards.terms[0].options
    assert (options["think_length_threshold"], options["usefulness_scale"], options["format_penalty"]) == (1200, 0.1, -1.5)
    assert recipe.run_dir == Path("/path/to/output/run_name")
    assert recipe_of(of("taskmem_logging.sh")).logging.loggers == ("wandb",)


def test_vagen() -> None:
    recipe = recipe_of(of("vagen_svg.sh"))
    shipped = load_recipe("vagen_trico_svg")
    same = ("steps", "model", "batch", "rollout", "algorithm", "optimizer", "evaluation", "checkpoint", "logging", "name")
    differing = {key: (getattr(recipe, key), getattr(shipped, key)) for key in same}
    differing["algorithm"] = (
        recipe.algorithm.model_copy(update={"critic": None}),
        shipped.algorithm.model_copy(update={"critic": None}),
    )  # its page names the critic's model, which is the policy's
    assert {key: pair for key, pair in differing.items() if pair[0] != pair[1]} == {}
    assert [source.source for source in (*recipe.tasks.train, *recipe.tasks.evaluate)] == ["vagen", "vagen"]
    assert kinds(of("vagen_svg.sh"))["actor_rollout_ref.actor.kl_loss_coef"] == "no effect"
    lakes = recipe_of(of("vagen_environments.yaml")).tasks
    assert (lakes.train[0].options["size"], lakes.evaluate[0].options["size"]) == (10000, 512)
    assert lakes.train[0].options["options"]["view"] == "text"


def test_caprl() -> None:
    recipe = recipe_of(of("caprl_train.sh"))
    assert recipe.model.path == "/path/to/Qwen3-VL-4B-Instruct"
    assert recipe.rewards.terms[0].options["servers"] == ["http://127.0.0.1:18889"]
    assert recipe.run_dir == Path("/path/to/output/checkpoints/caprl_video")
    assert recipe.epochs == 3
    whole = recipe_of(of("caprl_defaults.sh"))
    assert (whole.name, whole.logging.project, whole.logging.loggers) == ("qwen3_vl_4b_video", "CapRL_video", ("wandb",))
    told = kinds(of("caprl_reward.sh"))
    assert {told[key] for key in ("REWARD_MODEL", "REWARD_PORT", "REWARD_NUM_WORKERS")} == {"no place"}


def test_slime() -> None:
    recipe = recipe_of(of("geo3k.sh"))
    assert recipe.model.path == "Qwen/Qwen3-VL-2B-Instruct"
    assert str(recipe.tasks.train[0].options["path"]).endswith("datasets/geo3k_imgurl_processed/train.parquet")
    assert recipe_of(of("geo3k_turns.yaml")).rollout.max_turns == 3
    text = (
        "ARGS=(--hf-checkpoint /m --prompt-data /d.jsonl --input-key q --label-key a\n # --lr 1\n --lr 2e-6)\n"
        "ray job submit --address=a -- python3 train.py --rollout-batch-size 16 --n-samples-per-prompt 4 ${ARGS[@]} \\\n"
        "  --global-batch-size 32 --num-epoch 2 --rm-type math --adam-beta2 0.98 --wandb-key abc --no-such-thing 1\n"
    )
    found = migrate(text, "run.sh")
    made = recipe_of(found)
    assert (made.epochs, made.batch.updates_per_epoch, made.optimizer.betas, made.optimizer.lr) == (2, 2, (0.9, 0.98), 2e-6)
    assert made.tasks.train[0].options["columns"]["answer"] == "a"
    assert kinds(found)["--no-such-thing"] == "unknown"
    assert all("abc" not in outcome.setting.shown for outcome in found.outcomes if outcome.setting.key == "--wandb-key")


def test_slimes_python_run_script() -> None:
    text = (
        'import os\nN = int(os.environ.get("GPUS", "4"))\nROOT = "/data"\nTRAIN = os.path.join(ROOT, "train.parquet")\n'
        "def execute():\n"
        '    rollout_args = f"--prompt-data {TRAIN} " "--rollout-batch-size 64 --n-samples-per-prompt 8 "\n'
        '    rollout_args += "--num-rollout 300 "\n'
        '    eval_args = "--eval-interval 20 "\n'
        "    gpus = f\"--actor-num-gpus-per-node {N} --sglang-x {' '.join(map(str, [1]))} \"\n"
        '    train_args = f"--hf-checkpoint /m {rollout_args} {gpus} --custom-generate-function-path a.b.generate "\n'
        "    execute_train(train_args=train_args)\n"
    )
    found = migrate(text, "run.py")
    recipe = recipe_of(found)
    assert (recipe.steps, recipe.batch.group_size) == (300, 8)
    assert recipe.tasks.train[0].options["path"] == "/data/train.parquet"
    assert found.start == "geo3k_multi_turn"
    assert any("eval_args" in note for note in found.notes)


def test_nemo_rl() -> None:
    recipe, shipped = recipe_of(of("nemo_intent.yaml")), load_recipe("audio_visual")
    for key in ("steps", "epochs", "model", "batch", "rollout", "optimizer", "rewards"):
        assert getattr(recipe, key) == getattr(shipped, key), key
    assert (recipe.algorithm.advantage, recipe.algorithm.kl) == (shipped.algorithm.advantage, shipped.algorithm.kl)
    assert (recipe.algorithm.loss.dual_clip, recipe.algorithm.loss.aggregation) == (None, "token_mean")
    assert recipe.logging.loggers == ("wandb", "tensorboard")
    assert (recipe.evaluation.every, recipe.evaluation.limit) == (10, 256)
    small = recipe_of(of("nemo_overrides.sh"))
    assert [source.options["video"]["frames"] for source in (*small.tasks.train, *small.tasks.evaluate)] == [4, 4]
    assert small.rollout.max_context_tokens == 4096


def test_nemo_rls_defaults_are_read_and_references_resolved(tmp_path: Path) -> None:
    (tmp_path / "base.yaml").write_text(
        "grpo: {num_prompts_per_step: 4, num_generations_per_prompt: 8, seed: 42}\n"
        "policy:\n  model_name: m\n  each: 4\n"
        "  train_global_batch_size: ${mul:${grpo.num_prompts_per_step}, ${policy.each}}\n"
        "  generation: {max_new_tokens: ${policy.max_total_sequence_length}}\n  max_total_sequence_length: 512\n"
    )
    (tmp_path / "top.yaml").write_text("defaults: base.yaml\ngrpo: {num_prompts_per_step: 8}\n")
    (tmp_path / "run.sh").write_text("uv run examples/run_grpo.py --config top.yaml ++grpo.seed=7 grpo.sede=1\n")
    found = migrate((tmp_path / "run.sh").read_text(), "run.sh", folder=tmp_path)
    recipe = recipe_of(found)
    assert (recipe.seed, recipe.batch.prompts_per_step, recipe.batch.updates_per_epoch) == (7, 8, 2)
    assert recipe.rollout.max_context_tokens > recipe.rollout.max_new_tokens == 512
    assert (kinds(found)["grpo.sede"], kinds(found)["policy.each"]) == ("unknown", "unknown")
    alone = migrate((tmp_path / "top.yaml").read_text(), "top.yaml", folder=tmp_path / "elsewhere")
    assert any("base.yaml" in note for note in alone.notes)


def test_verls_own_examples_start_from_no_system() -> None:
    text = (
        'set -x\nENGINE=${1:-vllm}\nprompt=1024\nresponse=$((prompt * 2))\nif [ -n "$X" ]; then n=5\nelse\nn=6\nfi\n'
        "python3 -m verl.trainer.main_ppo data.train_files=$HOME/geo3k/train.parquet data.image_key=images \\\n"
        "  data.train_batch_size=512 data.max_prompt_length=$prompt data.max_response_length=$response \\\n"
        "  actor_rollout_ref.rollout.n=$n actor_rollout_ref.actor.ppo_mini_batch_size=128 trainer.total_epochs=15 \\\n"
        "  actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.01 \\\n"
        "  actor_rollout_ref.rollout.name=$ENGINE actor_rollout_ref.model.path=$MODEL trainer.save_frequ=5 \\\n"
        "  data.train_batch_size=256 $@\n"
    )
    found = migrate(text, "run.sh")
    recipe = recipe_of(found)
    assert (recipe.batch.prompts_per_step, recipe.batch.group_size, recipe.batch.updates_per_epoch) == (256, 5, 2)
    assert (recipe.rollout.max_context_tokens, recipe.rollout.max_new_tokens) == (3072, 2048)
    assert (recipe.algorithm.kl.coef, recipe.algorithm.kl.estimator) == (0.01, "k3")
    assert recipe.tasks.train[0].options["columns"]["pictures"] == "images"
    told = kinds(found)
    assert told["trainer.save_frequ"] == "unknown"
    assert told["actor_rollout_ref.model.path"] == "no place"
    assert any("condition" in note for note in found.notes)
    assert any(outcome.text == "it is given again" for outcome in found.outcomes)


VERL = (
    "python3 -m verl.trainer.main_ppo data.train_files=/a.parquet data.val_files=/b.parquet algorithm.adv_estimator=grpo "
)
SLIME = "python3 train.py --hf-checkpoint /m --prompt-data /geo3k/a.parquet --rollout-batch-size 8 "


def text_of(found: Migration, key: str) -> str:
    return next(outcome.text for outcome in found.outcomes if outcome.setting.key == key)


@pytest.mark.parametrize("swapped", [False, True])
def test_verl_filters_long_prompts_before_it_refuses_them(swapped: bool) -> None:
    keys = ["data.filter_overlong_prompts=True", "data.truncation=error"]
    recipe = recipe_of(
        migrate(VERL + "actor_rollout_ref.rollout.n=4 " + " ".join(keys[::-1] if swapped else keys), "run.sh")
    )
    assert recipe.tasks.on_long_prompt == "skip"
    alone = recipe_of(migrate(VERL + "actor_rollout_ref.rollout.n=4 data.truncation=error", "run.sh"))
    assert alone.tasks.on_long_prompt == "refuse"


def test_keys_that_verl_is_not_given_have_its_own_defaults() -> None:
    found = migrate(VERL + "actor_rollout_ref.rollout.n=4 data.train_batch_size=512", "run.sh")
    recipe = recipe_of(found)
    assert (recipe.evaluation.temperature, recipe.evaluation.at_start, recipe.algorithm.loss.dual_clip) == (0.0, True, 3.0)
    assert (recipe.rollout.max_new_tokens, recipe.rollout.max_context_tokens) == (512, 1024)
    assert (recipe.batch.updates_per_epoch, recipe.epochs) == (2, 30)
    assert "data.max_response_length" not in kinds(found)
    assert any("data.max_response_length=512" in note for note in found.notes)
    bare = recipe_of(migrate("trainer.total_training_steps=5\n", "run.sh"))
    assert (bare.algorithm.advantage.name, bare.batch.prompts_per_step, bare.batch.group_size) == ("gae", 1024, 1)
    assert (bare.steps, bare.epochs, bare.algorithm.critic.optimizer.lr) == (5, 0, 1e-5)
    uneven = migrate(VERL + "actor_rollout_ref.rollout.n=4 data.train_batch_size=300", "run.sh")
    assert any("ppo_mini_batch_size" in note and "256" in note for note in uneven.notes)


@pytest.mark.parametrize(
    ("given_keys", "temperature", "samples"),
    [
        ("do_sample=True temperature=0.7 n=4", 0.7, 4), ("do_sample=True n=4", 0.0, 1), ("temperature=0.7 n=4", 0.0, 1),
        ("do_sample=False temperature=0.7", 0.0, 1), ("n=1", 0.0, 1),
    ],
)  # fmt: skip
def test_verl_samples_held_out_tasks_only_where_both_keys_say_so(given_keys: str, temperature: float, samples: int) -> None:
    words = " ".join(f"actor_rollout_ref.rollout.val_kwargs.{key}" for key in given_keys.split())
    recipe = recipe_of(migrate(f"{VERL} actor_rollout_ref.rollout.n=4 {words}", "run.sh"))
    assert (recipe.evaluation.temperature, recipe.evaluation.samples) == (temperature, samples)


def test_slimes_one_clip_is_both() -> None:
    both = recipe_of(migrate(SLIME + "--eps-clip 0.1", "run.sh")).algorithm.loss
    assert (both.clip_low, both.clip_high, both.dual_clip, both.aggregation) == (0.1, 0.1, None, "sequence_mean_token_mean")
    two = recipe_of(migrate(SLIME + "--eps-clip 0.1 --eps-clip-high 0.3 --calculate-per-token-loss", "run.sh"))
    loss = two.algorithm.loss
    assert (loss.clip_low, loss.clip_high, loss.aggregation) == (0.1, 0.3, "token_mean")


def test_slime_with_one_turn_does_not_start_from_several() -> None:
    found = migrate(SLIME + "--adam-beta1 0.8 --adam-beta2 0.98", "run.sh")
    recipe = recipe_of(found)
    assert found.start == ""
    assert any("batch.group_size" in note for note in found.notes)
    assert (recipe.rollout.max_turns, recipe.rollout.count_observations) == (1, False)
    assert text_of(found, "--adam-beta1") == text_of(found, "--adam-beta2") == "optimizer.betas=[0.8, 0.98]"


def test_from_slime_needs_an_argument_of_slimes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name, text in {"a.sh": VERL, "b.sh": "ls -l\n", "c.py": "import os\n", "d.yaml": "a: 1\n"}.items():
        (tmp_path / name).write_text(text)
        assert main(["migrate", str(tmp_path / name), "--from", "slime"]) == 2, name
    assert "slime" in capsys.readouterr().err


def test_vagen_is_known_by_its_module_and_its_lam_is_both() -> None:
    found = migrate(
        "python3 -m vagen.trainer.main_ppo algorithm.adv_estimator=bi_level_gae algorithm.lam=0.9 algorithm.gamma=0.8 "
        "env=sokoban ~data.image_key ~data.video_key=x\n", "run.sh",
    )  # fmt: skip
    advantage = recipe_of(found).algorithm.advantage
    assert (advantage.lam, advantage.turn_lam, advantage.gamma) == (0.9, 0.9, 0.8)
    assert (found.start, kinds(found)["env"]) == ("vagen_sokoban", "became")
    assert kinds(migrate(VERL + "env=x", "run.sh"))["env"] == "unknown"
    assert {kinds(found)["~data.image_key"], kinds(found)["~data.video_key"]} == {"no place"}
    plain = migrate("python3 -m vagen.trainer.main_ppo algorithm.adv_estimator=grpo env=frozenlake\n", "run.sh")
    assert plain.start == "vagen_frozen_lake"
    assert any("vagen_svg" in note for note in migrate("python -m vagen.trainer.main_ppo data.seed=1", "run.sh").notes)
    turns = migrate("python -m vagen.x.main_ppo algorithm.adv_estimator=turn_wise_gae algorithm.lam=0.9 env=svg", "run.sh")
    assert recipe_of(turns).algorithm.advantage.turn_lam == 0.9


def test_variables_that_a_script_does_not_export_are_rows() -> None:
    arrays = "UNUSED=(a.b=1)\nTAKEN=(data.seed=3)\necho ${TAKEN[@]}\n"
    others = "cp ~user/a.b c\nA=b make x=1\n"
    found = migrate(f"N=4\n{arrays}{others}{VERL} actor_rollout_ref.rollout.n=$N\n", "run.sh")
    assert kinds(found)["N"] == kinds(found)["UNUSED"] == "no effect"
    assert "TAKEN" not in kinds(found)
    assert kinds(found)["$ make x=1"] == kinds(found)["$ cp ~user/a.b c"] == "no place"


def nemo(data: str, env: str = "") -> Migration:
    model = "policy: {model_name: Qwen/Qwen2.5-Omni-7B}\n"
    return migrate(f"grpo: {{num_prompts_per_step: 8, val_period: 5}}\n{model}data: {data}\n{env}", "nemo.yaml")


def test_nemo_rl_starts_from_audio_visual_only_for_its_data() -> None:
    other = nemo("{dataset_name: clevr-cogent}", "env: {clevr-cogent: {reward_functions: [{name: format, weight: 0.3}]}}\n")
    assert (other.start, kinds(other)["data.dataset_name"]) == ("", "no place")
    assert "tasks.train.0.source" in text_of(other, "data.dataset_name")
    assert [(term.name, term.weight) for term in recipe_of(other).rewards.terms] == [("format", 0.3)]
    assert not any("math" in note for note in other.notes)
    assert any("math" in note for note in nemo("{dataset_name: clevr-cogent}").notes)
    half = nemo("{train: {dataset_name: intent-train}, validation: {dataset_name: other}}")
    assert (half.start, recipe_of(half).tasks.evaluate) == ("audio_visual", ())
    assert nemo("{train: {dataset_name: other}, validation: {dataset_name: intent-bench}}").start == ""


def test_an_unknown_key_names_the_nearest() -> None:
    found = migrate(VERL + "actor_rollout_ref.rollout.temprature=0.5 trainer.banana_count=7 trainer.save_frequ=1", "run.sh")
    assert "'actor_rollout_ref.rollout.temperature'" in text_of(found, "actor_rollout_ref.rollout.temprature")
    assert "'trainer.save_freq'" in text_of(found, "trainer.save_frequ")
    assert "'" not in text_of(found, "trainer.banana_count")
    assert "'--eps-clip'" in text_of(migrate(SLIME + "--eps-clop 1", "run.sh"), "--eps-clop")


def test_what_the_shipped_recipe_gives_is_listed(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    found = of("nemo_overrides.sh")
    shipped = load_recipe("audio_visual")
    assert f"batch.group_size={shipped.batch.group_size}" in found.kept
    assert not any(key.startswith(("tasks.train", "rollout.max_context_tokens")) for key in found.kept)
    assert main(["migrate", str(GIVEN / "nemo_overrides.sh"), "-o", str(tmp_path / "made.yaml")]) == 0
    assert "from the recipe audio_visual" in capsys.readouterr().out
    assert migrate(VERL, "run.sh").kept == []


@given(
    st.sampled_from(sorted(RULES)),
    st.one_of(st.none(), st.booleans(), st.integers(), st.floats(), st.text(), st.lists(st.integers())),
)
@example("data.val_files", [])
@settings(max_examples=150, deadline=None)
def test_any_value_of_any_key_is_told_and_none_crashes(pattern: str, value: Any) -> None:
    key = pattern.replace("*", "x").replace("[em]", "e")
    found = migrate_verl([Setting("data.train_batch_size", 8), Setting(key, value)], "", "x")
    assert key in kinds(found)
    assert found.recipe is not None or found.problem


@given(st.text(alphabet="ab=$(){}[]'\"\\\n #;&|<>`@-:ifthenfi ", max_size=80))
@settings(max_examples=150, deadline=None)
def test_any_text_is_read_as_a_script(text: str) -> None:
    Script(text)


def test_what_is_not_recognised_is_refused_with_the_way_out(tmp_path: Path) -> None:
    for text in ("", "hello: world\n", "ls -l\n"):
        with pytest.raises(RecipeError):
            migrate(text, "file")
    with pytest.raises(RecipeError, match="--from"):
        migrate("ls -l\n", "file")
    assert migrate("x.y=1\n", "file", "verl").framework == "verl"


def test_the_command_writes_the_recipe_and_the_table(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "recipe.yaml"
    assert main(["migrate", str(GIVEN / "taskmem_run.sh"), "-o", str(out)]) == 0
    shown = capsys.readouterr().out
    assert load_recipe(out).batch.prompts_per_step == 32
    assert "rewards.terms.0.options.usefulness_scale=0.1" in shown
    assert main(["migrate", str(GIVEN / "taskmem_run.sh"), "-o", str(out)]) == 2, "a file is not overwritten"
    capsys.readouterr()
    monkeypatch.setattr(sys, "stdin", io.StringIO("trainer.logger=['console','wandb'] algorithm.mode=optimize_threshold"))
    assert main(["migrate", "-"]) == 0
    streams = capsys.readouterr()
    assert parse_recipe(streams.out, "stdout").logging.loggers == ("wandb",)
    assert "[console, wandb]" in streams.err
    monkeypatch.setattr(sys, "stdin", io.StringIO("actor_rollout_ref.rollout.temperature=-1"))
    assert main(["migrate", "-"]) == 1, "a recipe that would be refused is told"


def test_it_needs_no_torch() -> None:
    code = (
        "import sys; from sensorium.cli.main import main; "
        f"assert main(['migrate', {str(GIVEN / 'vagen_svg.sh')!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True)


GRPO = VERL + "actor_rollout_ref.rollout.n=4 "


def columns_of(recipe: Recipe) -> list[dict[str, str]]:
    return [dict(source.options["columns"]) for source in (*recipe.tasks.train, *recipe.tasks.evaluate)]


SEES = "actor_rollout_ref.model.path=Qwen/Qwen2.5-VL-7B-Instruct "


def test_verls_default_column_of_pictures_is_read() -> None:
    found = migrate(GRPO + SEES, "run.sh")
    assert [one.get("pictures") for one in columns_of(recipe_of(found))] == ["images", "images"]
    assert any("data.image_key" in note and "columns.pictures" in note for note in found.notes)
    assert any("videos: videos" in note for note in found.notes)
    for model in ("/models/vllm/Qwen2.5-7B", "$MODEL"):
        unseen = migrate(f"{GRPO} actor_rollout_ref.model.path={model} ", "run.sh")
        assert not any("pictures" in one for one in columns_of(recipe_of(unseen)))
        assert any("pictures: images" in note for note in unseen.notes)
    named = migrate(GRPO + SEES + "data.image_key=photos data.video_key=null", "run.sh")
    assert [one.get("pictures") for one in columns_of(recipe_of(named))] == ["photos", "photos"]
    assert not any("verl reads media" in note for note in named.notes)
    assert kinds(named)["data.video_key"] == "no effect"


def test_columns_of_media_are_those_of_files_that_can_be_read(tmp_path: Path) -> None:
    from pyarrow import parquet, table

    parquet.write_table(table({"prompt": ["a"], "images": ["b"]}), tmp_path / "a.parquet")
    (tmp_path / "b.jsonl").write_text('{"prompt": "a", "videos": []}\n')
    files = f"data.train_files={tmp_path}/a.parquet data.val_files={tmp_path}/b.jsonl"
    found = migrate(
        f"python3 -m verl.trainer.main_ppo {files} algorithm.adv_estimator=grpo actor_rollout_ref.rollout.n=4 {SEES}",
        "run.sh",
    )
    seen = [{part: one[part] for part in ("pictures", "videos") if part in one} for one in columns_of(found.recipe)]
    assert seen == [{"pictures": "images"}, {"videos": "videos"}]
    assert not any("verl reads media" in note for note in found.notes)


def test_a_row_of_the_table_has_the_value_that_the_recipe_has(tmp_path: Path) -> None:
    lengths = "policy: {model_name: m, max_total_sequence_length: 512, generation: {max_new_tokens: 512}}\n"
    found = migrate(f"grpo: {{num_prompts_per_step: 8}}\n{lengths}data: {{prompt_file: a.txt}}\n", "nemo.yaml")
    tokens = recipe_of(found).rollout.max_context_tokens
    assert tokens > 512
    assert text_of(found, "policy.max_total_sequence_length").startswith(f"rollout.max_context_tokens={tokens} (")
    assert kinds(found)["data.prompt_file"] == "no place"
    both = migrate(SLIME + "--use-wandb --use-tensorboard", "run.sh")
    assert text_of(both, "--use-wandb").startswith("logging.loggers=[wandb, tensorboard]")
    for name in sorted(path.name for path in GIVEN.iterdir()):
        found = of(name)
        data = yaml.safe_load(found.text)
        for outcome in found.outcomes:
            for place, value in re.findall(r"(?:^| )([a-z_]+(?:\.\w+)+)=(\d+)(?= |$)", outcome.text):
                if outcome.kind == "became":
                    at: Any = data
                    for part in place.split("."):
                        at = at[int(part)] if isinstance(at, list) else at[part]
                    assert at == int(value), (name, place)


def test_slime_evaluates_with_the_temperature_of_rollouts() -> None:
    held_out = SLIME + "--eval-prompt-data a /b.parquet /c.parquet --rollout-temperature 0.7 "
    found = migrate(held_out, "run.sh")
    assert recipe_of(found).evaluation.temperature == 0.7
    assert "--eval-temperature" in text_of(found, "--rollout-temperature")
    assert recipe_of(migrate(held_out + "--eval-temperature 0", "run.sh")).evaluation.temperature == 0
    assert text_of(migrate(SLIME + "--rollout-temperature 0.7", "run.sh"), "--rollout-temperature") == (
        "rollout.temperature=0.7"
    )


def test_slimes_columns_are_those_of_every_file() -> None:
    keys = '--multimodal-keys \'{"image": "photo"}\' --eval-prompt-data a /b.parquet /c.parquet --eval-label-key gold'
    found = recipe_of(migrate(f"{SLIME} --label-key a {keys}", "run.sh"))
    assert [one["pictures"] for one in columns_of(found)] == ["photo"] * 3
    assert [one["answer"] for one in columns_of(found)] == ["a", "gold", "gold"]
    assert [one["prompt"] for one in columns_of(found)] == ["input"] * 3, "slime's default of --input-key"


@pytest.mark.parametrize("section", ["overlong_buffer", "reward_kwargs.overlong_buffer_cfg"])
def test_verls_penalty_of_long_responses_is_a_reward_term(section: str) -> None:
    keys = f"reward_model.{section}.len=128 reward_model.{section}.penalty_factor=0.5 reward_model.{section}.log=False "
    found = migrate(f"{GRPO} reward_model.{section}.enable=True {keys} data.max_response_length=1024", "run.sh")
    term = recipe_of(found).rewards.terms[1]
    assert (term.name, dict(term.options)) == ("overlong", {"max_tokens": 1024, "buffer_tokens": 128, "penalty": 0.5})
    off = migrate(f"{GRPO} reward_model.{section}.enable=False {keys}", "run.sh")
    assert [term.name for term in recipe_of(off).rewards.terms] == ["math"]
    assert kinds(off)[f"reward_model.{section}.len"] == "no effect"


def test_nemo_rls_penalty_of_long_responses_is_a_reward_term() -> None:
    shaping = "{enabled: true, overlong_buffer_length: 64, overlong_buffer_penalty: 1, max_response_length: 512}"
    found = migrate(f"grpo: {{reward_shaping: {shaping}}}\npolicy: {{model_name: m}}\n", "nemo.yaml")
    term = recipe_of(found).rewards.terms[1]
    assert (term.name, dict(term.options)) == ("overlong", {"max_tokens": 512, "buffer_tokens": 64, "penalty": 1})


def test_the_engine_is_taken_where_no_shipped_recipe_has_one() -> None:
    found = migrate(GRPO + "actor_rollout_ref.rollout.enforce_eager=True actor_rollout_ref.rollout.name=vllm", "run.sh")
    engine = recipe_of(found).rollout.engine
    assert (engine.name, engine.options) == ("vllm", {"eager": True})
    other = migrate(GRPO + "actor_rollout_ref.rollout.name=sglang", "run.sh")
    assert (recipe_of(other).rollout.engine.name, kinds(other)["actor_rollout_ref.rollout.name"]) == ("native", "no place")
    nemo_rl = migrate("policy: {model_name: m, generation: {backend: vllm}}\n", "nemo.yaml")
    assert recipe_of(nemo_rl).rollout.engine.name == "vllm"
    assert "rollout.engine=vllm" in text_of(of("vagen_svg.sh"), "actor_rollout_ref.rollout.name")


def test_a_model_that_the_file_does_not_define_is_not_called_missing() -> None:
    (note,) = [one for one in migrate(GRPO + "actor_rollout_ref.model.path=$MODEL", "run.sh").notes if "placeholder" in one]
    assert "$MODEL" in note
    (note,) = [one for one in migrate(GRPO, "run.sh").notes if "placeholder" in one]
    assert "no actor_rollout_ref.model.path was given" in note


def test_a_text_for_a_number_is_ignored_and_spoils_no_other_key() -> None:
    found = migrate(VERL + "actor_rollout_ref.rollout.n=abc trainer.project_name=2024", "run.sh")
    recipe = recipe_of(found)
    assert (kinds(found)["actor_rollout_ref.rollout.n"], recipe.logging.project) == ("no place", "2024")
    assert "batch.group_size" in text_of(found, "actor_rollout_ref.rollout.n")
    assert not any(note.startswith("actor_rollout_ref.actor.ppo_mini_batch_size") for note in found.notes)


def test_all_defaults_of_verl_that_were_taken_are_listed() -> None:
    found = migrate(GRPO, "run.sh")
    recipe = recipe_of(found)
    assert (recipe.optimizer.weight_decay, recipe.model.dtype, recipe.model.gradient_checkpointing) == (
        0.01,
        "bfloat16",
        True,
    )
    (note,) = [note for note in found.notes if "own defaults" in note]
    for key in (
        "optim.weight_decay=0.01",
        "fsdp_config.dtype=bfloat16",
        "optim.lr=1e-06",
        "enable_gradient_checkpointing=true",
    ):
        assert key in note, key


@pytest.mark.parametrize("passed_on", ["$@", '"$@"', "${@:1}"])
def test_arguments_that_a_script_passes_on_are_noted(passed_on: str) -> None:
    assert any(passed_on in note for note in migrate(f"{GRPO} {passed_on}\n", "run.sh").notes)
    assert not any("passes on" in note for note in migrate(GRPO, "run.sh").notes)
    given = migrate(GRPO + "trainer.default_local_dir=$1\n", "run.sh")
    assert kinds(given)["trainer.default_local_dir"] == "no place"


@pytest.mark.parametrize(
    ("text", "named"),
    [
        (GRPO + "custom_reward_function.path=/x/mine.py custom_reward_function.name=score", "mine:score"),
        (GRPO + "custom_reward_function.path=/x/mine.py", "mine:compute_score"),
        (GRPO + "reward_model.enable=True", "reward model"),
        (SLIME + "--custom-rm-path a.b.score", "a.b:score"),
        (SLIME + "--rm-type f1", "f1"),
        ("policy: {model_name: m}\nenv: {x: {reward_functions: [{name: format}, {name: mine}]}}\n", "mine"),
    ],
)
def test_a_reward_that_the_recipe_lacks_is_prominent(
    text: str, named: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    given = tmp_path / ("a.yaml" if text.startswith("policy") else "a.sh")
    given.write_text(text)
    assert main(["migrate", str(given), "-o", str(tmp_path / "recipe.yaml")]) == 0
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("ATTENTION")]
    assert named in line
    written = (tmp_path / "recipe.yaml").read_text()
    assert "# ATTENTION" in written
    assert load_recipe(tmp_path / "recipe.yaml").rewards.terms


def test_no_attention_where_nothing_is_lacking() -> None:
    assert [of(name).attention for name in STARTS] == [[]] * len(STARTS)
    assert migrate(GRPO + "custom_reward_function.path=null reward_model.enable=False", "run.sh").attention == []
