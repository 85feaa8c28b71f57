"""A loaded model in parts: rendering, layout, tower, language model and head as separate calls.

The parts are stock transformers modules. The loop over the decoder layers is written here rather than taken from the
library, so that attention, deepstack features and recomputation are the caller's, without hooks or masks on the side.
"""

from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sensorium.media.decoder import Decoder
from sensorium.media.store import MediaStore
from sensorium.models.attention import Attention
from sensorium.models.counts import MediaCounts, count_media
from sensorium.models.encoding import Counters, Encoder
from sensorium.models.family import Family, group_of
from sensorium.models.features import PreparedMedia
from sensorium.models.fused import DecoderLayer, fused_layers
from sensorium.models.laying_out import Layouts
from sensorium.models.layout import Features, Layout, Placement
from sensorium.models.lora import FOLDER, Adapters
from sensorium.models.quiet import quiet
from sensorium.models.recomputing import recompute_blocks
from sensorium.models.rendering import ChatRenderer
from sensorium.models.routing import routers_of, watched
from sensorium.models.tokens import TokenTable
from sensorium.vocabulary.content import Media, Message
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import MediaError, ModelError, SpanMismatch


class Policy:
    """A model that is sampled from and trained. ``version`` counts the updates it has had.

    ``adapters`` are low-rank ones inside the model; where there are any, nothing else is trained. ``media_bytes`` bounds
    the preprocessed media that are kept.
    """

    def __init__(
        self,
        family: str,
        adapter: Family,
        model: Any,
        tokenizer: Any,
        processor: Any,
        store: MediaStore,
        adapters: Adapters | None = None,
        decoder: Decoder | None = None,
        media_bytes: int = 1 << 29,
    ) -> None:
        self.family = family
        self.adapter = adapter
        self.model = model
        self.tokenizer = tokenizer
        self.processor = processor
        self.store = store
        self.adapters = adapters
        self.version = 0
        self.modalities = frozenset(["text", *adapter.placeholders])
        self.vocab_size: int = adapter.head.weight.shape[0]
        self._table = TokenTable(tokenizer, self.vocab_size)
        owner = processor if processor is not None else tokenizer
        self._renderer = ChatRenderer(tokenizer, owner, self._table, adapter.placeholders)
        self.append_only = self._renderer.append_only
        self.stop_ids = _stop_ids(model, tokenizer, self._renderer.close_id)
        special = {*self._table.special.values(), *self._table.unowned, *adapter.placeholders.values()}
        self.forbidden_ids = tuple(sorted(special - set(self.stop_ids)))
        self.decoder = decoder or Decoder(store)
        self._media = PreparedMedia(self.decoder, adapter.preprocessors, media_bytes)
        self._encoder = Encoder(adapter, self._media, self.device)
        self._layouts = Layouts(adapter, self._media)
        self._recompute = False
        self._fused: list[DecoderLayer] | None = None
        self.groups()  # refuses a parameter that belongs to none
        _refuse_sliding_window(adapter.language_model.config)

    @property
    def counters(self) -> Counters:
        """What the towers did so far."""
        self._encoder.counters.preprocessed = self._media.preprocessed
        return self._encoder.counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._encoder.counters = counters

    @property
    def media_counts(self) -> MediaCounts:
        """What media cost so far, of this policy and those that share its media."""
        return count_media(self.decoder.counters, self._media, self._encoder)

    @property
    def device(self) -> torch.device:
        """Where the language model lives."""
        return self.adapter.language_model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """What the language model computes in."""
        return self.adapter.language_model.embed_tokens.weight.dtype

    # Rendering: tokens only.

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

    def respond(self, text: str, name: str) -> Segment:
        """A given answer as a model segment: ends with the stop token, log-probs zero."""
        tokens = (*self._renderer.encode(text), self._renderer.close_id)
        zeros = (0.0,) * len(tokens)
        return self.written(tokens, zeros, zeros, name)

    def written(
        self, tokens: Sequence[int], logprobs: Sequence[float], sampled_logprobs: Sequence[float], name: str
    ) -> Segment:
        """A model segment from sampled ids; the text is read off the tokens."""
        text, byte_ends = self._table.read(tokens)
        return Segment(
            author="model",
            tokens=tuple(tokens),
            text=text,
            logprobs=tuple(logprobs),
            sampled_logprobs=tuple(sampled_logprobs),
            byte_ends=byte_ends,
            policy_version=self.version,
            name=name,
        )

    def token_bytes(self, token: int) -> bytes:
        """The bytes a token adds to the text; nothing for special tokens."""
        return self._table.bytes_of(token)

    # Layout: placeholders expanded, positions.

    def layout(self, segment: Segment) -> Layout:
        """The segment as the language model sees it, on the CPU; environment segments are remembered by content."""
        return self._layouts(segment)

    def unprepared(self, media: Iterable[Media]) -> list[Media]:
        """The distinct media that no layout can be made of yet; refuses those of a kind that the model does not take."""
        return self._media.unknown(media)

    def request(self, media: Iterable[Media]) -> None:
        """Begin to decode media that will be prepared later, and return at once."""
        for item in self._media.missing(media):
            self.decoder.request(item)

    def prepare(self, media: Iterable[Media]) -> dict[Media, MediaError]:
        """Preprocess media together, ahead of their layouts: many times cheaper than one by one. In any thread.

        Returns the errors of those that cannot be.
        """
        return self._media.prepare(media)

    def share_media(self, other: "Policy") -> None:
        """Use another policy's prepared media, if its checkpoint prepares them alike: then nothing is prepared twice."""
        assert self.decoder is other.decoder, "policies that share media share their decoder"
        if _processing(self.processor) == _processing(other.processor):
            self._media = other._media
            self._encoder.reading(other._media)
            self._layouts = Layouts(self.adapter, other._media)

    # Parts.

    def encode(self, media: Iterable[Media]) -> dict[Media, Features]:
        """Features of the distinct media, one pass of each tower. Keeps the graph in grad mode unless a tower is frozen."""
        return self._encoder(media)

    def language(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        attention: Attention,
        placements: Sequence[Placement] = (),
        *,
        stock: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, H] after the final norm. ``stock``: through the layers' own forward on every device."""
        model = self.adapter.language_model
        hidden_BTH = model.embed_tokens(ids_BT)
        levels: list[Tensor] = []
        if placements:
            places_N, embeds_NH, levels = _gather(placements, hidden_BTH)
            hidden_BTH = hidden_BTH.flatten(0, 1).index_copy(0, places_N, embeds_NH).view_as(hidden_BTH)
        rotary = self.adapter.rotary(hidden_BTH, positions_3BT)
        recompute = self._recompute and torch.is_grad_enabled()
        for i, layer in enumerate(model.layers if stock else self._layers()):
            if recompute:
                hidden_BTH = checkpoint(
                    layer, hidden_BTH, position_embeddings=rotary, sensorium_attention=attention,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                hidden_BTH = layer(hidden_BTH, position_embeddings=rotary, sensorium_attention=attention)
            if i < len(levels):
                hidden_BTH = hidden_BTH.flatten(0, 1).index_add(0, places_N, levels[i]).view_as(hidden_BTH)
        return model.norm(hidden_BTH)

    def _layers(self) -> Sequence[DecoderLayer]:
        """The decoder layers: fused on CUDA, where they give what the stock ones give."""
        model = self.adapter.language_model
        if self.device.type != "cuda":
            return model.layers
        if self._fused is None:
            self._fused = fused_layers(model.layers, self.adapter.rotary)
        return self._fused

    @property
    def experts_per_token(self) -> int:
        """How many experts a token is sent to; 0 for a model without experts."""
        config = self.adapter.language_model.config
        return config.num_experts_per_tok if routers_of(self.adapter.language_model) else 0

    def watch_routers(self) -> AbstractContextManager[list[Tensor]]:
        """Collects the router logits [B·T, experts] of the ``language`` pass inside, one tensor per layer with experts."""
        return watched(routers_of(self.adapter.language_model))

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Float32 logits of chosen positions."""
        return self.adapter.head(hidden_NH).float()

    def checkpoint_gradients(self, on: bool = True) -> None:
        """Recompute the layers of language model and towers in the backward pass instead of keeping their activations."""
        self._recompute = on
        for tower in self.adapter.towers.values():
            recompute_blocks(tower.module, on)

    def frozen_copy(self) -> "Policy":
        """A copy that is never trained: a reference."""
        copy = self.copy()
        copy.model.requires_grad_(False)
        return copy

    def copy(self) -> "Policy":
        """The same weights in memory of their own; prepared media and what frozen towers said of them are shared."""
        model = deepcopy(self.model)
        adapter = type(self.adapter)(model, self.processor)
        adapters = None if self.adapters is None else self.adapters.of(model)
        copy = Policy(self.family, adapter, model, self.tokenizer, self.processor, self.store, adapters, self.decoder)
        copy.version = self.version
        copy._media = self._media
        copy._layouts = self._layouts
        copy._encoder = self._encoder.copied(adapter)
        return copy

    def groups(self) -> dict[str, dict[str, nn.Parameter]]:
        """Named parameters by group: vision, audio, projector, language, head. A tied head is in language only.

        An adapter's parameters belong to the group of the layer they adapt.
        """
        groups: dict[str, dict[str, nn.Parameter]] = {group: {} for group in self.adapter.groups}
        for name, parameter in self.model.named_parameters():
            group = group_of(name, self.adapter.groups)
            if group is None:
                raise ModelError(
                    f"parameter '{name}' of family {self.family} belongs to no group; the adapter must name it."
                )
            groups[group][name] = parameter
        return groups

    def trainable(self) -> dict[str, dict[str, nn.Parameter]]:
        """Named parameters that may learn, by group: all of them, or the adapters alone."""
        if self.adapters is None:
            return self.groups()
        learning = self.adapters.parameters
        return {
            group: {name: parameter for name, parameter in named.items() if name in learning}
            for group, named in self.groups().items()
        }

    def save(self, folder: Path) -> None:
        """A complete Hugging Face checkpoint: weights, configs, tokenizer, processor, chat template.

        Adapters are added into its weights, and stand beside them in a folder of their own.
        """
        with quiet():
            self.model.save_pretrained(folder, state_dict=self.adapters.merged() if self.adapters is not None else None)
            (self.processor if self.processor is not None else self.tokenizer).save_pretrained(folder)
        if self.adapters is not None:
            self.adapters.save(folder / FOLDER)


def _processing(processor: Any) -> list[Any]:
    """All settings by which a checkpoint's processors make tower inputs of media."""
    parts = ("image_processor", "video_processor", "feature_extractor")
    return [part.to_dict() for name in parts if (part := getattr(processor, name, None)) is not None]


def _gather(placements: Sequence[Placement], hidden_BTH: Tensor) -> tuple[Tensor, Tensor, list[Tensor]]:
    """Flat places, embeddings and deepstack levels of all placements, in one order."""
    length = hidden_BTH.shape[1]
    parts = [item.features for item in placements]
    places: list[int] = []
    for item in placements:
        for start, count in item.runs:
            if start < 0 or start + count > length:
                raise SpanMismatch(f"features of {count} tokens at {start} do not fit a row of {length}.")
            places += range(item.row * length + start, item.row * length + start + count)
    embeds_NH = torch.cat([part.embeds_NH for part in parts]).to(hidden_BTH)
    levels = [torch.cat(several).to(hidden_BTH) for several in zip(*(part.deepstack_NH for part in parts), strict=True)]
    return torch.tensor(places, device=hidden_BTH.device), embeds_NH, levels


def _stop_ids(model: Any, tokenizer: Any, close_id: int) -> tuple[int, ...]:
    """The template's closing token first, then whatever else the checkpoint ends on."""
    named = getattr(model.generation_config, "eos_token_id", None)
    if named is None:
        named = tokenizer.eos_token_id
    several = named if isinstance(named, list | tuple) else [named]
    return tuple(dict.fromkeys([close_id, *(token for token in several if token is not None)]))


def _refuse_sliding_window(config: Any) -> None:
    if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
        raise ModelError(
            "this checkpoint uses sliding-window attention, which is not supported; use one with full attention."
        )
