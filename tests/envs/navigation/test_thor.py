"""AI2-THOR: our side of its API, against a stand-in with the shape of its controller; the real one is asked if there."""

import inspect
import json
import math
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, ClassVar

import httpx
import numpy as np
import pytest

from sensorium.data.environment_tasks import EnvironmentTasks
from sensorium.data.media_store import MediaStore
from sensorium.envs.ai2thor import MOVES, TURNS
from sensorium.recipe.registry import build, plays_for_anybody, resolve
from sensorium.services.sessions import Offer, Offers, SessionTable
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError

from ...services.running import serving

POSE = {"position": {"x": 0.0, "y": 0.9, "z": 0.0}, "rotation": 90, "horizon": 0}


class Controller:
    """Answers as AI2-THOR's controller does: events with a frame and metadata."""

    made: ClassVar[list[dict[str, Any]]] = []
    stopped = 0

    def __init__(self, **options: Any) -> None:
        self.made.append(options)
        self.side = options["height"]
        self.at, self.turn = [0.0, 0.0], 0.0

    def reset(self, scene: str) -> Any:
        assert scene == "FloorPlan1"
        return self._event(True)

    def step(self, action: str, **asked: Any) -> Any:
        if action == "Teleport":
            assert set(asked) == {"position", "rotation", "horizon", "standing"}
            self.at, self.turn = [asked["position"]["x"], asked["position"]["z"]], asked["rotation"]["y"]
        elif action.startswith("Move"):
            angle = math.radians(self.turn + 90 * (0, 2, 1, 3)[MOVES.index(action)])
            self.at[0] += asked["moveMagnitude"] * math.sin(angle)
            self.at[1] += asked["moveMagnitude"] * math.cos(angle)
        else:
            assert (action, asked["degrees"]) in TURNS
            self.turn += {"RotateRight": 90, "RotateLeft": -90}.get(action, 0)
        return self._event(action != "LookUp")

    def stop(self) -> None:
        Controller.stopped += 1

    def _event(self, worked: bool) -> Any:
        agent = {
            "position": {"x": self.at[0], "y": 0.9, "z": self.at[1]},
            "rotation": {"x": 0, "y": self.turn % 360, "z": 0},
        }
        frame = np.full((self.side, self.side, 3), int(self.turn) % 256, np.uint8)
        self.last_event = SimpleNamespace(frame=frame, metadata={"agent": agent, "lastActionSuccess": worked})
        return self.last_event


@pytest.fixture
def tasks(tmp_path: Path) -> str:
    listed = [
        {
            "scene": "FloorPlan1",
            "instruction": f"go {n}",
            "agentPose": POSE,
            "target_position": {"x": 4.0 + n, "y": 0, "z": 0.0},
        }
        for n in range(8)
    ]
    (tmp_path / "base.json").write_text(json.dumps({"tasks": listed}))
    return str(tmp_path / "base.json")


@pytest.fixture
def thor(monkeypatch: pytest.MonkeyPatch) -> None:
    package, controller, platform = ModuleType("ai2thor"), ModuleType("ai2thor.controller"), ModuleType("ai2thor.platform")
    controller.Controller, platform.CloudRendering = Controller, "cloud"  # type: ignore[attr-defined]
    package.platform, package.controller = platform, controller  # type: ignore[attr-defined]
    for module in (package, controller, platform):
        monkeypatch.setitem(sys.modules, module.__name__, module)
    Controller.made.clear()


def test_a_walk_of_vagens_task_is_paid_at_the_target(thor: None, tasks: str) -> None:
    options = {"tasks": tasks, "response_format": "grounding", "state_reward": 1.0, "resolution": 64}
    environment = build("environment", "ai2thor", options, "x", store=MediaStore())
    _, first = environment.reset(9)
    assert first.messages[0].content[0].text.startswith("go 1\n")
    assert Controller.made[0]["platform"] == "cloud"
    look = "<think><observation>target at (5, 12)</observation><reasoning/></think>"
    said = "<think><observation>target at (5, 12)</observation><reasoning>on</reasoning></think><answer>{}</answer>"
    assert environment.step(look + "<answer>lookup</answer>").reward["format"] == 0.0
    result = environment.step(said.format("rotateleft, moveright, moveright, moveright, moveright"))
    assert result.reward == {"success": 0.0, "format": 0.5, "observation": 1.0}
    assert result.info["distance"] == 3.0
    result = environment.step(said.format("rotateright, moveahead, moveahead, moveahead, moveahead"))
    assert (result.success, result.reward["success"]) == (True, 10.0)
    assert result.info["actions"] == "rotateright, moveahead, moveahead, moveahead"
    with pytest.raises(EnvironmentFailure):
        environment.demonstrate()
    environment.close()
    assert Controller.stopped == 1


