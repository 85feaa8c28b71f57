"""The child process: a model with its own weights and the native engine's writer, driven by the parent.

One message in, one answer out, until the other end hangs up:

    start    build the model that a folder describes, without weights          {}
    weights  read tensors from a file; nothing of earlier weights is kept      {}
             (in_flight: but what open responses have written, which go on)
    reset    keep nothing of earlier rollouts                                  {}
    tick     cancel, release, take new requests, advance all                   {done: [responses], counters, notes}
    close    end                                                               {}
"""

import os
import shutil
import signal
import socket
import sys
from collections.abc import Mapping
from concurrent.futures import Future
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from sensorium.cluster.channel import Channel, Message, plain_error
from sensorium.cluster.event_loop import set_aside
from sensorium.engines.process.messages import plain_response, request_of
from sensorium.vocabulary.errors import EngineError


class Child:
    """The state of the process: model, writer, and the requests it knows of by thread."""

    def __init__(self, told: Message) -> None:
        import torch

        from sensorium.data.media_files import MediaLimits
        from sensorium.data.media_store import MediaStore
        from sensorium.engines.native.pipeline import PagedWriter
        from sensorium.engines.native.writer import Writer
        from sensorium.engines.scheduler import Job
        from sensorium.models.load import build_policy
        from sensorium.recipe.schema import LoraSection

        torch.set_num_threads(told["threads"])
        torch.backends.mkldnn.enabled = told["onednn"]
        torch.use_deterministic_algorithms(told["deterministic"], warn_only=torch.cuda.is_available())
        torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
        lora = None if told["lora"] is None else LoraSection.model_validate(told["lora"])
        store = MediaStore(Path(told["media"]), limits=MediaLimits(**told["limits"]))
        self.policy = build_policy(
            told["folder"],
            store=store,
            dtype=told["dtype"],
            device=told["device"],
            family=told["family"],
            lora=lora,
            precision=told["precision"],
        )
        make = PagedWriter if told["paged"] else Writer
        self.writer = make(self.policy, **told["writer"])
        self.jobs: dict[str, Job] = {}
        self.waiting: list[Job] = []
        self.unset = set(self.policy.tensors())

    def weights(self, told: Message) -> Message:
        """Take weights from a file, and what learns and what is frozen."""
        import torch
        from safetensors.torch import load_file

        own, sent = self.policy.tensors(), load_file(told["file"])
        self.unset -= sent.keys()
        if self.unset:
            raise EngineError(f"{len(self.unset)} tensors of the model were never sent, {min(self.unset)} among them.")
        with torch.no_grad():
            for name, given in sent.items():
                if own[name].shape == given.shape and own[name].dtype == given.dtype:
                    own[name].copy_(given)
                else:  # a buffer that is held in another precision
                    own[name].data = given.to(own[name].device)
        learning = frozenset(told["learning"])
        for name, parameter in self.policy.model.named_parameters():
            parameter.requires_grad_(name in learning)
        self.policy.version = told["version"]
        if told["in_flight"]:
            self.waiting = [*self.writer.carry_over(told["version"]), *self.waiting]
            return {}
        return self.reset(told)

    def reset(self, told: Message) -> Message:
        """Keep nothing of earlier rollouts."""
        self.jobs.clear()
        self.waiting.clear()
        self.writer.forget(self.policy.version)
        return {}

    def tick(self, told: Message) -> Message:
        """One tick of the writer."""
        from sensorium.engines.scheduler import Job

        for thread in told["cancelled"]:
            if job := self.jobs.pop(thread, None):
                job.future.cancel()
        for thread in told["released"]:
            self.writer.release(thread)
        for plain in told["new"]:
            job = Job(request_of(plain), Future())  # type: ignore[arg-type]
            self.jobs[job.request.thread] = job
            self.waiting.append(job)
        waiting = sorted((job for job in self.waiting if not job.future.done()), key=lambda job: job.request.order)
        admitted = self.writer.tick(waiting)
        self.waiting = waiting[admitted:]
        done = [self._answer(thread) for thread in [thread for thread, job in self.jobs.items() if job.future.done()]]
        return {"done": done, "counters": asdict(self.writer.counters), "notes": self.writer.notes}

    def _answer(self, thread: str) -> Mapping[str, Any]:
        future = self.jobs.pop(thread).future
        error = future.exception()
        return {"thread": thread, **plain_error(error)} if error is not None else plain_response(thread, future.result())


def serve(channel: Channel) -> None:
    """Serve calls until the parent closes. An error is sent as an answer; the parent decides what it means."""
    child: Child | None = None
    temporary = ""
    while True:
        try:
            told = channel.receive()
        except (EOFError, OSError):  # the parent died, and can no longer remove what it wrote for this process
            if temporary:
                shutil.rmtree(temporary, ignore_errors=True)
            raise
        answer: Message = {}
        try:
            if told["do"] == "start":
                temporary = told["temporary"]
                child = Child(told)
                set_aside()
            elif told["do"] != "close":
                assert child is not None
                answer = {"weights": child.weights, "reset": child.reset, "tick": child.tick}[told["do"]](told)
        except Exception as error:
            answer = plain_error(error)
        channel.send(answer)
        if told["do"] == "close":
            return


def main() -> None:
    """Serve the connection whose file descriptor is the first argument."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts both; the parent decides when to close
    with suppress(EOFError, OSError):  # the other end is gone: nobody wants anything any more
        serve(Channel(socket.socket(fileno=int(sys.argv[1]))))
    os._exit(0)  # nothing is left to be saved, and unloading a large model takes its time


if __name__ == "__main__":
    main()
