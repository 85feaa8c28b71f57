"""The native engine alone on one GPU: tokens per second of a workload's responses, equal or of very uneven length."""

import asyncio
import gc
import tempfile
import time
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from profiles import host_of, kernels_of
from workload import QUESTION, Workload, write_model

from sensorium.cluster.event_loop import set_aside, set_aside_more
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import LiveEpisodes, Request, Sampling
from sensorium.models.load import load_policy
from sensorium.models.policy import Precision
from sensorium.vocabulary import user


@dataclass(frozen=True)
class Rounds:
    """Rollouts of one workload, one after the other."""

    seconds: list[float]
    tokens: int
    steps: int

    @property
    def median_s(self) -> float:
        """Of all but the first, which compiles and captures."""
        return float(np.median(self.seconds[1:]))

    @property
    def tokens_per_s(self) -> float:
        """By the median."""
        return self.tokens / self.median_s


def time_rollouts(
    name: str, work: Workload, rounds: int, max_rows: int, profile: bool, precision: Precision = "fast", fp8: bool = False
) -> dict[str, Any]:
    """Rollouts with new pictures each, the first left out; where asked, the kernels of one by their time.

    Of responses of uneven length also the rate over that of as many responses of equal length, by the same engine. ``fp8``:
    by an engine with FP8 weights, beside the rate of one without on the same model.
    """
    with tempfile.TemporaryDirectory() as scratch:
        store = MediaStore()
        model = write_model(Path(scratch) / "model", work.family)
        policy = load_policy(str(model), store=store, device="cuda", dtype="bfloat16", precision=precision)
    policy.model.requires_grad_(False)
    plain = None
    if fp8:
        without = NativeEngine(policy, max_rows=max_rows)
        set_aside()
        plain = _timed(without, policy, store, work, range(200, 201 + rounds))
        without.close()
        del without
        gc.collect()
        torch.cuda.empty_cache()
    engine = NativeEngine(policy, max_rows=max_rows, quantization="fp8" if fp8 else "none")
    set_aside()  # as a run does
    timed = _timed(engine, policy, store, work, range(rounds + 1))
    equal = _timed(engine, policy, store, replace(work, tail=1.0), range(100, 101 + rounds)) if work.tail > 1 else None
    short = _requests(policy, store, replace(work, new_tokens=1, tail=1.0), rounds + 3)
    started = time.perf_counter()
    asyncio.run(_written(engine, short))
    torch.cuda.synchronize()
    first_token = time.perf_counter() - started
    result = {
        "workload": name,
        "device": torch.cuda.get_device_name(),
        "torch": torch.__version__,
        "sequences": work.episodes,
        "max_rows": max_rows,
        "tokens": timed.tokens,
        "seconds": round(timed.median_s, 3),
        "first_s": round(timed.seconds[0], 2),
        "rounds_s": [round(each, 3) for each in timed.seconds[1:]],
        "precision": precision,
        "tokens_per_s": round(timed.tokens_per_s),
        "first_token_s": round(first_token, 3),
        "ms_a_step": round(1e3 * (timed.median_s - first_token) / timed.steps, 2),
        "steps": timed.steps,
        "peak_gib": round(torch.cuda.max_memory_allocated() / 2**30, 1),
        "engine": vars(engine.counters) | {"notes": list(engine.notes)},
    }
    if plain is not None:
        result["without_fp8"] = {
            "tokens_per_s": round(plain.tokens_per_s), "rounds_s": [round(each, 3) for each in plain.seconds[1:]],
        }  # fmt: skip
        writer: Any = engine._writer
        result["off_reference"] = {"few" if few else "many": error for few, error in writer._runner.trials.items()}
        result["over_without_fp8"] = round(timed.tokens_per_s / plain.tokens_per_s, 3)
    if equal is not None:
        result["equal_lengths_tokens_per_s"] = round(equal.tokens_per_s)
        result["equal_lengths_rounds_s"] = [round(each, 3) for each in equal.seconds[1:]]
        result["over_equal_lengths"] = round(timed.tokens_per_s / equal.tokens_per_s, 3)
    if profile:
        others = _requests(policy, store, work, rounds + 2)
        result["host"] = host_of(lambda: asyncio.run(_written(engine, others)))
        more = _requests(policy, store, work, rounds + 1)
        result["kernels"] = kernels_of(lambda: asyncio.run(_written(engine, more)))
    return result


def _timed(engine: NativeEngine, policy: Any, store: MediaStore, work: Workload, indices: range) -> Rounds:
    """One rollout for each index, every one with new weights (the same, as far as the engine knows others)."""
    seconds, tokens, steps = [], 0, 0
    for index in indices:
        if index == indices[0] + 1:
            set_aside_more()  # as a run does after its first step
        requests = _requests(policy, store, work, index)
        before = engine.counters.decode_steps
        torch.cuda.synchronize()
        started = time.perf_counter()
        tokens = asyncio.run(_written(engine, requests))
        torch.cuda.synchronize()
        seconds.append(time.perf_counter() - started)
        steps = engine.counters.decode_steps - before
        policy.version += 1
        engine.update_weights(policy, policy.version)
    return Rounds(seconds, tokens, steps)


def _requests(policy: Any, store: MediaStore, work: Workload, index: int) -> list[Request]:
    """One rollout's requests, every prompt with a picture of its own."""
    lengths = work.lengths(index)
    found = []
    for prompt in range(work.prompts):
        rng = np.random.default_rng((index, prompt))
        pixels = rng.integers(0, 255, (work.pixels, work.pixels, 3), dtype=np.uint8)
        context = (policy.chat.render([user(store.put(encode_png(pixels), "picture"), QUESTION)]),)
        for member in range(work.group):
            sampling = Sampling(max_new_tokens=lengths[prompt][member], stop_tokens=False)
            thread = f"{index}/{prompt}/{member}"
            found.append(Request(thread, context, sampling, (prompt, member, 0), hash(thread), thread))
    policy.chat.prepare([span.media for request in found for span in request.context[0].media])
    return found


async def _written(engine: NativeEngine, requests: list[Request]) -> int:
    episodes = LiveEpisodes()

    async def one(request: Request) -> int:
        try:
            response = await engine.generate(request, episodes)
            engine.release(request.thread)
            return len(response.segment.tokens)
        finally:
            episodes.leave()

    for _ in requests:
        episodes.enter()
    return sum(await asyncio.gather(*(one(request) for request in requests)))
