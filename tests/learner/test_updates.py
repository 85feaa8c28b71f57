"""A step's updates: metrics that packing cannot change, bitwise repeatable, old log-probs, the reference, bad numbers."""

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sensorium.learner.learner import CreditedEpisode, _partition, rounded
from sensorium.learner.update import Objective
from sensorium.models.policy import FrozenCopy, Policy
from sensorium.recipe.schema import AlgorithmSection, BatchSection, KLSection, LossSection, OptimizerSection
from sensorium.vocabulary import Episode, Segment, Status, Turn
from sensorium.vocabulary.errors import ModelError, NonFiniteUpdate

from .played import Groups, Player, make_learner, open_policy

FULL = AlgorithmSection(
    loss=LossSection(
        clip_low=0.02, clip_high=0.03, dual_clip=3.0, entropy_coef=0.01, aggregation="sequence_mean_token_mean"
    ),
    kl=KLSection(coef=0.05, estimator="k3_straight_through"),
)


def play(policy: Policy) -> Groups:
    player = Player(policy)
    return [player.single_turn(size=4), player.conversation(), player.windowed(), player.single_turn(pictures=2)]


def weights(policy: Policy) -> dict[str, Tensor]:
    return {name: p.detach().clone() for name, p in policy.model.named_parameters()}


def run(checkpoints: dict[str, Path], limit: int, threads: int = 1, steps: int = 2) -> tuple[list[dict], dict[str, Tensor]]:
    torch.set_num_threads(threads)
    policy = open_policy(checkpoints["qwen3_vl"])
    batch = BatchSection(tokens_per_microbatch=limit, epochs_per_step=2, updates_per_epoch=2)
    reference = FrozenCopy(open_policy(checkpoints["qwen3_vl"], store=policy.chat.store))
    learner = make_learner(policy, algorithm=FULL, batch=batch, temperature=0.9, reference=reference)
    groups = play(policy)
    rows = [learner.step(groups) for _ in range(steps)]
    assert policy.version == 4 * steps
    return rows, weights(policy)


def test_metrics_do_not_depend_on_packing(checkpoints: dict[str, Path]) -> None:
    one, _ = run(checkpoints, 16384)
    many, _ = run(checkpoints, 60)
    assert many[0]["packing/splits"] > 0 == one[0]["packing/splits"]
    for a, b in zip(one, many, strict=True):
        for name in a:
            if name not in ("packing/splits", "packing/tokens"):
                assert b[name] == pytest.approx(a[name], rel=2e-4, abs=1e-6), name
    assert one[1]["policy/clip_fraction"] > 0
    assert one[1]["policy/kl_old"] > 0
    assert one[1]["policy/kl_ref"] > 0


@pytest.mark.parametrize("threads", [1, 2])
def test_a_run_repeats_bit_for_bit(threads: int, checkpoints: dict[str, Path]) -> None:
    rows, final = run(checkpoints, 100, threads, steps=1)
    again, repeated = run(checkpoints, 100, threads, steps=1)
    assert rows == again
    assert all(torch.equal(final[name], repeated[name]) for name in final)


