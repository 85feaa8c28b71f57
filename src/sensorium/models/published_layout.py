"""A run's checkpoint in the layout of the checkpoint that the run started from: names, shapes, dtypes, shards and files.

transformers 5 writes some weights under other names and in other shapes than the published checkpoints have, which other
readers refuse or misread. So an export copies the source's files and replaces the numbers by the trained ones::

    source (published)                                   checkpoint of the run (transformers 5)
    thinker.model.layers.0.mlp.up_proj.weight [I, H]  ←  model.layers.0.mlp.up_proj.weight [I, H]
    model…mlp.experts.gate_up_proj [E, H, 2I]         ←  model…mlp.experts.gate_up_proj [E, 2I, H], transposed
    model…mlp.experts.3.up_proj.weight [I, H]         ←  model…mlp.experts.gate_up_proj [E, 2I, H], its rows
    lm_head.weight [V, H], where tied                 ←  model.embed_tokens.weight [V, H]
    talker.codec_head.weight                          ←  nothing: the source's own bytes
"""

import re
import shutil
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from safetensors import safe_open
from torch import Tensor

from sensorium.models.weight_files import INDEX, StoredTensor, WeightFile, weight_files
from sensorium.recipe.family_facts import is_unloaded
from sensorium.recipe.model_shape import told_by_part
from sensorium.runs.checkpoint_layout import MARKER
from sensorium.vocabulary.errors import CheckpointError

EXPERT = re.compile(r"(.*\.experts)\.(\d+)\.(gate|up|down)_proj\.weight")
HEAD, EMBEDDINGS = "lm_head.weight", "embed_tokens.weight"
OTHER_WEIGHTS = ("*.safetensors", "*.index.json", "pytorch_model*", "*.bin", "*.gguf", "*.h5", "*.msgpack", "*.onnx")
NOT_CARRIED = ("README.md", MARKER, ".*", *OTHER_WEIGHTS)  # files of a source that an export does not copy


def common_name(name: str) -> str:
    """A weight's name without the prefixes that differ between versions of a layout."""
    return re.sub(r"^(thinker\.)?((language_)?model\.)*", "", name).replace("vision_tower.vision_model.", "vision_tower.")


@dataclass(frozen=True)
class WeightOrigin:
    """The tensor of the run's checkpoint that holds a weight of the source, and which part of that tensor."""

    name: str
    transposed: bool = False
    expert: int | None = None
    half: int | None = None

    def take(self, stored: Tensor) -> Tensor:
        if self.expert is not None:
            stored = stored[self.expert]
        if self.half is not None:
            stored = stored.chunk(2)[self.half]
        return stored.transpose(-1, -2) if self.transposed else stored


@dataclass
class ExportSummary:
    """The weights of an export: changed by training, unchanged, rounded, and carried along though not in the model."""

    changed: int = 0
    same: int = 0
    rounded: Counter[str] = field(default_factory=Counter)
    carried: Counter[str] = field(default_factory=Counter)
    files: list[str] = field(default_factory=list)

    def sentences(self) -> list[str]:
        """The summary as the command prints it."""
        return [
            f"{self.changed} weights were changed by training, {self.same} are the source's, byte for byte",
            *(f"{count} weights under '{part}.' were carried along untouched" for part, count in self.carried.items()),
            *(f"{count} trained weights were rounded from {pair}" for pair, count in self.rounded.items()),
            f"files taken from the source: {', '.join(self.files) or 'none'}",
        ]


def write_published(checkpoint: Path, source: Path, target: Path, unused: Sequence[str] = ()) -> ExportSummary:
    """Write the weights of ``checkpoint`` in the layout of ``source``, with the source's other files, into ``target``.

    Weights of the source that a run leaves out (``unused``: by its recipe) are carried along as they are.
    """
    trained, published = weight_files(checkpoint), weight_files(source)
    held, wanted = ({tensor.name: tensor for file in each for tensor in file.tensors} for each in (trained, published))
    origins = match_weights(held, wanted, checkpoint, source, unused)
    places = {tensor.name: file.path for file in trained for tensor in file.tensors}
    target.mkdir(parents=True)
    summary = ExportSummary()
    for file in published:
        _write_file(file, target, origins, places, summary)
    if (source / INDEX).is_file() and len(published) > 1:
        shutil.copyfile(source / INDEX, target / INDEX)
    for path in sorted(source.iterdir()):
        if path.is_file() and not any(path.match(pattern) for pattern in NOT_CARRIED):
            shutil.copyfile(path, target / path.name)
            summary.files.append(path.name)
    return summary


