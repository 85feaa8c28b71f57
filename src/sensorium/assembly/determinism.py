"""What makes a run a function of its recipe and seed, and what a checkpoint records to warn when that may not hold."""

import os
import random
import sys
import warnings
from typing import Any

import numpy
import torch
import transformers

from sensorium.recipe.schema import Recipe

# torch's warnings on a GPU that are ignored: the plan names what does not repeat, and a context is made on demand.
IGNORED = (".*defaults to a non-deterministic algorithm", "Attempting to run cuBLAS, but there was no current CUDA context")


def make_deterministic(recipe: Recipe) -> None:
    """Set deterministic algorithms on CPU, the recipe's threads and seed, and which library multiplies matrices.

    On the CPU, torch uses oneDNN until a bfloat16 product fails on a CPU without such instructions, and BLAS from then on,
    in float32 too, which changes last bits. So a run begins with oneDNN, and one in bfloat16 provokes that at the start.
    """
    if recipe.threads:
        torch.set_num_threads(recipe.threads)
    torch.manual_seed(recipe.seed)
    random.seed(recipe.seed)
    numpy.random.seed(recipe.seed % 2**32)
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True, warn_only=torch.cuda.is_available())
    torch.utils.deterministic.fill_uninitialized_memory = False  # type: ignore[attr-defined]
    for ignored in IGNORED:
        warnings.filterwarnings("ignore", message=ignored)
    torch.backends.mkldnn.enabled = True  # type: ignore[assignment]
    if recipe.model.dtype == "bfloat16":
        ones = torch.ones(32, 32, dtype=torch.bfloat16)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            torch.nn.functional.linear(ones[None], ones)
    if not products_repeat():
        warnings.warn(
            "on this CPU the last bits of a matrix product depend on where in memory its inputs are, so this run will not "
            "repeat bit for bit. Set MKL_CBWR=AUTO in the environment, or import sensorium before torch computes anything.",
            stacklevel=2,
        )


def products_repeat() -> bool:
    """Whether products of equal numbers at differently aligned addresses are equal to the last bit."""
    generator = torch.Generator().manual_seed(0)
    rows_BK, weight_NK = torch.rand(2, 64, generator=generator), torch.rand(64, 64, generator=generator)
    memory = torch.empty(2 * 64 + 16)
    wanted = torch.nn.functional.linear(rows_BK, weight_NK)
    moved = (memory[place : place + 128].view(2, 64).copy_(rows_BK) for place in range(16))
    return all(torch.equal(torch.nn.functional.linear(rows, weight_NK), wanted) for rows in moved)


def surroundings() -> dict[str, str]:
    """What the numbers depend on besides recipe and seed."""
    return {
        "python": sys.version.split()[0],
        "torch": str(torch.__version__),
        "transformers": transformers.__version__,
        "threads": str(torch.get_num_threads()),
        "cpu_capability": torch.backends.cpu.get_cpu_capability(),
        "device": torch.cuda.get_device_name() if torch.cuda.is_available() else "cpu",
    }


def warn_if_changed(recorded: dict[str, str]) -> list[str]:
    """Warn where the surroundings of a resumed run differ from those of its checkpoint; returns what differs."""
    now = surroundings()
    # Earlier versions ran C code on CPUs, and recorded its compiler.
    pairs = [(key, recorded[key], now.get(key, "not used")) for key in recorded]
    changed = [f"{key}: {then} then, {current} now" for key, then, current in pairs if then != current]
    if changed:
        warnings.warn(f"resumed elsewhere; numbers may differ in their last bits ({'; '.join(changed)})", stacklevel=2)
    return changed


def random_state() -> dict[str, Any]:
    """The state of every stateful source of random numbers (ours are keyed; a user's code may draw from these)."""
    numbers: Any = numpy.random.get_state(legacy=True)
    name, keys, *rest = numbers
    return {
        "torch": torch.get_rng_state(),
        "python": random.getstate(),
        "numpy": (name, torch.from_numpy(keys.astype(numpy.int64)), *rest),
    }


def restore_random_state(state: dict[str, Any]) -> None:
    """Restore the sources of random numbers."""
    torch.set_rng_state(state["torch"])
    random.setstate(state["python"])
    name, keys, *rest = state["numpy"]
    numpy.random.set_state((name, keys.numpy().astype(numpy.uint32), *rest))
