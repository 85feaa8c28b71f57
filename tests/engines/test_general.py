"""The general path's engine samples what the family's own adapter samples."""

from pathlib import Path

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Sampling
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.vocabulary.content import Media, user
from sensorium.vocabulary.episode import Segment
from tests.families import FAMILY_ROWS

from ..models.clips import noise, tone
from .conftest import ask, generate

SAMPLING = Sampling(temperature=0.8, max_new_tokens=8, stop_tokens=False)
NATIVE = ("qwen2_5_vl", "qwen3_vl", "qwen3_5", "qwen2_audio", "internvl", "smolvlm", "qwen3", "qwen3_vl_moe")


def medium(policy: Policy, seed: int, size: int) -> tuple[Media, ...]:
    """A picture or a sound, larger for a larger ``size``; none of a model of text."""
    if "picture" in policy.chat.modalities:
        return (noise(policy.chat.store, seed, 56 * size, 28 + 28 * size),)
    return (tone(policy.chat.store, seed, 0.5 * size),) if "sound" in policy.chat.modalities else ()


def talks(policy: Policy) -> list[list[Segment]]:
    """Threads of one and two turns, in groups, of a few prompts that have a picture, several or none."""
    engine = NativeEngine(policy)
    first, second = medium(policy, 1, 1), medium(policy, 2, 3)
    prompts = [
        policy.chat.render([user(*first, "what colour is it?")]),
        policy.chat.render([user("where?")]),
        policy.chat.render([user(*second, "which", *first, "is the left one?")]),
    ]
    threads = [(f"{p}/{i}", [prompt]) for p, prompt in enumerate(prompts) for i in range(2)]
    for turn in range(2):
        requests = [ask(name, context, SAMPLING, order=(n, 0, turn), key=n) for n, (name, context) in enumerate(threads)]
        for (_, context), response in zip(threads, generate(engine, *requests), strict=True):
            context.append(response.segment)
            if not turn:
                shown = second if len(context[0].tokens) % 2 else ()
                context.append(policy.chat.extend([user(*shown, "and now?")], after=context[-1]))
    return [context for _, context in threads]


@pytest.mark.parametrize("family", NATIVE)
def test_it_samples_what_the_familys_own_adapter_samples(family: str, tmp_path: Path) -> None:
    folder = make_tiny(family, tmp_path / "tiny", seed=1, initializer_range=0.15)
    store = MediaStore()
    found = [talks(load_policy(str(folder), store=store, family=name)) for name in ("general", "auto")]
    for one, other in zip(*found, strict=True):
        for mine, own in zip(one, other, strict=True):
            assert mine.author == own.author
            if mine.author == "model":
                assert mine.tokens == own.tokens
                gap = (torch.tensor(mine.logprobs) - torch.tensor(own.logprobs)).abs().max()
                assert gap <= 8 * FAMILY_ROWS[family].rounding
