"""A slime-style environment module: ``build_env(sample, args)``, ``reset``, ``step``, ``format_observation``, ``close``.

As in slime, the question is the row's prompt, the result of ``reset`` is not shown, a step's info is logged, and reward
terms judge the responses. Any of its functions may be a coroutine.
"""

import sys
from collections.abc import Mapping
from importlib import import_module
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import picture_bytes
from sensorium.envs.adapters.content import awaited, picture
from sensorium.envs.protocol import Observation, StepResult
from sensorium.envs.question import question_of
from sensorium.vocabulary.content import Block, Message, Text
from sensorium.vocabulary.errors import EnvironmentFailure, RecipeError
from sensorium.vocabulary.plain import json_of, text_of, words
from sensorium.vocabulary.task import Task


class SlimeEnvironment:
    """``path`` is a dotted module or a ``.py`` file; ``args`` are the arguments that it reads, such as max_turns."""

    instant = False
    recipe_only = ("path", "args")

    def __init__(self, store: MediaStore, task: Task, path: str, args: Mapping[str, Any] | None = None) -> None:
        self.store, self.task, self.path = store, task, path
        self._args = SimpleNamespace(**{"max_turns": 3, "rollout_interaction_env_path": path, **(args or {})})
        self._module = _loaded(path)
        self._environment: Any = None
        self._turn = 0

    async def reset(self, seed: int) -> tuple[tuple[Message, ...], Observation]:
        head, asked = question_of(self.task)
        sample, build = self._sample(seed), self._module.build_env
        try:
            built = build(sample=sample, args=self._args)
        except TypeError:
            built = build(sample, self._args)
        self._environment = await awaited(built)
        await awaited(self._environment.reset())
        self._turn = 0
        return head, Observation(asked)

    async def step(self, response: str) -> StepResult:
        if self._environment is None:
            raise EnvironmentFailure(f"{self.path}: nothing was asked yet; reset it first.")
        observation, done, info = await awaited(self._environment.step(response))
        self._turn += 1
        noted = {"valid": True, **(json_of(info) if isinstance(info, Mapping) else {})}
        if done:
            return StepResult(None, done=True, info=noted)
        return StepResult(Observation((await self._message(observation),)), info=noted)

    def demonstrate(self) -> str:
        """A row's ``demonstration`` has a response for each turn; none is known beyond them."""
        raise EnvironmentFailure(f"task {self.task.id}: its demonstration has no response for turn {self._turn}.")

    async def close(self) -> None:
        environment, self._environment = self._environment, None
        if environment is not None and hasattr(environment, "close"):
            await awaited(environment.close())

    def _sample(self, seed: int) -> SimpleNamespace:
        asked = "\n".join(message.text for message in self.task.messages)
        media = [item for message in self.task.messages for item in message.media]
        images = [self.store.picture(item) for item in media if item.kind == "picture"]
        return SimpleNamespace(
            group_index=0, index=seed, prompt=asked, tokens=[], response="", response_length=0, label=self.task.answer,
            reward=None, loss_mask=None, rollout_log_probs=None, status="pending", metadata=dict(self.task.metadata),
            multimodal_inputs={"images": images} if images else None,
        )  # fmt: skip

    async def _message(self, observation: Any) -> Message:
        """The next message, by ``format_observation`` of the environment or its module; without one, pictures first."""
        formatting = next(
            (one for part in (self._environment, self._module) if (one := getattr(part, "format_observation", None))), None
        )
        if formatting is not None:
            chat = await awaited(formatting(observation))
        else:
            held: Mapping[str, Any] = observation if isinstance(observation, Mapping) else {"obs_str": str(observation)}
            pictures = [item for items in (held.get("multi_modal_data") or {}).values() for item in items]
            blocks = [{"type": "image", "image": item} for item in pictures]
            chat = {"role": "user", "content": [*blocks, {"type": "text", "text": str(held.get("obs_str", ""))}]}
        where = f"{self.path}, turn {self._turn}"
        if not isinstance(chat, Mapping) or "content" not in chat:
            raise EnvironmentFailure(f"{where}: format_observation must give a message with a content, not {chat!r:.60}.")
        content = chat["content"] if isinstance(chat["content"], list) else [chat["content"]]
        role = "tool" if chat.get("role") == "tool" else "user"
        return Message(role, tuple(self._block(item, where) for item in content))  # type: ignore[arg-type]

    def _block(self, item: Any, where: str) -> Block:
        if isinstance(item, str):
            return Text(text_of(item))
        if isinstance(item, Mapping) and item.get("type", "text") == "text" and "text" in item:
            return Text(text_of(item["text"]))
        if isinstance(item, Mapping) and "image" in str(item.get("type", "")):
            shown = item.get("image", item.get("image_url"))
            shown = shown.get("url") if isinstance(shown, Mapping) and "url" in shown else shown
            if isinstance(shown, str | bytes | Path | Mapping):
                return self.store.put_picture(picture_bytes(shown, where), where)
            return picture(self.store, shown, where)
        raise EnvironmentFailure(f"{where}: a block of content is text or an image, not {item!r:.60}.")


def _loaded(path: str) -> Any:
    try:
        if not path.endswith(".py"):
            module = import_module(path)
        else:
            name = f"slime_environment_{Path(path).stem}"
            spec = spec_from_file_location(name, path)
            assert spec is not None
            assert spec.loader is not None
            module = sys.modules[name] = module_from_spec(spec)
            spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:  # a module of the user's own may do anything
        raise RecipeError(f"slime: '{path}' cannot be loaded: {words(error)}") from error
    if not hasattr(module, "build_env"):
        raise RecipeError(f"slime: '{path}' has no build_env(sample, args).")
    return module
