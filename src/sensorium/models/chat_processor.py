"""From messages and media to tokens and positions, and from sampled tokens back to text. Needs no weights.

A rollout needs nothing else of a model, so it can run in a process that holds none of the weights.
"""

from collections.abc import Iterable, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.models.family import MediaFormat
from sensorium.models.prepared_media import PreparedMedia
from sensorium.models.rendering import ChatRenderer, TokenTable
from sensorium.models.segment_expansion import Layouts
from sensorium.models.segment_layout import Layout
from sensorium.recipe.activations import PATCHES
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Segment, VersionSpan
from sensorium.vocabulary.errors import MediaError


class ChatProcessor:
    """A checkpoint's tokenizer, chat template and media processors, as one.

    ``vocab_size`` is the number of logits. ``stop_ids`` end a response; ``forbidden_ids`` are never sampled. ``prepared``
    keeps at most ``media_bytes`` of preprocessed media.
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
        self.family = family
        self.media_format = media_format
        self.tokenizer = tokenizer
        self.processor = processor
        self.store = store
        self.decoder = decoder or Decoder(store)
        self.modalities = frozenset(["text", *media_format.placeholders])
        self.vocab_size = vocab_size
        self._table = TokenTable(tokenizer, vocab_size, media_format.written_tokens)
        self._renderer = ChatRenderer(tokenizer, self.owner, self._table, media_format)
        self.append_only = self._renderer.append_only
        self.stop_ids = tuple(dict.fromkeys([self._renderer.close_id, *end_ids]))
        special = {*self._table.special.values(), *self._table.unowned, *media_format.placeholders.values()}
        self.forbidden_ids = tuple(sorted(special - {*self.stop_ids, *self._table.written}))
        self.prepared = PreparedMedia(self.decoder, media_format.preprocessors, media_bytes)
        self._layouts = Layouts(media_format, self.prepared)

    @property
    def owner(self) -> Any:
        """What has the chat template: the processor, or the tokenizer of a text model."""
        return self.processor if self.processor is not None else self.tokenizer

    # Tokens.

    def render(self, messages: Sequence[Message], *, generate: bool = True) -> Segment:
        """The first turn; expanded it equals the checkpoint's own ``apply_chat_template``."""
        return self._renderer.render(messages, generate=generate)

    def extend(self, messages: Sequence[Message], *, after: Segment) -> Segment:
        """The next observation after a response (closed if it did not stop by itself), and the generation prompt."""
        closed = bool(after.tokens) and after.tokens[-1] in self.stop_ids
        return self._renderer.extend(messages, closed=closed)

    def render_after_head(self, messages: Sequence[Message]) -> Segment:
        """An observation right after a head ``render([system(…)], generate=False)``, with the generation prompt."""
        return self._renderer.after_head(messages)

    def respond(self, text: str, name: str, version: int = 0) -> Segment:
        """A given answer as a model segment: ends with the stop token, log-probs zero."""
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
        """A model segment from sampled ids, stamped with the policy version that wrote it; the text is read off the ids."""
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
        """The most bytes that one token stands for; of a text in Unicode's form NFC, which tokenizers may put it into."""
        return max(len(self._table.bytes_of(token)) for token in range(self.vocab_size))

    # Positions: placeholders expanded.

    def layout(self, segment: Segment) -> Layout:
        """The segment as the language model sees it, on the CPU; environment segments are cached by content."""
        return self._layouts(segment)

    # Media.

    def shown(self, media: Media) -> Media:
        """The medium as this model is shown it: what its parameters leave open is as the family has it."""
        return media.resolved(self.media_format.frame_rule)

    def unprepared(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media that no layout can be made of yet; refuses those of a kind that the model does not take.

        They are as the model is shown them, and the sounds that are heard with videos among them.
        """
        return self.prepared.unknown(self._parts(media))

    def patches(self, media: Media) -> int:
        """What a tower sees of a medium, in patches: four to a token, as of Qwen's pictures; of others about so many."""
        return PATCHES * self.media_format.expand(self.prepared.extent(media)).count

    def request(self, media: Iterable[Media]) -> None:
        """Begin to decode media that will be prepared later, and return at once."""
        for item in self.prepared.missing(self._parts(media)):
            self.decoder.request(item)

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Preprocess media together, ahead of their layouts: many times cheaper than one by one. In any thread.

        Returns the errors of those that cannot be.
        """
        asked = list(dict.fromkeys(media))
        errors = self.prepared.prepare(self._parts(asked))
        return {item: errors[part] for item in asked for part in self.shown(item).parts[::-1] if part in errors}

    def _parts(self, media: Iterable[Media]) -> list[Media]:
        return [part for item in media for part in self.shown(item).parts]

    def share_media(self, other: "ChatProcessor") -> None:
        """Use another's prepared media, if its checkpoint prepares them alike: then nothing is prepared twice."""
        assert self.decoder is other.decoder, "processors that share media share their decoder"
        if _processing(self.processor) == _processing(other.processor):
            self.prepared = other.prepared
            self._layouts = Layouts(self.media_format, other.prepared)

    def save(self, folder: Path) -> None:
        """The tokenizer, processor and chat template of a Hugging Face checkpoint."""
        self.owner.save_pretrained(folder)


def _processing(processor: Any) -> list[Any]:
    """All settings by which a checkpoint's processors make tower inputs of media."""
    parts = ("image_processor", "video_processor", "feature_extractor")
    return [part.to_dict() for name in parts if (part := getattr(processor, name, None)) is not None]
