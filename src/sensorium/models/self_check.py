"""What the general path refuses by a checkpoint's config, and what it holds a loaded model to before anything is spent.

The check plays a conversation of two turns, each with a small medium of another size, by the checkpoint's own processor::

    <user> [picture] What is this? <assistant> A square. <user> [larger picture] And this? <assistant> A ring.

- the first turn computes the same whether or not the second follows, or the model cannot be trained on threads;
- token by token on the cache gives what one forward gives, or what is sampled is not what is trained;
- padded rows give what each gives alone; where they do not, rows are computed with their like, or one by one;
- sdpa gives what eager gives; where it does not, the model computes eagerly;
- train mode gives what eval mode gives, or nothing can be recomputed in the backward pass;
- another picture of the same size gives other log-probs; this is only noted, for a fresh projector may be zero.

Differences are of log-probs. In float32 they are rounding up to ``BOUND``; in bfloat16 a mean over the distribution is held
to a wider bound, because single log-probs are off by 0.05 there in sound models.
"""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from sensorium.models.deferred import DeferredModule
from sensorium.vocabulary.content import Media, MediaKind, Message, Text
from sensorium.vocabulary.episode import Segment
from sensorium.vocabulary.errors import ModelError, SensoriumError

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from sensorium.models.families.general import General, StockRow
    from sensorium.models.policy import Policy
else:
    torch = DeferredModule("torch")

BOUND = 1e-3
QUESTION = "What is this?"
NARROW_BOUND = 0.3  # of a mean over the distribution, in bfloat16
ANSWERS = ("A square.", "A ring.")
MORE_SIZES = {"picture": ((64, 64), (180, 260)), "sound": ((0.5, 0.0), (1.25, 0.0))}


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
    policy.general.unchecked = False
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
        self._chat = ChatProcessor(
            chat.family, chat.media_format, chat.tokenizer, chat.processor, MediaStore(),
            vocab_size=chat.vocab_size, end_ids=chat.stop_ids,
        )  # fmt: skip
        self._exact = policy.dtype == torch.float32
        self._kinds: tuple[MediaKind, ...] = tuple(chat.media_format.placeholders)
        self._unequal = True  # whether media of different sizes may be computed in one forward
        self.notes: list[str] = []

    def run(self) -> None:
        """Raises ModelError where the model cannot be trained; sets how rows may be computed together."""
        media_format = self._chat.media_format
        media_format.company = "alone"  # type: ignore[attr-defined]
        try:
            with torch.no_grad(), self._naming():
                kinds: Sequence[MediaKind | None] = self._kinds or (None,)
                self._attention(kinds)
                for kind in kinds:
                    self._turns(kind)
                media_format.company = self._company(kinds)  # type: ignore[attr-defined]
                self._train_mode(kinds)
        finally:
            self._chat.decoder.close()

    # The parts of the check.

    def _attention(self, kinds: Sequence[MediaKind | None]) -> None:
        if self._model.config._attn_implementation != "sdpa":
            return
        rows = [self._row(self._turn(kind, i)) for kind in kinds for i in (0, 1)]
        stock = [self._full(row) for row in rows]
        self._model.set_attn_implementation("eager")
        worst = max(self._gap(one, self._full(row)) for one, row in zip(stock, rows, strict=True))
        if worst <= self._bound:
            self._model.set_attn_implementation("sdpa")
        else:
            self.notes.append(
                f"its attention gives other log-probs with torch's fused kernels (by {worst:.2g}), so that it is computed "
                "without them (eager), more slowly"
            )

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
        if self._chat.one_turn:
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
            self._unequal = False
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

        owner = self._chat.owner
        content: Any = [*([{"type": TEMPLATE_KINDS[kind]}] if kind else []), {"type": "text", "text": QUESTION}]
        messages = [{"role": "user", "content": content if self._kinds else QUESTION}]
        text = owner.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
        if kind is None:
            ids = self._chat.tokenizer(text, add_special_tokens=False)["input_ids"]
        else:
            media = [self._chat.decoder.get(span.media) for span in prompt.media]
            media = [getattr(decoded, "samples", decoded) for decoded in media]
            ids = self._chat.media_format.stock[kind].tokens(text, media)  # type: ignore[attr-defined]
        ours = self._chat.layout(prompt).ids_T.tolist()
        if ours != ids:
            place = next(
                (i for i, pair in enumerate(zip(ours, ids, strict=False)) if pair[0] != pair[1]), min(len(ours), len(ids))
            )
            shown = [self._chat.tokenizer.decode(several[place : place + 3]) for several in (ours, ids)]
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
            raise ModelError("its forward returns no cache of keys and values")
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
        text = self._row(self._turn(None, 0))
        for company in ("any", "alike") if self._unequal else ("alike",):
            sizes = (0, 1) if company == "any" else (0, 0)
            rows = [self._row(self._turn(kind, size, another=i > 0)) for kind in kinds for i, size in enumerate(sizes)]
            if self._together([*rows, text]):
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

    def _train_mode(self, kinds: Sequence[MediaKind | None]) -> None:
        from sensorium.models.families.general import training_mode

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
        """A prompt and its answer."""
        content: list[Media | Text] = [*([self._medium(kind, size, another)] if kind else []), Text(QUESTION)]
        return [self._chat.render([Message("user", tuple(content))]), self._chat.respond(ANSWERS[0], f"answer-{size}")]

    def _more(self, kind: MediaKind | None, before: Sequence[Segment], size: int) -> list[Segment]:
        content: list[Media | Text] = [*([self._medium(kind, size, True)] if kind else []), Text("And this?")]
        answer = self._chat.respond(ANSWERS[1], "answer-2")
        return [self._chat.extend([Message("user", tuple(content))], after=before[-1]), answer]

    def _medium(self, kind: MediaKind, size: int, another: bool) -> Media:
        import numpy as np
        from PIL import Image

        from sensorium.data.sound import encode_wav
        from sensorium.vocabulary.decoding import AudioParameters

        first, second = MORE_SIZES[kind][size]
        if kind == "sound":
            rate = self._chat.media_format.stock[kind].rate  # type: ignore[attr-defined]
            times = np.arange(round(rate * first)) / rate
            samples = np.sin(2 * np.pi * (660 if another else 440) * times) / 2
            return self._chat.store.put(encode_wav(samples, rate), "sound", "check.wav", AudioParameters(sample_rate=rate))
        across, down = np.meshgrid(np.linspace(0, 1, int(first)), np.linspace(0, 1, int(second)))
        levels = np.stack([across, down, (across + down) % 1], axis=2)
        data = io.BytesIO()
        Image.fromarray(((1 - levels if another else levels) * 255).astype("uint8")).save(data, "PNG")
        return self._chat.store.put(data.getvalue(), "picture", "check.png")

    def _row(self, segments: Sequence[Segment]) -> StockRow:
        return self._general.row(self._chat, segments)

    def _inputs(self, rows: Sequence[StockRow], side: Any) -> dict[str, Tensor]:
        return self._general.inputs(self._chat, rows, side)

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
        except (RuntimeError, ValueError, TypeError, AttributeError, LookupError, NotImplementedError) as error:
            raise ModelError(
                f"the general path cannot train this {self._model.config.model_type}: its own forward fails on what its "
                f"own processor gives: {type(error).__name__}: {(str(error).splitlines() or [''])[0]}."
            ) from error
