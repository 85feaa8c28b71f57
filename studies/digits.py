"""The digits tutorial, followed to the letter: greedy accuracy on 500 held-out digits, after SFT and after RL, three seeds.

    python studies/digits.py [SEED …]

Writes studies/results/digits.json. Settings were chosen by the tutorial's validation split. The test split is
read here only.
"""

import json
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from studies.pages import follow
from studies.seeds import SEEDS, circumstances

PAGE = Path(__file__).parents[1] / "docs/start/digits.md"
RESULT = Path(__file__).parent / "results/digits.json"
KEPT = ("accuracy", "interval", "tasks", "failed", "missing")


def follow_with(seed: int) -> dict[str, Any]:
    """Follow the page with one seed of the recipe; what was found on the test split, and how long it all took."""
    started, computed = time.perf_counter(), time.process_time()
    with tempfile.TemporaryDirectory() as folder:

        def seeded(words: list[str]) -> list[str]:
            return [*words, f"seed={seed}"] if words[:2] == ["sensorium", "train"] else words

        follow(PAGE, Path(folder), seeded)
        summaries = {
            stage: json.loads((Path(folder) / f"runs/digits_{stage}/summary.json").read_text()) for stage in ("sft", "rl")
        }
    found = {stage: {key: summary[key] for key in KEPT} for stage, summary in summaries.items()}
    spent = {"minutes": time.perf_counter() - started, "cpu_minutes": time.process_time() - computed}
    return {"seed": seed, **{key: round(seconds / 60, 1) for key, seconds in spent.items()}, **found}


def main(seeds: list[int]) -> None:
    """Run the seeds one after the other; each is written down when it is done, beside those of earlier calls."""
    for seed in seeds:
        run = follow_with(seed)
        earlier = json.loads(RESULT.read_text())["runs"] if RESULT.exists() else []
        told = {**run, **circumstances()}
        runs = sorted([*(one for one in earlier if one["seed"] != seed), told], key=lambda one: one["seed"])
        result = {"study": "digits", "command": "python studies/digits.py", "runs": runs}
        RESULT.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(run, indent=1))


if __name__ == "__main__":
    main([int(word) for word in sys.argv[1:]] or list(SEEDS))