def test_a_walk_by_the_names_of_todays_vagen(thor: None, tasks: str) -> None:
    options = {"tasks": tasks, "response_format": "wm", "resolution": 64, "action_names": "move_forward"}
    environment = build("environment", "ai2thor", options, "x", store=MediaStore())
    head, _ = environment.reset(9)
    assert "move_forward, move_backward, move_right and move_left take a step" in head[0].text
    assert "<action>move_forward| move_forward</action><prediction>" in head[0].text
    said = "<observation>o</observation><think>t</think><action>{}</action><prediction>p</prediction>"
    result = environment.step(said.format("turn_left|move_right| move_right |move_right|move_right"))
    assert (result.reward, result.info["distance"]) == ({"success": 0.0, "format": 0.5}, 3.0)
    assert environment.step(said.format("rotateright, moveahead")).info["actions"] == ""


def test_tasks_of_a_file_are_split_by_content_and_only_a_recipe_names_the_file(thor: None, tasks: str) -> None:
    kind = resolve("environment", "ai2thor")
    assert not plays_for_anybody(kind)
    sides = [EnvironmentTasks("ai2thor", MediaStore(), {"tasks": tasks}, side, 1) for side in ("train", "test")]  # type: ignore[arg-type]
    assert not {s % 8 for s in sides[0].seeds} & {s % 8 for s in sides[1].seeds}


def test_what_is_missing_is_said(tasks: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ai2thor", None)
    environment = build("environment", "ai2thor", {"tasks": tasks}, "x", store=MediaStore())
    with pytest.raises(RecipeError, match=r"pip install 'sensorium\[ai2thor\]'"):
        environment.reset(0)
    (tmp_path / "bad.json").write_text('{"tasks": [{"scene": "FloorPlan1"}]}')
    with pytest.raises(RecipeError, match="task 0 of"):
        build("environment", "ai2thor", {"tasks": str(tmp_path / "bad.json")}, "x", store=MediaStore())
    with pytest.raises(RecipeError, match="cannot be read"):
        build("environment", "ai2thor", {"tasks": str(tmp_path)}, "x", store=MediaStore())
    sound = Path(tasks).read_text()
    for place, (old, new) in enumerate(
        (('"x": 5.0', '"x": NaN'), ('"x": 5.0', '"x": 1e999'), ('"y": 0', '"x": 3, "y": 0'))
    ):
        path = tmp_path / f"bad{place}.json"  # task files are cached by name
        path.write_text(sound.replace(old, new))
        with pytest.raises(RecipeError, match="'x'" if "3" in new else "task 1 of"):
            build("environment", "ai2thor", {"tasks": str(path)}, "x", store=MediaStore())


def test_the_real_package_has_what_is_used_of_it() -> None:
    controller = pytest.importorskip("ai2thor.controller", reason="ai2thor is an extra that the tests do not install")
    platform, server = pytest.importorskip("ai2thor.platform"), pytest.importorskip("ai2thor.server")
    taken = inspect.signature(controller.Controller.__init__).parameters
    assert {"platform", "server_timeout", "server_start_timeout", "gpu_device", "width", "height"} <= set(taken)
    assert any(parameter.kind == parameter.VAR_KEYWORD for parameter in taken.values())  # agentMode, gridSize, …
    assert hasattr(platform, "CloudRendering")
    assert "self.last_event" in inspect.getsource(controller.Controller)
    assert "self.frame" in inspect.getsource(server.Event)


def test_a_service_plays_the_eval_set_that_a_client_names(thor: None, tasks: str, tmp_path: Path) -> None:
    """As VAGEN's own service: env_name navigation with an eval_set, by the task files that the server names."""
    common = json.loads(Path(tasks).read_text())
    common["tasks"] = [task | {"instruction": "find the tap"} for task in common["tasks"]]
    (tmp_path / "common_sense.json").write_text(json.dumps(common))
    rooms = Offer("ai2thor", {"tasks": str(tmp_path / "{eval_set}.json")})
    offers = Offers({"navigation": Offer("navigation"), "rooms": rooms})
    configs = {
        name: {"env_name": "navigation", "env_config": {"eval_set": name, "render_mode": "vision"}}
        for name in ("base", "common_sense", "../common_sense")
    }
    with serving(SessionTable(offers, MediaStore())) as address, httpx.Client(base_url=address) as http:
        assert http.post("/environments", json={"ids2configs": configs}).json() == {"success": True}
        shown = http.post("/batch/reset", json={"ids2seeds": dict.fromkeys(configs, 3)}).json()["results"]
        assert "go 3" in shown["base"][0]["obs_str"]
        assert "find the tap" in shown["common_sense"][0]["obs_str"]
        assert "eval_set" in shown["../common_sense"][1]["error"]
        assert http.post("/batch/close", json={"env_ids": list(configs)}).status_code == 200
    with pytest.raises(RecipeError, match="server's own"):
        offers.chosen("rooms", {"tasks": "/etc/passwd"})
    assert offers.chosen("rooms", {"tasks": rooms.options["tasks"]})[0] == "ai2thor"
