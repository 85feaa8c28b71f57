"""Agents on the openai package alone: their requests become threads of exact tokens, their reward trains the policy."""

import asyncio
import json
import os
import random
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from examples.shapes_agent import COLOURS, SHAPES
from sensorium.assembly.playing import EnvironmentMaker
from sensorium.data.demonstrations import DemonstrationRows, Recording, RecordingClaim, row_of
from sensorium.data.media_store import MediaStore
from sensorium.engines.protocol import Request, Sampling, ScriptedEngine
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.remote.wire import reset_from_json, reset_to_json, step_from_json, step_to_json
from sensorium.models.load import load_policy
from sensorium.models.policy import Policy
from sensorium.models.tiny import make_tiny
from sensorium.recipe.load import load_recipe
from sensorium.recipe.schema import RolloutSection
from sensorium.rollout.play import Attempt, Rollout
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.services.agents import AgentEnvironment
from sensorium.trainer.run import train
from sensorium.vocabulary import EnvironmentSpec, Episode, Status, Task, user
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.decoding import Augmentation
from sensorium.vocabulary.errors import RecipeError
from tests.envs.test_instances import alive
from tests.services.playing_agent import LATE, LEFT
from tests.trainer.run_contents import assert_equal
from tests.trainer.small import small

HERE = "tests.services.playing_agent"
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def policy(tmp_path_factory: pytest.TempPathFactory) -> Policy:
    return load_policy(str(make_tiny("qwen3_vl", tmp_path_factory.mktemp("tiny"))), store=MediaStore(), device="cpu")


def played(
    policy: Policy,
    answer: Callable[[Request], str],
    deadline_s: float = 60.0,
    messages: tuple[Message, ...] = (user("What is 2 + 2?"),),
    **options: Any,
) -> Episode:
    section = RolloutSection(max_turns=10, max_new_tokens=16, environment_deadline_s=deadline_s)
    task = Task("t", messages, "4", EnvironmentSpec("agent", options, 7))
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, answer), section, EnvironmentMaker(policy.chat.store))
    groups = asyncio.run(rollout.stream([task], 1, Attempt(0, 1), Sampling(max_new_tokens=16)).in_order())
    rollout.close()
    return groups[0].episodes[0]


def test_a_request_continues_the_thread_whose_messages_it_repeats_and_any_other_begins_one(policy: Policy) -> None:
    episode = played(policy, lambda request: f"answer {request.order[-1]}", function=f"{HERE}:talk")
    assert (episode.status, episode.failure) == (Status.FINISHED, "")
    assert [turn.response.text for turn in episode.turns] == [f"answer {number}" for number in range(4)]
    assert [turn.thread for turn in episode.turns] == [0, 1, 0, 2]
    assert [thread.home for thread in episode.threads] == [
        (False, True, False, True),  # the question, "sure?"
        (False, True),  # the other conversation
        (False, False, False, True),  # "really?", after the first answer
    ]
    first, _, last = episode.threads
    assert last.segments[0] is first.segments[0]
    assert last.segments[1] is first.segments[1]
    assert [span.media.kind for segment in first.segments for span in segment.media] == ["picture"]
    assert [turn.reward for turn in episode.turns] == [None, None, None, 0.5]


def test_a_recorded_episode_keeps_its_conversations(policy: Policy, tmp_path: Path) -> None:
    episode = played(policy, lambda request: f"answer {request.order[-1]}", function=f"{HERE}:talk")
    recording, store = Recording(tmp_path / "shown"), policy.chat.store
    recording.path.mkdir()
    recording.take(RecordingClaim("r", "test", 1, 1, None, 0, {}))
    recording.keep(*row_of(0, Task("t", environment=EnvironmentSpec("agent", {}, 7)), episode, store), store)
    (task,) = DemonstrationRows(recording.path, store)
    section = RolloutSection(max_turns=10, max_new_tokens=16)
    rollout = Rollout(policy.chat, ScriptedEngine(policy.chat, lambda _: ""), section, EnvironmentMaker(store))
    (group,) = asyncio.run(rollout.stream([task], 1, Attempt(0, 1, demonstrate=True), Sampling()).in_order())
    rollout.close()
    again = group.episodes[0]
    assert [thread.home for thread in again.threads] == [thread.home for thread in episode.threads]
    read, then = ([[s.tokens for s in thread.segments] for thread in one.threads] for one in (again, episode))
    assert read == then
    assert [turn.reward for turn in again.turns] == [turn.reward for turn in episode.turns]


