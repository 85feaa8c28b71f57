"""The general path: any checkpoint that transformers loads, by its own processor, its own forward and its own cache.

Nothing here knows a family. A thread is a row: its ids, the keys of its tokens, its media in order (``general_media.py``),
and positions, by the model's own ``get_rope_index`` where it has one. Rows are computed together as far as that changes
nothing.

What is promised of every family is checked here on the user's own weights, before anything is spent: a conversation of two
turns is played, each with a small medium of another size.

    <user> [picture] What is this? <assistant> A square. <user> [larger picture] And this? <assistant> A ring.

- the first turn computes the same whether or not the second follows, or the model cannot be trained on threads;
- token by token on the cache gives what one forward gives, or what is sampled is not what is trained;
- padded rows give what each gives alone, on the cache too; where they do not, rows are computed with their like, or one by
  one;
- a cache goes on as several answers, and as those of them that are left; where it does not, each computes its own prompt;
- sdpa gives what eager gives; where it does not, the model computes eagerly;
- train mode gives what eval mode gives, or nothing can be recomputed in the backward pass;
- another picture of the same size gives other log-probs; this is only noted, for a fresh projector may be zero.

Differences are of log-probs. In float32 they are rounding up to ``BOUND``; in bfloat16 a mean over the distribution is held
to a wider bound, because single log-probs are off by 0.05 there in sound models.
"""

from __future__ import annotations

import inspect
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from sensorium.models.family import MediaFormat, Tower, group_of
from sensorium.models.general_media import GeneralMedia, Join, StockExtent, StockInput
from sensorium.models.segment_layout import sent_to
from sensorium.recipe.family_facts import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind, Message, Text
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import MediaError, ModelError, SensoriumError

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from sensorium.models.chat_processor import ChatProcessor
    from sensorium.models.policy import Policy
else:
    torch = DeferredModule("torch")

BOUND = 1e-3
QUESTION = "What is this?"
NARROW_BOUND = 0.3  # of a mean over the distribution, in bfloat16
ANSWERS = ("A square.", "A ring.")
# What stock code raises of inputs that it cannot compute.
FAILURES = (ModelError, RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError)
FOUND = ("company", "alike", "mixes", "forks")  # of a ``GeneralMedia``, by the check of the weights
MORE_SIZES = {"picture": ((64, 64), (180, 260)), "video": ((64, 64), (112, 84)), "sound": ((0.5, 0.0), (1.25, 0.0))}


@dataclass(frozen=True)
class StockRow:
    """A thread, expanded: its ids, the keys of its tokens, its media in order, and positions [T], or [3, T]."""

    ids_T: Tensor
    types: Mapping[str, Tensor]
    media: tuple[Media, ...]
    positions_AT: Tensor

    def __len__(self) -> int:
        return len(self.ids_T)

    @property
    def next_position(self) -> int:
        """The position of the token after its last."""
        return int(self.positions_AT[..., -1].max()) + 1


@dataclass(frozen=True)
class StockRows:
    """Rows of a micro-batch, and for each the places of the states that are read."""

    rows: tuple[StockRow, ...]
    read: tuple[Tensor, ...]


class StockHead:
    """The head of a model whose forward has computed it already: what is read of a row ends with its logits."""

    def __init__(self, model: Any) -> None:
        self._model = model

    @property
    def weight(self) -> Tensor:
        weight: Tensor = self._model.get_output_embeddings().weight
        return weight

    def __call__(self, read_NX: Tensor) -> Tensor:
        return read_NX[:, -self.weight.shape[0] :]


