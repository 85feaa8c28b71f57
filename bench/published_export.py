"""The memory of a published checkpoint's whole way: it is loaded, trained for one step, saved and exported.

The checkpoint is one of Qwen2.5-Omni-7B's shape with random bfloat16 weights, in its published layout: four shards, the
thinker beside a (tiny) talker and vocoder. Training is on clips of 8 frames and 30 seconds of sound. Each phase is a
process of its own, so that its peak is its own. ``resident`` is all that a process had in memory; ``own`` leaves out pages
of mapped files, which the system takes back whenever it needs room.
"""

import asyncio
import os
import resource
import shutil
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

sys.path[:0] = [str(Path(__file__).parent), str(Path(__file__).parents[1])]
GIB = 1 << 30
SHARD = 5_000_000_000


def measure_export(tiny: bool = False, scratch: Path | None = None, prompts: int = 1, lora: int = 0) -> dict[str, Any]:
    """Peaks of host and GPU memory of each phase. ``tiny``: the same on a tiny model, on any machine."""
    with tempfile.TemporaryDirectory(dir=scratch) as folder:
        place = Path(folder)
        result: dict[str, Any] = {"made": _alone(_make, place, tiny)}
        result["trained"] = _alone(_train, place, tiny, prompts, lora)
        result["exported"] = _alone(_export, place)
        return result


def _alone(phase: Callable[..., dict[str, Any]], *given: Any) -> dict[str, Any]:
    """A phase in a fresh process."""
    with ProcessPoolExecutor(1, mp_context=get_context("spawn")) as processes:
        return processes.submit(phase, *given).result()


def _make(place: Path, tiny: bool) -> dict[str, Any]:
    """Write the checkpoint."""
    from workload import write_model

    from sensorium.models.tiny import make_tiny
    from tests.families import publish

    made, source = place / "made", place / "source"
    if tiny:
        publish("Qwen2.5-Omni-7B", make_tiny("qwen2_5_omni", made), source)
    else:
        publish("Qwen2.5-Omni-7B", write_model(made, "qwen2_5_omni"), source, SHARD)
    shutil.rmtree(made, ignore_errors=True)  # not there where models are kept
    return {"shards": len(list(source.glob("*.safetensors"))), "gib": _gib(_bytes_of(source))}


def _train(place: Path, tiny: bool, prompts: int, lora: int) -> dict[str, Any]:
    """Load it, do one step, and save the checkpoint of a run; without the optimizer's numbers where they do not fit."""
    import torch
    from workload import OMNI, recipe_for

    from sensorium.runs.run_directory import RunDirectory
    from sensorium.trainer.run import open_trainer

    work = replace(OMNI, prompts=prompts, group=4, new_tokens=8 if tiny else 32, pixels=56 if tiny else OMNI.pixels)
    directory = RunDirectory(place / "run").create()
    device = {"device": "cpu"} if tiny else {"dtype": "bfloat16", "device": "cuda", "gradient_checkpointing": True}
    source = place / "source"
    recipe = recipe_for(
        work,
        source,
        directory.path,
        model=device | {"lora": {"rank": lora}},
        optimizer={"lr": 1e-3, "moments": "float32" if tiny else "bfloat16"},  # large enough to change bfloat16 weights
    )
    peaks: dict[str, Any] = {}
    with peak(peaks, "loading"):
        trainer = open_trainer(recipe, directory)
    with peak(peaks, "step"):
        asyncio.new_event_loop().run_until_complete(trainer.advance())
    room, weights = shutil.disk_usage(place).free, _bytes_of(source)
    with peak(peaks, "saving"):
        whole = bool(lora) or room > 5 * weights  # the run's checkpoint with two numbers for each weight, and the export
        if whole:
            trainer._save()
        else:
            trainer.session.policy.save(directory.checkpoint_of(1))
    gpu = {} if tiny else {"gpu": torch.cuda.get_device_name(), "gpu_peak_gib": _gib(torch.cuda.max_memory_allocated())}
    return peaks | gpu | {"optimizer_saved": whole, "lora": lora, "episodes": work.episodes, "context": work.context}


def _export(place: Path) -> dict[str, Any]:
    """What ``sensorium export`` does, and whether every weight of the source is there at its place."""
    from sensorium.cli.export import export
    from sensorium.models.weight_files import weight_files

    peaks: dict[str, Any] = {}
    (checkpoint,) = (place / "run" / "checkpoints").glob("step_*")
    with peak(peaks, "exporting"):
        notes = export(checkpoint, place / "export")
    source = place / "source"
    alike = [(one.header, one.tensors) for one in weight_files(source)] == [
        (one.header, one.tensors) for one in weight_files(place / "export")
    ]
    largest = max(tensor.size for file in weight_files(source) for tensor in file.tensors)
    if any(note.startswith("0 weights were changed") for note in notes):
        sys.exit("the step changed no weight: its episodes had all one reward. Give more --prompts.")
    return peaks | {"largest_tensor_gib": _gib(largest), "same_layout": alike, "notes": notes}


@contextmanager
def peak(peaks: dict[str, Any], name: str) -> Iterator[None]:
    """Note the most memory of this process while the block runs (looked at a hundred times a second), and its seconds."""
    done, seen = threading.Event(), [0, 0]
    page = os.sysconf("SC_PAGE_SIZE")

    def look() -> None:
        while not done.wait(0.01):
            resident, shared = (int(word) * page for word in Path("/proc/self/statm").read_text().split()[1:3])
            seen[:] = max(seen[0], resident), max(seen[1], resident - shared)

    started, thread = time.perf_counter(), threading.Thread(target=look, daemon=True)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        peaks[name] = {
            "resident_gib": _gib(seen[0]),
            "own_gib": _gib(seen[1]),
            "process_so_far_gib": _gib(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024),
            "seconds": round(time.perf_counter() - started, 1),
        }


def _bytes_of(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _gib(count: int) -> float:
    return round(count / GIB, 3)
