"""An evaluation of environments writes down whole conversations, and is read and compared as any other."""

import json
from pathlib import Path

from sensorium.evaluation.comparison import compare_sides, side_of
from sensorium.evaluation.evaluate import evaluate_into
from sensorium.runs.episodes import task_from_json
from sensorium.vocabulary import Media
from tests.recipes import parsed, quick

LAKE = {
    "source": "environments",
    "options": {"environment": "frozen_lake", "size": 2, "options": {"view": "picture"}},
}


def test_a_line_has_all_turns_of_an_episode_with_references_to_what_was_shown(tmp_path: Path) -> None:
    tasks, rewards = {"train": [LAKE], "evaluate": [LAKE]}, {"terms": [{"name": "environment"}]}
    recipe = parsed(quick("lake", tasks=tasks, rewards=rewards, rollout={"max_turns": 3}), tmp_path / "run")
    out = tmp_path / "out"
    summary = evaluate_into(out, recipe, "package:shapes")
    rows = [json.loads(line) for line in (out / "samples.jsonl").read_text().splitlines()]
    assert len(rows) == 2
    for row in rows:
        assert row["turns"] == 3, "a model that knows nothing of lakes uses all its turns"
        conversation = task_from_json({"id": row["task"], "messages": row["conversation"]}).messages
        assert [message.role for message in conversation] == ["system", *["user", "assistant"] * 3]
        assert row["conversation"][1:2] == row["messages"]
        written = [message.text for message in conversation if message.role == "assistant"]
        assert "\n".join(written) == row["response"]
        shown = [block for message in conversation for block in message.content if isinstance(block, Media)]
        assert len(shown) == 3
        assert all(len(picture.hash) == 64 for picture in shown)
    assert compare_sides(side_of(str(out)), side_of(str(out)))["asked_otherwise"] == 0
    assert summary["tasks"] == 2
