"""The gated delta rule of linear attention (Qwen3.5): each value head has a state S [K, V] in place of keys and values.

A token decays the state, corrects what it holds for the token's key, and reads it::

    S ← exp(decay) · S      S ← S + key ⊗ beta · (value − Sᵀ·key)      out = Sᵀ·query / √K

Queries and keys are normed to length 1 first. A token with decay 0 and beta 0 changes nothing, so padding is inert.
The state is float32 in every precision: rounded to bfloat16 after each token, it made the log-probs of engine and learner
differ 4.5 times as much. Axes: B rows, T tokens, H key heads, G value heads (a multiple of H), K and V their sizes, R runs.
"""

import sys
from functools import lru_cache
from importlib import import_module
from inspect import unwrap
from math import log2
from typing import Any

import torch
from torch import Tensor

from sensorium.kernels.first_use import fall_back, trying

Result = tuple[Tensor, Tensor]
# How far results and gradients in 16 bits may be from the reference in float32, relative to the largest.
BOUND = 0.02
CHUNK = 64


@lru_cache(maxsize=1)
def _stock() -> Any:
    # Where the rule is first defined; transformers copies the same functions into later models.
    return import_module("transformers.models.qwen3_next.modeling_qwen3_next")


def _run(name: str, query: Tensor, key: Tensor, value: Tensor, decay: Tensor, beta: Tensor, state: Tensor | None) -> Result:
    """One of transformers' torch functions. Unwrapped: the name itself may mean a kernel that takes no CPU tensors."""
    share = value.shape[2] // key.shape[2]
    if share > 1:
        query, key = (x.repeat_interleave(share, dim=2) for x in (query, key))
    out, after = unwrap(getattr(_stock(), name))(
        query, key, value, g=decay, beta=beta, initial_state=state, output_final_state=True, use_qk_l2norm_in_kernel=True
    )
    return out, after


def torch_chunks(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTGV: Tensor,
    decay_BTG: Tensor,
    beta_BTG: Tensor,
    state_BGKV: Tensor | None = None,
    ends_R1: Tensor | None = None,
) -> Result:
    """The result [B, T, G, V] and the state after the last token; ``state_BGKV``: before the first (None: zeros).

    With ``ends_R1`` the only row is R runs end to end, from ``ends_R1[i]`` to ``ends_R1[i + 1]``, each with its own state.
    """
    given = (query_BTHK, key_BTHK, value_BTGV, decay_BTG, beta_BTG)
    if ends_R1 is None:
        return _run("torch_chunk_gated_delta_rule", *given, state_BGKV)
    lengths = ends_R1.diff().tolist()
    states = [None] * len(lengths) if state_BGKV is None else state_BGKV.split(1)
    runs = zip(*(x.split(lengths, dim=1) for x in given), states, strict=True)
    found = [
        _run("torch_chunk_gated_delta_rule", query, key, value, decay, beta, state)
        for query, key, value, decay, beta, state in runs
    ]
    return torch.cat([out for out, _ in found], dim=1), torch.cat([state for _, state in found])


def torch_step(
    query_B1HK: Tensor,
    key_B1HK: Tensor,
    value_B1GV: Tensor,
    decay_B1G: Tensor,
    beta_B1G: Tensor,
    state_BGKV: Tensor | None = None,
) -> Result:
    """The same for one token a row, without chunks."""
    return _run("torch_recurrent_gated_delta_rule", query_B1HK, key_B1HK, value_B1GV, decay_B1G, beta_B1G, state_BGKV)


def fla_chunks(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTGV: Tensor,
    decay_BTG: Tensor,
    beta_BTG: Tensor,
    state_BGKV: Tensor | None = None,
    ends_R1: Tensor | None = None,
    final: bool = True,
) -> tuple[Tensor, Any]:
    """``torch_chunks`` by flash-linear-attention, which has gradients through both states. ``ends_R1`` is int64.

    Unless ``final`` the state after the last token is None.
    """
    import_module("fla.ops.gated_delta_rule")
    mend_decay_gradient()
    take_one_tiling()
    out, after = _Chunks.apply(query_BTHK, key_BTHK, value_BTGV, decay_BTG, beta_BTG, state_BGKV, ends_R1, final)
    return out, after


