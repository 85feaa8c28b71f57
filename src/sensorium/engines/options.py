"""Bounds of the numbers that engines take as options; torch-free."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, TypedDict

from sensorium.engines.protocol import Capabilities
from sensorium.recipe.schema import RolloutSection
from sensorium.vocabulary.errors import RecipeError

MOST_S = 1e7
"""Seconds that any wait may be given, some hundred days: clocks and sockets overflow at much more."""
SECONDS = {"patience_s": (0.001, MOST_S), "start_s": (0.001, MOST_S), "reply_s": (0.001, MOST_S)}


def check_limits(options: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse what is no number, or none between the least and the most of its name. None stands for the default."""
    for name, (least, most) in limits.items():
        value = options.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or value < least:
            raise ValueError(f"{name} is {value!r}; it must be {least:g} at least")
        if value > most:
            raise ValueError(f"{name} is {value!r}; it must be {most:g} at most")


def refuse_unable(
    capabilities: Capabilities, section: RolloutSection, precision: str = "fast", *, lockstep: bool = True
) -> None:
    """Raise for the first thing that a recipe's rollout section or ``model.precision`` asks for and its engine lacks."""
    engine = section.engine.name
    if precision == "matched" and not capabilities.matched:
        raise RecipeError(
            f"model.precision is 'matched', and engine '{engine}' does not compute as the learner does. Use "
            "rollout.engine: native or process, or model.precision: fast."
        )
    asked = {
        "temperature": section.temperature != 1,
        "top_p": section.top_p < 1,
        "top_k": section.top_k > 0,
        "stop": bool(section.stop),
        "ignore_stop_tokens": section.ignore_stop_tokens,
    }
    for option, wanted in asked.items():
        if wanted and option not in capabilities.sampling:
            able = ", ".join(sorted(capabilities.sampling)) or "none"
            raise RecipeError(
                f"rollout.{option} is {getattr(section, option)!r}, and engine '{engine}' does not follow it (of the "
                f"sampling options it follows: {able}). Leave it at its default, or use another rollout.engine."
            )
    if lockstep and not capabilities.deterministic:
        raise RecipeError(
            f"rollout.schedule is lockstep, which promises that a run repeats, and engine '{engine}' is not deterministic. "
            "Set rollout.schedule: eager, or use another rollout.engine."
        )


class WriterOptions(TypedDict, total=False):
    """What a recipe may say of them, each with a default in ``DEFAULTS``.

    ``max_rows`` responses are written at once, others wait. ``max_context`` is the longest thread, response included
    (default: what the model allows). ``keep_bytes`` bounds the keys and values, and likewise the features, kept between
    turns (default: 1 GiB, or a sixteenth of the GPU); what does not fit is computed again. ``record`` lets decoding run
    from recordings where they pay (see ``steps``); the bits are the same. On a GPU it lets steps run fused and from CUDA
    graphs (see ``graphs``). ``compile``, on a GPU: lets steps of few rows attend in one launch (see ``row_attention``), if
    ``record`` is true as well; the last bits differ. ``kv`` says how keys and values are held: a block of rows (on the
    CPU), or pages with steps launched ahead (on a GPU).
    """

    max_rows: int
    max_context: int | None
    keep_bytes: int | None
    record: bool
    compile: bool
    kv: Literal["auto", "rows", "pages"]


DEFAULTS: WriterOptions = {
    "max_rows": 512, "max_context": None, "keep_bytes": None, "record": True, "compile": True, "kv": "auto",
}  # fmt: skip
WRITER_LIMITS = {"max_rows": (1, 1e6), "max_context": (16, 1e9), "keep_bytes": (0, 1e15), **SECONDS}
KV = ("auto", "rows", "pages")


def check_writer_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    check_limits(options, WRITER_LIMITS)
    if options.get("kv", "auto") not in KV:
        raise ValueError(f"kv is {options['kv']!r}; it must be one of {', '.join(KV)}")


def completed(options: WriterOptions, device: str, *, matched: bool = False) -> tuple[dict[str, Any], bool]:
    """What the writer is made with, and whether keys and values are in pages: on CUDA, and with matched precision."""
    check_writer_options(options)
    full: dict[str, Any] = {**DEFAULTS, **options}
    kv = full.pop("kv")
    if matched and kv == "rows":
        raise ValueError("kv is 'rows', but model.precision: matched attends over pages; use auto or pages")
    paged = kv == "pages" or matched or (kv == "auto" and device == "cuda")
    if not paged:
        full.pop("compile")
    return full, paged


PUSHES = ("auto", "file", "broadcast", "ipc")
VLLM_LIMITS = {
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


def check_vllm_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    check_limits(options, VLLM_LIMITS)
    if options.get("push", "auto") not in PUSHES:
        raise ValueError(f"push is {options['push']!r}; it must be one of {', '.join(PUSHES)}")
    given = options.get("engine_args") or {}
    if not isinstance(given, Mapping) or not all(isinstance(name, str) for name in given):
        raise ValueError(f"engine_args is {given!r}; it must be a mapping of vLLM's own arguments")
    if taken := sorted(OURS & given.keys()):
        raise ValueError(f"engine_args names {taken[0]}, which this engine sets itself; leave it out")
