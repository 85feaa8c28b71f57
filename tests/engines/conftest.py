"""Tiny real models, pictures, and a plain transformers forward to hold the engine against."""

import asyncio
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from sensorium.data.media_store import MediaStore
from sensorium.engines.native import steps
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import LiveEpisodes, Request, Response, Sampling
from sensorium.models.delta_net import is_delta
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Segment
from tests.families import FAMILY_ROWS, HEARING, SEEING, stock_class

from ..models.clips import clip, noise, row_inputs, tone

RECORD_AFTER = 8


@dataclass
class Bench:
    """A policy, and the same checkpoint as transformers loads it."""

    policy: Policy
    stock: Any

    def picture(self, seed: int, size: tuple[int, int] = (56, 56)) -> Media:
        """A picture of noise in the policy's store."""
        return noise(self.policy.chat.store, seed, width=size[1], height=size[0])

    def clip(self, seed: int, frames: int = 4, seconds: float = 4.0) -> Media:
        """A video of noise in the policy's store."""
        return clip(self.policy.chat.store, seed, frames, seconds=seconds)

    def tone(self, seed: int, seconds: float = 0.5) -> Media:
        """A sound in the policy's store; not so short that the library's numbers for it vary."""
        return tone(self.policy.chat.store, seed, max(seconds, FAMILY_ROWS[self.policy.family].shortest_s))

    @property
    def rounding(self) -> float:
        """How far log-probs may be from the stock model's, relative to the largest logit."""
        return FAMILY_ROWS[self.policy.family].rounding

    @property
    def has_states(self) -> bool:
        """Whether layers have a state after the last token, which cannot be cut back as keys and values can."""
        return any(is_delta(layer) for layer in self.policy.adapter.language_model.layers)

    def logits(self, segments: Sequence[Segment]) -> list[Tensor]:
        """Logits [n, V] before each token of every model segment, by one stock forward over the whole thread."""
        ids_T = torch.cat([self.policy.chat.layout(segment).ids_T for segment in segments])
        inputs = row_inputs(self.policy, ids_T, [span.media for segment in segments for span in segment.media])
        with torch.no_grad():
            logits_TV = self.stock(**inputs, use_cache=False).logits[0].float()
        found, start = [], 0
        for segment in segments:
            length = len(self.policy.chat.layout(segment))
            if segment.author == "model":
                found.append(logits_TV[start - 1 : start - 1 + length])
            start += length
        return found

    def logprobs(self, segments: Sequence[Segment], sampling: Sampling) -> tuple[list[Tensor], float]:
        """Log-probs of every model segment's tokens under the policy, and the scale of the logits."""
        masked = list(self.policy.chat.forbidden_ids) + ([] if sampling.stop_tokens else list(self.policy.chat.stop_ids))
        found, scale = [], 0.0
        written = [segment for segment in segments if segment.author == "model"]
        for segment, logits_nV in zip(written, self.logits(segments), strict=True):
            scale = max(scale, float(logits_nV.abs().max()))
            scaled_nV = logits_nV / (sampling.temperature or 1.0)
            scaled_nV[:, masked] = -torch.inf
            found.append(scaled_nV.log_softmax(-1).gather(1, torch.tensor(segment.tokens)[:, None])[:, 0])
        return found, scale


def make_bench(family: str, folder: Path, device: str = "cpu", dtype: str = "float32", **overrides: Any) -> Bench:
    """A tiny checkpoint of a family, loaded both ways; ``overrides`` are ``make_tiny``'s."""
    make_tiny(family, folder, seed=1, initializer_range=0.15, **overrides)
    policy = load_policy(str(folder), store=MediaStore(), device=device, dtype=dtype)
    stock = stock_class(family).from_pretrained(folder, dtype=torch.float32, attn_implementation="sdpa")
    without_library_kernels(stock)
    return Bench(policy, stock.eval())


def without_library_kernels(stock: Any) -> None:
    """Let stock delta nets run by transformers' own torch code: flash-linear-attention takes no CPU tensors."""
    for module in {sys.modules[type(net).__module__] for net in stock.modules() if type(net).__name__.endswith("DeltaNet")}:
        for name in ("torch_chunk_gated_delta_rule", "torch_recurrent_gated_delta_rule"):
            setattr(module, name, unwrap(getattr(module, name)))


@pytest.fixture(scope="session", autouse=True)
def one_thread() -> None:
    """Tiny models gain nothing from threads."""
    torch.set_num_threads(1)


@pytest.fixture
def early_recordings(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps are recorded after a few, so that short responses go through both ways."""
    monkeypatch.setattr(steps, "RECORD_AFTER", RECORD_AFTER)


@pytest.fixture(scope="session")
def benches(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Bench]:
    """Benches by family, made once."""
    made: dict[str, Bench] = {}

    def get(family: str) -> Bench:
        if family not in made:
            made[family] = make_bench(family, tmp_path_factory.mktemp(family))
        return made[family]

    return get


@pytest.fixture(params=["qwen2_5_vl", "qwen3_vl", "qwen3_5", "llava_onevision"])
def vision(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Bench:
    """Vision families that compute differently: learned positions, deepstack, gated delta nets, tiles."""
    return benches(request.param)


@pytest.fixture(params=SEEING)
def watching(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Bench:
    """Every family that takes video."""
    return benches(request.param)


@pytest.fixture(params=HEARING)
def hearing(request: pytest.FixtureRequest, benches: Callable[[str], Bench]) -> Bench:
    """Every family that takes sound."""
    return benches(request.param)


@pytest.fixture
def omni(benches: Callable[[str], Bench]) -> Bench:
    """A family that sees and hears."""
    return benches("qwen2_5_omni")


@pytest.fixture
def bench(benches: Callable[[str], Bench]) -> Bench:
    """One vision family."""
    return benches("qwen2_5_vl")


@pytest.fixture
def text(benches: Callable[[str], Bench]) -> Bench:
    """A text-only model."""
    return benches("qwen2")


def ask(
    thread: str,
    context: Sequence[Segment],
    sampling: Sampling,
    *,
    order: tuple[int, ...] = (0, 0, 0),
    key: int = 7,
    name: str = "",
) -> Request:
    """A request with sensible defaults."""
    return Request(thread, tuple(context), sampling, order, key, name or f"{thread}/{len(context)}")


def generate(engine: NativeEngine, *requests: Request) -> list[Response]:
    """All responses, asked for at once by as many live episodes; threads are kept."""

    episodes = LiveEpisodes()

    async def one(request: Request) -> Response:
        try:
            return await engine.generate(request, episodes)
        finally:
            episodes.leave()

    async def everyone() -> list[Response]:
        for _ in requests:
            episodes.enter()
        return list(await asyncio.gather(*(one(request) for request in requests)))

    return asyncio.run(everyone())
