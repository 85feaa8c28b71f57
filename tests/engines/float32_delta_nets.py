"""A plugin of vLLM: the core of its gated delta nets on a CPU in plain float32, which its own kernel does not take.

All else of the model is vLLM's own: weights, positions, gates, norms, and which states it keeps, copies and reuses.
"""

from itertools import pairwise
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn.functional import conv1d, silu, softplus

PLUGIN = "float32_delta_nets"


def core(mixed_TC: Tensor, beta_TG: Tensor, decay_TG: Tensor, core_attn_out: Tensor, layer_name: Any) -> None:
    """What vLLM's ``cpu_gdn_attention_core`` does: fill ``core_attn_out``, the windows and states after each request."""
    from transformers.models.qwen3_5.modeling_qwen3_5 import torch_recurrent_gated_delta_rule
    from vllm.forward_context import get_forward_context
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    context = get_forward_context()
    layer = context.no_compile_layers[gdn_attention._resolve_layer_name(layer_name)]
    if context.attn_metadata is None:
        return
    given = context.attn_metadata[layer.prefix]
    windows, states = layer.kv_cache
    slots, ends = given.non_spec_state_indices_tensor.tolist(), given.non_spec_query_start_loc.tolist()
    begun = given.has_initial_state
    for i, (start, end) in enumerate(pairwise(ends)):
        window_WC = windows[slots[i]]
        state_GKV = states[slots[i]].view(layer.num_v_heads, layer.head_k_dim, layer.head_v_dim)
        if begun is not None and i >= given.num_decodes and not begun[i]:
            window_WC.zero_()
            state_GKV.zero_()
        columns_SC = torch.cat([window_WC, mixed_TC[start:end]])
        convolved_CT = conv1d(columns_SC.T[None], layer.conv1d.weight, layer.conv1d.bias, groups=columns_SC.shape[1])[0]
        query, key, value = layer.rearrange_mixed_qkv(silu(convolved_CT).T.contiguous())
        query, key = (x.repeat_interleave(layer.num_v_heads // x.shape[2], 2) for x in (query, key))
        decay = -layer.A_log.exp() * softplus(decay_TG[start:end] + layer.dt_bias)
        out, after = torch_recurrent_gated_delta_rule(
            query, key, value, decay[None], beta_TG[start:end].sigmoid()[None], state_GKV[None], True, True
        )
        core_attn_out[start:end] = out[0]
        window_WC.copy_(columns_SC[-len(window_WC) :])
        state_GKV.copy_(after[0])


def install(folder: Path) -> None:
    """Write the metadata by which vLLM finds the plugin, for a ``folder`` on the path."""
    info = folder / "float32_delta_nets-0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: float32-delta-nets\nVersion: 0\n")
    (info / "entry_points.txt").write_text(f"[vllm.general_plugins]\n{PLUGIN} = {__name__}:register\n")


def register() -> None:
    """vLLM calls this in each of its processes, before it builds a model."""
    from vllm.model_executor.layers.mamba.ops.cpu import gdn_attention

    core.__annotations__["layer_name"] = gdn_attention.LayerNameType  # of which torch makes the operation's schema
    gdn_attention.cpu_gdn_attention_core = core
