"""Held-out tasks have limits of their own: context and new tokens, in runs, commands, checks and forecasts."""

from contextlib import suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from transformers import AutoProcessor

from sensorium.cli.validation import Finding, model_free_session, validate
from sensorium.data.made_media import encode_clip
from sensorium.evaluation.evaluate import evaluate_into
from sensorium.models.tiny import make_tiny, take_published_sizes
from sensorium.recipe.checks import problems
from sensorium.recipe.family_facts import FAMILIES
from sensorium.recipe.load import load_recipe
from sensorium.recipe.memory_estimate import cached_tokens
from sensorium.recipe.schema import Recipe
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.systems.audio_visual.generated import make_daily_omni, make_intent, tone_samples
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NothingTrained, TaskError
from tests.recipes import HELD_OUT, SHAPES, parsed, quick

STEP_TOKENS = 36 * 20
"""Of two frames of 1280 x 720 as Qwen2.5-Omni sees them: 1008 x 560 in tokens of 28 x 28."""
SMALL = [
    "model.dtype=float32", "model.device=cpu", "steps=1", "batch.prompts_per_step=1", "batch.group_size=2",
    "batch.updates_per_epoch=1", "rollout.max_new_tokens=8", "evaluation.every=1", "evaluation.at_start=false",
    "checkpoint.every=0", "health.sight_tasks=1", "threads=1",
]  # fmt: skip


