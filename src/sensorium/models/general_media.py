"""Media on the general path: what a picture or a sound becomes is read off the checkpoint's own processor.

It is called once for each medium, with the token by which the chat template shows one, and answers with all that the model
needs::

    "<start_of_image>" and a picture  →  input_ids        "\\n\\n" <start_of_image> <image> <image> <end_of_image> "\\n\\n"
                                         token_type_ids    0     0                 1       1       0              0
                                         pixel_values      [1, 3, 16, 16]

The ids are the expansion of the placeholder; text at its ends joins the text around it, as it does in a whole prompt. Keys
with a number for each token go along with the ids, and are 0 elsewhere. The others are inputs of towers. How those of
several media are put together is found by asking the processor for media of different sizes, alone and together.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from sensorium.models.family import DefaultMedia
from sensorium.models.prepared_media import Extent, Preprocessor, TowerInput
from sensorium.models.preprocessors import naming_items, refuse_other_rate
from sensorium.models.segment_layout import Expansion, expansion_of
from sensorium.recipe.family_facts import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind
from sensorium.vocabulary.decoding import FrameRule
from sensorium.vocabulary.errors import MediaError, ModelError

if TYPE_CHECKING:
    import numpy as np
    import torch
    from PIL import Image
    from torch import Tensor

    from sensorium.data.video import DecodedVideo
else:
    np, torch, Image = DeferredModule("numpy"), DeferredModule("torch"), DeferredModule("PIL.Image")

Company = Literal["any", "alike", "alone"]
"""Which rows may be computed together: any, those whose media have inputs of equal shapes, or none."""

NOT_INPUTS = ("input_ids", "attention_mask", "labels")
# What a processor calls the media of each kind, what it has for them, and how configs name the tokens that take features.
WORDS: dict[MediaKind, tuple[str, str, tuple[str, ...], str]] = {
    "picture": ("image", "images", ("image_processor",), "image|vision|visual"),
    "video": ("video", "videos", ("video_processor",), "image|vision|visual|video"),
    "sound": ("audio", "audio", ("feature_extractor", "audio_processor"), "audio|speech|sound"),
}
TRIAL_CLIPS = ((4, 56, 56), (6, 112, 84), (8, 56, 84))  # frames, width, height
TRIAL_SIZES = ((56, 56), (704, 416), (120, 540))  # of pictures that most processors treat differently
TRIAL_SECONDS = (0.5, 1.25, 0.8)
WORD = "red"  # a text before and after a medium
MARK = "\ue000"  # a text whose place in a rendered conversation is looked for


@dataclass(frozen=True)
class StockExtent(Extent):
    """What a medium becomes: ``ids``, and for some keys a number of each of them. ``places`` go to ``get_rope_index``."""

    ids: tuple[int, ...] = ()
    types: tuple[tuple[str, tuple[int, ...]], ...] = ()
    places: tuple[tuple[str, tuple[Any, ...]], ...] = ()


@dataclass(frozen=True)
class StockInput(TowerInput):
    """A medium as the model's forward takes it: tensors by key."""

    tensors: Mapping[str, Tensor] = field(default_factory=dict)


@dataclass(frozen=True)
class Join:
    """How the tensors of several media become one: along an axis, filled up to the largest where there is a ``fill``."""

    axis: int = 0
    fill: float | None = None

    def __call__(self, tensors: Sequence[Tensor]) -> Tensor:
        if self.fill is not None:
            sizes = [max(sizes) for sizes in zip(*(tensor.shape for tensor in tensors), strict=True)]
            tensors = [self._filled(tensor, sizes) for tensor in tensors]
        return torch.cat(list(tensors), self.axis)

    def fits(self, shapes: Sequence[tuple[int, ...]]) -> bool:
        """Whether tensors of these shapes can be put together."""
        others = {shape[: self.axis] + shape[self.axis + 1 :] for shape in shapes}
        return self.fill is not None or len(others) <= 1

    def _filled(self, tensor: Tensor, sizes: Sequence[int]) -> Tensor:
        whole = [
            own if axis == self.axis else size for axis, (own, size) in enumerate(zip(tensor.shape, sizes, strict=True))
        ]
        filled = tensor.new_full(whole, self.fill or 0)
        filled[tuple(slice(0, own) for own in tensor.shape)] = tensor
        return filled


