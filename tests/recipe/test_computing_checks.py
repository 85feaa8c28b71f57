"""The dry run refuses what matched precision cannot compute and says what has no fast path, without torch."""

from typing import Any

import pytest

from sensorium.recipe.algorithm_checks import cautions
from sensorium.recipe.checks import computing_notes
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import RecipeError


def recipe(family: str, device: str = "cuda", precision: str = "fast", **more: Any) -> Recipe:
    return Recipe.model_validate(
        {
            "name": "trial",
            "steps": 1,
            "model": {"path": f"tiny:{family}", "device": device, "precision": precision},
            "tasks": {"train": [{"source": "shapes"}]},
            "rewards": {"terms": [{"name": "exact"}]},
        }
        | more
    )


def test_experts_on_a_gpu_decode_without_graphs() -> None:
    assert ["without CUDA graphs" in note for note in computing_notes(recipe("qwen3_vl_moe"))] == [True]
    assert not list(computing_notes(recipe("qwen3_vl_moe", "cpu")))
    assert not list(computing_notes(recipe("qwen3_vl")))


REFUSED = {
    "a mixture of experts": recipe("qwen3_vl_moe", precision="matched"),
    "gated delta nets": recipe("qwen3_5", precision="matched"),
    "norms after attention": recipe("glm4v", precision="matched"),
    "engine 'vllm'": recipe("qwen3_vl", precision="matched", rollout={"engine": "vllm", "schedule": "eager"}),
    "cluster.learners is 2": recipe("qwen3_vl", precision="matched", cluster={"learners": 2}),
    "cluster.placement is 'ray'": recipe("qwen3_vl", precision="matched", cluster={"placement": "ray"}),
    "attends over pages": recipe(
        "qwen3_vl", precision="matched", rollout={"engine": {"name": "process", "options": {"kv": "rows"}}}
    ),
}


@pytest.mark.parametrize("cause", REFUSED)
def test_what_matched_precision_cannot_compute_is_refused(cause: str) -> None:
    with pytest.raises(RecipeError, match=cause):
        list(computing_notes(REFUSED[cause]))
    assert not list(computing_notes(recipe("qwen3_vl", precision="matched")))


def test_replaying_experts_is_refused_where_there_are_none_or_nobody_records_them() -> None:
    replay = {"router_replay": True}
    assert not list(computing_notes(recipe("qwen3_vl_moe", "cpu", algorithm=replay)))
    with pytest.raises(RecipeError, match=r"router_replay.*qwen3_vl model has no experts"):
        list(computing_notes(recipe("qwen3_vl", "cpu", algorithm=replay)))
    with pytest.raises(RecipeError, match=r"router_replay.*vLLM"):
        list(computing_notes(recipe("qwen3_vl_moe", "cpu", algorithm=replay, rollout={"engine": "vllm"})))


def test_learners_cannot_share_the_tokens_of_delta_nets() -> None:
    with pytest.raises(RecipeError, match=r"sequence_parallel is 2.*delta nets"):
        list(computing_notes(recipe("qwen3_5", cluster={"learners": 2, "sequence_parallel": 2})))
    assert not list(computing_notes(recipe("qwen3_5", cluster={"learners": 2})))


def test_moments_in_8_bits_are_refused_where_the_learner_is_spread() -> None:
    assert not list(computing_notes(recipe("qwen3_vl", optimizer={"moments": "8-bit"})))
    with pytest.raises(RecipeError, match=r"8-bit.*spread over ranks.*bfloat16"):
        list(computing_notes(recipe("qwen3_vl", optimizer={"moments": "8-bit"}, cluster={"learners": 2})))


def test_a_frozen_tower_whose_projector_learns_spares_nothing_and_the_dry_run_says_so() -> None:
    def notes(*freeze: str, family: str = "auto") -> list[str]:
        made = recipe("qwen3_vl")
        model = made.model.model_copy(update={"freeze": freeze, "family": family})
        return list(computing_notes(made.model_copy(update={"model": model})))

    (note,) = notes("vision")
    assert "Freeze both" in note
    assert not notes("vision", "projector")
    assert not notes("language")
    (general,) = notes("vision", family="general")  # which caches no features
    assert "Freeze both" not in general


FP8 = {"quantization": "fp8"}
BFLOAT16 = {"path": "tiny:qwen3_vl", "device": "cuda", "dtype": "bfloat16"}
WITHOUT_FP8 = {
    "engine 'vllm'": {"rollout": FP8 | {"engine": "vllm", "schedule": "eager"}},
    "model.device is 'cpu'": {"model": BFLOAT16 | {"device": "cpu"}},
    "model.precision is 'matched'": {"model": BFLOAT16 | {"precision": "matched"}},
    "model.dtype is 'float32'": {"model": BFLOAT16 | {"dtype": "float32"}},
    "kv is 'rows'": {"rollout": FP8 | {"engine": {"name": "native", "options": {"kv": "rows"}}}},
    "model.lora.merge is false": {"model": BFLOAT16 | {"lora": {"rank": 4, "merge": False}}},
    "a sharded learner": {"cluster": {"learners": 2}},
    "family qwen3_vl_moe": {"model": BFLOAT16 | {"path": "tiny:qwen3_vl_moe"}},
    "family qwen3_5": {"model": BFLOAT16 | {"path": "tiny:qwen3_5"}},
    "family glm4v": {"model": BFLOAT16 | {"path": "tiny:glm4v"}},
}


@pytest.mark.parametrize("cause", WITHOUT_FP8)
def test_fp8_weights_are_refused_where_nothing_computes_with_them(cause: str) -> None:
    given = {"model": BFLOAT16, "rollout": FP8} | WITHOUT_FP8[cause]
    with pytest.raises(RecipeError, match=cause):
        list(computing_notes(recipe("qwen3_vl", **given)))
    assert not list(computing_notes(recipe("qwen3_vl", model=BFLOAT16, rollout=FP8)))


def test_fp8_weights_without_a_correction_are_cautioned_against() -> None:
    fp8 = recipe("qwen3_vl", model=BFLOAT16, rollout=FP8)
    corrected = recipe("qwen3_vl", model=BFLOAT16, rollout=FP8, algorithm={"correction": {"weights": "token"}})
    assert ["algorithm.correction" in caution for caution in cautions(fp8)] == [True]
    assert not cautions(corrected)
