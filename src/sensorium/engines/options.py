"""Options of engines: their bounds and defaults, and what an engine must be able to do for a recipe. Torch-free."""

from collections.abc import Mapping
from math import isfinite
from typing import Any, Literal, TypedDict

from sensorium.engines.protocol import Capabilities
from sensorium.recipe.plan import VLLM_SHARE
from sensorium.recipe.schema import RolloutSection
from sensorium.vocabulary.errors import RecipeError

MOST_S = 1e7  # the longest wait, about a hundred days: clocks and sockets overflow at much more
SECONDS = {"patience_s": (0.001, MOST_S), "start_s": (0.001, MOST_S), "reply_s": (0.001, MOST_S)}


def check_limits(options: Mapping[str, Any], limits: Mapping[str, tuple[float, float]]) -> None:
    """Refuse a value that is not a number within the bounds of its name. None means the default."""
    for name, (least, most) in limits.items():
        value = options.get(name)
        if value is None:
            continue
        number = isinstance(value, int | float) and not isinstance(value, bool) and isfinite(value)
        if not number or not least <= value <= most:
            bound = f"{most:g} at most" if number and value > most else f"{least:g} at least"
            raise ValueError(f"{name} is {value!r}; it must be {bound}")


def refuse_unable(
    capabilities: Capabilities, section: RolloutSection, precision: str = "fast", *, lockstep: bool = True
) -> None:
    """Refuse a recipe whose rollout section or ``model.precision`` asks for what its engine cannot do."""
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
    """Options of the native writer, with defaults in ``DEFAULTS``.

    ``max_rows`` responses are written at once, others wait. ``max_context`` is the longest thread, response included
    (default: the model's). ``keep_bytes`` bounds the keys and values, and likewise the features, kept between turns
    (default: 1 GiB, or a sixteenth of the GPU); what does not fit is computed again. ``record`` lets decoding run from
    recordings where they are faster (see ``steps``); the bits are the same. On a GPU it lets steps run fused and from CUDA
    graphs (see ``graphs``). ``compile``, on a GPU and with ``record``: steps of few rows attend in one launch (see
    ``decode_kernels``); the last bits differ. ``kv`` says how keys and values are stored: a block of rows (on the CPU), or
    pages with steps launched ahead (on a GPU). ``routes`` records the experts that tokens are sent to (``Segment.routes``);
    a recipe asks for it by ``algorithm.router_replay``. ``quantization``: decode steps use FP8 copies of the weights (see
    ``native/fp8.py``); a recipe asks for it by ``rollout.quantization``.
    """

    max_rows: int
    max_context: int | None
    keep_bytes: int | None
    record: bool
    compile: bool
    kv: Literal["auto", "rows", "pages"]
    routes: bool
    quantization: Literal["none", "fp8"]


DEFAULTS: WriterOptions = {
    "max_rows": 512, "max_context": None, "keep_bytes": None, "record": True, "compile": True, "kv": "auto",
    "routes": False, "quantization": "none",
}  # fmt: skip
WRITER_LIMITS = {"max_rows": (1, 1e6), "max_context": (16, 1e9), "keep_bytes": (0, 1e15), **SECONDS}
KV, QUANTIZATION = ("auto", "rows", "pages"), ("none", "fp8")


def check_writer_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    check_limits(options, WRITER_LIMITS)
    if options.get("kv", "auto") not in KV:
        raise ValueError(f"kv is {options['kv']!r}; it must be one of {', '.join(KV)}")
    if options.get("quantization", "none") not in QUANTIZATION:
        raise ValueError(f"quantization is {options['quantization']!r}; it must be one of {', '.join(QUANTIZATION)}")


def completed(options: WriterOptions, device: str, *, matched: bool = False) -> tuple[dict[str, Any], bool]:
    """The writer's arguments, and whether keys and values are in pages: on CUDA, and with matched precision."""
    check_writer_options(options)
    full: dict[str, Any] = {**DEFAULTS, **options}
    kv = full.pop("kv")
    if matched and kv == "rows":
        raise ValueError("kv is 'rows', but model.precision: matched attends over pages; use auto or pages")
    paged = kv == "pages" or matched or (kv == "auto" and device == "cuda")
    if not paged:
        full.pop("compile")
        if full.pop("quantization") != "none":
            raise ValueError(
                "rollout.quantization is 'fp8', and this engine decodes without pages, as on a CPU or with kv: rows; use a "
                "GPU and kv: auto, or leave rollout.quantization out (none)"
            )
    return full, paged


class VllmOptions(TypedDict, total=False):
    """Options of the engine ``vllm``, with defaults in ``VLLM_DEFAULTS``.

    ``max_rows`` responses are written at once. ``max_context`` is the longest thread, response included (default: the
    model's). ``start_s`` bounds vLLM's start, ``reply_s`` every later answer; a vLLM that answers no request for so long
    must give a sign of life. ``cache_gib`` is for keys and values on a CPU, ``gpu_share`` the part of a GPU's memory that
    vLLM may take, weights included. ``eager`` runs without compiled graphs (default: on a CPU). ``push`` is how weights get
    there: ``file``, ``broadcast``, or ``ipc`` where engine and learner share a GPU. ``parity_bound`` is the largest mean
    difference of log-probs that counts as rounding (default: by dtype). ``restarts`` is how often a vLLM that died is
    replaced; its open requests are then sampled again. ``engine_args`` go to vLLM as they are.
    """

    max_rows: int
    max_context: int | None
    start_s: float
    reply_s: float
    cache_gib: int
    gpu_share: float
    eager: bool | None
    tensor_parallel: int
    push: str
    parity_bound: float | None
    restarts: int
    engine_args: Mapping[str, Any] | None


VLLM_DEFAULTS: VllmOptions = {
    "max_rows": 256, "max_context": None, "start_s": 600.0, "reply_s": 600.0, "cache_gib": 1, "gpu_share": VLLM_SHARE,
    "eager": None, "tensor_parallel": 1, "push": "auto", "parity_bound": None, "restarts": 0, "engine_args": {},
}  # fmt: skip
PUSHES = ("auto", "file", "broadcast", "ipc")
VLLM_LIMITS = {
    "max_rows": (1, 1e6), "max_context": (16, 1e9), "cache_gib": (1, 1e6), "gpu_share": (0.01, 1), "parity_bound": (0, 100),
    "restarts": (0, 1e6), "tensor_parallel": (1, 1024), **SECONDS,
}  # fmt: skip
LORA_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)  # that vLLM supports; an adapter takes the next larger one
# Arguments of vLLM that follow from the recipe: given by hand, they would make log-probs wrong or fail late.
OURS = frozenset([
    "model", "tokenizer", "dtype", "seed", "logprobs_mode", "mm_device_do_normalize", "weight_transfer_config",
    "load_format", "enable_lora", "max_lora_rank", "max_loras", "enable_tower_connector_lora", "max_model_len",
    "max_num_seqs",
    "tensor_parallel_size", "gpu_memory_utilization", "skip_tokenizer_init",
])  # fmt: skip


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


def completed_vllm(options: Mapping[str, Any]) -> dict[str, Any]:
    """All options of the engine ``vllm``; those that are missing or None are the defaults."""
    if unknown := sorted(options.keys() - VLLM_DEFAULTS.keys()):
        raise TypeError(f"the engine vllm has no option '{unknown[0]}'")
    return {**VLLM_DEFAULTS, **{name: value for name, value in options.items() if value is not None}}
