"""Gated delta nets whose states the caller holds: in pieces, padded, and as the stock layer, to the rounding of float64."""

from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import pytest
import torch
from torch import Tensor

from sensorium.kernels import delta_rule
from sensorium.kernels.first_use import fallbacks
from sensorium.models import delta_net
from sensorium.models.attention import MaskedAttention
from sensorium.models.delta_net import DeltaNet, DeltaState, DeltaTokens, advance, is_delta
from sensorium.models.policy import Policy
from sensorium.vocabulary.errors import ModelError
from tests.float64 import in_float64

from .stock_pair import Pair, close

DELTA = ("qwen3_5", "qwen3_5_moe")


@pytest.fixture
def net(pairs: Callable[..., Pair]) -> Any:
    return pairs("qwen3_5").policy.adapter.language_model.layers[0].linear_attn


def drawn(net: Any, rows: int, length: int, seed: int = 0) -> DeltaTokens:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(rows, length, net.hidden_size, generator=generator)
    decay = -torch.rand(rows, length, net.num_v_heads, generator=generator) / 4
    return DeltaTokens(net.in_proj_qkv(hidden), net.in_proj_b(hidden).sigmoid(), decay)


def part(tokens: DeltaTokens, start: int, end: int) -> DeltaTokens:
    return DeltaTokens(*(x[:, start:end] for x in (tokens.mixed_BTC, tokens.beta_BTG, tokens.decay_BTG)))


@torch.no_grad()
@pytest.mark.parametrize("cuts", [(1,), (2,), (3, 4), (63,), (64, 65), (65,), (1, 2, 3, 5, 80), (99,)])
def test_a_row_in_pieces_is_the_row(net: Any, cuts: tuple[int, ...]) -> None:
    """Pieces of one token go through the recurrent form, longer ones through chunks."""
    tokens = drawn(net, 2, 100)
    whole, end = advance(net, tokens)
    state: DeltaState | None = None
    found = []
    for start, stop in zip((0, *cuts), (*cuts, 100), strict=True):
        out, state = advance(net, part(tokens, start, stop), state)
        found.append(out)
    assert state is not None
    assert state.state_BGKV.dtype == torch.float32
    close(torch.cat(found, dim=1), whole, 1e-6)
    close(state.state_BGKV, end.state_BGKV, 1e-6)
    assert torch.equal(state.window_BWC, tokens.mixed_BTC[:, -3:])
    forgotten, _ = advance(net, part(tokens, cuts[-1], 100), DeltaState(state.window_BWC * 0, state.state_BGKV * 0))
    assert float((forgotten - whole[:, cuts[-1] :]).abs().max()) > 1e-2 * float(whole.abs().max()), "the state matters"