def find_join(one: Tensor, other: Tensor, both: Tensor) -> Join | None:
    """How two tensors were put together, or None."""
    if one.dim() != other.dim() or one.dim() != both.dim():
        return None
    for axis in range(one.dim()):
        if one.shape[:axis] + one.shape[axis + 1 :] == other.shape[:axis] + other.shape[axis + 1 :]:
            join = Join(axis)
            if (made := join([one, other])).shape == both.shape and torch.equal(made, both):
                return join
    for axis, fill in product(range(one.dim()), (0, 1)):
        join = Join(axis, fill)
        if (made := join([one, other])).shape == both.shape and torch.equal(made, both):
            return join
    return None


def _is_per_token(key: str, made: Mapping[str, Any]) -> bool:
    return key not in NOT_INPUTS and isinstance(made[key], torch.Tensor) and made[key].shape == made["input_ids"].shape


class StockProcessor:
    """A checkpoint's processor for one kind of medium. ``placeholder``: the text by which the template shows it.

    ``ends``: text at the ends of its expansion, which joins the text around it. ``tail``: what the processor writes at the
    end of a prompt that shows the medium. ``joins``: how the tensors of each key are put together. ``numbered``: whether
    the processor's tokens of a medium depend on those before it (numbers of pictures).
    """

    def __init__(self, kind: MediaKind, processor: Any, placeholder: str, rate: int, feature_ids: frozenset[int]) -> None:
        self.kind, self.placeholder, self.rate = kind, placeholder, rate
        self._processor, self._tokenizer, self._feature_ids = processor, processor.tokenizer, feature_ids
        self._special = set(self._tokenizer.added_tokens_decoder)
        self._nested, self._interned = True, dict[Any, Any]()
        self.ends = self._own_ends = ("", "")
        self.tail = ""
        self.joins: dict[str, Join] = {}
        self.type_keys: tuple[str, ...] = ()
        self.numbered = False
        self._try_out()

    def _try_out(self) -> None:
        """Find out all of the above with a few media, alone and in pairs."""
        media = trial_media(self.kind, self.rate)
        between = self._tokenizer.eos_token or ""
        try:
            made = self._call(media[:1])
        except Exception:
            self._nested = False
            made = self._call(media[:1])
        found = [made, *(self._call([one]) for one in media[1:])]
        ids = [call["input_ids"][0].tolist() for call in found]
        if not self._feature_ids.intersection(ids[0]):
            raise ModelError(f"its processor writes no token that takes features of a {self.kind}: it drops it")
        # A key may have the shape of one medium's ids by chance (a grid of three numbers, three ids).
        self.type_keys = tuple(sorted(key for key in made if all(_is_per_token(key, call) for call in found)))
        if self.kind != "video":  # at whose ends may be times, which are other ones for each
            self._own_ends = self._text_before(ids[0]), self._text_after(ids[0])
            within = self._call(media[:1], text=f"{WORD}{self.placeholder}{WORD}")["input_ids"][0].tolist()
            after, _, self.tail = self._text_after(within).partition(WORD)
            self.ends = self._text_before(within).rpartition(WORD)[2], after
        places = range(len(media))
        try:
            pairs = {place: self._call([media[0], media[place]], between) for place in places}
            marks = self._tokenizer(between, add_special_tokens=False)["input_ids"]
            self.numbered = bool(between) and pairs[1]["input_ids"][0].tolist() != ids[0] + marks + ids[1]
        except ValueError:  # it takes one medium a text (GLM-ASR), or videos of one size alone
            several = places[:1] if self.kind == "video" else places
            pairs = {place: self._call([media[0], media[place]], apart=self.kind != "video") for place in several}
        for key in sorted(made.keys() - {*self.type_keys, *NOT_INPUTS}):
            if not all(isinstance(call.get(key), torch.Tensor) for call in (*found, *pairs.values())):
                raise ModelError(f"its processor gives '{key}' of a {self.kind} in a form that is no tensor")
            first = made[key]
            # Media of unequal shapes show how they are put together; if they depend on each other, equal ones do.
            ordered = sorted(pairs, key=lambda place: (found[place][key].shape == first.shape, place == 0))
            joins = [find_join(first, found[place][key], pairs[place][key]) for place in ordered]
            if not any(joins):
                raise ModelError(
                    f"its processor makes '{key}' of shape {list(first.shape)} of one {self.kind}, and of shape "
                    f"{list(pairs[0][key].shape)} of two equal ones, which are not the same numbers put together"
                )
            self.joins[key] = next(join for join in joins if join is not None)

    def tokens(self, text: str, media: Sequence[Any]) -> list[int]:
        """The processor's own tokens of a whole text with these media."""
        ids: list[int] = self._call(media, text=text)["input_ids"][0].tolist()
        return ids

    def _call(self, media: Sequence[Any], between: str = "", text: str = "", *, apart: bool = False) -> dict[str, Any]:
        """What the processor makes of media in one text, or ``apart``, each in a text of its own."""
        _, argument, *_ = WORDS[self.kind]
        given: Any = list(media)
        options: dict[str, Any] = {"text_kwargs": {"padding": True}} if apart else {}
        if self.kind == "video":  # whose frames were sampled already
            options |= {"do_sample_frames": False, "video_metadata": [video_metadata(clip) for clip in media]}
            given = [torch.from_numpy(clip.frames.transpose(0, 3, 1, 2).copy()) for clip in media]
        if self.kind == "picture" and self._nested:
            given = [[medium] for medium in given] if apart else [given]
        if self.kind == "sound":
            options["sampling_rate"] = self.rate
        texts = [self.placeholder] * len(media) if apart else [text or between.join([self.placeholder] * len(media))]
        made = self._processor(text=texts, **{argument: given}, return_tensors="pt", add_special_tokens=False, **options)
        lists = {
            key: torch.tensor(value) for key, value in made.items() if isinstance(value, list) and self.kind == "video"
        }
        return {**made, **lists}

    def _text_before(self, ids: Sequence[int]) -> str:
        """Ordinary text before the first special token."""
        text: str = self._tokenizer.decode(ids[: next(i for i, token in enumerate(ids) if self._is_mark(token))])
        return text

    def _text_after(self, ids: Sequence[int]) -> str:
        """Ordinary text after the last special token, which is decoded as well: some tokenizers drop a first space."""
        last = next(i for i in reversed(range(len(ids))) if self._is_mark(ids[i]))
        text: str = self._tokenizer.decode(ids[last:])
        return text.removeprefix(self._tokenizer.decode(ids[last : last + 1]))

    def _is_mark(self, token: int) -> bool:
        return token in self._special or token in self._feature_ids

    def __call__(self, items: Sequence[tuple[Media, Any]]) -> list[TowerInput]:
        return [self._prepare(media, decoded) for media, decoded in items]

    def _prepare(self, media: Media, decoded: Any) -> StockInput:
        with naming_items([(media, decoded)], "checkpoint's"):
            if self.kind == "sound":
                refuse_other_rate(media, decoded, self.rate)
                made = self._call([decoded.samples])
            else:
                made = self._call([decoded])
        ids = made["input_ids"][0].tolist()
        start, end = self._bounds(ids)
        tensors = {key: made[key] for key in self.joins if key in made}
        if not self._feature_ids.intersection(ids) or tensors.keys() != self.joins.keys():
            raise MediaError(f"{media.name}: the checkpoint's processor makes nothing of it.")
        count = sum(token in self._feature_ids for token in ids)
        extent = StockExtent(
            self.kind,
            (count, 1, 1),
            ids=self._shared(tuple(ids[start:end])),
            types=self._shared(tuple((key, tuple(made[key][0, start:end].tolist())) for key in self.type_keys)),
            places=tuple(
                (key, tuple(tensor.flatten().tolist()))
                for key, tensor in tensors.items()
                if not tensor.is_floating_point() and tensor.numel() <= 64
            ),
        )
        largest = max(tensors.values(), key=lambda tensor: tensor.nbytes)
        return StockInput(largest, extent, {key: tensor.clone() for key, tensor in tensors.items()})

    def _bounds(self, ids: Sequence[int]) -> tuple[int, int]:
        """Where an expansion begins and ends without the text at its ends."""
        counts = [
            len(self._tokenizer(text, add_special_tokens=False)["input_ids"]) if text else 0 for text in self._own_ends
        ]
        return counts[0], len(ids) - counts[1]

    def _shared(self, value: Any) -> Any:
        """The same object for equal values: media of one size share their ids."""
        return self._interned.setdefault(value, value)


