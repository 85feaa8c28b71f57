"""From messages and media to tokens and positions, and from sampled tokens back to text. Needs no weights.

It is all that a rollout needs of a model, so rollouts can run in processes without weights.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sensorium.data.decoder import Decoder
from sensorium.data.lru import LRU
from sensorium.data.media_store import MediaStore
from sensorium.models.family import HearsInVideo, MediaFormat
from sensorium.models.prepared_media import Extent, PreparedMedia
from sensorium.models.rendering import ChatRenderer, TokenTable
from sensorium.models.segment_layout import Layout, Slot, mismatch
from sensorium.recipe.memory_estimate import PATCHES
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Segment, VersionSpan
from sensorium.vocabulary.errors import MediaError, SpanMismatch

TOKENS_KEPT = 1 << 22  # expanded tokens whose layouts are cached: 128 MiB of ids and positions
SHAPES_KEPT = 4096


class Layouts:
    """Layouts of segments, on the CPU. Those of environment segments are cached by content: a group shares them."""

    def __init__(self, media_format: MediaFormat, media: PreparedMedia) -> None:
        self._format, self._media = media_format, media
        self._known: LRU[str, Layout] = LRU(TOKENS_KEPT, len)
        self._shapes: LRU[tuple[Any, ...], Tensor] = LRU(SHAPES_KEPT)

    def __call__(self, segment: Segment) -> Layout:
        if segment.author == "model":
            return self._lay_out(segment)
        layout = self._known.get(segment.key)
        if layout is None:
            layout = self._lay_out(segment)
            self._known.put(segment.key, layout)
        return layout

    @torch.inference_mode(False)  # cached tensors must also serve training
    def _lay_out(self, segment: Segment) -> Layout:
        check_spans(segment, self._format)
        if not segment.media:
            length = len(segment.tokens)
            steps_T = torch.arange(length)
            return Layout(torch.tensor(segment.tokens, dtype=torch.long), steps_T.expand(3, -1), length, steps_T, ())
        ids: list[int] = []
        ends: list[int] = []
        slots: list[Slot] = []
        extents: list[Extent] = []
        media = {span.index: span.media for span in segment.media}
        for i, token in enumerate(segment.tokens):
            if i not in media:
                ids.append(token)
            else:
                extents.append(self._media.extent(media[i]))
                if extents[-1].has_sound:  # laid out with its sound, whose placeholder comes next
                    ends.append(len(ids))
                    continue
                if media[i].kind == "sound" and len(extents) > 1 and extents[-2].has_sound:
                    assert isinstance(self._format, HearsInVideo), "rendering refuses what the family cannot take"
                    expanded, seen, heard = self._format.interleave(extents[-2], extents[-1])
                    parts = [Slot(media[i - 1], seen), Slot(media[i], heard)]
                else:
                    expansion = self._format.expand(extents[-1])
                    expanded, parts = expansion.ids, [Slot(media[i], expansion.runs)]
                slots += [slot.moved(len(ids)) for slot in parts]
                ids += expanded
            ends.append(len(ids) - 1)
        ids_T = torch.tensor(ids, dtype=torch.long)
        # Positions depend only on where media are and how large they are; prompts of the same shape share them.
        shape = (len(ids), tuple(slot.runs for slot in slots), tuple(extents))
        positions_3T = self._shapes.get(shape)
        if positions_3T is None:
            positions_3T = self._format.positions(ids_T, extents)
            self._shapes.put(shape, positions_3T)
        # From the last token, which is text, and not from the largest: a video may reach beyond what follows it.
        return Layout(ids_T, positions_3T, int(positions_3T[0, -1]) + 1, torch.tensor(ends), tuple(slots))


def check_spans(segment: Segment, media_format: MediaFormat) -> None:
    """Refuse a span that misses its placeholder, and a placeholder without a medium."""
    placeholders = media_format.placeholders
    spans = {span.index: span.media for span in segment.media}
    for i, item in spans.items():
        if not 0 <= i < len(segment.tokens) or segment.tokens[i] != placeholders.get(item.kind):
            raise mismatch(item, f"its span points at token {i}, which is no placeholder of a {item.kind}")
    stray = [i for i, token in enumerate(segment.tokens) if token in placeholders.values() and i not in spans]
    if stray:
        raise SpanMismatch(f"token {stray[0]} of a segment by the {segment.author} is a placeholder without a medium.")


class ChatProcessor:
    """A checkpoint's tokenizer, chat template and media processors.

    ``vocab_size`` is the number of logits. ``stop_ids`` end a response; ``forbidden_ids`` are never sampled. ``prepared``
    caches at most ``media_bytes`` of preprocessed media.
    """

    def __init__(
        self,
        family: str,
        media_format: MediaFormat,
        tokenizer: Any,
        processor: Any,
        store: MediaStore,
        *,
        vocab_size: int,
        end_ids: Sequence[int] = (),
        decoder: Decoder | None = None,
        media_bytes: int = 1 << 29,
    ) -> None:
        self.family, self.media_format, self.vocab_size = family, media_format, vocab_size
        self.tokenizer, self.processor = tokenizer, processor
        self.store, self.decoder = store, decoder or Decoder(store)
        self._table = TokenTable(tokenizer, vocab_size, media_format.written_tokens)
        self._renderer = ChatRenderer(tokenizer, self.owner, self._table, media_format)
        self.append_only = self._renderer.append_only
        self.one_turn = bool(getattr(media_format, "one_turn", False))  # a thread holds no second turn
        self.stop_ids = tuple(dict.fromkeys([self._renderer.close_id, *end_ids]))
        features = (*media_format.placeholders.values(), *getattr(media_format, "feature_ids", ()))
        special = {*self._table.special.values(), *self._table.unowned, *features}
        self.forbidden_ids = tuple(sorted(special - {*self.stop_ids, *self._table.written}))
        self.prepared = PreparedMedia(self.decoder, media_format.preprocessors, media_bytes)
        self._layouts = Layouts(media_format, self.prepared)

    @property
    def modalities(self) -> frozenset[str]:
        """What a message may hold: text, and kinds of media."""
        return frozenset(["text", *self.media_format.placeholders])

    @property
    def owner(self) -> Any:
        """The processor, or the tokenizer of a text model: whichever has the chat template."""
        return self.processor if self.processor is not None else self.tokenizer

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> Segment:
        """The first turn; expanded it equals the checkpoint's own ``apply_chat_template``."""
        return self._renderer.render(messages, generate=generate)

    def extend(self, messages: Sequence[Message], *, after: Segment) -> Segment:
        """The next observation after a response, which is closed first if it did not stop by itself."""
        closed = bool(after.tokens) and after.tokens[-1] in self.stop_ids
        if (
            closed and self._renderer.shared_close
        ):  # the next turn's mark stands already, unless another token ended this one
            closed = after.tokens[-1] == self._renderer.extend(messages, closed=False).tokens[0]
        return self._renderer.extend(messages, closed=closed)

    def render_after_head(self, messages: Sequence[Message]) -> Segment:
        """An observation right after a head ``render([system(…)], generate=False)``, with the generation prompt."""
        return self._renderer.after_head(messages)

    def respond(self, text: str, name: str, version: int = 0) -> Segment:
        """A given answer as a model segment: ends with the stop token, log-probs are zero."""
        tokens = (*self._renderer.encode_answer(text), self._renderer.close_id)
        zeros = (0.0,) * len(tokens)
        return self.written(tokens, zeros, zeros, name, version)

    def written(
        self,
        tokens: Sequence[int],
        logprobs: Sequence[float],
        sampled_logprobs: Sequence[float],
        name: str,
        version: int = 0,
        versions: tuple[VersionSpan, ...] = (),
    ) -> Segment:
        """A model segment of sampled ids, with their text and the policy version that sampled them."""
        text, byte_ends = self._table.read(tokens)
        return Segment(
            author="model",
            tokens=tuple(tokens),
            text=text,
            logprobs=tuple(logprobs),
            sampled_logprobs=tuple(sampled_logprobs),
            byte_ends=byte_ends,
            policy_version=version,
            name=name,
            versions=versions,
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; nothing for special tokens."""
        return self._table.bytes_of(token)

    @cached_property
    def longest_token(self) -> int:
        """The most bytes of one token, for texts in Unicode's form NFC, which tokenizers may convert to."""
        return max(len(self._table.bytes_of(token)) for token in range(self.vocab_size))

    def layout(self, segment: Segment) -> Layout:
        """The segment as the language model sees it, on the CPU; environment segments are cached by content."""
        return self._layouts(segment)

    def shown(self, media: Media) -> Media:
        """The medium as this model sees it: the family decides what its parameters leave open."""
        return media.resolved(self.media_format.frame_rule)

    def unprepared(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media, as the model sees them, whose extent is not known yet, and the sounds of videos.

        Those of a kind that the model does not take are refused.
        """
        return self.prepared.unknown(self._parts(media))

    def patches(self, media: Media) -> int:
        """The size of a medium in patches: four to a token, as Qwen's pictures have; an estimate for other families."""
        return PATCHES * self.media_format.expand(self.prepared.extent(media)).count

    def request(self, media: Iterable[Media]) -> None:
        """Start decoding media that will be prepared later, and return at once."""
        for item in self.prepared.missing(self._parts(media)):
            self.decoder.request(item)

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Preprocess media together, ahead of their layouts, which is much cheaper than one by one. In any thread.

        Returns the errors of those that fail.
        """
        asked = list(dict.fromkeys(media))
        errors = self.prepared.prepare(self._parts(asked))
        return {item: errors[part] for item in asked for part in self.shown(item).parts[::-1] if part in errors}

    def _parts(self, media: Iterable[Media]) -> list[Media]:
        return [part for item in media for part in self.shown(item).parts]

    def share_media(self, other: "ChatProcessor") -> None:
        """Use another's prepared media, if its checkpoint prepares them alike: then nothing is prepared twice."""
        assert self.decoder is other.decoder, "processors that share media share their decoder"
        names = ("image_processor", "video_processor", "feature_extractor")
        mine, others = (
            [part.to_dict() for name in names if (part := getattr(chat.processor, name, None)) is not None]
            for chat in (self, other)
        )
        if mine == others:
            self.prepared = other.prepared
            self._layouts = Layouts(self.media_format, other.prepared)

    def save(self, folder: Path) -> None:
        """The tokenizer, processor and chat template of a Hugging Face checkpoint."""
        self.owner.save_pretrained(folder)
