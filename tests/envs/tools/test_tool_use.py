"""Questions with tools: calls are answered, errors are observations, and only what the model wrote counts."""

import asyncio
import json
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.assembly.playing import EnvironmentMaker
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.rows import JsonlRows
from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.shipped_tools import Calculator, Crop
from sensorium.envs.tool_use import Toolbox, ToolContext, ToolSpec, ToolUse, write_call
from sensorium.models.load import load_policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.registry import build
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary import EnvironmentSpec, Status, Task
from sensorium.vocabulary.content import Media, Message, Text, system, user
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError, TaskError


def toolbox(*tools: Any, deadline_s: float = 30.0) -> Toolbox:
    return Toolbox(tools, ToolContext(MediaStore(), Task("t")), deadline_s)


def run(tools: Toolbox, name: str, /, **arguments: Any) -> Any:
    from sensorium.envs.tool_use import calls_in

    return tools.run(calls_in(write_call(name, arguments))[0])


class Own:
    """A tool of somebody's own, which does what it is told."""

    instant = False

    def __init__(self) -> None:
        self.spec = ToolSpec("own", "Does things.", {"type": "object", "properties": {"what": {"type": "string"}}})

    def call(self, arguments: Mapping[str, Any], context: ToolContext) -> Any:
        what = arguments.get("what", "")
        if what == "hang":
            threading.Event().wait(60)
        if what == "raise":
            raise KeyError("nothing there")
        if what == "exit":
            raise SystemExit(1)
        if what == "lost":
            raise EnvironmentFailure("its server died")
        if what == "coroutine":
            return later()
        return {"text": "fine", "none": None, "many": ["a", Text("b")], "long": "x" * 100_000}[what]


async def later() -> str:
    await asyncio.sleep(0)
    return "later"


def test_results_and_errors_of_a_tool_are_all_results() -> None:
    box = toolbox(Own(), Calculator())
    assert run(box, "own", what="text").text == "fine"
    assert run(box, "own", what="many").text == "ab"
    assert run(box, "own", what="coroutine").text == "later"
    assert len(run(box, "own", what="long").text) < 30_000
    for what, told in (("raise", "nothing there"), ("exit", "SystemExit"), ("none", "NoneType"), ("hang", "within 0.3 s")):
        box.deadline_s = 0.3 if what == "hang" else 30.0
        result = run(box, "own", what=what)
        assert result.is_error
        assert told in result.text
    assert "did you mean 'calculator'" in run(box, "calculater", expression="1").text
    assert "'expression' is a required" in run(box, "calculator").text
    with pytest.raises(EnvironmentFailure, match="died"):
        run(box, "own", what="lost")


def test_the_calculator() -> None:
    box = toolbox(Calculator())
    assert run(box, "calculator", expression="sqrt(3^2 + 4^2)").text == "5"
    assert run(box, "calculator", expression="1/3 + 1/6").text == "0.5"
    assert run(box, "calculator", expression="__import__('os')").is_error