@pytest.fixture(scope="module")
def wide(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """IntentTrain and Daily-Omni with clips of 1280 x 720, and a tiny Qwen2.5-Omni that sees them as large as published."""
    folder = tmp_path_factory.mktemp("wide")
    make_intent(folder / "intent", count=1, problem_types=("multiple choice",))
    make_daily_omni(folder / "daily", count=2, videos=1)
    frames = np.random.default_rng(0).integers(0, 255, (8, 45, 80, 3), np.uint8).repeat(16, 1).repeat(16, 2)
    clip = encode_clip(frames, 4.0, tone_samples("low", 0, 2.0))
    (folder / "daily/Videos/v0/v0_video.mp4").write_bytes(clip)
    for name in ("emer_rewrite_0.mp4", "social_iq_v2_rewrite_0.mp4"):
        (folder / "intent/videos").mkdir(exist_ok=True)
        (folder / "intent" / name).write_bytes(clip)  # before the one in the archive's folder
    model = make_tiny("qwen2_5_omni", folder / "model", max_position_embeddings=32768)
    processor = AutoProcessor.from_pretrained(model)
    take_published_sizes(FAMILIES["qwen2_5_omni"], processor)
    processor.save_pretrained(model)
    return folder


def wide_recipe(wide: Path, run: Path, *changes: str) -> Recipe:
    places = {"train.0": wide / "intent", "evaluate.0": wide / "daily"}
    sources = [f"tasks.{place}.options.path={folder}" for place, folder in places.items()]
    sources += ["tasks.evaluate.0.options.video={frames: 4}", "tasks.train.0.options.video={frames: 2}"]
    limits = [f"rollout.max_context_tokens={2 * STEP_TOKENS}", "evaluation.max_context_tokens=0"]
    given = [f"run_dir={run}", "tasks.evaluate=[{source: daily_omni, options: {}}]", *sources, *limits, *SMALL]
    return load_recipe("audio_visual", [*given, f"model.path={wide / 'model'}", *changes])


def test_clips_of_1280_x_720_are_trained_on_and_evaluated_within_a_longer_context(wide: Path, tmp_path: Path) -> None:
    recipe = wide_recipe(wide, tmp_path / "run", f"evaluation.max_context_tokens={4 * STEP_TOKENS}")
    with suppress(NothingTrained):  # random weights never write the tags
        train(recipe)
    directory = RunDirectory(tmp_path / "run")
    assert directory.summaries()[-1]["judged"] == 2
    assert "eval/accuracy" in read_metrics(directory.metrics)[-1]
    assert any(name.startswith("sight/") for name in read_metrics(directory.metrics)[-1])
    (group, _) = read_groups(directory.eval_episodes_of(1))
    assert group.episodes[0].response is not None
    summary = evaluate_into(tmp_path / "eval", recipe, str(wide / "model"))
    assert (summary["judged"], summary["failed"]) == (2, 0)


def test_a_run_that_cannot_evaluate_anything_prints_so_and_the_command_fails(
    wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = wide_recipe(wide, tmp_path / "run")
    with suppress(NothingTrained):
        train(recipe)
    shown = capsys.readouterr().err
    assert shown.count("ATTENTION: nothing is evaluated") == 2  # before the first step, and after the last
    assert "evaluation.max_context_tokens" in shown
    assert "eval/accuracy" not in read_metrics(tmp_path / "run/metrics.jsonl")[-1]
    with pytest.raises(TaskError, match=r"evaluation\.max_context_tokens"):
        evaluate_into(tmp_path / "eval", recipe, str(wide / "model"))


def checked(recipe: Recipe) -> dict[str, Finding]:
    with model_free_session(recipe) as session:
        return {f"{found.where} {found.check}": found for found in validate(session, episodes=1)}


def test_validate_measures_prompts_by_the_sizes_of_the_published_family(wide: Path, tmp_path: Path) -> None:
    """The tiny processor that stands in would see a frame of 1280 x 720 as 240 tokens."""
    for changes, level in (((), "warning"), ((f"evaluation.max_context_tokens={4 * STEP_TOKENS}",), "ok")):
        found = checked(wide_recipe(wide, tmp_path / "run", "model.path=Qwen/Qwen2.5-Omni-7B", *changes))
        assert found["model chat template"].level == "warning"
        assert found["tasks.evaluate.0 prompt lengths"].level == level
        assert int(found["tasks.evaluate.0 prompt lengths"].found.split()[2].replace(",", "")) > 2 * STEP_TOKENS
        assert found["tasks.train.0 prompt lengths"].level == "ok"


def test_held_out_tasks_have_a_budget_of_their_own(tmp_path: Path) -> None:
    """The engine is asked for fewer tokens, whichever it is."""
    own: dict[str, Any] = {"every": 1, "max_new_tokens": 2, "max_context_tokens": 512}
    changes = {"evaluation": own, "rollout": {"max_new_tokens": 6, "ignore_stop_tokens": True}, "steps": 1}
    tasks = {"train": [SHAPES], "evaluate": [HELD_OUT]}
    train(parsed(quick("limits"), tmp_path, **changes, tasks=tasks, health={"sight_tasks": 0}))
    groups = read_groups(tmp_path / "episodes/step_000001.jsonl")
    assert {episode.sampled_tokens for group in groups for episode in group.episodes} == {6}
    assert RunDirectory(tmp_path).summaries()[-1]["length_mean"] == 2


def test_limits_that_contradict_each_other_are_found() -> None:
    def found(*changes: str) -> list[str]:
        recipe = load_recipe("shapes")
        data = {
            key: int(value) if value.isdigit() else True for key, _, value in (change.partition("=") for change in changes)
        }
        evaluation = recipe.evaluation.model_copy(update={k[5:]: v for k, v in data.items() if k.startswith("eval.")})
        rollout = recipe.rollout.model_copy(update={k[8:]: v for k, v in data.items() if k.startswith("rollout.")})
        return [place for place, _ in problems(recipe.model_copy(update={"evaluation": evaluation, "rollout": rollout}))]

    assert found() == []
    assert found("eval.max_context_tokens=40", "eval.max_new_tokens=40") == ["evaluation.max_new_tokens"]
    assert "evaluation.max_context_tokens" in found("eval.max_context_tokens=15", "eval.max_new_tokens=4")
    assert found("eval.max_new_tokens=300", "rollout.max_episode_tokens=200") == ["evaluation.max_new_tokens"]
    assert found("rollout.count_observations=yes") == ["rollout.count_observations"]
    assert found("rollout.count_observations=yes", "rollout.max_episode_tokens=200") == []
    windowed = ("rollout.count_observations=yes", "rollout.max_episode_tokens=200", "rollout.window=1")
    assert found(*windowed) == ["rollout.count_observations"]
    shapes = load_recipe("shapes")
    counting = shapes.rollout.model_copy(update={"count_observations": True})
    [(place, text)] = problems(shapes.model_copy(update={"rollout": counting}))
    assert text.startswith(place), "named also where the error has no line of a file"


def test_a_longer_context_of_held_out_tasks_is_in_the_forecast_of_memory() -> None:
    short, long = (load_recipe("audio_visual", [f"evaluation.max_context_tokens={n}"]) for n in (0, 32000))
    assert cached_tokens(long) == 64 * 32000 > cached_tokens(short)


def test_the_recipe_evaluates_32_frames_of_1280_x_720() -> None:
    recipe = load_recipe("audio_visual")
    a_minute_of_sound = 60 * 25
    assert recipe.held_out_rollout.max_context_tokens > 16 * STEP_TOKENS + a_minute_of_sound + recipe.rollout.max_new_tokens
