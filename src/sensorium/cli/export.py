"""Copy a checkpoint out of a run as a plain Hugging Face model, ready for from_pretrained, or its LoRA adapter alone."""

import os
import shutil
from argparse import ArgumentParser, Namespace
from pathlib import Path

from sensorium.record.durable import writing
from sensorium.record.run_directory import RunDirectory
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
    source = find_checkpoint(arguments.source, step=arguments.step, last=arguments.last)
    export(source, arguments.target, adapter=arguments.adapter)
    print(f"{source} → {arguments.target}")
    return 0


def export(checkpoint: Path, target: Path, *, adapter: bool = False) -> None:
    """Copy the model of a complete checkpoint, or its adapter, and nothing of the trainer's; complete or absent."""
    if target.exists():
        raise CheckpointError(f"'{target}' exists; choose another folder or remove it.")
    from sensorium.record.checkpoint_files import refuse_damaged

    source = checkpoint / ADAPTER if adapter else checkpoint
    if not source.is_dir():
        raise CheckpointError(
            f"'{checkpoint}' has no adapter: its run trained the weights themselves (model.lora.rank is 0). Export it "
            "without --adapter."
        )
    refuse_damaged(checkpoint)
    draft = target.with_name(f".{target.name}.draft")
    shutil.rmtree(draft, ignore_errors=True)
    try:
        with writing(target):
            shutil.copytree(source, draft, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
            os.replace(draft, target)
    except shutil.Error as error:
        raise RecordError(
            f"cannot write '{target}': {error.args[0][0][-1]}. Make room, or choose another place."
        ) from error
    finally:
        shutil.rmtree(draft, ignore_errors=True)


def find_checkpoint(source: Path, *, step: int | None = None, last: bool = False) -> Path:
    """The checkpoint that is meant: a folder that is one, or of a run a given step's, the best, or the last."""
    from sensorium.record.checkpoint_files import is_complete, refuse_damaged
    from sensorium.trainer.checkpoint import Checkpoints

    if is_complete(source):
        return source
    directory = RunDirectory(source)
    if not directory.checkpoints.is_dir():
        refuse_damaged(source)
        raise CheckpointError(f"'{source}' is neither a complete checkpoint nor a run directory.")
    checkpoints = Checkpoints(directory.checkpoints, keep=1)
    complete = checkpoints.complete()
    best = None if last else checkpoints.best()
    if step is None and best is None and (unfit := checkpoints.newer_than_complete()):
        instead = f"take the last complete one with --step {complete[-1]}" if complete else "there is no complete one"
        raise CheckpointError(
            f"the newest checkpoint of '{source}', of step {unfit[0]}, is damaged: {unfit[1]}. Resume the run, which makes "
            f"it again, or {instead}."
        )
    wanted = step if step is not None else best.step if best is not None else complete[-1] if complete else None
    if wanted not in complete:
        there = ", ".join(str(known) for known in complete) or "none"
        raise CheckpointError(f"'{source}' has no complete checkpoint of step {wanted}; there are: {there}.")
    return directory.checkpoint_of(wanted)
