"""``sensorium validate`` finds what is wrong with data, environments, tools and rewards, without a model."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from sensorium.cli.dry_run import look_at
from sensorium.cli.main import main
from sensorium.cli.validation import BadRows, Finding, example_arguments, model_free_session, validate
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import make_sources
from sensorium.data.sound import encode_wav
from sensorium.envs.tool_use import argument_problem
from sensorium.recipe.load import parse_recipe
from sensorium.recipe.schema import TasksSection
from sensorium.runs.run_directory import RunDirectory
from sensorium.trainer.run import open_trainer
from sensorium.vocabulary import Episode, Score, Task
from sensorium.vocabulary.errors import RecipeError, TaskError
from tests.trainer.test_going_on import Notes

SOKOBAN = {"source": "environments", "options": {"environment": "sokoban", "size": 6, "options": {"max_turns": 5}}}


def findings(episodes: int = 3, bad: BadRows | None = None, **changes: Any) -> dict[str, Finding]:
    base = {
        "name": "checked",
        "steps": 1,
        "model": {"path": "package:frozen_lake"},
        "tasks": {"train": [SOKOBAN]},
        "rollout": {"max_turns": 5, "max_new_tokens": 8},
        "rewards": {"terms": [{"name": "environment"}]},
    }
    with model_free_session(parse_recipe(json.dumps(base | changes), "test"), alone=True) as session:
        return {f"{found.where} {found.check}": found for found in validate(session, 0, episodes, bad)}


def rows(path: Path, *tasks: dict[str, Any]) -> list[dict[str, Any]]:
    path.write_text("\n".join(map(json.dumps, tasks)))
    columns = {"prompt": "prompt", "answer": "answer"}
    columns |= {"demonstration": "demonstration"} if "demonstration" in tasks[0] else {}
    columns |= {"pictures": "images"} if "images" in tasks[0] else {}
    columns |= {"sounds": "audios"} if "audios" in tasks[0] else {}
    columns |= {"id": "id"} if "id" in tasks[0] else {}
    return [{"source": "jsonl", "options": {"path": str(path), "columns": columns}}]


def test_a_sound_recipe_has_no_errors_and_shows_what_good_and_random_play_are_paid(
    capsys: pytest.CaptureFixture[str],
) -> None:
    small = ["tasks.train.0.options.size=8", "tasks.evaluate.0.options.size=8"]
    assert main(["validate", "frozen_lake", *small, "--rows", "4", "--episodes", "2"]) == 0
    shown = capsys.readouterr().out
    assert "splits disjoint" in shown
    assert "demonstrated 1, random 0 on average" in shown
    assert "0 errors" in shown


def test_demonstrated_and_random_play_are_measured_and_repeat() -> None:
    found = findings()
    assert found["tasks.train.0 demonstrated play"].found.endswith("3 of 3 correct")
    assert found["tasks.train.0 random play"].level == "ok"
    assert found["tasks.train.0 repeats"].level == "ok"
    assert "tasks.train.0 success" not in found
    assert "demonstrated 10 to 10" in found["tasks.train.0 reward environment/success"].found
    assert found["tasks.evaluate splits"].level == "warning"


def test_actions_without_names_are_said() -> None:
    cards = {"environment": "gymnasium", "size": 1, "options": {"id": "Blackjack-v1", "view": "text"}}
    found = findings(1, tasks={"train": [{"source": "environments", "options": cards}]})
    assert found["tasks.train.0 actions"].level == "warning"
    assert "0, 1: numbers say nothing" in found["tasks.train.0 actions"].found
    assert findings(1)["tasks.train.0 actions"] == Finding("tasks.train.0", "actions", "Up, Down, Left, Right", "ok")


def test_held_out_rows_that_are_trained_on_are_an_error(tmp_path: Path) -> None:
    one, two = ({"prompt": f"{n} + 1?", "answer": str(n + 1), "demonstration": str(n + 1)} for n in (1, 2))
    tasks = {"train": rows(tmp_path / "train.jsonl", one, two), "evaluate": rows(tmp_path / "test.jsonl", two)}
    found = findings(tasks=tasks, rewards={"terms": [{"name": "exact"}]})
    assert found["tasks splits disjoint"].level == "error"
    assert "1 held-out tasks are trained on too" in found["tasks splits disjoint"].found


def test_a_source_that_cannot_be_read_brings_no_second_finding(tmp_path: Path) -> None:
    lost = [{"source": "jsonl", "options": {"path": str(tmp_path / "nowhere.jsonl")}}]
    found = findings(tasks={"train": rows(tmp_path / "a.jsonl", {"prompt": "1?", "answer": "1"}), "evaluate": lost})
    assert found["tasks.evaluate.0 source"].level == "error"
    assert "tasks.evaluate splits" not in found


def test_a_wrong_model_folder_is_an_error_and_a_hub_id_that_is_not_here_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    wrong = findings(model={"path": "./no_such_model"})["model chat template"]
    assert wrong.level == "error"
    assert "there is no such folder" in wrong.found
    absent = findings(model={"path": "Nobody/NoSuchModel"})["model chat template"]
    assert absent.level == "warning"
    assert "are not here; tiny:qwen3_vl" in absent.found


def test_unreadable_rows_and_pictures_are_errors_that_name_each(tmp_path: Path) -> None:
    Image.new("RGB", (64, 64)).save(tmp_path / "good.png")
    for name in ("bad.png", "worse.png"):
        (tmp_path / name).write_bytes(b"no picture")
    path = tmp_path / "rows.jsonl"
    asked = {"prompt": "<image>What?", "answer": "A"}
    source = rows(
        path, asked | {"images": ["good.png"]}, *(asked | {"images": [name]} for name in ("bad.png", "worse.png"))
    )
    path.write_text(path.read_text() + '\n{"prompt": broken')
    found = findings(tasks={"train": source}, rewards={"terms": [{"name": "exact"}]})
    told = found["tasks.train.0 rows"]
    assert told.level == "error"
    assert "3 with a problem" in told.found
    for bad in ("bad.png", "worse.png", "rows.jsonl:4"):
        assert bad in told.found


def test_a_placeholder_without_a_column_for_its_medium_is_a_warning_that_names_the_rows(tmp_path: Path) -> None:
    asked = [{"prompt": text, "answer": "A"} for text in ("<image>What?", "Which?", "What is <image> and <video>?")]
    source = rows(tmp_path / "rows.jsonl", *asked)
    rewards = {"terms": [{"name": "exact"}]}
    found = findings(tasks={"train": source}, rewards=rewards)
    picture, video = (found[f"tasks.train.0 placeholder {tag}"] for tag in ("<image>", "<video>"))
    assert (picture.level, video.level) == ("warning", "warning")
    assert "columns: {pictures: COLUMN}" in picture.found
    assert [f"rows.jsonl:{line}" in picture.found for line in (1, 2, 3)] == [True, False, True]
    assert [f"rows.jsonl:{line}" in video.found for line in (1, 2, 3)] == [False, False, True]
    recipe = {"name": "a", "steps": 1, "model": {"path": "tiny:qwen3_vl"}, "tasks": {"train": source}, "rewards": rewards}
    (note,) = [line for line in look_at(parse_recipe(json.dumps(recipe), "test")) if "pictures: COLUMN" in line]
    assert "2 of 3 tasks" in note


def test_repeated_ids_and_rows_without_media_are_warnings(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "red.png")
    asked = [{"prompt": text, "answer": "A", "images": None, "id": name} for text, name in (("one", "x"), ("two", "x"))]
    shown = {"prompt": "<image>", "answer": "A", "images": ["red.png"], "id": "y"}
    tasks = {"train": rows(tmp_path / "a.jsonl", *asked), "evaluate": rows(tmp_path / "b.jsonl", shown)}
    found = findings(tasks=tasks, rewards={"terms": [{"name": "exact"}]})
    for name in ("tasks.train ids", "tasks.train.0 media shown", "tasks media shown"):
        assert found[name].level == "warning"
    assert found.keys().isdisjoint(["tasks.evaluate ids", "tasks.evaluate.0 media shown"])


def test_a_column_of_pictures_that_no_prompt_shows_is_noted_by_validate_dry_run_and_run(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8)).save(tmp_path / "red.png")
    tasks = {"train": rows(tmp_path / "a.jsonl", {"prompt": "Which colour?", "answer": "red", "shown": "red.png"})}
    changes = {"tasks": tasks, "rewards": {"terms": [{"name": "exact"}]}, "batch": {"prompts_per_step": 1}}
    assert findings(**changes)["tasks.train.0 unread media"].level == "warning"
    recipe = parse_recipe(json.dumps({"name": "a", "steps": 1, "model": {"path": "tiny:qwen2"}, **changes}), "test")
    assert any("pictures: shown" in line for line in look_at(recipe))
    notes = Notes()
    open_trainer(recipe, RunDirectory(tmp_path / "run").create(), watchers=[notes]).close()
    assert sum("tasks.train.0" in note and "pictures: shown" in note for note in notes.texts) == 1


def test_every_clip_that_cannot_be_decoded_is_named(tmp_path: Path) -> None:
    for i in range(20):
        (tmp_path / f"bad{i}.wav").write_bytes(b"no sound %d" % i)
    asked = ({"prompt": "<audio>What?", "answer": "A", "audios": [f"bad{i}.wav"]} for i in range(20))
    found = findings(
        model={"path": "tiny:qwen2_5_omni"},
        tasks={"train": rows(tmp_path / "rows.jsonl", *asked)},
        rewards={"terms": [{"name": "exact"}]},
    )
    told = found["tasks.train.0 media readable"]
    assert told.level == "error"
    assert all(f"bad{i}.wav" in told.found for i in range(20))


def test_demonstrations_that_need_more_turns_name_the_setting_and_not_the_answer() -> None:
    told = findings(rollout={"max_turns": 2, "max_new_tokens": 8})["tasks.train.0 demonstrated play"]
    assert (told.level, "rollout.max_turns" in told.found, "judged wrong" in told.found) == ("warning", True, False)


def test_demonstrations_that_do_not_fit_a_response_are_noted_by_the_dry_run(tmp_path: Path) -> None:
    row = {"prompt": "What?", "answer": "A", "demonstration": "A long way to say A, which is the first letter"}
    base = {"name": "a", "steps": 1, "model": {"path": "tiny:qwen2"}, "rewards": {"terms": [{"name": "exact"}]}}
    base |= {"tasks": {"train": rows(tmp_path / "a.jsonl", row)}}
    for budget, noted in ((8, True), (len(row["demonstration"]), False)):
        recipe = parse_recipe(json.dumps(base | {"rollout": {"max_new_tokens": budget}}), "test")
        assert any(f"rollout.max_new_tokens is {budget}" in line for line in look_at(recipe)) is noted
    several = {"messages": [{"role": "user", "content": "?"}], "demonstration": ["A", "B", "C"]}
    several |= {"environment": {"name": "sokoban"}}
    (tmp_path / "b.jsonl").write_text(json.dumps(several))
    base["tasks"] = {"train": [{"source": "jsonl", "options": {"path": str(tmp_path / "b.jsonl")}}]}
    recipe = parse_recipe(json.dumps(base | {"rollout": {"max_turns": 2, "max_new_tokens": 8}}), "test")
    assert any("rollout.max_turns is 2" in line for line in look_at(recipe))


def test_demonstrations_that_are_judged_wrong_are_a_warning_that_names_them(tmp_path: Path) -> None:
    good, wrong = ({"id": f"t{i}", "prompt": "What?", "answer": "A", "demonstration": text} for i, text in enumerate("AB"))
    given = {"rewards": {"terms": [{"name": "exact", "options": {"fallback": True}}]}}
    check = "tasks.train.0 demonstrations rewarded"
    assert findings(tasks={"train": rows(tmp_path / "good.jsonl", good)}, **given)[check].level == "ok"
    told = findings(tasks={"train": rows(tmp_path / "both.jsonl", good, wrong)}, **given)[check]
    assert (told.level, "t1" in told.found, "t0" in told.found) == ("warning", True, False)
    bad = BadRows()
    taught = findings(bad=bad, steps=0, tasks={"train": rows(tmp_path / "both.jsonl", good, wrong)}, **given)[check]
    assert (taught.level, bad.found) == ("ok", {}), "without RL nothing is rewarded"


def test_prompts_and_demonstrations_are_held_against_their_budgets(tmp_path: Path) -> None:
    long = {"prompt": "word " * 200, "answer": "A", "demonstration": "A long answer that is cut."}
    found = findings(
        tasks={"train": rows(tmp_path / "long.jsonl", long)},
        rollout={"max_context_tokens": 64, "max_new_tokens": 4},
        rewards={"terms": [{"name": "exact"}]},
    )
    assert found["tasks.train.0 prompt lengths"].level == "error"


@pytest.mark.parametrize("treatment", ["refuse", "skip"])
def test_prompts_are_measured_as_a_run_measures_them(treatment: str, tmp_path: Path) -> None:
    texts = {"fits": "Which?", "cut": "Which of them is it?", "long": "word " * 200}
    asked = [{"id": name, "prompt": text, "answer": "A", "demonstration": "A"} for name, text in texts.items()]

    def measured(limit: int, *names: str) -> dict[str, Finding]:
        source = rows(tmp_path / "rows.jsonl", *(row for row in asked if row["id"] in names))
        tasks = {"train": source, "on_long_prompt": treatment}
        limits = {"max_context_tokens": limit, "max_new_tokens": 4}
        return findings(tasks=tasks, rollout=limits, rewards={"terms": [{"name": "exact"}]})

    check = "tasks.train.0 prompt lengths"
    length = int(measured(4096, "fits", "cut")[check].found.split()[2])
    levels = [measured(length + room, "fits", "cut")[check].level for room in (4, 3, 1)]
    assert levels == ["ok", "warning", "warning"], "a run shortens the response"
    worst = "error" if treatment == "refuse" else "warning"
    assert measured(length, "fits", "cut")[check].level == worst, "there is no room for any"
    both = measured(length + 4, "fits", "long")
    assert both[check].level == worst
    assert {found.level for where, found in both.items() if "play" in where} <= {worst, "ok"}
    assert ("error" in {found.level for found in both.values()}) == (treatment == "refuse")
    assert "tasks.train tasks left" not in both
    none = measured(length + 4, "long")
    assert "error" in {found.level for found in none.values()}, "a run would have nothing to train on"


def test_media_that_a_run_leaves_out_are_no_error(tmp_path: Path) -> None:
    (tmp_path / "bad.wav").write_bytes(b"no sound")
    (tmp_path / "good.wav").write_bytes(encode_wav(np.zeros(1600, np.float32)))
    asked = ({"prompt": "<audio>What?", "answer": "A", "audios": [f"{name}.wav"]} for name in ("bad", "good"))
    tasks = {"train": rows(tmp_path / "rows.jsonl", *asked), "on_bad_row": "skip"}
    found = findings(model={"path": "tiny:qwen2_5_omni"}, tasks=tasks, rewards={"terms": [{"name": "exact"}]})
    assert found["tasks.train.0 media readable"].level == "warning"
    assert "error" not in {told.level for told in found.values()}


def test_only_what_is_trained_on_needs_demonstrations(tmp_path: Path) -> None:
    sides = {side: rows(tmp_path / f"{side}.jsonl", {"prompt": side, "answer": "A"}) for side in ("train", "evaluate")}
    found = findings(tasks=sides, warm_start={"steps": 1}, rewards={"terms": [{"name": "exact"}]})
    levels = {side: found[f"tasks.{side}.0 demonstrated play"].level for side in sides}
    assert levels == {"train": "error", "evaluate": "ok"}


def test_environments_that_fail_or_do_not_repeat_are_found() -> None:
    options = {"environment": f"{__name__}:Moody", "size": 8}
    found = findings(8, tasks={"train": [{"source": "environments", "options": options}]})
    assert found["tasks.train.0 repeats"].level == "warning"
    assert found["tasks.train.0 repeats"].found.startswith("the same responses lead to other observations")
    assert found["tasks.train.0 success"].level == "warning"
    assert "episodes that ended says whether it succeeded" in found["tasks.train.0 success"].found
    assert found["tasks.train.0 demonstrated play"].level == "ok"
    assert found["tasks.train.0 random play"].level == "error"
    assert "it is Monday" in found["tasks.train.0 random play"].found
    taught = findings(1, tasks={"train": [{"source": "environments", "options": options}]}, warm_start={"steps": 5})
    assert taught["tasks.train.0 demonstrated play"].level == "error"


@pytest.mark.parametrize(("keeps", "level"), [(True, "warning"), (False, "ok")])
def test_instances_of_a_pool_that_remember_earlier_episodes_are_found(keeps: bool, level: str, tmp_path: Path) -> None:
    options = {} if keeps else {"pids": str(tmp_path / "pids")}  # without, it shows how often it was reset
    source = {"environment": "tests.envs.browsing:Browsing", "size": 2, "options": options}
    changes = {"tasks": {"train": [{"source": "environments", "options": source}]}, "environments": {"pool": 1}}
    assert findings(2, **changes)["tasks.train.0 instances"].level == level


def test_nothing_is_said_to_be_right_of_play_that_never_began() -> None:
    options = {"environment": f"{__name__}:Broken", "size": 2}
    found = findings(2, tasks={"train": [{"source": "environments", "options": options}]})
    assert found["tasks.train.0 random play"].level == "error"
    assert not [name for name in found if "repeats" in name or "reward" in name]


class Moody:
    """Shows another number each time it is begun, knows no good response, and fails by seed."""

    instant = True
    begun = 0

    def __init__(self, store: object) -> None:
        pass

    @classmethod
    def content_key(cls, seed: int, options: object) -> str:
        return str(seed)

    def reset(self, seed: int) -> Any:
        from sensorium.envs.protocol import Observation
        from sensorium.vocabulary import user

        Moody.begun += 1
        self.seed = seed
        return (), Observation((user(f"{Moody.begun}"),))

    def step(self, response: str) -> Any:
        from sensorium.envs.protocol import StepResult

        if self.seed % 2:
            raise RuntimeError("it is Monday")
        return StepResult(None, reward=0.5, done=True)

    def demonstrate(self) -> str:
        from sensorium.vocabulary.errors import EnvironmentFailure

        raise EnvironmentFailure("nobody demonstrates this")

    def close(self) -> None:
        pass


class Broken(Moody):
    """Does not begin."""

    def reset(self, seed: int) -> Any:
        raise RuntimeError("no table")


def test_each_tool_is_called_once_and_its_reply_shown(tmp_path: Path) -> None:
    asked = {"prompt": "2 + 3?", "answer": "5", "demonstration": "5"}
    source = rows(tmp_path / "sums.jsonl", asked)
    tools = {"name": "tools", "options": {"tools": ["calculator"], "offer": "text"}}
    source[0]["options"]["environment"] = tools
    found = findings(tasks={"train": source}, rewards={"terms": [{"name": "exact"}]})
    assert found["tasks.train.0 tool calculator"].found == "replies: 1"


def test_example_arguments_fit_their_schema() -> None:
    box = {"type": "array", "items": {"type": "number"}, "minItems": 4, "maxItems": 4}
    schema = {
        "type": "object",
        "properties": {
            "box": box,
            "unit": {"enum": ["cm"]},
            "deep": {"type": "object", "properties": {}},
            "n": {"type": "integer"},
        },
        "required": ["box", "unit", "deep", "n"],
    }
    assert not argument_problem(example_arguments(schema), schema)


def test_rows_that_need_a_history_and_terms_that_ask_judges_are_no_errors(tmp_path: Path) -> None:
    from tests.data.test_taskmem import row_of, write_rows

    path = write_rows(tmp_path, *(row_of(clip) for clip in range(3)))
    tasks = {
        "train": [{"source": "taskmem", "options": {"path": path}}],
        "shuffle": False,
        "planner": {"name": "causal_history"},
    }
    terms = [{"name": "episodic_memory", "options": {"correctness": "m"}}]
    checked = findings(tasks=tasks, rewards={"terms": terms}, model={"path": "package:memory_clips"})
    assert checked["tasks.train.0 rows"].level == "ok"
    assert not [found for found in checked.values() if found.level == "error"]


@pytest.mark.parametrize(("treatment", "level"), [("refuse", "error"), ("skip", "warning")])
def test_a_clip_whose_memory_no_row_writes_is_found_by_validate_and_by_a_dry_run(
    treatment: str, level: str, tmp_path: Path
) -> None:
    from tests.data.test_taskmem import row_of, write_rows

    path = write_rows(tmp_path, row_of(0), row_of(2))
    tasks: dict[str, Any] = {"train": [{"source": "taskmem", "options": {"path": path}}], "on_bad_row": treatment}
    tasks |= {"shuffle": False, "planner": {"name": "causal_history"}}
    model, rewards = {"path": "package:memory_clips"}, {"terms": [{"name": "format"}]}
    found = findings(tasks=tasks, rewards=rewards, model=model)["tasks.train.0 rows"]
    assert (found.level, "memory of clip 1" in found.found) == (level, True)
    recipe = parse_recipe(
        json.dumps({"name": "gap", "steps": 1, "model": model, "tasks": tasks, "rewards": rewards}), "test"
    )
    if treatment == "skip":
        assert list(look_at(recipe))
        return
    with pytest.raises(TaskError, match="memory of clip 1"):
        list(look_at(recipe))


def test_contexts_are_measured_with_responses_as_long_as_a_run_lets_them_be(tmp_path: Path) -> None:
    short = {"prompt": "Which letter comes first?", "answer": "A", "demonstration": "A long answer that is cut."}
    tasks = {
        "train": rows(tmp_path / "t.jsonl", short),
        "evaluate": rows(tmp_path / "e.jsonl", short | {"prompt": "Which letter comes last of all?"}),
    }
    limits: dict[str, Any] = {"rollout": {"max_new_tokens": 4}, "rewards": {"terms": [{"name": "exact"}]}}
    wide = findings(tasks=tasks, **limits)
    length = int(wide["tasks.evaluate.0 prompt lengths"].found.split()[2])
    for check in ("prompt lengths", "context lengths"):
        assert "rollout.max_context_tokens" in wide[f"tasks.evaluate.0 {check}"].found, "evaluation's own is not set"
    for most, fits in ((length + 4, True), (length + 3, False)):
        found = findings(tasks=tasks, evaluation={"max_context_tokens": most}, **limits)
        for check in ("prompt lengths", "context lengths"):
            finding = found[f"tasks.evaluate.0 {check}"]
            assert (finding.level == "ok", "evaluation.max_context_tokens" in finding.found) == (fits, True)
        assert f"up to {length + 4} of {most}" in found["tasks.evaluate.0 context lengths"].found


ASKED = {"prompt": "<image>What?", "answer": "A", "demonstration": "<answer>A</answer>"}


def test_each_bad_row_is_found_and_an_exclude_list_of_them_leaves_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Pictures, demonstrations, answers and duplicates, of which one is the held-out picture in another file."""
    monkeypatch.chdir(tmp_path)
    pixels = np.random.default_rng(0).integers(0, 256, (32, 32, 3), np.uint8)
    for name in ("a", "b", "c", "d", "e", "f", "g"):
        Image.fromarray(np.roll(pixels, ord(name), 0)).save(f"{name}.png")
    Image.new("RGB", (32, 32), (9, 9, 9)).save("blank.jpg")
    Image.open("a.png").save("same.png", compress_level=1)
    (tmp_path / "broken.png").write_bytes(b"no picture")
    given: dict[str, dict[str, Any]] = {
        "good": {"images": ["b.png"]},
        "blank": {"images": ["blank.jpg"]},
        "wrong": {"images": ["c.png"], "demonstration": "<answer>B</answer>"},
        "unread": {"images": ["d.png"], "answer": "?!", "demonstration": None},
        "long": {"images": ["e.png"], "answer": "A" * 400, "demonstration": None},
        "no shown answer": {"images": ["f.png"], "demonstration": None},
        "same": {"images": ["same.png"], "answer": "B", "demonstration": None},
        "broken": {"images": ["broken.png"]},
    }
    train = rows(tmp_path / "train.jsonl", *(ASKED | {"id": name} | row for name, row in given.items()))
    held_out = rows(tmp_path / "test.jsonl", ASKED | {"id": "held", "images": ["a.png"]})
    recipe = {
        "name": "mine",
        "steps": 1,
        "model": {"path": "tiny:qwen3_vl"},
        "tasks": {"train": train, "evaluate": held_out, "on_bad_row": "skip"},
        "rollout": {"max_new_tokens": 40},
        "rewards": {"terms": [{"name": "exact"}]},
    }
    bad = BadRows()
    findings(bad=bad, **{key: value for key, value in recipe.items() if key != "name"})
    assert {row.id: row.check for row in bad.found.values()} == {
        "blank": "blank pictures",
        "wrong": "demonstrations rewarded",
        "unread": "answers reachable",
        "long": "answers reachable",
        "same": "splits disjoint",
        "broken": "rows",
    }
    Path("mine.json").write_text(json.dumps(recipe))
    assert main(["validate", "mine.json"]) == 1  # held-out rows are trained on
    listed = "runs/validate/mine.jsonl"
    assert listed in capsys.readouterr().out
    assert [json.loads(line)["row"] for line in Path(listed).read_text().splitlines()] == [7, 1, 2, 3, 4, 6]
    assert main(["validate", "mine.json", f"tasks.exclude={listed}"]) == 0
    assert "6 rows are left out already" in capsys.readouterr().out
    left = make_sources(parse_recipe(json.dumps(recipe), "test", [f"tasks.exclude={listed}"]).tasks, "train", MediaStore())
    assert [left[0][i].id for i in range(len(left[0]))] == ["good", "no shown answer"]


