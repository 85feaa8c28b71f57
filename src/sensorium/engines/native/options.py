"""Options of engines that sample by the native engine's writer, in this process or in another; torch-free."""

from collections.abc import Mapping
from typing import Any, Literal, TypedDict

from sensorium.engines.option_limits import SECONDS, check_limits


class WriterOptions(TypedDict, total=False):
    """What a recipe may say of them, each with a default in ``DEFAULTS``.

    ``max_rows`` responses are written at once, others wait. ``max_context`` is the longest thread, response included
    (default: what the model allows). ``keep_bytes`` bounds the keys and values, and likewise the features, kept between
    turns (default: 1 GiB, or a sixteenth of the GPU); what does not fit is computed again. ``record`` lets decoding run
    from recordings where they pay (see ``steps``); the bits are the same. On a GPU it lets steps run fused and from CUDA
    graphs (see ``graphs``). ``compile``, on a GPU: lets steps attend in one launch (see ``row_attention``) and, of few
    rows, read a second copy of the weights, in 12 bits (see ``half_layers``), if ``record`` is true as well; the last
    bits differ. ``kv`` says how keys and values are held: a block of rows (on the CPU), or pages with steps launched
    ahead (on a GPU).
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
LIMITS = {"max_rows": (1, 1e6), "max_context": (16, 1e9), "keep_bytes": (0, 1e15), **SECONDS}
KV = ("auto", "rows", "pages")


def check_options(options: Mapping[str, Any]) -> None:
    """Refuse values that no engine can work with."""
    check_limits(options, LIMITS)
    if options.get("kv", "auto") not in KV:
        raise ValueError(f"kv is {options['kv']!r}; it must be one of {', '.join(KV)}")


def completed(options: WriterOptions, device: str, *, matched: bool = False) -> tuple[dict[str, Any], bool]:
    """What the writer is made with, and whether keys and values are in pages: on CUDA, and with matched precision."""
    check_options(options)
    full: dict[str, Any] = {**DEFAULTS, **options}
    kv = full.pop("kv")
    if matched and kv == "rows":
        raise ValueError("kv is 'rows', but model.precision: matched attends over pages; use auto or pages")
    paged = kv == "pages" or matched or (kv == "auto" and device == "cuda")
    if not paged:
        full.pop("compile")
    return full, paged
