"""Plain Python functions and callable objects as reward terms.

``def brevity(task, episode): return -len(episode.response)`` returns a number, ``{name: number}``, a Score or several.
``def brevity(prompts, completions, answer, **columns): return [...]`` is TRL's form: it gets lists of one, and returns a
list of one number (None: no score). The columns are ``answer``, ``task_id`` and what stands in the task's metadata.
Completions and prompts are texts; with ``messages: true`` lists of ``{"role", "content"}``, TRL's form of conversations.
Both may be ``async``. A function is asked in a thread under the deadline, unless it has ``instant = True``.
"""

from collections.abc import Callable, Mapping, Sequence
from inspect import Parameter, isawaitable
from typing import Any

from sensorium.recipe.functions import Style, parameters_of, reward_style, wrong_function_options
from sensorium.recipe.names import build, resolve
from sensorium.rewards.protocol import RewardTerm
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, TaskError
from sensorium.vocabulary.plain import shown
from sensorium.vocabulary.task import Task

BLOCKS = {"picture": "image", "video": "video", "sound": "audio"}
SIGNATURES = "(task, episode) or (prompts, completions, **columns)"


def as_term(thing: Any, **options: Any) -> RewardTerm:
    """A reward term from anything that can be one: a term, its class, or a function or callable object of either signature.

    ``options`` are the class's or function's own; for a function also ``name``, ``instant`` and ``messages``.
    """
    if isinstance(thing, type):
        return _term(thing(**options), thing.__name__)
    if callable(getattr(thing, "score", None)):
        if options:
            raise RecipeError(f"reward {shown(thing)} is built already, so it takes no options: {', '.join(options)}.")
        return _term(thing, type(thing).__name__)
    if not callable(thing):
        raise RecipeError(f"a reward is a term with a method score, or a function {SIGNATURES}; not {shown(thing)}.")
    name = _name_of(thing)
    style = reward_style(thing) or _style_by_count(thing, name)
    _, problem = wrong_function_options(name, thing, style, options)
    if problem:
        raise RecipeError(f"rewards: {problem}")
    return FunctionTerm(thing, style, name, options)


def build_term(name: str, options: Mapping[str, Any], where: str) -> RewardTerm:
    """The reward term that a recipe names: a registered one, ``module:Class``, or ``module:function``."""
    target = resolve("reward", name, where)
    if reward_style(target):
        return as_term(target, **options)
    built = build("reward", name, options, where)
    if callable(getattr(built, "score", None)):
        return _term(built, getattr(target, "__name__", name))
    raise RecipeError(
        f"{where}: '{name}' gave {shown(built)}, which is no reward term. A reward is a class with a method score(task, "
        f"episode), or a function whose parameters are called {SIGNATURES}."
    )


class FunctionTerm:
    """A function as a reward term."""

    def __init__(self, function: Callable[..., Any], style: Style, name: str, options: Mapping[str, Any]) -> None:
        parameters = parameters_of(function)
        kept = dict(options)
        own = {key: kept.pop(key) for key in ("name", "instant", "messages") if key in kept and key not in parameters}
        self.name = str(own.get("name", name))
        self.instant = bool(own.get("instant", getattr(function, "instant", False)))
        known = parameters.get("answer") if style == "completions" else None
        self.needs_answer = known is not None and known.default is Parameter.empty
        self._messages = bool(own.get("messages", False))
        self._function, self._style, self._options, self._parameters = function, style, kept, parameters

    def score(self, task: Task, episode: Episode) -> Any:
        """Whatever the function returns; the scorer turns it into scores."""
        if self._style == "episode":
            return self._function(task, episode, **self._options)
        returned = self._function(**self._columns(task, episode))
        return _first_later(self.name, returned) if isawaitable(returned) else _first(self.name, returned)

    def _columns(self, task: Task, episode: Episode) -> dict[str, Any]:
        """The arguments of TRL's form: lists of one, of those that the function takes."""
        known: dict[str, Any] = {key: [value] for key, value in task.metadata.items() if isinstance(key, str)}
        known |= {"task_id": [task.id], "answer": [task.answer]}
        known |= {"prompts": [self._prompt(task, episode)], "completions": [self._completion(episode)]}
        known["completion_ids"] = [[token for turn in episode.turns for token in turn.response.tokens]]
        known |= self._options
        named = [p for p in self._parameters.values() if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        for parameter in named:
            if parameter.default is Parameter.empty and parameter.name not in known:
                raise TaskError(
                    f"task {task.id}: reward function '{self.name}' takes '{parameter.name}', and the task has no such "
                    "column. Put it into the row's metadata, or give the parameter a default."
                )
        if any(p.kind == p.VAR_KEYWORD for p in self._parameters.values()):
            return known
        return {p.name: known[p.name] for p in named if p.name in known}

    def _prompt(self, task: Task, episode: Episode) -> Any:
        shown_first = task.messages or (episode.turns[0].observation if episode.turns else ())
        if self._messages:
            return [{"role": message.role, "content": _content(message)} for message in shown_first]
        return "\n".join(message.text for message in shown_first)

    def _completion(self, episode: Episode) -> Any:
        if not self._messages:
            return episode.response
        said: list[dict[str, Any]] = []
        for turn in episode.turns:
            if said:
                said += [{"role": message.role, "content": _content(message)} for message in turn.observation]
            said.append({"role": "assistant", "content": turn.response.text})
        return said


def _content(message: Message) -> Any:
    """A message's text, or its blocks where it shows media."""
    if not message.media:
        return message.text
    return [
        {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": BLOCKS[block.kind]}
        for block in message.content
    ]


def _first(name: str, returned: Any) -> Any:
    """The one score of a list of one; arrays of numpy and torch are lists too."""
    listed = returned.tolist() if hasattr(returned, "tolist") and getattr(returned, "shape", ()) != () else returned
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or len(listed) != 1:
        raise TypeError(
            f"reward function '{name}' got 1 completion and must return a list of 1 score, not {shown(returned)}"
        )
    if listed[0] is None:
        raise TypeError(f"reward function '{name}' returned None: it does not judge this task")
    return listed[0]


async def _first_later(name: str, returned: Any) -> Any:
    return _first(name, await returned)


def _term(built: Any, name: str) -> RewardTerm:
    """A term that has a name; ``instant`` may be left out."""
    if not callable(getattr(built, "score", None)):
        raise RecipeError(f"reward '{name}' has no method score(task, episode), so it cannot judge: {shown(built)}.")
    if not isinstance(getattr(built, "name", None), str) or not built.name:
        built.name = name
    term: RewardTerm = built
    return term


def _name_of(thing: Any) -> str:
    name = getattr(thing, "__name__", "") or getattr(getattr(thing, "func", None), "__name__", "") or type(thing).__name__
    return "reward" if name == "<lambda>" else str(name)


def _style_by_count(thing: Any, name: str) -> Style:
    """A callable that is surely a reward may call its two parameters what it likes."""
    parameters = parameters_of(thing).values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) == 2 or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return "episode"
    raise RecipeError(f"reward function '{name}' has {len(needed)} parameters; it takes {SIGNATURES}.")
