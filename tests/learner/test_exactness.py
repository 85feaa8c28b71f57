"""The learner against the stock transformers model, one row at a time: log-probs, and the gradient of every parameter."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor

from sensorium.learner import forward
from sensorium.learner.learner import CreditedEpisode, Learner
from sensorium.models.policy import FrozenCopy, Policy
from sensorium.recipe.schema import AlgorithmSection, BatchSection, KLSection, LossSection, OptimizerSection
from tests.families import FAMILY_ROWS, SENSING, UNUSED, make_short, wide_weights

from .played import Groups, Player, distribution, make_learner, open_policy, stock_model, stock_rows

GRADIENT_TOLERANCE = 1e-5
GRADIENT_FLOOR = 1e-7
LAYOUTS = {
    "one medium": lambda player: player.single_turn(size=2),
    "three media": lambda player: player.single_turn(size=3, pictures=3),
    "a medium in turn 3": lambda player: player.conversation(size=2),
    "windowed threads": lambda player: player.windowed(turns=3),
}
VIDEOS = {
    "two videos": lambda player: player.single_turn(size=2, pictures=0, more=[player.film(), player.film()]),
    "a video in turn 3": lambda player: player.conversation(size=2, late=player.film),
}
SOUNDS = {
    "a sound": lambda player: player.single_turn(size=2, pictures=0, more=[player.sound()]),
    "a sound in turn 3": lambda player: player.conversation(size=2, late=player.sound),
}
BOTH = {
    "sound, video, sound and picture": lambda player: player.single_turn(
        size=2, more=[player.sound(), player.film(), player.sound()]
    ),
    "a video with its sound inside": lambda player: player.single_turn(size=2, more=[player.heard_film()]),
}
CUT = ("qwen2_5_vl", "qwen3_5_moe")  # in micro-batches of several sizes: of those with delta nets, and of those without
# Those whose gradients are compared; the others differ from them in nothing that a gradient could show.
DESCENDED = ("three media", "a medium in turn 3", "windowed threads", "two videos",
             "sound, video, sound and picture", "a video with its sound inside")  # fmt: skip


def layouts(policy: Policy) -> dict[str, Callable[[Player], list[CreditedEpisode]]]:
    """What the family must get right."""
    sees, hears = (kind in policy.chat.modalities for kind in ("picture", "sound"))
    return LAYOUTS | (VIDEOS if sees else {}) | (SOUNDS if hears else {}) | (BOTH if sees and hears else {})


@pytest.mark.parametrize(("family", "temperature"), [*((family, 0.7) for family in SENSING), ("qwen3_vl", 1.0)])
def test_logprobs_equal_the_stock_model_row_by_row(family: str, temperature: float, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints[family])
    player = Player(policy)
    stock = stock_model(checkpoints[family])
    for name, play in layouts(policy).items():
        group = play(player)
        learner = make_learner(policy, temperature=temperature, batch=BatchSection(tokens_per_microbatch=256))
        found = {
            (sample.episode.id, turn): logprobs
            for sample, turns in zip(group, learner.logprobs([group])[0], strict=True)
            for turn, logprobs in enumerate(turns)
        }
        gaps = []

        def compare(sample: CreditedEpisode, turn: int, logits: Tensor, tokens: Tensor, found=found, gaps=gaps) -> None:
            expected = distribution(policy, logits, temperature).gather(1, tokens[:, None])[:, 0]
            gaps.append(float((found[sample.episode.id, turn] - expected).abs().max()))

        with torch.no_grad():
            scale = stock_rows(stock, policy, [group], compare)
        assert scale > 3, "the model says something"
        assert max(gaps) <= 1e-5 * scale, f"{name}: off by {max(gaps) / scale:.1e} of the logits' scale"


ALGORITHM = AlgorithmSection(
    loss=LossSection(aggregation="sequence_mean_token_mean", entropy_coef=0.01), kl=KLSection(coef=0.1, estimator="k3")
)
TEMPERATURE = 0.8


def gradients_of(learner: Learner, groups: Groups) -> dict[str, Tensor]:
    """The gradients of one update, taken where the optimizer would step."""
    taken: dict[str, Tensor] = {}

    def keep(share: float, norm: Tensor) -> None:
        taken.update({name: p.grad.clone() for name, p in learner.policy.model.named_parameters()})
        learner._optimizer.forget()

    learner._optimizer.step = keep  # type: ignore[method-assign]
    learner.step(groups)
    return taken


def stock_gradients(folder: Path, other: Path, learner: Learner, groups: Groups) -> dict[str, Tensor]:
    """The same loss written out: -A·ratio + 0.1·k3 - 0.01·entropy, mean over tokens, then over episodes; float64 sums."""
    policy = learner.policy
    model, reference = stock_model(folder), stock_model(other)
    references: list[Tensor] = []
    with torch.no_grad():
        stock_rows(
            reference,
            policy,
            groups,
            lambda sample, turn, logits, tokens: references.append(
                distribution(policy, logits, TEMPERATURE).gather(1, tokens[:, None])[:, 0]
            ),
        )
    episodes = sum(len(group) for group in groups)
    waiting = iter(references)

    def descend(sample: CreditedEpisode, turn: int, logits: Tensor, tokens: Tensor) -> None:
        logp_TV = distribution(policy, logits, TEMPERATURE)
        entropy = -(logp_TV.exp() * logp_TV.masked_fill(logp_TV.isinf(), 0)).sum(1)
        logp = logp_TV.gather(1, tokens[:, None])[:, 0]
        x = next(waiting) - logp
        k3 = (x.exp() - x - 1).clamp(max=10)
        loss = -sample.advantages[turn] * (logp - logp.detach()).exp() + 0.1 * k3 - 0.01 * entropy
        (loss.sum() / (sample.episode.sampled_tokens * episodes)).backward()

    stock_rows(model, policy, groups, descend)
    moved = {name: p for name, p in model.named_parameters() if name not in FAMILY_ROWS[policy.family].fixed}
    return {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in moved.items()}


def assert_same(found: dict[str, Tensor], expected: dict[str, Tensor]) -> None:
    assert found.keys() == expected.keys()
    largest = max(float(g.norm()) for g in expected.values())
    off = {
        name: float((found[name] - g).norm()) / max(float(g.norm()), GRADIENT_FLOOR / GRADIENT_TOLERANCE * largest)
        for name, g in expected.items()
    }
    worst = max(off, key=lambda name: off[name])
    assert off[worst] <= GRADIENT_TOLERANCE, f"{worst}: {off[worst]:.1e}"


@pytest.mark.parametrize("family", SENSING)
def test_gradients_equal_the_stock_model_row_by_row_for_any_microbatch(family: str, tmp_path: Path) -> None:
    given = wide_weights(family, 0.1, "vision") | {"tie_word_embeddings": FAMILY_ROWS[family].tied}
    folder, other = (make_short(family, tmp_path / str(seed), seed, **given) for seed in (1, 2))
    policy = open_policy(folder)
    player = Player(policy)
    groups = [play(player) for name, play in layouts(policy).items() if name in DESCENDED]
    expected: dict[str, Tensor] | None = None
    for limit in (16, 200, 16384) if family in CUT else (16384,):
        learner = make_learner(
            policy,
            algorithm=ALGORITHM,
            temperature=TEMPERATURE,
            batch=BatchSection(tokens_per_microbatch=limit),
            reference=FrozenCopy(open_policy(other, store=policy.chat.store)),
        )
        expected = expected or stock_gradients(folder, other, learner, groups)
        assert_same(gradients_of(learner, groups), expected)
    assert expected is not None
    still = [name for name, gradient in expected.items() if not gradient.any()]
    assert all(name.endswith(UNUSED) for name in still), f"every other parameter takes part, the towers' too: {still}"


def test_a_head_in_chunks_gives_the_same_gradients(checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    groups = [Player(policy).single_turn(size=4)]
    whole = gradients_of(make_learner(policy), groups)
    monkeypatch.setattr(forward, "CHUNK_ELEMENTS", 5 * policy.vocab_size)
    assert_same(gradients_of(make_learner(policy), groups), whole)


def test_recomputing_layers_gives_the_same_gradients(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    groups = [Player(policy).windowed()]
    kept = gradients_of(make_learner(policy), groups)
    policy.checkpoint_gradients()
    assert_same(gradients_of(make_learner(policy), groups), kept)


def test_frozen_groups_do_not_move_and_a_frozen_tower_has_no_graph(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    before = {name: p.detach().clone() for name, p in policy.model.named_parameters()}
    groups = [Player(policy).single_turn()]
    learner = make_learner(policy, freeze=("vision", "projector"), optimizer=OptimizerSection(lr=1e-2))
    learner.step(groups)
    frozen = {name for group in ("vision", "projector") for name in policy.groups()[group]}
    assert frozen
    for name, parameter in policy.model.named_parameters():
        assert (name in frozen) == torch.equal(parameter, before[name]), name
    features = policy.encode([span.media for span in groups[0][0].episode.threads[0].segments[0].media])
    assert not any(f.embeds_NH.requires_grad for f in features.values())


def test_a_frozen_tower_looks_once_in_all_steps_and_for_the_reference_too(checkpoints: dict[str, Path]) -> None:
    """The reference is a copy: it knows what the policy's tower said, as long as that tower is frozen."""
    policy = open_policy(checkpoints["qwen2_5_omni"])
    player = Player(policy)
    groups = [player.single_turn(more=[player.sound(), player.film()]), player.conversation(late=player.sound)]
    reference = policy.frozen_copy()
    frozen = ("vision", "audio", "projector")
    learner = make_learner(policy, algorithm=ALGORITHM, reference=FrozenCopy(reference), freeze=frozen)
    items = 3 + 1 + 3
    assert learner.step(groups)["packing/tower_items"] + reference.counters.tower_items == items
    assert learner.step(groups)["packing/tower_items"] == 0
    learning = make_learner(policy, algorithm=ALGORITHM, reference=FrozenCopy(reference), freeze=("vision",))
    assert learning.step(groups)["packing/tower_items"] == items, "the projector learns, and belongs to both towers"