def trial_media(kind: MediaKind, rate: int) -> list[Any]:
    """Media of different sizes."""
    if kind == "video":
        return [_trial_clip(*size) for size in TRIAL_CLIPS]
    if kind == "sound":
        times = [np.arange(round(rate * seconds)) / rate for seconds in TRIAL_SECONDS]
        return [np.sin(2 * np.pi * 440 * (i + 1) * time_N).astype("float32") / 2 for i, time_N in enumerate(times)]
    pictures = []
    for i, (width, height) in enumerate(TRIAL_SIZES):
        across, down = np.meshgrid(np.linspace(0, 1, width), np.linspace(0, 1, height))
        levels = np.stack([across, down, (across + down + i) % 1], axis=2)
        pictures.append(Image.fromarray((levels * 255).astype("uint8")))
    return pictures


def _trial_clip(frames: int, width: int, height: int) -> DecodedVideo:
    """Frames of a brightness that rises, two a second of a file of four."""
    from sensorium.data.video import DecodedVideo

    levels = np.arange(frames * height * width * 3).reshape(frames, height, width, 3) * 255 // (frames * height * width * 3)
    indices = 2 * np.arange(frames)
    size = width, height
    return DecodedVideo(levels.astype("uint8"), indices / 4, 4.0, frames / 2, size, 0.0, frames / 2, indices, 0.5)


