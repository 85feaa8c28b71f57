"""Runs that are killed at random moments (SIGKILL) and resumed until they end equal the uninterrupted run, bit for bit.

    python studies/kills.py [KILLS]

Writes studies/results/kills.json: for each recipe how many kills, in which phases they fell, and what differed afterwards
(metrics but times, episodes, evaluations, the ledger, weights, adapters).
"""

import json
import random
import signal
import sys
import tempfile
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))
from studies.fork_server import Ended, ForkServer
from studies.recipes import RESUMED
from studies.resumed_runs import differences, moved, phase_file
from studies.seeds import circumstances

RESULTS = Path(__file__).parent / "results"
TRAIN = "studies.resumed_runs:train_recipe"
KILLED = {
    "LoRA": "adapters, with KL to those after a warm start",
    "PPO with a critic": "multi-turn, with a critic of its own and an adaptive KL in the reward",
    "multi-turn": "multi-turn, with a warm start",
    "sight and sound": "video and sound, of which little is kept",
}
LONGEST = 1.1
"""Kills fall between the start and this many times the CPU time of the uninterrupted run; past its end there is no kill."""


@dataclass
class Killed:
    """What became of a recipe's runs: the phase of each kill, what differed, and CPU seconds."""

    runs: int = 0
    kills: list[str] = field(default_factory=list)
    differences: list[str] = field(default_factory=list)
    cpu_s: float = 0.0


def kill_and_resume(name: str, text: str, folder: Path, server: ForkServer, moments: random.Random, kills: int) -> Killed:
    """Run a recipe whole; then run, kill and resume it until so many kills fell, comparing each run at its end."""
    recipe = folder / "recipe.yaml"
    recipe.write_text(text)
    found = Killed()

    def start(directory: Path, mode: str = "", kill_at_cpu_s: float | None = None) -> Ended:
        arguments = (str(recipe), str(directory), mode)
        ended = server.run(TRAIN, *arguments, kill_at_cpu_s=kill_at_cpu_s, log=folder / "log.txt")
        found.cpu_s += ended.cpu_s
        if ended.code not in (0, -signal.SIGKILL):
            raise RuntimeError(f"{name}: a run ended with code {ended.code}:\n{(folder / 'log.txt').read_text()[-2000:]}")
        return ended

    whole = folder / "whole"
    longest_s = LONGEST * start(whole).cpu_s
    if not moved(whole):
        raise RuntimeError(f"{name}: training did not move the weights, so equal runs would show nothing")
    while len(found.kills) < kills:
        found.runs += 1
        again = folder / f"run_{found.runs}"
        mode = ""
        while start(again, mode, moments.uniform(0, longest_s) if len(found.kills) < kills else None).code:
            found.kills.append(phase_file(again).read_text() if phase_file(again).exists() else "before the run")
            mode = "resume" if (again / "recipe.yaml").exists() else ""
        found.differences += [f"run {found.runs}: {what}" for what in differences(whole, again)]
    return found


def main(kills: int) -> None:
    """Spread the kills over the recipes and write the result."""
    result = {
        "command": f"python studies/kills.py {kills}",
        **circumstances(),
        "kills": 0,
        "recipes": {},
    }
    with ForkServer("studies.resumed_runs") as server:
        for nth, name in enumerate(KILLED):
            share = kills // len(KILLED) + (nth < kills % len(KILLED))
            with tempfile.TemporaryDirectory() as folder:
                found = kill_and_resume(name, RESUMED[KILLED[name]], Path(folder), server, random.Random(name), share)
            result["kills"] += len(found.kills)
            result["recipes"][name] = {
                "recipe": KILLED[name],
                "kills": len(found.kills),
                "runs": found.runs,
                "phases": dict(sorted(Counter(found.kills).items())),
                "differences": found.differences,
                "cpu_minutes": round(found.cpu_s / 60, 1),
            }
            print(name, json.dumps(result["recipes"][name]), flush=True)
    (RESULTS / "kills.json").write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(each["differences"] for each in result["recipes"].values()))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 200)
