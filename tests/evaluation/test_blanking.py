"""Evaluations with media blanked: what the model is shown changes, what environments reward and tasks ask does not."""

import asyncio
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import sensorium as sn
from sensorium.assembly.session import model_session
from sensorium.cli.main import main
from sensorium.data.made_media import encode_clip
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo
from sensorium.envs.protocol import Observation, StepResult
from sensorium.evaluation.evaluate import evaluate_into
from sensorium.rollout.blanking import blanked, blanking
from sensorium.vocabulary import Task, system, user
from sensorium.vocabulary.content import MediaKind
from sensorium.vocabulary.decoding import VideoParameters
from sensorium.vocabulary.errors import RecipeError
from tests.evaluation.test_command import rows_of
from tests.evaluation.test_environments import LAKE
from tests.recipes import parsed, quick


class Plain:
    def reset(self, seed: int) -> Any:
        return (system("head"),), Observation((user("picture"),))

    def step(self, response: str) -> Any:
        return StepResult(Observation((user("picture"),)), reward=0.5, info={"said": response})

    def close(self) -> Any:
        self.closed = True


class Later(Plain):
    async def reset(self, seed: int) -> Any:
        return super().reset(seed)

    async def step(self, response: str) -> Any:
        return super().step(response)

    async def close(self) -> Any:
        super().close()


@pytest.mark.parametrize("environment", [Plain(), Later()], ids=["plain", "async"])
def test_what_an_environment_shows_is_blanked_and_what_it_pays_is_not(environment: Any) -> None:
    watched = blanked(environment, lambda messages: tuple(user("blank") for _ in messages))
    assert getattr(watched, "instant", False) is False

    async def call(method: Any, *arguments: Any) -> Any:
        returned = method(*arguments)
        return await returned if asyncio.iscoroutine(returned) else returned

    head, observation = asyncio.run(call(watched.reset, 0))
    result = asyncio.run(call(watched.step, "left"))
    assert [message.text for message in (*head, *observation.messages)] == ["blank", "blank"]
    assert result.observation.messages[0].text == "blank"
    assert (result.reward, result.info) == (0.5, {"said": "left"})
    asyncio.run(call(watched.close))
    assert environment.closed


def test_with_pictures_blanked_only_the_text_decides_the_answer(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    command = ["eval", "shapes", "--model", "package:shapes", "--greedy", "--limit", "48", "threads=1"]
    assert main(command) == main([*command, "--blank", "picture"]) == 0
    assert "--blank" in capsys.readouterr().out
    seen, blind = (Path(f"runs/eval_shapes_package_shapes_greedy_first48{end}") for end in ("", "_blank_picture"))
    answers: list[dict[str, set[str]]] = []
    for folder in (seen, blind):
        answers.append({})
        for row in rows_of(folder):
            question = row["messages"][0]["content"][1]["text"]
            answers[-1].setdefault(question, set()).add(row["response"])
    assert any(len(given) > 1 for given in answers[0].values())
    assert all(len(given) == 1 for given in answers[1].values())
    assert json.loads((blind / "summary.json").read_text())["blanked"] == ["picture"]
    assert main([*command, "--out", str(blind)]) == 2, "another evaluation"
    assert main(["compare", str(seen), str(blind)]) == 0
    assert any("blank" in note for note in json.loads((blind / "comparison.json").read_text())["notes"])
    again = sn.evaluate("shapes", "package:shapes", limit=48, blank="picture", threads=1, show=False)
    assert (again.folder, again.accuracy) == (blind, json.loads((blind / "summary.json").read_text())["accuracy"])
    with pytest.raises(RecipeError, match="smell"):
        sn.evaluate("shapes", "package:shapes", blank=["picture", "smell"])  # type: ignore[list-item]


def test_what_no_task_shows_cannot_be_blanked(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out"
    command = ["eval", "shapes", "--model", "package:shapes", "--limit", "2", "--out", str(out), "threads=1"]
    assert main([*command, "--blank", "sound"]) == 2
    assert "sound" in capsys.readouterr().err
    assert not out.exists()


def test_what_an_environment_shows_is_blanked_in_every_turn(tmp_path: Path) -> None:
    tasks, rewards = {"train": [LAKE], "evaluate": [LAKE]}, {"terms": [{"name": "environment"}]}
    recipe = parsed(quick("lake", tasks=tasks, rewards=rewards, rollout={"max_turns": 3}), tmp_path / "run")
    evaluate_into(tmp_path / "out", recipe, "package:shapes", blank=["picture"])
    for row in rows_of(tmp_path / "out"):
        parts = [part for message in row["conversation"] if message["role"] == "user" for part in message["content"]]
        shown = [part["hash"] for part in parts if "hash" in part]
        assert (len(shown), len(set(shown))) == (3, 1)


@pytest.mark.parametrize("kinds", [("sound",), ("video",), ("video", "sound")], ids="+".join)
def test_the_sound_of_a_video_is_a_sound(tmp_path: Path, kinds: tuple[MediaKind, ...]) -> None:
    noise = np.random.default_rng(0)
    frames = noise.integers(0, 255, (4, 56, 56, 3), np.uint8)
    clip = encode_clip(frames, 4.0, noise.uniform(-0.5, 0.5, 16000).astype(np.float32))
    recipe = parsed(quick("heard", model={"path": "tiny:qwen2_5_omni"}), tmp_path / "run")
    with model_session(recipe, recipe.model.path) as session:
        asked = VideoParameters(frames=4, use_audio_in_video=True)
        message = user(session.store.put(clip, "video", "clip", asked), "What is it?")
        _, shown = blanking(kinds, session.rollout).make_environment(Task("one", (message,))).reset(0)
        (video,), decoder = shown.messages[0].media, session.policy.chat.decoder
        assert video.sound is not None
        seen, heard = decoder.get(video), decoder.get(video.sound)
        assert isinstance(seen, DecodedVideo)
        assert isinstance(heard, DecodedAudio)
        assert (np.ptp(seen.frames) <= 2, np.abs(heard.samples).max() == 0) == ("video" in kinds, "sound" in kinds)
        layout = session.rollout.chat.layout
        render = session.rollout.renderer.start
        assert len(layout(render(shown.messages))) == len(layout(render((message,))))
        assert shown.messages[0].text == message.text
