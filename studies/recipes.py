"""What the studies train with: the algorithms that are compared, and small recipes that are killed and resumed.

A recipe is a task with its model, and what differs from it. ``ALGORITHMS`` change shipped recipes by overrides.
"""

import json
from typing import Any

SHAPES = ["steps=80", "batch.prompts_per_step=48", "optimizer.lr=3e-4", "tasks.evaluate.0.options.seed=7"]
LAKE = ["steps=40", "batch.prompts_per_step=32", "batch.group_size=6", "tasks.evaluate.0.options.seed=7"]
LAKE += ["tasks.evaluate.0.options.distinct=true", "optimizer.lr=1e-4", "optimizer.schedule=constant"]
CRITIC = ["algorithm.critic.optimizer.lr=3e-4", "algorithm.advantage.lam=0.95"]
DISCOUNT = ["algorithm.advantage.gamma=0.98"]
TURNS = ["rewards.terms.0.options.per_turn=true", "algorithm.advantage.turn_gamma=0.95"]
SEQUENCES = ["algorithm.loss.name=gspo", "algorithm.loss.clip_low=3e-4", "algorithm.loss.clip_high=4e-4"]
SEQUENCES += ["batch.updates_per_epoch=2"]

ALGORITHMS = {
    "grpo+clip": ("shapes", "grpo", SHAPES),
    "rloo+clip": ("shapes", "rloo", SHAPES),
    "grpo+gspo": ("shapes", "grpo", [*SHAPES, *SEQUENCES]),
    "ppo+masked_gae": ("frozen_lake", "masked_gae", [*LAKE, *CRITIC, *DISCOUNT]),
    "ppo+bi_level_gae": ("frozen_lake", "bi_level_gae", [*LAKE, *CRITIC, *TURNS]),
}
"""By name: the shipped recipe, its estimator, and what else is changed in it."""

TASKS: dict[str, dict[str, Any]] = {
    "shapes": {
        "tasks": {"train": [{"source": "shapes", "options": {"split": "train", "size": 64, "picture_size": 64}}]},
        "batch": {"prompts_per_step": 2, "group_size": 4},
        "rollout": {"max_new_tokens": 6},
        "rewards": {"terms": [{"name": "exact"}, {"name": "format", "weight": 0.2}]},
        "optimizer": {"lr": 2e-4},
    },
    "frozen_lake": {
        "tasks": {
            "train": [
                {"source": "environments", "options": {"environment": "frozen_lake", "size": 64, "options": {"cell": 32}}}
            ]
        },
        "batch": {"prompts_per_step": 2, "group_size": 4},
        "rollout": {"max_new_tokens": 6, "max_turns": 8, "window": 2},
        "rewards": {"terms": [{"name": "environment"}, {"name": "format", "weight": 0.2}]},
        "optimizer": {"lr": 1e-4},
    },
    "sight_and_sound": {
        "tasks": {"train": [{"source": "sight_and_sound", "options": {"size": 24}}]},
        "batch": {"prompts_per_step": 2, "group_size": 3},
        "rollout": {"max_new_tokens": 6},
        "rewards": {"terms": [{"name": "exact"}]},
        "optimizer": {"lr": 1e-3},
    },
}
HELD_OUT = {
    "shapes": [{"source": "shapes", "options": {"split": "test", "size": 8, "picture_size": 64}}],
    "sight_and_sound": [{"source": "sight_and_sound", "options": {"split": "test", "size": 4}}],
}
PICTURES = {"crop": [0.8, 1.0], "brightness": [0.8, 1.2], "blur": [0.0, 1.0]}


def small(name: str, task: str, **changes: Any) -> str:
    """A recipe of a shipped warm start on its task, saved every other step, with changes, as text."""
    base = {"name": name, "steps": 3, "threads": 1, "model": {"path": f"package:{task}"}, **TASKS[task]}
    return json.dumps(_merged(base | {"checkpoint": {"every": 2, "keep": 2}}, changes), indent=1)


def _merged(base: Any, changes: Any) -> Any:
    """Mappings with changes inside them; anything else is replaced."""
    if not isinstance(base, dict) or not isinstance(changes, dict):
        return changes
    return base | {key: _merged(base.get(key), value) for key, value in changes.items()}