def video_metadata(clip: DecodedVideo) -> Any:
    """What a processor wants to know of frames that were sampled already."""
    from transformers.video_utils import VideoMetadata

    return VideoMetadata(
        total_num_frames=max(int(clip.indices[-1]) + 1, round(clip.duration_s * clip.source_fps)),
        fps=clip.source_fps, width=clip.size[0], height=clip.size[1], duration=clip.duration_s,
        video_backend="pyav", frames_indices=clip.indices.tolist(),
    )  # fmt: skip


class GeneralMedia(DefaultMedia):
    """Pictures, videos and sounds as the checkpoint's own processor writes them.

    ``left_out``: kinds it cannot take, and why.
    """

    frame_rule = FrameRule("middle")

    def __init__(self, config: Any, processor: Any) -> None:
        # A prompt that attends both ways would see the turns after it.
        self.one_turn = getattr(config.get_text_config(), "use_bidirectional_attention", None) in (True, "all")
        self.placeholders: dict[MediaKind, int] = {}
        self.preprocessors: dict[MediaKind, Preprocessor] = {}
        self.stand_ins: dict[str, int] = {}
        self.joined: dict[MediaKind, tuple[str, str, str]] = {}
        self.left_out: dict[MediaKind, str] = {}
        self.stock: dict[MediaKind, StockProcessor] = {}
        features = list(_feature_tokens(config.to_dict()))
        self.feature_ids = frozenset(token for _, tokens in features for token in tokens)
        speaks = getattr(processor, "chat_template", None)  # one without a template is refused by what renders
        for kind, (block, _, parts, words) in WORDS.items() if speaks else ():
            part = next((found for name in parts if (found := getattr(processor, name, None)) is not None), None)
            ids = frozenset(token for key, tokens in features if re.match(words, key) for token in tokens)
            tower = {"image": "vision", "video": "vision"}.get(block, block)
            if part is None or getattr(config, f"{tower}_config", part) is None:
                continue
            try:
                if not ids:
                    raise ModelError(f"its config.json names no token that takes its features ({block}_token_id)")
                found = self._find(kind, block, processor, getattr(part, "sampling_rate", 0), ids)
                placeholder = processor.tokenizer.convert_tokens_to_ids(found.placeholder)
                if placeholder in self.placeholders.values():
                    raise ModelError(
                        f"its chat template shows a {kind} by the token of another kind ('{found.placeholder}')"
                    )
            except Exception as error:  # whatever a processor raises that cannot be used
                named = "" if isinstance(error, ModelError) else f"{type(error).__name__}: "
                self.left_out[kind] = named + (str(error).splitlines() or [""])[0].rstrip(".")
                continue
            self.stock[kind] = self.preprocessors[kind] = found
            self.placeholders[kind] = placeholder
            self.stand_ins[found.placeholder] = self.placeholders[kind]  # some tokenizers do not mark it as special
            self.tail = self.tail or found.tail
            if any(found.ends):
                self.joined[kind] = ("", *found.ends)
        if self.left_out and not features:
            raise ModelError(
                "its text does not hold pictures or sounds as tokens (its config.json names none, as image_token_id "
                "would): it is a model of another kind, such as a captioner that reads one picture by cross-attention "
                "(BLIP). Use a checkpoint that chats about media; docs/guides/families.md lists the types that were tried."
            )
        if self.left_out and not self.stock:
            raise ModelError(". ".join(self.notes) + ". What it cannot be shown it could not learn from either.")
        # What the check of the model's weights finds out.
        self.company: Company | None = None
        self.alike: frozenset[MediaKind] = frozenset()  # kinds that one forward takes in one size
        self.mixes = True  # pictures and videos in one forward
        self.forks = True  # the cache of a prompt goes on as several answers
        self.type_keys = tuple(sorted({key for found in self.stock.values() for key in found.type_keys}))

    def _find(self, kind: MediaKind, block: str, processor: Any, rate: int, ids: frozenset[int]) -> StockProcessor:
        """The processor of a kind, by the first token of what the template shows for it that the processor replaces."""
        shown = _shown(processor, block)
        tokens = sorted(processor.tokenizer.get_added_vocab(), key=len, reverse=True)
        inside = re.findall("|".join(map(re.escape, tokens)), shown) if tokens else []
        if not inside:
            raise ModelError(f"its chat template shows a {kind} by no token ('{shown}')")
        for token in dict.fromkeys(inside):
            try:
                return StockProcessor(kind, processor, token, rate, ids)
            except Exception as error:
                failed = error
        raise failed

    def leave_out(self, kind: MediaKind, reason: str) -> None:
        """Take no media of a kind any more."""
        for table in (self.placeholders, self.preprocessors, self.stock):
            del table[kind]
        self.left_out[kind] = reason

    @property
    def notes(self) -> list[str]:
        """What a user should know of its media, a sentence each."""
        found = [f"a {kind} cannot be shown to it: {reason}" for kind, reason in self.left_out.items()]
        for kind, stock in self.stock.items():
            if stock.numbered:
                found.append(
                    f"its processor writes several {kind}s of a prompt otherwise than each alone (numbered, say); here "
                    "each is written as if alone, because a thread grows turn by turn"
                )
        return found

    def expand(self, extent: Extent) -> Expansion:
        """The processor's own tokens."""
        assert isinstance(extent, StockExtent), "its processors make no other"
        feature = next(token for token in extent.ids if token in self.feature_ids)
        if sum(token in self.feature_ids for token in extent.ids) == extent.ids.count(feature):
            return expansion_of(extent.ids, feature)
        marked = [feature if token in self.feature_ids else -1 for token in extent.ids]
        return Expansion(extent.ids, expansion_of(marked, feature).runs)


