"""The dry run's numbers are those of the recipe and of the checkpoint on disk."""

import json
from itertools import product
from pathlib import Path
from typing import Any

import pytest

from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.memory_estimate import WHOLE_BYTES, estimate_memory, tower_bytes, tower_room
from sensorium.recipe.model_shape import count_parameters, read_shape
from sensorium.recipe.plan import for_tasks, given_recomputation, least_recomputation, make_plan
from sensorium.recipe.schema import LoraSection, Recipe
from sensorium.vocabulary import EnvironmentSpec, Media, Task, user


def recipe(path: str = "tiny:qwen3_vl", **sections: object) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "trial",
            "steps": 10,
            "model": {"path": path},
            "tasks": {"train": [{"source": "shapes"}], "evaluate": [{"source": "shapes"}]},
            "rewards": {"terms": [{"name": "exact"}]},
            **sections,
        }
    )


def checkpoint(folder: Path, family: str) -> Path:
    import sensorium.models.torchvision_fix  # noqa: F401  (before transformers imports torchvision)
    from sensorium.models.tiny import make_tiny

    return make_tiny(family, folder)


def test_batch_numbers_are_resolved() -> None:
    plan = make_plan(
        recipe(
            batch={"prompts_per_step": 8, "group_size": 4, "epochs_per_step": 2, "updates_per_epoch": 4},
            rollout={"max_new_tokens": 16, "max_turns": 5, "max_episode_tokens": 60},
            warm_start={"steps": 3},
            evaluation={"every": 4, "at_start": True},
        )
    )
    assert plan.episodes_per_step == 32
    assert plan.groups_per_update == 2
    assert plan.updates_per_step == 8
    assert plan.total_updates == 10 * 8 + 3
    assert plan.total_episodes == 320
    assert plan.sampled_tokens_per_step == 32 * 60
    assert plan.evaluations == 6  # after steps 0, 3 (the warm start), 4, 8, 12 and 13


def test_evaluations_are_counted_as_the_run_makes_them_and_without_walking_through_its_steps() -> None:
    for warm, every, at_start, steps in product((0, 3, 4), (0, 1, 4, 50), (False, True), (0, 1, 8, 13)):
        made = recipe(steps=steps, warm_start={"steps": warm}, evaluation={"every": every, "at_start": at_start})
        assert make_plan(made).evaluations == sum(made.evaluates_after(step) for step in range(made.total_steps + 1))
    assert make_plan(recipe(steps=10**9, evaluation={"every": 7})).evaluations == 10**9 // 7 + 1


@pytest.mark.parametrize("family", list(FAMILIES))
def test_parameters_are_counted_from_disk_and_from_the_config_alike(tmp_path: Path, family: str) -> None:
    folder = checkpoint(tmp_path, family)
    import transformers

    shape = read_shape(str(folder))
    assert shape is not None
    assert shape.exact
    config = json.loads((folder / "config.json").read_text())
    assert shape.parameters == count_parameters(config)
    model = getattr(transformers, FAMILIES[family].model_class)(transformers.AutoConfig.from_pretrained(folder))
    assert shape.total == sum(parameter.numel() for parameter in model.parameters())
    assert (shape.parameters["vision"] > 0) == ("vision_config" in config)
    assert (shape.parameters["audio"] > 0) == ("audio_config" in config)
    assert shape.family == family
    from sensorium.models.family import group_of
    from sensorium.recipe.registry import resolve

    groups = resolve("family", family).groups
    counted = dict.fromkeys(shape.parameters, 0)
    for name, parameter in model.named_parameters():
        counted[group_of(name, groups) or "none"] += parameter.numel()
    assert shape.parameters == counted


def test_of_a_whole_omni_model_the_thinker_is_counted(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen2_5_omni")
    from safetensors.torch import load_file, save_file

    alone = read_shape(str(folder))
    assert alone is not None
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({"model_type": "qwen2_5_omni", "thinker_config": config}))
    weights = load_file(folder / "model.safetensors")
    speaking = {"talker.model.norm.weight": weights["model.norm.weight"], "token2wav.dit.x": weights["model.norm.weight"]}
    named = {f"thinker.{name}": weight.clone() for name, weight in weights.items()}
    save_file(named | {name: weight.clone() for name, weight in speaking.items()}, folder / "model.safetensors")
    whole = read_shape(str(folder))
    assert whole is not None
    assert whole.parameters == alone.parameters
    assert whole.linears == alone.linears


