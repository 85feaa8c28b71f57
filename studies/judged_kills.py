"""Judged runs that are killed (SIGKILL) and resumed: one with memories of its own, and two that share a judge cache.

    python studies/judged_kills.py [KILLS]

Both train ``recipes/tiny/taskmem.yaml``, made small, against a judge on loopback (``examples/memory_judge.py``).

- alone: killed at random moments of its CPU time. Afterwards all but times equals the uninterrupted run, and every prompt
  tells exactly what the policy wrote of earlier clips.
- one of two, both of two: two runs with one seed ask the same questions of one cache at the same time. When the judge has
  heard a random number of further questions, one run or both are killed; the other goes on, and the killed one is resumed
  at once or after some questions more. Afterwards both equal the uninterrupted run, with the same transcripts; each answer
  in the cache was recorded once and its call once; no question was asked again without a kill in between; no claim is left
  of a question that has no answer.

Writes studies/results/judged_kills.json.
"""

import json
import os
import random
import signal
import sqlite3
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Any

import yaml

sys.path.insert(0, str(Path(__file__).parents[1]))
from examples.memory_judge import serving
from sensorium.data.media_store import MediaStore
from sensorium.rewards.judges.judgements import AnswerCache
from sensorium.runs.episodes import TRANSCRIPTS
from sensorium.runs.metrics import read_metrics
from sensorium.systems.taskmem.memory_clips import MemoryClips
from studies.fork_server import CALL, Forked, ForkServer
from studies.kills import TRAIN, kill_and_resume
from studies.memory import histories_held
from studies.resumed_runs import differences, phase_file
from studies.seeds import circumstances

ROOT = Path(__file__).parents[1]
RESULT = Path(__file__).parent / "results" / "judged_kills.json"
VIDEOS, STEPS, CHOICE = 4, 6, "best"
ANSWER_S = 0.02
"""What the judge takes for an answer, so that kills fall while questions are open."""


LATE_S = 1.0
"""So long after a run was killed the judge may still hear what it had sent before."""


class HeardQuestions:
    """What the judge was asked: every question with its moment, and when runs were killed."""

    def __init__(self) -> None:
        self.moments: dict[str, list[float]] = {}
        self.kills: list[tuple[float, float]] = []
        self.count = 0
        self._more = threading.Condition()

    def hear(self, request: Mapping[str, Any]) -> None:
        """Note a question, and take a moment to answer."""
        with self._more:
            self.moments.setdefault(json.dumps(request, sort_keys=True), []).append(time.monotonic())
            self.count += 1
            self._more.notify_all()
        time.sleep(ANSWER_S)

    def wait_for(self, more: int, running: Mapping[str, Forked]) -> bool:
        """Wait for so many further questions; False if a run ended before."""
        goal = self.count + more
        with self._more:
            while self.count < goal:
                self._more.wait(0.05)
                if any(run.wait(0) is not None for run in running.values()):
                    return False
        return True

    def asked_again(self) -> tuple[int, int]:
        """How many questions were asked more than once, and of these how many without a kill in between."""
        again = [(a, b) for moments in self.moments.values() for a, b in pairwise(moments)]
        return len(again), sum(not any(a <= end + LATE_S and start <= b for start, end in self.kills) for a, b in again)


@dataclass
class TwoRuns:
    """What became of rounds of two runs: the phase of each kill, counts, and whatever should not be."""

    rounds: int = 0
    kills: list[str] = field(default_factory=list)
    judgements: int = 0
    asked_again: int = 0
    longest_judgement_s: float = 0.0
    differences: list[str] = field(default_factory=list)


def small_recipe(address: str, cache: Path | None) -> str:
    """The shipped recipe with few videos, as text."""
    recipe = yaml.safe_load((ROOT / "recipes" / "tiny" / "taskmem.yaml").read_text())
    recipe["tasks"]["train"][0]["options"] |= {"videos": VIDEOS, "together": VIDEOS}
    recipe["tasks"]["planner"]["options"]["choice"] = CHOICE
    recipe["judges"]["endpoints"]["truth"][0]["base_url"] = address
    recipe["judges"] |= {} if cache is None else {"cache": str(cache)}
    changes = {"batch": {"prompts_per_step": VIDEOS, "group_size": 3}, "steps": STEPS, "threads": 1}
    recipe |= {**changes, "checkpoint": {"every": 1, "keep": 2}}
    recipe["optimizer"]["warmup_steps"] = 0
    return json.dumps(recipe, indent=1)


