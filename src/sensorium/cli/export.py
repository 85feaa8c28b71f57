"""Write a run's model in the layout of the checkpoint that it started from (for transformers 4.57 and 5, vLLM, SGLang).

Checkpoints inside a run are as transformers 5 writes them, which other readers may refuse. An export has the source's own
config, tokenizer, template and processor files, and its weight names, shapes and shards, with the trained numbers in them.
"""

import errno
import fcntl
import json
import os
import re
import shutil
import sys
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from sensorium.cli.train import tie_note
from sensorium.runs.checkpoint_layout import ADAPTER_FOLDER, MARKER, TRAINER_FOLDER, checkpoint_of_run, refuse_damaged
from sensorium.runs.durable import drafted, read_json, writing
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import CheckpointError, WriteFailed

if TYPE_CHECKING:
    from sensorium.models.checkpoint_path import CheckpointSource
    from sensorium.recipe.schema import ModelSection

TEMPLATE = "chat_template.jinja"
NOT_THE_MODEL = (TRAINER_FOLDER, MARKER, ADAPTER_FOLDER)
COPIED = (
    "ATTENTION: {problem}. So the checkpoint was copied as it is in the run: the layout that transformers 5 writes, which "
    "transformers 4.57, vLLM and SGLang may refuse or misread. Name the source (of a quantized one, the model that it was "
    "made from) with --source for the published layout."
)


def configure(parser: ArgumentParser) -> None:
    add = parser.add_argument
    add("source", help="a run directory, a checkpoint folder, or tiny:FAMILY (a new tiny model)")
    add("target", type=Path, help="the folder to make; it must not exist")
    add("--step", type=int, help="take the checkpoint of this step; default: the best one, else the last")
    add("--last", action="store_true", help="take the last checkpoint, not the best")
    add(
        "--adapter", action="store_true", help="export only the LoRA adapter, for peft; default: the model with it added in"
    )
    add(
        "--source",
        dest="layout",
        metavar="PATH",
        help="the checkpoint whose layout and files to take; default: the one that the run started from",
    )
    add("--as-trained", action="store_true", help="copy the run's checkpoint as transformers 5 wrote it, without a source")


def run(arguments: Namespace) -> int:
    if arguments.source.startswith("tiny:"):
        return _write_tiny(arguments)
    given = arguments
    source = checkpoint_of_run(Path(given.source), step=given.step, last=given.last)
    notes = export(source, given.target, adapter=given.adapter, layout=given.layout, as_trained=given.as_trained)
    print(f"{source} → {arguments.target}")
    if arguments.step is None and not arguments.last and (tie := tie_note(Path(arguments.source))):
        print(tie)
    for note in notes:
        print(note, file=sys.stderr if note.startswith("ATTENTION") else sys.stdout)
    return 0


def _write_tiny(arguments: Namespace) -> int:
    options = {"--step": arguments.step, "--last": arguments.last, "--adapter": arguments.adapter,
               "--source": arguments.layout, "--as-trained": arguments.as_trained}  # fmt: skip
    if given := [name for name, value in options.items() if value not in (None, False)]:
        raise CheckpointError(f"{given[0]} is for the checkpoints of a run, and {arguments.source} is none; leave it out.")
    _refuse_present(arguments.target)
    from sensorium.models.checkpoint_path import quiet
    from sensorium.models.tiny import make_tiny
    from sensorium.recipe.model_shape import family_and_layers

    family, layers = family_and_layers(arguments.source.removeprefix("tiny:"))
    with _exporting(arguments.target) as draft, quiet():
        make_tiny(family, draft, num_hidden_layers=layers)
    print(
        f"{arguments.source} → {arguments.target} (random weights, seed 0), as transformers 5 writes it; 4.57 may refuse it"
    )
    return 0


def export(
    checkpoint: Path, target: Path, *, adapter: bool = False, layout: str | None = None, as_trained: bool = False
) -> list[str]:
    """Write the model of a complete checkpoint, or its adapter, without the trainer's files; returns notes.

    ``layout`` names the checkpoint whose layout is used, if not the run's own source.
    """
    _refuse_present(target)
    if adapter and not (checkpoint / ADAPTER_FOLDER).is_dir():
        raise CheckpointError(
            f"'{checkpoint}' has no adapter: its run trained the weights themselves (model.lora.rank is 0). Export it "
            "without --adapter."
        )
    refuse_damaged(checkpoint)
    published, notes = (None, []) if adapter or as_trained else _published_source(checkpoint, layout)
    with _exporting(target) as draft:
        if published is not None:
            from sensorium.models.published_layout import write_published

            recipe = _run_of(checkpoint).recipe
            section = _model_section(recipe) if recipe.is_file() else None
            unused = () if section is None else section.unused_weights
            notes += write_published(checkpoint, published, draft, unused).sentences()
            if section is not None and section.chat_template_kwargs:
                notes.append(_take_template(checkpoint, draft, section))
        else:
            _copy(checkpoint / ADAPTER_FOLDER if adapter else checkpoint, draft)
    return notes


