"""A loaded model in parts: towers, language model and head as separate calls, and its chat processor.

The parts are stock transformers modules. The loop over the decoder layers is here rather than in the library, so that the
caller decides on attention, deepstack features and recomputation.
"""

import gc
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from sensorium.kernels import layer_ops
from sensorium.kernels.matched_ops import matched_linear, matched_ops
from sensorium.models.attention import Attention
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.checkpoint_path import quiet
from sensorium.models.delta_net import is_delta
from sensorium.models.encoding import Counters, Encoder, MediaCounts
from sensorium.models.experts import RouterOutput, group_experts, replaying, routers_of, watching
from sensorium.models.family import Family, group_of
from sensorium.models.fused import LayerStack, Recomputation, fused_layers
from sensorium.models.general_path import General
from sensorium.models.lora import Adapters
from sensorium.models.matched import matched_layers
from sensorium.models.segment_layout import Features, Placement, sent_to
from sensorium.models.tower import keeping_blocks, recompute_blocks
from sensorium.models.weight_files import saving_weights
from sensorium.recipe.memory_estimate import TowerRoom
from sensorium.runs.checkpoint_layout import ADAPTER_FOLDER
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.errors import ModelError, SpanMismatch

Precision = Literal["fast", "matched"]
SHARD_BYTES = 2 << 30  # of one weight file; a GPU's weights are in CPU memory one file at a time


class Sharding(Protocol):
    """A model's weights spread over processes (``learner/sharding.py``), computed with on ``device``."""

    @property
    def device(self) -> torch.device: ...

    def call(self, part: Callable[..., Any], *given: Any) -> Any:
        """What a function of whole weights returns. All processes call the same parts, in the same order."""
        ...

    def rest(self) -> None:
        """Release gathered weights, so that writes to this process' own part take effect."""
        ...


def _nothing() -> None:
    pass


def release_unused() -> None:
    """Give GPU memory that no tensor holds any longer back to the device."""
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


