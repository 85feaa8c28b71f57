"""CapRL's rows: videos (JSONL) or pictures (Parquet) to be described, with questions about them.

    {"prompt": [{"role": "user", "content": "<video>\\nDescribe…"}], "videos": ["a.mp4"], "data_source": "video_caption_rl",
     "reward_model": {"ground_truth": [{"question": …, "choices": ["A. x", …], "answer": "B"}]}}

A picture's row has ``image`` {bytes, path} instead of ``videos``, and an ``id``. Choices are normalised.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, Unpack

from sensorium.media.store import MediaStore
from sensorium.tasks.row_options import FileRowOptions
from sensorium.tasks.rows import JsonlRows, ParquetRows
from sensorium.vocabulary.caption_questions import CaptionQuestion, question_of
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.task import Task

COLUMNS = {
    "video": {"prompt": "prompt", "videos": "videos", "answer": "reward_model.ground_truth"},
    "image": {"id": "id", "prompt": "prompt", "pictures": "image", "answer": "reward_model.ground_truth"},
}


class CaptionRows:
    """The rows of ``path``. ``kind``: "video" or "image"; by default JSONL holds videos and Parquet pictures.

    The other options are those of all rows in files.
    """

    def __init__(
        self,
        path: str,
        store: MediaStore,
        kind: Literal["auto", "video", "image"] = "auto",
        **options: Unpack[FileRowOptions],
    ) -> None:
        in_parquet = Path(path).suffix == ".parquet"
        found = ("image" if in_parquet else "video") if kind == "auto" else kind
        if found not in COLUMNS:
            raise RecipeError(f"caprl: kind is '{kind}'; it is auto, video or image.")
        options = {"columns": COLUMNS[found], **options}
        self.path = path
        self._rows: JsonlRows | ParquetRows = (ParquetRows if in_parquet else JsonlRows)(path, store, **options)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> Task:
        task = self._rows[index]
        try:
            questions = ground_truth(task.answer)
        except ValueError as error:
            raise TaskError(f"{self.path}, row {index}: reward_model.ground_truth: {error}.") from error
        return replace(task, answer=None, metadata={"questions": [question.to_json() for question in questions]})


def ground_truth(raw: Any) -> list[CaptionQuestion]:
    """The questions of a row: a list of them, or that as JSON text. Or ValueError."""
    if isinstance(raw, str):
        raw = json.loads(raw)
    if not isinstance(raw, list) or not raw:
        raise ValueError(f"it is a list of questions, not {raw!r:.60}")
    return [question_of(one) for one in raw]
