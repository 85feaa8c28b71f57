"""Recorded steps give the same bits as the functions they were recorded from, also after the weights change."""

import pytest
import torch

from sensorium.engines.native.native_engine import NativeEngine
from sensorium.engines.native.steps import RECORD_AFTER
from sensorium.engines.protocol import Request, Sampling
from sensorium.vocabulary.content import user

from .conftest import Bench, ask, generate

KINDS = [
    Sampling(), Sampling(temperature=0.6), Sampling(top_p=0.7), Sampling(top_k=3), Sampling(temperature=0.0),
    Sampling(stop_tokens=False),
]  # fmt: skip


def crowd(bench: Bench, kinds: list[Sampling]) -> list[Request]:
    """Responses of different kinds and lengths, so that the batch keeps changing its size."""
    requests = []
    for i, kind in enumerate(kinds):
        sampling = Sampling(**{**vars(kind), "max_new_tokens": 2 * RECORD_AFTER + 3 * i})
        context = [bench.policy.chat.render([user(bench.picture(i % 2), "what? " * (1 + i % 3))])]
        requests.append(ask(f"{i}", context, sampling, order=(i,), key=i))
    return requests


def calls(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The number of rows of every call of the language model from Python."""
    seen: list[int] = []
    original = bench.policy.language

    def language(ids_BT, *rest, **more):  # type: ignore[no-untyped-def]
        seen.append(len(ids_BT))
        return original(ids_BT, *rest, **more)

    monkeypatch.setattr(bench.policy, "language", language)
    return seen


@pytest.mark.parametrize("kinds", [KINDS, [Sampling(stop_tokens=False)] * 4], ids=["mixed", "plain"])
def test_recorded_steps_equal_plain_ones_bit_for_bit(
    vision: Bench, kinds: list[Sampling], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = generate(NativeEngine(vision.policy, record=False), *crowd(vision, kinds))
    seen = calls(vision, monkeypatch)
    engine = NativeEngine(vision.policy)
    recorded = generate(engine, *crowd(vision, kinds))
    assert [r.segment for r in recorded] == [r.segment for r in plain]
    assert len(seen) < engine.counters.decode_steps  # most steps never entered Python


def test_a_recording_sees_weights_that_change_in_place_and_notices_replaced_ones(bench: Bench) -> None:
    policy = bench.policy
    engine = NativeEngine(policy)
    requests = crowd(bench, [Sampling(stop_tokens=False)] * 3)
    generate(engine, *requests)
    layer = policy.adapter.language_model.layers[0].mlp.down_proj
    kept = layer.weight
    try:
        changed = torch.nn.Parameter(kept.detach() * 0.5)
        for change in ("in place", "replaced", "in place again"):
            if change == "replaced":
                layer.weight = changed
            else:
                with torch.no_grad():
                    layer.weight.mul_(2.0)
            policy.version += 1
            engine.update_weights(policy, policy.version)
            expected = generate(NativeEngine(policy, record=False), *requests)
            assert [r.segment for r in generate(engine, *requests)] == [r.segment for r in expected], change
    finally:
        with torch.no_grad():
            kept.mul_(0.5)
        layer.weight = kept
    assert all(parameter.requires_grad for parameter in policy.model.parameters())


def test_a_model_whose_python_depends_on_the_batch_is_not_recorded(text: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    policy = text.policy
    original = policy.logits
    monkeypatch.setattr(policy, "logits", lambda hidden: original(hidden) * (1.0 + 0.25 * int(hidden.shape[0] % 2)))
    requests = [
        ask(
            f"{i}",
            [policy.chat.render([user("what?")])],
            Sampling(max_new_tokens=20 + 9 * i, stop_tokens=False),
            order=(i,),
            key=i,
        )
        for i in range(3)
    ]
    plain = generate(NativeEngine(policy, record=False), *requests)
    assert [r.segment for r in generate(NativeEngine(policy), *requests)] == [r.segment for r in plain]
