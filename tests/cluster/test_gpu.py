"""Ranks and engines in processes of their own on one GPU: FSDP2 over NCCL, pushes, asynchronous episodes."""

from math import isfinite
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import ClusterSection
from sensorium.runs.metrics import read_metrics
from sensorium.trainer.run import train

pytestmark = pytest.mark.gpu
BRIEF = [
    "steps=3", "batch.prompts_per_step=8", "evaluation.at_start=false", "evaluation.every=0", "health.sight_tasks=0",
    "checkpoint.every=0", "model.device=cuda",
]  # fmt: skip
BFLOAT16 = "model.dtype=bfloat16"
PROCESS = ["rollout.engine.name=process", "rollout.schedule=eager"]
STREAM = ["schedule={name: asynchronous, max_staleness: 1}", "algorithm.correction.weights=token"]
RANKS = {
    "nccl": ["cluster.backend=nccl"],
    "offload": ["cluster.offload=true"],
    "bfloat16": [BFLOAT16, "model.gradient_checkpointing=true"],
    "lora": [BFLOAT16, "model.lora.rank=8", "model.lora.groups=[language, vision]", "algorithm.kl.coef=0.01"],
    "critic": ["algorithm.advantage.name=masked_gae", "algorithm.critic.optimizer.lr=1e-4"],
}
ENGINES = {
    "process": PROCESS,
    "process in bfloat16": [*PROCESS, BFLOAT16],
    "process, asynchronous": [*PROCESS, *STREAM],
    "native, asynchronous": ["rollout.schedule=eager", *STREAM],
    "two": [*PROCESS, "cluster.engines=2", "cluster.share_gpus=true"],
}


def rows_of(folder: Path, *changes: str) -> list[dict[str, float]]:
    run = train(load_recipe("shapes", [f"run_dir={folder}", *BRIEF, *changes]))
    rows = read_metrics(run / "metrics.jsonl")
    assert len(rows) == 3
    rounded = BFLOAT16 in changes or bool(set(STREAM) & set(changes))
    for row in rows:
        assert all(isfinite(value) for value in row.values())
        assert row["episodes/failed"] == 0
        assert row["mismatch/prob_error"] < (1.05 if rounded else 1.001)
    for name in ("time/step_s", "time/rollout_s", "time/update_s", "mismatch/prob_error", "policy/grad_norm"):
        print(name, [round(row[name], 6) for row in rows])
    return rows


@pytest.mark.parametrize("name", RANKS)
def test_ranks_on_a_gpu_compute_what_one_process_does(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    alone = [one for one in RANKS[name] if not one.startswith("cluster")]
    expected = rows_of(tmp_path / "alone", *alone)[0]
    monkeypatch.setattr(ClusterSection, "shared", True)  # one rank, too, is a process of its own
    found = rows_of(tmp_path / "ranks", *RANKS[name])[0]
    tolerance = 0.05 if BFLOAT16 in RANKS[name] else 1e-3
    for key in ("policy/grad_norm", "policy/loss", "reward/mean"):
        assert found[key] == pytest.approx(expected[key], rel=tolerance, abs=tolerance * 0.1), key


@pytest.mark.parametrize("name", ENGINES)
def test_engines_sample_beside_the_learner_on_its_gpu(name: str, tmp_path: Path) -> None:
    rows = rows_of(tmp_path / "run", *ENGINES[name])
    assert all(row["policy/grad_norm"] > 0 for row in rows)
    assert all(row.get("staleness/max", 0) <= 1 for row in rows)
