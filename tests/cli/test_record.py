"""Demonstrations are recorded once: by themselves, a person, a checkpoint or a server; whole rows, whatever happens."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

import sensorium as sn
from sensorium.cli.main import main
from sensorium.data.demonstrations import DemonstrationRows
from sensorium.data.media_store import MediaStore
from sensorium.envs.protocol import Observation, StepResult
from sensorium.vocabulary.content import Message, user
from sensorium.vocabulary.errors import EnvironmentFailure, MediaError, SensoriumError
from tests.rewards.judges.server import Answer, JudgeServer, judge_server

SOKOBAN = {"source": "environments", "options": {"environment": "sokoban", "size": 4, "options": {"max_turns": 3}}}
COUNTING = {
    "source": "environments",
    "options": {"environment": "tests.cli.test_record:Counting", "size": 6, "split_by": "seed"},
}


class Counting:
    """Asks twice for the number it shows; ``die_at`` ends the process with SIGKILL at that many resets of its file."""

    instant = True

    def __init__(self, store: MediaStore, die_at: int = 0, fails: int = -1) -> None:
        self.die_at, self.fails, self.turn, self.seed = die_at, fails, 0, 0

    def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self.seed, self.turn = seed, 0
        with Path("resets").open("a") as file:
            file.write(".")
        if len(Path("resets").read_text()) == self.die_at:
            os.kill(os.getpid(), signal.SIGKILL)
        if seed == self.fails:
            raise EnvironmentFailure("it is not there")
        return (), Observation((user(f"Write {seed % 10}."),))

    def step(self, response: str) -> StepResult:
        self.turn += 1
        right = response.strip() == str(self.seed % 10)
        return StepResult(Observation((user("Again."),)), float(right), done=self.turn == 2)

    def demonstrate(self) -> str:
        return str(self.seed % 10)

    def close(self) -> None:
        pass


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def recipe(source: dict[str, Any] = COUNTING, **options: Any) -> dict[str, Any]:
    options = {**source["options"], "options": source["options"].get("options", {}) | options}
    return {
        "name": "mine",
        "steps": 1,
        "model": {"path": "package:frozen_lake", "device": "cpu"},
        "tasks": {"train": [source | {"options": options}]},
        "rollout": {"max_turns": 3, "max_new_tokens": 8, "concurrency": 2},
        "rewards": {"terms": [{"name": "environment"}]},
        "warm_start": {"steps": 2, "prompts_per_step": 2},
    }


def written(data: dict[str, Any]) -> str:
    Path("mine.json").write_text(json.dumps(data))
    return "mine.json"


def rows(folder: str = "demonstrations/mine") -> list[dict[str, Any]]:
    return [json.loads(line) for line in (Path(folder) / "rows.jsonl").read_text().splitlines()]


def test_a_row_is_the_whole_conversation_with_its_media_beside_it() -> None:
    found = sn.record(recipe(SOKOBAN), show=False)
    assert len(found) == 4
    for place, row in enumerate(found):
        assert row["place"] == place
        assert row["environment"]["name"] == "sokoban"
        roles = [message["role"] for message in row["messages"]]
        assert roles == ["system"] * row["head"] + ["user", "assistant"] * len(row["turns"])
        pictures = [b for m in row["messages"] if m["role"] == "user" for b in m["content"] if b["type"] == "image"]
        assert len(pictures) == len(row["turns"])
        for picture in pictures:
            data = (found.folder / picture["path"]).read_bytes()
            assert MediaStore().put_picture(data, "").hash == Path(picture["path"]).stem
    assert found.summary.missing == 0


def test_episodes_below_the_floor_are_left_out_and_named() -> None:
    terms = {"rewards": {"terms": [{"name": "tests.cli.test_record:Odd"}]}}
    found = sn.record(recipe() | terms, min_reward=1.0, show=False)
    assert {Odd.half(row["environment"]["seed"]) for row in found} == {1}
    assert {row["reward"] for row in found} == {1.0}
    assert set(found.left_out["why"]) == {"reward below 1"}
    assert set(found.left_out["reward"]) == {0.0}
    assert len(found) + len(found.left_out) == 6


class Odd:
    """Rewards tasks the half of whose seed is odd."""

    name, instant = "odd", True

    @staticmethod
    def half(seed: int) -> int:
        return seed // 2 % 2

    def score(self, task: sn.Task, episode: sn.Episode) -> tuple[sn.Score, ...]:
        assert task.environment is not None
        return (sn.Score("odd", float(self.half(task.environment.seed))),)


@pytest.mark.usefixtures("forked_python")
def test_kill_9_leaves_whole_rows_and_the_same_command_plays_what_is_missing() -> None:
    sn.record(recipe(), to="whole", show=False)
    named = written(recipe(die_at=12))  # six of the recording above, then the sixth of this one
    command = [sys.executable, "-m", "sensorium", "record", named]
    place = {"PYTHONPATH": os.pathsep.join([str(Path(__file__).parents[2]), *sys.path]), **os.environ}
    killed = subprocess.run(command, env=place, capture_output=True, timeout=300)
    assert killed.returncode == -signal.SIGKILL
    before = rows()
    assert 0 < len(before) < 6
    assert sn.Demonstrations("demonstrations/mine").summary.missing == 6 - len(before)
    with Path("demonstrations/mine/rows.jsonl").open("a") as file:
        file.write('{"place": 5, "sam')  # what a kill in the middle of a write leaves
    resets = len(Path("resets").read_text())
    assert main(["record", named]) == 0
    assert len(Path("resets").read_text()) - resets == 6 - len(before)
    ours, whole = rows(), rows("whole")
    assert [row["messages"] for row in ours] == [row["messages"] for row in whole]
    assert [row["place"] for row in ours] == list(range(6))


def test_failed_episodes_are_missing_and_are_played_again(capsys: pytest.CaptureFixture[str]) -> None:
    whole = sn.record(recipe(), to="whole", show=False)
    lost = whole[2]["environment"]["seed"]
    assert main(["record", written(recipe(fails=lost))]) == 1
    assert "it is not there" in capsys.readouterr().err
    assert [row["id"] for row in rows()] == [row["id"] for row in whole if row["environment"]["seed"] != lost]
    assert sn.record(recipe(fails=lost), show=False).summary.missing == 1


def test_a_recording_of_something_else_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    sn.record(recipe(), limit=2, show=False)
    some = sn.record(recipe(), limit=3, show=False)  # more of the same
    whole = sn.record(recipe(), to="whole", show=False)
    assert [row["id"] for row in some] == [whole[at]["id"] for at in (5, 4, 3)], "RL begins with the others"
    with pytest.raises(SensoriumError):
        sn.record(recipe(), limit=3, min_reward=0.5, show=False)
    with pytest.raises(SensoriumError):
        sn.record(recipe(die_at=1000), limit=3, show=False)
    Path("full").mkdir()
    Path("full/precious").write_text("")
    with pytest.raises(SensoriumError):
        sn.record(recipe(), to="full", show=False)
    assert main(["train", written(recipe()), "warm_start.demonstrations=nowhere"]) == 2
    assert "sensorium record" in " ".join(capsys.readouterr().err.split())
    assert not Path("runs/mine").exists()


def test_a_person_records_until_the_input_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("7\n8\n9\n"))
    assert main(["record", written(recipe()), "--from", "person"]) == 1
    (row,) = rows()
    assert [m["content"] for m in row["messages"] if m["role"] == "assistant"] == ["7", "8"]


def test_a_checkpoint_records_samples_that_repeat() -> None:
    once = sn.record(recipe(), "package:frozen_lake", limit=2, samples=2, to="once", show=False)
    again = sn.record(recipe(), "package:frozen_lake", limit=2, samples=2, to="again", show=False)
    decided = len(once) + len(once.left_out)
    assert decided == 4
    assert [row["messages"] for row in once] == [row["messages"] for row in again]


def test_a_served_model_is_asked_with_the_conversation_and_each_question_once() -> None:
    def write(request: dict[str, Any]) -> str:
        return request["messages"][0]["content"].split()[1].rstrip(".")

    def asked(server: JudgeServer, **order: Any) -> Any:
        return sn.record(recipe(), server.url, model="teacher", min_reward=2.0, show=False, **order)

    with judge_server(write) as server:
        found = asked(server, limit=3)
        assert len(found) == 3
        roles = {tuple(message["role"] for message in request["messages"]) for request in server.asked}
        assert roles == {("user",), ("user", "assistant", "user")}
        assert {request["model"] for request in server.asked} == {"teacher"}
        assert all(row["reward"] == 2.0 for row in found)
        count = len(server.asked)
        asked(server, limit=3)
        assert len(server.asked) == count


def test_a_server_that_does_not_answer_is_not_asked_for_every_task() -> None:
    with judge_server(lambda request: Answer(status=500)) as server:
        changed = recipe() | {"judges": {"retries": 0}}
        found = sn.record(changed, server.url, model="teacher", show=False)
        assert found.summary.missing == 6
        assert len(server.asked) == 2  # of the first lot
        assert not list(found)


def test_validate_reads_every_recorded_row(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sn.record(recipe(SOKOBAN), show=False).folder
    command = ["validate", written(recipe(SOKOBAN)), f"warm_start.demonstrations={folder}"]

    def level() -> str:
        code, shown = main(command), " ".join(capsys.readouterr().out.split())
        return f"{code} {'warm_start.demonstrations' in shown}"

    assert level() == "0 True"
    next((folder / "media").iterdir()).unlink()
    assert level() == "1 True"


def test_show_prints_a_recorded_episode(capsys: pytest.CaptureFixture[str]) -> None:
    folder = sn.record(recipe(SOKOBAN), show=False).folder
    name = written(recipe(SOKOBAN))
    assert main(["show", name, "--split", "demonstrations", "--task", "2", f"warm_start.demonstrations={folder}"]) == 0
    shown = capsys.readouterr().out
    assert rows()[2]["id"] in shown
    assert shown.count("<answer>") == len(rows()[2]["turns"])
    assert list(Path("runs/show/mine").glob("picture_*.png"))
    assert main(["show", name, "--split", "demonstrations"]) == 2


def turned(row: dict[str, Any]) -> None:
    row["turns"] = [1, 9]


def before_the_first(row: dict[str, Any]) -> None:
    row["head"] = -1


def placeless(row: dict[str, Any]) -> None:
    del row["place"]


def worthless(row: dict[str, Any]) -> None:
    row["reward"] = "high"


@pytest.mark.parametrize("damage", [turned, before_the_first, placeless, worthless])
def test_a_damaged_row_is_an_error_that_names_its_line(damage: Callable[[dict[str, Any]], None]) -> None:
    folder = sn.record(recipe(), show=False).folder
    changed = rows()
    damage(changed[1])
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in changed))
    with pytest.raises(SensoriumError, match=r"rows\.jsonl(:|, line )2"):
        list(DemonstrationRows(folder, MediaStore()))


def test_media_that_were_exchanged_are_refused() -> None:
    folder = sn.record(recipe(SOKOBAN), show=False).folder
    one, other = sorted((folder / "media").iterdir())[:2]
    one.rename(folder / "third")
    other.rename(one)
    (folder / "third").rename(other)
    with pytest.raises(MediaError, match=f"{one.name}|{other.name}"):
        list(DemonstrationRows(folder, MediaStore()))
