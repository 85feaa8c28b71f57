"""Learners that are spread over ranks, held against one process: gradients, runs, checkpoints, deaths.

    python studies/sharded_learners.py [PART …]      parts: gradients, tokens, runs, checkpoints, kills, shapes, ray

Writes studies/results/sharded_learners.json, each part as it ends. Ranks are processes over gloo, forked from a server that
has imported everything.
"""

import json
import os
import random
import re
import signal
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from sensorium.assembly.ranks import Ranks
from sensorium.recipe.load import load_recipe
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import LearnerLost
from studies.fork_server import ForkServer
from tests.cluster.test_sharded_runs import rows_of
from tests.forked import forked_python
from tests.learner.sharded.scenarios import SCENARIOS, SHAREABLE, Outcome, compute, make_checkpoints
from tests.learner.sharded.test_ranks import outcome, relative_error, start_ranks
from tests.trainer.small import small

ROOT = Path(__file__).parents[1]
RESULT = ROOT / "studies" / "results" / "sharded_learners.json"
PRELOADED = ("sensorium.assembly.rank_main", "torch.distributed.checkpoint")
PICTURES = {"path": "tiny:qwen2_5_vl", "device": "cpu"}
SHAPES = {"train": [{"source": "shapes", "options": {"size": 8, "picture_size": 56}}]}
WARM = {"steps": 1, "prompts_per_step": 2}
USUAL = ("threads=1", "optimizer.lr=1e-5")
"""AdamW makes whole steps of gradients that are rounding noise, so runs differ by their rate."""
RUNS: dict[str, dict[str, Any]] = {
    "pictures, tower learns": {"model": PICTURES, "tasks": SHAPES},
    "pictures, frozen tower, KL": {
        "model": {**PICTURES, "freeze": ["vision"]},
        "tasks": SHAPES,
        "algorithm": {"kl": {"coef": 0.1}},
    },
    "PPO, own critic, KL, warm start": {
        "algorithm": {"advantage": {"name": "gae"}, "critic": {"trunk": "own"}, "kl": {"coef": 0.1}},
        "warm_start": WARM,
    },
    "PPO, shared critic": {"algorithm": {"advantage": {"name": "gae"}, "critic": {"trunk": "shared", "trunk_coef": 0.1}}},
    "LoRA, KL in the reward, warm start": {
        "model": {"path": "tiny:qwen2", "device": "cpu", "lora": {"rank": 2}},
        "algorithm": {"kl": {"coef": 0.1, "place": "reward"}},
        "warm_start": WARM,
    },
    "mixture of experts": {"model": {"path": "tiny:qwen3_vl_moe", "device": "cpu"}, "tasks": SHAPES},
}
SMALL = [
    "steps=12", "batch.prompts_per_step=16", "batch.group_size=8", "threads=1", "evaluation.every=6",
    "evaluation.limit=128", "checkpoint.every=0", "health.sight_tasks=0",
]  # fmt: skip


def gradients(folder: Path) -> dict[str, Any]:
    """Each scenario on 1, 2 and 4 ranks: ‖Δ‖/‖g‖ of the first gradient, and the metric that differs most."""
    make_checkpoints(folder)
    for size in (1, 2, 4):
        for rank in start_ranks(folder, size, list(SCENARIOS)):
            rank.wait()
    found: dict[str, Any] = {}
    for name, scenario in SCENARIOS.items():
        if scenario.dtype != "float32":
            continue
        alone = compute(scenario, folder)
        of_ranks = {size: outcome(folder, size, 0, name) for size in (1, 2, 4)}
        found[name] = {str(size): _gaps(alone, of_rank) for size, of_rank in of_ranks.items()}
    return found


def _gaps(alone: Outcome, found: Outcome) -> dict[str, Any]:
    apart = {name: abs(found.metrics[name] - value) / max(1.0, abs(value)) for name, value in alone.metrics.items()}
    worst = max(apart, key=lambda name: apart[name])
    return {"gradient": relative_error(alone.gradients[0], found.gradients[0]), "metrics": apart[worst], "worst": worst}


