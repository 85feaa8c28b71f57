"""The actor: a process that holds vLLM's front end and answers the engine's messages, many at once.

    start      build vLLM                                                  {context}
    generate   sample, and score given tokens                              {tokens, logprobs, finish, versions, scores}
               vLLM no longer has a medium: it must be sent again          {unknown}
    cancel     end a request that nobody waits for any more                no answer
    push       pause, load weights, drop what others computed              {pause_s, load_s}
    lora       pause, replace the adapter, drop what the last one computed  {pause_s, load_s}
    reset      keep nothing of earlier rollouts                            {}
    look       answer if vLLM's core still takes questions                 {}
    close      end

Invariant: weights are never loaded while a request runs, and nothing computed with earlier ones outlives a push.
"""

import asyncio
import os
import shutil
import signal
import tempfile
import threading
import time
from collections.abc import Awaitable, Callable, Coroutine, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensorium.cluster.python_process import (
    Channel,
    Message,
    guard_group,
    mapped_segments,
    parent_sockets,
    plain_error,
    remove_segments,
)
from sensorium.vocabulary.errors import EngineError, EngineLost

PATCHES = {"pixel_values": 0, "pixel_values_videos": 0, "input_audio_features": 1}
"""Numbers for towers, and along which axis those of several media are joined."""
WHOLE = "input_features"  # numbers for a tower, one row for each medium
DECODED = "decoded"  # pixels or samples, which vLLM's own processor makes inputs of


def engine_input(message: Mapping[str, Any], processor: Callable[[], Any]) -> Any:
    """vLLM's input of a request: expanded ids, and for each medium its tensors (None: sent before), hash and range."""
    from safetensors.torch import load_file
    from vllm.inputs import mm_input, tokens_input
    from vllm.multimodal.inputs import PlaceholderRange

    ids: list[int] = message["ids"]
    if not message["media"]:
        return tokens_input(ids)
    stored = load_file(message["file"]) if message["file"] else {}
    items: dict[str, list[Any]] = {}
    hashes: dict[str, list[str]] = {}
    ranges: dict[str, list[Any]] = {}
    for i, medium in enumerate(message["media"]):
        modality = medium["modality"]
        fields = None if medium["fields"] is None else {name: stored[f"{i}.{name}"] for name in medium["fields"]}
        mask = None if medium["mask"] is None else torch.tensor(medium["mask"])
        if fields is not None and DECODED in fields:
            item = _processed(processor(), medium, ids, fields[DECODED])
        else:
            item = None if fields is None else _item(modality, fields)
        items.setdefault(modality, []).append(item)
        hashes.setdefault(modality, []).append(medium["key"])
        ranges.setdefault(modality, []).append(PlaceholderRange(medium["start"], medium["length"], mask))
    return mm_input(ids, items, hashes, ranges)


def _item(modality: str, fields: Mapping[str, Tensor]) -> Any:
    """One medium in vLLM's form: patches and mel frames are flat, all else is one row for each and mostly on the CPU."""
    from transformers import BatchFeature
    from vllm.multimodal.inputs import MultiModalFieldConfig, MultiModalKwargsItems

    config = {
        name: MultiModalFieldConfig.flat_from_sizes(modality, torch.tensor([tensor.shape[PATCHES[name]]]), PATCHES[name])
        if name in PATCHES
        else MultiModalFieldConfig.batched(modality, keep_on_cpu=name != WHOLE)
        for name, tensor in fields.items()
    }
    return MultiModalKwargsItems.from_hf_inputs(BatchFeature(dict(fields)), config)[modality][0]


def _processed(processor: Any, medium: Mapping[str, Any], ids: Sequence[int], decoded: Tensor) -> Any:
    """One medium as vLLM's own processor makes it, where it writes the tokens that the prompt has for it."""
    from PIL import Image

    modality, numbers = medium["modality"], decoded.numpy()
    shown = Image.fromarray(numbers) if modality == "image" else numbers
    made = processor([medium["placeholder"]], processor.info.parse_mm_data({modality: [shown]}))
    (own,) = made["mm_placeholders"][modality]
    mask = None if own.is_embed is None else own.is_embed.tolist()
    theirs = _taking(made["prompt_token_ids"], own.offset, own.length, mask)
    ours = _taking(ids, medium["start"], medium["length"], medium["mask"])
    if ours != theirs:
        place = next((i for i, pair in enumerate(zip(ours, theirs, strict=False)) if pair[0] != pair[1]), len(ours))
        raise EngineError(
            f"vLLM writes other tokens for a medium ({modality}) than the checkpoint's own processor ({len(theirs)}, not "
            f"{len(ours)}; the first difference is token {place}), so it would see another prompt than the one that is "
            "trained. Use rollout.engine: native, or process."
        )
    return made["mm_kwargs"][modality][0]


