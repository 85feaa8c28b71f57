"""A run of 6 steps equals 3 steps, kill -9 in the middle of the next, and a resume: bit for bit."""

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.torch import load_file

from sensorium.report.metrics import read_metrics, repeatable

HERE = Path(__file__).parent
RECIPES = {
    "single turn, with KL": """
        name: single
        steps: 6
        threads: 2
        model: {path: "package:shapes"}
        tasks:
          train: [{source: shapes, options: {split: train, size: 64, picture_size: 64}}]
          evaluate: [{source: shapes, options: {split: test, size: 8, picture_size: 64}}]
        batch: {prompts_per_step: 4, group_size: 4, updates_per_epoch: 2}
        rollout: {max_new_tokens: 6}
        rewards: {terms: [{name: exact}, {name: format, weight: 0.2}]}
        algorithm: {kl: {coef: 0.01}}
        optimizer: {lr: 2.0e-4, warmup_steps: 2, schedule: cosine}
        evaluation: {every: 2}
        checkpoint: {every: 3, keep: 2}
        """,
    "multi-turn, with a warm start": """
        name: multi
        steps: 4
        threads: 2
        model: {path: "package:frozen_lake"}
        tasks:
          train: [{source: worlds, options: {environment: frozen_lake, size: 64, options: {cell: 32}}}]
        batch: {prompts_per_step: 2, group_size: 4}
        rollout: {max_new_tokens: 6, max_turns: 8, window: 2}
        rewards: {terms: [{name: environment}, {name: format, weight: 0.2}]}
        optimizer: {lr: 1.0e-4}
        warm_start: {steps: 2, prompts_per_step: 4, optimizer: {lr: 1.0e-4}}
        checkpoint: {every: 3, keep: 2}
        """,
    "multi-turn, with a critic of its own and an adaptive KL in the reward": """
        name: own_critic
        steps: 6
        threads: 2
        model: {path: "package:frozen_lake"}
        tasks:
          train: [{source: worlds, options: {environment: frozen_lake, size: 64, options: {cell: 32}}}]
        batch: {prompts_per_step: 4, group_size: 2, updates_per_epoch: 2}
        rollout: {max_new_tokens: 6, max_turns: 8, window: 2}
        rewards: {terms: [{name: environment, options: {per_turn: true}}, {name: format, weight: 0.2}]}
        algorithm:
          advantage: {name: bi_level_gae, turn_gamma: 0.9, lam: 0.95}
          kl: {coef: 0.05, estimator: k1, place: reward, control: adaptive, target: 0.01, horizon: 50}
          critic: {warmup_steps: 1, optimizer: {lr: 3.0e-4}}
        optimizer: {lr: 1.0e-4}
        checkpoint: {every: 3, keep: 2}
        """,
    "single turn, with a critic on the policy's trunk, an adaptive KL in the loss and random choices": """
        name: shared_critic
        steps: 6
        threads: 2
        model: {path: "package:shapes"}
        tasks:
          train: [{source: shapes, options: {split: train, size: 64, picture_size: 64}}]
        batch: {prompts_per_step: 4, group_size: 4, epochs_per_step: 2}
        rollout: {max_new_tokens: 6}
        rewards: {terms: [{name: exact}, {name: format, weight: 0.2}]}
        algorithm:
          advantage: {name: masked_gae}
          loss: {name: clip_cov, cov_share: 0.1, cov_low: 0.001}
          kl: {coef: 0.05, control: adaptive, target: 0.01, horizon: 50}
          critic: {trunk: shared, trunk_coef: 0.1, optimizer: {lr: 1.0e-3}}
        optimizer: {lr: 2.0e-4}
        checkpoint: {every: 3, keep: 2}
        """,
    "rounds and early stop": """
        name: rounds
        steps: 6
        threads: 2
        model: {path: "package:frozen_lake"}
        tasks:
          train: [{source: worlds, options: {environment: frozen_lake, size: 16, options: {cell: 32}}}]
        batch: {prompts_per_step: 2, group_size: 4}
        selection: {dynamic: true, max_rounds: 3, oversample: 1.5}
        rollout: {max_new_tokens: 6, max_turns: 6, window: 2}
        rewards: {terms: [{name: environment}]}
        optimizer: {lr: 1.0e-4}
        checkpoint: {every: 3, keep: 2}
        """,
    "adapters, with KL to those after a warm start": """
        name: adapters
        steps: 4
        threads: 2
        model: {path: "package:shapes", lora: {rank: 4, groups: [vision, language]}}
        tasks:
          train: [{source: shapes, options: {split: train, size: 64, picture_size: 64}}]
        batch: {prompts_per_step: 4, group_size: 4, updates_per_epoch: 2}
        rollout: {max_new_tokens: 6}
        rewards: {terms: [{name: exact}, {name: format, weight: 0.2}]}
        algorithm: {kl: {coef: 0.01}, loss: {aggregation: token_mean}}
        optimizer: {lr: 1.0e-3, group_lr: {vision: 2.0e-3}}
        warm_start: {steps: 2, prompts_per_step: 4, optimizer: {lr: 1.0e-3}}
        checkpoint: {every: 3, keep: 2}
        """,
    "video and sound, of which little is kept": """
        name: clips
        steps: 6
        threads: 2
        model: {path: "tiny:qwen2_5_omni", freeze: [audio]}
        tasks:
          train: [{source: sight_and_sound, options: {size: 24}}]
          evaluate: [{source: sight_and_sound, options: {split: test, size: 4}}]
        media: {cache_gib: 0.0005, memory_gib: 0.001}
        batch: {prompts_per_step: 4, group_size: 2, updates_per_epoch: 2}
        rollout: {max_new_tokens: 4}
        rewards: {terms: [{name: "cinema:ByIndex"}]}
        algorithm: {kl: {coef: 0.01}}
        optimizer: {lr: 1.0e-3}
        evaluation: {every: 2}
        checkpoint: {every: 3, keep: 2}
        """,
}
MOMENTS = {"rounds and early stop": "5:rollout:2"}


