"""From a context to what vLLM is given: expanded ids, tower inputs of our own preprocessing, and where features go.

vLLM gets no raw media and no text, so it computes with the same inputs as the learner. On the general path it gets decoded
media beside the ids, because its models take inputs that stock processors do not make: it calls the checkpoint's processor
itself, and a medium for which it writes other tokens is refused (``actor.engine_input``). A fault inside one of its steps
ends the engine for everybody, so every fault of a request is found here. For example, a picture of two by two features
after three tokens of text, then a video of two frames with timestamps (Qwen3-VL):

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
from typing import Any

import numpy as np
import torch
from torch import Tensor

from sensorium.engines.native.response_rows import StopStrings
from sensorium.engines.protocol import Sampling
from sensorium.engines.vllm.actor_process import ActorProcess
from sensorium.engines.vllm.recipe_checks import VllmVersion
from sensorium.engines.weight_group import write_tensors
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.family import MediaFormat
from sensorium.models.general_media import StockExtent
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Layout, Runs, mismatch
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError, EngineLost

MODALITIES: dict[MediaKind, str] = {"picture": "image", "video": "video", "sound": "audio"}
NUDGES = (1.0, 1 + 1e-6, 1 - 1e-6, 1 + 1e-4, 1 - 1e-4)


@dataclass(frozen=True)
class PlacedMedia:
    """A medium in a prompt: vLLM's range of its tokens, and the runs of those that take features."""

    media: Media
    start: int
    length: int
    runs: Runs

    @property
    def mask(self) -> list[bool] | None:
        """For each token of the range whether it takes a feature; None: all do."""
        if self.runs == ((self.start, self.length),):
            return None
        taking = {place for first, count in self.runs for place in range(first, first + count)}
        return [place in taking for place in range(self.start, self.start + self.length)]

    @property
    def features(self) -> int:
        """The number of its features."""
        return sum(count for _, count in self.runs)


@dataclass(frozen=True)
class EnginePrompt:
    """A context as vLLM is given it."""

    ids: tuple[int, ...]
    media: tuple[PlacedMedia, ...]


def lay_out(
    layout_of: Callable[[Segment], Layout],
    extent_of: Callable[[Media], Extent],
    media_format: MediaFormat,
    context: Sequence[Segment],
) -> EnginePrompt:
    """The segments of a context one after the other."""
    ids: list[int] = []
    media: list[PlacedMedia] = []
    for segment in context:
        layout = layout_of(segment)
        for slot in layout.slots:
            extent = extent_of(slot.media)
            if extent.has_sound:
                raise EngineError(
                    f"{slot.media.name} is a video with its sound, and vLLM gives those other positions than the model was "
                    "trained with. Show it without its sound, or use rollout.engine: native."
                )
            moved, expansion = slot.moved(len(ids)), media_format.expand(extent)
            media.append(PlacedMedia(slot.media, moved.start - expansion.runs[0][0], len(expansion.ids), moved.runs))
        ids += layout.ids_T.tolist()
    return EnginePrompt(tuple(ids), tuple(media))


def tower_input(chat: ChatProcessor, media: Media) -> TowerInput:
    """What vLLM is given of a medium: the inputs of the tower, or on the general path its pixels or samples."""
    extent = chat.prepared.extent(media)
    if not isinstance(extent, StockExtent):
        return chat.prepared.get([media])[0]
    decoded: Any = chat.decoder.get(media)
    return TowerInput(torch.from_numpy(np.array(getattr(decoded, "samples", decoded))), extent)


def check_prompt(prompt: EnginePrompt, name: str, vocab_size: int, max_context: int, media_format: MediaFormat) -> None:
    """Refuse what would fail inside a step of vLLM, or be misread silently."""
    ids, length = prompt.ids, len(prompt.ids)
    if not length:
        raise EngineError(f"the context of '{name}' is empty; a request needs at least one token.")
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
    feature_ids: frozenset[int] = getattr(media_format, "feature_ids", frozenset())  # on the general path
    for placed in prompt.media:
        if placed.start < end or placed.start + placed.length > length:
            raise mismatch(placed.media, f"its tokens {placed.start} to {placed.start + placed.length} of {length} overlap")
        end = placed.start + placed.length
        places = [place for first, count in placed.runs for place in range(first, first + count)]
        pads = feature_ids or {media_format.placeholders[placed.media.kind]}
        if any(not placed.start <= place < end or ids[place] not in pads for place in places):
            raise mismatch(placed.media, "its features would be on tokens that are not its placeholders")
        taking.update(places)
    every = feature_ids or {*media_format.placeholders.values()}
    stray = next((i for i, one in enumerate(ids) if one in every and i not in taking), None)
    if stray is not None:  # vLLM would take it as an ordinary token
        raise EngineError(f"token {stray} of the context of '{name}' is a placeholder without a medium.")


