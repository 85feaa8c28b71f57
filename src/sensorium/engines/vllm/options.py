"""The options of the engine ``vllm``, and which of vLLM's own arguments are this engine's business; torch-free."""

from collections.abc import Mapping
from typing import Any

PUSHES = ("auto", "file", "ipc")
LEAST = {
    "max_rows": 1, "max_context": 16, "start_s": 0.001, "reply_s": 0.001, "cache_gib": 1, "gpu_share": 0.01,
    "parity_bound": 0.0, "restarts": 0, "tensor_parallel": 1,
}  # fmt: skip
OURS = frozenset([
    "model", "tokenizer", "dtype", "seed", "logprobs_mode", "mm_device_do_normalize", "weight_transfer_config",
    "load_format", "enable_lora", "max_lora_rank", "max_loras", "enable_tower_connector_lora", "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size", "gpu_memory_utilization", "skip_tokenizer_init",
])  # fmt: skip
"""Arguments of vLLM that follow from the recipe: given by hand, they would make log-probs wrong or fail late."""


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    for name, least in LEAST.items():
        value = options.get(name)
        if value is not None and (isinstance(value, bool) or not isinstance(value, int | float) or value < least):
            raise ValueError(f"{name} is {value!r}; it must be {least} at least")
    if options.get("gpu_share") is not None and options["gpu_share"] > 1:
        raise ValueError(f"gpu_share is {options['gpu_share']!r}; it is a part of the GPU's memory, 1 at most")
    if options.get("push", "auto") not in PUSHES:
        raise ValueError(f"push is {options['push']!r}; it must be one of {', '.join(PUSHES)}")
    given = options.get("engine_args") or {}
    if not isinstance(given, Mapping):
        raise ValueError(f"engine_args is {given!r}; it must be a mapping of vLLM's own arguments")
    if taken := sorted(OURS & given.keys()):
        raise ValueError(f"engine_args names {taken[0]}, which this engine sets itself; leave it out")
