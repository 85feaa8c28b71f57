"""CapRL's rows: videos (JSONL) or pictures (Parquet) to describe, with questions about them.

    {"prompt": [{"role": "user", "content": "<video>\nDescribe…"}], "videos": ["a.mp4"], "data_source": "video_caption_rl",
     "reward_model": {"ground_truth": [{"question": …, "choices": ["A. x", …], "answer": "B"}]}}

A picture's row has ``image`` {bytes, path} instead of ``videos``, and an ``id``. Choices are normalised.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from sensorium.data.media_store import MediaStore
from sensorium.data.row_format import FileRowOptions
from sensorium.data.rows import JsonlRows, ParquetRows
from sensorium.systems.caprl.questions import CaptionQuestion, question_of
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.plain import strict_json
from sensorium.vocabulary.task import Task

COLUMNS = {
    "video": {"prompt": "prompt", "videos": "videos", "answer": "reward_model.ground_truth"},
    "image": {"id": "id", "prompt": "prompt", "pictures": "image", "answer": "reward_model.ground_truth"},
}


class CaptionRows:
    """The rows of ``path``. ``kind``: "video" or "image"; by default by the first row's column, ``videos`` or ``image``."""

    def __init__(
        self,
        path: str,
        store: MediaStore,
        kind: Literal["auto", "video", "image"] = "auto",
        **options: Unpack[FileRowOptions],
    ) -> None:
        in_parquet = Path(path).suffix == ".parquet"
        found: str = kind
        if kind == "auto":
            row = first_row(Path(path))
            has_video, has_image = (row.get(name) is not None for name in ("videos", "image"))
            by_form = not in_parquet  # CapRL's files have videos in JSONL and pictures in Parquet
            found = "video" if (has_video if has_video != has_image else by_form) else "image"
        if found not in COLUMNS:
            raise RecipeError(f"caprl: kind is '{kind}'; it is auto, video or image.")
        options = {"columns": COLUMNS[found], **options}
        self.path = path
        self._rows: JsonlRows | ParquetRows = (ParquetRows if in_parquet else JsonlRows)(path, store, **options)

    @property
    def row_digests(self) -> dict[str, str]:
        return self._rows.row_digests

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        task = self._rows[index]
        try:
            questions = ground_truth(task.answer)
        except ValueError as error:
            raise TaskError(f"{self.path}, row {index}: reward_model.ground_truth: {error}.") from error
        return replace(task, answer=None, metadata={"questions": [question.to_json() for question in questions]})


def first_row(path: Path) -> Mapping[str, Any]:
    """The first row of a file; empty if it cannot be read, which the reader of all rows reports."""
    try:
        if path.suffix == ".parquet":
            from pyarrow import ArrowException, parquet

            try:
                with parquet.ParquetFile(path) as file:
                    rows = next(file.iter_batches(batch_size=1)).to_pylist()
            except (ArrowException, StopIteration):
                return {}
            return rows[0] if rows else {}
        with path.open(encoding="utf-8-sig") as lines:
            row = json.loads(next((line for line in lines if line.strip()), "{}"))
    except (OSError, ValueError, OverflowError):
        return {}
    return row if isinstance(row, dict) else {}


def ground_truth(raw: Any) -> list[CaptionQuestion]:
    """The questions of a row: a list of them, or that as JSON text. Or ValueError."""
    if isinstance(raw, str):
        raw = strict_json(raw)
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"it is a list of questions, not {raw!r:.60}")
    return [question_of(one) for one in raw]