def match_weights(
    trained: dict[str, StoredTensor],
    published: dict[str, StoredTensor],
    checkpoint: Path,
    source: Path,
    unused: Sequence[str] = (),
) -> dict[str, WeightOrigin]:
    """For each weight of the source the one of the checkpoint that holds it.

    A weight of only one of them is refused by name, but for those of the source that no run loads.
    """
    known = {common_name(name): tensor for name, tensor in trained.items()}
    if len(known) != len(trained):
        raise CheckpointError(f"'{checkpoint}' has two weights of one name but for its prefix; it cannot be exported.")
    found = {name: _origin(name, tensor, known, checkpoint, source) for name, tensor in published.items()}
    origins = {name: origin for name, origin in found.items() if origin is not None}
    used = {origin.name for origin in origins.values()}
    homeless = [tensor.name for common, tensor in known.items() if tensor.name not in used and common != HEAD]
    if homeless:
        raise CheckpointError(
            f"'{source}' has no place for {len(homeless)} weights of '{checkpoint}', such as {homeless[0]}: it is not the "
            "checkpoint that the run started from. Name that one with --source."
        )
    if lacking := [name for name in published if name not in origins and not is_unloaded(name, unused)]:
        raise CheckpointError(
            f"'{source}' has {len(lacking)} weights that the model in '{checkpoint}' lacks: {told_by_part(lacking)}. An "
            "export with them would be another model than the one that was trained. Name the checkpoint that the run "
            "started from with --source, or export with --as-trained."
        )
    if HEAD in known and known[HEAD].name not in used:  # the source's head is tied: ours must equal the embeddings
        tied = [known[HEAD], known[EMBEDDINGS]]
        files = weight_files(checkpoint)
        if len({file.bytes_of(tensor) for file in files for tensor in tied if tensor in file.tensors}) > 1:
            raise CheckpointError(
                f"'{checkpoint}' has a head of its own and '{source}' has none (its head is tied to its embeddings): it is "
                "not the checkpoint that the run started from. Name that one with --source."
            )
    return origins


def _origin(
    name: str, tensor: StoredTensor, known: dict[str, StoredTensor], checkpoint: Path, source: Path
) -> WeightOrigin | None:
    """Where a weight of the source is in the checkpoint; None if the run's model has no such weight."""
    common, shape = common_name(name), tensor.shape
    if common == HEAD and common not in known:
        common = EMBEDDINGS
    if (found := known.get(common)) is not None:
        if found.shape == shape:
            return WeightOrigin(found.name)
        if ".experts." in common and found.shape == (*shape[:-2], shape[-1], shape[-2]):
            return WeightOrigin(found.name, transposed=True)
        raise CheckpointError(
            f"{name} is {list(shape)} in '{source}' and {list(found.shape)} in '{checkpoint}': it is not the checkpoint "
            "that the run started from. Name that one with --source."
        )
    expert = EXPERT.fullmatch(common)  # a single expert's weight, inside the tensor of all experts
    if expert is None:
        return None
    down = expert[3] == "down"
    fused = known.get(f"{expert[1]}.{'down_proj' if down else 'gate_up_proj'}")
    rows, columns = shape
    if fused is None or fused.shape[1:] != ((rows if down else 2 * rows), columns):
        return None
    return WeightOrigin(fused.name, expert=int(expert[2]), half=None if down else ("gate", "up").index(expert[3]))


def _write_file(
    file: WeightFile, target: Path, origins: dict[str, WeightOrigin], places: dict[str, Path], summary: ExportSummary
) -> None:
    with safe_open(file.path, "pt") as own:

        def content(tensor: StoredTensor) -> bytes | memoryview:
            origin = origins.get(tensor.name)
            if origin is None:
                summary.carried[tensor.name.partition(".")[0]] += 1
                return file.bytes_of(tensor)
            with safe_open(places[origin.name], "pt") as opened:
                new = origin.take(opened.get_tensor(origin.name))
            old = own.get_tensor(tensor.name)
            if torch.equal(old.to(new.dtype), new):  # not trained, or by less than its precision
                summary.same += 1
                return file.bytes_of(tensor)
            summary.changed += 1
            if old.element_size() < new.element_size():
                summary.rounded[f"{new.dtype} to {old.dtype}".replace("torch.", "")] += 1
            return raw_bytes(new.to(old.dtype))

        file.write_like(target / file.path.name, content)


def raw_bytes(tensor: Tensor) -> memoryview:
    """The bytes of a CPU tensor as in a weight file; no copy of a contiguous one."""
    return tensor.contiguous().flatten().view(torch.uint8).numpy().data
