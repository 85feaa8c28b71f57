"""Caption RL over HTTP: a tiny captioner is paid by what a reader behind a reward service answers from its captions.

    python studies/captions.py [image|video …] [reader_steps=3000] [threads=4 …]

Trains two readers (the second takes no part in training), makes the captioners that say too little, serves the readers in
processes of their own, trains the captioners, and writes studies/results/captions.json: the share of questions answered on
512 held-out pictures or videos, sampled and greedy, before and after; with pictures swapped; and by the second reader.
"""

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.evaluation.held_out import evaluate_into
from sensorium.models.tiny import make_tiny
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import Recipe
from sensorium.record.checkpoint_files import checkpoint_of_run
from sensorium.report.console import ConsoleWatcher
from sensorium.services.model_workers import free_port
from sensorium.trainer.run import train
from studies.seeds import circumstances, cpu_minutes

RESULTS = Path(__file__).parent / "results"
READERS = {"first": ("qwen3", 0), "second": ("qwen2", 1)}
LAYERS = 4
"""Of the readers: to find what a caption tells, and then the letter of its option, takes more than the usual two."""
START_S = 300.0
LEAST_READING = 0.8


def trained(name: str, *overrides: str) -> Path:
    """The last checkpoint of a recipe's run, made anew."""
    recipe = load_recipe(name, list(overrides))
    shutil.rmtree(recipe.directory, ignore_errors=True)
    return checkpoint_of_run(train(recipe, watchers=[ConsoleWatcher()]), last=True)


@contextmanager
def reward_service(reader: Path, kind: str) -> Iterator[str]:
    """A reward service with one worker, in processes of their own."""
    port = free_port()
    command = [sys.executable, "-m", "sensorium.cli.main", "serve", "reward", str(reader), "--port", str(port)]
    options = ["--prompt", "short", "--worker-port", "0", "--task", kind]
    server = subprocess.Popen([*command, *options, "--worker-option=--threads=1"])
    address, until = f"http://127.0.0.1:{port}", time.monotonic() + START_S
    try:
        while not answers(address):
            if server.poll() is not None or time.monotonic() > until:
                raise SystemExit(f"the reward service at {address} did not start")
            time.sleep(0.2)
        yield address
    finally:
        server.send_signal(signal.SIGTERM)
        server.wait()


def answers(address: str) -> bool:
    """Whether a service is up."""
    try:
        with urlopen(f"{address}/health", timeout=5) as reply:
            return bool(reply.status == 200)
    except OSError:
        return False


def measured(recipe: Recipe, model: Path, name: str) -> dict[str, Any]:
    """The share of questions answered on the held-out tasks, sampled and greedy, and the other terms."""
    found = {}
    for drawn, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        chosen = recipe.model_copy(update={"evaluation": recipe.evaluation.model_copy(update={"temperature": temperature})})
        folder = Path("runs") / "study_captions" / recipe.name / f"{name}_{drawn}".replace(" ", "_")
        summary = evaluate_into(folder, chosen, str(model), fresh=True)
        found[drawn] = {"terms": summary["terms"], "tasks": summary["tasks"], "missing": summary["missing"]}
    return found


def reader(name: str, steps: str, overrides: list[str]) -> tuple[Path, float]:
    """A reader, and how many questions it answers from captions that tell; one that cannot read ends the study."""
    family, seed = READERS[name]
    base = make_tiny(family, Path("runs") / "study_captions" / f"base_{name}", seed=seed, num_hidden_layers=LAYERS)
    changed = [f"model.path={base}", f"seed={seed}", f"name=tiny_caption_reader_{name}"]
    changed += [*([f"warm_start.steps={steps}"] if steps else []), *overrides]
    model = trained("tiny/caption_reader", *changed)
    recipe = load_recipe("tiny/caption_reader", [*changed, "evaluation.temperature=0"])
    summary = evaluate_into(Path("runs") / "study_captions" / f"reader_{name}", recipe, str(model), fresh=True)
    share = float(summary["accuracy"])
    print(f"the {name} reader answers {share:.3f} of the questions from captions that tell", flush=True)
    if share < LEAST_READING:
        raise SystemExit("that is too little to pay captions by; train it longer: reader_steps=6000")
    return model, share


def study(kind: str, readers: dict[str, Path], overrides: list[str]) -> dict[str, Any]:
    """Train one captioner, and measure it before and after."""
    spent = cpu_minutes()
    warm = trained(f"tiny/caprl_{kind}_warm", *overrides)
    found: dict[str, Any] = {}
    with reward_service(readers["first"], kind) as first, reward_service(readers["second"], kind) as second:
        changed = [f"model.path={warm}", f'rewards.terms.0.options.servers=["{first}"]', *overrides]
        after = trained(f"tiny/caprl_{kind}", f"name=study_caprl_{kind}", *changed)
        looks = {
            "own pictures": changed,
            "swapped pictures": [*changed, "tasks.evaluate.0.options.picture=swapped"],
            "second reader": [*changed, f'rewards.terms.0.options.servers=["{second}"]'],
        }
        for name, look in looks.items():
            recipe = load_recipe(f"tiny/caprl_{kind}", look)
            found[name] = {
                when: measured(recipe, model, f"{name} {when}") for when, model in (("before", warm), ("after", after))
            }
    found["cpu_minutes"] = round(cpu_minutes() - spent, 1)
    return found


def verdicts(found: dict[str, Any]) -> dict[str, Any]:
    """The gains, and what is left with swapped pictures."""

    def share(look: str, when: str, drawn: str) -> float:
        return float(found[look][when][drawn]["terms"]["caption_qa"])

    return {
        "gain sampled": share("own pictures", "after", "sampled") - share("own pictures", "before", "sampled"),
        "gain greedy": share("own pictures", "after", "greedy") - share("own pictures", "before", "greedy"),
        "swapped after": share("swapped pictures", "after", "sampled"),
        "gain by the second reader": share("second reader", "after", "sampled")
        - share("second reader", "before", "sampled"),
    }


def main() -> None:
    """Run the named studies, or both."""
    kinds = [word for word in sys.argv[1:] if "=" not in word] or ["image", "video"]
    words = dict(word.split("=", 1) for word in sys.argv[1:] if "=" in word)
    steps = words.pop("reader_steps", "")
    overrides = [f"{key}={value}" for key, value in words.items()]
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    made = {name: reader(name, steps, overrides) for name in READERS}
    readers = {name: model for name, (model, _) in made.items()}
    place = RESULTS / "captions.json"
    results = json.loads(place.read_text()) if place.exists() else {}
    for kind in kinds:
        found = study(kind, readers, overrides)
        shares = {name: share for name, (_, share) in made.items()}
        results[kind] = {"verdicts": verdicts(found), "readers": shares, **found, **circumstances()}
        place.write_text(json.dumps(results, indent=1, sort_keys=True) + "\n")
        print(json.dumps(results[kind]["verdicts"], indent=1))


if __name__ == "__main__":
    main()
