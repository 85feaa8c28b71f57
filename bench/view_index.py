"""How fast ``sensorium view`` answers over a run of many episodes: python -m bench.view_index [--episodes 100000].

Writes a run as the trainer does (``write_episodes``: 256 episodes a step, groups of 8, 96 tokens a response, two terms,
words by a power law), indexes it, and asks for the first page, for searches, and for the episodes that a rescoring of all
changes, three times each. Prints the slowest of the three in seconds of wall clock and of CPU with the number of episodes
found, the sizes of logs and index, and the memory that this took beside the imports.

``--watched STEPS`` measures what watching costs instead: recipes/shapes.yaml is trained for so many steps beside a viewer
whose page follows it, and which is stopped in every other stretch of five steps. Prints by what share the CPU and wall
seconds of a watched step differ, with an interval, and the viewer's CPU time as a share of the run's.
"""

import argparse
import json
import os
import re
import resource
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack, suppress
from pathlib import Path
from random import Random
from typing import Any

import httpx
import numpy as np

from sensorium.runs.durable import read_rows, write_rows, write_whole
from sensorium.runs.episodes import EpisodeCredit, write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer.index import EpisodeIndex, Search
from sensorium.viewer.runs import Rescoring
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user

STEP, GROUP, TOKENS, WORDS = 256, 8, 96, 20_000
STRETCH = 5  # steps
PAGE_SHARE, PAGE_LONGEST_S = 0.0025, 20.0  # as assets/viewer/runs.js has them
SEARCHES = {
    "first page": Search(),
    "page 1,000": Search(offset=50_000),
    "a frequent word": Search(text="w0"),
    "a frequent word, by surprise": Search(text="w0", sort="surprise"),
    "two frequent words, by reward": Search(text="w0 w1", sort="reward"),
    "a rare word": Search(text="w1900"),
    "four frequent words": Search(text="w0 w1 w2 w3"),
    "a phrase of the response": Search(text='response:"w0 w1"'),
    "a phrase that all hold": Search(text='"w0 w0"'),
    "a word of the prompt": Search(text="prompt:w3", sort="disagreement"),
    "the beginning of words": Search(text="w12*"),
    "the beginning of all words": Search(text="w*"),
    "by advantage, lowest first": Search(sort="advantage", ascending=True),
    "by disagreement": Search(sort="disagreement"),
    "a range of the reward": Search(low=0.95, high=0.97),
    "a range of a term, by it": Search(term="exact", low=0.5, sort="term"),
    "a task": Search(task="task-77"),
    "a category and steps, by length": Search(category="count", first=50, last=200, sort="tokens"),
    "failed": Search(failed=True),
}


def text(random: Random, count: int) -> str:
    return " ".join(f"w{min(WORDS - 1, int(random.paretovariate(0.9)) - 1)}" for _ in range(count))