class RunPair:
    """Two runs of one recipe in forks, and what they print."""

    def __init__(self, server: ForkServer, folder: Path, recipe: str) -> None:
        self.server, self.folder = server, folder
        folder.mkdir()
        (folder / "recipe.yaml").write_text(recipe)
        self.running: dict[str, Forked] = {}

    def start(self, name: str) -> None:
        """Start a run, or go on with it."""
        run = self.folder / name
        mode = "resume" if (run / "recipe.yaml").exists() else ""
        with open(os.devnull) as nothing, open(self.folder / "log.txt", "a") as log:
            fds = {0: nothing.fileno(), 1: log.fileno(), 2: log.fileno()}
            call = ("-c", CALL, *TRAIN.split(":"), str(self.folder / "recipe.yaml"), str(run), mode)
            self.running[name] = self.server.start(call, fds)

    def reap(self, *, wait: bool) -> None:
        """Forget the runs that ended well; RuntimeError for one that did not."""
        for name, fork in list(self.running.items()):
            ended = fork.wait(None if wait else 0)
            if ended is None:
                continue
            if ended.code:
                raise RuntimeError(
                    f"run {name} ended with code {ended.code}: {(self.folder / 'log.txt').read_text()[-2000:]}"
                )
            del self.running[name]

    def kill(self, name: str) -> str:
        """Kill a run; the phase it was in."""
        fork = self.running.pop(name)
        os.kill(fork.pid, signal.SIGKILL)
        fork.wait()
        place = phase_file(self.folder / name)
        return place.read_text() if place.exists() else "before the run"


def one_round(pair: RunPair, heard: HeardQuestions, moments: random.Random, left: int, both: bool) -> list[str]:
    """Start two runs and kill one or both again and again, at most ``left`` times, until they have ended."""
    phases: list[str] = []
    for name in ("a", "b"):
        pair.start(name)
    while len(phases) < left:
        came = heard.wait_for(moments.randint(1, 40), pair.running)
        pair.reap(wait=False)
        if not came:
            break
        time.sleep(moments.uniform(0, 2 * ANSWER_S))
        pair.reap(wait=False)
        victims = sorted(pair.running) if both else [moments.choice(sorted(pair.running))] if pair.running else []
        for name in victims:
            started = time.monotonic()
            phases.append(pair.kill(name))
            heard.kills.append((started, time.monotonic()))
        if not both and moments.random() < 0.5:
            heard.wait_for(moments.randint(1, 20), pair.running)  # the other goes on alone for a while
        for name in victims:
            pair.start(name)
    pair.reap(wait=True)
    return phases


def faults_of(folder: Path, heard: HeardQuestions, whole: Path) -> list[str]:
    """What does not hold after a round."""
    found = []
    for name in ("a", "b"):
        found += [f"{name}: {what}" for what in differences(whole, folder / name)]
        if transcripts(folder / name) != transcripts(whole):
            found.append(f"{name}: transcripts")
    cache = AnswerCache(folder / "judges.sqlite")
    keys, answered = cache.keys(), Counter(row.key for row in cache.calls() if row.outcome == "answered")
    cache.close()
    with sqlite3.connect(folder / "judges.sqlite") as file:
        found += [f"cache: {text}" for (text,) in file.execute("PRAGMA integrity_check") if text != "ok"]
        claims = file.execute("SELECT count(*) FROM claims WHERE key NOT IN (SELECT key FROM answers)").fetchone()[0]
    found += [f"{claims} claims are left"] if claims else []
    found += ["answers and log of calls do not agree"] if answered != Counter(keys) else []
    found += [f"{len(heard.moments)} questions, {len(keys)} answers"] if len(heard.moments) != len(keys) else []
    again = heard.asked_again()[1]
    return found + ([f"{again} questions were asked twice without a kill in between"] if again else [])


