"""A model that answers many at once: its engine runs in a thread with an event loop of its own.

Requests come from the server's loop. The engine batches all that are open; they join and leave the batch between tokens. A
client that stops waiting withdraws its request. A repeated prompt is computed once (prefix cache). Text is tokenized in
threads of its own, so that no answer waits for it, and only if the tokens can fit: a token has a bounded number of bytes,
so 10 MB of text cannot be 8,192 tokens, which is known without counting them.
"""

import asyncio
import itertools
import unicodedata
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any

from sensorium.cluster.event_loop import LoopThread
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Request, Sampling, response_key
from sensorium.models.policy import Policy
from sensorium.rollout.live import Preparation, media_of
from sensorium.services.application import Refusal
from sensorium.services.chat import Choice
from sensorium.vocabulary.content import Message
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import SensoriumError

# Receives further tokens of a choice and their log-probs, in the engine's thread.
Heard = Callable[[Choice, Sequence[int], Sequence[float]], None]
RENDERERS = 4  # threads that tokenize: short texts pass a long one, which takes seconds


@dataclass(frozen=True)
class Prompt:
    """A rendered conversation, and its tokens as the language model sees them."""

    segment: Segment
    tokens: tuple[int, ...]


async def _refusing(work: "asyncio.Future[Any]") -> Any:
    """The result of work on a request; an error in the request refuses it."""
    try:
        return await work
    except SensoriumError as error:
        raise Refusal(400, str(error)) from error


class ModelHost:
    """A policy, its engine, and the thread they work in. ``most_context`` bounds prompt and answer together."""

    def __init__(self, policy: Policy, most_context: int, max_rows: int = 256) -> None:
        self.policy, self.chat = policy, policy.chat
        self.most_context = min(most_context, policy.model.config.get_text_config().max_position_embeddings)
        self.engine = NativeEngine(policy, lockstep=False, max_context=self.most_context, max_rows=max_rows)
        self._ready = Preparation(self.chat)
        self._renderers = ThreadPoolExecutor(RENDERERS, "renderer")
        self._numbers = itertools.count()
        self._thread = LoopThread("engine")

    async def prompt(self, messages: Sequence[Message]) -> Prompt:
        """Messages rendered and their media prepared; refused where they leave no room for an answer."""
        loop = asyncio.get_running_loop()
        segment: Segment = await _refusing(loop.run_in_executor(self._renderers, self._rendered, messages))

        async def prepared() -> Prompt:
            await self._ready(span.media for span in segment.media)
            tokens = tuple(self.chat.layout(segment).ids_T.tolist())
            self._refuse_long(len(tokens))
            return Prompt(segment, tokens)

        prompt: Prompt = await self._there(prepared())
        return prompt

    async def answer(
        self, prompt: Prompt, sampling: Sampling, seed: int, count: int, heard: Heard | None = None
    ) -> list[Choice]:
        """``count`` answers to a prompt, sampled by a seed. ``heard`` gets their tokens as they are written."""
        room = self.most_context - len(prompt.tokens)
        sampling = replace(sampling, max_new_tokens=min(room, sampling.max_new_tokens))

        async def answers() -> list[Choice]:
            async with asyncio.TaskGroup() as group:
                tasks = [group.create_task(self._one(prompt, sampling, seed, index, heard)) for index in range(count)]
            return [task.result() for task in tasks]

        found: list[Choice] = await self._there(answers())
        return found

    def close(self) -> None:
        self._renderers.shutdown(wait=False, cancel_futures=True)
        self._thread.close(30)
        self.engine.close()
        self.chat.decoder.close()

    async def _there(self, work: Any) -> Any:
        return await _refusing(asyncio.wrap_future(self._thread.submit(work)))

    def _rendered(self, messages: Sequence[Message]) -> Segment:
        """Messages as tokens, where these can fit."""
        for medium in media_of(messages):
            if medium.kind not in self.chat.modalities:
                able = ", ".join(sorted(self.chat.modalities))
                raise Refusal(400, f"this model takes no {medium.kind}; it takes {able}.")
        characters = sum(len(message.text) for message in messages)
        if 4 * characters > self.most_context * self.chat.longest_token:  # it may be too long: look closer
            texts = (unicodedata.normalize("NFC", message.text) for message in messages)
            size = sum(len(text.encode("utf-8", "surrogatepass")) for text in texts)
            self._refuse_long(size // self.chat.longest_token, "at least ")
        segment = self.chat.render(messages)
        self._refuse_long(len(segment.tokens))
        return segment

    def _refuse_long(self, count: int, least: str = "") -> None:
        if count >= self.most_context:
            raise Refusal(
                400, f"the prompt has {least}{count} tokens and this server holds {self.most_context} with the answer."
            )

    async def _one(self, prompt: Prompt, sampling: Sampling, seed: int, index: int, heard: Heard | None) -> Choice:
        number = next(self._numbers)
        thread, choice = f"request {number}", Choice(index)
        request = Request(thread, (prompt.segment,), sampling, (number,), response_key(seed, 0, "serve", index, 0), thread)
        watching = asyncio.create_task(self._watch(thread, choice, heard)) if heard is not None else None
        try:
            response = await self.engine.generate(request)
        finally:
            self.engine.release(thread)
            if watching is not None:
                watching.cancel()
        new = len(choice.tokens)
        choice.tokens, choice.logprobs = list(response.segment.tokens), list(response.segment.logprobs)
        choice.finish = response.finish
        if heard is not None:
            heard(choice, choice.tokens[new:], choice.logprobs[new:])
        return choice

    async def _watch(self, thread: str, choice: Choice, heard: Heard) -> None:
        """Report new tokens after each tick; the engine yields then."""
        while True:
            tokens, logprobs = self.engine.written_so_far(thread)
            new = len(choice.tokens)
            if len(tokens) > new:
                choice.tokens, choice.logprobs = list(tokens), list(logprobs)
                heard(choice, choice.tokens[new:], choice.logprobs[new:])
            await asyncio.sleep(0)
