"""vLLM's own form of a prompt whose media are preprocessed already. Runs in the actor."""

import asyncio
import os
import shutil
import signal
import socket
import sys
import tempfile
import threading
import time
from collections.abc import Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensorium.cluster.channel import Channel, Message, plain_error
from sensorium.cluster.python_process import guard_group, mapped_segments, remove_segments
from sensorium.vocabulary.errors import EngineError, EngineLost

PATCHES = ("pixel_values", "pixel_values_videos")


def engine_input(told: Mapping[str, Any]) -> Any:
    """The engine input of a request: expanded ids, and of each medium its tensors (None: sent before), hash and range."""
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import PlaceholderRange

    ids: list[int] = told["ids"]
    if not told["media"]:
        return tokens_input(ids)
    from safetensors.torch import load_file

    stored = load_file(told["file"]) if told["file"] else {}
    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[Any]] = {}
    for i, medium in enumerate(told["media"]):
        modality = medium["modality"]
        fields = None if medium["fields"] is None else {name: stored[f"{i}.{name}"] for name in medium["fields"]}
        mask = None if medium["mask"] is None else torch.tensor(medium["mask"])
        items.setdefault(modality, []).append(None if fields is None else _item(modality, fields))
        hashes.setdefault(modality, []).append(medium["key"])
        ranges.setdefault(modality, []).append(PlaceholderRange(medium["start"], medium["length"], mask))
    return mm_input(ids, items, hashes, ranges)


def _item(modality: str, fields: Mapping[str, Tensor]) -> Any:
    """One medium of vLLM's: patches lie flat, all else is one row for each medium and stays on the CPU."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    config = {
        name: MultiModalFieldConfig.flat_from_sizes(modality, torch.tensor([len(tensor)]))
        if name in PATCHES
        else MultiModalFieldConfig.batched(modality, keep_on_cpu=True)
        for name, tensor in fields.items()
    }
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(dict(fields)), config)[modality][0]


# start build vLLM {context} generate sample, and score given tokens {tokens, logprobs, finish, versions, scores},
# {unknown} cancel end a request that nobody waits for any more nothing push pause, load weights, forget what others
# computed {pause_s, load_s} lora load an adapter, drop earlier ones that nobody uses {} reset keep nothing of earlier
# rollouts {} look tell that vLLM's core still takes questions {} close end Invariant: weights are never loaded while a
# request runs, and nothing computed with earlier ones outlives a push.


SHUTDOWN_S = 15.0
LOOK_S = 1.0
"""How often it is looked whether vLLM's core has died while something is awaited of it."""
LONGEST_SOCKET_FOLDER = 70
"""The path of a socket has at most 107 bytes, and vLLM's names have 36."""


def is_socket_folder(folder: str) -> bool:
    """True for a folder among this machine's temporary files (not on a shared disk) whose path leaves room for a name."""
    return os.path.dirname(folder) == tempfile.gettempdir() and len(folder) <= LONGEST_SOCKET_FOLDER


