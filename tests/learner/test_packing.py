"""Packing: what is shared stands once, what was sampled is trained once, and a tree's attention is its block mask."""

from itertools import pairwise
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.learner.packing import pack
from sensorium.learner.token_runs import TokenRun, arrange
from sensorium.learner.tree_attention import TreeAttention
from sensorium.models.attention import MaskedAttention
from sensorium.models.policy import Policy
from sensorium.recipe.schema import BatchSection

from .played import Player, make_learner, open_policy

CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def policy(checkpoints: dict[str, Path]) -> Policy:
    return open_policy(checkpoints["qwen2_5_vl"])


def test_the_prompt_of_a_group_stands_once(policy: Policy) -> None:
    group = Player(policy).single_turn(size=5)
    prompt = policy.chat.layout(group[0].episode.threads[0].segments[0])
    packing = pack([group], policy.chat.layout, 4096, CPU)
    answers = sum(sample.episode.sampled_tokens for sample in group)
    # Nobody reads what follows an answer's last token, so it is not computed.
    assert packing.tokens == len(prompt) + answers - len(group)
    assert (len(packing.microbatches), packing.splits) == (1, 0)


def test_groups_fill_microbatches_up_to_the_limit(policy: Policy) -> None:
    player = Player(policy)
    groups = [player.single_turn(size=3) for _ in range(6)]
    for limit in (80, 120, 400):
        packing = pack(groups, policy.chat.layout, limit, CPU)
        assert all(len(microbatch) <= limit for microbatch in packing.microbatches)
        sizes = [len(microbatch) for microbatch in packing.microbatches]
        assert packing.splits or all(a + b > limit for a, b in pairwise(sizes))


def test_a_group_too_large_is_split_and_the_splits_are_counted(policy: Policy) -> None:
    group = Player(policy).single_turn(size=6, longest=20)
    whole = pack([group], policy.chat.layout, 4096, CPU)
    longest = max(
        sum(len(policy.chat.layout(segment)) for segment in sample.episode.threads[0].segments) for sample in group
    )
    halves = pack([group], policy.chat.layout, max(longest, whole.tokens * 2 // 3), CPU)
    assert whole.splits == 0
    assert halves.splits == len(halves.microbatches) - 1 >= 1
    alone = pack([group], policy.chat.layout, 16, CPU)  # less than one thread: each is a micro-batch of its own
    assert (len(alone.microbatches), alone.splits) == (6, 5)
    assert alone.trained == halves.trained == whole.trained


@pytest.mark.parametrize("limit", [16, 150, 4096])
def test_every_sampled_token_is_trained_once_also_with_a_window(policy: Policy, limit: int) -> None:
    player = Player(policy)
    groups = [player.windowed(size=3, turns=5, window=2), player.conversation(), player.windowed(window=1)]
    packing = pack(groups, policy.chat.layout, limit, CPU)
    places = torch.cat([microbatch.places_M for microbatch in packing.microbatches])
    sampled = [t for group in groups for s in group for turn in s.episode.turns for t in turn.response.tokens]
    targets = torch.cat([microbatch.targets_M for microbatch in packing.microbatches])
    assert sorted(places.tolist()) == list(range(len(sampled)))
    assert targets[places.argsort()].tolist() == sampled


def test_an_answer_that_recurs_as_history_is_context_there(policy: Policy) -> None:
    group = Player(policy).windowed(size=1, turns=3, window=2)
    answers = [turn.response for turn in group[0].episode.turns]
    packing = pack([group], policy.chat.layout, 4096, CPU)
    (microbatch,) = packing.microbatches
    stands = sum(
        answers[1].tokens == tuple(microbatch.ids_T[i : i + len(answers[1].tokens)].tolist())
        for i in range(len(microbatch))
    )
    assert stands >= 1
    assert packing.trained == sum(len(answer.tokens) for answer in answers)


def test_an_answer_in_two_episodes_is_refused(policy: Policy) -> None:
    group = Player(policy).single_turn(size=1)
    with pytest.raises(AssertionError, match="trained twice"):
        pack([group * 2], policy.chat.layout, 4096, CPU)


def test_one_tower_pass_per_distinct_picture_per_update(policy: Policy) -> None:
    player = Player(policy)
    twice = player.single_turn()
    groups = [twice, player.conversation(), player.windowed(turns=3), player.single_turn(pictures=2)]
    pictures = {
        span.media
        for g in groups
        for s in g
        for thread in s.episode.threads
        for seg in thread.segments
        for span in seg.media
    }
    before = (policy.counters.tower_passes, policy.counters.tower_items)
    metrics = make_learner(policy, batch=BatchSection(tokens_per_microbatch=128)).step(groups)
    assert policy.counters.tower_passes - before[0] == 1
    assert policy.counters.tower_items - before[1] == metrics["packing/tower_items"] == len(pictures)
    sampled = sum(sample.episode.sampled_tokens for group in groups for sample in group)
    assert metrics["packing/trained_tokens"] == sampled


@st.composite
def forests(draw: st.DrawFn) -> list[TokenRun]:
    """Runs of random trees, parents first."""
    runs: list[TokenRun] = []
    for _ in range(draw(st.integers(1, 8))):
        above = draw(st.sampled_from([None, *runs]))
        runs.append(TokenRun(draw(st.integers(0, 6)), above))
    return runs


@settings(deadline=None, max_examples=60)
@given(forests(), st.sampled_from([torch.float32, torch.bfloat16]))
def test_tree_attention_is_attention_with_the_block_mask(runs: list[TokenRun], dtype: torch.dtype) -> None:
    batches = arrange(runs)
    count = sum(run.length for run in runs)
    if not count:
        return
    mask = torch.zeros(count, count, dtype=torch.bool)
    for run in runs:
        own = slice(run.start, run.start + run.length)
        mask[own, own] = torch.ones(run.length, run.length).tril().bool()
        above = run.above
        while above is not None:
            mask[own, above.start : above.start + above.length] = True
            above = above.above
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, count, 8, generator=generator).to(dtype)
    key, value = torch.randn(2, 1, 2, count, 8, generator=generator).to(dtype)
    gradient = torch.randn(1, count, 4, 8, generator=generator).to(dtype)
    results = []
    for attention in (TreeAttention(batches, CPU), MaskedAttention(mask[None, None])):
        inputs = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
        out = attention(0, *inputs, 0.3)
        out.backward(gradient)
        results.append([out, *(tensor.grad for tensor in inputs)])
    tolerance = 1e-5 if dtype == torch.float32 else 4e-2
    for found, expected in zip(*results, strict=True):
        torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)