class General:
    """A model of any class of transformers, computed by its own forward, row by row or in padded batches."""

    media_format: ClassVar[type[MediaFormat]] = GeneralMedia
    attention: ClassVar[Any] = None  # the library's choice
    towers: Mapping[MediaKind, Tower]

    @staticmethod
    def groups_of(model: Any) -> dict[str, tuple[str, ...]]:
        """Parameter groups of a model, by which module each prefix is."""
        return module_groups(model)

    def __init__(self, model: Any) -> None:
        self.model, self.towers = model, {}
        self.groups = module_groups(model)
        self.language_model = SimpleNamespace(
            embed_tokens=model.get_input_embeddings(), layers=(), norm=None, config=SimpleNamespace()
        )
        self.head = StockHead(model)
        self._core = next((part for part in (model, model.base_model) if hasattr(part, "get_rope_index")), None)
        parameters = inspect.signature(model.forward).parameters
        if "past_key_values" not in parameters:
            raise ModelError(
                f"a model of type '{model.config.model_type}' cannot be trained: its class keeps no keys and values of "
                "what it has read, from which sampling goes on token by token. Use a checkpoint whose layers attend to "
                "earlier tokens (docs/guides/families.md lists types that were tried)."
            )
        self._takes = None if any(p.kind == p.VAR_KEYWORD for p in parameters.values()) else frozenset(parameters)
        self._places = "position_ids" in parameters
        self._keeps = "logits_to_keep" in parameters
        self.notes = tuple[str, ...]()
        self.reads: Literal["logits", "states", "both"] = "logits"
        self._recompute, self.recomputes = False, bool(model.supports_gradient_checkpointing)

    def rotary(self, hidden_BTH: Tensor, positions_3BT: Tensor) -> tuple[Tensor, Tensor]:
        """Not asked for: the model's own forward has its rotary embeddings inside."""
        raise AssertionError("the general path computes whole rows")

    def checked(self, chat: ChatProcessor) -> dict[str, Any]:
        """What the check of the weights found that decides how they compute: for a copy in another process."""
        found = {name: getattr(_format_of(chat), name) for name in FOUND}
        return {"attention": self.model.config._attn_implementation, **found}

    def trust(self, chat: ChatProcessor, checked: Mapping[str, Any]) -> None:
        """Compute as a model does that was ``checked``."""
        if self.model.config._attn_implementation != checked["attention"]:
            self.model.set_attn_implementation(checked["attention"])
        for name in FOUND:
            setattr(_format_of(chat), name, checked[name])

    def row(self, chat: ChatProcessor, segments: Sequence[Segment]) -> StockRow:
        """A thread as a row."""
        media_format = _format_of(chat)
        layouts = [chat.layout(segment) for segment in segments]
        ids_T = torch.cat([layout.ids_T for layout in layouts])
        types = {key: torch.zeros_like(ids_T) for key in media_format.type_keys}
        if media_format.one_turn and "token_type_ids" in types:  # which attend one way
            written = [
                torch.tensor(segment.author == "model").expand(len(layout))
                for segment, layout in zip(segments, layouts, strict=True)
            ]
            types["token_type_ids"] += torch.cat(written)
        media, places, start = [], dict[str, list[tuple[Any, ...]]](), 0
        for layout in layouts:
            for slot in layout.slots:
                extent = chat.prepared.extent(slot.media)
                assert isinstance(extent, StockExtent), "its processors make no other"
                begin = start + slot.start - media_format.expand(extent).runs[0][0]
                for key, values in extent.types:
                    types[key][begin : begin + len(values)] = torch.tensor(values)
                for key, numbers in extent.places:
                    places.setdefault(key, []).append(numbers)
                media.append(slot.media)
            start += len(layout)
        return StockRow(ids_T, types, tuple(media), self._positions(ids_T, types, places))

    def _positions(self, ids_T: Tensor, types: Mapping[str, Tensor], places: Mapping[str, list[tuple[Any, ...]]]) -> Tensor:
        if self._core is None:
            return torch.arange(len(ids_T))
        given: dict[str, Any] = {key: values_T[None] for key, values_T in types.items()}
        given |= {"input_ids": ids_T[None], "attention_mask": torch.ones_like(ids_T)[None]}
        for key, several in places.items():
            table = torch.tensor([number for numbers in several for number in numbers])
            given[key] = table.view(-1, 3) if key.endswith("grid_thw") else table
        wanted = inspect.signature(self._core.get_rope_index).parameters
        positions_31T: Tensor = self._core.get_rope_index(**{key: value for key, value in given.items() if key in wanted})[
            0
        ]
        return positions_31T[:, 0]

    def batches(self, chat: ChatProcessor, rows: Sequence[StockRow], tokens: int) -> Iterator[list[int]]:
        """Rows that are computed together, by number: neighbours, of at most ``tokens`` with padding."""
        batch: list[int] = []
        for i, row in enumerate(rows):
            if batch:
                longest = max(len(rows[j]) for j in (*batch, i))
                if longest * (len(batch) + 1) > tokens or not self._may_join(chat, row, [rows[j] for j in batch]):
                    yield batch
                    batch = []
            batch.append(i)
        if batch:
            yield batch

    def _may_join(self, chat: ChatProcessor, row: StockRow, others: Sequence[StockRow]) -> bool:
        return _format_of(chat).company != "alone" and self._fit(
            chat, [item for one in (row, *others) for item in one.media]
        )

    def _fit(self, chat: ChatProcessor, media: Sequence[Media]) -> bool:
        """Whether media may be computed in one forward."""
        media_format = _format_of(chat)
        if not media_format.mixes and {"picture", "video"} <= {item.kind for item in media}:
            return False
        shapes: dict[tuple[MediaKind, str], list[tuple[int, ...]]] = {}
        for item, prepared in zip(media, chat.prepared.get(media), strict=True):
            assert isinstance(prepared, StockInput), "its processors make no other"
            for key, tensor in prepared.tensors.items():
                shapes.setdefault((item.kind, key), []).append(tuple(tensor.shape))
        equal = {key: len(set(several)) == 1 for key, several in shapes.items()}
        if media_format.company == "any":
            return all(
                media_format.stock[kind].joins[key].fits(several) and (equal[kind, key] or kind not in media_format.alike)
                for (kind, key), several in shapes.items()
            )
        return all(equal.values())

    def refuse_unequal(self, chat: ChatProcessor, row: StockRow) -> None:
        """Refuse a thread whose media cannot be computed in one forward: of different sizes, where that changes them."""
        if not self._fit(chat, row.media):
            raise MediaError(
                f"{row.media[0].name}: this model takes several media in one thread only where they are of one size and "
                "kind: its towers compute otherwise together than alone. Cut them to one size, or show one a thread."
            )

    def inputs(self, chat: ChatProcessor, rows: Sequence[StockRow], side: Literal["left", "right"]) -> dict[str, Tensor]:
        """What the forward takes of rows, padded on a side."""
        device, dtype = self.language_model.embed_tokens.weight.device, self.language_model.embed_tokens.weight.dtype
        width = max(map(len, rows))

        def padded(parts: Sequence[Tensor], fill: int = 0) -> Tensor:
            made = parts[0].new_full((len(parts), *parts[0].shape[:-1], width), fill)
            for target, part in zip(made, parts, strict=True):
                target[..., slice(width - part.shape[-1], width) if side == "left" else slice(0, part.shape[-1])] = part
            return made

        given = {
            "input_ids": padded([row.ids_T for row in rows], chat.stop_ids[0]),
            "attention_mask": padded([torch.ones_like(row.ids_T) for row in rows]),
            **{key: padded([row.types[key] for row in rows]) for key in rows[0].types},
        }
        if self._places:
            positions = padded([row.positions_AT for row in rows])
            given["position_ids"] = positions.transpose(0, 1) if positions.dim() == 3 else positions
        for key, tensor in self._media(chat, [item for row in rows for item in row.media]).items():
            given[key] = tensor.to(dtype) if tensor.is_floating_point() else tensor
        takes = self._takes
        return {key: sent_to(device, tensor) for key, tensor in given.items() if takes is None or key in takes}

    def _media(self, chat: ChatProcessor, media: Sequence[Media]) -> dict[str, Tensor]:
        if not media:
            return {}
        parts: dict[str, list[Tensor]] = {}
        joins: dict[str, Join] = {}
        for item, prepared in zip(media, chat.prepared.get(media), strict=True):
            assert isinstance(prepared, StockInput), "its processors make no other"
            joins |= _format_of(chat).stock[item.kind].joins
            for key, tensor in prepared.tensors.items():
                parts.setdefault(key, []).append(tensor)
        return {key: several[0] if len(several) == 1 else joins[key](several) for key, several in parts.items()}

    def call(self, given: Mapping[str, Any], keep: Tensor | int = 0) -> Any:
        """The model's own forward; logits at the places ``keep`` of every row, or of the last so many."""
        if self._keeps:
            return self.model(**given, logits_to_keep=keep)
        made = self.model(**given)
        made["logits"] = made.logits[:, keep] if isinstance(keep, torch.Tensor) else made.logits[:, -keep:]
        return made

    def step(self, cache: Any, tokens: Sequence[int], positions: Sequence[int], mask_BT: Tensor) -> Any:
        """A token for each row on the cache, which moves on; ``mask_BT`` includes it."""
        device = self.head.weight.device
        given: dict[str, Any] = {"input_ids": torch.tensor(tokens)[:, None], "attention_mask": mask_BT}
        if self._places:
            positions_B1 = torch.tensor(positions)[:, None]
            given["position_ids"] = positions_B1 if self._core is None else positions_B1.expand(3, -1, 1).contiguous()
        # The mask grows on the device; only what is on the CPU can be pinned.
        given = {key: sent_to(device, tensor) if tensor.device != device else tensor for key, tensor in given.items()}
        return self.call({**given, "past_key_values": cache, "use_cache": True}, 1)

    def read(self, chat: ChatProcessor, several: StockRows) -> Tensor:
        """What is read of rows that may be computed together, row by row, without a cache: [N, V], [N, H] or [N, H + V].

        By ``reads``: logits, the states that the head takes, which a critic reads, or first states and then logits.
        """
        given = self.inputs(chat, several.rows, "right")
        device, keep = given["input_ids"].device, torch.cat(several.read).unique()
        keep, places = (
            sent_to(device, keep),
            [torch.searchsorted(keep, read) + i * len(keep) for i, read in enumerate(several.read)],
        )
        states: list[Tensor] = []
        head = self.model.get_output_embeddings()
        handle = (
            head.register_forward_pre_hook(lambda _, taken: states.append(taken[0])) if self.reads != "logits" else None
        )
        try:
            with self._learning():
                found = [self.call({**given, "use_cache": False}, keep).logits]
        finally:
            if handle is not None:
                handle.remove()
        if self.reads != "logits":
            if not states:
                raise ModelError(
                    f"a critic cannot read {type(self.model).__name__}: it computes its logits without its head."
                )
            state_BKH = states[-1] if states[-1].shape[1] == len(keep) else states[-1][:, keep]
            found = [state_BKH, *(found if self.reads == "both" else ())]
        place_N = sent_to(device, torch.cat(places))
        parts = [part.flatten(0, 1).index_select(0, place_N) for part in found]
        return parts[0] if len(parts) == 1 else torch.cat(parts, 1)

    def checkpoint(self, wanted: bool) -> None:
        """Recompute activations of the model's layers in the backward pass, where it can."""
        if not wanted:
            return
        if not self.recomputes:
            raise ModelError(
                f"model.gradient_checkpointing: {type(self.model).__name__} cannot recompute activations; set it to false."
            )
        self.model.gradient_checkpointing_enable()
        self.model.disable_input_require_grads()  # which enabling it always installs, for frozen embeddings too
        self._recompute = True

    @contextmanager
    def _learning(self) -> Iterator[None]:
        """Inside, layers recompute if asked to: they do so in train mode alone. Running statistics stay as they are."""
        if not (self._recompute and torch.is_grad_enabled()):
            yield
            return
        training_mode(self.model)
        try:
            yield
        finally:
            self.model.eval()