def test_a_list_that_was_made_for_other_rows_is_refused(tmp_path: Path) -> None:
    train = rows(tmp_path / "train.jsonl", *({"id": name, "prompt": "1?", "answer": "A"} for name in "ab"))
    path = tmp_path / "bad.jsonl"
    tasks = TasksSection(train=train, exclude=path)
    for line in (
        {"source": "tasks.train.0", "row": 1, "id": "a"},
        {"source": "tasks.train.0", "row": 2, "id": "c"},
        {"source": "tasks.train.1", "row": 0, "id": "a"},
        {"row": 0},
    ):
        path.write_text(json.dumps(line))
        with pytest.raises(RecipeError, match=r"tasks\.exclude"):
            make_sources(tasks, "train", MediaStore())
    path.write_text("".join(json.dumps({"source": "tasks.train.0", "row": i, "id": "ab"[i]}) + "\n" for i in range(2)))
    with pytest.raises(TaskError, match="all 2 rows"):
        make_sources(tasks, "train", MediaStore())


def test_silent_clips_and_impossible_rates_are_found_and_quiet_ones_are_not(tmp_path: Path) -> None:
    tone = np.sin(np.arange(8000) / 5).astype(np.float32)
    clips = {"loud": (tone, 16000), "quiet": (tone * 0.01, 8000), "silent": (tone * 1e-4, 16000), "slow": (tone, 1200)}
    for name, (samples, rate) in clips.items():
        (tmp_path / f"{name}.wav").write_bytes(encode_wav(samples, rate))
    asked = ({"id": n, "prompt": "<audio>What?", "answer": "A", "audios": [f"{n}.wav"]} for n in clips)
    bad = BadRows()
    given = {"model": {"path": "tiny:qwen2_5_omni"}, "rewards": {"terms": [{"name": "exact"}]}}
    findings(bad=bad, tasks={"train": rows(tmp_path / "rows.jsonl", *asked)}, **given)
    assert {row.id: row.check for row in bad.found.values()} == {"silent": "silent sounds", "slow": "sampling rates"}


