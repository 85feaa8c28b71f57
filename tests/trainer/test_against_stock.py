"""A run directory held against code that is not ours: transformers' forward, AdamW of torch, and plain arithmetic.

Everything is read from disk as a user would read it: episodes, media, metrics, checkpoints, the ledger.
"""

import json
import sqlite3
from collections import defaultdict
from pathlib import Path
from statistics import mean, stdev
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image
from torch import Tensor
from transformers import AutoModelForImageTextToText, AutoProcessor

from sensorium.models.tiny import make_tiny
from sensorium.recipe.load import parse_recipe
from sensorium.trainer.run import train

Json = dict[str, Any]
TEMPERATURE, TOP_P, TOP_K = 0.7, 0.8, 40
LR, BETAS, DECAY, CLIP_NORM, KL = 1e-3, (0.9, 0.95), 0.1, 0.5, 0.05
STEPS, GROUP, UPDATES = 2, 3, 2


def vowels(task: Any, episode: Any) -> float:
    return sum(letter in "aeiou" for letter in episode.response) / max(1, len(episode.response))


def even(task: Any, episode: Any) -> float:
    return float(len(episode.response) % 2)


vowels.instant = even.instant = True  # type: ignore[attr-defined]


def write_rows(folder: Path) -> Path:
    """Two pictures in one question, one under a system prompt, none at all."""
    for i, size in enumerate([(60, 41), (56, 56), (28, 90)]):
        pixels = np.random.default_rng(i).integers(0, 255, (*size, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(folder / f"{i}.png")
    contents: list[list[Any]] = [["first", 0, "then", 1, "which?"], [2, "what colour?"], ["left or right?"], [1, "this?"]]
    rows = []
    for i, content in enumerate(contents):
        blocks = [
            {"type": "text", "text": b} if isinstance(b, str) else {"type": "image", "path": f"{b}.png"} for b in content
        ]
        system = [{"role": "system", "content": "Look closely."}] if i % 2 else []
        rows.append({"id": str(i), "messages": [*system, {"role": "user", "content": blocks}], "answer": "red"})
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return folder / "rows.jsonl"


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two steps of two updates each, with KL, correction by what top-p and top-k kept, decay and clipping."""
    folder = tmp_path_factory.mktemp("stock")
    recipe = {
        "name": "stock",
        "steps": STEPS,
        "threads": 1,
        "run_dir": str(folder / "run"),
        "model": {"path": str(make_tiny("qwen2_5_vl", folder / "model", 4)), "device": "cpu"},
        "tasks": {"train": [{"source": "jsonl", "options": {"path": str(write_rows(folder))}}]},
        "batch": {"prompts_per_step": 4, "group_size": GROUP, "updates_per_epoch": UPDATES},
        "rollout": {"max_new_tokens": 7, "temperature": TEMPERATURE, "top_p": TOP_P, "top_k": TOP_K, "stop": ["o"],
                    "mask_truncated": True},
        "rewards": {"terms": [{"name": f"{__name__}:vowels", "weight": 0.7}, {"name": f"{__name__}:even", "weight": 0.3}]},
        "algorithm": {"kl": {"coef": KL}, "correction": {"weights": "token", "engine_logprobs": "sampled"}},
        "optimizer": {"lr": LR, "betas": BETAS, "weight_decay": DECAY, "clip_norm": CLIP_NORM, "warmup_steps": 1},
        "checkpoint": {"every": 1, "keep": STEPS, "best": ""},
    }  # fmt: skip
    train(parse_recipe(json.dumps(recipe), "test", []))
    return folder / "run"


class Stock:
    """A checkpoint as transformers opens it, and the policy that it is: at a temperature, without special tokens."""

    def __init__(self, folder: Path) -> None:
        self.model = AutoModelForImageTextToText.from_pretrained(folder, dtype=torch.float32).eval()
        self.processor = AutoProcessor.from_pretrained(folder)
        tokenizer = self.processor.tokenizer
        special = {i for i, token in tokenizer.added_tokens_decoder.items() if token.special}
        unused = range(len(tokenizer), self.model.config.get_text_config().vocab_size)
        self.forbidden = torch.tensor(sorted((special | {*unused}) - {*self.model.generation_config.eos_token_id}))

    def logprobs(self, run: Path, row: Json) -> tuple[Tensor, Tensor]:
        """Of a single-turn episode's tokens: by the whole policy [n], and all of them [n, V]."""
        inputs = self.processor.apply_chat_template(
            [{"role": m["role"], "content": [_block(run, b) for b in m["content"]]} for m in row["task"]["messages"]],
            tokenize=True, add_generation_prompt=True, return_dict=True, return_tensors="pt",
        )  # fmt: skip
        tokens = torch.tensor([response(row)["tokens"]])
        start = inputs["input_ids"].shape[1]
        for key, more in (("input_ids", tokens), ("attention_mask", 1 + 0 * tokens), ("mm_token_type_ids", 0 * tokens)):
            inputs[key] = torch.cat([inputs[key], more], dim=1)
        logits = self.model(**inputs, use_cache=False).logits[0, start - 1 : -1] / TEMPERATURE
        all_nV = logits.index_fill(1, self.forbidden, -torch.inf).log_softmax(-1)
        return all_nV.gather(1, tokens[0, :, None])[:, 0], all_nV


def _block(run: Path, block: Json) -> Json:
    if "text" in block:
        return {"type": "text", "text": block["text"]}
    return {"type": "image", "image": Image.open(run / "media" / block["hash"]).convert("RGB")}


def response(row: Json) -> Json:
    episode = row["episode"]
    segment: Json = episode["segments"][episode["turns"][0]["response"]]
    return segment


def rows_of(run: Path, step: int) -> list[Json]:
    return [json.loads(line) for line in (run / "episodes" / f"step_{step:06d}.jsonl").read_text().splitlines()]


def metrics_of(run: Path) -> list[Json]:
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def weights_before(run: Path, step: int) -> Path:
    return run.parent / "model" if step == 1 else run / "checkpoints" / f"step_{step - 1:06d}"


def truncated(logprobs_nV: Tensor) -> Tensor:
    """The likeliest k, of these the fewest that hold p together, scaled up to a distribution."""
    kept_nV = torch.where(logprobs_nV < logprobs_nV.topk(TOP_K).values[:, -1:], -torch.inf, logprobs_nV).softmax(-1)
    sorted_nV, places_nV = kept_nV.sort(descending=True)
    sorted_nV[sorted_nV.cumsum(-1) - sorted_nV >= TOP_P] = 0
    return torch.zeros_like(kept_nV).scatter(1, places_nV, sorted_nV / sorted_nV.sum(-1, keepdim=True)).log()


def test_logprobs_on_disk_are_those_of_a_plain_forward_of_the_weights_that_sampled(run: Path) -> None:
    for step in range(1, STEPS + 1):
        stock = Stock(weights_before(run, step))
        for row in rows_of(run, step):
            with torch.no_grad():
                policy_n, all_nV = stock.logprobs(run, row)
            sampled_n = truncated(all_nV).gather(1, torch.tensor(response(row)["tokens"])[:, None])[:, 0]
            assert response(row)["logprobs"] == pytest.approx(policy_n.tolist(), abs=1e-5)
            assert response(row)["sampled_logprobs"] == pytest.approx(sampled_n.tolist(), abs=1e-5)


def test_metrics_are_those_of_the_episodes_on_disk(run: Path) -> None:
    ledger = sqlite3.connect(run / "ledger.sqlite")
    for step, told in enumerate(metrics_of(run), start=1):
        rows = rows_of(run, step)
        fates = dict(ledger.execute("SELECT id, fate FROM episodes WHERE step = ?", (step,)))
        trained = [row for row in rows if fates[row["episode"]["id"]] == "trained"]
        cut = [row for row in rows if row["episode"]["status"] == "truncated"]
        lengths = [len(response(row)["tokens"]) for row in rows]
        paid = {row["episode"]["id"]: {s["name"]: s["value"] for s in row["episode"]["scores"]} for row in rows}
        found = {
            "reward/mean": mean(0.7 * one["vowels"] + 0.3 * one["even"] for one in paid.values()),
            "reward/vowels": mean(one["vowels"] for one in paid.values()),
            "reward/even": mean(one["even"] for one in paid.values()),
            "episodes/length_mean": mean(lengths),
            "episodes/length_max": max(lengths),
            "episodes/truncated": len(cut),
            "episodes/masked": len(cut),
            "episodes/dropped": 0,
            "groups/trained": len({row["episode"]["group_id"] for row in trained}),
            "packing/trained_tokens": sum(len(response(row)["tokens"]) for row in trained),
        }
        assert {name: told[name] for name in found} == pytest.approx(found)
        assert len(trained) == len(rows) - len(cut), "who is masked is not on record as trained"
    assert any(row["episodes/masked"] for row in metrics_of(run)), "the run shows a case"


def test_the_steps_redone_in_plain_torch_give_the_checkpoints_and_the_metrics(run: Path) -> None:
    stock, reference = Stock(run.parent / "model"), Stock(run.parent / "model")
    begun = {name: p.detach().clone() for name, p in stock.model.named_parameters()}
    matrices = [p for p in stock.model.parameters() if p.dim() > 1]
    vectors = [p for p in stock.model.parameters() if p.dim() < 2]
    settings = [{"params": matrices, "weight_decay": DECAY}, {"params": vectors, "weight_decay": 0.0}]
    adam = torch.optim.AdamW(settings, betas=BETAS, foreach=False)
    for step, told in enumerate(metrics_of(run), start=1):
        for group in adam.param_groups:
            group["lr"] = LR * (0.5 if step == 1 else 1.0)
        measured = redo(run, rows_of(run, step), stock, reference, adam)
        assert {name: told[name] for name in measured} == pytest.approx(measured, rel=1e-3, abs=1e-6)
        saved = dict(Stock(run / "checkpoints" / f"step_{step:06d}").model.named_parameters())
        apart = sum(float((p - saved[name]).detach().square().sum()) for name, p in stock.model.named_parameters())
        moved = sum(float((begun[name] - p).detach().square().sum()) for name, p in saved.items())
        assert (apart / moved) ** 0.5 < 1e-3, f"step {step}"
    assert told["policy/clip_fraction"] > 0
    assert told["policy/grad_norm"] > CLIP_NORM


def redo(run: Path, rows: list[Json], stock: Stock, reference: Stock, adam: torch.optim.Optimizer) -> dict[str, float]:
    """GRPO with PPO's clip, k3 to the first weights and truncated importance weights; updates are token means."""
    by_group: dict[str, list[Json]] = defaultdict(list)
    for row in rows:
        by_group[row["episode"]["group_id"]].append(row)
    groups = list(by_group.values())
    with torch.no_grad():
        old = {row["episode"]["id"]: stock.logprobs(run, row)[0] for row in rows}
        first = {row["episode"]["id"]: reference.logprobs(run, row)[0] for row in rows}
    measured: dict[str, list[float]] = defaultdict(list)
    size = len(groups) // UPDATES
    for part in (groups[:size], groups[size:]):
        scored = [
            (row, advantage(row, group)) for group in part for row in group if row["episode"]["status"] != "truncated"
        ]
        tokens = sum(len(response(row)["tokens"]) for row, _ in scored)
        sums: dict[str, float] = defaultdict(float)
        for row, a in scored:
            id = row["episode"]["id"]
            now_n = stock.logprobs(run, row)[0]
            ratio_n = (now_n - old[id]).exp()
            weights_n = (old[id] - torch.tensor(response(row)["sampled_logprobs"])).exp().clamp(max=2)
            kl_n = ((first[id] - now_n).expm1() - (first[id] - now_n)).clamp(max=10)
            free_n, bound_n = -a * ratio_n, -a * ratio_n.clamp(0.8, 1.2)
            loss = (torch.maximum(free_n, bound_n) * weights_n + KL * kl_n).sum() / tokens
            loss.backward()
            sums["policy/loss"] += float(loss.detach())
            sums["policy/kl_ref"] += float(kl_n.detach().sum()) / tokens
            sums["policy/clip_fraction"] += int((bound_n > free_n).detach().sum()) / tokens
            sums["correction/weight"] += float(weights_n.sum()) / tokens
        sums["policy/grad_norm"] = float(torch.nn.utils.clip_grad_norm_(stock.model.parameters(), CLIP_NORM))
        adam.step()
        adam.zero_grad()
        for name, value in sums.items():
            measured[name].append(value)
    return {name: mean(values) for name, values in measured.items()}


def advantage(row: Json, group: list[Json]) -> float:
    rewards = [member["reward"] for member in group]
    return (row["reward"] - mean(rewards)) / (stdev(rewards) + 1e-6) if len(set(rewards)) > 1 else 0.0