def _feature_tokens(config: Mapping[str, Any]) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Tokens of a config whose embeddings features replace, by the keys that name them."""
    for key, value in config.items():
        if isinstance(value, Mapping):
            yield from _feature_tokens(value)
        elif isinstance(key, str) and re.fullmatch(
            r"(image|video|audio|speech|sound|visual_indicator)_token_(id|index|ids)", key
        ):
            tokens = value if isinstance(value, list | tuple) else [value]
            yield key, tuple(token for token in tokens if isinstance(token, int) and token >= 0)


def _shown(processor: Any, block: str) -> str:
    """What the chat template writes for a medium that opens a user's message."""
    given = [{"role": "user", "content": [{"type": block}, {"type": "text", "text": MARK}]}]
    bare = [{"role": "user", "content": [{"type": "text", "text": MARK}]}]
    rendered = [processor.apply_chat_template(messages, tokenize=False) for messages in (given, bare)]
    if not all(isinstance(text, str) for text in rendered):  # Voxtral's, whose tokenizer is another library's
        raise ModelError(
            "its processor renders no chats as text; it may need a package for that: pip install mistral_common"
        )
    texts = [text.partition(MARK)[0] for text in rendered]
    start = next((i for i, pair in enumerate(zip(*texts, strict=False)) if pair[0] != pair[1]), min(map(len, texts)))
    return texts[0][start:]