class _Chunks(torch.autograd.Function):
    """The library's function, but in bfloat16 with results computed from float16, as those of attention are.

    Its kernels round normed queries and keys, corrected values and states to the dtype of their inputs, where a step of
    decoding rounds nothing. Gradients are computed in the inputs' dtype, whose range they need.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        decay: Tensor,
        beta: Tensor,
        state: Tensor | None,
        ends_R1: Tensor | None,
        final: bool,
    ) -> tuple[Tensor, Tensor | None]:
        rule: Any = import_module("fla.ops.gated_delta_rule.chunk")
        kind, value, beta = query.dtype, value.contiguous(), beta.contiguous()
        fine = torch.float16 if kind == torch.bfloat16 else kind
        (query, query_scale), (key, key_scale) = (rule.l2norm_fwd(x.to(fine).contiguous()) for x in (query, key))
        ctx.runs = {
            "scale": query.shape[-1] ** -0.5, "cu_seqlens": ends_R1,
            "chunk_indices": None if ends_R1 is None else rule.prepare_chunk_indices(ends_R1, CHUNK),
        }  # fmt: skip
        summed, out, inverses, after, _, _ = rule.chunk_gated_delta_rule_fwd(
            q=query, k=key, v=value.to(fine), g=decay.contiguous(), beta=beta.float(), initial_state=state,
            output_final_state=final, **ctx.runs,
        )  # fmt: skip
        query, key, inverses = (x.to(kind) for x in (query, key, inverses))
        ctx.save_for_backward(query, query_scale, key, key_scale, value, summed, beta, inverses, state)
        return out.to(kind), after

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        rule: Any = import_module("fla.ops.gated_delta_rule.chunk")
        query, query_scale, key, key_scale, value, summed, beta, inverses, state = ctx.saved_tensors
        dq, dk, dv, db, dg, dstate, _, _ = rule.chunk_gated_delta_rule_bwd(
            q=query, k=key, v=value, g=summed, beta=beta, A=inverses, initial_state=state, do=gradients[0].contiguous(),
            dht=gradients[1], **ctx.runs,
        )  # fmt: skip
        dq, dk = rule.l2norm_bwd(query, query_scale, dq), rule.l2norm_bwd(key, key_scale, dk)
        return dq.to(query.dtype), dk.to(key.dtype), dv.to(value.dtype), dg.float(), db.to(beta.dtype), dstate, None, None


@lru_cache(maxsize=1)
def mend_decay_gradient() -> None:
    """Let flash-linear-attention train on a Hopper GPU with Triton 3.4 to 3.7.0, which it refuses.

    Triton compiles one of its kernels wrongly there: measured on an H200 with Triton 3.6, the gradient of the decay was
    1.4 % off in norm, where rounding makes 0.3 %; the kernel's other results were right. So that gradient is computed
    here. ``trial`` holds all gradients against the reference on the user's own machine before anything is trained.
    """
    library: Any = import_module("fla.utils")
    if not (library.IS_NVIDIA_HOPPER and library.TRITON_ABOVE_3_4_0 and not library.TRITON_ABOVE_3_7_1):
        return
    kernels: Any = import_module("fla.ops.common.chunk_o")
    rule, own = import_module("fla.ops.gated_delta_rule.chunk"), import_module("sensorium.kernels.delta_triton")

    def gradients(
        *,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        w: Tensor,
        g: Tensor,
        h: Tensor,
        dh: Tensor,
        cu_seqlens: Tensor | None,
        chunk_indices: Tensor | None,
        chunk_size: int,
        state_v_first: bool,
        **rest: Any,
    ) -> tuple[Tensor, ...]:
        """What the library's function gives. Gradients of queries and keys stay float32 until the decay's is computed.

        It sums their nearly equal shares token by token: rounded to bfloat16 first, they left it 6 % off.
        """
        (batch, length, heads, size), (value_heads, value_size) = k.shape, v.shape[2:]
        dq, dk = (torch.empty(batch, length, value_heads, size, dtype=torch.float32, device=k.device) for _ in range(2))
        key_block, value_block = (min(128, max(16, 1 << (each - 1).bit_length())) for each in (size, value_size))
        dw, blocks = torch.empty_like(w), -(-size // key_block)
        wrong = torch.empty(blocks, *g.shape, dtype=torch.float32, device=g.device)
        count = -(-length // chunk_size) if chunk_indices is None else len(chunk_indices)
        kernels.chunk_bwd_kernel_dqkwg[(blocks * count, batch * value_heads)](
            q=q, k=k, v=v, g=g, g_gamma=None, h=h, dh=dh, dq=dq, dk=dk, dw=dw, dg=wrong, cu_seqlens=cu_seqlens,
            chunk_indices=chunk_indices, B=batch, T=length, H=heads, HV=value_heads, K=size, V=value_size, BT=chunk_size,
            BK=key_block, BV=value_block, STATE_V_FIRST=state_v_first, **rest,
        )  # fmt: skip
        chunks = chunk_size, cu_seqlens, chunk_indices
        dg, dq, dk = own.decay_gradient((q, dq), (k, dk), v, g, h, dh, state_v_first, *chunks)
        return dq, dk, dw, dg

    rule.chunk_bwd_dqkwg = gradients  # type: ignore[attr-defined]


@lru_cache(maxsize=1)
def take_one_tiling() -> None:
    """Let each kernel of flash-linear-attention take one tiling; its search compiles about 200, for over a minute."""
    tuner = import_module("triton.runtime.autotuner").Autotuner
    for module in [module for name, module in sys.modules.items() if name.startswith("fla.")]:
        for kernel in list(vars(module).values()):
            while not isinstance(kernel, tuner) and type(kernel).__module__.startswith("triton.runtime"):
                kernel = getattr(kernel, "fn", None)  # heuristics stand around it
            if isinstance(kernel, tuner) and kernel.configs:
                kernel.configs = [min(kernel.configs, key=_unusual)]


def _unusual(tiling: Any) -> float:
    """How far a tiling is from 4 warps, 3 stages and blocks of 64, in powers of two and stages."""
    sizes = [size for size in tiling.kwargs.values() if type(size) is int and size > 0]
    return abs(log2(tiling.num_warps / 4)) + abs(tiling.num_stages - 3) + sum(abs(log2(size / 64)) for size in sizes)


def decay_gradient(
    query: tuple[Tensor, Tensor],
    key: tuple[Tensor, Tensor],
    value_BTGV: Tensor,
    summed_BTG: Tensor,
    states_BNGKV: Tensor,
    pulls_BNGKV: Tensor,
    value_first: bool,
    size: int,
    ends_R1: Tensor | None,
    chunks_N2: Tensor | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradient of the decays' running sums (base 2) within chunks, from queries and keys with their gradients.

    Queries and keys are [B, T, H, K], their gradients [B, T, G, K], by value head: the other results are these, summed
    over the value heads that share a key head. ``value_BTGV`` are the corrected values, ``states_BNGKV`` the states before
    each of N chunks of ``size`` tokens, and ``pulls_BNGKV`` the gradients of the states after them. A
    token's query grows with its sum and its key shrinks; what a chunk adds to the state after it grows with the sum of its
    last token.
    """
    (batch, length, groups), heads, device = value_BTGV.shape[:3], key[0].shape[2], key[0].device
    query_BTGK, key_BTGK = (x.repeat_interleave(groups // heads, dim=2) for x in (query[0], key[0]))
    summed = [pulls.unflatten(2, (heads, -1)).sum(3) for pulls in (query[1], key[1])]
    if ends_R1 is None or chunks_N2 is None:
        first_B = torch.arange(batch, device=device)[:, None] * length
        start_N = (first_B + torch.arange(0, length, size, device=device)).flatten()
        end_N = (first_B + length).expand(batch, -(-length // size)).flatten()
    else:
        run_N, chunk_N = chunks_N2.long().unbind(1)
        start_N, end_N = ends_R1.long()[run_N] + chunk_N * size, ends_R1.long()[run_N + 1]
    last_N = torch.minimum(start_N + size, end_N) - 1
    place_NC = torch.minimum(start_N[:, None] + torch.arange(size, device=device), last_N[:, None])
    real_NC = start_N[:, None] + torch.arange(size, device=device) <= last_N[:, None]

    def laid(x_BTGD: Tensor) -> Tensor:
        return x_BTGD.flatten(0, 1)[place_NC].transpose(1, 2).flatten(0, 1)

    pulls_MKV = pulls_BNGKV.flatten(0, 2)
    pulls_MKV = pulls_MKV.transpose(1, 2) if value_first else pulls_MKV
    flat_TG = summed_BTG.flatten(0, 1).float()
    last_NG = flat_TG[last_N]
    pulled_MCV = torch.bmm(laid(key_BTGK), pulls_MKV.to(key_BTGK.dtype))
    added_NGC = (pulled_MCV.float() * laid(value_BTGV).float()).sum(-1).unflatten(0, last_NG.shape)
    weight_NGC = torch.exp2(last_NG[:, :, None] - flat_TG[place_NC].transpose(1, 2)) * real_NC[:, None]
    kept_NG = torch.exp2(last_NG) * (states_BNGKV.float() * pulls_BNGKV.float()).sum((-1, -2)).view_as(last_NG)
    gradient_BTG = (query_BTGK.float() * query[1].float()).sum(-1) - (key_BTGK.float() * key[1].float()).sum(-1)
    gradient_BTG.view(-1, last_NG.shape[1]).index_add_(0, last_N, kept_NG + (added_NGC * weight_NGC).sum(-1))
    return gradient_BTG, summed[0], summed[1]


def fla_step(
    query_B1HK: Tensor,
    key_B1HK: Tensor,
    value_B1GV: Tensor,
    decay_B1G: Tensor,
    beta_B1G: Tensor,
    state_BGKV: Tensor | None = None,
) -> Result:
    """``torch_step`` by flash-linear-attention; it has no gradient."""
    step: Any = import_module("fla.ops.gated_delta_rule").fused_recurrent_gated_delta_rule
    out, after = step(
        query_B1HK, key_B1HK, value_B1GV, g=decay_B1G, beta=beta_B1G, initial_state=state_BGKV, output_final_state=True,
        use_qk_l2norm_in_kernel=True,
    )  # fmt: skip
    return out, after


def delta_rule(
    query_BTHK: Tensor,
    key_BTHK: Tensor,
    value_BTGV: Tensor,
    decay_BTG: Tensor,
    beta_BTG: Tensor,
    state_BGKV: Tensor | None = None,
) -> Result:
    """Rows by the fastest form that is right here: one token without a gradient as a step, all else in chunks."""
    fast = usable(value_BTGV.device, query_BTHK.dtype, query_BTHK.shape[2], *value_BTGV.shape[2:], query_BTHK.shape[3])
    steps = query_BTHK.shape[1] == 1 and not torch.is_grad_enabled()
    form = (fla_step if fast else torch_step) if steps else (fla_chunks if fast else torch_chunks)
    return form(query_BTHK, key_BTHK, value_BTGV, decay_BTG, beta_BTG, state_BGKV)


@lru_cache(maxsize=64)
def usable(device: torch.device, dtype: torch.dtype, heads: int, value_heads: int, value_size: int, size: int) -> bool:
    """Whether flash-linear-attention takes these heads and agrees with the reference. In 16 bits on CUDA only.

    In float32 its products are in TF32, which is too coarse for what float32 promises.
    """
    if device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return False
    try:
        error = trial(device, dtype, heads, value_heads, value_size, size)
        if not error <= BOUND:
            raise ValueError(f"it is {error:.2g} off (bound {BOUND:g})")
    except Exception as error:  # a kernel that this GPU cannot run is a reason to be slow, not to stop
        fall_back(
            "gated delta nets run by plain torch, which is much slower, not by flash-linear-attention: "
            f"{str(error).splitlines()[0] if str(error) else type(error).__name__}"
        )
        return False
    return True


def trial(device: torch.device, dtype: torch.dtype, heads: int, value_heads: int, value_size: int, size: int) -> float:
    """The largest error of the fast forms on a few short runs, gradients too, relative to the largest value."""
    generator = torch.Generator().manual_seed(0)

    def drawn(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    lengths = [1, 70, 130]
    count, ends = sum(lengths), torch.tensor([0, 1, 71, 201]).to(device)
    tokens = [drawn(1, count, heads, size), drawn(1, count, heads, size), drawn(1, count, value_heads, value_size)]
    tokens = [x.to(dtype).float() for x in tokens]
    gates = [-drawn(1, count, value_heads).abs() / 8, drawn(1, count, value_heads).sigmoid()]
    states = drawn(len(lengths), value_heads, size, value_size) / 4
    upstream = [drawn(1, count, value_heads, value_size).to(device), torch.ones_like(states).to(device)]
    results = []
    with trying():
        for form, kind in ((fla_chunks, dtype), (torch_chunks, torch.float32)):
            given = [*(x.to(device, kind) for x in tokens), *(x.to(device) for x in (*gates, states))]
            given = [x.requires_grad_() for x in given]
            query, key, value, decay, beta, state = given
            out, after = form(query, key, value, decay, beta, state, ends)
            gradients = torch.autograd.grad([out.float(), after], given, upstream)
            results.append([x.detach().float() for x in (out, after, *gradients)])
    with torch.no_grad():
        for found, step, kind in zip(results, (fla_step, torch_step), (dtype, torch.float32), strict=True):
            query, key, value = (x[:, :1].to(device, kind) for x in tokens)
            decay, beta = (x[:, :1].to(device) for x in gates)
            found += [x.float() for x in step(query, key, value, decay, beta, states[:1].to(device))]
    pairs = list(zip(*results, strict=True))
    errors = [float((fast - right).abs().max() / right.abs().max()) for fast, right in pairs]
    return max(errors) if all(bool(fast.isfinite().all()) for fast, _ in pairs) else float("inf")
