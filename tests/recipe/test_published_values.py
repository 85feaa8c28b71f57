"""Shipped recipes hold the published values of their systems; where they keep another, a comment in the recipe says why.

The values are those that the systems' own pages and scripts print, and below them the defaults of the trainers they run on
(verl: weight decay 0.01, dual clip 3; NeMo-RL: weight decay 0.01, a constant rate, no dual clip; slime: no dual clip, the
mean over samples of the mean over tokens).
"""

from typing import Any

import pytest

from sensorium.recipe.load import find_recipe, load_recipe

VERL = {
    "optimizer.weight_decay": 0.01, "optimizer.schedule": "constant", "optimizer.betas": [0.9, 0.999],
    "optimizer.clip_norm": 1.0,
}  # fmt: skip
CAPRL = {
    **VERL,
    "model.path": "Qwen/Qwen3-VL-4B-Instruct",
    "epochs": 3,
    "batch.prompts_per_step": 128,
    "batch.group_size": 8,
    "batch.updates_per_epoch": 1,
    "rollout.max_new_tokens": 4096,
    "rollout.max_context_tokens": 18000,
    "optimizer.lr": 1e-5,
    "optimizer.warmup_steps": 0,
    "checkpoint.every": 50,
    "algorithm.advantage.name": "rloo",
    "algorithm.loss.dual_clip": 3.0,
    "algorithm.loss.aggregation": "sequence_mean_token_mean",
    "algorithm.kl.coef": 0.0,
    "logging.loggers": ["wandb"],
}
VAGEN = {
    **VERL,
    "model.path": "Qwen/Qwen2.5-VL-3B-Instruct",
    "steps": 300,
    "rollout.temperature": 0.7,
    "rollout.top_p": 0.95,
    "optimizer.lr": 1e-6,
    "algorithm.critic.optimizer.lr": 1e-5,
    "algorithm.critic.optimizer.weight_decay": 0.01,
    "algorithm.critic.value_clip": 0.5,
    "algorithm.kl.coef": 0.001,
    "algorithm.kl.place": "reward",
    "evaluation.every": 20,
    "evaluation.at_start": True,
}
PUBLISHED: dict[str, dict[str, Any]] = {
    "taskmem": {
        **VERL,
        "model.path": "Qwen/Qwen3-VL-30B-A3B-Thinking",
        "epochs": 1,
        "tasks.shuffle": False,
        "batch.prompts_per_step": 32,
        "batch.group_size": 8,
        "batch.updates_per_epoch": 4,
        "rollout.max_new_tokens": 8192,
        "rollout.max_context_tokens": 24576 + 8192,
        "rewards.terms.0.options.think_length_threshold": 1200,
        "rewards.terms.0.options.think_penalty": -1.0,
        "rewards.terms.0.options.correct_reward": 0.5,
        "rewards.terms.0.options.wrong_reward": -0.5,
        "rewards.terms.0.options.format_penalty": -1.5,
        "rewards.terms.0.options.memory_token_threshold": 150,
        "rewards.terms.0.options.usefulness_scale": 0.1,
        "rewards.terms.0.options.memory_length_threshold": 5,
        "logging.layout": "taskmem",
        "algorithm.advantage.name": "grpo",
        "algorithm.advantage.post": "optimize_threshold",
        "algorithm.loss.name": "gspo",
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.28,
        "algorithm.kl.coef": 0.0,
        "optimizer.lr": 1e-6,
        "checkpoint.every": 10,
        "logging.loggers": ["wandb"],
        "logging.project": "m3_qwen3_vl",
    },
    "caprl_video": {
        **CAPRL,
        "rewards.terms.1.weight": 0.2,
        "rewards.terms.2.weight": 0.2,
        "rewards.terms.2.options.full_until": 2048,
        "rewards.terms.2.options.none_from": 3072,
        "logging.project": "CapRL_video",
    },
    "caprl_image": {
        **CAPRL,
        "rewards.terms.1.weight": 0.2,
        "rewards.terms.1.options.full_until": 2048,
        "rewards.terms.1.options.none_from": 3072,
    },
    "audio_visual": {
        "model.path": "Qwen/Qwen2.5-Omni-7B",
        "steps": 1000,
        "epochs": 1,
        "tasks.train.0.source": "intent",
        "tasks.train.0.options.video": {"frames": 8},
        "tasks.evaluate.0.source": "intent",
        "tasks.evaluate.0.options.video": {"frames": 8},
        "batch.prompts_per_step": 32,
        "batch.group_size": 8,
        "batch.updates_per_epoch": 32 * 8 // 32,
        "rollout.temperature": 1.0,
        "rollout.max_new_tokens": 1024,
        "rollout.max_context_tokens": 8192,
        "rewards.terms.0.weight": 0.2,
        "rewards.terms.1.weight": 0.8,
        "algorithm.advantage.leave_one_out": True,
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.2,
        "algorithm.loss.dual_clip": None,
        "algorithm.kl.coef": 0.01,
        "algorithm.kl.estimator": "k3",
        "optimizer.lr": 1e-6,
        "optimizer.weight_decay": 0.01,
        "optimizer.schedule": "constant",
        "optimizer.warmup_steps": 10,
        "evaluation.every": 10,
        "evaluation.at_start": False,
        "evaluation.limit": 256,
        "evaluation.temperature": 1.0,
        "checkpoint.every": 20,
        "checkpoint.keep": 10,
        "logging.loggers": ["wandb", "tensorboard"],
    },
    "geo3k_multi_turn": {
        "model.path": "Qwen/Qwen3-VL-2B-Instruct",
        "steps": 3000,
        "batch.prompts_per_step": 64,
        "batch.group_size": 8,
        "batch.updates_per_epoch": 1,
        "rollout.temperature": 1.0,
        "rollout.max_turns": 3,
        "rollout.max_episode_tokens": 4096,
        "rollout.count_observations": True,
        "tasks.train.0.options.environment.options.max_turns": 3,
        "tasks.train.0.options.environment.options.explain": False,
        "algorithm.advantage.name": "grpo",
        "algorithm.loss.clip_low": 0.2,
        "algorithm.loss.clip_high": 0.28,
        "algorithm.loss.dual_clip": None,
        "algorithm.loss.aggregation": "sequence_mean_token_mean",
        "algorithm.kl.coef": 0.0,
        "optimizer.lr": 1e-6,
        "optimizer.betas": [0.9, 0.98],
        "optimizer.weight_decay": 0.1,
        "optimizer.schedule": "constant",
    },
    "vagen_frozen_lake": {
        **VAGEN,
        "tasks.train.0.options.size": 10000,
        "tasks.evaluate.0.options.size": 512,
        "tasks.train.0.options.options.view": "text",
    },
    "vagen_sokoban": {**VAGEN, "algorithm.advantage.name": "bi_level_gae"},
    "vagen_navigation": VAGEN,
    "vagen_svg": VAGEN,
}
EXTRA = "extra"
DEVIATIONS: dict[tuple[str, str], tuple[Any, str]] = {
    ("taskmem", "logging.loggers"): ([], EXTRA),
    ("caprl_video", "logging.loggers"): ([], EXTRA),
    ("caprl_image", "logging.loggers"): ([], EXTRA),
    ("audio_visual", "logging.loggers"): ([], EXTRA),
    ("caprl_video", "optimizer.warmup_steps"): (20, "its page names none"),
    ("caprl_image", "optimizer.warmup_steps"): (20, "its page names none"),
    ("audio_visual", "evaluation.temperature"): (0.0, "greedy answers vary less"),
    ("vagen_frozen_lake", "tasks.train.0.options.options.view"): (None, "the configuration page shows render_mode text"),
}
"""What a recipe has instead, and words of the comment in the recipe that says why."""


def value_at(data: Any, key: str) -> Any:
    """What a resolved recipe has at a dotted key; None where an option is left out."""
    for part in key.split("."):
        if isinstance(data, list):
            data = data[int(part)]
        elif ".options." in key or part in data:
            data = data.get(part)
        else:
            raise KeyError(key)
    return data


@pytest.mark.parametrize(("recipe", "key"), [(recipe, key) for recipe, values in PUBLISHED.items() for key in values])
def test_a_recipe_has_the_published_value_or_says_why_not(recipe: str, key: str) -> None:
    found = value_at(load_recipe(recipe).model_dump(mode="json"), key)
    published = PUBLISHED[recipe][key]
    ours, comment = DEVIATIONS.get((recipe, key), (published, ""))
    assert found == ours
    assert (found != published) == bool(comment), "a deviation that is none any more is taken off the list"
    comments = [line.partition("#")[2] for line in find_recipe(recipe).read_text().splitlines()]
    assert comment in " ".join(" ".join(comments).split())


def test_every_deviation_is_of_a_published_value() -> None:
    assert all(key in PUBLISHED[recipe] for recipe, key in DEVIATIONS)
