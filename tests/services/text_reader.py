"""A reader that knows how to read: it chooses the option that the caption names, else the last one ("can not answer").

Speaks the OpenAI protocol with the standard library alone, so that it starts at once: ``text_reader.py PORT [DELAY]``.
"""

import json
import sys
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


def read(prompt: str) -> str:
    """The letter of the first option that the caption has in it."""
    lines = prompt.split("\n")
    caption = next(line for line in lines if '"' in line).replace('"', " ")
    options = [line for line in lines if line[1:3] == ") "]
    if "boom" in caption:
        raise ValueError("told to")
    return next((line[0] for line in options[:-1] if f" {line[3:]} " in f" {caption} "), options[-1][0])


class Reader(BaseHTTPRequestHandler):
    """Answers chat completions."""

    protocol_version = "HTTP/1.1"
    delay_s = 0.0

    def do_GET(self) -> None:
        self.reply(200, {"status": "ok"})

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        time.sleep(self.delay_s)
        try:
            text = read(body["messages"][-1]["content"])
        except ValueError as error:
            return self.reply(400, {"error": {"message": str(error)}})
        message = {"role": "assistant", "content": text}
        choice = {"index": 0, "message": message, "finish_reason": "stop"}
        self.reply(200, {"id": "x", "object": "chat.completion", "created": 0, "model": body["model"], "choices": [choice]})

    def reply(self, status: int, body: Any) -> None:
        data = json.dumps(body).encode()
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *_: Any) -> None:
        """Say nothing."""


class Server(ThreadingHTTPServer):
    """Many at once."""

    daemon_threads = True
    request_queue_size = 256


def main() -> None:
    """Serve for ever."""
    Reader.delay_s = float(sys.argv[2]) if len(sys.argv) > 2 else 0.0
    Server(("127.0.0.1", int(sys.argv[1])), Reader).serve_forever()


if __name__ == "__main__":
    main()
