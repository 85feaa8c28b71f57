"""Caption RL over HTTP, all real: a served model reads, a reward service asks it, and a recipe trains against that."""

from pathlib import Path

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.models.load import load_policy
from sensorium.recipe.load import load_recipe
from sensorium.runs.episodes import TRANSCRIPTS
from sensorium.runs.metrics import read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.services.model_service import ModelHost, ModelService, make_model_app
from sensorium.systems.caprl.service import make_reward_app
from sensorium.trainer.run import train

from .running import serving_app
from .test_reward_service import make_service


@pytest.mark.parametrize("kind", ["image", "video"])
def test_a_captioner_is_trained_by_what_a_served_reader_answers(kind: str, tmp_path: Path) -> None:
    store = MediaStore(tmp_path / "media")
    host = ModelHost(load_policy("tiny:qwen3", store=store), most_context=1024)
    reader = ModelService(host, store, "reader")
    with serving_app(make_model_app(reader)) as (url, _):
        service = make_service(tmp_path, f"{url}/v1", draws=2)
        with serving_app(make_reward_app(service)) as (address, _):
            changes = ["steps=1", "threads=1", "model.path=package:shapes", f"run_dir={tmp_path / 'run'}"]
            changes += ["batch.prompts_per_step=2", "batch.group_size=2", "tasks.evaluate=[]", "rollout.max_new_tokens=4"]
            changes.append(f'rewards.terms.0.options.servers=["{address}"]')
            train(load_recipe(f"tiny/caprl_{kind}", changes))
            (row,) = read_metrics(RunDirectory(tmp_path / "run").metrics)
            asked = service.client.cache.calls()
    kept = tmp_path / "run" / TRANSCRIPTS
    assert kept.exists() == (service.counters["judged"] > 0), "what the reader was asked is kept with the run"
    assert row["reward/caption_qa"] is not None
    assert row.get("missing/caption_qa", 0) == 0
    assert 1 <= len(asked) <= 8
    assert {call.outcome for call in asked} <= {"answered", "malformed"}
    assert (service.counters["items"], service.counters["judged"] + service.counters["missing"]) == (4, 4)