def transcripts(run: Path) -> list[Any]:
    """All rows of a run's transcripts."""
    with sqlite3.connect(run / TRANSCRIPTS) as file:
        return sorted(file.execute("SELECT * FROM transcripts").fetchall())


def longest_judgement(run: Path) -> float:
    """The longest call of the judged term in a run: one that waited for a dead run would show here."""
    return max(row.get("time/reward/episodic_memory_max_s", 0.0) for row in read_metrics(run / "metrics.jsonl"))


def kill_of_two(folder: Path, server: ForkServer, truths: Any, kills: int, *, both: bool, whole: Path) -> TwoRuns:
    """Rounds of two runs until so many kills fell."""
    found, moments = TwoRuns(), random.Random(both)
    while len(found.kills) < kills:
        found.rounds += 1
        place, heard = folder / f"round_{found.rounds}", HeardQuestions()
        with serving(truths, heard=heard.hear) as address:
            pair = RunPair(server, place, small_recipe(address, place / "judges.sqlite"))
            found.kills += one_round(pair, heard, moments, kills - len(found.kills), both)
        found.judgements += len(heard.moments)
        found.asked_again += heard.asked_again()[0]
        found.longest_judgement_s = max(found.longest_judgement_s, *(longest_judgement(place / name) for name in "ab"))
        found.differences += [f"round {found.rounds}: {what}" for what in faults_of(place, heard, whole)]
    return found


@contextmanager
def uninterrupted(folder: Path, server: ForkServer, truths: Any) -> Iterator[Path]:
    """A run that nothing interrupts, with a judge and a cache of its own."""
    with serving(truths) as address:
        (folder / "recipe.yaml").write_text(small_recipe(address, None))
        ended = server.run(TRAIN, str(folder / "recipe.yaml"), str(folder / "whole"), log=folder / "log.txt")
        if ended.code:
            raise RuntimeError((folder / "log.txt").read_text()[-2000:])
    yield folder / "whole"


def main(kills: int) -> None:
    """Run all three and write the counts."""
    source = MemoryClips(store=MediaStore(), videos=VIDEOS, together=VIDEOS)
    truths = source.truths()
    result: dict[str, Any] = {"command": f"python studies/judged_kills.py {kills}", **circumstances()}
    with ForkServer("studies.resumed_runs", "openai") as server:
        with tempfile.TemporaryDirectory() as place, serving(truths) as address:
            folder = Path(place)
            alone = kill_and_resume("memory", small_recipe(address, None), folder, server, random.Random("memory"), kills)
            held = {histories_held(run, source, CHOICE) for run in folder.glob("run_*") if run.is_dir()}
        result["alone"] = {
            "kills": len(alone.kills),
            "runs": alone.runs,
            "phases": dict(sorted(Counter(alone.kills).items())),
            "differences": alone.differences,
            "prompts of each run whose history is what the policy wrote": sorted(held),
            "cpu_minutes": round(alone.cpu_s / 60, 1),
        }
        print("alone", json.dumps(result["alone"]), flush=True)
        with tempfile.TemporaryDirectory() as place, uninterrupted(Path(place), server, truths) as whole:
            for name, both in (("one of two", False), ("both of two", True)):
                folder = Path(place) / name.replace(" ", "_")
                folder.mkdir()
                two = kill_of_two(folder, server, truths, kills, both=both, whole=whole)
                result[name] = {
                    "kills": len(two.kills),
                    "rounds": two.rounds,
                    "phases": dict(sorted(Counter(two.kills).items())),
                    "judgements": two.judgements,
                    "asked again after a kill": two.asked_again,
                    "longest judgement, s": round(two.longest_judgement_s, 1),
                    "differences": two.differences,
                }
                print(name, json.dumps(result[name]), flush=True)
    RESULT.write_text(json.dumps(result, indent=1) + "\n")
    sys.exit(any(part["differences"] for part in result.values() if isinstance(part, dict)))


if __name__ == "__main__":
    main(int(sys.argv[1]) if len(sys.argv) > 1 else 10)
