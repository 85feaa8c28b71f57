"""What goes wrong in a run costs an episode, a group or a stop with everything kept; never a silent zero."""

import json
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.envs.protocol import Observation, StepResult
from sensorium.models.policy import Policy
from sensorium.recipe.load import parse_recipe
from sensorium.runs.episodes import read_episodes
from sensorium.runs.ledger import Ledger
from sensorium.runs.metrics import read_metrics
from sensorium.runs.process_table import alive
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.checkpoint import replay
from sensorium.trainer.run import open_trainer, train
from sensorium.vocabulary import Episode, Message, Score, Status, Task, system, user
from sensorium.vocabulary.errors import (
    CheckpointError,
    MediaError,
    ModelError,
    NonFiniteUpdate,
    NothingTrained,
    PromptTooLong,
    RecipeError,
    TaskError,
)
from tests.recipes import parsed, quick

HERE = "tests.trainer.test_failures"
DEADLINE_S = 4.0
"""Of what hangs for ever. Long enough for what does not, on a machine that is busy with other things."""
RECIPE = quick(
    "failing",
    rewards={"terms": [{"name": "exact"}], "retries": 1, "retry_wait_s": 0.0, "deadline_s": 300.0},
)


def run(folder: Path, **changes: Any) -> tuple[list[dict[str, Any]], list[Episode]]:
    """Train and return metrics and the first step's episodes. That nothing could be learned is another test's business."""
    recipe = parsed(RECIPE, folder, **changes)
    with suppress(NothingTrained):
        train(recipe)
    path = folder / "episodes/step_000001.jsonl"
    return read_metrics(folder / "metrics.jsonl"), [episode for _, _, episode in read_episodes(path)]


class Moody:
    """Judges every episode but the first of its group; that one it raises on, or hangs."""

    name = "moody"
    instant = False

    def __init__(self, hang: bool = False) -> None:
        self.hang = hang

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        if episode.index == 0:
            if self.hang:
                threading.Event().wait()
            raise RuntimeError("the judge is out")
        return (Score("moody", float(episode.index)),)


@pytest.mark.parametrize(("hang", "reason"), [(False, "the judge is out"), (True, f"within {DEADLINE_S:g} s")])
def test_a_judge_that_fails_gives_no_score_and_the_episode_leaves_its_group(
    hang: bool, reason: str, tmp_path: Path
) -> None:
    terms = [{"name": "exact"}, {"name": f"{HERE}:Moody", "options": {"hang": hang}}]
    hanging = {"deadline_s": DEADLINE_S, "retries": 0} if hang else {}
    rows, episodes = run(tmp_path / "run", rewards=RECIPE["rewards"] | {"terms": terms} | hanging, steps=1)
    first = [e for e in episodes if e.index == 0]
    assert all(e.reward is None for e in first)
    assert all(reason in score.reason for e in first for score in e.scores if score.name == "moody")
    assert all(e.reward is not None for e in episodes if e.index > 0)
    assert rows[0]["missing/moody"] == 3
    assert rows[0]["episodes/dropped"] == 3
    assert rows[0]["groups/trained"] == 3


def test_drop_group_drops_and_counts_the_group(tmp_path: Path) -> None:
    terms = [{"name": f"{HERE}:Moody"}]
    rows, _ = run(tmp_path / "run", rewards=RECIPE["rewards"] | {"terms": terms, "on_missing": "drop_group"})
    assert rows[0]["groups/dropped"] == 3
    assert rows[0]["episodes/dropped"] == 9
    assert rows[0]["policy/skipped"] == 1


