"""Rows of a Hugging Face data set: from the hub, from a folder of its files, or one that was saved to disk."""

from importlib.util import find_spec
from pathlib import Path
from typing import Any, Unpack

from sensorium.media.files import roots_of
from sensorium.media.store import MediaStore
from sensorium.tasks.message_parsing import Place
from sensorium.tasks.row_options import FileRowOptions, RowReading
from sensorium.tasks.rows import content_digest, stored_row
from sensorium.vocabulary.errors import RecipeError, TaskError, nearest
from sensorium.vocabulary.task import Task


class HubRows:
    """One task a row of ``data`` (a hub id or a local folder), its configuration ``name`` and its ``split``.

    Media are taken as they are stored, never decoded by the library. Paths of media start from ``folder`` (the local folder
    itself if not said) and stay there, in the library's caches, or in ``media_roots``. Data sets that are programs (loading
    scripts) are not run: the library has given them up. The other options are those of all rows (``FileRowOptions``).
    """

    def __init__(
        self,
        data: str,
        store: MediaStore,
        split: str = "train",
        name: str | None = None,
        revision: str | None = None,
        folder: str | None = None,
        **options: Unpack[FileRowOptions],
    ) -> None:
        self.data, self.split, self.store = data, split, store
        local = Path(folder) if folder is not None else Path(data) if Path(data).is_dir() else None
        self.folder = local if local is not None else Path()
        self._reading = RowReading(options, data)
        rows = _loaded(data, name, split, revision)
        fields = self._reading.format.fields(rows.column_names, f"{data}, split '{split}'")
        # The library names its files by their times, so the split is named instead. One held in memory has no files.
        files = [content_digest(Path(file["filename"])) for file in rows.cache_files]
        self.row_digests = {f"{data}, split '{split}'": " ".join(files)} if files else {}
        # The arrow form of a row holds a medium's bytes or path as they are.
        self._rows = rows.select_columns(fields).with_format("arrow")
        self._length = self._reading.length(len(rows))
        caches = _caches()
        # What the library downloaded lies in its caches; the folder that a process happens to stand in is not opened.
        roots = [*options.get("media_roots", ()), *caches]
        self._roots = roots_of(local if local is not None else Path(caches[0]), roots)
        if not len(rows):
            raise TaskError(f"the data set '{data}', split '{split}', has no rows.")

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Task:
        if not 0 <= index < self._length:
            raise IndexError(index)
        place = Place(
            f"{self.data}, split '{self.split}', row {index}", self.folder, self.store, self._reading.clips, self._roots
        )
        row = stored_row(self._rows, index, place)
        return self._reading.format.task(row, f"{self.data}/{self.split}/{index}", place)


def _caches() -> list[str]:
    """The folders that hold downloaded data sets; tokens lie elsewhere."""
    from datasets import config
    from huggingface_hub.constants import HF_HUB_CACHE

    return [str(HF_HUB_CACHE), str(config.HF_DATASETS_CACHE)]


def _loaded(data: str, name: str | None, split: str, revision: str | None) -> Any:
    """The rows of one split, through the ``datasets`` library."""
    if find_spec("datasets") is None:
        raise RecipeError("source 'hub' needs the package datasets, which is not installed: pip install datasets.")
    from datasets import Dataset, DatasetDict, load_dataset, load_from_disk

    saved = Path(data)
    try:
        if (saved / "dataset_dict.json").is_file() or (saved / "state.json").is_file():
            found = load_from_disk(data)
        else:
            found = load_dataset(data, name, split=split, revision=revision)
    except Exception as error:  # the library raises whatever a missing network, file or script provokes
        raise TaskError(f"cannot load the data set '{data}': {type(error).__name__}: {error}") from error
    if isinstance(found, DatasetDict):
        if split not in found:
            raise TaskError(f"the data set '{data}' has no split '{split}'{nearest(split, list(map(str, found)))}")
        found = found[split]
    if not isinstance(found, Dataset):
        raise TaskError(f"the data set '{data}' is a {type(found).__name__}, whose rows cannot be read in any order.")
    return found
