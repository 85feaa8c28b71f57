"""A judge on loopback that knows the truth about the clips of ``recipes/tiny/taskmem.yaml``, and speaks OpenAI's protocol.

    python examples/memory_judge.py --port 18990
    sensorium train tiny/taskmem            # in another terminal

It knows a clip by the bytes of its file, and reads a memory inside the frame that the request puts around it. A memory is
correct if it says the square's number and its colour, and nothing else. It is always fit to be kept. Of several correct
ones the shortest is the most useful.
"""

import argparse
import base64
import hashlib
import json
import re
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.systems.taskmem.memory_clips import ClipTruth, MemoryClips


def judged(request: Mapping[str, Any], truths: Mapping[str, ClipTruth]) -> str:
    """The answer to a request of the term episodic_memory."""
    content = request["messages"][0]["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    text = "\n".join(part["text"] for part in parts if part["type"] == "text")
    if ranked := re.search(r"You rank (\d+) candidates", text):
        said = {number: framed(text, f"CANDIDATE_{number}") for number in range(1, int(ranked[1]) + 1)}
        return json.dumps({"ranking": sorted(said, key=lambda number: (len(said[number]), said[number], number))})
    files = [part["video_url"]["url"] for part in parts if part["type"] == "video_url"]
    if not files:
        return json.dumps({"verdict": 1})
    truth = truths[hashlib.sha256(base64.b64decode(files[0].partition(",")[2])).hexdigest()]
    return json.dumps({"verdict": int(framed(text, "CANDIDATE").split() == truth.description.split())})


def framed(text: str, name: str) -> str:
    """What stands in a frame; its mark is on both lines and nowhere else."""
    found = re.search(rf"\[BEGIN {name} (\w+)\]\n(.*?)\n\[END {name} \1\]", text, re.DOTALL)
    if found is None:
        raise ValueError(f"the request has no frame {name}")
    return found[2]


@contextmanager
def serving(
    truths: Mapping[str, ClipTruth], port: int = 0, heard: Callable[[Mapping[str, Any]], object] | None = None
) -> Iterator[str]:
    """Serve on loopback for as long as the block runs; the address for ``base_url``. ``heard`` is told each request."""

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if heard is not None:
                heard(request)
            try:
                status, message = 200, {"role": "assistant", "content": judged(request, truths)}
                body: dict[str, Any] = {
                    "id": "judge", "object": "chat.completion", "created": 0, "model": request["model"],
                    "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
                    "usage": {"prompt_tokens": 0, "completion_tokens": 0, "total_tokens": 0},
                }  # fmt: skip
            except (KeyError, ValueError, IndexError) as error:
                status, body = 400, {"error": {"message": f"{type(error).__name__}: {error}"}}
            data = json.dumps(body).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def log_message(self, *_: Any) -> None:
            pass

    class Server(ThreadingHTTPServer):
        request_queue_size = 512  # a step's questions come at once; the default refuses the sixth connection that waits
        daemon_threads = True

        def handle_error(self, *_: Any) -> None:
            pass  # a run that was killed has hung up

    server = Server(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/v1"
    finally:
        server.shutdown()
        server.server_close()


def all_truths(videos: int = 192, held_out: int = 200) -> dict[str, ClipTruth]:
    """What is true of the clips of the recipe, and of the held-out ones of the study."""
    store = MediaStore()
    train = MemoryClips(store=store, videos=videos).truths()
    return train | MemoryClips(store=store, split="test", videos=held_out).truths()


def main() -> None:
    """Serve until interrupted."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--port", type=int, default=18990)
    port = parser.parse_args().port
    with serving(all_truths(), port) as address:
        print(f"the judge listens at {address}; Ctrl-C ends it", flush=True)
        try:
            threading.Event().wait()
        except KeyboardInterrupt:
            print()


if __name__ == "__main__":
    main()
