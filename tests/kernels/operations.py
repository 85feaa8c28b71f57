"""The table of operations that have a kernel: for each its plain torch reference and its fast form on CUDA.

``test_operations.py`` compares the two of every row; ``python -m bench kernels`` times steps with each fast
form replaced by its reference. A reference that chooses by device (``write_tokens``) is the reference on a CPU. Names are
``module:object`` below ``sensorium``; nothing is imported before it is used.
"""

from importlib import import_module
from typing import Any

LAYERS = ("normed", "add_normed", "norm_gradients", "gated", "gated_finely", "gate_gradients", "gated_pair",
          "gate_pair_gradients", "rotated", "split_rotated", "joined_gradients", "rotate_into")  # fmt: skip
DECODING = ("norm", "add_norm", "add_product", "gate", "gate_finely", "gated", "place", "attend", "mix", "draw")
OPERATIONS: dict[str, tuple[str, str]] = {
    **{f"layer {name}": (f"kernels.layer_torch:{name}", f"kernels.layer_triton:{name}") for name in LAYERS},
    **{
        f"decode {name}": (
            f"engines.native.decode_state:TorchOps.{name}",
            f"engines.native.decode_kernels:TritonOps.{name}",
        )
        for name in DECODING
    },
    "decode attend in one launch": (
        "engines.native.decode_kernels:TritonOps._attended_one_by_one",
        "engines.native.decode_kernels:RowAttention.attend",
    ),
    "pages written": ("engines.native.key_values:write_tokens", "kernels.decode_attention_triton:write_entries"),
    "pages copied": ("engines.native.key_values:PagePool._fill", "kernels.decode_attention_triton:copy_pages"),
    "head": ("learner.forward:TokenLogprobs.apply", "kernels.learner_triton:HeadLogprobs.apply"),
    "adamw": ("learner.optimizer:step_all", "learner.optimizer:KernelTables"),
    "delta chunks": ("kernels.delta_rule:torch_chunks", "kernels.delta_rule:fla_chunks"),
    "delta step": ("kernels.delta_rule:torch_step", "kernels.delta_rule:fla_step"),
    "delta decay": ("kernels.delta_rule:decay_gradient", "kernels.delta_triton:decay_gradient"),
    "matched product": ("kernels.matched_ops:TorchMatched.product", "kernels.matched_ops:TritonMatched.product"),
    "matched attend": ("kernels.matched_ops:TorchMatched.attend", "kernels.matched_ops:TritonMatched.attend"),
}


def forms(name: str) -> tuple[Any, Any]:
    """The reference and the fast form of an operation. Importing a fast form needs Triton."""
    found = []
    for place in OPERATIONS[name]:
        module, _, path = place.partition(":")
        form: Any = import_module(f"sensorium.{module}")
        for part in path.split("."):
            form = getattr(form, part)
        found.append(form)
    return found[0], found[1]
