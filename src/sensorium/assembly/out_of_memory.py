"""Whether the forecast of a run fits into memory, and the error when memory runs out."""

import os
from pathlib import Path

import torch

from sensorium.models.load import find_device
from sensorium.recipe.memory_estimate import TOWER
from sensorium.recipe.model_shape import is_ours
from sensorium.recipe.plan import GIB, Plan, free_memory, learners_memory, least_recomputation, lowering_settings
from sensorium.recipe.schema import Recipe
from sensorium.vocabulary.errors import MemoryExhausted, ModelError

NO_MEMORY = ("can't allocate memory", "not enough memory")  # in torch's errors for the machine's memory


def memory_note(recipe: Recipe, plan: Plan) -> str:
    """A warning where a run in one process may take more memory than its device has; "" where it may not.

    None for our own small models: their prompts fill a hundredth of the context that the forecast assumes as full.
    """
    if not plan.memory or recipe.cluster.shared or is_ours(recipe.model.path):
        return ""
    try:
        device = find_device(recipe.model.device)
    except ModelError:  # reported elsewhere
        return ""
    there = _memory_there(device)
    if there is None or (needed := _forecast(recipe, plan, device)) <= learners_memory(recipe, there):
        return ""
    uses = sorted(plan.memory, key=lambda use: -plan.memory[use])[:2]
    most = " and ".join(f"{use} {plan.memory[use] / GIB:.1f}" for use in uses)
    pictures = " that are all picture" if TOWER in plan.memory else ""
    return (
        f"ATTENTION: the run may take {needed / GIB:.1f} GiB of memory (most of it: {most}), and {there / GIB:.1f} GiB of "
        f"{_name(device)} are available. It ends when memory runs out, and goes on from its last checkpoint. The "
        f"forecast assumes that every budget is full, with prompts of {recipe.rollout.max_context_tokens} tokens "
        f"(rollout.max_context_tokens){pictures}; smaller ones need less. {ways_out(recipe)}"
    )


def ways_out(recipe: Recipe) -> str:
    """The settings that lower memory use, without those that are at their lowest already."""
    settings = {"model.dtype": () if recipe.model.dtype == "bfloat16" else ("bfloat16",)}
    settings |= lowering_settings(recipe, 1, samples=True)
    if find_device(recipe.model.device).type == "cpu" and recipe.model.gradient_checkpointing is not True:
        settings["model.gradient_checkpointing"] = ("true",)  # auto is for GPUs
    ways = [f"{key}={' or '.join(map(str, values))}" for key, values in settings.items() if values]
    ways.append(f"rollout.max_context_tokens below {recipe.rollout.max_context_tokens}")
    if recipe.evaluation.max_context_tokens:
        ways.append(f"evaluation.max_context_tokens below {recipe.evaluation.max_context_tokens}")
    return f"These lower it: {', '.join(ways)}; --dry-run forecasts each (docs/start/gpu.md)."


def memory_exhausted(error: BaseException, recipe: Recipe | None = None) -> MemoryExhausted | None:
    """The error to report where memory ran out, directly or as a cause; None where it did not."""
    cause: BaseException | None = error
    while cause is not None and not _is_out_of_memory(cause):
        cause = cause.__cause__
    if cause is None:
        return None
    advice = "" if recipe is None else f" {ways_out(recipe)}"
    if not isinstance(cause, torch.OutOfMemoryError):
        reason = str(cause).splitlines()[0][:200] if str(cause) else type(cause).__name__
        return MemoryExhausted(f"this machine has no memory left ({reason}).{advice}")
    device = torch.device("cuda", torch.cuda.current_device())
    free, total = torch.cuda.mem_get_info(device)
    own = torch.cuda.memory_reserved(device)
    others = max(0, total - free - own)
    elsewhere = (
        f" Other processes and the libraries of this one have {others / GIB:.1f} GiB; see nvidia-smi."
        if others > 0.05 * total
        else ""
    )
    return MemoryExhausted(
        f"{_name(device)} has no memory left: of its {total / GIB:.1f} GiB this run holds {own / GIB:.1f}."
        f"{elsewhere}{advice}"
    )


def _forecast(recipe: Recipe, plan: Plan, device: torch.device) -> int:
    """Bytes of the run on this device, with the recomputation that is chosen there."""
    if device.type != "cuda":
        return sum(plan.memory.values())
    memory = torch.cuda.get_device_properties(device).total_memory
    if recipe.model.gradient_checkpointing == "auto" and plan.model is not None:
        return least_recomputation(recipe, plan.model, memory).forecast
    return sum(plan.memory.values())


def _memory_there(device: torch.device) -> int | None:
    """Bytes that this process may hold in all, those it holds already included; None if unknown."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[0] + torch.cuda.memory_reserved(device)
    free = free_memory()
    if free is None:
        return None
    try:
        return free + int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except (OSError, ValueError, IndexError):
        return free


def _name(device: torch.device) -> str:
    return f"GPU {device.index or 0}" if device.type == "cuda" else "this machine"


def _is_out_of_memory(error: BaseException) -> bool:
    if isinstance(error, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(error, RuntimeError) and any(words in str(error) for words in NO_MEMORY)
