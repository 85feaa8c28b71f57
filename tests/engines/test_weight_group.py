"""Weights by broadcast: what receivers have is what was sent, bit for bit, and a receiver that is gone is told."""

from concurrent.futures import Future, ThreadPoolExecutor

import pytest
import torch
from torch import Tensor

from sensorium.engines import weight_group
from sensorium.engines.weight_group import Described, Meeting, WeightReceiver, WeightSender, buffers, describe
from sensorium.vocabulary.errors import EngineError

CPU = torch.device("cpu")
WEIGHTS = {
    "a": torch.randn(3, 5, dtype=torch.bfloat16),
    "b": torch.randn(7, dtype=torch.float64),
    "scalar": torch.tensor(2.5),
    "turned": torch.randn(40, 30).T,
    "empty": torch.zeros(0, 4),
    "flags": torch.tensor([True, False, True]),
}


def received(meeting: Meeting, rank: int, described: "Future[list[Described]]") -> dict[str, Tensor]:
    receiver = WeightReceiver(meeting, rank)
    found = {}
    for _ in range(2):  # two pushes over one group
        for tensors in receiver.receive(described.result(60), CPU):
            found |= {name: tensor.clone() for name, tensor in tensors.items()}
    receiver.close()
    return found


@pytest.mark.parametrize("limit", [16, weight_group.BUFFER])
def test_all_receivers_have_what_was_sent(limit: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(buffers, "__defaults__", (limit,))
    sender = WeightSender("127.0.0.1", 2, CPU, 60.0)
    told: Future[list[Described]] = Future()
    with ThreadPoolExecutor(2) as others:
        got = [others.submit(received, sender.meeting, rank, told) for rank in (1, 2)]
        for _ in range(2):
            with sender.sending(WEIGHTS) as described:
                if not told.done():
                    told.set_result(described)
        for one in got:
            found = one.result(60)
            assert found.keys() == WEIGHTS.keys()
            assert all(torch.equal(found[name], WEIGHTS[name]) for name in WEIGHTS)
            assert all(found[name].dtype == WEIGHTS[name].dtype for name in WEIGHTS)
    sender.close()


def test_buffers_are_cut_in_order_and_a_larger_tensor_goes_alone() -> None:
    described = describe(
        {name: torch.zeros(size, dtype=torch.uint8) for name, size in zip("abcde", (4, 4, 20, 3, 5), strict=True)}
    )
    assert [[one.name for one in together] for together in buffers(described, 8)] == [["a", "b"], ["c"], ["d", "e"]]


def test_a_receiver_that_is_gone_is_told() -> None:
    sender = WeightSender("127.0.0.1", 1, CPU, 60.0)
    with ThreadPoolExecutor(1) as others:
        receiver = others.submit(WeightReceiver, sender.meeting, 1).result(60)
    sender.join()
    receiver._group.abort()
    del receiver
    with pytest.raises(EngineError, match="weights cannot be broadcast"), sender.sending({"w": torch.zeros(1_000_000)}):
        pass
    sender.close()
