"""How a reward service ends: what is under way is finished, and no worker outlives it or ends before it."""

import os
import signal
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sensorium.services.model_workers import ModelWorker, free_port

from . import text_reader
from .test_reward_service import BAD, GOOD, ROW, SILENT


@pytest.mark.usefixtures("forked_python")
def test_a_service_that_is_stopped_finishes_what_is_under_way(tmp_path: Path) -> None:
    asked, may_answer = threading.Semaphore(0), threading.Event()

    class Waiting(text_reader.Reader):
        def do_POST(self) -> None:
            asked.release()
            assert may_answer.wait(120)
            super().do_POST()

    server = text_reader.Server(("127.0.0.1", 0), Waiting)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    url = f"http://127.0.0.1:{server.server_address[1]}/v1"
    command = [sys.executable, "-m", "sensorium.cli.main", "serve", "reward", "--reader", url, "--port", "0", "--all-qa"]
    service = subprocess.Popen(command, stdout=subprocess.PIPE, cwd=tmp_path)
    assert service.stdout is not None
    address = service.stdout.readline().decode().split(" on ")[1].split()[0]
    bodies = [{"items": [{"caption": f"{i} {told}", "questions": [ROW]} for told in (GOOD, BAD, SILENT)]} for i in range(4)]
    with ThreadPoolExecutor(4) as crowd:
        under_way = [crowd.submit(httpx.post, f"{address}/get_reward", json=body, timeout=120) for body in bodies]
        for _ in range(12):
            assert asked.acquire(timeout=120)
        os.kill(service.pid, signal.SIGTERM)
        while _accepts(address):
            pass
        may_answer.set()
        replies = [one.result(120) for one in under_way]
    assert [[one["score"] for one in reply.json()["results"]] for reply in replies] == [[1.0, 0.0, 0.0]] * 4
    assert service.wait(120) == 128 + signal.SIGTERM
    server.shutdown()


def test_ctrl_c_in_a_terminal_reaches_no_worker_before_its_answers_are_written() -> None:
    worker = ModelWorker([sys.executable, text_reader.__file__, "{port}"], free_port())
    worker.start()
    try:
        assert worker.process is not None
        assert os.getsid(worker.process.pid) == worker.process.pid != os.getsid(0)
    finally:
        worker.stop()


@pytest.mark.usefixtures("forked_python")
def test_a_worker_ends_when_the_process_that_started_it_is_gone() -> None:
    code = "from sensorium.cli.serve_model import _stop_when_input_ends; _stop_when_input_ends()"
    worker = subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE)
    assert worker.stdin is not None
    assert worker.poll() is None
    worker.stdin.close()
    assert worker.wait(120) == -signal.SIGTERM


def _accepts(address: str) -> bool:
    """Whether the service still takes connections."""
    try:
        httpx.get(f"{address}/health", timeout=60)
    except httpx.TransportError:
        return False
    return True
