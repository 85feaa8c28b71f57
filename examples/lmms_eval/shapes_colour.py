"""What the lmms-eval task shapes_colour reads, asks and counts; run as a script, it writes the task's rows.

    python examples/lmms_eval/shapes_colour.py          # where sensorium is installed; writes shapes_colour.jsonl

lmms-eval imports this file in an environment of its own, where sensorium need not be installed.
"""

import base64
import io
import json
from pathlib import Path
from typing import Any


def pictures(row: dict[str, Any]) -> list[Any]:
    """The row's picture, as lmms-eval takes it."""
    from PIL import Image

    return [Image.open(io.BytesIO(base64.b64decode(row["picture"]))).convert("RGB")]


def question(row: dict[str, Any], lmms_eval_specific_kwargs: Any = None) -> str:
    """What is asked, with the form of the answer."""
    return str(row["question"])


def judged(row: dict[str, Any], results: list[str]) -> dict[str, float]:
    """1 for the right word in <answer>."""
    return {"accuracy": float(results[0].strip() == f"<answer>{row['answer']}</answer>")}


def main(size: int = 32) -> None:
    """Write the rows: held-out pictures of the source ``shapes`` that are asked for a colour."""
    from sensorium.data.media_store import MediaStore
    from sensorium.data.shapes import Shapes

    store = MediaStore()
    source = Shapes(store=store, split="test", size=size, kinds=["colour"], picture_size=64)
    rows = []
    for task in (source[index] for index in range(size)):
        (message,) = task.messages
        (picture,) = message.media
        data = base64.b64encode(store.bytes_of(picture)).decode()
        rows.append({"picture": data, "question": message.text, "answer": task.answer})
    Path("shapes_colour.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


if __name__ == "__main__":
    main()