def _format_of(chat: ChatProcessor) -> GeneralMedia:
    assert isinstance(chat.media_format, GeneralMedia), "its family is general"
    return chat.media_format


def training_mode(model: nn.Module) -> None:
    """Train mode for all but layers with running statistics."""
    model.train()
    for part in model.modules():
        if getattr(part, "running_mean", None) is not None:
            part.eval()


def module_groups(model: Any) -> dict[str, tuple[str, ...]]:
    """Prefixes of parameter names by group: the decoder, the head, towers by their config, and the rest.

    A module inside the decoder that holds a tower (Phi-4-multimodal) is a projector but for the tower.
    """
    decoder, head, embeddings = model.get_decoder(), model.get_output_embeddings(), model.get_input_embeddings()
    names = {id(part): name for name, part in model.named_modules()}
    towers = dict(_towers(model, decoder))
    groups: dict[str, list[str]] = {"language": [], "head": [], "vision": [], "audio": [], "projector": []}
    for name, group in towers.items():
        groups[group].append(f"{name}.")
    at = names.get(id(decoder), "")
    groups["language"] += [f"{name}." if name else "" for name in dict.fromkeys((at, names.get(id(embeddings), at)))]
    if head.weight is not embeddings.weight:
        groups["head"].append(f"{names[id(head)]}.")
    if not towers:
        groups["language"].append("")
    else:
        inside = {name.removeprefix(f"{at}.").split(".")[0] for name in towers if not at or name.startswith(f"{at}.")}
        groups["projector"] += [""] if at else []
        groups["projector"] += sorted(
            {f"{at}.{name}." if at else f"{name}." for name in inside} - {f"{name}." for name in towers}
        )
    fitting = {
        group_of(name, {group: tuple(prefixes) for group, prefixes in groups.items()})
        for name, _ in model.named_parameters()
    }
    return {group: tuple(prefixes) for group, prefixes in groups.items() if group in fitting}


