"""What judges were asked about an episode, read from the file that ``judges/transcripts.py`` writes into a run."""

import json
import sqlite3
from pathlib import Path
from typing import Any

TRANSCRIPTS = "judge_transcripts.sqlite"


def read_transcripts(path: Path, episode: str) -> list[dict[str, Any]]:
    """What judges were asked about an episode, by term; nothing where there is no file, and why where it cannot be read."""
    if not path.exists():
        return []
    names = ("term", "model", "prompt", "messages", "answer")
    try:
        db = sqlite3.connect(f"file:{path}?mode=ro", uri=True, timeout=30.0)
        try:
            asked = "SELECT term, model, prompt, messages, answer FROM transcripts WHERE episode = ? ORDER BY term, key"
            rows = db.execute(asked, (episode,)).fetchall()
        finally:
            db.close()
    except sqlite3.Error as error:
        told = f"'{path.name}' cannot be read: {error}"
        return [{"term": "", "model": "nobody", "prompt": "transcripts", "messages": [], "answer": told}]
    return [{**dict(zip(names, row, strict=True)), "messages": json.loads(row[3])} for row in rows]
