"""The child process: a model with its own weights and the native engine's writer, driven by the parent.

One message in, one answer out, until the other end hangs up:

    start    build the model that a folder describes, without weights          {}
    weights  read tensors from a file; nothing of earlier weights is kept      {}
             (in_flight: except of open responses and of threads between turns)
    reset    keep nothing of earlier rollouts                                  {}
    tick     cancel, release, take new requests, advance all                   {done: by thread, counters, notes}
    close    end                                                               {}
"""

import os
import shutil
from concurrent.futures import Future
from contextlib import suppress
from pathlib import Path

from sensorium.cluster.event_loop import set_aside
from sensorium.cluster.python_process import Channel, Message, parent_sockets, plain_error
from sensorium.vocabulary.errors import EngineError


class Child:
    """The state of the process: model, writer, and the requests it knows by thread."""

    def __init__(self, message: Message) -> None:
        import torch

        from sensorium.data.media_store import MediaStore
        from sensorium.engines.native.native_engine import StockWriter
        from sensorium.engines.native.pipeline import PagedWriter
        from sensorium.engines.native.writer import Writer
        from sensorium.engines.scheduler import Job
        from sensorium.models.load import build_policy

        torch.set_num_threads(message["threads"])
        torch.backends.mkldnn.enabled = message["onednn"]
        torch.use_deterministic_algorithms(message["deterministic"], warn_only=torch.cuda.is_available())
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        store = MediaStore(Path(message["media"]), limits=message["limits"])
        self.policy = build_policy(message["folder"], store=store, **message["policy"])
        if self.policy.general is not None:
            self.policy.general.trust(self.policy.chat, message["checked"])
            self.writer: Writer | StockWriter = StockWriter(self.policy, **message["writer"])
        else:
            self.writer = (PagedWriter if message["paged"] else Writer)(self.policy, **message["writer"])
        self.jobs: dict[str, Job] = {}
        self.waiting: list[Job] = []
        self.unset = set(self.policy.tensors())

    def weights(self, message: Message) -> Message:
        """Take weights from a file, and which parameters learn."""
        import torch
        from safetensors.torch import load_file

        own, sent = self.policy.tensors(), load_file(message["file"])
        self.unset -= sent.keys()
        if self.unset:
            raise EngineError(f"{len(self.unset)} tensors of the model were never sent, {min(self.unset)} among them.")
        with torch.no_grad():
            for name, given in sent.items():
                if own[name].shape == given.shape and own[name].dtype == given.dtype:
                    own[name].copy_(given)
                else:  # a buffer in another precision
                    own[name].data = given.to(own[name].device)
        for name, parameter in self.policy.model.named_parameters():
            parameter.requires_grad_(name in message["learning"])
        self.policy.version = message["version"]
        if message["in_flight"]:
            self.writer.change_weights(message["version"])
            return {}
        return self.reset(message)

    def reset(self, message: Message) -> Message:
        """Keep nothing of earlier rollouts."""
        self.jobs.clear()
        self.waiting.clear()
        self.writer.forget(self.policy.version)
        return {}

    def tick(self, message: Message) -> Message:
        """One tick of the writer; responses, or errors as plain data, by thread."""
        from sensorium.engines.scheduler import Job

        for thread in message["cancelled"]:
            if job := self.jobs.pop(thread, None):
                job.future.cancel()
        for thread in message["released"]:
            self.writer.release(thread)
        for request in message["new"]:
            job = Job(request, Future())  # type: ignore[arg-type]
            self.jobs[request.thread] = job
            self.waiting.append(job)
        waiting = sorted((job for job in self.waiting if not job.future.done()), key=lambda job: job.request.order)
        admitted = self.writer.tick(waiting)
        self.waiting = waiting[admitted:]
        done = {}
        for thread in [thread for thread, job in self.jobs.items() if job.future.done()]:
            future = self.jobs.pop(thread).future
            error = future.exception()
            done[thread] = future.result() if error is None else plain_error(error)
        return {"done": done, "counters": self.writer.counters, "notes": self.writer.notes}


def serve(channel: Channel) -> None:
    """Answer the parent until it closes. An error is sent as an answer; the parent decides what it means."""
    child: Child | None = None
    temporary = ""
    while True:
        try:
            message = channel.receive()
        except (EOFError, OSError):  # the parent died, and can no longer remove what it wrote for this process
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        answer: Message = {}
        try:
            if message["do"] == "start":
                temporary = message["temporary"]
                child = Child(message)
                set_aside()
            elif message["do"] != "close":
                assert child is not None
                answer = {"weights": child.weights, "reset": child.reset, "tick": child.tick}[message["do"]](message)
        except Exception as error:
            answer = plain_error(error)
        channel.send(answer)
        if message["do"] == "close":
            return


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    (connection,) = parent_sockets()
    with suppress(EOFError, OSError):  # the parent is gone
        serve(Channel(connection))
    os._exit(0)  # nothing is left to be saved, and unloading a large model takes its time


if __name__ == "__main__":
    main()