class Album:
    """Shows a picture a turn; what is wrong with it, and when, is an option."""

    def __init__(self, store: MediaStore, fault: str = "", turns: int = 3) -> None:
        self.store, self.fault, self.turns = store, fault, turns
        self.instant = fault != "hang"

    @classmethod
    def content_key(cls, seed: int, options: dict[str, Any]) -> str:
        return str(seed)

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.turn, self.seed = 0, seed
        return (system("look"),), self._show()

    def step(self, response: str) -> StepResult:
        self.turn += 1
        if self.turn == 1 and self.seed % 2:
            if self.fault == "hang":
                threading.Event().wait()
            if self.fault == "raise":
                raise ValueError("the album is torn")
        done = self.turn == self.turns
        return StepResult(None if done else self._show(), reward=float(len(response) % 3), done=done)

    def demonstrate(self) -> str:
        return "yes"

    def close(self) -> None: ...

    def _show(self) -> Observation:
        import numpy as np

        shade = 37 if self.turn == 1 and self.seed % 2 else 200
        pixels = np.full((64, 64, 3), shade + self.turn, np.uint8)
        data = encode_png(pixels)
        if shade == 37 and self.fault == "corrupt":
            data = data[:40]
        origin = "faulty page" if shade == 37 else "fine page"
        return Observation((user(self.store.put(data, "picture", origin), "?"),))


def album(fault: str) -> dict[str, Any]:
    worlds = {"environment": f"{HERE}:Album", "options": {"fault": fault}, "size": 8}
    rollout = {"max_new_tokens": 3, "max_turns": 3, "environment_deadline_s": DEADLINE_S}
    batch = {"prompts_per_step": 8, "group_size": 2}
    return {
        "tasks": {"train": [{"source": "environments", "options": worlds}]},
        "rollout": rollout,
        "batch": batch,
        "rewards": RECIPE["rewards"] | {"terms": [{"name": "environment"}]},
    }


@pytest.mark.parametrize(
    ("fault", "told"),
    [("raise", "the album is torn"), ("hang", f"did not answer step within {DEADLINE_S:g} s"), ("corrupt", "faulty page")],
)
def test_a_world_that_fails_costs_its_episode_and_the_run_goes_on(fault: str, told: str, tmp_path: Path) -> None:
    rows, episodes = run(tmp_path / "run", **album(fault))
    failed = [e for e in episodes if e.status == Status.FAILED]
    assert failed
    assert len(failed) < len(episodes)
    assert all(told in e.failure and e.task_id in e.failure and "turn" in e.failure for e in failed)
    assert all(e.reward is None for e in failed)
    assert [row["episodes/failed"] for row in rows] == [len(failed)] * 2
    ledger = Ledger(tmp_path / "run/ledger.sqlite")
    assert len(ledger.deadlines()) == (2 * len(failed) if fault == "hang" else 0)
    assert {ledger.fates(1)[e.id][:6] for e in failed} == {"failed"}


