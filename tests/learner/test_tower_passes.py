"""Media that one micro-batch alone shows are encoded with it, as far as there is room, and nothing else changes."""

from pathlib import Path

import pytest
import torch

from sensorium.learner.tower_passes import choose_apart
from sensorium.recipe.activations import TowerRoom
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