def write_run(folder: Path, episodes: int) -> RunDirectory:
    random, run = Random(0), RunDirectory(folder).create()
    write_whole(run.recipe, "name: generated\nsteps: 1000\nmodel: {path: package:shapes}\n")
    for step in range(1, -(-episodes // STEP) + 1):
        groups, credits = [], {}
        for g in range(STEP // GROUP):
            task = Task(f"task-{(step * 32 + g) % 4096}", (user(text(random, 40)),), "w1", metadata={"category": "count"})
            members = []
            for index in range(GROUP):
                name, words = f"{step}/{g}/{index}", text(random, TOKENS)
                ends = [len(words.encode()) * (i + 1) // TOKENS for i in range(TOKENS)]
                logprobs = tuple(-random.expovariate(3.0) for _ in range(TOKENS))
                response = Segment(
                    "model", tuple(range(TOKENS)), text=words, logprobs=logprobs, byte_ends=tuple(ends), name=name
                )
                prompt = Segment("environment", tuple(range(60)), text=task.messages[0].text)
                right = float(random.random() < 0.5)
                scores = (Score("exact", right, 0.9, correct=right > 0), Score("format", random.random(), 0.1))
                thread = Thread((prompt, response), (False, True))
                turn = Turn(0, task.messages, response, 0, 1)
                failure = "the environment took more than 60 s" if random.random() < 0.01 else ""
                members.append(
                    Episode(name, task.id, f"{step}/{g}", index, (thread,), (turn,), Status.FINISHED, failure, scores)
                )
                credits[name] = EpisodeCredit(advantages=((random.gauss(0, 1),) * TOKENS,))
            groups.append(Group(f"{step}/{g}", task, tuple(members)))
        write_episodes(run.episodes_of(step), step, groups, credits=credits)
    return run


def write_rescoring(run: RunDirectory) -> Rescoring:
    """What ``sensorium rescore`` writes of all episodes, with rewards that are drawn."""
    random, folder = Random(1), run.path.parent / f"{run.path.name}_rescored_by_bench"
    rows = []
    for path in sorted(run.episodes.glob("*.jsonl")):
        for row in read_rows(path):
            episode, new = row["episode"], random.random()
            scores = [episode["scores"], [{"name": "exact", "value": new, "weight": 0.5}]]
            names = {"step": row["step"], "task": row["task"]["id"], "group": episode["group_id"], "episode": episode["id"]}
            advantages = [[random.gauss(0, 1)], [random.gauss(0, 1)]]
            rows.append(
                names
                | {"reward": [row["reward"], new], "correct": [None, None], "advantages": advantages, "scores": scores}
            )
    folder.mkdir(exist_ok=True)
    write_rows(folder / "episodes.jsonl", rows)
    return Rescoring(folder)


def measured(work: Callable[[], int]) -> tuple[int, list[float]]:
    """What it returns, and the slowest of three times in seconds of wall clock and of CPU."""
    walls, cpus = [], []
    for _ in range(3):
        wall, cpu = time.perf_counter(), time.process_time()
        count = work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return count, [round(max(walls), 3), round(max(cpus), 3)]


def cpu_s(pid: int) -> float:
    """CPU seconds of a process of Linux and of its children, those that have ended included."""
    with suppress(OSError):
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]
        children = [child for path in Path(f"/proc/{pid}/task").glob("*/children") for child in path.read_text().split()]
        return sum(map(int, fields)) / os.sysconf("SC_CLK_TCK") + sum(cpu_s(int(child)) for child in children)
    return 0.0


def follow(address: str, over: threading.Event) -> None:
    """Ask for what the page of the only run asks for, as often as it does."""
    changed = threading.Event()
    with httpx.Client(base_url=address, timeout=600) as page:
        while not (runs := page.get("api/runs").json()["runs"]):
            over.wait(1)
        id = runs[0]["id"]

        def listen() -> None:
            with suppress(httpx.HTTPError), page.stream("GET", "api/events", params={"run": id}) as lines:
                for line in lines.iter_lines():
                    if line.startswith("data:"):
                        changed.set()

        threading.Thread(target=listen, daemon=True).start()
        while not over.is_set():
            if changed.wait(0.2):
                changed.clear()
                started = time.perf_counter()
                metrics = page.get("api/run", params={"run": id}).json()["metrics"]
                page.get("api/charts", params={"runs": id, "metrics": ",".join(metrics[:12])})
                page.get("api/episodes", params={"run": id})
                over.wait(max(2.0, min(PAGE_LONGEST_S, (time.perf_counter() - started) / PAGE_SHARE)))


def watched(run: RunDirectory, steps: int) -> dict[str, Any]:
    """Train beside a viewer; what watched stretches of steps take over the mean of their two neighbours, and the other way.

    Two runs differ by more than what is looked for, on a machine that others use too. The interval (95 %) is bootstrapped
    over stretches.
    """
    sensorium, over = [sys.executable, "-m", "sensorium"], threading.Event()
    run.path.parent.mkdir(parents=True)
    with ExitStack() as ending:
        command = [*sensorium, "view", str(run.path.parent), "--no-open", "--device", "cpu"]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.DEVNULL, "text": True}
        viewing = ending.enter_context(subprocess.Popen(command, **pipes))
        ending.callback(viewing.kill)
        address = re.search(r"http://\S+/", viewing.stdout.readline())[0]
        start_s = cpu_s(viewing.pid)
        threading.Thread(target=follow, args=(address, over), daemon=True).start()
        changes = [f"run_dir={run.path}", f"steps={steps}", "evaluation.every=0", "evaluation.at_start=false"]
        command = [*sensorium, "train", "recipes/shapes.yaml", *changes]
        training = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cpus = list[float]()
        while training.poll() is None:
            with suppress(OSError):
                if run.metrics.read_bytes().count(b"\n") > len(cpus):  # rows: one may be written in two parts
                    cpus.append(cpu_s(training.pid))
                    if len(cpus) % STRETCH == 0:
                        viewing.send_signal(signal.SIGSTOP if len(cpus) // STRETCH % 2 else signal.SIGCONT)
            time.sleep(0.02)
        viewing.send_signal(signal.SIGCONT)
        viewer_s = cpu_s(viewing.pid) - start_s
        over.set()
    rows = list(read_rows(run.metrics))
    if training.returncode not in (0, 3) or len(rows) != steps or len(cpus) != steps:
        raise SystemExit(f"the run ended with {training.returncode} after {len(rows)} of {steps} steps")
    result: dict[str, Any] = {"steps": steps}
    for name, seconds in (("cpu", np.diff(cpus, prepend=0.0)), ("wall", np.array([row["time/step_s"] for row in rows]))):
        means = np.log(seconds[: steps // STRETCH * STRETCH]).reshape(-1, STRETCH).mean(1)
        more = means[1:-1] - (means[:-2] + means[2:]) / 2
        more[::2] *= -1  # the second stretch was not watched
        more = more[1:]  # nor does the first compare, which began the run
        low, high = np.quantile(np.random.default_rng(0).choice(more, (2000, len(more))).mean(1), (0.025, 0.975))
        result[f"{name}_of_a_step"] = {"more_by": round(float(more.mean()), 4), "between": [round(low, 4), round(high, 4)]}
    shares = {
        "run_cpu_s": round(cpus[-1], 1),
        "viewer_cpu_s": round(viewer_s, 2),
        "share": round(2 * viewer_s / cpus[-1], 4),
    }
    return result | shares | {"viewer_start_s": start_s}


def most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="keep the run here, and use the one that is there")
    parser.add_argument("--watched", type=int, default=0, metavar="STEPS")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        if arguments.watched:
            print(json.dumps(watched(RunDirectory(Path(made) / "runs/run"), arguments.watched), indent=1))
            return
        folder = arguments.folder or Path(made) / "run"
        run = RunDirectory(folder) if (folder / "recipe.yaml").exists() else write_run(folder, arguments.episodes)
        index, before = EpisodeIndex(run), most_mib()
        started, cpu = time.perf_counter(), time.process_time()
        index.update()
        found = {"index_s": [round(time.perf_counter() - started, 1), round(time.process_time() - cpu, 1)]}
        found["log_mib"] = round(sum(path.stat().st_size for path in run.episodes.iterdir()) / 2**20)
        found["index_mib"] = round(index.path.stat().st_size / 2**20)
        for name, search in SEARCHES.items():
            count, seconds = measured(lambda search=search: index.search(search)["count"])
            found[f"{name} ({count:,})"] = seconds
        found["facets"] = measured(lambda: len(index.facets()))[1]
        found["more_mib"] = round(most_mib() - before)
        again = write_rescoring(run)
        started, before = time.process_time(), most_mib()
        again.rows("change", turned=False, offset=0, limit=50)
        found["rescoring, first time"] = round(time.process_time() - started, 3)
        for sort in ("change", "step"):
            count, seconds = measured(lambda sort=sort: again.rows(sort, turned=True, offset=1000, limit=50)[0])
            found[f"rescoring, by {sort} ({count:,})"] = seconds
        found["one episode of a rescoring"] = measured(lambda: len(again.row("7/3/1", 7) or ()))[1]
        found["rescoring_more_mib"] = round(most_mib() - before)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
