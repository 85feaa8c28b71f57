"""A batch whose update was not finite is kept whole, with the weights that met it, so that it can be run again."""

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from torch import Tensor

from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import load_trained
from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.learner.credited_episode import CreditedEpisode, CriticValues
from sensorium.learner.learner_protocol import RunLearner
from sensorium.learner.saved_state import load_state, save_state
from sensorium.recipe.load import load_recipe
from sensorium.runs.durable import read_json, write_whole
from sensorium.runs.episodes import read_groups, write_episodes
from sensorium.runs.run_directory import RunDirectory, step_name
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import CheckpointError, NonFiniteUpdate

KEPT = ("model", "recipe.yaml", "episodes.jsonl", "credit.pt")
"""What lies in the folder of a kept batch, beside batch.json and media."""


def keep_batch(
    directory: RunDirectory,
    step: int,
    learner: RunLearner,
    media: MediaStore,
    loss: str,
    groups: Sequence[Group],
    samples: Sequence[Sequence[CreditedEpisode]],
    error: NonFiniteUpdate,
) -> NonFiniteUpdate:
    """Write model, learner state, episodes, advantages and media; returns the error with the command that reproduces it."""
    folder = directory.kept / step_name(step)
    shutil.rmtree(folder, ignore_errors=True)
    learner.save(folder / "model")
    shutil.copy(directory.recipe, folder / "recipe.yaml")
    write_episodes(folder / "episodes.jsonl", step, groups)
    store = MediaStore(folder / "media")
    for shown in {
        span.media for group in groups for e in group.episodes for t in e.threads for s in t.segments for span in s.media
    }:
        store.take(shown, media)
    credited = [[(s.episode.id, s.advantages, _values_of(s), s.observed) for s in row] for row in samples]
    save_state(credited, folder / "credit.pt")
    write_whole(folder / "batch.json", json.dumps({"step": step, "loss": loss}))
    return NonFiniteUpdate(
        f"step {step}: {error} Nothing was updated. The batch and the weights are kept in '{folder}'; run "
        f"'sensorium replay {folder}' to reproduce it."
    )


def replay(folder: Path) -> dict[str, float]:
    """Run a kept batch again: the update's metrics, or the same NonFiniteUpdate."""
    if not (folder / "batch.json").exists():
        raise CheckpointError(f"'{folder}' holds no kept batch; they lie under a run directory's kept/.")
    missing = [name for name in KEPT if not (folder / name).exists()]
    if missing:
        raise CheckpointError(
            f"'{folder}' lacks {' and '.join(missing)}, which belong to a kept batch: it was copied or written in part. "
            "It cannot be run again without them; put them back from the run that kept it."
        )
    recipe = load_recipe(folder / "recipe.yaml", [])
    batch: dict[str, Any] = read_json(folder / "batch.json", "This batch cannot be run again.")
    store = MediaStore(folder / "media")
    # A decoder of its own: what was kept stays as it is, and nothing is decoded into it.
    policy = load_trained(recipe, store, folder / "model", Decoder(store))
    learner = LocalLearner(recipe, policy, RunDirectory(folder.parents[1]))
    learner.load(folder / "model")
    episodes = {e.id: e for group in read_groups(folder / "episodes.jsonl") for e in group.episodes}
    credited = load_state(folder / "credit.pt")
    samples = [
        [
            CreditedEpisode(episodes[id], advantages, None if values is None else CriticValues(*values), *observed)
            for id, advantages, values, *observed in row
        ]
        for row in credited
    ]
    try:
        return learner.step(samples, batch["loss"])
    finally:
        policy.chat.decoder.close()


def _values_of(sample: CreditedEpisode) -> tuple[Tensor, Tensor] | None:
    """What a critic is taught of a sample, as plain tensors."""
    return None if sample.critic_values is None else (sample.critic_values.values_P, sample.critic_values.targets_P)