def test_with_one_update_old_is_current(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    metrics = make_learner(policy).step(play(policy))
    assert (metrics["policy/kl_old"], metrics["policy/clip_fraction"]) == (0, 0)
    assert "policy/kl_ref" not in metrics
    assert policy.version == 1


def test_mismatch_is_nothing_when_the_engine_agrees(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    player = Player(policy)
    group = player.single_turn()
    learner = make_learner(policy)
    agreed = []
    for sample, (logprobs,) in zip(group, learner.logprobs([group])[0], strict=True):
        prompt, answer = sample.episode.threads[0].segments
        said = policy.chat.written(answer.tokens, logprobs.tolist(), logprobs.tolist(), answer.name)
        thread = type(sample.episode.threads[0])((prompt, said), (False, True))
        agreed.append(player.sample([thread], [(0, 1)]))
    metrics = learner.step([agreed])
    assert metrics["mismatch/prob_error"] == pytest.approx(1, abs=1e-6)
    assert metrics["mismatch/kl"] == pytest.approx(0, abs=1e-9)
    assert metrics["mismatch/max"] <= 1e-6


def test_good_answers_become_likelier_and_bad_ones_less(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    group = [
        CreditedEpisode(sample.episode, tuple(torch.full_like(a, sign) for a in sample.advantages))
        for sample, sign in zip(Player(policy).single_turn(size=2), (1.0, -1.0), strict=True)
    ]
    learner = make_learner(policy, optimizer=OptimizerSection(lr=1e-4))
    before = [float(turns[0].sum()) for turns in learner.logprobs([group])[0]]
    learner.step([group])
    after = [float(turns[0].sum()) for turns in learner.logprobs([group])[0]]
    assert after[0] > before[0]
    assert after[1] < before[1]


@pytest.mark.parametrize("coef", [0.1, -0.1])
def test_the_entropy_bonus_raises_the_entropy(coef: float, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    algorithm = AlgorithmSection(loss=LossSection.model_construct(entropy_coef=coef))
    learner = make_learner(policy, algorithm=algorithm)
    groups = [
        [
            replace(sample, advantages=tuple(torch.zeros_like(a) for a in sample.advantages))
            for sample in Player(policy).single_turn()
        ]
    ]
    first, second = (learner.step(groups)["policy/entropy"] for _ in range(2))
    assert (second > first) == (coef > 0)
    assert abs(second - first) > 1e-3


@given(st.integers(1, 9), st.integers(1, 9))
def test_every_group_is_in_one_update_of_a_step(count: int, updates: int) -> None:
    written = Episode("e", "t", "g", 0, (), (Turn(0, (), Segment("model", (1,)), 0, 0),), Status.FINISHED)
    groups = [[CreditedEpisode(written, (torch.zeros(1),))] for _ in range(count)]
    parts = _partition(groups, updates)
    assert [place for part in parts for place in part] == list(range(count))
    assert len(parts) == min(count, updates)
    assert max(map(len, parts)) - min(map(len, parts)) <= 1


def test_a_step_of_several_updates_trains_every_token(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen3_vl"])
    groups = play(policy)
    learner = make_learner(policy, batch=BatchSection(updates_per_epoch=3))
    before_N, entropies_N = learner._scores(learner._pack(groups))
    row = learner.step(groups)
    responses = [turn.response for group in groups for s in group for turn in s.episode.turns]
    assert row["packing/trained_tokens"] == sum(len(response.tokens) for response in responses)

    found = learner.token_measures([s.episode.id for group in groups for s in group] + ["of another step"])
    assert list(found) == [s.episode.id for group in groups for s in group]
    engine = [value for response in responses for value in response.logprobs]
    for side, expected_N in ((0, entropies_N), (1, before_N - torch.tensor(engine))):
        turns = [turn for measures in found.values() for turn in measures[side]]
        assert [len(turn) for turn in turns] == [len(response.tokens) for response in responses]
        assert [value for turn in turns for value in turn] == pytest.approx(expected_N.tolist(), abs=6e-5, rel=6e-3), side


@given(st.lists(st.floats(width=32, allow_infinity=False)))
def test_numbers_for_the_log_are_rounded_to_few_digits(values: list[float]) -> None:
    exact = np.array(values, dtype=np.float32)
    for value, four_decimals, three_digits in zip(
        exact.tolist(), rounded(exact, decimals=4), rounded(exact, digits=3), strict=True
    ):
        assert four_decimals == pytest.approx(value, abs=5.1e-5, rel=1e-9, nan_ok=True)
        assert three_digits == pytest.approx(value, rel=5.1e-3, abs=1e-15, nan_ok=True)
        if 1e-12 < abs(value) < 100:
            assert float(f"{three_digits:.3g}") == three_digits


def test_supervised_steps_learn_what_was_written_whatever_the_advantages(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    groups = [Player(policy).single_turn(size=2)]
    learner = make_learner(policy, algorithm=AlgorithmSection(kl=KLSection(coef=0.1)))
    rows = [learner.step(groups, "likelihood") for _ in range(12)]
    assert rows[-1]["policy/loss"] < 0.5 * rows[0]["policy/loss"]
    assert not any(name.startswith("mismatch/") for name in rows[0])
    assert learner.token_measures([groups[0][0].episode.id]) == {}


def test_a_kl_without_a_reference_is_refused(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    with pytest.raises(ValueError, match="no reference"):
        make_learner(policy, algorithm=FULL).step(play(policy))


@pytest.mark.parametrize("what", ["advantage", "weight"])
def test_a_non_finite_update_stops_before_the_weights_move(what: str, checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    groups = play(policy)
    learner = make_learner(policy)
    learner.step(groups)
    if what == "advantage":
        first = groups[0][0]
        groups[0][0] = CreditedEpisode(first.episode, tuple(a * float("nan") for a in first.advantages))
    else:
        with torch.no_grad():
            policy.model.get_decoder().layers[0].mlp.down_proj.weight[0, 0] = float("inf")
    before, state = weights(policy), learner.state_dict()["optimizer"]["moments"]
    moments = {name: {key: value.clone() for key, value in one.items()} for name, one in state.items()}
    with pytest.raises(NonFiniteUpdate, match=r"loss .*, gradient norm .*, .* tokens without"):
        learner.step(groups)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert policy.version == 1
    for name, one in learner.state_dict()["optimizer"]["moments"].items():
        assert all(torch.equal(value, moments[name][key]) for key, value in one.items())
    assert all(p.grad is None for p in policy.model.parameters())


def test_a_gradient_that_is_not_finite_stops_the_update_also_where_the_loss_is(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    learner = make_learner(policy)
    before = weights(policy)
    policy.model.get_decoder().norm.weight.register_hook(lambda gradient: gradient * float("inf"))
    with pytest.raises(NonFiniteUpdate, match=r"gradient norm (inf|nan).* 1 parameters with a bad gradient"):
        learner.step([Player(policy).single_turn()])
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    assert policy.version == 0


def test_a_step_that_stopped_at_a_later_update_is_gone_on_with_exactly(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    groups = play(policy)
    last = groups[-1][0]
    bad = [*groups[:-1], [CreditedEpisode(last.episode, tuple(a * float("inf") for a in last.advantages)), *groups[-1][1:]]]
    batch = BatchSection(updates_per_epoch=2)
    learner = make_learner(policy, batch=batch)
    with pytest.raises(NonFiniteUpdate, match="update 2 of 2"):
        learner.step(bad)
    assert policy.version == 1
    replayed = make_learner(policy, batch=batch)
    replayed.load_state_dict(learner.state_dict())
    with pytest.raises(NonFiniteUpdate, match="update 2 of 2"):
        replayed.step(bad)
    assert policy.version == 1
    replayed.step(groups)

    whole = open_policy(checkpoints["qwen2_5_vl"], store=policy.chat.store)
    make_learner(whole, batch=batch).step(groups)
    for (name, found), (_, expected) in zip(policy.model.named_parameters(), whole.model.named_parameters(), strict=True):
        assert torch.equal(found, expected), name


def test_groups_without_advantages_are_measured_but_need_no_backward(
    checkpoints: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    results = []
    for skip in (True, False):
        policy = open_policy(checkpoints["qwen2_5_vl"])
        player = Player(policy)
        loud, quiet = player.conversation(), player.windowed()
        quiet = [CreditedEpisode(s.episode, tuple(torch.zeros_like(a) for a in s.advantages)) for s in quiet]
        learner = make_learner(policy)
        with monkeypatch.context() as patch:
            if not skip:
                patch.setattr(Objective, "idles", lambda self, microbatch: False)
            graphs = []
            score = learner._scorer.score
            patch.setattr(
                learner._scorer,
                "score",
                lambda *given, score=score, graphs=graphs: graphs.append(torch.is_grad_enabled()) or score(*given),
            )
            metrics = learner.step([quiet, loud])
        assert graphs == ([True, False] if skip else [True, True])
        results.append((metrics, weights(policy)))
    (metrics, final), (expected, plain) = results
    assert metrics == pytest.approx(expected, rel=1e-5, abs=1e-9)
    for name in final:  # AdamW moves a weight of which the gradient is nearly zero by its rounding
        assert float((final[name] - plain[name]).abs().mean()) < 2e-6, name


def test_an_update_without_any_advantage_still_counts(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    group = Player(policy).single_turn()
    quiet = [CreditedEpisode(s.episode, tuple(torch.zeros_like(a) for a in s.advantages)) for s in group]
    learner = make_learner(policy)
    before = weights(policy)
    metrics = learner.step([quiet])
    assert (metrics["policy/grad_norm"], metrics["policy/loss"], policy.version) == (0, 0, 1)
    assert all(torch.equal(p, before[name]) for name, p in policy.model.named_parameters())
    learner.step([group])
    moved = weights(policy)
    learner.step([quiet])  # the moments of the update before carry on
    assert not torch.equal(policy.model.lm_head.weight, moved["model.language_model.embed_tokens.weight"])


def test_a_response_with_a_forbidden_token_is_refused(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    player = Player(policy)
    player.allowed = np.array(policy.chat.forbidden_ids[:1])
    with pytest.raises(ModelError, match=r"episode 1, turn 0.*may not write"):
        make_learner(policy).step([player.single_turn()], "likelihood")


def test_losses_take_their_settings_from_the_recipe(checkpoints: dict[str, Path]) -> None:
    policy = open_policy(checkpoints["qwen2_5_vl"])
    groups = play(policy)
    fractions = []
    for clip in (1e-4, 10.0):
        algorithm = AlgorithmSection(loss=LossSection(clip_low=min(clip, 1.0), clip_high=clip))
        learner = make_learner(
            open_policy(checkpoints["qwen2_5_vl"], store=policy.chat.store),
            algorithm=algorithm,
            batch=BatchSection(epochs_per_step=2),
            optimizer=OptimizerSection(lr=1e-4),
        )
        fractions.append(learner.step(groups)["policy/clip_fraction"])
    assert fractions[0] > 0.1
    assert fractions[1] == 0