def _towers(model: Any, decoder: Any) -> Iterator[tuple[str, str]]:
    """Names of the outermost modules whose config is that of a tower, and their groups."""
    from transformers import PreTrainedModel

    kinds = (("vision", "vision|image|visual|vq"), ("audio", "audio|encoder|speech|sound"))
    configs = {key: part for key, part in vars(model.config).items() if key.endswith("_config") and part is not None}
    found: list[str] = []
    for name, part in model.named_modules():
        outer = any(name.startswith(f"{known}.") for known in found)
        if not isinstance(part, PreTrainedModel) or part is model or part is decoder or outer:
            continue
        for group, words in kinds:
            if any(re.match(words, key) and type(part.config) is type(own) for key, own in configs.items()):
                found.append(name)
                yield name, group
                break


# What is refused by a config, and the check of a loaded model.


def refuse_general(config: Any) -> None:
    """Refuse what its config already rules out on the general path, with the reason."""
    from transformers.models.auto import modeling_auto

    name, reason = config.model_type, ""
    known = {**modeling_auto.MODEL_FOR_MULTIMODAL_LM_MAPPING_NAMES, **modeling_auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES}
    text = config.get_text_config()
    if config.is_encoder_decoder:
        reason = (
            "it is an encoder with a decoder: an answer is no continuation of its prompt, which engine and learner need"
        )
    elif name not in known:
        reason = "transformers has no class for it that writes text after text, pictures or sounds"
    elif getattr(text, "is_decoder", True) is False and name in modeling_auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES:
        reason = (
            "it is an encoder, whose tokens see those that follow them (is_decoder: false in its config.json), so an "
            "answer cannot be sampled token by token. Use a checkpoint of a decoder"
        )
    elif getattr(text, "cross_attention_layers", None):
        reason = (
            "its pictures are read by cross-attention, which text before the first picture sees too: a later picture "
            "changes turns that were sampled before it, and a picture in one row of a batch changes the others"
        )
    elif getattr(config, "has_lora_adapter", False):
        reason = "it has adapters of its own, which its class switches on for sounds alone; merge them into its weights"
    if reason:
        raise ModelError(f"a model of type '{name}' cannot be trained: {reason}.")