def test_tools_are_offered_and_called_and_a_wrong_request_is_refused(policy: Policy) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"where": "left"}}\n</tool_call>'
    prompts: list[str] = []

    def answer(request: Request) -> str:
        prompts.append(policy.chat.tokenizer.decode(request.context[-1].tokens))
        return f"Let me see.\n{call}" if len(prompts) == 1 else "Nothing."

    episode = played(policy, answer, function=f"{HERE}:called", offer="text")
    assert (episode.status, episode.failure) == (Status.FINISHED, "")
    assert '"name": "look"' in prompts[0]
    assert "nothing at left" in prompts[1]
    assert [turn.thread for turn in episode.turns] == [0, 0], "the answer that came back was recognised"
    assert (episode.turns[1].parts, episode.info["success"]) == ({"calls": 1.0}, True)


def test_a_client_that_gave_up_and_asks_again_gets_the_answer_that_was_sampled(policy: Policy) -> None:
    def answer(request: Request) -> str:
        LEFT.wait(60)
        return f"answer {request.order[-1]}"

    episode = played(policy, answer, function=f"{HERE}:impatient")
    assert (episode.status, episode.failure) == (Status.FINISHED, "")
    assert [turn.reward for turn in episode.turns] == [None, 1.0]


def test_an_agent_is_given_the_augmented_picture(policy: Policy) -> None:
    store, picture = policy.chat.store, BytesIO()
    Image.effect_noise((56, 56), 90).save(picture, "JPEG")
    media = replace(store.put_picture(picture.getvalue(), "here"), augmentation=Augmentation(brightness=0.5))
    question = Message("user", (media, Text("Which one?")))
    episode = played(policy, lambda request: "?", messages=(question,), function=f"{HERE}:repeats")
    (span,) = episode.threads[0].segments[0].media
    assert span.media.hash == sha256(store.shown_bytes(media)).hexdigest() != media.hash


@pytest.mark.parametrize("offer", ["template", "text"])
def test_what_cannot_be_meant_is_refused_and_the_episode_goes_on(policy: Policy, offer: str) -> None:
    episode = played(policy, lambda request: "answer", function=f"{HERE}:careless", offer=offer)
    assert (episode.status, episode.failure) == (Status.FINISHED, "")
    assert [turn.reward for turn in episode.turns] == [0.5]


@pytest.mark.parametrize(
    ("function", "why"), [("crashes", "ZeroDivisionError: no reward"), ("silent", "before it had asked the model anything")]
)
def test_an_agent_that_raises_or_asks_nothing_fails_its_episode(policy: Policy, function: str, why: str) -> None:
    episode = played(policy, lambda request: "4", function=f"{HERE}:{function}")
    assert episode.status == Status.FAILED
    assert why in episode.failure


@pytest.mark.parametrize(
    ("mode", "status", "why"),
    [
        ("answer", Status.FINISHED, ""),
        ("crash", Status.FAILED, "the agent gives up"),
        ("hang", Status.FAILED, "going to sleep"),
    ],
)
def test_a_program_reports_its_reward_and_its_last_output_explains_a_failure(
    policy: Policy, mode: str, status: Status, why: str
) -> None:
    command = f"{sys.executable} -m {HERE} {mode}"
    episode = played(policy, lambda request: "It is 4.", 8.0 if mode == "hang" else 60.0, command=command)
    assert episode.status == status
    assert why in episode.failure
    assert [turn.reward for turn in episode.turns] == ([1.0] if mode == "answer" else [])


def test_an_episode_that_is_over_answers_nothing(policy: Policy) -> None:
    assert played(policy, lambda request: "4", function=f"{HERE}:late").status == Status.FINISHED
    assert [LATE.get(timeout=60), LATE.get(timeout=60)] == [410, 410]


def test_what_a_program_has_started_ends_with_its_episode(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(filter(None, [str(ROOT), *sys.path])))
    monkeypatch.chdir(tmp_path)
    assert played(policy, lambda request: "4", command=f"{sys.executable} -m {HERE} spawn").status == Status.FINISHED
    assert not alive(int(Path("child").read_text()))


def test_which_turn_an_observation_follows_is_known_in_other_processes_too() -> None:
    for observation in (Observation((user("a"),), after=-1), Observation((user("b"),), after=3, max_new_tokens=5)):
        assert reset_from_json(reset_to_json((), observation)) == ((), observation)
        assert step_from_json(step_to_json(StepResult(observation))).observation == observation


