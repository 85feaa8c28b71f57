"""Gated delta nets over trees: what each run would give after its ancestors in a row of its own, gradients too."""

from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sensorium.kernels import delta_rule, layer_ops
from sensorium.learner import tree_states
from sensorium.learner.token_runs import TokenRun, arrange, arrange_levels
from sensorium.learner.tree_attention import LevelAttention, TreeAttention
from sensorium.models.attention import MaskedAttention
from sensorium.models.delta_net import DeltaTokens, advance
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from tests.float64 import in_float64

from .played import open_policy
from .test_packing import forests

CPU = torch.device("cpu")
Attend = Callable[[list[TokenRun]], TreeAttention | LevelAttention]
LAYOUTS: dict[str, Attend] = {
    "rectangles": lambda runs: TreeAttention(arrange(runs), CPU),
    "levels": lambda runs: LevelAttention(arrange_levels(runs), CPU),
}


@pytest.fixture(scope="module")
def policies(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Policy]:
    """Four layers, of which the third is a delta net above attention, in float64."""
    folder = tmp_path_factory.mktemp("delta")
    made = {}
    for family in ("qwen3_5", "qwen3_5_moe"):
        path = make_tiny(family, folder / family, seed=3, initializer_range=0.15, num_hidden_layers=4)
        made[family] = open_policy(path)
        made[family].model.double()
        made[family].model.set_experts_implementation("eager")  # the grouped products are not made for float64
    return made


@pytest.fixture
def _as_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path of the kernels, computed by their reference."""
    monkeypatch.setattr(tree_states, "usable", lambda *given: True)
    monkeypatch.setattr(tree_states, "fla_chunks", lambda *given, final: delta_rule.torch_chunks(*given))


def path_of(run: TokenRun) -> list[int]:
    return [*run.ancestors().tolist(), *range(run.start, run.start + run.length)]


def off(found: Sequence[Tensor], right: Sequence[Tensor]) -> float:
    """The largest difference relative to the largest value of its tensor."""
    pairs = zip(found, right, strict=True)
    return max(
        float((one - other).detach().abs().max() / other.detach().abs().max().clamp(min=1e-12)) for one, other in pairs
    )


def compare_net(net: Any, runs: list[TokenRun], attend: Attend) -> None:
    """One layer: the result, and the gradients of what precedes the convolution and of its weight."""
    count = sum(run.length for run in runs)
    if not count:
        return
    attention = attend(runs)
    generator = torch.Generator().manual_seed(0)
    mixed = torch.randn(1, count, net.conv_dim, generator=generator, dtype=torch.float64)
    beta = torch.rand(1, count, net.num_v_heads, generator=generator, dtype=torch.float64)
    decay = -torch.rand(1, count, net.num_v_heads, generator=generator, dtype=torch.float64) / 4
    upstream = torch.randn(1, count, net.num_v_heads, net.head_v_dim, generator=generator, dtype=torch.float64)
    results = []
    for in_trees in (True, False):
        inputs = [x.clone().requires_grad_() for x in (mixed, beta, decay)]
        if in_trees:
            out = attention.delta(net, DeltaTokens(*inputs))
            assert torch.equal(out, attention.delta(net, DeltaTokens(*inputs))), "it is repeatable"
        else:
            out = torch.zeros_like(upstream)
            for run in runs:
                if run.length:
                    row = DeltaTokens(*(x[:, path_of(run)] for x in inputs))
                    own = torch.arange(run.start, run.start + run.length)
                    out = out.index_copy(1, own, advance(net, row)[0][:, -run.length :])
        results.append([out, *torch.autograd.grad(out, [*inputs, net.conv1d.weight], upstream)])
    assert off(*results) <= 1e-9


@settings(deadline=None, max_examples=40)
@given(runs=forests(), layout=st.sampled_from(sorted(LAYOUTS)))
def test_short_runs_read_the_window_of_their_ancestors(
    policies: dict[str, Policy], runs: list[TokenRun], layout: str
) -> None:
    net = policies["qwen3_5"].adapter.language_model.layers[0].linear_attn
    with in_float64():
        compare_net(net, runs, LAYOUTS[layout])


def forest() -> list[TokenRun]:
    """Prompts of any length around that of a chunk, alone and below each other; runs shorter than the window."""
    lone, prompt, other = TokenRun(37, None), TokenRun(130, None), TokenRun(2, None)
    runs = [lone, prompt, other, *(TokenRun(length, prompt) for length in (1, 64, 65, 2, 20)), TokenRun(70, other)]
    runs += [TokenRun(1, runs[3]), TokenRun(9, runs[3]), TokenRun(3, runs[4])]
    return [*runs, TokenRun(4, runs[-3]), TokenRun(66, runs[-3])]


@pytest.mark.parametrize("layout", LAYOUTS)
def test_trees_with_chunks_of_several_lengths(policies: dict[str, Policy], layout: str) -> None:
    with in_float64():
        compare_net(policies["qwen3_5"].adapter.language_model.layers[2].linear_attn, forest(), LAYOUTS[layout])


@pytest.mark.usefixtures("_as_kernels")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_path_of_the_kernels_takes_runs_end_to_end(policies: dict[str, Policy], layout: str) -> None:
    with in_float64():
        compare_net(policies["qwen3_5"].adapter.language_model.layers[2].linear_attn, forest(), LAYOUTS[layout])


@pytest.mark.parametrize(
    ("family", "layout", "recompute"),
    [
        ("qwen3_5", "rectangles", False),
        ("qwen3_5", "levels", True),
        ("qwen3_5_moe", "rectangles", True),
        ("qwen3_5_moe", "levels", False),
    ],
)
def test_a_whole_model_over_trees_is_the_model_over_rows(
    policies: dict[str, Policy], family: str, layout: str, recompute: bool
) -> None:
    """Every parameter's gradient, to the rounding of float64; with layers that are computed again, too."""
    policy, runs = policies[family], forest()
    attention, count = LAYOUTS[layout](runs), sum(run.length for run in runs)
    generator = torch.Generator().manual_seed(1)
    ids_T = torch.randint(20, 400, (count,), generator=generator)
    weights_T = torch.randn(count, generator=generator, dtype=torch.float64)
    depth_T = torch.empty(count, dtype=torch.long)
    for run in runs:
        depth_T[run.start : run.start + run.length] = run.prefix + torch.arange(run.length)
    wanted = [parameter for name, parameter in policy.model.named_parameters() if "visual" not in name]

    def score(hidden_TH: Tensor, places: Tensor) -> Tensor:
        logp_TV = policy.head_logits(hidden_TH).log_softmax(-1)
        return (logp_TV.gather(1, ids_T[places, None])[:, 0] * weights_T[places]).sum()

    def gradients(total: Tensor) -> list[Tensor]:
        policy.model.zero_grad()
        total.backward()
        return [parameter.grad.clone() for parameter in wanted if parameter.grad is not None]

    results = []
    with in_float64():
        policy.checkpoint_gradients(recompute)
        hidden = policy.language(ids_T[None], depth_T.expand(3, 1, -1), attention)[0]
        results.append([hidden.detach(), *gradients(score(hidden, torch.arange(count)))])
        policy.checkpoint_gradients(False)
        right, total = torch.empty_like(results[0][0]), torch.zeros((), dtype=torch.float64)
        for run in runs:
            row, own = torch.tensor(path_of(run)), torch.arange(run.start, run.start + run.length)
            positions_31T = torch.arange(len(row)).expand(3, 1, -1)
            last = policy.language(ids_T[None, row], positions_31T, MaskedAttention())[0, -run.length :]
            right[own] = last.detach()
            total = total + score(last, own)
        results.append([right, *gradients(total)])
    assert len(results[0]) == 1 + len(wanted)
    assert off(*results) <= 1e-9


