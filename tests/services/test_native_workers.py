"""Worker processes with a real model each, behind a reward service: one is killed while 64 clients wait."""

import os
import signal
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import COLOURS, SHAPES, Thing
from sensorium.rewards.judges.client import JudgeClient
from sensorium.services.model_workers import model_workers
from sensorium.systems.caprl.generated import CaptionedScene
from sensorium.systems.caprl.serve_reward import judges_section
from sensorium.systems.caprl.service import RewardService, RewardSettings
from sensorium.systems.caprl.terms import Reading

from .test_reward_service import serving

OTHER = dict(zip(COLOURS, [*list(COLOURS)[1:], next(iter(COLOURS))], strict=True))
SCENES = [CaptionedScene(Thing(colour, shape, place)) for colour in COLOURS for shape in SHAPES for place in range(4)]


def captions(scene: CaptionedScene) -> list[str]:
    """One that is true, one that is not, one that does not tell the colour."""
    wrong = CaptionedScene(Thing(OTHER[scene.thing.colour], scene.thing.shape, scene.thing.quarter))
    return [scene.caption(), wrong.caption(), scene.caption(["shape"])]


@pytest.mark.usefixtures("forked_python")
def test_a_native_worker_killed_under_64_requests_loses_nothing_and_nothing_is_judged_twice(tmp_path: Path) -> None:
    workers, key_env = model_workers("package:caption_reader", 2, 0, ["--threads=1", "--max-context=256"])
    urls = [f"{worker.url}/v1" for worker in workers.workers]
    client = JudgeClient(judges_section(urls, "reader", key_env, tmp_path / "cache.sqlite", 32), MediaStore())
    reading = Reading("reader", draws=0, prompt="short", temperature=0.0, max_tokens=2)
    service = RewardService(RewardSettings(reading), client, MediaStore())
    service.workers = workers.states
    bodies = [
        {"items": [{"caption": told, "questions": [scene.questions()[0].to_json()]} for told in captions(scene)]}
        for scene in SCENES
    ]
    with serving(service, around=workers.running) as http, ThreadPoolExecutor(64) as crowd:
        under_way = [crowd.submit(http.post, "/get_reward", json=body, timeout=300) for body in bodies]
        while service.counters["judged"] < 8:
            time.sleep(0.005)
        process = workers.workers[0].process
        assert process is not None
        os.kill(process.pid, signal.SIGKILL)
        replies = [one.result(300) for one in under_way]
        assert [reply.status_code for reply in replies] == [200] * 64
        scores = [[one["score"] for one in reply.json()["results"]] for reply in replies]
        assert sum(row == [1.0, 0.0, 0.0] for row in scores) >= 60
        answered = Counter(call.key for call in client.cache.calls() if call.outcome == "answered")
        assert set(answered.values()) == {1}
        assert sorted(answered) == client.cache.keys()
        counted = {name: service.counters[name] for name in ("items", "judged", "missing", "open")}
        assert counted == {"items": 192, "judged": 192, "missing": 0, "open": 0}
        while not all(worker["alive"] for worker in workers.states()):
            time.sleep(0.01)
        assert service.counters["worker_restarts"] == 1
    assert not any(worker["alive"] for worker in workers.states())
