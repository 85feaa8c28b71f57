"""What a run skips is told to who watches: the first tasks of each kind by name and reason, each once."""

import json
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.trainer.run import train
from sensorium.vocabulary import Message, user
from sensorium.vocabulary.errors import NothingTrained, TaskError
from tests.trainer.small import small
from tests.trainer.test_going_on import Notes

OLDER = "algorithm.correction.weights=token"
SCHEDULES: dict[str, Sequence[str]] = {
    "synchronous": (),
    "one_step_off": ("schedule=one_step_off", OLDER),
    "asynchronous": ("schedule.name=asynchronous", "rollout.schedule=eager", OLDER),
    "warm start": ("steps=0", "warm_start.steps=8", "warm_start.prompts_per_step=2"),
}


def rows(folder: Path, bad: int, long: int) -> dict[str, Any]:
    """A file of two sound rows, and of some that cannot be read or do not fit."""
    sound = [row("What?", "a"), row("Where?", "b")]
    path = folder / "tasks.jsonl"
    path.write_text(
        "\n".join([*sound, *['{"messages": 3}'] * bad, *(row("What " * 200, f"long-{i}") for i in range(long))])
    )
    return {
        "train": [{"source": "jsonl", "options": {"path": str(path)}}],
        "on_bad_row": "skip",
        "on_long_prompt": "skip",
    }


def row(text: str, id: str) -> str:
    return json.dumps({"id": id, "messages": [{"role": "user", "content": text}], "answer": "x", "demonstration": "x"})


def told(folder: Path, *overrides: str, **changes: Any) -> list[str]:
    """What is told of skipped tasks in a run of several epochs."""
    notes = Notes()
    rollout = {"max_new_tokens": 3, "max_context_tokens": 64}
    with suppress(NothingTrained):
        train(small(folder, *overrides, **{"steps": 8, "rollout": rollout} | changes), watchers=[notes])
    return [text for text in notes.texts if "skipped" in text]


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_skipped_tasks_are_named_once_with_the_reason(schedule: str, tmp_path: Path) -> None:
    found = told(tmp_path / "run", *SCHEDULES[schedule], tasks=rows(tmp_path, bad=1, long=2))
    (bad,) = [text for text in found if "cannot be read" in text]
    assert f"a task is skipped, because it cannot be read: {tmp_path / 'tasks.jsonl'}:3" in bad
    long = sorted(text for text in found if "too long" in text)
    assert len(found) == 3
    for i, text in enumerate(long):
        assert f"a task is skipped, because its prompt is too long: task long-{i}: the prompt takes" in text


def test_of_many_skipped_tasks_three_of_each_kind_are_named_and_the_others_only_counted(tmp_path: Path) -> None:
    found = told(tmp_path / "run", tasks=rows(tmp_path, bad=6, long=5))
    assert sum("because it cannot be read: " in text for text in found) == 3
    assert sum("because its prompt is too long: " in text for text in found) == 3
    (bad,) = [text for text in found if "the metric tasks/skipped_bad counts them" in text]
    (long,) = [text for text in found if "the metric tasks/skipped_long counts them" in text]
    assert found.index(bad) > 2
    assert found.index(long) > 2
    assert len(found) == 8


def test_a_placeholder_that_the_model_sees_as_text_is_noted_once(tmp_path: Path) -> None:
    notes, path = Notes(), tmp_path / "tasks.jsonl"
    path.write_text("\n".join([row("What?", "a"), row("<image>Where?", "b")]))
    source = {"source": "jsonl", "options": {"path": str(path)}}
    with suppress(NothingTrained):
        tasks = {"train": [source], "evaluate": [source], "shuffle": False}
        train(small(tmp_path / "run", steps=4, rollout={"max_new_tokens": 3}, tasks=tasks), watchers=[notes])
    trained, held_out = sorted((text for text in notes.texts if "<image>" in text), reverse=True)
    assert "tasks.train" in trained
    assert "tasks.evaluate: 1 of 2 tasks, the first b" in held_out


class Wordy:
    """Shows more than fits, which only playing it tells."""

    def __init__(self, store: MediaStore) -> None:
        pass

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        return (), Observation((user("What " * 200),))

    def step(self, response: str) -> StepResult:
        return StepResult(None, 0.0, done=True)

    def close(self) -> None:
        pass


@pytest.mark.parametrize("schedule", ["synchronous", "asynchronous"])
def test_prompts_that_an_environment_shows_are_told_as_well(schedule: str, tmp_path: Path) -> None:
    source = {"source": "environments", "options": {"environment": f"{__name__}:Wordy", "size": 2, "split_by": "seed"}}
    tasks = {"train": [source], "on_long_prompt": "skip"}
    found = told(tmp_path / "run", *SCHEDULES[schedule], tasks=tasks, steps=2)
    assert len(found) == 2
    assert all("because its prompt is too long: task " in text for text in found)


def test_an_answer_that_no_term_can_compare_with_makes_a_bad_row(tmp_path: Path) -> None:
    ask = [{"role": "user", "content": "What?"}]
    answers: list[Any] = ["a", {"a": 1}, True, [], ""]
    path = tmp_path / "tasks.jsonl"
    path.write_text("\n".join(json.dumps({"messages": ask, "answer": a, "id": f"r{i}"}) for i, a in enumerate(answers)))
    tasks = {"train": [{"source": "jsonl", "options": {"path": str(path)}}]}
    exact = {"rewards": {"terms": [{"name": "exact"}]}, "steps": 4, "batch": {"prompts_per_step": 2, "group_size": 2}}
    found = told(tmp_path / "run", tasks=tasks | {"on_bad_row": "skip"}, **exact)
    named = [text for text in found if "cannot be read: task r" in text]
    assert len(named) == 3, "and that there are more"
    assert len(found) == 4
    with pytest.raises(TaskError, match=r"task r[1-4]: .*tasks\.on_bad_row: skip"):
        train(small(tmp_path / "refused", tasks=tasks, **exact))
    own = exact | {"rewards": {"terms": [{"name": "tests.trainer.small:ByParity"}, {"name": "exact", "weight": 0}]}}
    assert not told(tmp_path / "own", tasks=tasks | {"on_bad_row": "skip"}, **own)