def pictured(side: int = 100) -> tuple[MediaStore, Media]:
    """A picture that is red in its right lower quarter."""
    pixels = np.zeros((side, side, 3), np.uint8)
    pixels[side // 2 :, side // 2 :] = (255, 0, 0)
    store = MediaStore()
    return store, store.put(encode_png(pixels), "picture", "the picture")


@pytest.mark.parametrize(("coordinates", "corner"), [("relative", 500), ("pixels", 50)])
def test_crop_shows_the_part_enlarged_and_it_can_be_cut_again(coordinates: Any, corner: int) -> None:
    store, media = pictured()
    context = ToolContext(store, Task("t"), [media])
    box = Toolbox([Crop(coordinates, side=64)], context)
    result = run(box, "crop", box=[corner, corner, 2 * corner, 2 * corner])
    part = next(block for block in result.content if isinstance(block, Media))
    picture: Image.Image = store.picture(part)
    assert picture.size == (64, 64)
    assert np.asarray(picture).reshape(-1, 3).min(axis=0).tolist() == [255, 0, 0]
    assert "the picture" in part.origin
    again = run(box, "crop", box=[0, 0, corner, corner], picture=1)
    assert context.pictures == [media, part, *again.content[1:]]
    whole = run(box, "crop", box=[1e300, -1e300, -5, 1e300])
    assert not whole.is_error  # corners in any order, bounded by the picture


def test_crop_refuses_what_cannot_be_seen() -> None:
    store, media = pictured()
    box = Toolbox([Crop()], ToolContext(store, Task("t"), [media]))
    assert "no picture 3" in run(box, "crop", box=[0, 0, 1, 1], picture=3).text
    assert "fewer than 4 pixels" in run(box, "crop", box=[500, 500, 510, 900]).text


QUESTION = Task("sum", (user("What is 17 * 23?"),), answer="391")


def test_a_response_without_a_call_is_the_answer_and_one_with_a_call_goes_on() -> None:
    environment = ToolUse(MediaStore(), QUESTION, tools=["calculator"])
    assert environment.instant
    head, observation = environment.reset(0)
    assert [tool["function"]["name"] for tool in json.loads(head[0].tools)] == ["calculator"]
    assert observation.messages == QUESTION.messages
    result = environment.step(write_call("calculator", {"expression": "17 * 23"}))
    assert result.observation is not None
    assert [(m.role, m.text) for m in result.observation.messages] == [("tool", "391")]
    assert (result.done, result.reward, result.info["calls"], result.info["errors"]) == (False, None, 1, 0)
    result = environment.step("<answer>391</answer>")
    assert (result.done, result.truncated, result.observation) == (True, False, None)
    with pytest.raises(EnvironmentFailure, match="reset"):
        environment.step("more")


def test_the_last_turns_are_told_and_counted() -> None:
    environment = ToolUse(MediaStore(), QUESTION, tools=["calculator"], max_turns=2, max_calls_per_turn=1, offer="text")
    head, _ = environment.reset(0)
    assert '"calculator"' in head[0].text
    assert head[0].tools == ""
    result = environment.step(write_call("calculator", {"expression": "1+1"}) * 2)
    assert result.observation is not None
    (message,) = result.observation.messages
    assert message.role == "user"
    told = "Only the first 1 calls of a response are made.\nThis was the last call: answer now, without calling a tool."
    assert message.text == f"2\n{told}"
    result = environment.step(write_call("calculator", {"expression": "1+1"}))
    assert (result.done, result.truncated) == (True, True)


def test_a_systems_prompt_is_kept_and_tools_are_named_before_anything_is_played() -> None:
    task = Task("t", (system("Be brief."), user("?")))
    head, _ = ToolUse(MediaStore(), task, tools=["calculator"], offer="text").reset(0)
    assert head[0].text.startswith("Be brief.\n\nYou may call these tools:")
    wrong: list[tuple[list[Any], str]] = [([], "has none"), (["abacus"], "unknown tool"), ([{"x": 1}], "a tool is")]
    for tools, problem in [*wrong, (["crop", "crop"], "two tools")]:
        with pytest.raises(RecipeError, match=problem):
            ToolUse(MediaStore(), task, tools=tools)
    with pytest.raises(RecipeError, match="no option 'sides'"):
        ToolUse(MediaStore(), task, tools=[{"name": "crop", "options": {"sides": 3}}])


def rows(folder: Path, row: dict[str, Any], **options: Any) -> JsonlRows:
    (folder / "rows.jsonl").write_text(json.dumps(row) + "\n")
    return JsonlRows(str(folder / "rows.jsonl"), MediaStore(), **options)


def test_a_recipe_says_which_environment_rows_are_played_in(tmp_path: Path) -> None:
    played = {"name": "tools", "options": {"tools": ["calculator"]}}
    flat = rows(tmp_path, {"q": "1+1?", "a": "2"}, columns={"prompt": "q", "answer": "a"}, environment=played)[0]
    assert (flat.environment, flat.answer) == (EnvironmentSpec("tools", {"tools": ["calculator"]}), "2")
    task = rows(tmp_path, {"messages": [{"role": "user", "content": "1+1?"}]}, environment=played)[0]
    assert task.environment == flat.environment
    built = EnvironmentMaker(MediaStore())(task)
    assert isinstance(built, ToolUse)
    assert built.task is task
    for wrong, problem in (({"nam": "tools"}, "name the one"), ({"name": "tolls"}, "unknown environment")):
        with pytest.raises(RecipeError, match=problem):
            rows(tmp_path, {"messages": []}, environment=wrong)


def test_a_row_cannot_say_what_code_runs(tmp_path: Path) -> None:
    server = {"mcp": {"command": ["sh", "-c", "touch owned"]}}
    row = {"messages": [{"role": "user", "content": "?"}], "environment": {"name": "tools", "options": {"tools": [server]}}}
    with pytest.raises(TaskError, match="only a recipe may set it"):
        rows(tmp_path, row)[0]


def test_environments_of_rows_are_not_played_from_seeds() -> None:
    with pytest.raises(RecipeError, match=r"Read the rows with jsonl.*\{name: tools\}"):
        build("source", "environments", {"environment": "tools"}, "x", store=MediaStore())


def test_a_model_looks_again_and_the_part_is_a_picture_in_its_thread(tmp_path: Path) -> None:
    policy = load_policy(str(make_tiny("qwen2_5_vl", tmp_path)), store=MediaStore(), device="cpu")
    picture = policy.chat.store.put(encode_png(np.full((64, 64, 3), 90, np.uint8)), "picture", "photo")
    options = {"tools": [{"name": "crop", "options": {"side": 56}}], "offer": "text"}
    task = Task("look", (user(picture, "What is in the corner?"),), "red", EnvironmentSpec("tools", options))

    def write(request: Request) -> str:
        return ["look: " + write_call("crop", {"box": [0, 0, 500, 500]}), "red"][request.order[-1]]

    rollout = Rollout(
        policy.chat, ScriptedEngine(policy.chat, write), RolloutSection(max_turns=3), EnvironmentMaker(policy.chat.store)
    )
    (group,) = asyncio.run(rollout.stream([task], 2, Attempt(0, 1), Sampling(max_new_tokens=512)).in_order())
    for episode in group.episodes:
        assert (episode.status, episode.failure, len(episode.turns)) == (Status.FINISHED, "", 2)
        (shown,) = [item for message in episode.turns[1].observation for item in message.media]
        assert shown.origin == "photo, cut to 0, 0, 32, 32"
        (thread,) = episode.threads
        assert [span.media for segment in thread.segments for span in segment.media] == [picture, shown]
    rollout.close()


def test_a_message_is_shown_by_its_own_words_only() -> None:
    assert Message("system", (Text("a"),), "[]").text == "a"
