"""Make the warm-started models that ship inside the package, from nothing but their recipes.

    python studies/warm_starts.py [shapes|frozen_lake|sight_and_sound|sokoban|geometry|caption_videos|caption_reader …]

Weights are kept in bfloat16 (half the size; they are read back as float32). Existing runs of these names are replaced.
"""

import shutil
import sys
from pathlib import Path

import torch

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.recipe.load import load_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train

ASSETS = Path(__file__).parents[1] / "src" / "sensorium" / "assets"
STAGES = {
    "shapes": ("shapes_warm", "shapes_guess"),
    "frozen_lake": ("frozen_lake_warm",),
    "sight_and_sound": ("sight_and_sound_warm", "sight_and_sound_guess"),
    "memory_clips": ("tiny/memory_clips_warm", "tiny/memory_clips_guess"),
    "sokoban": ("tiny/vagen_sokoban_warm", "tiny/vagen_sokoban_more"),
    "geometry": ("tiny/geo3k_multi_turn_warm",),
    "caption_pictures": ("tiny/caprl_image_warm",),
    "caption_videos": ("tiny/caprl_video_warm",),
    "caption_reader": ("tiny/caption_reader", "tiny/caption_reader_more", "tiny/caption_reader_last"),
}


def last_checkpoint(recipe_name: str) -> Path:
    """Run a recipe from the start and return its last checkpoint."""
    recipe = load_recipe(recipe_name)
    shutil.rmtree(recipe.directory, ignore_errors=True)
    directory = train(recipe, watchers=[ConsoleWatcher()])
    checkpoints = Checkpoints(directory / "checkpoints", recipe.checkpoint.keep)
    return checkpoints.path(checkpoints.complete()[-1])


def ship(checkpoint: Path, target: Path) -> None:
    """Put a checkpoint into the package, in bfloat16."""
    policy = load_policy(str(checkpoint), store=MediaStore(), device="cpu")
    policy.model.to(torch.bfloat16)
    shutil.rmtree(target, ignore_errors=True)
    policy.save(target)
    size = sum(path.stat().st_size for path in target.rglob("*"))
    print(f"{target}: {size / 1e6:.2f} MB")


def main() -> None:
    """Make the named models, or all."""
    for name in sys.argv[1:] or STAGES:
        for stage in STAGES[name]:
            checkpoint = last_checkpoint(stage)
        ship(checkpoint, ASSETS / name)


if __name__ == "__main__":
    main()