@torch.no_grad()
def test_padding_changes_nothing(net: Any) -> None:
    lengths = [0, 1, 2, 3, 70, 90]
    before = advance(net, drawn(net, len(lengths), 5, seed=1))[1]
    tokens = drawn(net, len(lengths), 90)
    out, after = advance(net, tokens, before, torch.tensor(lengths))
    for i, length in enumerate(lengths):
        own = DeltaState(before.window_BWC[i : i + 1], before.state_BGKV[i : i + 1])
        row = DeltaTokens(*(x[i : i + 1, :length] for x in (tokens.mixed_BTC, tokens.beta_BTG, tokens.decay_BTG)))
        right, end = advance(net, row, own) if length else (out[i : i + 1, :0], own)
        torch.testing.assert_close(out[i : i + 1, :length], right, rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(after.state_BGKV[i : i + 1], end.state_BGKV, rtol=1e-5, atol=1e-6)
        assert torch.equal(after.window_BWC[i : i + 1], end.window_BWC)


def logits_of(policy: Policy, ids_BT: Tensor) -> Tensor:
    positions_3BT = torch.arange(ids_BT.shape[1]).expand(3, *ids_BT.shape)
    return policy.head_logits(policy.language(ids_BT, positions_3BT, MaskedAttention()))


@torch.no_grad()
@pytest.mark.parametrize("family", DELTA)
def test_parts_are_the_stock_model_to_the_rounding_of_float64(pairs: Callable[..., Pair], family: str) -> None:
    pair = pairs(family, num_hidden_layers=4)
    policy, stock = pair.policy.copy(), pair.stock
    ids_BT = torch.randint(20, 400, (2, 150), generator=torch.Generator().manual_seed(0))
    positions_3BT = torch.arange(150).expand(3, 2, -1)
    close(logits_of(policy, ids_BT), stock(input_ids=ids_BT, position_ids=positions_3BT, use_cache=False).logits, 1e-5)
    policy.model.double()
    policy.model.set_experts_implementation("eager")  # the grouped products are not made for float64
    with in_float64():
        wide = policy.model(input_ids=ids_BT, position_ids=positions_3BT, use_cache=False).logits
        assert wide.dtype == torch.float64
        close(logits_of(policy, ids_BT), wide, 1e-9)


def test_an_attention_without_states_is_refused(pairs: Callable[..., Pair]) -> None:
    policy = pairs("qwen3_5").policy
    ids_BT, positions_3BT = torch.tensor([[20, 21, 22]]), torch.arange(3).expand(3, 1, 3)
    with pytest.raises(ModelError, match="delta"):
        policy.language(ids_BT, positions_3BT, lambda layer, query, key, value, scaling: query)  # type: ignore[arg-type]
    seen = torch.ones(3, 3, dtype=torch.bool).tril() & (torch.arange(3) > 0)
    with pytest.raises(ModelError, match="mask"):
        policy.language(ids_BT, positions_3BT, MaskedAttention(seen[None, None]))


def test_only_the_delta_nets_have_another_class(pairs: Callable[..., Pair]) -> None:
    policy = pairs("qwen3_5", num_hidden_layers=4).policy
    layers = policy.adapter.language_model.layers
    assert [is_delta(layer) for layer in layers] == [True, False, True, False]
    assert [isinstance(part, DeltaNet) for _, part in policy.model.named_modules()].count(True) == 2
    assert policy.model.state_dict().keys() == pairs("qwen3_5", num_hidden_layers=4).stock.state_dict().keys()


def test_runs_of_a_row_have_their_own_states(net: Any) -> None:
    """The reference of the kernels' form for runs of unlike lengths, end to end in one row."""
    tokens = drawn(net, 1, 80)
    from sensorium.models.delta_net import convolved

    padded = torch.cat([tokens.mixed_BTC.new_zeros(1, 3, net.conv_dim), tokens.mixed_BTC], dim=1)
    given = (*convolved(net, padded), tokens.decay_BTG, tokens.beta_BTG)
    states = torch.randn(3, net.num_v_heads, net.head_k_dim, net.head_v_dim)
    out, after = delta_rule.torch_chunks(*given, states, torch.tensor([0, 1, 70, 80]))
    for i, (start, end) in enumerate(((0, 1), (1, 70), (70, 80))):
        right, state = delta_rule.torch_chunks(*(x[:, start:end] for x in given), states[i : i + 1])
        assert torch.equal(out[:, start:end], right)
        assert torch.equal(after[i : i + 1], state)


def test_a_missing_kernel_is_reported_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """The check before the first use, with a GPU that has nothing installed."""
    monkeypatch.setattr(delta_rule, "trial", lambda *given: delta_rule.import_module("fla.ops.gated_delta_rule"))
    delta_rule.usable.cache_clear()
    before = fallbacks()
    with pytest.warns(UserWarning, match="fla"):
        assert not delta_rule.usable(torch.device("cuda"), torch.bfloat16, 2, 4, 16, 16)
    assert not delta_rule.usable(torch.device("cuda"), torch.bfloat16, 2, 4, 16, 16)
    assert fallbacks() == before + 1
    delta_rule.usable.cache_clear()
    assert not delta_rule.usable(torch.device("cpu"), torch.bfloat16, 2, 4, 16, 16)
    assert fallbacks() == before + 1, "a CPU computes by the reference, which is no fallback"


def test_the_trial_finds_a_wrong_kernel(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu = (torch.device("cpu"), torch.float32, 2, 4, 16, 16)
    monkeypatch.setattr(delta_rule, "fla_chunks", delta_rule.torch_chunks)
    monkeypatch.setattr(delta_rule, "fla_step", delta_rule.torch_step)
    assert delta_rule.trial(*cpu) == 0
    right = delta_rule.torch_chunks

    def detached(*given: Any) -> Any:
        out, state = right(*given)
        return out, state.detach() + 0 * out.sum()

    monkeypatch.setattr(delta_rule, "fla_chunks", detached)
    assert delta_rule.trial(*cpu) > delta_rule.BOUND


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_a_wrong_convolution_is_found_and_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    """Without a GPU the kernel runs in Triton's interpreter."""
    from sensorium.kernels import delta_triton

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for span in (2, 4):
        assert delta_net.trial(device, torch.float32, 80, 24, span) <= 1e-5
    right = delta_triton.Convolve.apply
    monkeypatch.setattr(delta_triton.Convolve, "apply", lambda *given: [x * 1.1 for x in right(*given)])
    delta_net._usable.cache_clear()
    with pytest.warns(UserWarning, match="convolution"):
        assert not delta_net._usable(device, torch.float32, 80, 24, 4)
    delta_net._usable.cache_clear()


@pytest.mark.gpu
@pytest.mark.parametrize("heads", [(2, 4, 16, 16), (16, 32, 128, 128)])
def test_flash_linear_attention_gives_what_the_reference_gives(heads: tuple[int, int, int, int]) -> None:
    """The rows "delta chunks" and "delta step" of the table of operations, with gradients through both states."""
    assert delta_rule.trial(torch.device("cuda"), torch.bfloat16, *heads) <= delta_rule.BOUND
