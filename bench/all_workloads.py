"""All figures that are held to a baseline, in one go, on one GPU: each is a process of its own, most important first.

python -m bench all [--limit-s 540] [--cases W1,Q35] [--out all.json]

    W1          step_s 2.535 rollout_s 0.937 update_s 1.524 update_mfu 0.495 peak_gib 94.3  1.000 of the baseline
    A3B replay  not run: the time was over

A row is printed when its case ends, and ``--out`` is written then. The ratio is the time over that of the same command
under "today" in bench/baselines/h200.json (of tokens a second: theirs over ours); above 1.03 is slower than allowed.
A3B's model takes 57 GiB of SENSORIUM_BENCH_MODELS (or of the folder for temporary files), the others 7 to 17.
"""

import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

STEP = "--recompute auto --tokens-per-microbatch 14100"
CASES = {
    "W1": f"step --workload W1 --steps 2 {STEP}",
    "Q35": f"step --workload Q35 --steps 2 {STEP}",
    "W1 LoRA": f"step --workload W1 --steps 2 --lora 32 {STEP}",
    "W2": "step --workload W2 --steps 2 --recompute auto",
    "128 sequences": "rollout --workload W1 --rounds 3",
    "512 sequences": "rollout --workload W1 --prompts 64 --rounds 2",
    "W3": "rollout --workload W3 --rounds 3",
    "A3B": "step --workload A3B --steps 2 --lora 32 --recompute full --tokens-per-microbatch 14100",
    "A3B replay": "step --workload A3B --steps 1 --lora 32 --replay --recompute full --tokens-per-microbatch 14100",
    "experts": "experts --lora 32",
    "schedules": "schedules --workload text --steps 3",
    "schedules W1": "schedules --workload W1 --steps 3",
    "slow environments": "schedules --slow --steps 3",
    "W4": "turns --steps 2",
    "OMNI": "step --workload OMNI --steps 1 --tokens-per-microbatch 8192",
}
SHOWN = ("step_s", "rollout_s", "update_s", "update_mfu", "peak_gib", "prob_error", "tokens_per_s")
BASELINES = Path(__file__).parent / "baselines" / "h200.json"


def time_all(cases: list[str], limit_s: float, out: Path) -> dict[str, Any]:
    """The result of every case; a text in place of one that failed or was not begun."""
    ends, found = time.monotonic() + limit_s, {}
    today = json.loads(BASELINES.read_text())["today"]
    with tempfile.TemporaryDirectory() as models:
        around = os.environ | {"SENSORIUM_BENCH_MODELS": os.environ.get("SENSORIUM_BENCH_MODELS", models)}
        for case in cases:
            found[case] = result = _result(CASES[case], ends - time.monotonic(), around)
            print(row(case, result, today.get(CASES[case])), file=sys.stderr, flush=True)
            out.write_text(json.dumps(found, indent=1) + "\n")
    return found


def row(case: str, result: Any, baseline: dict[str, float] | None) -> str:
    """A line of the table."""
    if not isinstance(result, dict):
        return f"{case:<18} {result if isinstance(result, str) else json.dumps(result)}"
    shown = " ".join(f"{name} {result[name]:g}" for name in SHOWN if name in result) or json.dumps(result)
    ratio = over(result, baseline or {})
    return f"{case:<18} {shown}" + (f"  {ratio:.3f} of the baseline" if ratio else "")


def over(result: dict[str, Any], baseline: dict[str, float]) -> float:
    """The time over the baseline's; 0 where there is none."""
    if "step_s" in result and "step_s" in baseline:
        return float(result["step_s"] / baseline["step_s"])
    if "tokens_per_s" in result and "tokens_per_s" in baseline:
        return float(baseline["tokens_per_s"] / result["tokens_per_s"])
    return 0.0


def _result(command: str, limit_s: float, around: dict[str, str]) -> Any:
    if limit_s < 30:
        return "not run: the time was over"
    asked = [sys.executable, "-m", "bench", *command.split()]
    try:
        done = subprocess.run(asked, capture_output=True, text=True, timeout=limit_s, check=False, env=around)
    except subprocess.TimeoutExpired:
        return f"not finished within {limit_s:.0f} s"
    begins = min((at for at in (done.stdout.find("{\n"), done.stdout.find("[\n")) if at >= 0), default=-1)
    if done.returncode or begins < 0:
        return f"failed: {(done.stderr.strip().splitlines() or ['no output'])[-1][:300]}"
    result = json.loads(done.stdout[begins:])
    warned = [line for line in done.stderr.splitlines() if "UserWarning" in line or "ATTENTION" in line]
    return result | {"warned": warned} if warned and isinstance(result, dict) else result
