"""A tutorial, followed to the letter by several seeds: what each of its evaluations found on held-out tasks.

    python studies/tutorials.py digits|browser|sums [SEED …]

Writes studies/results/NAME.json. Every ``sensorium eval … --out runs/NAME_STAGE`` of the page becomes one entry STAGE of a
seed. Settings were chosen by tasks that these evaluations do not play; the page says by which.
"""

import json
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
from studies.pages import commands, follow
from studies.seeds import SEEDS, circumstances

START = Path(__file__).parents[1] / "docs/start"
RESULTS = Path(__file__).parent / "results"
KEPT = ("accuracy", "interval", "tasks", "failed", "missing")
SEEDED = ("train", "record")


def follow_with(name: str, seed: int) -> dict[str, Any]:
    """Follow the page with one seed of the recipe; what its evaluations found, and how long it all took."""
    page = START / f"{name}.md"
    started, computed = time.perf_counter(), _cpu_seconds()
    with tempfile.TemporaryDirectory() as folder:

        def seeded(words: list[str]) -> list[str]:
            return [*words, f"seed={seed}"] if words[0] == "sensorium" and words[1] in SEEDED else words

        follow(page, Path(folder), seeded)
        found = {}
        for words in commands(page):
            if words[:2] == ["sensorium", "eval"]:
                out = words[words.index("--out") + 1]
                summary = json.loads((Path(folder) / out / "summary.json").read_text())
                found[Path(out).name.removeprefix(f"{name}_")] = {key: summary[key] for key in KEPT}
    spent = {"minutes": time.perf_counter() - started, "cpu_minutes": _cpu_seconds() - computed}
    return {"seed": seed, **{key: round(seconds / 60, 1) for key, seconds in spent.items()}, **found}


def _cpu_seconds() -> float:
    """Of this process and of those that it started and has seen end, browsers among them."""
    used = [resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN)]
    return sum(one.ru_utime + one.ru_stime for one in used)


def main(name: str, seeds: list[int]) -> None:
    """Run the seeds one after the other; each is written down when it is done, beside those of earlier calls."""
    place = RESULTS / f"{name}.json"
    for seed in seeds:
        run = follow_with(name, seed)
        earlier = json.loads(place.read_text())["runs"] if place.exists() else []
        told = {**run, **circumstances()}
        runs = sorted([*(one for one in earlier if one["seed"] != seed), told], key=lambda one: one["seed"])
        result = {"study": name, "command": f"python studies/tutorials.py {name}", "runs": runs}
        place.write_text(json.dumps(result, indent=1) + "\n")
        print(json.dumps(run, indent=1))


if __name__ == "__main__":
    if len(sys.argv) < 2 or not (START / f"{sys.argv[1]}.md").exists():
        sys.exit("error: name a tutorial of docs/start: python studies/tutorials.py digits [SEED …]")
    main(sys.argv[1], [int(word) for word in sys.argv[2:]] or list(SEEDS))