def test_a_config_without_weights_is_estimated_and_says_so(tmp_path: Path) -> None:
    folder = checkpoint(tmp_path, "qwen2")
    full = read_shape(str(folder))
    for file in folder.glob("*.safetensors"):
        file.unlink()
    alone = read_shape(str(folder))
    assert full is not None
    assert alone is not None
    assert alone.total == full.total
    assert not alone.exact


def test_a_model_in_the_hub_cache_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    snapshot = tmp_path / "models--Some--Model" / "snapshots" / "abc"
    checkpoint(snapshot, "qwen2")
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert read_shape("Some/Model") is not None
    assert read_shape("Other/Model") is None


def test_memory_follows_what_is_trained_and_how(tmp_path: Path) -> None:
    path = str(checkpoint(tmp_path, "qwen3_vl"))
    shape = read_shape(path)
    assert shape is not None
    plain = estimate_memory(recipe(path), shape)
    assert plain["weights"] == plain["gradients"] == shape.total * 4
    assert plain["optimizer moments"] == shape.total * 8
    eight = estimate_memory(recipe(path, optimizer={"moments": "8-bit"}), shape)
    assert eight["optimizer moments"] == pytest.approx(shape.total * 2 * (1 + 4 / 256), abs=1)
    assert "remainders of fp32 masters" not in plain
    assert "reference model" not in plain
    frozen = estimate_memory(recipe(path, model={"path": path, "freeze": ["vision"], "dtype": "bfloat16"}), shape)
    assert frozen["gradients"] == (shape.total - shape.parameters["vision"]) * 4
    assert frozen["remainders of fp32 masters"] == (shape.total - shape.parameters["vision"]) * 2
    with_reference = estimate_memory(recipe(path, algorithm={"kl": {"coef": 0.1}}), shape)
    assert with_reference["reference model"] == plain["weights"]
    lean = estimate_memory(recipe(path, model={"path": path, "gradient_checkpointing": True}), shape)
    assert lean["activations"] < plain["activations"]
    fewer = estimate_memory(recipe(path, rollout={"concurrency": 8}), shape)
    assert fewer["keys and values"] < plain["keys and values"]
    in_rows = estimate_memory(recipe(path, rollout={"engine": {"name": "native", "options": {"max_rows": 8}}}), shape)
    assert in_rows == fewer, "others wait for a row"


def test_a_schedule_that_gives_up_repetition_says_so() -> None:
    assert make_plan(recipe()).deterministic
    plan = make_plan(recipe(rollout={"schedule": "eager"}))
    assert not plan.deterministic
    assert "rollout.schedule=lockstep" in plan.determinism


def test_lockstep_is_left_by_itself_where_a_run_cannot_repeat() -> None:
    assert recipe().lockstep
    assert recipe(rollout={"engine": "process"}).lockstep
    assert not recipe(rollout={"engine": "vllm"}).lockstep
    assert not recipe(rollout={"engine": "process"}, cluster={"engines": 2}).lockstep
    correction = {"correction": {"weights": "token"}}
    assert not recipe(rollout={"engine": "process"}, schedule="asynchronous", algorithm=correction).lockstep
    assert not recipe(rollout={"schedule": "eager"}).lockstep


def test_where_lockstep_is_refused_it_is_not_named_as_the_way_to_repeat() -> None:
    eager = {"schedule": "eager", "engine": {"name": "vllm"}}
    assert "rollout.engine: native with rollout.schedule=lockstep" in make_plan(recipe(rollout=eager)).determinism
    several = recipe(rollout={**eager, "engine": {"name": "process"}}, cluster={"engines": 2})
    assert "cluster.engines=1 with rollout.schedule=lockstep" in make_plan(several).determinism


def test_a_run_of_several_processes_says_which_and_who_of_them_is_idle() -> None:
    assert make_plan(recipe()).processes == ""
    rollout = {"schedule": "eager", "engine": {"name": "vllm"}}
    placed = {"learners": 2, "engines": 3, "placement": "ray"}
    plan = make_plan(recipe(rollout=rollout, cluster=placed))
    told, each = plan.processes, plan.interpreters
    assert list(each) == ["driver", "2 learner ranks", "3 engines (vllm)"]
    assert each["2 learner ranks"] == 2 * each["driver"] == 2 * make_plan(recipe()).interpreters["driver"]
    assert each["3 engines (vllm)"] > 3 * each["driver"], "vLLM has processes of its own"
    assert told.startswith("the driver, 2 learner ranks, 3 engines (vllm), placed by Ray;")
    assert "nothing to do" not in told
    many = make_plan(recipe(batch={"prompts_per_step": 8}, cluster={"learners": 20})).processes
    assert "An update has 8 groups, a group is one rank's: 12 of 20 have nothing to do" in many


