"""A learner that lives in a thread of its own, with weights, media and caches of its own: only plain data pass to and fro.

Everything is pickled on its way, as it would be between processes; what cannot be pickled, or is changed in place on the
other side, would show.
"""

import pickle
from collections.abc import Collection, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from torch import Tensor

from sensorium.assembly.local_learner import LocalLearner
from sensorium.assembly.models import load_trained
from sensorium.assembly.playing import open_store
from sensorium.assembly.session import Session
from sensorium.learner.credited_episode import Assessment, Groups, TokenMeasures
from sensorium.recipe.schema import Recipe
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.episode import Episode


class ThreadedLearner:
    """Runs every call of the protocol in one worker thread."""

    def __init__(self, recipe: Recipe, session: Session, directory: RunDirectory, saved: Path | None) -> None:
        self._thread = ThreadPoolExecutor(1, "learner")
        self._thread.submit(self._open, recipe, directory, saved).result()

    def _open(self, recipe: Recipe, directory: RunDirectory, saved: Path | None) -> None:
        self._policy = load_trained(recipe, open_store(recipe, directory.media), saved)
        self._learner = LocalLearner(recipe, self._policy, directory)

    def _call(self, name: str, *arguments: Any) -> Any:
        sent = pickle.dumps(arguments)

        def work() -> bytes:
            found = getattr(self._learner, name)
            return pickle.dumps(found(*pickle.loads(sent)) if callable(found) else found)

        return pickle.loads(self._thread.submit(work).result())

    @property
    def version(self) -> int:
        return self._call("version")

    def begin_rl(self) -> None:
        self._call("begin_rl")

    def assess(self, groups: Sequence[Sequence[Episode]]) -> Assessment:
        return self._call("assess", [list(group) for group in groups])

    def step(self, groups: Groups, loss: str) -> dict[str, float]:
        return self._call("step", groups, loss)

    def token_measures(self, episodes: Collection[str]) -> dict[str, TokenMeasures]:
        return self._call("token_measures", list(episodes))

    def weights(self) -> Mapping[str, Tensor]:
        return self._call("weights")

    def problem(self) -> str:
        return self._call("problem")

    def save(self, folder: Path) -> None:
        self._call("save", folder)

    def load(self, folder: Path) -> None:
        self._call("load", folder)

    def close(self) -> None:
        self._call("close")
        self._policy.chat.decoder.close()
        self._thread.shutdown()
