"""A VAGEN-style environment class, of today's kind (coroutines) or the legacy one (``compute_reward``).

Its observation is ``{"obs_str": text, "multi_modal_input" or "multi_modal_data": {"<image>": [pictures]}}``.
"""

import asyncio
from collections.abc import Mapping
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.envs.adapters.content import PLACEHOLDER, awaited, key_of, picture, success_of, with_placeholders
from sensorium.envs.protocol import Observation, StepResult
from sensorium.recipe.registry import resolve
from sensorium.vocabulary.content import Block, Message
from sensorium.vocabulary.errors import EnvironmentFailure
from sensorium.vocabulary.plain import json_of, number_of

MEDIA_KEYS = ("multi_modal_input", "multi_modal_data")


class VagenEnvironment:
    """``path`` is ``module:Class``; ``config`` is its env_config, or the arguments of ``config_class`` (``module:Class``).

    A step's reward is the part ``step``; the ``compute_reward`` of a legacy class is the part ``final``, at the end.
    ``max_turns`` truncates an episode.
    """

    instant = False
    recipe_only = ("path", "config", "config_class")

    def __init__(
        self,
        store: MediaStore,
        path: str,
        config: Mapping[str, Any] | None = None,
        config_class: str = "",
        max_turns: int = 5,
    ) -> None:
        self.store, self.path, self.max_turns = store, path, max_turns
        kind = resolve("environment", path, "vagen")
        settings: Any = dict(config or {})
        if config_class:
            settings = resolve("environment", config_class, "vagen")(**settings)
        self._environment = kind(settings)
        self._legacy = hasattr(self._environment, "compute_reward")
        self._seed = self._turn = 0
        self._over = True

    @classmethod
    def content_key(cls, seed: int, options: Mapping[str, Any]) -> str:
        """The content that a seed leads to: the environment's first observation."""

        async def first() -> str:
            environment = cls(MediaStore(), **options)
            try:
                head, observation = await environment.reset(seed)
                return key_of((*head, *observation.messages))
            finally:
                await environment.close()

        return asyncio.run(first())

    async def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        self._seed, self._turn, self._over = seed, 0, False
        observation, _ = await awaited(self._environment.reset(seed))
        prompt = await awaited(self._environment.system_prompt())
        return (Message("system", self._blocks(prompt)),), Observation((Message("user", self._blocks(observation)),))

    async def step(self, response: str) -> StepResult:
        if self._over:
            raise EnvironmentFailure(f"{self.path}: it is over (or has not begun); reset it first.")
        observation, reward, done, info = await awaited(self._environment.step(response))
        self._turn += 1
        success = success_of(info)
        ended = bool(done) or bool(success)
        truncated = not ended and self._turn >= self.max_turns
        self._over = ended or truncated
        rewards: dict[str, float] = {"step": number_of(reward)}
        if self._legacy:
            rewards["final"] = number_of(await awaited(self._environment.compute_reward())) if self._over else 0.0
        return StepResult(
            observation=None if self._over else Observation((Message("user", self._blocks(observation)),)),
            reward=rewards,
            done=self._over,
            truncated=truncated,
            success=bool(success) if self._over else None,
            info={"valid": True, **(json_of(info) if isinstance(info, Mapping) else {})},
        )

    def demonstrate(self) -> str:
        raise EnvironmentFailure(f"{self.path}: there is no demonstration; warm start from rows that have one.")

    async def close(self) -> None:
        self._over = True
        await awaited(self._environment.close())

    def _blocks(self, observation: Any) -> tuple[Block, ...]:
        where = f"{self.path} seed {self._seed} turn {self._turn}"
        if isinstance(observation, str):
            return with_placeholders(observation, [], where)
        if not isinstance(observation, Mapping) or not isinstance(observation.get("obs_str"), str):
            raise EnvironmentFailure(f"{where}: an observation is {{'obs_str': text, …}}, not {observation!r:.60}.")
        media: Mapping[str, Any] = next((observation[key] for key in MEDIA_KEYS if observation.get(key)), {})
        for kind in media:
            if kind != PLACEHOLDER:
                raise EnvironmentFailure(f"{where}: it shows {kind}, and only {PLACEHOLDER} is taken.")
        pictures = [picture(self.store, item, where) for item in media.get(PLACEHOLDER, ())]
        return with_placeholders(observation["obs_str"], pictures, where)