def _taking(ids: Sequence[int], start: int, length: int, mask: Sequence[bool] | None) -> list[tuple[int, bool]]:
    """The tokens of a medium from the first to the last that takes a feature, and which do."""
    takes = [True] * length if mask is None else list(mask)
    places = [place for place, one in enumerate(takes) if one]
    return [(ids[start + place], takes[place]) for place in range(places[0], places[-1] + 1)]


SHUTDOWN_S = 15.0
LOOK_S = 1.0  # how often to look whether vLLM's core has died while an answer is awaited
LONGEST_SOCKET_FOLDER = 70  # the path of a socket has at most 107 bytes, and vLLM's names have 36


class Actor:
    """vLLM, and the messages that it is answering."""

    def __init__(self, answers: Channel) -> None:
        self._answers = answers
        self.temporary = ""
        self.segments: set[Path] = set()  # of shared memory: vLLM leaves some behind
        self._engine: Any = None
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._adapter: Any = None
        self._version = 0

    def take(self, message: Message) -> None:
        """Begin to answer a message, on the event loop."""
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
        self._answers.send({"id": number, **answer})

    async def _unless_dead(self, work: Coroutine[Any, Any, Message]) -> Message:
        """The result of ``work``. If vLLM's core dies meanwhile, vLLM fails its requests, but answers nothing else."""
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

    async def _start(self, message: Message) -> Message:
        self.temporary = message["temporary"]
        own = os.path.dirname(self.temporary) == tempfile.gettempdir()  # not on a shared disk
        if own and len(self.temporary) <= LONGEST_SOCKET_FOLDER:  # so sockets that vLLM leaves there are removed as well
            os.environ.setdefault("VLLM_RPC_BASE_PATH", self.temporary)
        from vllm.config import WeightTransferConfig
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.v1.engine.async_llm import AsyncLLM

        given = {**message["engine_args"], "weight_transfer_config": WeightTransferConfig(backend=message["backend"])}
        self._stops = message["stops"]
        masked = message["forbidden"]
        self._masks = {
            True: token_mask(masked, message["vocab_size"]),
            False: token_mask([*masked, *self._stops], message["vocab_size"]),
        }
        self._tells_versions = message["tells_versions"]
        self._engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))
        self.segments = mapped_segments(os.getpgrp())
        await self._engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=message["transfer"]))
        return {"context": self._engine.model_config.max_model_len}

    async def _generate(self, message: Message) -> Message:
        prompt = engine_input(message, lambda: self._engine.renderer.get_mm_processor())
        output = None
        stream = self._engine.generate(prompt, self._params(message), f"r{message['id']}", lora_request=self._adapter)
        async for output in stream:
            if message["streamed"] and output.outputs and not output.finished:
                part = {**_written(output.outputs[0]), "version": self._version}
                self._answers.send({"id": message["id"], "part": part})
        if output is None or not output.outputs:
            raise EngineError("vLLM ended a request without an output.")
        written = output.outputs[0]
        if written.finish_reason == "error":
            if any(item["fields"] is None for item in message["media"]):
                return {"unknown": True}
            raise EngineError("vLLM refused a request without a reason; see its log.")
        if written.finish_reason == "abort":
            raise EngineError("vLLM aborted a request that was not withdrawn.")
        spans = getattr(written, "weight_versions", None) or []
        return {
            **_written(written),
            "finish": written.finish_reason,
            "versions": [[span.version, span.start, span.end] for span in spans],
            "scores": _scores(output) if message["score"] else None,
        }

    def _params(self, message: Message) -> Any:
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        return SamplingParams(
            temperature=message["temperature"],
            max_tokens=message["max_tokens"],
            logprobs=0,
            prompt_logprobs=0 if message["score"] else None,
            ignore_eos=True,
            stop_token_ids=self._stops if message["stop_tokens"] else [],
            detokenize=False,
            output_kind=RequestOutputKind.DELTA if message["streamed"] else RequestOutputKind.FINAL_ONLY,
            **self._masks[message["stop_tokens"]],
        )

    async def _push(self, message: Message) -> Message:
        """Load weights. Open requests continue, with keys, values and features of the new weights."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        async def load() -> None:
            await self._engine.start_weight_update()
            await self._engine.update_weights(WeightTransferUpdateRequest(update_info=message["update"]))
            if self._tells_versions:
                await self._engine.finish_weight_update(str(message["version"]))
            else:
                await self._engine.finish_weight_update()

        return await self._replace(load, message["version"])

    async def _lora(self, message: Message) -> Message:
        """Replace the adapter. Open requests continue with the new one: all name it, and vLLM has no other."""
        from vllm.lora.request import LoRARequest

        async def load() -> None:
            if self._adapter is not None:  # vLLM would keep the earlier adapter of a number that it knows
                await self._engine.remove_lora(self._adapter.lora_int_id)
            self._adapter = LoRARequest("policy", 1, message["path"])
            await self._engine.add_lora(self._adapter)
            if self._tells_versions:
                await self._engine.update_weight_version(str(message["version"]))

        return await self._replace(load, message["version"])

    async def _replace(self, load: Callable[[], Awaitable[None]], version: int) -> Message:
        """Pause with all requests kept, load, drop what was computed before, and go on."""
        started = time.perf_counter()
        await self._engine.pause_generation(mode="keep", clear_cache=False)
        paused = time.perf_counter()
        await load()
        await self._forget()
        self._version = version
        # After a failure above the engine stays paused, with weights on the meta device: a request would end it. Only
        # another push, or a new engine, repairs it.
        await self._engine.resume_generation()
        return {"pause_s": paused - started, "load_s": time.perf_counter() - paused}

    async def _reset(self, message: Message) -> Message:
        await self._forget()
        return {}

    async def _look(self, message: Message) -> Message:
        await self._engine.is_sleeping()  # any call that goes to the core and changes nothing
        return {}

    async def _forget(self) -> None:
        """Drop features first, then keys and values, also those of paused requests."""
        await self._engine.reset_encoder_cache()
        await self._engine.reset_prefix_cache(reset_running_requests=True)

    def shut_down(self) -> None:
        """Let vLLM end its processes and release its shared memory."""
        if self._engine is not None:
            with suppress(Exception):
                self._engine.shutdown()


def token_mask(masked: Sequence[int], vocab_size: int) -> dict[str, Any]:
    """The option by which vLLM never samples masked tokens: the one of its two that lists fewer tokens."""
    if 2 * len(masked) > vocab_size:
        return {"allowed_token_ids": sorted({*range(vocab_size)} - {*masked})}
    return {"logit_bias": dict.fromkeys(masked, -1e30)} if masked else {}


def _written(completion: Any) -> Message:
    tokens = list(completion.token_ids)
    pairs = zip(tokens, completion.logprobs or [], strict=True)
    return {"tokens": tokens, "logprobs": [rows[token].logprob for token, rows in pairs]}


def _scores(output: Any) -> list[float | None]:
    """The log-prob of each prompt token; None for the first."""
    rows = zip(output.prompt_token_ids, output.prompt_logprobs, strict=True)
    return [None if row is None else row[token].logprob for token, row in rows]


async def serve(questions: Channel, actor: Actor) -> None:
    """Take messages until the other end closes or hangs up."""
    loop, ended = asyncio.get_running_loop(), asyncio.Event()

    def read() -> None:
        with suppress(EOFError, OSError):
            while (message := questions.receive())["do"] != "close":
                loop.call_soon_threadsafe(actor.take, message)
        loop.call_soon_threadsafe(ended.set)

    threading.Thread(target=read, name="questions", daemon=True).start()
    await ended.wait()


def main() -> None:
    """Serve the two connections whose file descriptors are the arguments."""
    if os.getpgrp() == os.getpid():
        guard_group()
    questions, answers = map(Channel, parent_sockets())
    actor = Actor(answers)
    with suppress(EOFError, OSError):
        asyncio.run(serve(questions, actor))
    closing = threading.Thread(target=actor.shut_down, daemon=True)
    closing.start()
    closing.join(SHUTDOWN_S)
    if actor.temporary:  # a parent that was killed can no longer remove it
        shutil.rmtree(actor.temporary, ignore_errors=True)
    remove_segments(actor.segments)
    if os.getpgrp() == os.getpid():
        os.killpg(os.getpid(), signal.SIGKILL)  # whatever vLLM has left running, and this process
    os._exit(0)


if __name__ == "__main__":
    main()
