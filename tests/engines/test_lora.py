"""With adapters on language and towers: engine = learner = plain peft, recorded or not, before and after an update."""

from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Request, Sampling
from sensorium.learner.learner import CreditedEpisode, Learner
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import AlgorithmSection, BatchSection, LoraSection, LossSection, OptimizerSection
from sensorium.vocabulary import Episode, Status, Thread, Turn, user
from sensorium.vocabulary.episode import Segment
from tests.families import SEEING, SENSING, stock_class

from .conftest import RECORD_AFTER, Bench, ask, generate
from .test_exactness import assert_exact
from .test_steps import calls

pytestmark = pytest.mark.usefixtures("early_recordings")
SAMPLING = Sampling(max_new_tokens=2 * RECORD_AFTER + 2)


def with_peft(base: Path, adapter: Path) -> Any:
    from peft import PeftModel

    model = stock_class(base.name).from_pretrained(base, dtype=torch.float32, attn_implementation="sdpa")
    return PeftModel.from_pretrained(model, adapter).eval()


def stirred(base: Path) -> Policy:
    lora = LoraSection(rank=4, alpha=8, groups=("vision" if base.name in SEEING else "audio", "projector", "language"))
    policy = load_policy(str(base), store=MediaStore(), device="cpu", lora=lora, seed=1)
    assert policy.adapters is not None
    generator = torch.Generator().manual_seed(5)
    with torch.no_grad():
        for parameter in policy.adapters.parameters.values():
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.1)
    return policy


def requests(bench: Bench) -> list[Request]:
    """Two pictures, or sounds, asked about twice each."""
    medium = bench.picture if "picture" in bench.policy.chat.modalities else bench.tone
    prompts = [bench.policy.chat.render([user(medium(seed), "what colour is it?")]) for seed in (1, 2)]
    return [
        ask(f"{p}/{i}", [prompt], SAMPLING, order=(p, i), key=7 * p + i) for p, prompt in enumerate(prompts) for i in (0, 1)
    ]


def samples(asked: list[Request], written: list[Segment]) -> list[list[CreditedEpisode]]:
    made = []
    for request, response in zip(asked, written, strict=True):
        turns = (Turn(0, (), response, 0, 1),)
        thread = Thread((*request.context, response), (False, True))
        episode = Episode(request.thread, "task", "group", 0, (thread,), turns, Status.FINISHED)
        made.append(CreditedEpisode(episode, (torch.linspace(-1, 1, len(response.tokens)),)))
    return [made[:2], made[2:]]


@pytest.mark.parametrize("family", SENSING)
def test_engine_learner_and_peft_agree_and_the_engine_follows_an_update(
    family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    base = make_tiny(family, tmp_path / family, seed=1, initializer_range=0.1)
    policy = stirred(base)
    learner = Learner(
        policy,
        optimizer=OptimizerSection(lr=1e-2),
        algorithm=AlgorithmSection(loss=LossSection(aggregation="token_mean")),
        batch=BatchSection(),
        temperature=1.0,
        total_steps=1,
    )
    engine = NativeEngine(policy)
    in_python = calls(Bench(policy, None), monkeypatch)
    seen = []
    for moment in ("before", "after"):
        policy.save(tmp_path / moment)
        bench = Bench(policy, with_peft(base, tmp_path / moment / "adapter"))
        asked = requests(bench)
        in_python.clear()
        written = [response.segment for response in generate(engine, *asked)]
        assert len(in_python) <= RECORD_AFTER + 8, "most steps run from a recording, which takes a few to make"
        plain = [response.segment for response in generate(NativeEngine(policy, record=False), *asked)]
        assert written == plain
        assert all(len(segment.tokens) > RECORD_AFTER for segment in written)
        for request, segment in zip(asked, written, strict=True):
            assert_exact(bench, [*request.context, segment], SAMPLING)
        groups = samples(asked, written)
        known = [turns[0] for group in learner.logprobs(groups) for turns in group]
        for segment, logprobs in zip(written, known, strict=True):
            assert torch.tensor(segment.logprobs).numpy() == pytest.approx(logprobs.numpy(), abs=5e-5)
        seen.append([segment.logprobs for segment in written])
        if moment == "before":
            learner.step(groups)
            engine.update_weights(policy, policy.version)
    assert seen[0] != seen[1]