def tokens(folder: Path) -> dict[str, Any]:
    """Ranks that share tokens: two, two times two, and four. Gaps to one process, and what a rank keeps of its activations.

    Then whole runs: two ranks that share tokens, whose checkpoint one process goes on from.
    """
    make_checkpoints(folder)
    shapes = {"2 share": (2, 2), "2 × 2": (4, 2), "4 share": (4, 4)}
    for size, sharing in shapes.values():
        for rank in start_ranks(folder, size, [f"{name}@{sharing}" for name in SHAREABLE]):
            rank.wait()
        (folder / f"meeting-{size}").unlink(missing_ok=True)
    found: dict[str, Any] = {}
    for name in SHAREABLE:
        alone = compute(SCENARIOS[name], folder)
        found[name] = {}
        for shape, (size, sharing) in shapes.items():
            ranks = [outcome(folder, size, rank, f"{name}@{sharing}") for rank in range(size)]
            kept = {
                "activations kept by a rank": round(max(rank.kept for rank in ranks) / alone.kept, 3),
                "by its towers": round(max(rank.kept_by_towers for rank in ranks) / max(1, alone.kept_by_towers), 3),
            }
            found[name][shape] = _gaps(alone, ranks[0]) | kept
        print(name, found[name], flush=True)
    return found | {"runs": _runs_sharing_tokens(folder)}


def _runs_sharing_tokens(folder: Path) -> dict[str, Any]:
    """Three steps in one process; and two by ranks that share tokens, then the third in one process."""
    found = {}
    shared = ["cluster.learners=2", "cluster.sequence_parallel=2"]
    for i, (name, changes) in enumerate(RUNS.items()):
        one = train(small(folder / f"alone{i}", *USUAL, **changes))
        two = train(small(folder / f"shared{i}", *USUAL, "steps=2", *shared, **changes))
        train(small(folder / f"shared{i}", *USUAL, **changes), resume=True)
        found[name] = _largest_gap(one, two)
        print(name, found[name], flush=True)
    return found


def _largest_gap(one: Path, other: Path) -> dict[str, Any]:
    gaps = [
        (abs(row[key] - value) / max(1.0, abs(value)), key)
        for was, row in zip(rows_of(one), rows_of(other), strict=True)
        for key, value in was.items()
    ]
    return dict(zip(("largest gap", "metric"), max(gaps), strict=True))


def runs(folder: Path) -> dict[str, Any]:
    """Three steps of small runs on two ranks and in one process: the largest gap of any metric."""
    found = {}
    for i, (name, changes) in enumerate(RUNS.items()):
        one, two = (
            train(small(folder / f"{how}{i}", *USUAL, f"cluster.learners={ranks}", **changes))
            for how, ranks in (("one", 1), ("two", 2))
        )
        found[name] = _largest_gap(one, two)
        print(name, found[name], flush=True)
    return found


def checkpoints(folder: Path) -> dict[str, Any]:
    """Saved by two ranks after two steps; the third by one process, two and four ranks, and by a run never stopped."""
    changes = RUNS["PPO, own critic, KL, warm start"]
    whole = train(small(folder / "whole", "threads=1", "cluster.learners=2", **changes))
    found = {}
    for ranks in (1, 2, 4):
        run = train(small(folder / f"to{ranks}", "threads=1", "cluster.learners=2", "steps=2", **changes))
        train(small(folder / f"to{ranks}", "threads=1", f"cluster.learners={ranks}", **changes), resume=True)
        gaps = [
            abs(row[key] - value) / max(1.0, abs(value))
            for was, row in zip(rows_of(whole), rows_of(run), strict=True)
            for key, value in was.items()
        ]
        found[f"resumed on {ranks}"] = {"largest gap": max(gaps), "same weights": _weights(run) == _weights(whole)}
        print(found, flush=True)
    return found


def _weights(run: Path) -> bytes:
    return (max((run / "checkpoints").glob("step_*")) / "model.safetensors").read_bytes()


