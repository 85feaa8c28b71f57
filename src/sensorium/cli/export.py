"""Copy a checkpoint out of a run as a plain Hugging Face model, ready for from_pretrained, or its LoRA adapter alone."""

import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.record.checkpoint_files import checkpoint_of_run, refuse_damaged
from sensorium.record.durable import drafted, writing
from sensorium.vocabulary.errors import CheckpointError, RecordError

ADAPTER = "adapter"
NOT_THE_MODEL = ("trainer", "COMPLETE", ADAPTER)


def configure(parser: ArgumentParser) -> None:
    """Add the arguments."""
    parser.add_argument("source", type=Path, help="a run directory or a checkpoint folder")
    parser.add_argument("target", type=Path, help="the folder to make; it must not exist")
    parser.add_argument("--step", type=int, help="take the checkpoint of this step; default: the best one, else the last")
    parser.add_argument("--last", action="store_true", help="take the last checkpoint, not the best")
    parser.add_argument(
        "--adapter", action="store_true", help="export only the LoRA adapter, for peft; default: the model with it added in"
    )


def run(arguments: Namespace) -> int:
    """Export."""
    source = checkpoint_of_run(arguments.source, step=arguments.step, last=arguments.last)
    export(source, arguments.target, adapter=arguments.adapter)
    print(f"{source} → {arguments.target}")
    return 0


def export(checkpoint: Path, target: Path, *, adapter: bool = False) -> None:
    """Copy the model of a complete checkpoint, or its adapter, and nothing of the trainer's; complete or absent."""
    if target.exists():
        raise CheckpointError(f"'{target}' exists; choose another folder or remove it.")
    source = checkpoint / ADAPTER if adapter else checkpoint
    if not source.is_dir():
        raise CheckpointError(
            f"'{checkpoint}' has no adapter: its run trained the weights themselves (model.lora.rank is 0). Export it "
            "without --adapter."
        )
    refuse_damaged(checkpoint)
    try:
        with writing(target), drafted(target) as draft:
            shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
    except shutil.Error as error:
        raise RecordError(
            f"cannot write '{target}': {error.args[0][0][-1]}. Make room, or choose another place."
        ) from error
