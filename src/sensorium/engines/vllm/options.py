"""The options of the engine ``vllm``, and which of vLLM's own arguments are this engine's business; torch-free."""

from collections.abc import Mapping
from typing import Any

from sensorium.engines.option_limits import SECONDS, check_limits

PUSHES = ("auto", "file", "broadcast", "ipc")
LIMITS = {
    "max_rows": (1, 1e6), "max_context": (16, 1e9), "cache_gib": (1, 1e6), "gpu_share": (0.01, 1), "parity_bound": (0, 100),
    "restarts": (0, 1e6), "tensor_parallel": (1, 1024), **SECONDS,
}  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Ranks that vLLM makes room for; an adapter takes the next larger one."""
OURS = frozenset([
    "model", "tokenizer", "dtype", "seed", "logprobs_mode", "mm_device_do_normalize", "weight_transfer_config",
    "load_format", "enable_lora", "max_lora_rank", "max_loras", "enable_tower_connector_lora", "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size", "gpu_memory_utilization", "skip_tokenizer_init",
])  # fmt: skip
"""Arguments of vLLM that follow from the recipe: given by hand, they would make log-probs wrong or fail late."""


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    check_limits(options, LIMITS)
    if options.get("push", "auto") not in PUSHES:
        raise ValueError(f"push is {options['push']!r}; it must be one of {', '.join(PUSHES)}")
    given = options.get("engine_args") or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"engine_args is {given!r}; it must be a mapping of vLLM's own arguments")
    if taken := sorted(OURS & given.keys()):
        raise ValueError(f"engine_args names {taken[0]}, which this engine sets itself; leave it out")
