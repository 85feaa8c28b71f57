"""Requests to the actor: their messages, the media that go with them, and the answers."""

import asyncio
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch import Tensor

from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.protocol import Sampling
from sensorium.engines.tensor_files import write_tensors
from sensorium.engines.vllm.actor_process import ActorProcess
from sensorium.engines.vllm.prompts import MODALITIES, EnginePrompt, tower_fields
from sensorium.engines.vllm.versions import VllmVersion
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.prepared_media import TowerInput
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import EngineError, EngineLost

Asked = tuple[dict[str, Any], EnginePrompt, Mapping[Media, TowerInput]]
"""A message, and the prompt and tower inputs that go with it."""


class RequestSender:
    """Sends requests to one actor, and remembers which media its vLLM was sent. ``context`` tokens fit into a thread.

    Files for vLLM go to ``folder``, or anywhere on this machine. A response may take as long as it likes; but when there is
    none for ``look_s``, vLLM must give a sign of life within as long again, or it is ended.
    """

    def __init__(
        self,
        chat: ChatProcessor,
        version: VllmVersion,
        actor: ActorProcess,
        context: int,
        folder: Path | None = None,
        *,
        look_s: float = 600.0,
    ) -> None:
        self.actor, self.context = actor, context
        self._chat, self._version, self._folder = chat, version, folder
        self._look_s, self._looking = look_s, threading.Lock()
        self._held: set[str] = set()

    async def sample(
        self,
        prompt: EnginePrompt,
        inputs: Mapping[Media, TowerInput],
        sampling: Sampling,
        stops: StopStrings | None = None,
    ) -> dict[str, Any]:
        """What vLLM writes after a prompt; media that it no longer holds are sent again."""
        file = None
        try:
            message = self.message(prompt, sampling, streamed=stops is not None)
            file = self._attach(message, prompt, inputs, all_=False)
            answer = await self._follow(message, stops)
            if answer.get("unknown"):
                _delete(file)
                file = self._attach(message, prompt, inputs, all_=True)
                answer = await self._follow(message, stops)
        finally:
            _delete(file)
        return answer

    async def _follow(self, message: dict[str, Any], stops: StopStrings | None) -> dict[str, Any]:
        """Wait for an answer. Where there are stop strings the tokens come one by one, and the first to end one is last."""
        actor = self.actor
        loop, stopped = asyncio.get_running_loop(), asyncio.Event()
        tokens: list[int] = []
        logprobs: list[float] = []
        versions: list[int] = []

        def part(given: dict[str, Any]) -> None:
            for token, logprob in zip(given["tokens"], given["logprobs"], strict=True):
                if not stopped.is_set():
                    tokens.append(token)
                    logprobs.append(logprob)
                    versions.append(given.get("version", 0))
                    if stops is not None and stops.feed(self._chat.token_bytes(token)):
                        stopped.set()

        number, future = actor.submit(message, lambda given: loop.call_soon_threadsafe(part, given))
        waiting = asyncio.wrap_future(future)
        ending = asyncio.ensure_future(stopped.wait())
        try:
            while not await _first_done(waiting, ending, within_s=self._look_s):
                await self._look()
            if not waiting.done():  # vLLM tells versions only of what it ended itself
                told = _spans(versions) if self._version.tells_weight_versions else []
                return {"tokens": tokens, "logprobs": logprobs, "finish": "stop", "versions": told}
            answer = waiting.result()
            if stops is None or answer.get("unknown"):
                return answer
            part(answer)
            finish, length = "stop" if stopped.is_set() else answer["finish"], len(tokens)
            told = [[version, start, min(end, length)] for version, start, end in answer["versions"] if start < length]
            return answer | {"tokens": tokens, "logprobs": logprobs, "finish": finish, "versions": told}
        finally:
            ending.cancel()
            if not waiting.done():
                waiting.cancel()
                actor.tell({"do": "cancel", "request": number})

    async def _look(self) -> None:
        """Ask for a sign of life, for all requests that wait. Without one the actor is ended, which they all hear."""
        if self._looking.acquire(blocking=False):
            try:
                with suppress(EngineLost):
                    await asyncio.to_thread(self.actor.ask, {"do": "look"}, self._look_s)
            finally:
                self._looking.release()

    def message(
        self, prompt: EnginePrompt, sampling: Sampling, *, streamed: bool = False, score: bool = False
    ) -> dict[str, Any]:
        return {
            "do": "generate",
            "ids": prompt.ids,
            "temperature": sampling.temperature,
            "max_tokens": min(sampling.max_new_tokens, self.context - len(prompt.ids)),
            "stop_tokens": sampling.stop_tokens,
            "streamed": streamed,
            "score": score,
        }

    def _attach(
        self, message: dict[str, Any], prompt: EnginePrompt, inputs: Mapping[Media, TowerInput], *, all_: bool
    ) -> Path | None:
        """Add a prompt's media to a message; the tensors of those that vLLM does not hold go into a file."""
        tensors: dict[str, Tensor] = {}
        media = []
        for i, placed in enumerate(prompt.media):
            fields = None
            if all_ or placed.media.key not in self._held:
                given = tower_fields(placed, inputs[placed.media], self._chat.media_format)
                tensors |= {f"{i}.{name}": tensor for name, tensor in given.items()}
                fields = list(given)
                self._held.add(placed.media.key)
            media.append({
                "modality": MODALITIES[placed.media.kind], "key": placed.media.key, "fields": fields,
                "start": placed.start, "length": placed.length, "mask": placed.mask,
            })  # fmt: skip
        file = write_tensors(tensors, "media", self._folder) if tensors else None
        message |= {"media": media, "file": None if file is None else str(file)}
        return file

    def ask_together(self, asked: Sequence[Asked], limit_s: float, all_: bool = False) -> list[dict[str, Any]]:
        """The answers to messages that are sent at once; again with their media if vLLM does not hold them any more."""
        files = [self._attach(message, prompt, inputs, all_=all_) for message, prompt, inputs in asked]
        try:
            answers = self.actor.ask_all([message for message, _, _ in asked], limit_s)
        finally:
            for file in files:
                _delete(file)
        if not any(answer.get("unknown") for answer in answers):
            return answers
        if all_:
            raise EngineError("vLLM does not keep media long enough to read them.")
        return self.ask_together(asked, limit_s, all_=True)


def _spans(versions: Sequence[int]) -> list[list[int]]:
    """Which version wrote which tokens, given that of each token: 3 3 4 are [[3, 0, 2], [4, 2, 3]]."""
    starts = [i for i, one in enumerate(versions) if not i or one != versions[i - 1]]
    return [[versions[start], start, end] for start, end in zip(starts, [*starts[1:], len(versions)], strict=True)]


async def _first_done(*waiting: asyncio.Future[Any], within_s: float) -> bool:
    """True as soon as one is done; False if none is in time."""
    done, _ = await asyncio.wait(waiting, timeout=within_s, return_when=asyncio.FIRST_COMPLETED)
    return bool(done)


def _delete(file: Path | None) -> None:
    if file is not None:
        file.unlink(missing_ok=True)