class Actor:
    """vLLM, and what is asked of it."""

    def __init__(self, heard: Channel) -> None:
        self._heard = heard
        self.temporary = ""
        self.segments: set[Path] = set()  # of shared memory: vLLM leaves some behind
        self._engine: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._adapters: dict[int, int] = {}  # open requests by the number of their adapter
        self._adapter: Any = None
        self._version = 0

    def take(self, message: Message) -> None:
        """Begin to answer a message; on the event loop."""
        if message["do"] == "cancel":
            if task := self._tasks.get(message["request"]):
                task.cancel()
            return
        number = message["id"]
        self._tasks[number] = asyncio.get_running_loop().create_task(self._answer(number, message))

    async def _answer(self, number: int, message: Message) -> None:
        try:
            work = getattr(self, f"_{message['do']}")(message)
            answer = await (work if message["do"] == "generate" else self._unless_dead(work))
        except asyncio.CancelledError:
            return
        except Exception as error:
            answer = self._explain(error)
        finally:
            self._tasks.pop(number, None)
        self._heard.send({"id": number, **answer})

    async def _unless_dead(self, work: Coroutine[Any, Any, Message]) -> Message:
        """What work returns. Where vLLM's core dies meanwhile, vLLM fails its requests, and answers nothing else."""
        task = asyncio.ensure_future(work)
        try:
            while not (await asyncio.wait([task], timeout=LOOK_S))[0]:
                if self._engine is not None and self._engine.errored:
                    raise self._engine.dead_error
            return task.result()
        finally:
            task.cancel()

    def _explain(self, error: Exception) -> Message:
        if self._engine is None:
            return plain_error(EngineLost(f"vLLM could not start: {error}."))
        if self._engine.errored:
            return plain_error(
                EngineLost(
                    f"vLLM ended in the middle of its work ({type(error).__name__}), so nothing more can be sampled. "
                    "Resume the run from its last checkpoint, or set rollout.engine.options.restarts to replace what died."
                )
            )
        return plain_error(error)

    async def _start(self, told: Message) -> Message:
        self.temporary = told["temporary"]
        if is_socket_folder(self.temporary):  # vLLM leaves its sockets behind; there they are removed with the rest
            os.environ.setdefault("VLLM_RPC_BASE_PATH", self.temporary)
        from vllm.config import WeightTransferConfig
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = {**told["engine_args"], "weight_transfer_config": WeightTransferConfig(backend=told["backend"])}
        self._stops = told["stops"]
        masked = told["forbidden"]
        self._masks = {
            True: token_mask(masked, told["vocab_size"]),
            False: token_mask([*masked, *self._stops], told["vocab_size"]),
        }
        self._tells_versions = told["tells_versions"]
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        self.segments = mapped_segments(os.getpgrp())
        await self._init_transfer(told["transfer"])
        return {"context": self._engine.model_config.max_model_len}

    async def _init_transfer(self, agreed: dict[str, Any]) -> None:
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=agreed))

    async def _generate(self, told: Message) -> Message:
        prompt = engine_input(told)
        adapter = self._adapter
        key = 0 if adapter is None else adapter.lora_int_id
        self._adapters[key] = self._adapters.get(key, 0) + 1
        output = None
        try:
            stream = self._engine.generate(prompt, self._params(told), f"r{told['id']}", lora_request=adapter)
            async for output in stream:
                if told["streamed"] and output.outputs and not output.finished:
                    part = {**_written(output.outputs[0]), "version": self._version}
                    self._heard.send({"id": told["id"], "part": part})
        finally:
            self._adapters[key] -= 1
        if output is None or not output.outputs:
            raise EngineError("vLLM ended a request without an output.")
        written = output.outputs[0]
        if written.finish_reason == "error":
            if any(item["fields"] is None for item in told["media"]):
                return {"unknown": True}
            raise EngineError("vLLM refused a request without a reason; its log may tell more.")
        if written.finish_reason == "abort":
            raise EngineError("vLLM aborted a request that was not withdrawn.")
        spans = getattr(written, "weight_versions", None) or []
        return {
            **_written(written),
            "finish": written.finish_reason,
            "versions": [[span.version, span.start, span.end] for span in spans],
            "scores": _scores(output) if told["score"] else None,
        }

    def _params(self, told: Message) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=told["temperature"],
            max_tokens=told["max_tokens"],
            logprobs=0,
            prompt_logprobs=0 if told["score"] else None,
            ignore_eos=True,
            stop_token_ids=self._stops if told["stop_tokens"] else [],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if told["streamed"] else RequestOutputKind.FINAL_ONLY,
            **self._masks[told["stop_tokens"]],
        )

    async def _push(self, told: Message) -> Message:
        """Requests in flight are kept, and go on with keys, values and features that the new weights compute."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        engine, started = self._engine, time.perf_counter()
        await engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await engine.start_weight_update()
        await engine.update_weights(WeightTransferUpdateRequest(update_info=told["update"]))
        if self._tells_versions:
            await engine.finish_weight_update(str(told["version"]))
        else:
            await engine.finish_weight_update()
        await self._forget()
        self._version = told["version"]
        # After a failure above the engine stays paused, with weights on the meta device: a request would end it. Only
        # another push, or a new engine, heals it.
        await engine.resume_generation()
        return {"pause_s": paused - started, "load_s": time.perf_counter() - paused}

    async def _lora(self, told: Message) -> Message:
        """A new number for each version: vLLM would keep the earlier adapter of a number it knows."""
        from vllm.lora.request import LoRARequest

        request = LoRARequest(f"version-{told['number']}", told["number"], told["path"])
        await self._engine.add_lora(request)
        self._adapter = request
        for number in [number for number, open_ in self._adapters.items() if not open_ and number != told["number"]]:
            del self._adapters[number]
            if number:
                await self._engine.remove_lora(number)
        if self._tells_versions:
            await self._engine.update_weight_version(str(told["version"]))
        return {}

    async def _reset(self, told: Message) -> Message:
        await self._forget()
        return {}

    async def _look(self, told: Message) -> Message:
        await self._engine.is_sleeping()  # any question that goes to the core and changes nothing
        return {}

    async def _forget(self) -> None:
        """Drop features first, then keys and values: also those of requests that wait to go on."""
        await self._engine.reset_encoder_cache()
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    def shut_down(self) -> None:
        """Let vLLM end its processes and give its shared memory back."""
        if self._engine is not None:
            with suppress(Exception):
                self._engine.shutdown()


def token_mask(masked: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """The option of a request by which masked tokens are never sampled: whichever of vLLM's two names fewer tokens."""
    if 2 * len(masked) > vocab_size:
        return {"allowed_token_ids": sorted({*range(vocab_size)} - {*masked})}
    return {"logit_bias": dict.fromkeys(masked, -1e30)} if masked else {}


def _written(completion: Any) -> Message:
    """The tokens of an output and the log-prob of each."""
    tokens = list(completion.token_ids)
    pairs = zip(tokens, completion.logprobs or [], strict=True)
    return {"tokens": tokens, "logprobs": [rows[token].logprob for token, rows in pairs]}


def _scores(output: Any) -> list[float | None]:
    """The log-prob of each prompt token; none of the first."""
    rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [None if row is None else row[token].logprob for token, row in rows]


async def serve(told: Channel, actor: Actor) -> None:
    """Take messages until the other end closes or hangs up."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        with suppress(EOFError, OSError):
            while (message := told.receive())["do"] != "close":
                loop.call_soon_threadsafe(actor.take, message)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, name="questions", daemon=True).start()
    await ended.wait()


def main() -> None:
    """Serve the two connections whose file descriptors are the arguments."""
    if os.getpgrp() == os.getpid():
        guard_group()
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the terminal interrupts both; the parent decides when to close
    told, heard = (Channel(socket.socket(fileno=int(number))) for number in sys.argv[1:3])
    actor = Actor(heard)
    with suppress(EOFError, OSError):
        asyncio.run(serve(told, actor))
    closing = threading.Thread(target=actor.shut_down, daemon=True)
    closing.start()
    closing.join(SHUTDOWN_S)
    if actor.temporary:  # a parent that was killed can no longer remove it
        shutil.rmtree(actor.temporary, ignore_errors=True)
    remove_segments(actor.segments)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # whatever vLLM left behind, and this process
    os._exit(0)


if __name__ == "__main__":
    main()
