"""Checkpoints: every one is a Hugging Face model with a ``trainer/`` folder beside it, complete or absent, never half.

A checkpoint is written into a hidden folder, flushed, marked COMPLETE with the sizes and digests of its files, then renamed
into place. A kill at any point, or a full disk, leaves the last complete one as it was. A model with a number that is not
finite is never written. After a non-finite update the batch is kept, so that ``replay`` can reproduce it. What the trainer
stores is decided in ``loop.py`` (``_save``, ``restore``).
"""

import errno
import json
import os
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import load_trained
from sensorium.data.decoder import Decoder
from sensorium.data.media_store import MediaStore
from sensorium.learner.credited_episode import CreditedEpisode, CriticValues
from sensorium.learner.learner_protocol import RunLearner
from sensorium.learner.saved_state import load_state, save_state
from sensorium.recipe.load import load_recipe
from sensorium.runs.checkpoint_layout import (
    DRAFT,
    MARKER,
    TRAINER_STATE,
    Best,
    CheckpointFolder,
    contents_of,
    problems_of,
    remove_checkpoint,
)
from sensorium.runs.durable import cannot_write, flush, read_json, write_whole, writing
from sensorium.runs.episodes import read_groups, write_episodes
from sensorium.runs.run_directory import RunDirectory, step_name
from sensorium.trainer.health.monitor import refuse_ruined
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import CheckpointError, LearnerLost, NonFiniteUpdate, RecordError


class Checkpoints(CheckpointFolder):
    """The ``checkpoints/`` folder of a run, for writing; ``keep`` of them stay."""

    def __init__(self, folder: Path, keep: int) -> None:
        super().__init__(folder)
        self.keep = keep

    def save(
        self, step: int, learner: RunLearner, state: dict[str, Any], best: Best | None, protect: int | None = None
    ) -> Path:
        """Write a checkpoint of the policy and everything needed to continue exactly; then apply retention.

        What ``state`` holds is decided by ``_save`` and ``restore`` in ``trainer/loop.py``.

        ``protect`` is the step of an earlier one that must stay, because later ones may be damaged. Retention is applied
        before, too, so that no more space is needed than for ``keep``, the best and the draft.
        """
        refuse_ruined(learner, step, self.complete)
        self._retain(self.best(), {protect})
        target = self.path(step)
        draft = self.folder / f"{DRAFT}{target.name}"
        shutil.rmtree(draft, ignore_errors=True)
        with _writing(draft):
            self.folder.mkdir(parents=True, exist_ok=True)
            learner.save(draft)
            (draft / TRAINER_STATE).parent.mkdir(exist_ok=True)
            save_state(state, draft / TRAINER_STATE)
            files = contents_of(draft)
            for name in files:
                flush(draft / name)
            listed = {name: {"size": content.size, "digest": content.digest} for name, content in files.items()}
            (draft / MARKER).write_text(json.dumps({"step": step, "files": listed}, indent=1))
            flush(draft / MARKER)
            flush(draft)
            if target.exists():
                remove_checkpoint(target)
            os.replace(draft, target)
            flush(self.folder)
        if best is not None:
            self.write_best(best)
        self._retain(best, {step, protect})
        return target

    def load(self, step: int) -> dict[str, Any]:
        """The trainer's state of a checkpoint."""
        path = self.path(step)
        problems = [] if step in self.verified else problems_of(path)
        if problems:
            last = ", ".join(map(str, self.complete()[-1:])) or "none"
            raise CheckpointError(
                f"checkpoint '{path}' is not complete: {problems[0]}. The last complete one is of step: {last}."
            )
        return load_state(path / TRAINER_STATE)

    def _retain(self, best: Best | None, others: set[int | None]) -> None:
        kept = {*self.complete()[-self.keep :], *others}
        if best is not None:
            kept.add(best.step)
        for old in self.complete():
            if old not in kept:
                remove_checkpoint(self.path(old))


@contextmanager
def _writing(draft: Path) -> Iterator[None]:
    """Remove the draft of a failed save; report a full disk in one sentence, whatever library found it."""
    try:
        with writing(draft):
            yield
    except RecordError:
        shutil.rmtree(draft, ignore_errors=True)
        raise
    except Exception as error:  # torch and safetensors have errors of their own for a write that failed
        full = _failed_write(error, draft)
        shutil.rmtree(draft, ignore_errors=True)
        if full is None:
            raise
        raise full from error


def _failed_write(error: Exception, draft: Path) -> RecordError | None:
    """The failed write behind a library's error; None if it was something else."""
    # Of a rank's error only the cause: the learner's advice does not apply to a full disk.
    text = str(error.__cause__ if isinstance(error, LearnerLost) and error.__cause__ else error)
    words = ("No space left", "File too large", "Disk quota", "I/O error", "IoError", "file write failed", "unexpected pos")
    if not any(word in text for word in words):
        return None
    try:
        with (draft / ".probe").open("wb") as probe:  # which error a write gives now
            probe.write(b"\0" * (1 << 20))
            probe.flush()
            os.fsync(probe.fileno())
    except OSError as reason:
        return cannot_write(draft, reason)
    numbers = {"No space left": errno.ENOSPC, "Disk quota": errno.EDQUOT, "File too large": errno.EFBIG}
    number = next((number for word, number in numbers.items() if word in text), errno.EIO)
    return cannot_write(draft, OSError(number, text.splitlines()[0].rstrip(".")))


KEPT = ("model", "recipe.yaml", "episodes.jsonl", "credit.pt")  # in the folder of a kept batch, with batch.json and media


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
    """Keep model, learner state, episodes, advantages and media; returns the error with the command that reproduces it."""
    folder = directory.kept / step_name(step)
    shutil.rmtree(folder, ignore_errors=True)
    learner.save(folder / "model")
    shutil.copy(directory.recipe, folder / "recipe.yaml")
    write_episodes(folder / "episodes.jsonl", step, groups, routes=True)
    store = MediaStore(folder / "media")
    for shown in {
        span.media for group in groups for e in group.episodes for t in e.threads for s in t.segments for span in s.media
    }:
        store.take(shown, media)

    def plain(sample: CreditedEpisode) -> tuple[Any, ...]:
        critic = sample.critic_values
        values = None if critic is None else (critic.values_P, critic.targets_P)
        return sample.episode.id, sample.advantages, values, sample.observed

    save_state([[plain(sample) for sample in row] for row in samples], folder / "credit.pt")
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
