"""Runs on stock forwards: what is on disk of each family's run is what transformers computes from the same weights.

A short run of every row of ``GENERAL`` plays two turns with a picture or a sound in each, and a third of text. Nothing but
its directory is read: episodes, metrics, checkpoints. The expectation is made by the checkpoint's own processor and one
forward over the whole conversation, without a cache.
"""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import soundfile
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoConfig, AutoProcessor, AutoTokenizer

from sensorium.assembly import models
from sensorium.cli.export import export
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import encode_wav
from sensorium.envs.protocol import Observation, StepResult
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.load import parse_recipe
from sensorium.trainer.run import train
from sensorium.vocabulary import Media, Message, system, user
from tests.families import wide_weights
from tests.general_checkpoints import GENERAL, make_checkpoint, model_class
from tests.recipes import quick

from .clips import decoded, noise
from .test_families_table import PAGE, general_row
from .test_general_checkpoints import sound

Json = dict[str, Any]
HERE = __name__
STAND_IN = "<action>"  # a token of its own in every tiny tokenizer, which nothing else in these conversations has
GROUP, STEPS = 2, 2


class Gallery:
    """Shows a medium in each of two turns and asks once more. ``kind``: "image", "audio", or "" for text alone.

    ``alike``: both of one size. Otherwise the first picture is wide and the second high, and the second sound is longer.
    """

    instant = True

    def __init__(self, store: MediaStore, kind: str, turns: int, alike: bool = False) -> None:
        self.store, self.kind, self.turns, self.alike = store, kind, turns, alike

    @classmethod
    def content_key(cls, seed: int, options: Json) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.seed, self.turn = seed, 0
        return (system("Answer briefly."),), self._shown()

    def step(self, response: str) -> StepResult:
        self.turn += 1
        done = self.turn == self.turns
        return StepResult(None if done else self._shown(), reward=float(len(response) % 3), done=done)

    def demonstrate(self) -> str:
        return "yes"

    def close(self) -> None: ...

    def _shown(self) -> Observation:
        shown = [self._medium(self.seed % 7 + self.turn)] if self.kind and self.turn < 2 else []
        return Observation((user(*shown, ("what colour?", "and where is it?", "yes or no?")[self.turn]),))

    def _medium(self, seed: int) -> Media:
        if self.kind == "image":
            return noise(self.store, seed, *((24, 50) if self.turn and not self.alike else (40, 24)))
        return self.store.put(
            encode_wav(sound(seed, 0.4 + 0.3 * self.turn * (not self.alike))), "sound", f"sound-{seed}.wav"
        )


def play(model: Path, run: Path, kind: str, turns: int, alike: bool = False, family: str = "auto", **sections: Any) -> Path:
    """A run of two steps, with a checkpoint after each."""
    recipe = quick(
        "general",
        run_dir=str(run),
        steps=STEPS,
        model={"path": str(model), "device": "cpu", "family": family},
        tasks={"train": [{"source": "environments", "options": {
            "environment": f"{HERE}:Gallery", "size": 8, "options": {"kind": kind, "turns": turns, "alike": alike}}}]},
        batch={"prompts_per_step": 2, "group_size": GROUP},
        rollout={"max_new_tokens": 5, "max_turns": turns},
        rewards={"terms": [{"name": "environment"}]},
        optimizer={"lr": 1e-3},
        checkpoint={"every": 1, "keep": STEPS},
    )  # fmt: skip
    train(parse_recipe(json.dumps(recipe | sections), "general", []))
    return run