def test_the_plan_says_how_many_prompts_a_step_may_play() -> None:
    batch = {"prompts_per_step": 5, "group_size": 4}
    plain = make_plan(recipe(batch=batch))
    assert (plain.prompts_at_most, plain.selection) == (5, "")
    greedy = {"advantage": {"name": "remax"}}
    selection = {"dynamic": True, "max_rounds": 3, "oversample": 1.5}
    plan = make_plan(recipe(batch=batch, selection=selection, algorithm=greedy, rollout={"max_new_tokens": 10}))
    assert plan.prompts_at_most == 3 * 8
    assert plan.sampled_tokens_per_step == 24 * (4 + 1) * 10
    assert "draws until 5 groups have signal, in 3 rounds at most" in plan.selection
    assert "plays 8 prompts for 5 groups and cancels the last" in plan.selection
    assert "once more greedily" in plan.selection
    assert plan.selection.endswith("at most 24 prompts, 120 episodes a step")
    assert plan.deterministic
    share = make_plan(recipe(batch=batch | {"prompts_per_step": 8}, selection={"variance_share": 0.5}))
    assert (share.prompts_at_most, share.groups_per_update) == (8, 4)
    assert "trains on the 4 groups whose rewards vary most" in share.selection


def test_early_stop_by_the_clock_is_told() -> None:
    plan = make_plan(recipe(rollout={"schedule": "eager"}, selection={"oversample": 2}))
    assert not plan.deterministic
    assert "trains on the groups that it sees complete first" in plan.determinism


def test_a_model_that_is_not_on_disk_leaves_memory_open() -> None:
    plan = make_plan(recipe("Nobody/NoSuchModel"))
    assert plan.model is None
    assert plan.memory == {}


@pytest.mark.parametrize("family", list(FAMILIES))
def test_a_tiny_model_is_counted_without_being_made(family: str, tmp_path: Path) -> None:
    made, told = read_shape(str(checkpoint(tmp_path, family))), read_shape(f"tiny:{family}")
    assert made is not None
    assert told is not None
    assert told.parameters == made.parameters
    assert (told.layers, told.hidden, told.key_values, told.mlp, told.vocabulary) == (
        made.layers, made.hidden, made.key_values, made.mlp, made.vocabulary
    )  # fmt: skip
    assert told.exact
    adapters = LoraSection(rank=2, groups=("vision", "audio", "language"))
    assert told.adapters(adapters) == made.adapters(adapters)


def test_the_disk_of_a_long_run_is_bounded_by_its_budgets() -> None:
    long = make_plan(recipe().model_copy(update={"steps": 100_000}))
    assert long.disk["episode logs"] <= 4 << 30
    assert sum(long.disk.values()) < 6 << 30
    one, two = (make_plan(recipe(checkpoint={"keep": keep})).disk["checkpoints"] for keep in (1, 2))
    assert two > one


QWEN2_5_VL_3B = {
    "model_type": "qwen2_5_vl", "vocab_size": 151936, "hidden_size": 2048, "intermediate_size": 11008,
    "num_hidden_layers": 36, "num_attention_heads": 16, "num_key_value_heads": 2, "tie_word_embeddings": True,
    "vision_config": {
        "depth": 32, "hidden_size": 1280, "intermediate_size": 3420, "patch_size": 14, "out_hidden_size": 2048,
    },
}  # fmt: skip
# The peaks of bench/baselines/h200.json in GiB: prompts, longest context, recomputation, tokens of a micro-batch.
MEASURED = [
    (16, 640, True, 14100, 52.4), (16, 640, "selective", 14100, 60.6), (16, 640, "selective", 9400, 56.5),
    (16, 640, False, 4700, 59.3), (16, 640, False, 9400, 70.3), (16, 640, False, 14100, 81.2),
    (8, 4480, True, 16384, 71.4), (8, 4480, "selective", 16384, 78.6), (8, 4480, False, 16384, 96.9),
]  # fmt: skip


