"""Two real processes of one run: limits count for both together, and an equal question is asked by one of them."""

import json
import subprocess
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sensorium.rewards.judges.judgements import AnswerCache
from tests.rewards.judges.server import judge_server

pytestmark = pytest.mark.usefixtures("forked_python")

TAKING = """
import json, sys, time
from pathlib import Path
from sensorium.rewards.judges.transport import SharedLimits

limits = SharedLimits(Path(sys.argv[1]), {"judge": 0.006}, {"judge": 0.006})
print("ready", flush=True)
sys.stdin.readline()
print(json.dumps([[limits._move("requests/judge", 1.0), limits._move("tokens/judge", 3.0)] for _ in range(40)]))
"""
ASKING = """
import json, sys
from pathlib import Path
from sensorium.rewards.judges.client import JudgeClient
from sensorium.recipe.schema import JudgesSection
from sensorium.vocabulary.errors import JudgeFailure
from tests.rewards.judges.test_client import question

settings = json.loads(sys.argv[2])
client = JudgeClient(JudgesSection(**settings), folder=Path(sys.argv[1]))
print("ready", flush=True)
sys.stdin.readline()
said = []
for asked in sys.argv[3:]:
    model, _, text = asked.partition(":")
    try:
        said.append(client.ask_now(question(text).asked_of(model)).value["score"])
    except JudgeFailure as failure:
        said.append(str(failure))
client.close()
print(json.dumps(said))
"""


def together(script: str, *arguments: list[str]) -> list[Any]:
    """Run a script in as many processes as there are lists of arguments, all begun at the same moment; what they print."""
    started = [
        subprocess.Popen([sys.executable, "-c", script, *given], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        for given in arguments
    ]
    for process in started:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
    for process in started:
        assert process.stdin is not None
        process.stdin.write("go\n")
        process.stdin.flush()
    found = [json.loads(process.communicate()[0]) for process in started]
    assert [process.returncode for process in started] == [0] * len(started)
    return found


def test_no_request_or_token_of_two_processes_goes_uncounted(tmp_path: Path) -> None:
    place = tmp_path / "limits.sqlite"
    taken = [one for found in together(TAKING, [str(place)], [str(place)]) for one in found]
    rate = 0.006 / 60
    requests, tokens = (sorted(wait * rate for wait in waits) for waits in zip(*taken, strict=True))
    # one is in the bucket at first; every take finds what all takes before it left, in whichever process they were made
    assert requests == pytest.approx([*range(80)], abs=0.1)
    assert tokens == pytest.approx([3 * n - 1 for n in range(1, 81)], abs=0.1)


def test_two_processes_ask_an_equal_question_once_and_no_more_than_their_limit_together(tmp_path: Path) -> None:
    with judge_server(lambda _: '{"score": 1}') as server:
        endpoints = {model: [{"base_url": server.url}] for model in ("judge", "scarce")}
        settings = json.dumps({"endpoints": endpoints, "requests_per_minute": {"scarce": 0.01}, "total_deadline_s": 60})
        alike = [f"judge:cat {i}" for i in range(8)]
        given = [[str(tmp_path), settings, *alike, *(f"scarce:{name} {i}" for i in range(3))] for name in ("cat", "dog")]
        said = together(ASKING, *given)
        assert Counter(request["model"] for request in server.asked) == {"judge": 8, "scarce": 1}
    assert [found[:8] for found in said] == [[1] * 8] * 2
    scarce = [one for found in said for one in found[8:]]
    assert scarce.count(1) == 1
    assert sum("its limit a minute" in str(one) for one in scarce) == 5
    cache = AnswerCache(tmp_path / "judges.sqlite")
    assert Counter(row.key for row in cache.calls() if row.outcome == "answered") == Counter(cache.keys())
    assert len(cache.keys()) == 9
    cache.close()