@contextmanager
def _exporting(target: Path) -> Iterator[Path]:
    """A draft folder that becomes the target as a whole; no other export writes the same folder meanwhile."""
    lock_file = target.with_name(f".{target.name}.lock")
    try:
        with writing(target):
            lock_file.parent.mkdir(parents=True, exist_ok=True)
            with lock_file.open("ab") as lock:
                try:
                    fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                except BlockingIOError as error:
                    raise CheckpointError(
                        f"another process is exporting into '{target}'. Wait for it, or choose another folder."
                    ) from error
                except OSError:  # a file system without locks
                    pass
                try:
                    _refuse_present(target)
                    with drafted(target) as draft:
                        yield draft
                finally:
                    lock_file.unlink(missing_ok=True)
    except WriteFailed as error:
        error.add_note("Then export again.")
        raise


def _take_template(checkpoint: Path, draft: Path, section: "ModelSection") -> str:
    """Let an export render chats as its run did: with the recipe's values of the template's variables."""
    template = (checkpoint / TEMPLATE).read_text(encoding="utf-8")
    (draft / TEMPLATE).write_text(template, encoding="utf-8")
    for name in ("tokenizer_config.json", "chat_template.json"):  # where older readers look for it
        if (draft / name).is_file() and "chat_template" in (config := read_json(draft / name, "Copy it again.")):
            written = json.dumps({**config, "chat_template": template}, indent=2, ensure_ascii=False)
            (draft / name).write_text(written, encoding="utf-8")
    values = ", ".join(f"{name}={value!r}" for name, value in section.chat_template_kwargs.items())
    return f"{TEMPLATE} is the run's, with its model.chat_template_kwargs: {values}"


def _copy(origin: Path, draft: Path) -> None:
    """Copy a checkpoint without the trainer's part; raises the first error of several files."""
    try:
        shutil.copytree(origin, draft, ignore=shutil.ignore_patterns(*NOT_THE_MODEL))
    except shutil.Error as error:
        _, target, reason = error.args[0][0]
        found = re.match(r"\[Errno (\d+)\]", reason)
        number = int(found[1]) if found else errno.EIO
        raise OSError(number, os.strerror(number), target) from error


def _refuse_present(target: Path) -> None:
    if os.path.lexists(target):
        raise CheckpointError(f"'{target}' exists; choose another folder or remove it.")


def _published_source(checkpoint: Path, layout: str | None) -> tuple[Path | None, list[str]]:
    from sensorium.models.checkpoint_path import describe_source

    try:
        found = describe_source(layout) if layout is not None else _source_of(checkpoint)
        passed: set[Path] = set()
        while True:
            folder = found.find()
            if not (folder / MARKER).exists():  # no checkpoint of another run
                break
            if folder.resolve() in passed:
                raise CheckpointError(f"the runs that '{checkpoint}' comes from name each other as their source")
            passed.add(folder.resolve())
            found = _source_of(folder)
    except CheckpointError as error:
        if layout is not None:
            raise
        return None, [COPIED.format(problem=str(error).rstrip("."))]
    config = read_json(folder / "config.json", "Copy it again.")
    if "quantization_config" in config:
        problem = f"{found.path} is quantized, and what was trained is not"
        if layout is not None:
            raise CheckpointError(f"{problem}. Name the model that it was made from with --source.")
        return None, [COPIED.format(problem=problem)]
    version = config.get("transformers_version")
    notes = [f"in the layout of {found.path}{f' at {found.revision}' if found.revision else ''}"]
    if str(version).startswith("5"):
        notes.append(
            f"ATTENTION: {found.path} was itself written by transformers {version}, so the export is readable for "
            "transformers 5 and may not be for 4.57."
        )
    return folder, notes


def _run_of(checkpoint: Path) -> RunDirectory:  # the checkpoint, or the folder of all, may be a link to another disk
    as_named, resolved = (RunDirectory(path.parents[1]) for path in (checkpoint.absolute(), checkpoint.resolve()))
    return as_named if as_named.source.is_file() or as_named.recipe.is_file() else resolved


def _model_section(recipe: Path) -> "ModelSection":
    from sensorium.recipe.load import read_recipe
    from sensorium.recipe.schema import ModelSection

    model = read_recipe(recipe)[0].get("model")  # the rest is not checked: an export needs nothing that a recipe names
    given = model if isinstance(model, dict) else {}
    known = {key: given[key] for key in ("path", "revision") if isinstance(given.get(key), str)}
    if "path" not in known:
        raise CheckpointError(f"'{recipe}' is damaged: it names no model.path. Name the source with --source.")
    unused, variables = given.get("unused_weights") or (), given.get("chat_template_kwargs") or {}
    return ModelSection(**known, unused_weights=tuple(map(str, unused)), chat_template_kwargs=variables)


def _source_of(checkpoint: Path) -> "CheckpointSource":
    from sensorium.models.checkpoint_path import CheckpointSource, describe_source

    directory = _run_of(checkpoint)
    if directory.source.is_file():
        return CheckpointSource.read(directory.source)
    if not directory.recipe.is_file():
        raise CheckpointError(f"'{checkpoint}' is in no run, so the checkpoint that it was trained from is not known")
    model = _model_section(directory.recipe)
    return describe_source(model.path, model.revision)