def _adaptive(**changes: Any) -> dict[str, Any]:
    return {"coef": 0.05, "control": "adaptive", "target": 0.01, "horizon": 50} | changes


RESUMED = {
    "single turn, with KL": small(
        "single",
        "shapes",
        tasks={"evaluate": HELD_OUT["shapes"], "augment": {"picture": PICTURES}},
        batch={"updates_per_epoch": 2},
        algorithm={"kl": {"coef": 0.01}},
        optimizer={"warmup_steps": 2, "schedule": "cosine"},
        evaluation={"every": 2},
    ),
    "multi-turn, with a warm start": small(
        "multi",
        "frozen_lake",
        steps=2,
        warm_start={"steps": 1, "prompts_per_step": 4, "optimizer": {"lr": 1e-4}},
    ),
    "multi-turn, with a critic of its own and an adaptive KL in the reward": small(
        "own_critic",
        "frozen_lake",
        batch={"prompts_per_step": 4, "group_size": 2, "updates_per_epoch": 2},
        rollout={"max_new_tokens": 4, "max_turns": 3},
        rewards={"terms": [{"name": "environment", "options": {"per_turn": True}}, {"name": "format", "weight": 0.2}]},
        algorithm={
            "advantage": {"name": "bi_level_gae", "turn_gamma": 0.9, "lam": 0.95},
            "kl": _adaptive(estimator="k1", place="reward"),
            "critic": {"warmup_steps": 1, "optimizer": {"lr": 3e-4}},
        },
    ),
    "single turn, with a critic on the policy's trunk, an adaptive KL in the loss and random choices": small(
        "shared_critic",
        "shapes",
        threads=2,
        batch={"epochs_per_step": 2},
        algorithm={
            "advantage": {"name": "masked_gae"},
            "loss": {"name": "clip_cov", "cov_share": 0.1, "cov_low": 0.001},
            "kl": _adaptive(),
            "critic": {"trunk": "shared", "trunk_coef": 0.1, "optimizer": {"lr": 1e-3}},
        },
    ),
    "rounds and early stop": small(
        "rounds",
        "frozen_lake",
        tasks={
            "train": [
                {"source": "environments", "options": {"environment": "frozen_lake", "size": 16, "options": {"cell": 32}}}
            ]
        },
        batch={"prompts_per_step": 2, "group_size": 3},
        selection={"dynamic": True, "max_rounds": 2, "oversample": 1.5},
        rollout={"max_turns": 7},
        rewards={"terms": [{"name": "environment"}]},
    ),
    "adapters, with KL to those after a warm start": small(
        "adapters",
        "shapes",
        steps=2,
        model={"lora": {"rank": 4, "groups": ["vision", "language"]}},
        tasks={"evaluate": HELD_OUT["shapes"], "augment": {"picture": PICTURES}},
        batch={"updates_per_epoch": 2},
        algorithm={"kl": {"coef": 0.01}, "loss": {"aggregation": "token_mean"}},
        optimizer={"lr": 1e-3, "group_lr": {"vision": 2e-3}},
        warm_start={"steps": 1, "prompts_per_step": 4, "optimizer": {"lr": 1e-3}},
        evaluation={"every": 2, "at_start": True},
    ),
    "a mixture of experts, replayed over turns": small(
        "experts",
        "frozen_lake",
        model={"path": "tiny:qwen3_vl_moe"},
        rollout={"max_new_tokens": 4, "max_turns": 3},
        algorithm={"router_replay": True, "router_coef": 0.01},
        batch={"updates_per_epoch": 2},
    ),
    "video and sound, of which little is kept": small(
        "clips",
        "sight_and_sound",
        model={"freeze": ["audio"]},
        tasks={"evaluate": HELD_OUT["sight_and_sound"], "augment": {"sound": {"noise": [10, 30]}, "video": {"jitter": 1}}},
        media={"cache_gib": 0.0005, "memory_gib": 0.001},
        batch={"updates_per_epoch": 2},
        algorithm={"kl": {"coef": 0.01}},
        evaluation={"every": 2},
    ),
}
"""Recipes of three rows each, warm start included, that cover what a run carries from step to step."""

STEPS = 3
