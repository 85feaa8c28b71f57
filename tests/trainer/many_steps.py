"""Three hundred steps over fifty clips, of which no cache can keep more than a few; prints what the process held.

A process of its own: what other tests have left in theirs would be measured too.
"""

import asyncio
import gc
import json
import os
import sys
from contextlib import nullcontext
from pathlib import Path
from typing import Any

from sensorium.engines.protocol import ScriptedEngine
from sensorium.models.policy import Policy
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.loop import Trainer
from sensorium.trainer.run import open_trainer

from .cinema import recipe_of, rows_of, sound_bytes, video_bytes

HERE = "tests.trainer.many_steps"
STEPS, WARM, UPDATE_EVERY = 300, 50, 25


def scripted(policy: Policy, lockstep: bool) -> ScriptedEngine:
    """An engine whose answers differ within a group, so that there is something to learn."""
    return ScriptedEngine(policy.chat, lambda request: f"<answer>{'AB'[request.order[1] % 2]}</answer>")


def resident_bytes() -> int:
    """The memory of this process that is really there."""
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


async def step(trainer: Trainer, number: int) -> None:
    """Draw, play, score and record; now and then a whole step, with towers and an update."""
    if number % UPDATE_EVERY == 0:
        await trainer.advance()
        return
    collected = await trainer.collector.collect(number, lambda *phase: nullcontext())
    trainer._look_ahead(number)
    trainer._record(number, collected, [])
    trainer.step = number
    trainer.metrics.append(number, collected.metrics | trainer.meter.row())


def main(folder: Path) -> None:
    """Run, and print resident bytes and objects every fifty steps, and what was decoded."""
    rows: list[list[dict[str, Any]]] = []
    for i in range(25):
        (folder / f"{i}.mp4").write_bytes(video_bytes(i))
        (folder / f"{i}.wav").write_bytes(sound_bytes(i))
        rows.append([{"type": "video", "path": f"{i}.mp4", "frames": 2}, {"type": "audio", "path": f"{i}.wav"}])
    recipe = recipe_of(
        folder / "run",
        steps=STEPS,
        tasks=rows_of(folder, rows),
        batch={"prompts_per_step": 1, "group_size": 2},
        rollout={"engine": f"{HERE}:scripted"},
        media={"cache_gib": 1e-4, "memory_gib": 1e-4},
    )
    trainer = open_trainer(recipe, RunDirectory(folder / "run").create())
    resident: list[int] = []
    objects: list[int] = []

    async def all_steps() -> None:
        for number in range(1, STEPS + 1):
            await step(trainer, number)
            if number % WARM == 0:
                gc.collect()
                resident.append(resident_bytes())
                objects.append(len(gc.get_objects()))

    try:
        asyncio.run(all_steps())
        counts = trainer.session.policy.media_counts
    finally:
        trainer.close()
    found = {"resident": resident, "objects": objects, "steps": trainer.step}
    print(json.dumps(found | {"decoded": counts.decoded, "evictions": counts.evictions}))


if __name__ == "__main__":
    main(Path(sys.argv[1]))
