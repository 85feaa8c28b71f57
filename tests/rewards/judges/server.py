"""A small real judge on loopback that speaks OpenAI's chat protocol, and answers as a test tells it to."""

import json
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sensorium.recipe.schema import JudgesSection


@dataclass(frozen=True)
class Answer:
    """What the server answers: a text, or a status with headers."""

    text: str = ""
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)


Judge = Callable[[dict[str, Any]], Answer | str]


@dataclass
class JudgeServer:
    """``url`` to ask, ``asked`` is every request so far, ``keys`` the Authorization headers that came with them."""

    url: str
    asked: list[dict[str, Any]] = field(default_factory=list)
    keys: list[str] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)


def said(request: dict[str, Any]) -> str:
    """All text of a request's question: what was sent back to it afterwards stands in later messages."""
    content = next(message for message in request["messages"] if message["role"] == "user")["content"]
    return content if isinstance(content, str) else "\n".join(p["text"] for p in content if p["type"] == "text")


@contextmanager
def judge_server(judge: Judge) -> Iterator[JudgeServer]:
    """A server for as long as the block runs; ``judge`` is called in the threads of its requests."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            server.asked.append(request)
            server.keys.append(self.headers.get("Authorization") or self.headers.get("api-key") or "")
            server.paths.append(self.path)
            answer = judge(request)
            answer = Answer(answer) if isinstance(answer, str) else answer
            body: dict[str, Any] = {"error": {"message": answer.text or "no"}}
            if answer.status == 200:
                message = {"role": "assistant", "content": answer.text}
                body = {
                    "id": "x", "object": "chat.completion", "created": 0, "model": request["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 10, "completion_tokens": 2, "total_tokens": 12},
                }  # fmt: skip
            data = json.dumps(body).encode()
            self.send_response(answer.status)
            for name, value in {"Content-Type": "application/json", **answer.headers}.items():
                self.send_header(name, value)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 256
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a client that no longer waits

    http = Server(("127.0.0.1", 0), Handler)
    server = JudgeServer(f"http://127.0.0.1:{http.server_address[1]}/v1")
    thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        http.shutdown()
        http.server_close()
        thread.join()


def section_of(*urls: str, **settings: Any) -> JudgesSection:
    """Settings with the model ``judge`` at these addresses."""
    return JudgesSection(endpoints={"judge": [{"base_url": url} for url in urls]}, **settings)
