"""Media that one micro-batch alone shows are encoded with it, as far as there is room, and nothing else changes."""

from pathlib import Path

import pytest
import torch

from sensorium.learner.credited_episode import CreditedEpisode
from sensorium.learner.forward import TowerPasses, choose_apart, choose_passes
from sensorium.models import encoding
from sensorium.recipe.memory_estimate import TowerRoom
from sensorium.recipe.schema import BatchSection
from sensorium.vocabulary import Media

from .played import Player, make_learner, open_policy

A, B, C, D, E, F = (Media("picture", name) for name in "abcdef")
PATCHES = dict.fromkeys((A, B, C, D, E, F), 200)


@pytest.mark.parametrize(
    ("shown", "room", "apart"),
    [
        ([[A, B, C], [D, E, F]], 600, {A, B, C, D, E, F}),
        ([[A, B, C, D], [D, E]], 600, {A, B, C, E}),  # one of two micro-batches is not the only one
        ([[A, B, C], [D]], 450, {A, B, D}),
        ([[A, B, C], [D]], 100, set()),
    ],
)
def test_as_many_as_there_is_room_for(shown: list[list[Media]], room: int, apart: set[Media]) -> None:
    assert choose_apart(shown, len(shown), PATCHES, TowerRoom(room, kept=1, recomputed=0)) == apart


def test_those_that_stay_take_room_too_and_idle_ones_are_not_kept() -> None:
    assert choose_apart([[A, B], [C]], 1, PATCHES, TowerRoom(10**6, 1, 1)) == {A, B}
    assert choose_apart([[A, B, C]], 1, PATCHES, TowerRoom(1150, 3, 1)) == {A}  # 600 for it and 400 for the others


@pytest.mark.parametrize(
    ("shown", "room", "passes"),
    [
        ([[A, B], [C]], TowerRoom(600, 1, 1), TowerPasses(keeps=True)),
        ([[A, B], [C]], TowerRoom(800, 2, 1), TowerPasses(keeps=True, apart=frozenset({A, B, C}))),
        ([[A, B], [C]], TowerRoom(600, 0, 1), TowerPasses()),
        ([[A, B], [C]], TowerRoom(500, 0, 1), TowerPasses(apart=frozenset({A, B, C}))),
        ([[A, B], [B, C]], TowerRoom(200, 0, 1), TowerPasses(apart=frozenset({A, C}))),
        ([[A, B], [B, C]], TowerRoom(100, 0, 1), TowerPasses(apart=frozenset({A, B, C}))),
    ],
)
def test_less_room_means_smaller_passes(shown: list[list[Media]], room: TowerRoom, passes: TowerPasses) -> None:
    assert choose_passes(shown, len(shown), PATCHES, room) == passes


def test_an_update_is_the_same_where_media_are_encoded_anew_by_each_microbatch(checkpoints: dict[str, Path]) -> None:
    """Windows show a picture in several micro-batches, one of them without advantages: it has no graph."""
    found = []
    for room in (None, TowerRoom(1 << 40, 0, 1), TowerRoom(0, 0, 1)):
        policy = open_policy(checkpoints["qwen2_5_vl"])
        player = Player(policy)
        loud, quiet = player.windowed(), player.windowed()
        quiet = [CreditedEpisode(s.episode, tuple(torch.zeros_like(a) for a in s.advantages)) for s in (*quiet, loud[1])]
        policy.checkpoint_gradients(False, room)
        learner = make_learner(policy, batch=BatchSection(tokens_per_microbatch=64))
        if room is not None and not room.bytes:
            with pytest.warns(UserWarning, match="encoded anew by each"):
                metrics = learner.step([[loud[0]], quiet])
        else:
            metrics = learner.step([[loud[0]], quiet])
        weights = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
        found.append((metrics["packing/tower_items"], metrics["policy/grad_norm"], weights))
    (items, norm, weights), once, anew = found
    assert once[0] == items < anew[0]
    for _, same_norm, same_weights in (once, anew):
        assert same_norm == pytest.approx(norm, rel=1e-5)
        moved = torch.cat([(weights[name] - same).flatten() for name, same in same_weights.items()])
        assert float(moved.abs().mean()) < 1e-6


def test_a_pass_has_no_more_than_so_many_patches(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    player = Player(policy)
    pictures = [player.picture(56, 56) for _ in range(5)]  # of 16 patches each
    whole = policy.encode(pictures)
    assert policy.counters.tower_passes == 1
    monkeypatch.setitem(encoding.PASS_PATCHES, "cpu", 40)
    several = policy.encode(pictures)
    assert policy.counters.tower_passes == 1 + 3
    monkeypatch.setitem(encoding.PASS_PATCHES, "cpu", 8)  # a medium is never cut
    alone = policy.encode(pictures)
    assert policy.counters.tower_passes == 4 + 5
    for item in pictures:
        for found in (several, alone):
            torch.testing.assert_close(found[item].embeds_NH, whole[item].embeds_NH, rtol=1e-5, atol=1e-5)


def test_an_update_is_the_same_and_each_picture_is_encoded_once(checkpoints: dict[str, Path]) -> None:
    found = []
    for room in (None, TowerRoom(1 << 40, 1 << 30, 1), TowerRoom(1 << 40, 1, 1)):
        policy = open_policy(checkpoints["qwen2_5_vl"])
        player = Player(policy)
        groups = [player.single_turn(), player.single_turn(pictures=2), player.single_turn(size=2)]
        policy.checkpoint_gradients(False, room)
        learner = make_learner(policy, batch=BatchSection(tokens_per_microbatch=64))
        metrics = learner.step(groups)
        counters = policy.counters
        assert counters.tower_items == metrics["packing/tower_items"] == 4
        weights = {name: parameter.detach() for name, parameter in policy.model.named_parameters()}
        found.append((counters.tower_passes, metrics["policy/grad_norm"], weights))
    (one, norm, weights), (several, same_norm, same_weights), whole = found
    assert one == whole[0] == 1
    assert several > 1  # kept patches are too large to keep them all
    assert whole[1] == norm
    assert same_norm == pytest.approx(norm, rel=1e-5)
    moved = torch.cat([(weights[name] - same).flatten() for name, same in same_weights.items()])
    assert float(moved.abs().mean()) < 1e-6  # Adam's first step moves a weight by 1e-3
