"""Runs that are killed and resumed, and what they must share with the uninterrupted run: all but times.

The recipes are small and cover what a run carries from step to step. tests/trainer/test_resume.py kills each once at a
chosen moment; studies/kills.py kills some of them at random moments, many times.
"""

import os
import signal
import sqlite3
from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from sensorium.recipe.load import load_recipe
from sensorium.record.metrics import read_metrics, repeatable
from sensorium.report.watcher import Metrics, Watcher
from sensorium.trainer.run import train

SHAPES = "train: [{source: shapes, options: {split: train, size: 64, picture_size: 64}}]"
LAKES = "train: [{source: worlds, options: {environment: frozen_lake, size: 64, options: {cell: 32}}}]"
RECIPES = {
    "single turn, with KL": f"""
        name: single
        steps: 4
        threads: 2
        model: {{path: "package:shapes"}}
        tasks:
          {SHAPES}
          evaluate: [{{source: shapes, options: {{split: test, size: 8, picture_size: 64}}}}]
        batch: {{prompts_per_step: 4, group_size: 4, updates_per_epoch: 2}}
        rollout: {{max_new_tokens: 6}}
        rewards: {{terms: [{{name: exact}}, {{name: format, weight: 0.2}}]}}
        algorithm: {{kl: {{coef: 0.01}}}}
        optimizer: {{lr: 2.0e-4, warmup_steps: 2, schedule: cosine}}
        evaluation: {{every: 2}}
        checkpoint: {{every: 2, keep: 2}}
        """,
    "multi-turn, with a warm start": f"""
        name: multi
        steps: 3
        threads: 1
        model: {{path: "package:frozen_lake"}}
        tasks:
          {LAKES}
        batch: {{prompts_per_step: 2, group_size: 4}}
        rollout: {{max_new_tokens: 6, max_turns: 8, window: 2}}
        rewards: {{terms: [{{name: environment}}, {{name: format, weight: 0.2}}]}}
        optimizer: {{lr: 1.0e-4}}
        warm_start: {{steps: 1, prompts_per_step: 4, optimizer: {{lr: 1.0e-4}}}}
        checkpoint: {{every: 2, keep: 2}}
        """,
    "multi-turn, with a critic of its own and an adaptive KL in the reward": f"""
        name: own_critic
        steps: 4
        threads: 1
        model: {{path: "package:frozen_lake"}}
        tasks:
          {LAKES}
        batch: {{prompts_per_step: 4, group_size: 2, updates_per_epoch: 2}}
        rollout: {{max_new_tokens: 4, max_turns: 3, window: 2}}
        rewards: {{terms: [{{name: environment, options: {{per_turn: true}}}}, {{name: format, weight: 0.2}}]}}
        algorithm:
          advantage: {{name: bi_level_gae, turn_gamma: 0.9, lam: 0.95}}
          kl: {{coef: 0.05, estimator: k1, place: reward, control: adaptive, target: 0.01, horizon: 50}}
          critic: {{warmup_steps: 1, optimizer: {{lr: 3.0e-4}}}}
        optimizer: {{lr: 1.0e-4}}
        checkpoint: {{every: 2, keep: 2}}
        """,
    "single turn, with a critic on the policy's trunk, an adaptive KL in the loss and random choices": f"""
        name: shared_critic
        steps: 4
        threads: 1
        model: {{path: "package:shapes"}}
        tasks:
          {SHAPES}
        batch: {{prompts_per_step: 4, group_size: 4, epochs_per_step: 2}}
        rollout: {{max_new_tokens: 6}}
        rewards: {{terms: [{{name: exact}}, {{name: format, weight: 0.2}}]}}
        algorithm:
          advantage: {{name: masked_gae}}
          loss: {{name: clip_cov, cov_share: 0.1, cov_low: 0.001}}
          kl: {{coef: 0.05, control: adaptive, target: 0.01, horizon: 50}}
          critic: {{trunk: shared, trunk_coef: 0.1, optimizer: {{lr: 1.0e-3}}}}
        optimizer: {{lr: 2.0e-4}}
        checkpoint: {{every: 2, keep: 2}}
        """,
    "rounds and early stop": """
        name: rounds
        steps: 4
        threads: 1
        model: {path: "package:frozen_lake"}
        tasks:
          train: [{source: worlds, options: {environment: frozen_lake, size: 16, options: {cell: 32}}}]
        batch: {prompts_per_step: 2, group_size: 4}
        selection: {dynamic: true, max_rounds: 3, oversample: 1.5}
        rollout: {max_new_tokens: 6, max_turns: 7, window: 2}
        rewards: {terms: [{name: environment}]}
        optimizer: {lr: 1.0e-4}
        checkpoint: {every: 2, keep: 2}
        """,
    "adapters, with KL to those after a warm start": f"""
        name: adapters
        steps: 3
        threads: 1
        model: {{path: "package:shapes", lora: {{rank: 4, groups: [vision, language]}}}}
        tasks:
          {SHAPES}
          evaluate: [{{source: shapes, options: {{split: test, size: 8, picture_size: 64}}}}]
        batch: {{prompts_per_step: 4, group_size: 4, updates_per_epoch: 2}}
        rollout: {{max_new_tokens: 6}}
        rewards: {{terms: [{{name: exact}}, {{name: format, weight: 0.2}}]}}
        algorithm: {{kl: {{coef: 0.01}}, loss: {{aggregation: token_mean}}}}
        optimizer: {{lr: 1.0e-3, group_lr: {{vision: 2.0e-3}}}}
        warm_start: {{steps: 1, prompts_per_step: 4, optimizer: {{lr: 1.0e-3}}}}
        evaluation: {{every: 2, at_start: true}}
        checkpoint: {{every: 2, keep: 2}}
        """,
    "video and sound, of which little is kept": """
        name: clips
        steps: 4
        threads: 1
        model: {path: "package:sight_and_sound", freeze: [audio]}
        tasks:
          train: [{source: sight_and_sound, options: {size: 24}}]
          evaluate: [{source: sight_and_sound, options: {split: test, size: 4}}]
        media: {cache_gib: 0.0005, memory_gib: 0.001}
        batch: {prompts_per_step: 4, group_size: 4, updates_per_epoch: 2}
        rollout: {max_new_tokens: 6}
        rewards: {terms: [{name: exact}]}
        algorithm: {kl: {coef: 0.01}}
        optimizer: {lr: 1.0e-3}
        evaluation: {every: 2}
        checkpoint: {every: 2, keep: 2}
        """,
}
STEPS = 4
"""Rows of every recipe, warm start included."""


