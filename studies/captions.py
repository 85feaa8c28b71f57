"""Caption RL over HTTP: a tiny captioner is paid by what a reader behind a reward service answers from its captions.

    python studies/captions.py [image|video …] [seed=1 …] [second=FOLDER|none] [results=FOLDER] [resume] [steps=2 …]

The shipped captioner says too little of what it sees. It is trained by tiny/caprl_image or tiny/caprl_video against
`sensorium serve reward package:caption_reader`. Then captions of 600 held-out pictures or videos are read: before and
after, sampled and greedy; with pictures swapped; and by readers that took no part in training: one that learned from
other words (tiny/caption_reader_other, trained here unless ``second`` names a checkpoint of it, or none), and one that was
never trained (word_reader.py). Writes captions_image.json and captions_video.json into studies/results (or ``results``),
seed by seed, each with what its readers know. With ``resume`` training goes on where an earlier call of the study ended.
Other keys (``steps=2``) change the captioner's recipe: for a try, with its results elsewhere.
"""

import fcntl
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import urlopen

sys.path.insert(0, str(Path(__file__).parents[1]))
from sensorium.data.media_store import MediaStore
from sensorium.evaluation.evaluate import evaluate_into
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.runs.checkpoint_layout import checkpoint_of_run
from sensorium.services.model_workers import free_port
from sensorium.systems.caprl.generated import CaptionedShapes, CaptionReading
from sensorium.trainer.run import train
from studies.seeds import chosen_seeds, circumstances, cpu_minutes
from studies.word_reader import letter_of, word_reader

RESULTS = Path(__file__).parent / "results"
FOLDER = Path("runs") / "study_captions"
READERS = {"first": "package:caption_reader", "second": "tiny/caption_reader_other"}
WORDS = "word"
KINDS = {"image": "picture", "video": "video"}
QUIET = ["threads=1", "evaluation.every=0", "evaluation.at_start=false", "health.sight_tasks=0", "model.device=cpu"]
UNSEEN = "tasks.evaluate.0.options.seed=7"
"""Held-out drawings by which nothing was chosen."""
START_S = 300.0


def trained(name: str, *overrides: str) -> Path:
    """The last checkpoint of a recipe's run, made anew, or resumed if the command line says so."""
    recipe = load_recipe(name, [*overrides])
    resume = "resume" in sys.argv[1:] and recipe.directory.exists()
    if not resume:
        shutil.rmtree(recipe.directory, ignore_errors=True)
    return checkpoint_of_run(train(recipe, resume=resume, watchers=[ConsoleWatcher()]), last=True)


@contextmanager
def reward_service(reader: str, kind: str) -> Iterator[str]:
    """A reward service with one worker, in processes of their own."""
    port = free_port()
    asked = ["--reader", reader, "--model", WORDS] if reader.startswith("http") else [reader, "--worker-option=--threads=1"]
    command = [sys.executable, "-m", "sensorium.cli.main", "serve", "reward", *asked, "--port", str(port)]
    server = subprocess.Popen([*command, "--prompt", "short", "--all-qa", "--worker-port", "0", "--task", kind])
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


def reading(reader: str, kind: str, name: str) -> dict[str, float]:
    """The share of questions that a reader answers right: from captions of held-out things, from none, from wrong ones."""
    found = {}
    for caption in ("own", "blank", "swapped"):
        options: dict[str, Any] = {"kind": KINDS[kind], "split": "test", "size": 512, "telling": 1.0, "seed": 7}
        options["caption"] = caption
        if name == WORDS:
            tasks = CaptionReading(store=MediaStore(), **options)
            right = [letter_of(tasks[i].messages[0].text) == tasks[i].answer for i in range(len(tasks))]
            found[caption] = sum(right) / len(right)
            continue
        evaluated = f"tasks.evaluate={json.dumps([{'source': 'caption_reading', 'options': options}])}"
        recipe = load_recipe("tiny/caption_reader", [evaluated, "evaluation.temperature=0", *QUIET])
        folder = FOLDER / f"{name}_reader_{kind}_{caption}"
        found[caption] = float(evaluate_into(folder, recipe, reader, fresh=True)["accuracy"])
    return found


def measured(kind: str, model: str, folder: Path, overrides: Sequence[str]) -> dict[str, Any]:
    """What captions of the held-out tasks are paid, sampled and greedy, term by term."""
    found = {}
    for mode, temperature in (("sampled", 1.0), ("greedy", 0.0)):
        recipe = load_recipe(f"tiny/caprl_{kind}", [*overrides, *QUIET, UNSEEN, f"evaluation.temperature={temperature}"])
        summary = evaluate_into(folder / mode, recipe, model, fresh=True)
        found[mode] = {"terms": summary["terms"], "tasks": summary["tasks"], "missing": summary["missing"]}
    return found


