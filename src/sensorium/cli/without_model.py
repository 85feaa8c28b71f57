"""Playing a recipe's tasks without a model: its chat template, environments and reward terms, and anybody's responses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from inspect import isawaitable
from typing import Any

from sensorium.assembly.session import EnvironmentMaker, make_scorer, open_store, sampling_of
from sensorium.engines.protocol import Request
from sensorium.engines.scripted import ScriptedEngine
from sensorium.envs.protocol import Environment
from sensorium.media.store import MediaStore
from sensorium.models.chat_processor import ChatProcessor
from sensorium.models.load_chat import load_chat_processor, load_stand_in
from sensorium.recipe.schema import Recipe, RolloutSection
from sensorium.rewards.scorer import Scorer
from sensorium.rollout.play import Attempt, Rollout
from sensorium.vocabulary.episode import Group
from sensorium.vocabulary.errors import ModelError
from sensorium.vocabulary.task import Task

LOOKALIKES = {"2.5-omni": "qwen2_5_omni", "3-omni": "qwen3_omni_moe", "2.5-vl": "qwen2_5_vl", "3-vl": "qwen3_vl"}
"""Parts of published names, and the family whose tiny model stands in for one whose files are not here."""

Watch = Callable[[str, Any], None]
"""Hears what an environment returned: of which method, and what."""


@dataclass
class ModelFreeSession:
    """What is needed to play a recipe's tasks with given responses.

    ``stand_in`` says whose tokenizer is used instead of the model's own, ``problem`` why.
    """

    recipe: Recipe
    store: MediaStore
    chat: ChatProcessor
    scorer: Scorer
    stand_in: str
    problem: str = ""

    async def play(
        self,
        tasks: list[Task],
        answers: Callable[[Request], str],
        *,
        demonstrate: bool = False,
        make: Callable[[Task], Environment] | None = None,
        section: RolloutSection | None = None,
    ) -> list[Group]:
        """Play each task once with these answers, or with its own demonstration, and let the reward terms judge it.

        ``section`` has the limits of held-out tasks.
        """
        section = section or self.recipe.rollout
        rollout = Rollout(self.chat, ScriptedEngine(self.chat, answers), section, make or EnvironmentMaker(self.store))
        attempt = Attempt(self.recipe.seed, 0, "play", demonstrate)
        try:
            groups = await rollout.stream(tasks, 1, attempt, sampling_of(section)).in_order()
            return [await self.scorer.score_group(group) for group in groups]
        finally:
            rollout.close()


@contextmanager
def model_free_session(recipe: Recipe) -> Iterator[ModelFreeSession]:
    """A session without weights; where the model's files are not here, a tiny look-alike's tokenizer stands in."""
    store = open_store(recipe)
    chat, stand_in, problem = _chat(recipe, store)
    scorer = make_scorer(recipe.rewards, None, store)
    try:
        yield ModelFreeSession(recipe, store, chat, scorer, stand_in, problem)
    finally:
        scorer.close()
        chat.decoder.close()


def _chat(recipe: Recipe, store: MediaStore) -> tuple[ChatProcessor, str, str]:
    model = recipe.model
    try:
        found = load_chat_processor(model.path, store=store, family=model.family, revision=model.revision)
    except ModelError as error:
        named = model.path.lower().replace("_", "-").replace("qwen-", "qwen")
        families = [family for part, family in LOOKALIKES.items() if part in named]
        family = model.family if model.family != "auto" else families[0] if families else "qwen3_vl"
        return load_stand_in(family, store), f"tiny:{family}", str(error)
    return found, "", ""


class WatchedEnvironment:
    """An environment, and somebody who hears what its ``reset`` and ``step`` return."""

    def __init__(self, inner: Environment, watch: Watch) -> None:
        self.inner, self._watch = inner, watch
        self.instant = getattr(inner, "instant", False) is True

    def reset(self, seed: int) -> Any:
        """Start."""
        return self._heard("reset", self.inner.reset(seed))

    def step(self, response: str) -> Any:
        """Act."""
        return self._heard("step", self.inner.step(response))

    def demonstrate(self) -> Any:
        """A good response."""
        return self.inner.demonstrate()

    def close(self) -> Any:
        """Give everything back."""
        return self.inner.close()

    def _heard(self, method: str, returned: Any) -> Any:
        if isawaitable(returned):
            return self._awaited(method, returned)
        self._tell(method, returned)
        return returned

    async def _awaited(self, method: str, returned: Any) -> Any:
        found = await returned
        self._tell(method, found)
        return found

    def _tell(self, method: str, returned: Any) -> None:
        with suppress(AttributeError, TypeError, ValueError):  # of a wrong type: the rollout says so
            self._watch(method, returned)