class Policy:
    """A model that is sampled from and trained. ``version`` counts its updates.

    ``chat`` is the half that needs no weights: messages and media to tokens and positions. ``adapters`` are low-rank ones
    inside the model; where there are any, nothing else is trained. With ``precision`` ``matched``, what a token gives
    depends on its own context alone, to the last bit (``models/matched.py``).
    """

    def __init__(
        self,
        chat: ChatProcessor,
        adapter: Family,
        model: Any,
        adapters: Adapters | None = None,
        precision: Precision = "fast",
    ) -> None:
        self.chat = chat
        self.precision = precision
        self.family = chat.family
        self.adapter = adapter
        self.model = model
        self.adapters = adapters
        self.version = 0
        self.give_way: Callable[[], None] = _nothing  # called between the micro-batches of an update, in its thread
        self.vocab_size: int = adapter.head.weight.shape[0]
        assert self.vocab_size == chat.vocab_size, "the head has a row for every token of the config's vocabulary"
        self.sharding: Sharding | None = None
        self.matched = matched_ops(self.device) if precision == "matched" else None
        self._encoder = Encoder(adapter, chat, self.device, self.matched)
        self._recompute: Recomputation = False
        self.tower_room: TowerRoom | None = None
        self._fused = None if self.matched is None else matched_layers(adapter.language_model, self.matched)
        self.groups()  # refuses a parameter that belongs to none
        if self.general is not None and precision == "matched":
            raise ModelError("model.precision 'matched' is not built for the general path; use model.precision: fast.")
        if "sliding_attention" in (getattr(adapter.language_model.config, "layer_types", None) or ()):
            raise ModelError(
                "this checkpoint uses sliding-window attention, which its family's adapter does not compute; set "
                "model.family: general, or use a checkpoint with full attention."
            )

    @property
    def general(self) -> General | None:
        """The adapter of the general path, which computes whole rows; None where the parts are computed apart."""
        return self.adapter if isinstance(self.adapter, General) else None

    @property
    def counters(self) -> Counters:
        return self._encoder.counters

    @counters.setter
    def counters(self, counters: Counters) -> None:
        self._encoder.counters = counters

    @property
    def media_counts(self) -> MediaCounts:
        """Decodings, cache hits and encodings so far, of this policy and those that share its media."""
        decoding, media, encoder = self.chat.decoder.counters, self.chat.prepared, self._encoder
        return MediaCounts(
            decoded=decoding.decoded,
            preprocessed=media.preprocessed,
            hits=decoding.disk_hits,
            memory_hits=decoding.memory_hits + decoding.shared + media.hits,
            evictions=decoding.disk_evictions,
            memory_evictions=decoding.memory_evictions + media.evictions,
            damaged=decoding.disk_damaged,
            tower_items=encoder.counters.tower_items,
            tower_hits=encoder.cache.hits,
            tower_evictions=encoder.cache.evictions,
            cache_bytes=decoding.disk_bytes,
            memory_bytes=decoding.memory_bytes + media.held,
        )

    @property
    def device(self) -> torch.device:
        if self.sharding is not None:
            return self.sharding.device
        return self.adapter.language_model.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        return self.adapter.language_model.embed_tokens.weight.dtype

    def inside(self, part: Callable[..., Any], *given: Any) -> Any:
        """What ``part`` returns, called where it finds whole weights: under sharding, as a forward of the model."""
        return part(*given) if self.sharding is None else self.sharding.call(part, *given)

    def rest(self) -> None:
        """Under sharding, release gathered weights until they are used again."""
        if self.sharding is not None:
            self.sharding.rest()

    def encode(self, media: Iterable[Media]) -> dict[Media, Features]:
        """Features of the distinct media. In grad mode, those of a tower that learns keep their graph."""
        return self.inside(self._encoder, media)

    def language(
        self,
        ids_BT: Tensor,
        positions_3BT: Tensor,
        attention: Attention,
        placements: Sequence[Placement] = (),
        *,
        stock: bool = False,
    ) -> Tensor:
        """Hidden states [B, T, H] after the final norm. ``stock``: by the layers' own forward on every device."""
        return self.inside(self._language, ids_BT, positions_3BT, attention, placements, stock)

    def _language(
        self, ids_BT: Tensor, positions_3BT: Tensor, attention: Attention, placements: Sequence[Placement], stock: bool
    ) -> Tensor:
        model = self.adapter.language_model
        stack = LayerStack(model.layers, model.norm) if stock else self._stack()
        hidden_BTH = model.embed_tokens(ids_BT)
        rotary = self.adapter.rotary(hidden_BTH, positions_3BT)
        hidden_BTH = stack.enter(hidden_BTH)
        levelled = [item for item in placements if item.features.deepstack_NH]  # sounds have no deepstack levels
        level_places_N = _places(levelled, hidden_BTH) if levelled else None
        several = zip(*(item.features.deepstack_NH for item in levelled), strict=True)
        levels = [torch.cat(level).to(hidden_BTH) for level in several]
        if placements:
            embeds_NH = torch.cat([item.features.embeds_NH for item in placements]).to(hidden_BTH)
            places_N = _places(placements, hidden_BTH)
            hidden_BTH = hidden_BTH.flatten(0, 1).index_copy(0, places_N, embeds_NH).view_as(hidden_BTH)
        recompute = torch.is_grad_enabled() and stack.recomputes(self._recompute)
        for i, layer in enumerate(stack.layers):
            if recompute:
                hidden_BTH = checkpoint(
                    layer, hidden_BTH, position_embeddings=rotary, sensorium_attention=attention,
                    use_reentrant=False, preserve_rng_state=False,
                )  # fmt: skip
            else:
                hidden_BTH = layer(hidden_BTH, position_embeddings=rotary, sensorium_attention=attention)
            if level_places_N is not None and i < len(levels):
                hidden_BTH = hidden_BTH.flatten(0, 1).index_add(0, level_places_N, levels[i]).view_as(hidden_BTH)
        return stack.norm(hidden_BTH)

    def _stack(self) -> LayerStack:
        """The decoder layers: matched for that precision, else fused on CUDA where they give what the stock ones give."""
        model = self.adapter.language_model
        if self.sharding is not None:
            if self.matched is not None:
                raise ModelError("model.precision 'matched' is not built for a sharded learner; use model.precision: fast.")
            return LayerStack(model.layers, model.norm)
        self.settle()
        if self._fused is None:
            on_cpu = self.device.type == "cpu" and not layer_ops.interpreted
            if not on_cpu:
                group_experts(self.model, model)
            self._fused = LayerStack(model.layers, model.norm) if on_cpu else fused_layers(model, self.adapter.rotary)
        return self._fused

    def settle(self) -> None:
        """Make what is computed of weights anew where they changed: on CUDA, products with merged adapters."""
        if self.adapters is None or self.sharding is not None or self.matched is not None:
            return
        if self.adapters.section.merge and (self.device.type == "cuda" or layer_ops.interpreted):
            self.adapters.merge(self.adapter.language_model.layers)
        self.adapters.settle()

    @property
    def delta_layers(self) -> tuple[int, ...]:
        """The layers that are gated delta nets: they have states, the others keys and values."""
        return tuple(i for i, layer in enumerate(self.adapter.language_model.layers) if is_delta(layer))

    @property
    def experts_per_token(self) -> int:
        """How many experts a token is sent to; 0 for a model without experts."""
        return self.adapter.language_model.config.num_experts_per_tok if self.routers else 0

    @property
    def routers(self) -> list[nn.Module]:
        """The router of each layer that has experts, in order."""
        return routers_of(self.adapter.language_model.layers)

    @contextmanager
    def watch_routers(self) -> Iterator[list[RouterOutput]]:
        """Collects what routers decide in the ``language`` pass inside (``models/experts.py``)."""
        self._stack()  # its trial run before the first use must not be collected
        with watching(self.routers) as seen:
            yield seen

    @contextmanager
    def replay_routes(self, routes_TLK: Tensor | None) -> Iterator[None]:
        """Inside, the tokens of ``language`` are sent to recorded experts, if there are any; backward belongs inside."""
        if routes_TLK is None:
            yield
            return
        self._stack()
        with replaying(self.routers, routes_TLK):
            yield

    def logits(self, hidden_NH: Tensor) -> Tensor:
        """Float32 logits of chosen positions."""
        logits_NV: Tensor = self.inside(self.head_logits, hidden_NH)
        return logits_NV.float()

    def head_logits(self, hidden_NH: Tensor) -> Tensor:
        """Logits as the head gives them; on CUDA a plain bfloat16 head gives float32, not rounded to bfloat16."""
        head = self.adapter.head
        if self.matched is not None:
            return matched_linear(head, hidden_NH, self.matched, torch.float32)
        narrow = hidden_NH.dtype != torch.float32 and hidden_NH.is_cuda
        if not narrow or torch.is_grad_enabled() or type(head) is not nn.Linear or head.bias is not None:
            return head(hidden_NH)
        return torch.mm(hidden_NH.flatten(0, -2), head.weight.T, out_dtype=torch.float32)

    def checkpoint_gradients(self, how: Recomputation = True, tower_room: TowerRoom | None = None) -> None:
        """Recompute activations of the language model's layers and of the towers in the backward pass.

        ``selective``: only the large ones of fused layers, whole layers elsewhere. On CUDA towers are always recomputed:
        their graph lives through a whole update. ``tower_room``: memory for the activations of vision towers.
        """
        self._recompute, self.tower_room = how, tower_room
        if self.general is not None:
            self.general.checkpoint(bool(how))
        for tower in self.adapter.towers.values():
            inside = partial(self._encoder.batching.linears, tower)
            recompute_blocks(tower.module, bool(how) or self.device.type == "cuda", inside)

    @contextmanager
    def keeping_towers(self) -> Iterator[None]:
        """Inside, vision towers keep their activations for the backward pass where their blocks can."""
        with ExitStack() as stack:
            for module in {id(tower.module): tower.module for tower in self.adapter.towers.values()}.values():
                stack.enter_context(keeping_blocks(module))
            yield

    def frozen_copy(self) -> "Policy":
        """A copy that is never trained: a reference."""
        copy = self.copy()
        copy.model.requires_grad_(False)
        return copy

    def copy(self) -> "Policy":
        """A copy with its own weights in memory. Prepared media and cached features of frozen towers are shared."""
        model = deepcopy(self.model)
        adapter = type(self.adapter)(model)
        adapters = None if self.adapters is None else self.adapters.of(model)
        copy = Policy(self.chat, adapter, model, adapters, self.precision)
        copy.version = self.version
        if self.general is not None and copy.general is not None:
            copy.general.recomputes = self.general.recomputes
        copy._encoder = self._encoder.copied(adapter)
        return copy

    def tensors(self) -> dict[str, Tensor]:
        """Every parameter and buffer by name, tied ones once; not copies."""
        return {**dict(self.model.named_parameters()), **dict(self.model.named_buffers())}

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
        """Named parameters that may be trained, by group: all of them, or the adapters alone."""
        if self.adapters is None:
            return self.groups()
        learning = self.adapters.parameters
        return {
            group: {name: parameter for name, parameter in named.items() if name in learning}
            for group, named in self.groups().items()
        }

    def save_description(self, folder: Path) -> None:
        """All of a checkpoint but its weights, for ``build_policy``."""
        with quiet():
            self.model.config.save_pretrained(folder)
            self.model.generation_config.save_pretrained(folder)
            self.chat.save(folder)

    def save(self, folder: Path) -> None:
        """A complete Hugging Face checkpoint: weights, configs, tokenizer, processor, chat template.

        Adapters are added into its weights, and are beside them in a folder of their own.
        """
        with quiet(), saving_weights(folder):
            state = self.adapters.base_state() if self.adapters is not None else None
            if state is not None and self.general is not None:  # whose files may have names that tell no layer
                state.update(self.adapters.sums() if self.adapters is not None else ())
            self.model.save_pretrained(folder, state_dict=state, max_shard_size=SHARD_BYTES)
            self.chat.save(folder)
        if self.adapters is not None:
            if self.general is None:
                self.adapters.add_into(folder)
            with saving_weights(folder / ADAPTER_FOLDER):
                self.adapters.save(folder / ADAPTER_FOLDER)


