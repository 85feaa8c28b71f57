"""Recorded experts are replayed: log-probs and gradients are of the engine's routes, whatever the router would choose."""

import asyncio
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from sensorium.data.media_store import MediaStore
from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.protocol import Request, Sampling
from sensorium.learner.learner import CreditedEpisode
from sensorium.models.experts import chosen_weights
from sensorium.models.policy import FrozenCopy, Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.schema import AlgorithmSection, BatchSection, KLSection
from sensorium.vocabulary import Segment, Thread
from sensorium.vocabulary.errors import ModelError, RecipeError

from .played import Groups, Player, distribution, make_learner, open_policy, stock_model, stock_rows
from .test_exactness import assert_same, gradients_of

MIXTURES = ["qwen3_vl_moe", "qwen3_5_moe", "qwen3_omni_moe"]
REPLAY = AlgorithmSection(router_replay=True)


def least_likely(router: Any, given: Any, out: tuple[Tensor, Tensor, Tensor]) -> tuple[Tensor, Tensor, Tensor]:
    """A router that sends tokens where they want to go least."""
    logits_TE, weights_TK, own_TK = out
    ids_TK = logits_TE.topk(own_TK.shape[1], -1, largest=False).indices
    return logits_TE, chosen_weights(router, logits_TE, ids_TK).to(weights_TK.dtype), ids_TK


def twins(folder: Path, dtype: str = "float32", count: int = 2) -> list[Policy]:
    """Policies of one checkpoint with the same media."""
    store = MediaStore()
    return [open_policy(folder, dtype, store) for _ in range(count)]


def contrary(model: nn.Module) -> None:
    for module in model.modules():
        if type(module).__name__.endswith("TextTopKRouter") or type(module).__name__ == "Qwen3_5MoeTopKRouter":
            module.register_forward_hook(least_likely)


class Sampled(Player):
    """Plays episodes whose responses an engine writes, with the routes it used."""

    def __init__(self, policy: Policy, engine: NativeEngine) -> None:
        super().__init__(policy)
        self.sampler = engine

    def sample(self, threads: list[Thread], places: list[tuple[int, int]]) -> CreditedEpisode:
        written: dict[str, Segment] = {}
        known = [[written.get(s.key, s) for s in thread.segments] for thread in threads]
        for turn, (thread, place) in enumerate(places):
            context = tuple(written.get(segment.key, segment) for segment in known[thread][:place])
            drawn, name = known[thread][place], f"{self.episodes}/{thread}"
            sampling = Sampling(max_new_tokens=len(drawn.tokens) + 2, stop_tokens=False)
            request = Request(name, context, sampling, (turn,), 100 * self.episodes + turn, drawn.name)
            written[drawn.key] = asyncio.run(self.sampler.generate(request)).segment
        found = [
            replace(thread, segments=tuple(written.get(segment.key, segment) for segment in thread.segments))
            for thread in threads
        ]
        return super().sample(found, places)


def play(policy: Policy, sampler: Policy) -> Groups:
    """Groups of one turn, of several in a thread, and of several in windows, by an engine with paged keys and values."""
    player = Sampled(policy, NativeEngine(sampler, kv="pages", routes=True, lockstep=False))
    return [player.single_turn(size=3), player.conversation(size=2, turns=3), player.windowed(size=2, turns=3)]


def gaps(groups: Groups, found: list[list[tuple[Tensor, ...]]]) -> Tensor:
    """How far log-probs are from the engine's."""
    pairs = (
        (turn.response.logprobs, logprobs)
        for group, several in zip(groups, found, strict=True)
        for sample, turns in zip(group, several, strict=True)
        for turn, logprobs in zip(sample.episode.turns, turns, strict=True)
    )
    return torch.cat([(torch.tensor(engine) - logprobs).abs() for engine, logprobs in pairs])


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    made: dict[str, Path] = {}

    def get(family: str) -> Path:
        if family not in made:
            made[family] = make_tiny(family, tmp_path_factory.mktemp(family), initializer_range=0.15)
        return made[family]

    return get


@pytest.mark.parametrize("family", MIXTURES)
def test_logprobs_are_the_engine_s_where_the_router_would_choose_otherwise(
    family: str, mixtures: Callable[[str], Path]
) -> None:
    policy, sampler = twins(mixtures(family))
    contrary(sampler.model)
    groups = play(policy, sampler)
    for limit in (16384, 90):
        batch = BatchSection(tokens_per_microbatch=limit)
        replayed = gaps(groups, make_learner(policy, algorithm=REPLAY, batch=batch, stop_tokens=False).logprobs(groups))
        assert float(replayed.max()) < (2e-3 if family == "qwen3_5_moe" else 1e-4)
    assert float(gaps(groups, make_learner(policy, stop_tokens=False).logprobs(groups)).mean()) > 0.05