def study(kind: str, seed: int, readers: Mapping[str, str], changes: Sequence[str]) -> Iterator[dict[str, Any]]:
    """Train one captioner with one seed, and measure it before and after: what is known so far, reader by reader."""
    spent = cpu_minutes()
    before = load_recipe(f"tiny/caprl_{kind}").model.path
    found: dict[str, Any] = {"seed": seed, "readers": {}}
    for name, reader in readers.items():
        beside = "" if name == "first" else f", {name} reader"
        with reward_service(reader, kind) as url:
            own = [f'rewards.terms.0.options.servers=["{url}"]', f"seed={seed}"]
            if name == "first":
                after = str(trained(f"tiny/caprl_{kind}", f"name=study_caprl_{kind}_{seed}", *own, *QUIET, *changes))
            looks = {f"before{beside}": (before, own), f"after{beside}": (after, own)}
            if name == "first":
                swapped = [*own, "tasks.evaluate.0.options.picture=swapped"]
                looks[f"after, {KINDS[kind]}s swapped"] = (after, swapped)
                found[f"chance with {KINDS[kind]}s swapped"] = chance_swapped(kind)
            for look, (model, overrides) in looks.items():
                found[look] = measured(kind, model, FOLDER / f"{kind}_{seed}" / look.replace(" ", "_"), overrides)
                print(kind, seed, look, {mode: row["terms"]["caption_qa"] for mode, row in found[look].items()}, flush=True)
        found["readers"][name] = reading(reader, kind, name)
        yield found | {"gains": gains(found), "cpu_minutes": round(cpu_minutes() - spent, 1), **circumstances()}


def chance_swapped(kind: str) -> float:
    """The share of questions that a caption of the other thing, telling everything, would answer right by accident."""
    options = load_recipe(f"tiny/caprl_{kind}", [UNSEEN]).tasks.evaluate[0].options
    source = CaptionedShapes(store=MediaStore(), **options)
    own = [source.scene(i).facts for i in range(len(source))]
    other = [own[(i + len(own) // 2 + 1) % len(own)] for i in range(len(own))]
    pairs = zip(own, other, strict=True)
    return sum(sum(mine[name] == shown[name] for name in mine) / len(mine) for mine, shown in pairs) / len(own)


def gains(found: dict[str, Any]) -> dict[str, float]:
    """By how much more questions are answered after training, reader by reader."""
    besides = ["" if name == "first" else f", {name} reader" for name in found["readers"]]
    return {
        f"{mode}{reader}": found[f"after{reader}"][mode]["terms"]["caption_qa"]
        - found[f"before{reader}"][mode]["terms"]["caption_qa"]
        for mode in ("sampled", "greedy")
        for reader in besides
    }


def keep(results: Path, kind: str, run: dict[str, Any]) -> dict[str, Any]:
    """Put one seed's run into the result file, beside those of other seeds; returns the least gains of all."""
    results.mkdir(parents=True, exist_ok=True)
    place = results / f"captions_{kind}.json"
    with place.with_suffix(".lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        earlier = json.loads(place.read_text())["runs"] if place.exists() else []
        runs = sorted([run, *(one for one in earlier if one["seed"] != run["seed"])], key=lambda one: one["seed"])
        names = sorted({name for one in runs for name in one["gains"]})
        least = {name: min(one["gains"][name] for one in runs if name in one["gains"]) for name in names}
        result = {"command": f"python studies/captions.py {kind}", "least gains": least, "runs": runs}
        place.write_text(json.dumps(result, indent=1) + "\n")
    return least


def main(words: Sequence[str]) -> None:
    """Run the named studies, or both."""
    kinds = [word for word in words if word in KINDS] or list(KINDS)
    named = dict(word.split("=", 1) for word in words if "=" in word)
    second, results = named.pop("second", ""), Path(named.pop("results", str(RESULTS)))
    named.pop("seed", None)
    changes = [f"{key}={value}" for key, value in named.items()]
    if changes and results == RESULTS:
        raise SystemExit(f"{changes[0]} makes another study: say where its results go (results=FOLDER)")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    readers = {"first": READERS["first"]}
    if second != "none":
        readers["second"] = second or str(trained(READERS["second"], "threads=1"))
    with word_reader() as url:
        readers[WORDS] = url
        for kind in kinds:
            for seed in chosen_seeds(words):
                for run in study(kind, seed, readers, changes):
                    print(json.dumps(keep(results, kind, run), indent=1), flush=True)


if __name__ == "__main__":
    main(sys.argv[1:])
