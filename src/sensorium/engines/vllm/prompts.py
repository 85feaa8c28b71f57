"""From a context to what vLLM is given: expanded ids, tower inputs of our own preprocessing, and where features go.

vLLM is given no raw media and no text, so what it computes with is what the learner computes with. A fault inside one of
its steps ends the engine for everybody, so whatever is wrong with a request is found here. For example, a picture of two
by two features after three tokens of text, then a video of two frames with timestamps (Qwen3-VL):

    ids    7 7 7 P P P P 7 s t M V V V V m t M V V V V m 7       P, V: pads; s, t, M, m: text and marks of the video
    media  picture  start 3   length 4    mask None              every token of its range takes a feature
           video    start 9   length 14   mask of the eight V    vLLM's range is the whole expansion
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from sensorium.models.family import MediaFormat
from sensorium.models.prepared_media import Extent, TowerInput
from sensorium.models.segment_layout import Layout, Runs, Slot, mismatch
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import EngineError

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