@pytest.mark.parametrize("recompute", [False, True])
def test_gradients_are_those_of_plain_rows_with_the_engine_s_routes(
    recompute: bool, mixtures: Callable[[str], Path]
) -> None:
    folder = mixtures("qwen3_vl_moe")
    (policy, sampler), stock = twins(folder), stock_model(folder)
    contrary(sampler.model)
    contrary(stock)
    policy.checkpoint_gradients(recompute)
    groups = play(policy, sampler)
    episodes = sum(len(group) for group in groups)

    def descend(sample: CreditedEpisode, turn: int, logits: Tensor, tokens: Tensor) -> None:
        logp = distribution(policy, logits, 1.0).gather(1, tokens[:, None])[:, 0]
        loss = -sample.advantages[turn] * (logp - logp.detach()).exp()
        (loss.sum() / (sample.episode.sampled_tokens * episodes)).backward()

    stock.zero_grad()
    stock_rows(stock, policy, groups, descend)
    names = {name.removeprefix("model."): p for name, p in stock.named_parameters()}
    algorithm = AlgorithmSection(router_replay=True, loss={"aggregation": "sequence_mean_token_mean"})
    for limit in (16384, 90):
        learner = make_learner(policy, algorithm=algorithm, batch=BatchSection(tokens_per_microbatch=limit))
        found = gradients_of(learner, groups)
        expected = {
            name: torch.zeros_like(p) if p.grad is None else p.grad
            for name in found
            for p in [names[name.removeprefix("model.")]]
        }
        assert_same(found, expected)
    assert found["model.language_model.layers.0.mlp.gate.weight"].any(), "the gradient reaches the router"


def test_an_update_counts_what_the_router_would_have_chosen_otherwise(mixtures: Callable[[str], Path]) -> None:
    policy, sampler = twins(mixtures("qwen3_vl_moe"))
    groups = play(policy, sampler)
    contrary(sampler.model)
    other = play(policy, sampler)
    rows, weights = [], []
    for algorithm, given in ((AlgorithmSection(), groups), (REPLAY, groups), (REPLAY, other)):
        fresh = open_policy(mixtures("qwen3_vl_moe"), store=policy.chat.store)
        rows.append(make_learner(fresh, algorithm=algorithm, stop_tokens=False).step(given))
        weights.append(fresh.model.state_dict())
    off, same, changed = rows
    assert "router/replayed_tokens" not in off
    assert all(torch.equal(one, weights[1][name]) for name, one in weights[0].items()), "its own choice changes no bit"
    assert (same["router/changed_tokens"], same["router/changed_experts"]) == (0, 0)
    assert (changed["router/changed_tokens"], changed["router/changed_experts"]) == (1, 1)
    assert changed["router/replayed_tokens"] == 1, "of each token that the learner computes the engine has a record"
    assert changed["mismatch/max"] < 1e-4


def test_the_reference_takes_the_same_routes(mixtures: Callable[[str], Path]) -> None:
    policy, sampler = twins(mixtures("qwen3_vl_moe"))
    contrary(sampler.model)
    algorithm = AlgorithmSection(router_replay=True, kl=KLSection(coef=0.1), router_coef=0.01)
    learner = make_learner(policy, algorithm=algorithm, reference=FrozenCopy(policy.frozen_copy()))
    assert learner.step(play(policy, sampler))["policy/kl_ref"] < 1e-9


def test_in_bfloat16_replaying_takes_mismatch_away(mixtures: Callable[[str], Path], tmp_path: Path) -> None:
    folder = make_tiny("qwen3_vl_moe", tmp_path, initializer_range=0.15, num_experts=32, num_hidden_layers=6)
    policy, other, sampler = twins(folder, "bfloat16", 3)
    groups = play(policy, sampler)
    learners = [make_learner(policy, stop_tokens=False), make_learner(other, algorithm=REPLAY, stop_tokens=False)]
    own, replayed = (learner.step(groups) for learner in learners)
    assert replayed["router/changed_tokens"] > 0
    assert replayed["mismatch/kl"] < own["mismatch/kl"] / 3
    assert replayed["mismatch/max"] < own["mismatch/max"] / 3


def test_what_cannot_be_replayed_is_refused(mixtures: Callable[[str], Path], checkpoints: dict[str, Path]) -> None:
    with pytest.raises(RecipeError, match="router_replay"):
        make_learner(open_policy(checkpoints["qwen3_vl"]), algorithm=REPLAY)
    policy = open_policy(mixtures("qwen3_vl_moe"))
    groups = play(policy, policy)
    turn = groups[0][0].episode.turns[0]
    assert turn.response.routes is not None
    with policy.replay_routes(torch.zeros(1, 2, 2, dtype=torch.int16)):
        pass
    with pytest.raises(ModelError, match="router_replay"), policy.replay_routes(torch.zeros(1, 3, 2, dtype=torch.int16)):
        pass