def test_a_prompt_is_computed_once(policies: dict[str, Policy]) -> None:
    """Tokens through a layer are those of the tree, not of its rows."""
    policy, prompt = policies["qwen3_5"], TokenRun(50, None)
    runs = [prompt, *(TokenRun(5, prompt) for _ in range(8))]
    attention = LAYOUTS["levels"](runs)
    seen: list[int] = []
    net = policy.adapter.language_model.layers[0].linear_attn
    hook = net.in_proj_qkv.register_forward_hook(lambda module, given, out: seen.append(out.shape[1]))
    with in_float64(), torch.no_grad():
        policy.language(torch.full((1, 90), 30), torch.zeros(3, 1, 90, dtype=torch.long), attention)
    hook.remove()
    assert seen == [90]


def test_a_detached_state_would_be_found(policies: dict[str, Policy], monkeypatch: pytest.MonkeyPatch) -> None:
    """The comparison above can fail: without the state's gradient a prompt learns something else."""
    right = delta_rule.torch_chunks

    def detached(*given: Any) -> Any:
        return right(*(x.detach() if i == 5 and x is not None else x for i, x in enumerate(given)))

    monkeypatch.setattr(tree_states, "torch_chunks", detached)
    net = policies["qwen3_5"].adapter.language_model.layers[0].linear_attn
    with in_float64(), pytest.raises(AssertionError):
        compare_net(net, forest(), LAYOUTS["levels"])


def test_bfloat16_sums_the_window_s_gradient_in_float32(checkpoints: dict[str, Path]) -> None:
    """A prompt's last columns are read by every response: 300 gradients of 1 are 300, which bfloat16 sums to 256."""
    net = open_policy(checkpoints["qwen3_5"]).adapter.language_model.layers[0].linear_attn.bfloat16()
    prompt = TokenRun(4, None)
    runs = [prompt, *(TokenRun(1, prompt) for _ in range(300))]
    states = tree_states.TreeStates([run for level in arrange_levels(runs) for run in level], CPU)
    mixed = torch.ones(1, 304, net.conv_dim, dtype=torch.bfloat16, requires_grad=True)
    with torch.no_grad():
        net.conv1d.weight.fill_(1.0)
    net.activation = "linear"
    out = states._convolved(net, mixed)
    out[:, 4:].sum().backward()
    assert mixed.grad is not None
    assert mixed.grad[0, 3, 0] == 300


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
@pytest.mark.parametrize("layout", LAYOUTS)
def test_the_kernel_reads_the_columns_of_the_runs_above(
    policies: dict[str, Policy], layout: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Queries, keys, values and gradients of the convolution, in Triton's interpreter."""
    net = policies["qwen3_5"].copy().adapter.language_model.layers[0].linear_attn.float()
    runs = forest()
    LAYOUTS[layout](runs)
    states = tree_states.TreeStates(sorted(runs, key=lambda run: run.start), CPU)
    generator = torch.Generator().manual_seed(0)
    mixed, upstream = torch.randn(2, 1, sum(run.length for run in runs), net.conv_dim, generator=generator)
    results = []
    for interpreted in (False, True):
        monkeypatch.setattr(layer_ops, "interpreted", interpreted)
        given = mixed.clone().requires_grad_()
        out = torch.cat([x.flatten(1) for x in states._heads(net, given)], dim=1)
        results.append([out, *torch.autograd.grad(out, [given, net.conv1d.weight], upstream[0])])
    assert off(*results) <= 1e-5