def test_what_cannot_be_run_is_refused() -> None:
    for options in (
        {},
        {"command": "no-such-program-here"},
        {"function": f"{HERE}:missing"},
        {"command": "a", "function": "b:c"},
    ):
        with pytest.raises(RecipeError):
            AgentEnvironment(MediaStore(), **options)


def test_the_agent_of_the_page_is_a_program_and_trains_as_a_function(
    policy: Policy, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers = ["<answer>red</answer>", "<answer>circle</answer>"]
    program = f"{sys.executable} {ROOT}/examples/shapes_agent.py"
    episode = played(policy, lambda request: answers[request.order[-1]], command=program)
    assert (episode.status, episode.failure, len(episode.turns)) == (Status.FINISHED, "", 2)
    right = sum(answer in expected(7) for answer in answers)
    assert (episode.turns[1].reward, episode.info["success"]) == (right / 2, right == 2)
    page = (ROOT / "docs/guides/agents.md").read_text()
    (recipe,) = re.findall(r"```yaml\n(name: agent.*?)```", page, re.DOTALL)
    (tmp_path / "agent.yaml").write_text(recipe)
    monkeypatch.syspath_prepend(str(ROOT / "examples"))
    changes = ["steps=1", f"run_dir={tmp_path / 'run'}", "batch.prompts_per_step=2", "batch.group_size=2"]
    train(load_recipe(tmp_path / "agent.yaml", [*changes, "evaluation.at_start=false", "evaluation.every=0"]))
    sys.modules["shapes_agent"].CONNECTIONS.close()
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (row["episodes/failed"], row["episodes/turns_mean"]) == (0, 2)


def expected(seed: int) -> list[str]:
    """The right answers to the two questions of a seed, in order, by the agent's own rule."""
    chance = random.Random(seed)
    things = list(zip(chance.sample(list(COLOURS), 2), chance.sample(SHAPES, 2), strict=True))
    return [f"<answer>{things[0][0]}</answer>", f"<answer>{things[1][1]}</answer>"]


def agents(folder: Path, *overrides: str, tasks: Any = None, **options: Any) -> Any:
    rows = folder.parent / "tasks.jsonl"
    rows.parent.mkdir(parents=True, exist_ok=True)
    lines = [
        {"id": f"t{n}", "messages": [{"role": "user", "content": f"{n} + {n}?"}], "answer": str(2 * n)} for n in range(8)
    ]
    rows.write_text("".join(json.dumps(line) + "\n" for line in lines))
    source = {"path": str(rows), "environment": {"name": "agent", "options": options}}
    return small(
        folder, *overrides, model={"path": "tiny:qwen3_vl", "device": "cpu"},
        tasks=tasks or {"train": [{"source": "jsonl", "options": source}]}, rewards={"terms": [{"name": "environment"}]},
        rollout={"max_new_tokens": 6, "max_turns": 8, "schedule": "lockstep"},
        batch={"prompts_per_step": 2, "group_size": 4},
    )  # fmt: skip


def test_training_is_on_the_tokens_that_were_sampled_and_repeats_when_resumed(tmp_path: Path) -> None:
    whole, broken = tmp_path / "whole" / "run", tmp_path / "broken" / "run"
    train(agents(whole, function=f"{HERE}:talk"))
    train(agents(broken, "steps=2", function=f"{HERE}:talk"))
    train(agents(broken, function=f"{HERE}:talk"), resume=True)
    assert_equal(whole, broken, 3)
    for row in read_metrics(whole / "metrics.jsonl"):
        assert (row["episodes/failed"], row["episodes/turns_mean"]) == (0, 4)
        assert row["mismatch/prob_error"] == pytest.approx(1, abs=1e-5)
        assert row["policy/grad_norm"] > 0
    episodes = [e for group in read_groups(RunDirectory(whole).episodes_of(1)) for e in group.episodes]
    assert all(len(e.turns[1].response.tokens) <= 2 for e in episodes), "the agent's max_tokens"


def test_agents_in_workers_know_no_counts_and_are_trained_alike(tmp_path: Path) -> None:
    source = {"environment": "agent", "size": 20, "options": {"function": f"{HERE}:uncounted"}}
    tasks = {"train": [{"source": "environments", "options": source}]}
    train(agents(tmp_path / "run", "steps=1", "cluster.environments=1", tasks=tasks))
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert (row["episodes/failed"], row["episodes/turns_mean"]) == (0, 1)