def tower_fields(placed: PlacedMedia, given: TowerInput, media_format: Any) -> dict[str, Tensor]:
    """The tensors of one medium under the names of vLLM's models; a wrong number of patches or mel frames is refused."""
    if isinstance(given.extent, StockExtent):
        return {"decoded": given.patches_PC}
    time, height, width = given.extent.grid
    if placed.media.kind == "sound":
        frames = getattr(media_format, "frames", 0)
        longest = min(time + media_format.margin, frames) if frames else time
        if len(given.patches_PC) != longest or placed.features != len(media_format.expand(given.extent).ids):
            raise mismatch(placed.media, f"{len(given.patches_PC)} mel frames of {longest} for {placed.features} features")
        if frames:
            padded_CT = torch.nn.functional.pad(given.patches_PC.T, (0, frames - longest))
            return {"input_features": padded_CT[None], "feature_attention_mask": (torch.arange(frames) < time)[None].long()}
        return {
            "input_audio_features": given.patches_PC.T.contiguous(),
            "audio_feature_lengths": torch.tensor([time]),
            "feature_attention_mask": torch.ones(1, time, dtype=torch.long),
        }
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
    per_second = getattr(media_format, "positions_a_second", getattr(media_format.vision, "tokens_per_second", None))
    if per_second is None:
        return fields | {"timestamps": torch.zeros(1, time)}  # not read: the expanded ids have them as text
    ids_T = torch.tensor(media_format.expand(given.extent).ids)
    steps = media_format.positions(ids_T, [given.extent])[0].reshape(time, -1)[:, 0].tolist()
    return fields | {"second_per_grid_ts": torch.tensor([_step_seconds(steps, per_second, placed.media)])}


def _step_seconds(steps: Sequence[int], per_second: float, media: Media) -> float:
    """Seconds of a temporal patch for which vLLM's formula, which has another precision, gives our positions."""
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
    """Sends requests to one actor, and remembers which media its vLLM has. ``context`` tokens fit into a thread.

    Files for vLLM go to ``folder``, or anywhere on this machine. A response has no time limit; but when there is none for
    ``look_s``, vLLM must give a sign of life within as long again, or it is ended.
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
        """What vLLM writes after a prompt; media that it no longer has are sent again."""
        message = self.message(prompt, sampling, streamed=stops is not None)
        for all_ in (False, True):
            file = self._attach(message, prompt, inputs, all_=all_)
            try:
                answer = await self._follow(message, stops)
            finally:
                _delete(file)
            if not answer.get("unknown"):
                break
        return answer

    async def _follow(self, message: dict[str, Any], stops: StopStrings | None) -> dict[str, Any]:
        """Wait for an answer. With stop strings the tokens come one by one, and the one that completes a string is last."""
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
            while not (waiting.done() or ending.done()):
                both: set[asyncio.Future[Any]] = {waiting, ending}
                done, _ = await asyncio.wait(both, timeout=self._look_s, return_when=asyncio.FIRST_COMPLETED)
                if not done:
                    await self._look()
            if not waiting.done():  # vLLM reports versions only where it ended the response itself
                spans = _spans(versions) if self._version.tells_weight_versions else []
                return {"tokens": tokens, "logprobs": logprobs, "finish": "stop", "versions": spans}
            answer = waiting.result()
            if stops is None or answer.get("unknown"):
                return answer
            part(answer)
            finish, length = "stop" if stopped.is_set() else answer["finish"], len(tokens)
            spans = [[version, start, min(end, length)] for version, start, end in answer["versions"] if start < length]
            return answer | {"tokens": tokens, "logprobs": logprobs, "finish": finish, "versions": spans}
        finally:
            ending.cancel()
            if not waiting.done():
                waiting.cancel()
                actor.tell({"do": "cancel", "request": number})

    async def _look(self) -> None:
        """Ask for a sign of life, for all requests that wait. Without one the actor is ended, and they all fail."""
        if self._looking.acquire(blocking=False):
            try:
                with suppress(EngineLost):
                    await asyncio.to_thread(self.actor.ask, {"do": "look"}, self._look_s)
            finally:
                self._looking.release()

    def message(
        self, prompt: EnginePrompt, sampling: Sampling, *, streamed: bool = False, score: bool = False
    ) -> dict[str, Any]:
        """The message of a request, without its media. ``score``: the prompt's tokens are scored too."""
        return {
            "do": "generate",
            "ids": list(prompt.ids),
            "temperature": sampling.temperature,
            "max_tokens": min(sampling.max_new_tokens, self.context - len(prompt.ids)),
            "stop_tokens": sampling.stop_tokens,
            "streamed": streamed,
            "score": score,
        }

    def _attach(
        self, message: dict[str, Any], prompt: EnginePrompt, inputs: Mapping[Media, TowerInput], *, all_: bool
    ) -> Path | None:
        """Add a prompt's media to a message; the tensors of those that vLLM does not have go into a file."""
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
                "placeholder": self._chat.media_format.placeholders[placed.media.kind],
                "start": placed.start, "length": placed.length, "mask": placed.mask,
            })  # fmt: skip
        file = write_tensors(tensors, "media", self._folder) if tensors else None
        message |= {"media": media, "file": None if file is None else str(file)}
        return file

    def ask_together(self, asked: Sequence[Asked], limit_s: float, all_: bool = False) -> list[dict[str, Any]]:
        """The answers to messages that are sent at once; again with their media if vLLM no longer has them."""
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


def _delete(file: Path | None) -> None:
    if file is not None:
        file.unlink(missing_ok=True)
