"""How fast ``sensorium view`` answers over a run of many episodes: python -m bench.view_index [--episodes 100000].

Writes a run as the trainer does (``write_episodes``: 256 episodes a step, groups of 8, 96 tokens a response, two terms,
words by a power law), indexes it, and asks for the first page and for searches, three times each. Prints the slowest of
the three in seconds with the number of episodes found, the sizes of logs and index, and the memory that this took beside
the imports.
"""

import argparse
import json
import resource
import tempfile
import time
from pathlib import Path
from random import Random

from sensorium.runs.durable import write_whole
from sensorium.runs.episodes import EpisodeCredit, write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer.index import EpisodeIndex, Search
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user

STEP, GROUP, TOKENS, WORDS = 256, 8, 96, 20_000
SEARCHES = {
    "first page": Search(),
    "page 1,000": Search(offset=50_000),
    "a frequent word": Search(text="w0"),
    "a frequent word, by surprise": Search(text="w0", sort="surprise"),
    "two frequent words, by reward": Search(text="w0 w1", sort="reward"),
    "a rare word": Search(text="w1900"),
    "a phrase of the response": Search(text='response:"w0 w1"'),
    "a word of the prompt": Search(text="prompt:w3", sort="disagreement"),
    "the beginning of words": Search(text="w12*"),
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


def most_mib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--episodes", type=int, default=100_000)
    parser.add_argument("--folder", type=Path, help="keep the run here, and use the one that is there")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as made:
        folder = arguments.folder or Path(made) / "run"
        run = RunDirectory(folder) if (folder / "recipe.yaml").exists() else write_run(folder, arguments.episodes)
        index, before = EpisodeIndex(run), most_mib()
        started = time.perf_counter()
        index.update()
        found = {"index_s": round(time.perf_counter() - started, 1)}
        found["log_mib"] = round(sum(path.stat().st_size for path in run.episodes.iterdir()) / 2**20)
        found["index_mib"] = round(index.path.stat().st_size / 2**20)
        for name, search in SEARCHES.items():
            times = []
            for _ in range(3):
                started = time.perf_counter()
                count = index.search(search)["count"]
                times.append(time.perf_counter() - started)
            found[f"{name} ({count:,})"] = round(max(times), 3)
        started = time.perf_counter()
        index.facets()
        found["facets"] = round(time.perf_counter() - started, 3)
        found["more_mib"] = round(most_mib() - before)
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
