"""The audio-visual recipe as published, on look-alike data with real clips: it trains, and evaluates by category."""

from contextlib import suppress
from pathlib import Path

import pytest

from sensorium.recipe.load import load_recipe
from sensorium.runs.episodes import read_groups
from sensorium.runs.metrics import read_metrics
from sensorium.systems.audio_visual.generated import make_daily_omni, make_intent
from sensorium.systems.audio_visual.sources import COLUMNS
from sensorium.trainer.run import train
from sensorium.vocabulary.errors import NothingTrained

SMALL = [
    "model.path=tiny:qwen2_5_omni",
    "model.dtype=float32",
    "model.device=cpu",
    "steps=2",
    "epochs=0",
    "batch.prompts_per_step=4",
    "batch.updates_per_epoch=2",
    "batch.group_size=2",
    "rollout.max_new_tokens=8",
    "rollout.max_context_tokens=4096",
    "evaluation.every=2",
    "evaluation.at_start=false",
    "checkpoint.every=0",
    "optimizer.lr=1e-4",
]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("audio_visual")
    make_intent(folder / "intent")
    make_daily_omni(folder / "daily_omni", count=12)
    held_out = (
        f"tasks.evaluate=[{{source: daily_omni, options: {{path: '{folder / 'daily_omni'}', video: {{frames: 32}}}}}}]"
    )
    places = [f"tasks.train.0.options.path={folder / 'intent'}", held_out]
    with suppress(NothingTrained):  # a model of random weights never writes the tags
        train(load_recipe("audio_visual", [f"run_dir={folder / 'run'}", *places, *SMALL]))
    return folder / "run"


def test_components_add_up_to_the_reward(run: Path) -> None:
    for row in read_metrics(run / "metrics.jsonl"):
        expected = 0.2 * row["reward/format"] + 0.8 * row["reward/exact_alnum"]
        assert row["reward/mean"] == pytest.approx(expected)
        assert row["episodes/failed"] == 0
    assert "eval/accuracy" in row
    assert "eval/reward/exact_alnum" in row


def test_each_prompt_shows_a_video_and_lets_a_sound_be_heard(run: Path) -> None:
    for group in read_groups(run / "episodes/step_000001.jsonl"):
        for episode in group.episodes:
            kinds = [span.media.kind for thread in episode.threads for s in thread.segments for span in s.media]
            assert kinds == ["video", "sound"]


def test_a_sound_inside_its_video_is_trained_on_as_it_was_sampled(tmp_path: Path) -> None:
    make_intent(tmp_path / "intent", count=4)
    options = [
        f"tasks.train.0.options.path={tmp_path / 'intent'}",
        "tasks.train.0.options.video={use_audio_in_video: true}",
    ]
    other = ["tasks.evaluate=[]", "evaluation.every=0", "rewards.terms=[{name: tests.trainer.cinema:ByIndex}]", "steps=1"]
    train(load_recipe("audio_visual", [f"run_dir={tmp_path / 'run'}", *options, *SMALL, *other]))
    (row,) = read_metrics(tmp_path / "run" / "metrics.jsonl")
    assert row["mismatch/max"] < 1e-4
    group = next(iter(read_groups(tmp_path / "run/episodes/step_000001.jsonl")))
    video, sound = (span.media for span in group.episodes[0].threads[0].segments[0].media)
    assert (video.sound, video.kind, sound.kind) == (sound, "video", "sound")


def test_the_evaluation_knows_the_published_columns(run: Path) -> None:
    last = read_metrics(run / "metrics.jsonl")[-1]
    found = {name.removeprefix("eval/accuracy/") for name in last if name.startswith("eval/accuracy/")}
    assert found == set(COLUMNS)