class PhaseFile(Watcher):
    """Keeps in a file beside the run which phase of which step it is in, so that a kill can be told by its moment."""

    def __init__(self, directory: Path) -> None:
        self.path = phase_file(directory)
        self.path.write_text("start")

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """Write the phase."""
        self.path.write_text(name)

    def stepped(self, step: int, metrics: Metrics) -> None:
        """After a step's rows comes its checkpoint."""
        self.path.write_text("checkpoint or end of step")


class Killer(Watcher):
    """Kills the process as a step enters a phase: ``3:update``; ``3:rollout:2`` is the second time step 3 enters it."""

    def __init__(self, moment: str) -> None:
        step, self.name, *nth = moment.split(":")
        self.step, self.left = int(step), int(nth[0]) if nth else 1

    def phase(self, step: int, name: str, total: int = 0) -> None:
        """Count the phases down."""
        self.left -= (step, name) == (self.step, self.name)
        if not self.left:
            os.kill(os.getpid(), signal.SIGKILL)


def train_recipe(recipe: str, directory: str, mode: str = "") -> None:
    """Train a recipe file. Mode: ``resume``, or a moment at which the process kills itself (``3:update``).

    A run that was killed before its first checkpoint is resumed from the beginning.
    """
    watchers: list[Watcher] = [Killer(mode)] if ":" in mode else [PhaseFile(Path(directory))]
    saved = any((Path(directory) / "checkpoints").glob("step_*/COMPLETE"))
    again = mode == "resume"
    found = load_recipe(Path(recipe), [f"run_dir={directory}"])
    train(found, resume=again and saved, restart=again and not saved, watchers=watchers)


def phase_file(directory: Path) -> Path:
    """Where a run's phase is kept: beside the run, which it is no part of."""
    return directory.with_name(f"{directory.name}.phase")


def differences(whole: Path, again: Path) -> list[str]:
    """What a resumed run does not share with the uninterrupted one; equal runs give nothing."""
    rows = [[repeatable(row) for row in read_metrics(path / "metrics.jsonl")] for path in (whole, again)]
    found = ["metrics.jsonl"] if rows[0] != rows[1] else []
    names = [{str(p.relative_to(path)) for p in _same_bytes(path)} for path in (whole, again)]
    found += sorted(names[0] ^ names[1])
    found += [name for name in sorted(names[0] & names[1]) if (whole / name).read_bytes() != (again / name).read_bytes()]
    found += ["ledger.sqlite"] if _ledger(whole) != _ledger(again) else []
    weights = [load_file(next(_last_checkpoint(path).glob("*.safetensors"))) for path in (whole, again)]
    if weights[0].keys() != weights[1].keys():
        return [*found, "names of weights"]
    return found + [name for name, tensor in weights[0].items() if not tensor.equal(weights[1][name])]


def moved(run: Path) -> bool:
    """True if training changed the weights between the first and the last checkpoint that are kept."""
    first, last = (load_file(next(path.glob("*.safetensors"))) for path in _checkpoints(run)[:: len(_checkpoints(run)) - 1])
    return any(not tensor.equal(first[name]) for name, tensor in last.items())


def _same_bytes(run: Path) -> list[Path]:
    """Files that equal runs write byte for byte."""
    folders = [run / "episodes", run / "eval", _last_checkpoint(run) / "adapter"]
    return [path for folder in folders for path in folder.glob("*") if path.is_file()]


def _ledger(run: Path) -> dict[str, list[Any]]:
    """Every table of the ledger, in one order."""
    with sqlite3.connect(run / "ledger.sqlite") as ledger:
        tables = [name for (name,) in ledger.execute("SELECT name FROM sqlite_master WHERE type = 'table' ORDER BY name")]
        return {name: sorted(ledger.execute(f"SELECT * FROM {name}").fetchall(), key=repr) for name in tables}


def _last_checkpoint(run: Path) -> Path:
    return _checkpoints(run)[-1]


def _checkpoints(run: Path) -> list[Path]:
    return sorted((run / "checkpoints").glob("step_*"))