def of_3b(folder: Path, prompts: int, context: int, how: object, tokens: int) -> Recipe:
    """A recipe of the bench on a checkpoint of Qwen2.5-VL-3B's shape."""
    (folder / "config.json").write_text(json.dumps(QWEN2_5_VL_3B))
    return recipe(
        str(folder),
        model={"path": str(folder), "dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": how},
        batch={"prompts_per_step": prompts, "group_size": 8, "tokens_per_microbatch": tokens},
        rollout={"max_new_tokens": 256, "max_context_tokens": context},
        optimizer={"moments": "bfloat16"},
    )


@pytest.mark.parametrize(("memory", "way"), [(140, False), (80, "selective"), (68, True), (24, True)])
def test_auto_recomputes_as_little_as_the_memory_allows(memory: int, way: object, tmp_path: Path) -> None:
    made = of_3b(tmp_path, 16, 640, "auto", 14100)
    shape = read_shape(made.model.path, made.model.revision)
    assert shape is not None
    chosen = least_recomputation(made, shape, memory << 30)
    assert chosen.way == way
    assert (chosen.forecast <= 0.9 * (memory << 30)) == (memory > 24)
    assert chosen.room is not None
    assert (chosen.room.kept > 0) == (way is False)
    stated, plain = (make_plan(one).memory for one in (made, of_3b(tmp_path, 16, 640, False, 14100)))
    assert stated.pop("vision tower") > plain.pop("vision tower")  # the dry run says the most
    assert stated == plain


@pytest.mark.parametrize(
    ("options", "cluster", "way"),
    [
        ({}, {}, "selective"),  # 84 GiB are left
        ({"gpu_share": 0.2}, {}, False),
        ({}, {"engines": 2}, False),  # on GPUs of their own
        ({}, {"engines": 2, "share_gpus": True}, "selective"),
    ],
)
def test_auto_leaves_vllm_its_share_of_the_learners_gpu(
    options: dict[str, Any], cluster: dict[str, Any], way: object, tmp_path: Path
) -> None:
    made = of_3b(tmp_path, 16, 640, "auto", 14100)
    rollout = made.rollout.model_dump() | {"engine": {"name": "vllm", "options": options}, "schedule": "eager"}
    made = Recipe.model_validate(made.model_dump() | {"rollout": rollout, "cluster": cluster})
    shape = read_shape(made.model.path, made.model.revision)
    assert shape is not None
    assert least_recomputation(made, shape, 140 << 30).way == way


def test_many_pictures_are_kept_by_microbatch_where_their_inputs_alone_would_not_fit(tmp_path: Path) -> None:
    """64 prompts of 4,096 vision tokens each, as a step of W2 without sharing: recomputed blocks would keep 88 GiB."""
    made = of_3b(tmp_path, 64, 4480, "auto", 9000)
    made = made.model_copy(update={"batch": made.batch.model_copy(update={"group_size": 1})})
    shape = read_shape(made.model.path, made.model.revision)
    assert shape is not None
    chosen = least_recomputation(made, shape, 140 << 30)
    assert chosen.way is False
    assert chosen.room is not None
    assert chosen.forecast == sum(make_plan(made).memory.values()) < 0.9 * (140 << 30)
    assert 64 * 4224 * 4 * chosen.room.recomputed > 80 << 30


def test_a_recomputed_tower_holds_no_more_than_a_microbatch_of_many_pictures(tmp_path: Path) -> None:
    few, many, more = (of_3b(tmp_path, prompts, 4480, True, 16384) for prompts in (8, 64, 512))
    shape = read_shape(few.model.path, few.model.revision)
    assert shape is not None
    held = [make_plan(one).memory["vision tower"] for one in (few, many, more)]
    assert held[0] == 8 * 4224 * 4 * tower_room(shape).recomputed < WHOLE_BYTES
    assert held[1] == held[2] == 16384 * 4 * tower_room(shape).recomputed
    spread = Recipe.model_validate(many.model_dump() | {"cluster": {"learners": 2}})
    assert make_plan(spread).memory["vision tower"] == 8 * held[0]  # ranks run a tower that is spread equally often
    chosen = given_recomputation(many, shape, 140 << 30, True)
    assert chosen.room is not None
    assert chosen.room.kept == 0
    assert chosen.forecast == sum(make_plan(many).memory.values()) < 0.9 * (140 << 30)
    assert given_recomputation(spread, shape, 140 << 30, True).room is None
    assert tower_bytes(many, shape, spread=True) == 8 * held[0]