def run(recipe: Path, directory: Path, mode: str = "") -> int:
    environment = os.environ | {"PYTHONHASHSEED": "random"}
    command = [sys.executable, str(HERE / "run_and_die.py"), str(recipe), str(directory), *([mode] if mode else [])]
    return subprocess.run(command, env=environment, check=False).returncode


@pytest.mark.parametrize("name", sorted(RECIPES))
def test_a_killed_and_resumed_run_repeats_the_uninterrupted_one(name: str, tmp_path: Path) -> None:
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(RECIPES[name])
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run(recipe, whole) == 0
    assert run(recipe, broken, MOMENTS.get(name, "5:update")) == -signal.SIGKILL
    assert not (broken / "checkpoints" / "step_000006").exists()
    assert run(recipe, broken, "resume") == 0
    rows = [[repeatable(row) for row in read_metrics(path / "metrics.jsonl")] for path in (whole, broken)]
    assert [row["step"] for row in rows[0]] == [1, 2, 3, 4, 5, 6]
    assert rows[0] == rows[1]
    episodes = sorted(p.relative_to(whole) for p in (*whole.glob("episodes/*"), *whole.glob("eval/*")))
    assert episodes == sorted(p.relative_to(broken) for p in (*broken.glob("episodes/*"), *broken.glob("eval/*")))
    assert episodes
    for path in episodes:
        assert (whole / path).read_bytes() == (broken / path).read_bytes(), path
    for path in whole.glob("checkpoints/step_000006/adapter/*"):
        assert path.read_bytes() == (broken / path.relative_to(whole)).read_bytes(), path.name
    ours, theirs = (load_file(next((p / "checkpoints/step_000006").glob("*.safetensors"))) for p in (whole, broken))
    assert ours.keys() == theirs.keys()
    assert all(ours[key].equal(theirs[key]) for key in ours)
    start = load_file(next((whole / "checkpoints/step_000003").glob("*.safetensors")))
    assert not all(ours[key].equal(start[key]) for key in ours), "training moved the weights"