def test_features_that_do_not_fit_name_task_turn_and_item(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    whole: Callable[..., Any] = Policy.encode

    def short(policy: Policy, media: Any) -> Any:
        features = whole(policy, media)
        for item in features:
            if item.origin == "faulty page":
                features[item] = type(features[item])(
                    features[item].embeds_NH[:-1], tuple(level[:-1] for level in features[item].deepstack_NH)
                )
        return features

    monkeypatch.setattr(Policy, "encode", short)
    rows, episodes = run(tmp_path / "run", **album(""))
    failed = [e for e in episodes if e.status == Status.FAILED]
    assert failed
    assert all(e.task_id in e.failure and "turn 1" in e.failure and "faulty page" in e.failure for e in failed)
    assert rows[1]["episodes/failed"] == len(failed)


def test_a_non_finite_update_keeps_the_batch_and_is_reproduced(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import sensorium.algorithms.losses as clip

    right = clip.clip

    def wrong(tokens: Any, clip_low: float, clip_high: float, dual_clip: float | None) -> Any:
        found = right(tokens, clip_low=clip_low, clip_high=clip_high, dual_clip=dual_clip)
        return type(found)(found.loss_N * float("nan"), found.clipped_N)

    terms = [{"name": "exact"}, {"name": f"{HERE}:ByIndex"}]
    monkeypatch.setattr(clip, "clip", wrong)
    with pytest.raises(NonFiniteUpdate, match="sensorium replay"):
        run(tmp_path / "run", rewards=RECIPE["rewards"] | {"terms": terms})
    kept = tmp_path / "run/kept/step_000001"
    assert not (tmp_path / "run/metrics.jsonl").exists()
    with pytest.raises(NonFiniteUpdate):
        replay(kept)
    monkeypatch.setattr(clip, "clip", right)
    assert replay(kept)["policy/grad_norm"] > 0
    (kept / "recipe.yaml").unlink()
    with pytest.raises(CheckpointError, match=r"lacks recipe\.yaml, which belong to a kept batch"):
        replay(kept)


class ByIndex:
    """Pays the members of a group differently."""

    name = "index"
    instant = True

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        return (Score("index", float(episode.index)),)


def rows_file(folder: Path, *lines: str) -> dict[str, Any]:
    path = folder / "tasks.jsonl"
    path.write_text("\n".join(lines) + "\n")
    return {"train": [{"source": "jsonl", "options": {"path": str(path)}}]}


def asking(text: str, id: str, *pictures: str) -> str:
    blocks = [{"type": "image", "path": path} for path in pictures] + [{"type": "text", "text": text}]
    return json.dumps({"id": id, "messages": [{"role": "user", "content": blocks}], "answer": "red"})


def test_bad_pictures_are_refused_by_file_and_line_or_skipped_and_counted(tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG torn")
    lines = [asking("What?", "a"), asking("What?", "b", "torn.png"), asking("What?", "c"), asking("What?", "d", "none.png")]
    tasks = rows_file(tmp_path, *lines)
    with pytest.raises((MediaError, TaskError), match=r"tasks\.jsonl:[24]"):
        run(tmp_path / "refused", tasks=tasks)
    rows, _ = run(tmp_path / "skipped", tasks=tasks | {"on_bad_row": "skip"})
    assert sum(row["tasks/skipped_bad"] for row in rows) >= 2
    assert all(row["groups/trained"] == 3 for row in rows)


def test_a_start_that_failed_leaves_the_directory_free_and_a_run_does_not(tmp_path: Path) -> None:
    folder = tmp_path / "run"
    with pytest.raises(ModelError, match="no such folder"):
        run(folder, model={"path": "/no/such/model"})
    rows, _ = run(folder)
    assert len(rows) == 2
    with pytest.raises(RecipeError, match="--resume"):
        run(folder)


def test_over_long_prompts_are_refused_or_skipped_and_counted(tmp_path: Path) -> None:
    tasks = rows_file(tmp_path, asking("What?", "a"), asking("What " * 200, "b"), asking("Where?", "c"))
    rollout = {"max_new_tokens": 5, "max_context_tokens": 64}
    with pytest.raises(PromptTooLong, match="max_context_tokens is 64"):
        run(tmp_path / "refused", tasks=tasks, rollout=rollout)
    rows, _ = run(tmp_path / "skipped", tasks=tasks | {"on_long_prompt": "skip"}, rollout=rollout)
    assert sum(row["tasks/skipped_long"] for row in rows) >= 1
    assert all(row["groups/trained"] == 3 for row in rows)


@pytest.mark.parametrize("planner", ["mixture", "success_curriculum"])
def test_a_run_none_of_whose_prompts_fits_ends_once_every_task_was_looked_at(planner: str, tmp_path: Path) -> None:
    lines = [asking("What " * 200, f"long-{i}") for i in range(7)]
    tasks = rows_file(tmp_path, *lines) | {"on_long_prompt": "skip", "planner": {"name": planner}}
    said = (
        r"^7 different tasks were looked at, and none can be played\. The last: task long-\d: the prompt takes \d+ tokens "
        r"and rollout\.max_context_tokens is 64\. Raise rollout\.max_context_tokens, or shorten the prompts"
    )
    with pytest.raises(TaskError, match=said) as raised:
        run(tmp_path / "run", tasks=tasks, rollout={"max_new_tokens": 5, "max_context_tokens": 64})
    assert "skip" not in str(raised.value), "that is set already"


def test_a_run_none_of_whose_media_is_sound_ends_with_the_last_reason(tmp_path: Path) -> None:
    (tmp_path / "torn.png").write_bytes(b"\x89PNG torn")
    tasks = rows_file(tmp_path, *[asking("What?", f"torn-{i}", "torn.png") for i in range(5)]) | {"on_bad_row": "skip"}
    said = r"every task of the mixture was skipped: 5 rows, and none can be played.*tasks\.jsonl:\d.*tasks\.train"
    with pytest.raises(TaskError, match=said) as raised:
        run(tmp_path / "run", tasks=tasks)
    assert "on_bad_row" not in str(raised.value), "that is set already"


def test_a_frozen_group_does_not_move_and_others_do(tmp_path: Path) -> None:
    from safetensors.torch import load_file

    from sensorium.models.checkpoint_path import find_checkpoint

    terms = [{"name": f"{HERE}:ByIndex"}]
    model = {"path": "package:shapes", "freeze": ["vision"]}
    run(tmp_path / "run", model=model, rewards=RECIPE["rewards"] | {"terms": terms})
    before = load_file(Path(find_checkpoint("package:shapes")) / "model.safetensors")
    after = load_file(tmp_path / "run/checkpoints/step_000002/model.safetensors")
    moved = {name for name in after if not torch.equal(before[name].float(), after[name])}
    assert any("language_model" in name for name in moved)
    assert all("visual" not in name or "merger" in name for name in moved)


def test_a_term_cannot_take_the_name_of_a_metric_of_all_terms(tmp_path: Path) -> None:
    terms = [{"name": "exact", "options": {"name": "mean"}}]
    with pytest.raises(RecipeError, match="'mean' is that of a metric"):
        run(tmp_path / "run", rewards=RECIPE["rewards"] | {"terms": terms})


def test_tasks_without_the_answer_that_a_term_needs_are_refused_or_said_at_the_start(tmp_path: Path) -> None:
    from sensorium.report.watcher import Watcher

    class Listening(Watcher):
        said: list[str] = []  # noqa: RUF012

        def noted(self, text: str) -> None:
            self.said.append(text)

    lacking = json.dumps({"id": "b", "messages": [{"role": "user", "content": "What?"}]})
    with pytest.raises(TaskError, match=r"1 of 1 tasks looked at have no answer, 'b' for one, and the reward term exact"):
        run(tmp_path / "refused", tasks=rows_file(tmp_path, lacking))
    shown = json.dumps({**json.loads(lacking), "demonstration": "a"})
    warm = {"tasks": rows_file(tmp_path, shown), "steps": 0, "warm_start": {"steps": 1, "prompts_per_step": 1}}
    recipe = parse_recipe(json.dumps(RECIPE | warm), "test", [])
    open_trainer(recipe, RunDirectory(tmp_path / "warm").create(), watchers=[Listening()]).close()
    assert not any("have no answer" in text for text in Listening.said), "a warm start alone pays nothing"
    tasks = rows_file(tmp_path, asking("What?", "a"), lacking)
    recipe = parse_recipe(json.dumps(RECIPE | {"tasks": tasks}), "test", [])
    open_trainer(recipe, RunDirectory(tmp_path / "run").create(), watchers=[Listening()]).close()
    assert any("tasks.train: 1 of 2 tasks looked at have no answer" in text for text in Listening.said)


def test_a_run_that_cannot_start_ends_the_processes_that_it_has_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pids: list[int | None] = []

    def refused(recipe: Any, session: Any, *others: Any) -> None:
        pids.extend(row.pid for row in session.processes)
        raise RecipeError("no room for ranks")

    monkeypatch.setattr("sensorium.trainer.run.local_learner", refused)
    terms = {"terms": [{"name": "tests.cluster.slow_term:SlowParity"}]}
    with pytest.raises(RecipeError, match="no room for ranks"):
        run(tmp_path / "run", cluster={"rewards": 1}, rewards=terms)
    assert all(pids)
    assert len(pids) == 1
    assert not alive(pids[0])
