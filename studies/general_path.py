"""Learning on the general path: a tiny Mistral 3, for which there is no adapter, before and after GRPO on captions.

    python studies/general_path.py [seed=1 …]

A random model learns to say what is in each quarter of a picture until it gets about half of the pictures right; GRPO, with
a reward of 1 for a caption that is right in all quarters, then begins with every seed from that checkpoint. Writes
studies/results/general_path.json. Settings were chosen by training pictures; the held-out ones were looked at once.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import transformers

from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant, measure
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import Recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import train
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes
from tests.general_checkpoints import GENERAL, square, text, vision, write_checkpoint

RESULT = Path(__file__).parent / "results" / "general_path.json"
RUNS = Path("runs")
SEEDS = (0, 1, 2)
SIDE, PATCH, MERGE = 64, 8, 2  # pixels of a side of a picture and of a patch; patches of a side of a token
VARIANTS = (*SAMPLED_AND_GREEDY, Variant("blank", 1.0, {"picture": "blank"}))
PICTURES = {"kinds": ["list"], "picture_size": SIDE}
BATCH = {"tokens_per_microbatch": 1024}  # Pixtral's tower attends across all pictures of a call before it masks


def mistral(folder: Path) -> Path:
    """A random Mistral 3, with Pixtral's tower, of 0.64 M weights."""

    def config(ids: Any) -> dict[str, Any]:
        tower = vision(
            model_type="pixtral", hidden_size=64, intermediate_size=128, head_dim=16, image_size=SIDE, patch_size=PATCH
        )
        sizes = text(hidden_size=128, intermediate_size=256, head_dim=32, num_hidden_layers=3)
        language = {"model_type": "mistral", "sliding_window": None, **sizes}
        return GENERAL["mistral3"].config(ids) | {"vision_config": tower, "text_config": language}

    def processor(tokenizer: Any, template: str) -> Any:
        pictures = transformers.PixtralImageProcessor(patch_size=square(PATCH * MERGE), size={"longest_edge": SIDE})
        sizes = {"patch_size": PATCH, "spatial_merge_size": MERGE}
        return transformers.PixtralProcessor(pictures, tokenizer, chat_template=template, **sizes)

    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(replace(GENERAL["mistral3"], config=config, processor=processor), folder, std=0.05)


def recipe(name: str, path: Path, **sections: Any) -> Recipe:
    """A recipe on captions."""
    sections |= {
        "name": name,
        "threads": 1,
        "model": {"path": str(path)},
        "tasks": {
            "train": [{"source": "shapes", "options": {**PICTURES, "split": "train", "size": 16384}}],
            "evaluate": [{"source": "shapes", "options": {**PICTURES, "split": "test", "size": 512}}],
        },
        "rollout": {"max_new_tokens": 40},
        "rewards": {"terms": [{"name": "exact"}]},
    }
    return parse_recipe(json.dumps(sections), name)


def warmed_up() -> Path:
    """The checkpoint that GRPO begins from."""
    section = {"steps": 100, "prompts_per_step": 32, "optimizer": {"lr": 1e-3, "warmup_steps": 20}}
    path = mistral(RUNS / "study_general_mistral")
    warm = recipe("study_general_warm", path, batch=BATCH, steps=0, warm_start=section)
    return last_checkpoint(warm)


def last_checkpoint(asked: Recipe) -> Path:
    """Run a recipe from the start and return its last checkpoint."""
    shutil.rmtree(asked.directory, ignore_errors=True)
    checkpoints = Checkpoints(train(asked, watchers=[ConsoleWatcher()]) / "checkpoints", asked.checkpoint.keep)
    return checkpoints.path(checkpoints.complete()[-1])


def run(seed: int, path: Path, before: dict[str, Any]) -> None:
    """GRPO with one seed, added to the result."""
    batch = {**BATCH, "prompts_per_step": 16, "group_size": 8}
    optimizer = {"lr": 3e-4, "warmup_steps": 5, "betas": [0.9, 0.99]}
    name = f"study_general_seed{seed}"
    asked = recipe(name, path, steps=30, seed=seed, batch=batch, optimizer=optimizer, health={"sight_tasks": 0})
    spent = cpu_minutes()
    after = by_name(measure(asked, str(last_checkpoint(asked)), VARIANTS))
    facts = {
        "study": "general_path",
        "command": "python studies/general_path.py",
        "steps": asked.steps,
        "episodes": asked.steps * asked.batch.prompts_per_step * asked.batch.group_size,
    }
    one = {"seed": seed, **circumstances(), "cpu_minutes": round(cpu_minutes() - spent, 1)}
    result = add_run(RESULT, facts, one | {"before": before, "after": after})
    for variant, summary in result["after"].items():
        print(f"{variant:>10}  {result['before'][variant]['mean']:.3f} → {summary['mean']:.3f} {summary['range']}")


def main(arguments: list[str]) -> None:
    """All seeds, or those that are named. They begin with one checkpoint, which is measured once."""
    path = warmed_up()
    before = by_name(measure(recipe("study_general_before", path, steps=1), str(path), VARIANTS))
    for seed in chosen_seeds(arguments, SEEDS):
        run(seed, path, before)


if __name__ == "__main__":
    main(sys.argv[1:])