def kills(folder: Path, count: int = 10) -> dict[str, Any]:
    """kill -9 of a random rank at a random moment, then --resume: the run that ends is the one that was never killed."""
    moments = random.Random(0)
    started = time.monotonic()
    whole = train(small(folder / "whole", "threads=1", "cluster.learners=2"))
    longest = time.monotonic() - started
    told: list[str] = []
    ended_s, fell, resume, pids = [], 0, False, list[int]()
    opened = Ranks.__init__

    def noted(self: Ranks, *given: Any) -> None:
        opened(self, *given)
        pids[:] = self.pids

    Ranks.__init__ = noted  # type: ignore[method-assign]
    name = 0
    while fell < count:
        killed: list[float] = []
        pids.clear()
        timer = threading.Timer(moments.uniform(0, longest), _kill, (pids, moments, killed))
        timer.start()
        run = small(folder / f"killed{name}", "threads=1", "cluster.learners=2")
        try:
            train(run, resume=resume)
            assert _weights(run.directory) == _weights(whole), "a resumed run differs"
            name, resume = name + 1, False
        except LearnerLost as error:
            ended_s.append(time.monotonic() - killed[0])
            told.append(re.sub(r"\d+", "N", str(error)))
            fell += 1
            resume = (run.directory / "checkpoints").is_dir() and any((run.directory / "checkpoints").glob("step_*"))
            name += not resume  # nothing was saved yet: a fresh directory
        finally:
            timer.cancel()
            timer.join()
        print(f"{fell} kills, {name} runs ended", flush=True)
    if resume:
        train(small(folder / f"killed{name}", "threads=1", "cluster.learners=2"), resume=True)
        assert _weights(folder / f"killed{name}") == _weights(whole), "a resumed run differs"
    return {"kills": fell, "seconds until the run ended, at most": max(ended_s), "told": sorted(set(told))}


def _kill(pids: list[int], moments: random.Random, killed: list[float]) -> None:
    if pids:
        killed.append(time.monotonic())
        os.kill(moments.choice(pids), signal.SIGKILL)


def shapes(folder: Path) -> dict[str, Any]:
    """A short run of the shipped recipe: rewards and held-out accuracy by step."""
    found: dict[str, Any] = {}
    for ranks in (1, 2):
        run = train(load_recipe("shapes", [f"run_dir={folder / str(ranks)}", f"cluster.learners={ranks}", *SMALL]))
        rows = rows_of(run)
        found[f"{ranks}"] = {
            "reward": [round(row["reward/mean"], 4) for row in rows],
            "accuracy": [row["eval/accuracy"] for row in rows if "eval/accuracy" in row],
        }
        print(found, flush=True)
    return found


def ray(folder: Path) -> dict[str, Any]:
    """The same ranks as two actors of a Ray cluster that is started for the run; then one of them is killed."""
    changes = RUNS["PPO, own critic, KL, warm start"]
    processes = train(small(folder / "processes", "threads=1", "cluster.learners=2", **changes))
    placed = ["threads=1", "cluster.learners=2", "cluster.placement=ray"]
    actors = train(small(folder / "actors", *placed, "steps=2", **changes))
    ask = Ranks.ask

    def kill(self: Ranks, name: str, *given: Any) -> Any:
        if name == "step":
            os.kill(self.pids[1], signal.SIGKILL)
        return ask(self, name, *given)

    with patch.object(Ranks, "ask", kill):
        try:
            train(small(folder / "actors", *placed, **changes), resume=True)
            raise AssertionError("a dead actor ends the run")
        except LearnerLost as error:
            told = re.sub(r"\d+", "N", str(error))
    train(small(folder / "actors", *placed, **changes), resume=True)
    return {"same weights": _weights(actors) == _weights(processes), "told": told}


PARTS: dict[str, Callable[[Path], dict[str, Any]]] = {
    "gradients": gradients,
    "tokens": tokens,
    "runs": runs,
    "checkpoints": checkpoints,
    "kills": kills,
    "shapes": shapes,
    "ray": ray,
}


def main() -> None:
    """Run the parts that are named, or all."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # of the ranks
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    os.chdir(ROOT)
    for part in sys.argv[1:] or PARTS:
        if part == "ray" and find_spec("ray") is None:
            print("ray is not installed (pip install 'sensorium[ray]'): its part is left out", flush=True)
            continue
        with tempfile.TemporaryDirectory() as folder, ForkServer(*PRELOADED) as server, forked_python(server):
            found = PARTS[part](Path(folder))
        told = json.loads(RESULT.read_text()) if RESULT.exists() else {}
        told |= {part: found, f"{part} on": f"{os.uname().machine}, torch {torch.__version__}"}
        RESULT.write_text(json.dumps(told, indent=1) + "\n")
        print(part, json.dumps(found, indent=1), flush=True)


if __name__ == "__main__":
    main()
