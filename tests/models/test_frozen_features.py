"""Features of frozen towers are cached while their weights stay as they are, and no longer."""

import pytest
import torch
from torch import nn

from sensorium.data.media_store import MediaStore
from sensorium.models.encoding import FrozenFeatures, WeightsVersion
from sensorium.models.load import load_policy
from sensorium.models.policy import FormerSelf, Policy
from sensorium.models.segment_layout import Features
from sensorium.recipe.schema import LoraSection

from .clips import clip, noise, tone


@pytest.fixture(scope="module")
def loaded() -> Policy:
    return load_policy("tiny:qwen2_5_omni", store=MediaStore(), device="cpu")


@pytest.fixture
def policy(loaded: Policy) -> Policy:
    """A copy with its towers frozen, and a cache of its own."""
    copy = loaded.copy()
    copy._encoder.cache = FrozenFeatures(1 << 30)
    for group in ("vision", "audio", "projector"):
        for parameter in copy.groups()[group].values():
            parameter.requires_grad_(False)
    return copy


def looks(policy: Policy) -> tuple[int, int]:
    """Items looked at, and items remembered."""
    return policy.counters.tower_items, policy.counters.tower_hits


def test_a_frozen_tower_looks_at_each_medium_once(policy: Policy) -> None:
    media = [noise(policy.chat.store, 1), tone(policy.chat.store, 1), clip(policy.chat.store, 1)]
    with torch.inference_mode():
        first = policy.encode(media)
    assert looks(policy) == (3, 0)
    again = policy.encode([*reversed(media), noise(policy.chat.store, 2)])
    assert looks(policy) == (4, 3)
    for item in media:
        assert torch.equal(first[item].embeds_NH, again[item].embeds_NH)
        assert not again[item].embeds_NH.is_inference(), "what is remembered serves training"
    (2 * again[media[0]].embeds_NH * torch.ones(1, requires_grad=True)).sum().backward()


def test_what_is_remembered_does_not_depend_on_the_company(policy: Policy, loaded: Policy) -> None:
    media = [tone(policy.chat.store, seed, 0.3 * seed) for seed in range(1, 5)]
    together = policy.encode(media)
    other = loaded.frozen_copy()
    for item in reversed(media):
        assert torch.equal(other.encode([item])[item].embeds_NH, together[item].embeds_NH)


def weight_of(policy: Policy, group: str, name: str) -> torch.Tensor:
    (found,) = (weight for full, weight in policy.groups()[group].items() if full.endswith(name))
    return found


def test_a_tower_that_learns_is_asked_each_time_and_one_that_learned_again_says_something_new(policy: Policy) -> None:
    sound, picture = tone(policy.chat.store, 1), noise(policy.chat.store, 1)
    old = policy.encode([sound, picture])
    learns = weight_of(policy, "audio", "audio_tower.layers.0.fc1.weight").requires_grad_(True)
    assert policy.encode([sound])[sound].embeds_NH.requires_grad
    assert looks(policy) == (3, 0)
    assert policy._encoder.cache.held == old[picture].nbytes, "what the audio tower said before is dropped"
    with torch.no_grad():
        learns.add_(0.1)
    learns.requires_grad_(False)
    new = policy.encode([sound, picture])
    assert looks(policy) == (4, 1), "the vision tower stayed as it was"
    assert not torch.allclose(new[sound].embeds_NH, old[sound].embeds_NH)
    assert policy.encode([sound])[sound].embeds_NH is not old[sound].embeds_NH
    assert looks(policy) == (4, 2)


def test_weights_that_are_loaded_make_a_frozen_tower_look_again(policy: Policy) -> None:
    picture = noise(policy.chat.store, 1)
    before = policy.encode([picture])[picture].embeds_NH
    weights = policy.model.state_dict()
    policy.model.load_state_dict({version: weight * 1.1 for version, weight in weights.items()})
    assert not torch.allclose(policy.encode([picture])[picture].embeds_NH, before)
    assert looks(policy) == (2, 0)