def test_a_form_of_answers_that_only_the_users_own_term_reads_is_no_problem(tmp_path: Path) -> None:
    tasks = {"train": rows(tmp_path / "rows.jsonl", *({"prompt": f"{i}?", "answer": str(i)} for i in range(4)))}
    bad = BadRows()
    found = findings(bad=bad, tasks=tasks, rewards={"terms": [{"name": f"{__name__}:Final"}]})
    assert found["tasks.train.0 answers reachable"].level == "ok"
    assert not bad.found


def test_a_known_answer_with_its_solution_may_be_longer_than_a_response(tmp_path: Path) -> None:
    prompt = {"prompt": "How many?", "answer": "48 and half of it, which is 24, are 72. #### 72"}
    tasks = {"train": rows(tmp_path / "rows.jsonl", prompt)}
    for most, level in ((20, "ok"), (3, "warning")):
        found = findings(tasks=tasks, rewards={"terms": [{"name": "gsm8k"}]}, rollout={"max_new_tokens": most})
        assert found["tasks.train.0 answers reachable"].level == level


class Final:
    """Compares what follows 'final:'."""

    name, instant = "final", True

    def score(self, task: Task, episode: Episode) -> Score:
        right = self.extract(task, episode) == task.answer
        return Score("final", float(right), correct=right)

    def extract(self, task: Task, episode: Episode) -> str | None:
        return episode.response.partition("final: ")[2] or None
