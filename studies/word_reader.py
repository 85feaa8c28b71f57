"""A reader that was never trained: it chooses the option whose word stands in the caption, and else "can not answer".

    "[00:02] a red circle top left", and "When does it come?" with 1, 2, 3, 4   → the letter of 2

It shares nothing with the readers that are models: no weights, no tokenizer, no examples. A captioner that had agreed with
its reader on a code would tell it nothing. It speaks the OpenAI protocol on loopback: `sensorium serve reward --reader`.
"""

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

OPTION = re.compile(r"^([A-Z])\) (.*)$", re.MULTILINE)


def words_of(text: str) -> set[str]:
    """The words and whole numbers of a text: of "[00:02]" 0 and 2."""
    return {str(int(word)) if word.isdigit() else word.lower() for word in re.findall(r"[0-9]+|[^\W\d_]+", text)}


def letter_of(prompt: str) -> str:
    """The letter that it answers to a caption and a question in the form ``short``."""
    caption, _, question = prompt.partition("\n")
    told, options = words_of(json.loads(caption)), OPTION.findall(question)
    fitting = [letter for letter, option in options[:-1] if words_of(option) <= told]
    return str(fitting[0] if len(fitting) == 1 else options[-1][0])


class ChatCompletions(BaseHTTPRequestHandler):
    """Answers every chat by its last message."""

    protocol_version = "HTTP/1.1"

    def do_POST(self) -> None:
        """One chat completion."""
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        content = asked["messages"][-1]["content"]
        prompt = content if isinstance(content, str) else "".join(part.get("text", "") for part in content)
        message = {"role": "assistant", "content": letter_of(prompt)}
        choice = {"index": 0, "finish_reason": "stop", "message": message}
        body = json.dumps(
            {"id": "words", "object": "chat.completion", "created": 0, "model": asked["model"], "choices": [choice]}
        ).encode()
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: Any) -> None:
        """Say nothing."""


@contextmanager
def word_reader() -> Iterator[str]:
    """The address of a server with the reader, as long as the block runs."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), ChatCompletions)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()