def test_learners_that_share_tokens_are_told_with_what_each_keeps() -> None:
    alone, shared = (make_plan(recipe(cluster=cluster)) for cluster in ({}, {"learners": 4, "sequence_parallel": 2}))
    assert "2 learners, in 2 such groups share the tokens" in shared.sharing
    assert not alone.sharing
    assert shared.memory["activations"] == pytest.approx(alone.memory["activations"] / 2, rel=1e-3)
    assert "gathered keys and values" in shared.memory
    assert "gathered keys and values" not in alone.memory


def test_a_context_longer_than_a_microbatch_is_one_of_its_own() -> None:
    short, long = (
        make_plan(
            recipe(batch={"tokens_per_microbatch": 1024}, rollout={"max_context_tokens": context, "max_new_tokens": 8})
        )
        for context in (1024, 8192)
    )
    assert long.memory["activations"] == 8 * short.memory["activations"]


@pytest.mark.parametrize(
    ("changes", "keeps"),
    [
        ({}, True),
        ({"batch": {"prompts_per_step": 16, "group_size": 8, "tokens_per_microbatch": 2000}}, False),  # groups are cut
        ({"cluster": {"learners": 2}}, False),
    ],
)
def test_a_vision_tower_keeps_what_it_computes_where_it_can(changes: dict[str, Any], keeps: bool, tmp_path: Path) -> None:
    made = of_3b(tmp_path, 16, 640, "auto", 14100)
    made = Recipe.model_validate(made.model_dump() | changes)
    shape = read_shape(made.model.path, made.model.revision)
    assert shape is not None
    chosen = least_recomputation(made, shape, 140 << 30)
    assert (chosen.room is not None and chosen.room.kept > 0) == keeps
    assert (chosen.room is None) == made.cluster.shared
    if chosen.room is not None and keeps:  # 29 kB a patch and block
        assert chosen.room.kept / 32 == pytest.approx(29_000, rel=0.02)
        kept = make_plan(made).memory["vision tower"]
        assert chosen.forecast - kept + chosen.room.bytes == pytest.approx(0.9 * (140 << 30))


@pytest.mark.parametrize(("prompts", "context", "how", "tokens", "peak"), MEASURED)
def test_the_forecast_of_memory_is_within_15_percent_of_what_was_measured(
    prompts: int, context: int, how: object, tokens: int, peak: float, tmp_path: Path
) -> None:
    made = of_3b(tmp_path, prompts, context, how, tokens)
    assert sum(make_plan(made).memory.values()) / 2**30 == pytest.approx(peak, rel=0.15)


def test_matched_precision_is_told_and_its_activations_are_forecast(tmp_path: Path) -> None:
    made = of_3b(tmp_path, 16, 640, False, 14100)
    matched = made.model_copy(update={"model": made.model.model_copy(update={"precision": "matched"})})
    plan = make_plan(matched)
    assert sum(plan.memory.values()) / 2**30 == pytest.approx(97.1, rel=0.05)  # measured as the others were
    assert "bit for bit" in plan.precision
    assert not make_plan(made).precision


def test_on_a_gpu_the_plan_names_what_does_not_repeat() -> None:
    plan = make_plan(recipe(model={"path": "tiny:qwen3_vl", "device": "cuda"}))
    assert not plan.deterministic
    assert "flash attention's backward pass" in plan.determinism


@pytest.mark.parametrize(("name", "known"), [("frozen_lake", True), ("mine:Coins", False), ("gymnasium", False)])
def test_that_a_run_repeats_is_not_claimed_for_environments_that_are_not_ours(name: str, known: bool) -> None:
    source = {"source": "environments", "options": {"environment": name}}
    plan = make_plan(recipe(tasks={"train": [source]}))
    assert plan.deterministic is known
    assert plan.determinism.startswith("yes") is known
    assert ("sensorium validate" in plan.determinism) is not known


def test_a_vision_tower_takes_no_memory_in_tasks_without_pictures() -> None:
    plan = make_plan(recipe("tiny:qwen2_5_omni"))
    assert plan.memory["vision tower"] > 0
    heard, seen = (Task(kind, (user(Media(kind, "0" * 64)),)) for kind in ("sound", "video"))  # type: ignore[arg-type]
    assert "vision tower" not in for_tasks(plan, [heard]).memory
    assert for_tasks(plan, [heard, seen]) == plan
    assert for_tasks(plan, [heard, Task("e", environment=EnvironmentSpec("mine:Browser"))]) == plan
    assert for_tasks(plan, []) == plan
