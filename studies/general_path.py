"""Learning on the general path: a tiny Gemma 3, for which there is no adapter, before and after GRPO on coloured shapes.

    python studies/general_path.py [seed=1 …]

A random model learns from captions and answered questions about colours first, for as many steps as it takes to answer
better than chance; GRPO then begins with every seed from that checkpoint. Writes studies/results/general_path.json.
"""

import json
import shutil
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
import transformers

from sensorium.evaluation.evaluate import SAMPLED_AND_GREEDY, Variant
from sensorium.recipe.load import parse_recipe
from sensorium.report.console import ConsoleWatcher
from sensorium.trainer.checkpoint import Checkpoints
from sensorium.trainer.run import study, train
from studies.seeds import add_run, by_name, chosen_seeds, circumstances, cpu_minutes
from tests.general_checkpoints import GENERAL, WINDOWS, siglip, square, text, write_checkpoint

RESULT = Path(__file__).parent / "results" / "general_path.json"
RUNS = Path("runs")
SEEDS = (0, 1, 2)
SIDE, TOKENS = 32, 16  # pixels of a side of a picture, and tokens that it takes
VARIANTS = (*SAMPLED_AND_GREEDY, Variant("blank", 1.0, {"picture": "blank"}))
PICTURES = {"picture_size": 64, "size": 4096}
HELD_OUT = {"split": "test", "kinds": ["colour"], "picture_size": 64, "size": 512}


def gemma(folder: Path) -> Path:
    """A random Gemma 3 of 0.8 M weights."""

    def config(ids: Any) -> dict[str, Any]:
        vision = siglip(hidden_size=96, intermediate_size=192, num_hidden_layers=2, image_size=SIDE)
        sizes = text(hidden_size=128, intermediate_size=256, head_dim=32, query_pre_attn_scalar=32)
        return GENERAL["gemma3"].config(ids) | {
            "mm_tokens_per_image": TOKENS,
            "vision_config": vision,
            "text_config": sizes | {"sliding_window": 64, "layer_types": WINDOWS},
        }

    def processor(tokenizer: Any, template: str) -> Any:
        pictures = transformers.Gemma3ImageProcessor(size=square(SIDE))
        return transformers.Gemma3Processor(pictures, tokenizer, chat_template=template, image_seq_length=TOKENS)

    shutil.rmtree(folder, ignore_errors=True)
    return write_checkpoint(replace(GENERAL["gemma3"], config=config, processor=processor), folder, std=0.05)


def recipe(name: str, path: Path, kinds: list[str], **sections: Any) -> Any:
    """A recipe on questions of these kinds."""
    sections |= {
        "name": name,
        "threads": 1,
        "model": {"path": str(path)},
        "tasks": {
            "train": [{"source": "shapes", "options": {**PICTURES, "split": "train", "kinds": kinds}}],
            "evaluate": [{"source": "shapes", "options": HELD_OUT}],
        },
        "rollout": {"max_new_tokens": 16},
        "rewards": {"terms": [{"name": "exact"}]},
    }
    return parse_recipe(json.dumps(sections), name)


def warmed_up() -> Path:
    """The checkpoint that GRPO begins from."""
    section = {"steps": 400, "prompts_per_step": 48, "optimizer": {"lr": 1e-3, "warmup_steps": 20}}
    warm = recipe(
        "study_general_warm", gemma(RUNS / "study_general_gemma"), ["list", "colour"], steps=0, warm_start=section
    )
    shutil.rmtree(warm.directory, ignore_errors=True)
    checkpoints = Checkpoints(train(warm, watchers=[ConsoleWatcher()]) / "checkpoints", warm.checkpoint.keep)
    return checkpoints.path(checkpoints.complete()[-1])


def run(seed: int, path: Path) -> None:
    """GRPO with one seed, added to the result."""
    batch = {"prompts_per_step": 32, "group_size": 8}
    optimizer = {"lr": 3e-4, "warmup_steps": 5, "betas": [0.9, 0.99]}
    name = f"study_general_seed{seed}"
    asked = recipe(name, path, ["colour"], steps=100, seed=seed, batch=batch, optimizer=optimizer)
    shutil.rmtree(asked.directory, ignore_errors=True)
    spent = cpu_minutes()
    found = study(asked, VARIANTS, [ConsoleWatcher()])
    facts = {
        "study": "general_path",
        "command": "python studies/general_path.py",
        "steps": asked.steps,
        "episodes": asked.steps * asked.batch.prompts_per_step * asked.batch.group_size,
    }
    one = {"seed": seed, **circumstances(), "cpu_minutes": round(cpu_minutes() - spent, 1)}
    result = add_run(RESULT, facts, one | {"before": by_name(found.before), "after": by_name(found.after)})
    for variant, summary in result["after"].items():
        print(f"{variant:>10}  {result['before'][variant]['mean']:.3f} → {summary['mean']:.3f} {summary['range']}")


def main(arguments: list[str]) -> None:
    """All seeds, or those that are named."""
    path = warmed_up()
    for seed in chosen_seeds(arguments, SEEDS):
        run(seed, path)


if __name__ == "__main__":
    main(sys.argv[1:])