class Stock:
    """A checkpoint as transformers opens it, and the policy that it is: special tokens are never sampled, but stops are."""

    def __init__(self, folder: Path, attention: str = "sdpa", one_turn: bool = False) -> None:
        config = AutoConfig.from_pretrained(folder)
        self.model = weights_of(folder, attention).eval()
        seeing = any(hasattr(config, f"{part}_config") for part in ("vision", "audio"))
        self.owner = (AutoProcessor if seeing else AutoTokenizer).from_pretrained(folder)
        self.tokenizer = getattr(self.owner, "tokenizer", self.owner)
        self.one_turn = one_turn
        added = self.tokenizer.added_tokens_decoder.items()
        special = {i for i, token in added if token.special and "_of_box|>" not in token.content}  # GLM-4V writes boxes
        unused = range(len(self.tokenizer), config.get_text_config().vocab_size)
        stops = np.atleast_1d(self.model.generation_config.eos_token_id).tolist()
        self.stop, self.forbidden = stops[0], torch.tensor(sorted((special | {*unused}) - {*stops}))
        (self.stand_in,) = self.tokenizer(STAND_IN, add_special_tokens=False)["input_ids"][-1:]

    def inputs(self, run: Path, episode: Json, blank: bool = False) -> tuple[Json, list[tuple[int, list[int]]]]:
        """The whole conversation as the processor makes it, and where which tokens of each response are in it.

        The template writes a token of its own in place of each answer, and the sampled tokens replace it.
        """
        turns = [episode["turns"][0]] if self.one_turn else episode["turns"]
        messages, media = list(episode.get("head", [])), []
        for turn in turns:
            messages += turn["observation"]
            if not self.one_turn:
                messages.append({"role": "assistant", "content": [{"text": STAND_IN}]})
        conversation = [
            {"role": m["role"], "content": [_shown(run, b, media, blank) for b in m["content"]]} for m in messages
        ]
        if self.owner is self.tokenizer:
            for message in conversation:
                message["content"] = message["content"][0]["text"]
        template = self.owner.chat_template or self.tokenizer.chat_template
        text = self.owner.apply_chat_template(
            conversation, chat_template=template, tokenize=False, add_generation_prompt=self.one_turn
        )
        given: Json = {}
        for kind, medium in media:
            given.setdefault("images" if kind == "picture" else "audio", []).append(medium)
        made = dict(self.owner(text=[text], **given, add_special_tokens=False, return_tensors="pt"))
        made.pop("labels", None)
        if (mark := self.tokenizer.get_vocab().get("<image_id>")) is not None:
            # MiniCPM-V numbers the pictures of a prompt; here each has the number 0 (docs/guides/families.md).
            ids_T = made["input_ids"][0]
            ids_T[1:][ids_T[:-1] == mark] = self.tokenizer.convert_tokens_to_ids("0")
        ids = made["input_ids"][0].tolist() + ([self.stand_in] if self.one_turn else [])
        per_token = {
            key: value for key, value in made.items()
            if torch.is_tensor(value) and value.shape == made["input_ids"].shape and key != "input_ids"
        }  # fmt: skip
        responses = [episode["segments"][turn["response"]]["tokens"] for turn in turns]
        return self._spliced(made, ids, per_token, responses)

    def _spliced(
        self, made: Json, ids: list[int], per_token: dict[str, Tensor], responses: list[list[int]]
    ) -> tuple[Json, list[tuple[int, list[int]]]]:
        spliced: list[int] = []
        sources: list[int] = []  # the place in ``ids`` that each is like
        found, waiting = [], iter(responses)
        closed: int | None = None
        for i, token in enumerate(ids):
            if closed is not None and token == closed:  # the template closes the answer, as the response did itself
                closed = None
                continue
            closed = None
            if token == self.stand_in:
                response = next(waiting)
                found.append((len(spliced), response))
                spliced += response
                sources += [i] * len(response)
                closed = self.stop if response[-1] == self.stop else None
            else:
                spliced.append(token)
                sources.append(i)
        end = found[-1][0] + len(found[-1][1])
        made["input_ids"] = torch.tensor([spliced[:end]])
        for key, value in per_token.items():
            last = (
                torch.ones(1, 1, dtype=value.dtype) if key != "mm_token_type_ids" else torch.zeros(1, 1, dtype=value.dtype)
            )
            extended = torch.cat([value, last], 1) if self.one_turn else value  # PaliGemma: what is written has the type 1
            made[key] = extended[:, sources[:end]]
        return made, found

    def logprobs(self, run: Path, episode: Json, blank: bool = False) -> tuple[list[Tensor], float]:
        """Of each turn's tokens, by one forward over the whole thread, and the largest logit."""
        inputs, found = self.inputs(run, episode, blank)
        logits_TV = self.model(**inputs, use_cache=False).logits[0].float()
        scale = float(logits_TV.detach().abs().max())
        logp_TV = logits_TV.index_fill(1, self.forbidden, -torch.inf).log_softmax(-1)
        return [
            logp_TV[at - 1 : at - 1 + len(tokens)].gather(1, torch.tensor(tokens)[:, None])[:, 0] for at, tokens in found
        ], scale

    def first_update(self, run: Path, rows: list[Json]) -> tuple[list[float], float]:
        """``differences`` of a step's rows, and the gradient's norm in its first update: the mean of -A · log p."""
        self.model.zero_grad()
        count = sum(len(tokens) for row in rows for tokens in _responses(row["episode"]))
        gaps = list[float]()
        for row in rows:
            found, scale = self.logprobs(run, row["episode"])
            gaps += _gaps(row["episode"], found, scale)
            assert scale > 3, "the model says something"
            loss = sum(-a * logp.sum() for a, logp in zip(row["advantages"], found, strict=True)) / count
            loss.backward()
        return gaps, float(torch.stack([p.grad.norm() for p in self.model.parameters() if p.grad is not None]).norm())


