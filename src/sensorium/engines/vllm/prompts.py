"""From a context to what vLLM is given: expanded ids, tower inputs of our own preprocessing, and where features go.

vLLM is given no raw media and no text, so what it computes with is what the learner computes with. A fault inside one of
its steps ends the engine for everybody, so whatever is wrong with a request is found here. For example, a picture of two
by two features after three tokens of text, then a video of two frames with timestamps (Qwen3-VL):

    ids    7 7 7 P P P P 7 s t M V V V V m t M V V V V m 7       P, V: pads; s, t, M, m: text and marks of the video
    media  picture  start 3   length 4    mask None              every token of its range takes a feature
           video    start 9   length 14   mask of the eight V    vLLM's range is the whole expansion
"""

import asyncio
import threading
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor

from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.protocol import Sampling
from sensorium.engines.vllm.actor_process import ActorProcess
from sensorium.engines.vllm.recipe_checks import VllmVersion
from sensorium.engines.weight_group import write_tensors
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.family import MediaFormat
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Layout, Runs, Slot, mismatch
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, EngineLost

MODALITIES: dict[MediaKind, str] = {"picture": "image", "video": "video"}
NUDGES = (1.0, 1 + 1e-6, 1 - 1e-6, 1 + 1e-4, 1 - 1e-4)


@dataclass(frozen=True)
class PlacedMedia:
    """A medium in a prompt: vLLM's range of its tokens, and which of them take features (None: all)."""

    media: Media
    start: int
    length: int
    runs: Runs

    @property
    def mask(self) -> list[bool] | None:
        """For each token of the range whether it takes a feature."""
        if self.runs == ((self.start, self.length),):
            return None
        taking = {place for first, count in self.runs for place in range(first, first + count)}
        return [place in taking for place in range(self.start, self.start + self.length)]

    @property
    def features(self) -> int:
        """How many features it takes."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class EnginePrompt:
    """A context as vLLM is given it."""

    ids: tuple[int, ...]
    media: tuple[PlacedMedia, ...]


class LayoutSource(Protocol):
    """What lays out segments and knows the extents of media: a chat processor, or a probe of its own."""

    def layout(self, segment: Segment) -> Layout: ...

    def extent(self, media: Media) -> Extent: ...


def lay_out(source: LayoutSource, media_format: MediaFormat, context: Sequence[Segment]) -> EnginePrompt:
    """The segments of a context one after the other."""
    ids: list[int] = []
    media: list[PlacedMedia] = []
    for segment in context:
        layout = source.layout(segment)
        media += [_placed(slot.moved(len(ids)), media_format, source.extent) for slot in layout.slots]
        ids += layout.ids_T.tolist()
    return EnginePrompt(tuple(ids), tuple(media))


def _placed(slot: Slot, media_format: MediaFormat, extent: Callable[[Media], Extent]) -> PlacedMedia:
    expansion = media_format.expand(extent(slot.media))
    return PlacedMedia(slot.media, slot.start - expansion.runs[0][0], len(expansion.ids), slot.runs)


def check_prompt(
    prompt: EnginePrompt, name: str, vocab_size: int, max_context: int, placeholders: Mapping[MediaKind, int]
) -> None:
    """Refuse what would fail inside a step of vLLM, or be taken for something else without a word."""
    ids, length = prompt.ids, len(prompt.ids)
    if not length:
        raise EngineError(f"the context of '{name}' is empty; a request needs a token at least.")
    if length >= max_context:
        raise EngineError(
            f"the context of '{name}' has {length} tokens and this engine holds {max_context}, response included. Shorten "
            "it, or raise the engine's max_context."
        )
    strange = next((one for one in ids if type(one) is not int or not 0 <= one < vocab_size), None)
    if strange is not None:
        raise EngineError(f"the context of '{name}' holds {strange!r}, which is no id of a vocabulary of {vocab_size}.")
    end = 0
    taking: set[int] = set()
    for placed in prompt.media:
        if placed.media.kind not in MODALITIES:
            raise EngineError(f"{placed.media.kind} {placed.media.name}: the engine vllm takes text, pictures and videos.")
        if placed.start < end or placed.start + placed.length > length:
            raise mismatch(placed.media, f"its tokens {placed.start} to {placed.start + placed.length} of {length} overlap")
        end = placed.start + placed.length
        places = [place for first, count in placed.runs for place in range(first, first + count)]
        pad = placeholders[placed.media.kind]
        if any(not placed.start <= place < end or ids[place] != pad for place in places):
            raise mismatch(placed.media, "its features would stand on tokens that are no placeholders of it")
        taking.update(places)
    pads = set(placeholders.values())
    stray = next((i for i, one in enumerate(ids) if one in pads and i not in taking), None)
    if stray is not None:  # vLLM would take it for an ordinary token
        raise EngineError(f"token {stray} of the context of '{name}' is a placeholder without a medium.")


def tower_fields(placed: PlacedMedia, given: TowerInput, media_format: Any) -> dict[str, Tensor]:
    """The tensors of one medium under the names of vLLM's models; a number of patches that does not fit is refused."""
    time, height, width = given.extent.grid
    merged = media_format.vision.spatial_merge_size**2
    if len(given.patches_PC) != time * height * width or placed.features * merged != len(given.patches_PC):
        raise mismatch(
            placed.media,
            f"{len(given.patches_PC)} patches of a grid {time}×{height}×{width} for {placed.features} features",
        )
    grid = torch.tensor([[time, height, width]])
    if placed.media.kind == "picture":
        return {"pixel_values": given.patches_PC, "image_grid_thw": grid}
    fields = {"pixel_values_videos": given.patches_PC, "video_grid_thw": grid}
    per_second = getattr(media_format.vision, "tokens_per_second", None)
    if per_second is None:
        return fields | {"timestamps": torch.zeros(1, time)}  # not read: the expanded ids have them as text
    steps = media_format.blocks(given.extent)[0][0].reshape(time, -1)[:, 0].tolist()
    return fields | {"second_per_grid_ts": torch.tensor([_step_seconds(steps, per_second, placed.media)])}


def _step_seconds(steps: Sequence[int], per_second: float, media: Media) -> float:
    """Seconds of a temporal patch from which vLLM's formula gives our positions: it multiplies in other precision."""
    last = len(steps) - 1
    exact = steps[last] / last / per_second if last else 0.0
    guesses = [exact, (steps[last] + 0.5) / last / per_second if last else 0.0]
    for seconds in (guess * nudge for guess in guesses for nudge in NUDGES):
        held = torch.tensor(seconds).item()  # vLLM gets a float32
        if [int(k * (held * per_second)) for k in range(len(steps))] == list(steps):
            return seconds
    raise EngineError(f"{media.kind} {media.name}: no length of a frame gives its positions in vLLM; use engine native.")


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
