"""TRL's GRPO step on a workload, with the library's generation and with vLLM in the same process; each in a child process.

A child frees all of the GPU when it ends, so that ours is timed on an empty one after it. Only what is installed is timed.
"""

import json
import subprocess
import sys
import tempfile
from dataclasses import asdict
from importlib.util import find_spec
from pathlib import Path
from typing import Any

MICROBATCHES = (16, 32, 64)
LIMIT_S = 900


def peer_steps(work: Any, steps: int = 3) -> dict[str, Any]:
    """Seconds of a step of each peer by micro-batch, and the best; or why a peer was not timed."""
    found: dict[str, Any] = {}
    for name, needs in (("trl", ("trl", "datasets")), ("trl and vllm", ("trl", "datasets", "vllm"))):
        missing = [package for package in needs if find_spec(package) is None]
        if missing:
            found[name] = f"not timed: {', '.join(missing)} not installed"
            continue
        sizes = [size for size in MICROBATCHES if work.episodes % size == 0]
        timed = {size: _in_child(work, size, steps, vllm="vllm" in needs) for size in sizes}
        seconds = {size: each["step_s"] for size, each in timed.items() if "step_s" in each}
        found[name] = {"by_microbatch": timed, "best_s": min(seconds.values()) if seconds else None}
    return found


def _in_child(work: Any, microbatch: int, steps: int, vllm: bool) -> dict[str, Any]:
    asked = {"work": asdict(work), "microbatch": microbatch, "steps": steps, "vllm": vllm}
    command = [sys.executable, str(Path(__file__)), json.dumps(asked)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=LIMIT_S, check=False)
    except subprocess.TimeoutExpired:
        return {"failed": f"no result within {LIMIT_S} s"}
    lines = done.stdout.strip().splitlines()
    if done.returncode or not lines:
        return {"failed": (done.stderr.strip().splitlines() or ["no output"])[-1][-300:]}
    result: dict[str, Any] = json.loads(lines[-1])
    return result


def main(asked: dict[str, Any]) -> None:
    """Time one peer's steps and print them as JSON."""
    import numpy as np
    from workload import Workload, write_model

    work = Workload(**asked["work"])
    with tempfile.TemporaryDirectory() as scratch:
        model = write_model(Path(scratch) / "model")
        import torch
        from peer_trl import TrlPeer

        options = {"vllm": asked["vllm"], "device": "cuda"}
        peer = TrlPeer(model, work, asked["steps"] + 1, asked["microbatch"], Path(scratch) / "trl", **options)
        seconds = [peer.step() for _ in range(asked["steps"] + 1)][1:]
        peak = torch.cuda.max_memory_allocated() / 2**30
    print(json.dumps({"step_s": round(float(np.median(seconds)), 3), "peak_gib": round(peak, 1)}))


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(json.loads(sys.argv[1]))