def weights_of(folder: Path, attention: str = "sdpa") -> Any:
    """The model of transformers' own Auto class, which finds every weight it has and no other."""
    loader = model_class(AutoConfig.from_pretrained(folder))
    model, found = loader.from_pretrained(
        folder, dtype=torch.float32, attn_implementation=attention, output_loading_info=True
    )
    assert not any(found.values())
    return model


def _shown(run: Path, block: Json, media: list[Any], blank: bool) -> Json:
    """A content block for a chat template; its medium is appended to ``media``."""
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    file = run / "media" / block["hash"]
    if block["kind"] == "picture":
        picture = Image.open(file).convert("RGB")
        media.append(("picture", Image.new("RGB", picture.size) if blank else picture))
        return {"type": "image"}
    samples, _ = soundfile.read(file, dtype="float32")
    media.append(("sound", 0 * samples if blank else samples))
    return {"type": "audio"}


def _responses(episode: Json) -> list[list[int]]:
    return [episode["segments"][turn["response"]]["tokens"] for turn in episode["turns"]]


def records(run: Path, step: int) -> list[Json]:
    return [json.loads(line) for line in (run / "episodes" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def metrics(run: Path) -> list[Json]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def differences(run: Path, step: int, stock: Stock) -> Iterator[float]:
    """How far the log-probs on disk are from the stock model's, relative to its largest logit."""
    for row in records(run, step):
        with torch.no_grad():
            expected, scale = stock.logprobs(run, row["episode"])
        yield from _gaps(row["episode"], expected, scale)


def _gaps(episode: Json, expected: list[Tensor], scale: float) -> Iterator[float]:
    for turn, want in zip(episode["turns"], expected, strict=True):
        got = torch.tensor(episode["segments"][turn["response"]]["logprobs"])
        assert got.shape == want.shape
        yield float((got - want.detach()).abs().max()) / scale


def check_run(run: Path, model: Path, rounding: float, **options: Any) -> Stock:
    """Engine, learner and the stock model agree in every step, and what is shown matters. Returns the stock model."""
    stock = Stock(model, **options)
    told = metrics(run)
    first = records(run, 1)
    gaps, norm = stock.first_update(run, first)
    assert max(gaps) <= rounding
    assert max(differences(run, 2, Stock(run / "checkpoints" / "step_000001", **options))) <= rounding
    assert [row["mismatch/max"] for row in told] == pytest.approx([0] * STEPS, abs=10 * rounding)
    assert told[0]["policy/grad_norm"] == pytest.approx(norm, rel=100 * rounding)
    if any(segment.get("media") for segment in first[0]["episode"]["segments"]):
        with torch.no_grad():
            seen, blank = (stock.logprobs(run, first[0]["episode"], blank)[0] for blank in (False, True))
        assert max(float((a - b).abs().max()) for a, b in zip(seen, blank, strict=True)) > 0.01
    return stock


def check_export(run: Path, source: Stock, out: Path) -> None:
    """The export has the source's names and shapes, and stock classes load from it what the last checkpoint is."""
    checkpoint = run / "checkpoints" / f"step_{STEPS:06d}"
    export(checkpoint, out)
    saved, exported, before = (
        dict(model.named_parameters()) for model in (weights_of(checkpoint), weights_of(out), source.model)
    )
    assert saved.keys() == exported.keys() == before.keys()
    assert all(torch.equal(saved[name], exported[name]) for name in saved)
    assert not all(torch.equal(before[name], exported[name]) for name in before)


def check_rows(policy: Policy) -> None:
    """A row with pictures of two sizes is what the processor makes of the whole prompt, and computes what that does."""
    general, processor = policy.general, policy.chat.processor
    assert general is not None
    pictures = [noise(policy.chat.store, 1, 40, 64), noise(policy.chat.store, 2, 96, 48)]
    row = general.row(policy.chat, [policy.chat.render([user(pictures[0], pictures[1], "which?")])])
    given = general.inputs(policy.chat, [row], "right")
    content = [{"type": "image"}, {"type": "image"}, {"type": "text", "text": "which?"}]
    prompt = processor.apply_chat_template(
        [{"role": "user", "content": content}], tokenize=False, add_generation_prompt=True
    )
    images: list[Image.Image] = [decoded(policy.chat.store, picture) for picture in pictures]
    made = processor(text=[prompt], images=[images], return_tensors="pt", add_special_tokens=False)
    wanted: dict[str, Tensor] = {key: value for key, value in made.items() if key != "labels"}
    assert given.keys() - {"position_ids"} == wanted.keys()
    for key, value in wanted.items():
        assert torch.equal(given[key], value), key
    with torch.no_grad():
        stock = policy.model(**wanted, use_cache=False).logits
        ours = policy.model(**given, use_cache=False).logits
    assert (ours - stock).abs().max() <= 1e-5 * stock.abs().max()


TRAINED = [
    pytest.param(name, kind, id=f"{name}-{kind}" if len(row.shown) > 1 else name)
    for name, row in GENERAL.items() if not row.refused
    for kind in row.shown or ("",)
]  # fmt: skip
# Of several pictures of a prompt one numbers them, the other puts all first: a thread that grows turn by turn cannot.
BY_TURN = ("minicpmv4_6", "paligemma2")
LINEAR = ("minicpmv4_6", "qwen3_next")  # whose states round otherwise in chunks than token by token


@pytest.mark.parametrize(("name", "kind"), TRAINED)
def test_a_run_computes_what_transformers_computes(
    name: str, kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And the table of docs/guides/families.md has the line that loading found out."""
    row, model = GENERAL[name], make_checkpoint(name, tmp_path / "model", 1)
    lines = list[str]()

    def noted(path: str, **options: Any) -> Policy:
        policy = load_policy(path, **options)
        lines.append(general_row(name, Path(path), policy))
        if kind == "image" and name not in BY_TURN:
            check_rows(policy)
        return policy

    monkeypatch.setattr(models, "load_policy", noted)
    costly = (name, kind) == ("phi4_multimodal", "image")  # 450 tokens a picture
    batch = {"prompts_per_step": 1 if costly else 2, "group_size": GROUP}
    run = play(model, tmp_path / "run", kind, 1 if row.one_turn or costly else 3, kind in row.alike, "general", batch=batch)
    rounding = 5e-5 if name in LINEAR else 1e-5
    stock = check_run(run, model, rounding, attention=row.attention, one_turn=name == "paligemma2")
    check_export(run, stock, tmp_path / "out")
    assert lines[0] in PAGE.read_text() or name in FAMILIES


@pytest.mark.parametrize(
    ("family", "kind", "turns"), [("qwen3_vl", "image", 3), ("glm4v", "image", 3), ("qwen2_audio", "audio", 1)]
)
def test_families_with_an_adapter_agree_with_this_expectation_too(
    family: str, kind: str, turns: int, tmp_path: Path
) -> None:
    """Which shows that the expectation is right, whatever becomes of the runs below."""
    model = make_tiny(family, tmp_path / "model", 1, **wide_weights(family, 0.15, "", "vision", "audio"))
    run = play(model, tmp_path / "run", kind, turns)
    check_export(run, check_run(run, model, 1e-5), tmp_path / "out")