def test_a_copy_knows_what_its_original_saw_until_either_moves(policy: Policy) -> None:
    picture = noise(policy.chat.store, 1)
    kept = policy.encode([picture])[picture].embeds_NH
    reference = policy.frozen_copy()
    assert torch.equal(reference.encode([picture])[picture].embeds_NH, kept)
    assert looks(reference) == (0, 1)
    with torch.no_grad():
        weight_of(policy, "vision", "visual.blocks.0.norm1.weight").mul_(2)
    moved = policy.encode([picture])[picture].embeds_NH
    assert not torch.allclose(moved, kept)
    assert torch.equal(reference.encode([picture])[picture].embeds_NH, kept)
    assert torch.equal(policy.encode([picture])[picture].embeds_NH, moved)


def test_the_cache_is_bounded_and_counts_what_leaves(policy: Policy) -> None:
    pictures = [noise(policy.chat.store, seed) for seed in range(4)]
    size = policy.encode(pictures[:1])[pictures[0]].nbytes
    policy._encoder.cache = FrozenFeatures(2 * size)
    policy.encode(pictures[:2])
    policy.encode([pictures[0]])  # pictures[1] was used longest ago
    policy.encode([pictures[2]])
    assert policy._encoder.cache.evictions == 1
    assert policy._encoder.cache.held == 2 * size
    before = looks(policy)
    policy.encode([pictures[0], pictures[2], pictures[1]])
    assert looks(policy) == (before[0] + 1, before[1] + 2)


def test_room_for_nothing_keeps_nothing() -> None:
    store = FrozenFeatures(10)
    store.put(("weights", noise(MediaStore(), 1)), Features(torch.zeros(4, 4)))
    assert (store.held, store.evictions) == (0, 1)


def test_the_version_of_weights_changes_when_one_is_written_to() -> None:
    module = nn.Linear(2, 2).requires_grad_(False)
    weights = WeightsVersion(module)
    version = weights.current_version()
    assert weights.current_version() is version
    assert WeightsVersion(nn.Linear(2, 2), version=version).current_version() is not version, "they learn"
    assert WeightsVersion(nn.Linear(2, 2).requires_grad_(False), version=version).current_version() is version
    with torch.no_grad():
        module.weight.add_(1)
        assert weights.current_version() is not version
        version = weights.current_version()
        module.weight.requires_grad_(True)
        assert weights.learning
        assert weights.current_version() is version, "nothing was trained yet"
    assert weights.current_version() is not version, "with gradients it is"
    module.requires_grad_(False)
    version = weights.current_version()
    module.register_parameter("adapter", nn.Parameter(torch.zeros(2), requires_grad=False))
    assert weights.current_version() is not version


@pytest.mark.parametrize("frozen", [False, True])
def test_a_tower_with_adapters_is_another_without_them_or_with_others(frozen: bool) -> None:
    section = LoraSection(rank=2, groups=("vision",))
    policy = load_policy("tiny:qwen3_vl", store=MediaStore(), device="cpu", lora=section)
    picture, own = noise(policy.chat.store, 1), policy.adapters
    assert own is not None
    plain = policy.encode([picture])[picture].embeds_NH.detach()
    former = own.snapshot()
    with torch.no_grad():
        for version, parameter in own.parameters.items():
            parameter.requires_grad_(not frozen)
            if "lora_B" in version:
                parameter.add_(0.1)
    adapted = policy.encode([picture])[picture].embeds_NH.detach()
    assert not torch.allclose(adapted, plain)
    for _ in range(2):
        with own.off():
            assert torch.equal(policy.encode([picture])[picture].embeds_NH, plain)
        with own.holding(former), torch.no_grad():
            torch.testing.assert_close(policy.encode([picture])[picture].embeds_NH, plain)
        torch.testing.assert_close(policy.encode([picture])[picture].embeds_NH.detach(), adapted)


def test_a_tower_without_adapters_is_the_same_when_those_of_the_language_model_are_off() -> None:
    policy = load_policy("tiny:qwen3_vl", store=MediaStore(), device="cpu", lora=LoraSection(rank=2, groups=("language",)))
    picture = noise(policy.chat.store, 1)
    policy.encode([picture])
    with FormerSelf(policy, None).active() as former:
        former.encode([picture])
        assert looks(former) == (0, 1)
    policy.encode([picture])
    assert looks(policy) == (1, 1)