def check_general(policy: Policy) -> None:
    """Hold a policy on the general path to the equalities above; what was found out is noted in its adapter."""
    check = SelfCheck(policy)
    check.run()
    assert policy.general is not None, "the check is of the general path"
    policy.general.notes = (*policy.chat.media_format.notes, *check.notes)  # type: ignore[attr-defined]


class SelfCheck:
    """The check of one policy, on its own weights and device. ``notes`` say what it found that a user should know."""

    def __init__(self, policy: Policy) -> None:
        from sensorium.data.media_store import MediaStore
        from sensorium.models.chat_processor import ChatProcessor

        general, chat = policy.general, policy.chat
        assert general is not None, "the check is of the general path"
        self._general: General = general
        self._model = policy.model
        self.chat = ChatProcessor(
            chat.family, chat.media_format, chat.tokenizer, chat.processor, MediaStore(),
            vocab_size=chat.vocab_size, end_ids=chat.stop_ids,
        )  # fmt: skip
        self._exact = policy.dtype == torch.float32
        self._kinds: tuple[MediaKind, ...] = tuple(chat.media_format.placeholders)
        self.notes: list[str] = []

    def run(self) -> None:
        """Raises ModelError where the model cannot be trained; sets how rows may be computed together."""
        media_format = self.chat.media_format
        media_format.company = "alone"  # type: ignore[attr-defined]
        try:
            with torch.no_grad(), self._naming():
                kinds: Sequence[MediaKind | None] = self._kinds or (None,)
                if len(kinds) > 1 and "video" in kinds:
                    kinds = self._kinds = tuple(kind for kind in self._kinds if kind != "video")
                    self._attention(kinds)
                    self._videos()
                    kinds = self._kinds
                else:
                    self._attention(kinds)
                for kind in kinds:
                    if kind != "video" or len(kinds) == 1:  # others have been by now
                        self._turns(kind)
                media_format.company = self._company(kinds)  # type: ignore[attr-defined]
                self._forks(kinds[0])
                self._train_mode(kinds)
        finally:
            self.chat.decoder.close()

    # The parts of the check.

    def _attention(self, kinds: Sequence[MediaKind | None]) -> None:
        if self._model.config._attn_implementation != "sdpa":
            return
        rows = [self._row(self._turn(kind, i)) for kind in kinds for i in (0, 1)]
        stock = [self._full(row) for row in rows]
        self._model.set_attn_implementation("eager")
        worst = max(self._gap(one, self._full(row)) for one, row in zip(stock, rows, strict=True))
        wrong = f"gives other log-probs with torch's fused kernels (by {worst:.2g})"
        if worst <= self._bound:
            try:
                self._model.set_attn_implementation("sdpa")
                return
            except ValueError:  # of a model whose parts were loaded with different ones, as PaliGemma 2 since 5.23
                wrong = "is not switched back to torch's fused kernels by this version of transformers"
                self._model.set_attn_implementation("eager")
        self.notes.append(f"its attention {wrong}, so that it is computed without them (eager), more slowly")

    def _videos(self) -> None:
        """Take videos too, unless the model's own code cannot compute what its processor makes of them."""
        noted = len(self.notes)
        try:
            self._turns("video")
            self._kinds = (*self._kinds, "video")
        except FAILURES as error:
            del self.notes[noted:]
            named = "" if isinstance(error, ModelError) else f"its own forward fails: {type(error).__name__}: "
            self.chat.media_format.leave_out("video", named + str(error).rstrip("."))  # type: ignore[attr-defined]
            return
        if "picture" in self._kinds:
            media = [self.medium("picture", 0, False), self.medium("video", 0, False)]
            try:
                self._full(self._row([self.chat.render([Message("user", (*media, Text(QUESTION)))])]))
            except FAILURES:
                self.chat.media_format.mixes = False  # type: ignore[attr-defined]
                self.notes.append("a thread shows pictures or videos: its own forward fails on both together")

    def _turns(self, kind: MediaKind | None) -> None:
        first = self._turn(kind, 0)
        whole = self._row(first)
        logits = self._full(whole)
        self._prompt(kind, first[0])
        self._decoding(first, logits)
        if kind is not None:
            other = self._row(self._turn(kind, 0, another=True))
            if not bool((self._full(other) - logits).abs().max() > 0):
                self.notes.append(f"another {kind} of the same size changes no log-prob: is its projector trained?")
        if self.chat.one_turn:
            self.notes.append(
                "its prompt attends both ways, so that a thread holds one turn: a second would change the first"
            )
            return
        try:
            longer = [self._row([*first, *self._more(kind, first, size)]) for size in (1, 0)]
        except SensoriumError as error:
            self.notes.append(f"threads of several turns were not checked: {error}")
            return
        try:
            worst, place = self._worst(logits, self._full(longer[0])[: len(whole)])
        except (RuntimeError, ValueError):  # inputs of different shapes that nothing puts together
            if kind is None:
                raise
            worst, place = torch.inf, 0
        if worst > self._bound and kind and self._gap(logits, self._full(longer[1])[: len(whole)]) <= self._bound:
            self.chat.media_format.alike |= {kind}  # type: ignore[attr-defined]
            self.notes.append(f"several {kind}s of one thread must be of one size: others change each other")
        elif worst > self._bound:
            what = f"a second {kind}" if kind else "a second turn"
            raise ModelError(
                f"{what} changes what it computed of the turn before, by {worst:.2g} at token {place} of {len(whole)}: "
                "what was sampled could not be trained"
            )

    def _prompt(self, kind: MediaKind | None, prompt: Segment) -> None:
        """Compare the tokens of a prompt with those that the checkpoint's own processor gives for the whole of it."""
        from sensorium.models.rendering import TEMPLATE_KINDS

        owner = self.chat.owner
        content: Any = [*([{"type": TEMPLATE_KINDS[kind]}] if kind else []), {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content if self._kinds else QUESTION}]
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if kind is None:
            ids = self.chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            media = [self.chat.decoder.get(span.media) for span in prompt.media]
            media = [getattr(decoded, "samples", decoded) for decoded in media]
            ids = self.chat.media_format.stock[kind].tokens(text, media)  # type: ignore[attr-defined]
        ours = self.chat.layout(prompt).ids_T.tolist()
        if ours != ids:
            place = next(
                (i for i, pair in enumerate(zip(ours, ids, strict=False)) if pair[0] != pair[1]), min(len(ours), len(ids))
            )
            shown = [self.chat.tokenizer.decode(several[place : place + 3]) for several in (ours, ids)]
            self.notes.append(
                f"a prompt is tokenized otherwise than by its own processor from token {place} on: {shown[0]!r} instead of "
                f"{shown[1]!r}"
            )

    def _decoding(self, segments: Sequence[Segment], logits: Tensor) -> None:
        prompt = self._row(segments[:1])
        made = self._general.call({**self._inputs([prompt], "left"), "use_cache": True}, 1)
        parts = [made.logits[0]]
        cache, answer = made.get("past_key_values"), segments[1].tokens
        if cache is None:
            raise ModelError(
                "its forward keeps no keys and values of what it has read, from which an answer goes on token by token; "
                "use a checkpoint of another type (docs/guides/families.md)"
            )
        for i, token in enumerate(answer[:-1]):
            made = self._general.step(
                cache, [token], [prompt.next_position + i], torch.ones(1, len(prompt) + i + 1, dtype=torch.long)
            )
            parts.append(made.logits[0])
        worst, place = self._worst(torch.cat(parts), logits[len(prompt) - 1 : len(prompt) + len(answer) - 1])
        if worst > self._bound:
            raise ModelError(
                f"on its cache it computes something else than in one forward, by {worst:.2g} at token {place} of an answer"
            )

    def _company(self, kinds: Sequence[MediaKind | None]) -> str:
        media_format: Any = self.chat.media_format
        text = self._row(self._turn(None, 2))  # of another length than the others
        apart: list[Sequence[MediaKind | None]] = [[kind for kind in kinds if kind != "video"], ["video"]]
        for company in ("any", "alike"):
            rows = {
                kind: [
                    self._row(self._turn(kind, size, another=i > 0))
                    for i, size in enumerate((0, 0) if company == "alike" or kind in media_format.alike else (0, 1))
                ]
                for kind in kinds
            }
            together = [kinds] if media_format.mixes else apart
            if all(self._together([*(row for kind in several for row in rows[kind]), text]) for several in together):
                if company == "alike":
                    self.notes.append("rows whose media differ in size are computed apart: together they differ")
                return company
        self.notes.append("rows are computed one by one: padded together they differ, or cannot be")
        return "alone"

    def _together(self, rows: Sequence[StockRow]) -> bool:
        try:
            right, left = ({**self._inputs(rows, side), "use_cache": False} for side in ("right", "left"))
            made, moved = self._general.call(right).logits, self._general.call(left, 1).logits
        except (RuntimeError, ValueError, IndexError, TypeError):
            return False
        alone = [self._full(row) for row in rows]
        gaps = [self._gap(own, padded[: len(own)]) for own, padded in zip(alone, made, strict=True)]
        gaps += [self._gap(own[-1:], padded) for own, padded in zip(alone, moved, strict=True)]
        return max(gaps) <= self._bound

    def _forks(self, kind: MediaKind | None) -> None:
        """Hold a cache that goes on as several answers to them, beside a padded one where rows may be padded."""
        media_format: Any = self.chat.media_format
        turns = [self._turn(kind, 0), self._turn(None, 2)][: 1 if media_format.company == "alone" else 2]
        if self._forked(turns, 2):
            return
        if len(turns) > 1 and not self._forked(turns, 1):
            media_format.company, turns = "alone", turns[:1]
            self.notes.append("rows are computed one by one: padded together they differ on its cache")
        if not self._forked(turns, 2):
            media_format.forks = False
            self.notes.append("its cache cannot go on as several answers, so each of a group computes its prompt again")

    def _forked(self, turns: Sequence[Sequence[Segment]], times: int) -> bool:
        """Whether answers on the cache of their prompts are those of one forward, the first token beside ``times`` rows."""
        prompts, answers = [self._row(turn[:1]) for turn in turns], [turn[1].tokens for turn in turns]
        whole, count, gaps = [self._full(self._row(turn)) for turn in turns], len(turns), list[float]()
        try:
            given = self._inputs(prompts, "left")
            cache, mask_BT = self._general.call({**given, "use_cache": True}, 1).past_key_values, given["attention_mask"]
            order = [*range(count)] * times
            for step in range(2):
                if times > 1:
                    cache.reorder_cache(torch.tensor(order, device=mask_BT.device))
                mask_BT = torch.nn.functional.pad(mask_BT[order], (0, 1), value=1)
                last = range(len(order) - count, len(order))  # others get another token, and leave
                tokens = [answers[i % count][step if i in last else -1] for i in range(len(order))]
                positions = [prompts[i % count].next_position + step for i in range(len(order))]
                made_BV = self._general.step(cache, tokens, positions, mask_BT).logits[-count:, -1]
                for own, prompt, found_V in zip(whole, prompts, made_BV, strict=True):
                    gaps.append(self._gap(own[len(prompt) + step][None], found_V[None]))
                order = [*last]
        except torch.OutOfMemoryError:
            raise
        except FAILURES:
            return False
        return max(gaps) <= self._bound

    def _train_mode(self, kinds: Sequence[MediaKind | None]) -> None:
        row = self._row(self._turn(kinds[0], 0))
        logits = self._full(row)
        try:
            training_mode(self._model)
            worst = self._gap(logits, self._full(row))
        finally:
            self._model.eval()
        if worst > self._bound:
            self._general.recomputes = False

    # What they are made of.

    def _turn(self, kind: MediaKind | None, size: int, *, another: bool = False) -> list[Segment]:
        """A prompt and its answer; without a medium, a longer prompt for a larger ``size``."""
        content: list[Media | Text] = [self.medium(kind, size, another)] if kind else [Text(QUESTION)] * size
        content.append(Text(QUESTION))
        return [self.chat.render([Message("user", tuple(content))]), self.chat.respond(ANSWERS[0], f"answer-{size}")]

    def _more(self, kind: MediaKind | None, before: Sequence[Segment], size: int) -> list[Segment]:
        content: list[Media | Text] = [*([self.medium(kind, size, True)] if kind else []), Text("And this?")]
        answer = self.chat.respond(ANSWERS[1], "answer-2")
        return [self.chat.extend([Message("user", tuple(content))], after=before[-1]), answer]

    def medium(self, kind: MediaKind, size: int, another: bool = False) -> Media:
        """A small medium in the store of ``chat``."""
        import numpy as np
        from PIL import Image

        from sensorium.data.made_media import encode_clip
        from sensorium.data.sound import encode_wav
        from sensorium.vocabulary.decoding import AudioParameters, VideoParameters

        first, second = MORE_SIZES[kind][size]
        if kind == "sound":
            rate = self.chat.media_format.stock[kind].rate  # type: ignore[attr-defined]
            times = np.arange(round(rate * first)) / rate
            samples = np.sin(2 * np.pi * (660 if another else 440) * times) / 2
            return self.chat.store.put(encode_wav(samples, rate), "sound", "check.wav", AudioParameters(sample_rate=rate))
        across, down = np.meshgrid(np.linspace(0, 1, int(first)), np.linspace(0, 1, int(second)))
        levels = np.stack([across, down, (across + down) % 1], axis=2)
        if kind == "video":
            bright_T = np.linspace(0, 1, 4 + 4 * size)[:, None, None, None]
            frames = ((levels * bright_T if another else levels * (1 - bright_T)) * 255).astype("uint8")
            return self.chat.store.put(
                encode_clip(frames, 4.0), "video", "check.mp4", VideoParameters(frames=len(frames) // 2)
            )
        data = io.BytesIO()
        Image.fromarray(((1 - levels if another else levels) * 255).astype("uint8")).save(data, "PNG")
        return self.chat.store.put(data.getvalue(), "picture", "check.png")

    def _row(self, segments: Sequence[Segment]) -> StockRow:
        return self._general.row(self.chat, segments)

    def _inputs(self, rows: Sequence[StockRow], side: Any) -> dict[str, Tensor]:
        return self._general.inputs(self.chat, rows, side)

    def _full(self, row: StockRow) -> Tensor:
        """Log-probs [T, V] of a row by one forward."""
        logits: Tensor = self._general.call({**self._inputs([row], "right"), "use_cache": False}).logits[0]
        return logits

    @property
    def _bound(self) -> float:
        return BOUND if self._exact else NARROW_BOUND

    def _gap(self, one: Tensor, other: Tensor) -> float:
        return self._worst(one, other)[0]

    def _worst(self, one_TV: Tensor, other_TV: Tensor) -> tuple[float, int]:
        """The largest difference of log-probs of two sets of logits, and its token."""
        logs_TV, others_TV = one_TV.float().log_softmax(-1), other_TV.float().log_softmax(-1)
        gaps_TV = (logs_TV - others_TV).abs()
        if self._exact:
            gaps_T = gaps_TV.masked_fill(logs_TV < -20, 0).amax(-1)
        else:
            gaps_T = (gaps_TV * logs_TV.exp()).sum(-1)
        gaps_T = gaps_T.nan_to_num(torch.inf)
        return float(gaps_T.max()), int(gaps_T.argmax())

    @contextmanager
    def _naming(self) -> Iterator[None]:
        """Inside, what the model's own code raises becomes a ModelError."""
        try:
            yield
        except torch.OutOfMemoryError:
            raise
        except ModelError as error:
            raise ModelError(f"the general path cannot train this {self._model.config.model_type}: {error}.") from error
        except FAILURES as error:
            raise ModelError(
                f"the general path cannot train this {self._model.config.model_type}: its own forward fails on what its "
                f"own processor gives: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}."
            ) from error
