"""docs/guides/environments.md: its examples are validated, played and trained, with a real service where they need one."""

import asyncio
import io
import json
import re
import socketserver
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gymnasium import spaces
from PIL import Image

from sensorium.cli.main import main
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.actions import ActionGrammar
from sensorium.envs.adapters.content import text_form
from sensorium.envs.adapters.gymnasium import actions_of
from sensorium.envs.tool_use import Toolbox, ToolCall, ToolContext
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import RolloutSection
from sensorium.recipe.yaml import read_yaml
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.terms import EnvironmentReward
from sensorium.rollout.play import Attempt, Rollout
from sensorium.trainer.run import train
from sensorium.vocabulary import EnvironmentSpec, Status, Task, user

PAGE = (Path(__file__).parents[2] / "docs/guides/environments.md").read_text()


class Service(socketserver.StreamRequestHandler):
    """Thinks of the number it is sent first, and says of each guess how the number lies."""

    def handle(self) -> None:
        number = int(self.rfile.readline())
        for line in self.rfile:
            guess = int(line)
            self.wfile.write(b"right\n" if guess == number else b"higher\n" if guess < number else b"lower\n")


@pytest.fixture
def port() -> Iterator[int]:
    with socketserver.ThreadingTCPServer(("127.0.0.1", 0), Service) as server:
        server.daemon_threads = True
        threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True).start()
        yield server.server_address[1]
        server.shutdown()


def run_block(mark: str) -> dict[str, Any]:
    """The names that a block of the page defines."""
    code: dict[str, Any] = {}
    (block,) = (found for found in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL) if mark in found)
    exec(block, code)
    return code


def test_an_environment_whose_methods_are_coroutines_plays_with_a_service(port: int, tmp_path: Path) -> None:
    code = run_block("class Guess")
    policy = load_policy(str(make_tiny("qwen2_5_vl", tmp_path)), store=MediaStore(), device="cpu")

    def guess(request: Request) -> str:
        return str(1 + request.order[-1])  # 1, 2, 3, …, turn by turn

    rollout = Rollout(
        policy.chat,
        ScriptedEngine(policy.chat, guess),
        RolloutSection(max_turns=5),
        lambda task: code["Guess"](None, port=port),
    )
    task = Task("three", environment=EnvironmentSpec("guess", seed=3))
    (group,) = asyncio.run(rollout.stream([task], 2, Attempt(0, 1), Sampling()).in_order())
    for episode in group.episodes:
        assert (episode.status, episode.failure, episode.info) == (Status.FINISHED, "", {"success": True})
        assert [turn.parts for turn in episode.turns] == [{"goal": 0.0, "turn": -0.1}] * 2 + [{"goal": 1.0, "turn": -0.1}]
    scored = asyncio.run(Scorer([(EnvironmentReward(), 1.0)]).score_group(group)).episodes[0]
    assert {s.name: s.value for s in scored.scores} == {"environment/goal": 1.0, "environment/turn": pytest.approx(-0.3)}
    rollout.close()


def test_the_environment_of_five_minutes_is_validated_played_and_trained(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    code, recipe = (
        next(found for found in re.findall(rf"```{kind}\n(.*?)```", PAGE, re.DOTALL) if "coins" in found.lower())
        for kind in ("python", "yaml")
    )
    Path("coins.py").write_text(code)
    Path("coins.yaml").write_text(recipe)
    assert main(["validate", "coins.yaml"]) == 0
    assert "0 warnings, 0 errors" in capsys.readouterr().out
    monkeypatch.setattr("sys.stdin", io.StringIO("left\nleft\n"))
    assert main(["play", "coins.yaml", "--episodes", "2"]) == 0
    assert capsys.readouterr().out.count("turn 1: larger") == 2
    train(load_recipe("coins.yaml", ["steps=1", "warm_start.steps=1", "health.sight_tasks=0", "threads=1"]))


@pytest.mark.parametrize("coordinates", ["pixels", "relative"])
def test_the_buttons_of_the_page_are_clicked_and_a_wrong_call_is_answered(coordinates: str) -> None:
    code = run_block("class Buttons")
    environment = code["Buttons"](MediaStore(), coordinates=coordinates)
    (head,), first = environment.reset(7)
    asked, _ = environment.start(7)
    assert first.category == asked
    ranges = {"pixels": "0 to 95; y is a whole number from 0 to 63", "relative": "0 to 1000"}
    assert ranges[coordinates] in head.text
    wrong = environment.step("<answer>click(2000, 3)</answer>")
    assert wrong.info == {"valid": False}
    assert "x is 2000" in wrong.observation.messages[0].text
    assert environment.step("<answer>wait</answer>").done is False
    result = environment.step(environment.demonstrate())
    assert (result.success, result.reward) == (True, 1.0)


def test_the_actions_of_the_page_fill_a_dict(tmp_path: Path) -> None:
    (block,) = (found for found in re.findall(r"```yaml\n(.*?)```", PAGE, re.DOTALL) if found.startswith("actions:  "))
    given, _ = read_yaml(block, "page")
    parts = {"kind": spaces.Discrete(4), "at": spaces.Box(0, np.array([159, 209]), dtype=np.int64)}
    space = spaces.Dict(parts | {"distance": spaces.Discrete(50), "text": spaces.Text(20, min_length=0)})
    named, taken = actions_of(space, given["actions"], (), "page")
    grammar = ActionGrammar.declared(*named, coordinates=given["coordinates"])
    (call,) = grammar.read("<answer>drag(500, 500, 20)</answer>").actions
    assert json.loads(text_form(taken(call))) == {"kind": 2, "at": [80, 104], "distance": 20, "text": ""}
    assert not grammar.read("<answer>drag(500, 500, 21)</answer>").valid


def test_the_tool_of_the_page_measures_a_picture_and_tells_a_wrong_call() -> None:
    code = run_block("class Ruler")
    store = MediaStore()
    context = ToolContext(store, Task("t", (user("?"),)), [store.put_picture(encode_png(Image.new("RGB", (8, 5))), "x")])
    box = Toolbox([code["Ruler"](unit="px")], context)
    assert box.run(ToolCall("ruler", {"picture": 0})).text == "8 x 5 px"
    assert "failed: IndexError" in box.run(ToolCall("ruler", {"picture": 3})).text
    wrong = box.run(ToolCall("ruler", {}))
    assert wrong.is_error
    assert "'picture'" in wrong.text
