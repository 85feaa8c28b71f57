"""How a reward service starts and ends: what cannot work is said in a paragraph, what is under way is finished, and no
worker outlives it or ends before it."""

import asyncio
import os
import re
import signal
import socket
import subprocess
import sys
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from sensorium.cli.main import run_command
from sensorium.services.application import serve_until_stopped
from sensorium.services.model_workers import ModelWorker, ModelWorkers, free_port
from sensorium.systems.caprl.service import make_reward_app
from sensorium.vocabulary.errors import EngineLost, RecipeError

from . import text_reader
from .test_reward_service import BAD, GOOD, ROW, SILENT, make_service


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


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--reader", "http://127.0.0.1:9/v1", "--port", "70000"], "--port: there is no port 70000"),
        (["--reader", "127.0.0.1:9"], "--reader: an endpoint has an address such as"),
        (["--reader", "http://127.0.0.1:9/v1", "--reader-key-env", "NO_KEY_HERE"], "NO_KEY_HERE, which is not set"),
        (["no_such_checkpoint", "--worker-port", "65535", "--workers", "2"], "there is no port 65536"),
    ],
)
def test_a_service_that_cannot_work_is_refused(options: list[str], told: str) -> None:
    with pytest.raises(RecipeError, match=re.escape(told)):
        run_command("serve", ["reward", *options, *([] if "--port" in options else ["--port", "0"])])


def test_a_port_that_somebody_else_has_is_no_worker_s(tmp_path: Path) -> None:
    """A stranger that answers /health would be asked in the worker's place, and told its key."""
    with text_reader.Server(("127.0.0.1", 0), text_reader.Reader) as stranger:
        threading.Thread(target=stranger.serve_forever, daemon=True).start()
        port = stranger.server_address[1]
        workers = ModelWorkers([ModelWorker([sys.executable, "-c", "import time; time.sleep(600)"], free_port())])
        workers.workers.append(ModelWorker(workers.workers[0].command, port))
        service = make_service(tmp_path, f"http://127.0.0.1:{port}/v1")
        app = make_reward_app(service, around=workers.running)
        with socket.create_server(("127.0.0.1", 0)) as listening, pytest.raises(EngineLost, match=f"port {port} cannot"):
            serve_until_stopped(app, listening, "rewards", "")
        stranger.shutdown()
    assert workers.workers[0].process is not None
    assert not workers.workers[0].alive, "those that had been started are ended"


def test_a_worker_that_cannot_be_started_again_is_said_and_tried_again(capsys: pytest.CaptureFixture[str]) -> None:
    worker = ModelWorker([sys.executable, text_reader.__file__, "{port}"], free_port())
    workers = ModelWorkers([worker])

    async def live() -> None:
        async with workers.running():
            assert workers.states()[0]["ready"]
            assert worker.process is not None
            worker.process.kill()
            worker.process.wait()
            with socket.create_server(("127.0.0.1", worker.port)):
                while not worker.restarts:
                    await asyncio.sleep(0.01)
                assert not workers.states()[0]["ready"]
            while not workers.states()[0]["ready"]:
                await asyncio.sleep(0.01)

    asyncio.run(live())
    told = capsys.readouterr().err
    assert "died (code -9)" in told
    assert f"cannot be started: a worker's port {worker.port}" in told


ANSWERING = """
import http.server, sys
class Health(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200), self.end_headers()
    def log_message(self, *_): ...
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Health).serve_forever()
"""


def test_a_worker_that_hangs_is_not_ready_is_ended_and_started_again(capsys: pytest.CaptureFixture[str]) -> None:
    worker = ModelWorker([sys.executable, "-S", "-c", ANSWERING, "{port}"], free_port())
    workers = ModelWorkers([worker], hang_s=1.0)

    async def hang_once() -> None:
        async with workers.running():
            assert workers.states()[0]["ready"]
            assert worker.process is not None
            os.kill(worker.process.pid, signal.SIGSTOP)
            while workers.states()[0]["ready"]:
                await asyncio.sleep(0.01)
            while not worker.restarts or not workers.states()[0]["ready"]:
                await asyncio.sleep(0.01)

    asyncio.run(asyncio.wait_for(hang_once(), 600))
    assert "has not answered for 1 s and is ended" in capsys.readouterr().err