def _places(placements: Sequence[Placement], hidden_BTH: Tensor) -> Tensor:
    length = hidden_BTH.shape[1]
    places: list[int] = []
    for item in placements:
        for start, count in item.runs:
            if start < 0 or start + count > length:
                raise SpanMismatch(f"features of {count} tokens at {start} do not fit a row of {length}.")
            places += range(item.row * length + start, item.row * length + start + count)
    return sent_to(hidden_BTH.device, torch.tensor(places))


class Reference(Protocol):
    """``with reference.active() as policy:`` gives the policy to score with; it must not be used outside."""

    def active(self) -> AbstractContextManager[Policy]: ...


@dataclass(frozen=True)
class FrozenCopy:
    """A separate policy that is never trained. Its towers are frozen, so their features are cached."""

    policy: Policy

    def __post_init__(self) -> None:
        self.policy.model.requires_grad_(False)

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """The policy, unchanged."""
        yield self.policy


@dataclass(frozen=True)
class FormerSelf:
    """The trained policy with the adapters it had when RL began; None: they were fresh, and it is its base model then.

    While it is active nothing may be sampled or updated.
    """

    policy: Policy
    adapters: Mapping[str, Tensor] | None

    @contextmanager
    def active(self) -> Iterator[Policy]:
        """The former self; afterwards the policy is bit for bit what it was."""
        policy, own = self.policy, self.policy.adapters
        assert own is not None, "a policy without adapters cannot be its former self"
        version, counters = policy.version, policy.counters
        with own.off() if self.adapters is None else own.holding(self.adapters):
            try:
                # Caches by version must not mistake it for the policy, and its work does not count as the policy's.
                policy.version, policy.counters = -1, Counters()
                yield policy
            finally:
                policy.version, policy.counters = version, counters
