"""The reward-term protocol: a named function of a task and an episode; the answer in a response, and the expected one.

Plain Python functions and callable objects are terms too:

``def brevity(task, episode): return -len(episode.response)`` returns a number, ``{name: number}``, a Score or several.
``def ranks(task, episodes): return [...]`` is asked about a group, and returns a list with one of these for each episode.
``def brevity(prompts, completions, answer, **columns): return [...]`` is TRL's form: it gets lists of one, or with the
option ``group: true`` of a whole group, and returns a list of as many numbers (None: no score). The columns are ``answer``,
``task_id`` and the task's metadata. Completions and prompts are texts; with ``messages: true`` lists of ``{"role",
"content"}``, TRL's form of conversations. All may be ``async``, and have a keyword-only parameter ``context``. A function
runs in a thread under the deadline, unless it has ``instant = True``.
"""

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from inspect import Parameter, isawaitable
from typing import Any, Protocol, runtime_checkable

from sensorium.data.media_store import MediaStore
from sensorium.recipe.registry import (
    Style,
    build,
    function_parameters,
    resolve,
    reward_style,
    takes_context,
    wrong_function_options,
)
from sensorium.rewards.judges.client import JudgeClient
from sensorium.vocabulary.content import Message, Text
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError
from sensorium.vocabulary.plain import shown
from sensorium.vocabulary.task import Task


class RewardTerm(Protocol):
    """Scores one episode. Raises RewardFailure (or anything) when it cannot judge: that becomes a missing score.

    ``score`` returns a number, a Score, a tuple of Scores or ``{name: number}``; the scorer sets the weights. It may be
    slow, or ``async``: it runs off the event loop under a deadline and is retried. Attributes a term may have:

    - ``instant = True``: plain computation, which runs in place and is not cached. Without it a term is taken for slow.
    - ``needs_answer = True``: it cannot judge a task without an answer.
    - ``check_task(task)``: raises TaskError for an answer that it could not compare with, which makes its row a bad one.
    - ``version``: changes whenever its judgements do, which are made once for equal content (``rewards/scorer.py``).
    - ``deterministic = False``: equal content may be judged differently.
    - ``caches_answers = True``: it asks judges, whose answers are cached by content. It is asked about every episode, so
      that each has its transcript.
    - ``asks_service = True``: it asks a service, and is not asked by ``sensorium show`` and the checks of single rows.
    - ``recall_judgement(task, episodes, scores)``: called when its scores, a tuple for each episode of a call, came from
      the cache: ``remote`` then gives these episodes their transcripts.

    A constructor with a keyword-only parameter ``context`` is given a RewardContext.
    """

    name: str

    def score(self, task: Task, episode: Episode) -> Any: ...


class GroupTerm(Protocol):
    """Scores the episodes of a group together: ``score_group`` returns a list with an entry for each, in their order.

    An entry is what ``score`` may return, or None for no score. Of a term with both methods only this one is called.
    Failed episodes are left out.
    """

    name: str

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any: ...


Term = RewardTerm | GroupTerm


@runtime_checkable
class ComparingTerm(RewardTerm, Protocol):
    """A term that compares an answer with the known one, and can extract that answer.

    ``extract`` gives the answer in the form in which it is compared: equal answers are equal texts, so that attempts at one
    task can vote. None where the episode gives no answer.
    """

    def extract(self, task: Task, episode: Episode) -> str | None: ...


def asks_others(term: Term) -> bool:
    """True for a term that asks a judge or a service: it is not asked where nothing may be spent."""
    return bool(getattr(term, "caches_answers", False) or getattr(term, "asks_service", False))


@dataclass(frozen=True)
class RewardContext:
    """Given to a term whose constructor (or function) has a keyword-only parameter ``context``.

    ``store`` holds the media of tasks and environments; ``judges`` asks the models of the recipe's section ``judges``.
    """

    store: MediaStore
    judges: JudgeClient | None = None


BRACE = re.compile(r"\\boxed\{|\\(?!\\boxed\{).|[{}]", re.DOTALL)  # an opening box, an escaped character, or a brace


def question_messages(task: Task, episode: Episode) -> Sequence[Message]:
    """The messages of the question: the task's, or the first observation of its environment."""
    return task.messages or (*episode.head, *(episode.turns[0].observation if episode.turns else ()))


def last_response(episode: Episode) -> str:
    """The text of the model's last turn. Observations are never part of it."""
    if not episode.turns:
        raise RewardFailure(f"episode {episode.id} has no response to score")
    return episode.turns[-1].response.text


def tagged(text: str, tag: str = "answer") -> str | None:
    """The content of the last ``<tag>…</tag>``, or None."""
    opening, closing = f"<{tag}>", f"</{tag}>"
    end = text.rfind(closing)
    start = text.rfind(opening, 0, end) if end >= 0 else -1
    return text[start + len(opening) : end].strip() if start >= 0 else None


def given_answer(episode: Episode, *, fallback: bool = False) -> str | None:
    """The answer the model gave in ``<answer>``; with ``fallback`` the whole last response where the tag is missing."""
    text = last_response(episode)
    answer = tagged(text)
    return text.strip() if answer is None and fallback else answer


def boxed(text: str) -> str | None:
    r"""The content of the last ``\boxed{…}`` whose braces balance, or None."""
    open_braces: list[int] = []  # where the content of a box begins, -1 for a brace of another kind
    found = (-1, -1)
    for mark in BRACE.finditer(text):
        if mark[0].endswith("{") and mark[0] != "\\{":
            open_braces.append(-1 if mark[0] == "{" else mark.end())
        elif mark[0] == "}" and open_braces:
            found = max(found, (open_braces.pop(), mark.start()))
    return text[slice(*found)].strip() if found[0] >= 0 else None


def without_answer(terms: Sequence[tuple[Term, float]], tasks: Sequence[Task]) -> str:
    """A sentence about tasks that a term cannot judge, since they have no answer; empty if there are none."""
    needing = [term.name for term, _ in terms if getattr(term, "needs_answer", False)]
    lacking = [task.id for task in tasks if task.answer is None]
    if not needing or not lacking:
        return ""
    term = f"the reward {'terms' if len(needing) > 1 else 'term'} {', '.join(needing)}"
    return (
        f"{len(lacking)} of {len(tasks)} tasks looked at have no answer, '{lacking[0]}' for one, and {term} cannot judge "
        "without: such episodes get a missing score and are left out. Give the rows an 'answer' (flat rows: columns: "
        "{answer: COLUMN}), or use a term that needs none."
    )


def refuse_unreadable(terms: Sequence[tuple[Term, float]], task: Task) -> None:
    """Refuse a task whose answer a term with a weight could not compare with; one without an answer is another matter."""
    for term, weight in terms:
        check = getattr(term, "check_task", None)
        if weight and check is not None and task.answer is not None:
            check(task)


def expected_answers(task: Task) -> tuple[str, ...]:
    """The answers that count as right: one, or any of a list. A task without an answer cannot be scored."""
    known = task.answer if isinstance(task.answer, list | tuple) else [task.answer]
    plain = all(isinstance(answer, str | int | float) and not isinstance(answer, bool) for answer in known)
    if not known or not plain or "" in known:
        raise TaskError(
            f"task {task.id}: the answer {task.answer!r:.80} is no text, number or list of these to compare with, or an "
            "empty one."
        )
    return tuple(str(answer) for answer in known)


BLOCKS = {"picture": "image", "video": "video", "sound": "audio"}
SIGNATURES = "(task, episode), (task, episodes) or (prompts, completions, **columns)"


def as_term(thing: Any, *, context: RewardContext | None = None, **options: Any) -> Term:
    """A reward term from anything that can be one: a term, its class, or a function or callable object of any signature.

    ``options`` are the class's or function's own; for a function also ``name``, ``instant``, ``messages`` and ``group``.
    """
    if isinstance(thing, type):
        given = {"context": context} if takes_context(thing) else {}
        return _term(thing(**given, **options), thing.__name__)
    if _judges(thing):
        if options:
            raise RecipeError(f"reward {shown(thing)} is built already, so it takes no options: {', '.join(options)}.")
        return _term(thing, type(thing).__name__)
    if not callable(thing):
        raise RecipeError(f"a reward is a term with a method score, or a function {SIGNATURES}; not {shown(thing)}.")
    return _function_term(thing, reward_style(thing) or _style_by_count(thing, _name_of(thing)), options, context)


def _function_term(function: Any, style: Style, options: Mapping[str, Any], context: RewardContext | None) -> Term:
    name = _name_of(function)
    _, problem = wrong_function_options(name, function, style, options)
    if problem:
        raise RecipeError(f"rewards: {problem}")
    given = {"context": context} if takes_context(function) else {}
    whole = style == "episodes" or (style == "completions" and bool(options.get("group", False)))
    return (GroupFunctionTerm if whole else FunctionTerm)(function, style, name, {**options, **given})


def build_term(name: str, options: Mapping[str, Any], where: str, context: RewardContext | None = None) -> Term:
    """The reward term that a recipe names: a registered one, ``module:Class``, or ``module:function``."""
    target = resolve("reward", name, where)
    if style := reward_style(target):
        return _function_term(target, style, options, context)
    built = build("reward", name, options, where, **({"context": context} if takes_context(target) else {}))
    if _judges(built):
        return _term(built, getattr(target, "__name__", name))
    raise RecipeError(
        f"{where}: '{name}' gave {shown(built)}, which is no reward term. A reward is a class with a method score(task, "
        f"episode) or score_group(task, episodes), or a function whose parameters are called {SIGNATURES}."
    )


class _Function:
    """The common part of functions of every signature."""

    def __init__(self, function: Callable[..., Any], style: Style, name: str, options: Mapping[str, Any]) -> None:
        parameters = function_parameters(function)
        kept = dict(options)
        wrapping = ("name", "instant", "messages", "group")
        own = {key: kept.pop(key) for key in wrapping if key in kept and key not in parameters}
        self.name = str(own.get("name", name))
        self.instant = bool(own.get("instant", getattr(function, "instant", False)))
        self.deterministic = bool(getattr(function, "deterministic", True))
        self.version = getattr(function, "version", "")
        known = parameters.get("answer") if style == "completions" else None
        self.needs_answer = known is not None and known.default is Parameter.empty
        self.given_context = "context" in kept  # the judges
        self._messages = bool(own.get("messages", False))
        self._function, self._style, self._options, self._parameters = function, style, kept, parameters

    def _ask_in_columns(self, task: Task, episodes: Sequence[Episode], finish: Callable[[Sequence[Any]], Any]) -> Any:
        """``finish`` of the list that a function of TRL's form returns, at once or to be awaited."""
        count = len(episodes)
        returned = self._function(**self._columns(task, episodes))
        if not isawaitable(returned):
            return finish(_listed(self.name, returned, count))

        async def awaited() -> Any:
            return finish(_listed(self.name, await returned, count))

        return awaited()

    def _columns(self, task: Task, episodes: Sequence[Episode]) -> dict[str, Any]:
        """The arguments of TRL's form that the function takes: lists with an entry for each episode."""
        known = {key: [value] * len(episodes) for key, value in task.metadata.items() if isinstance(key, str)}
        known |= {"task_id": [task.id] * len(episodes), "answer": [task.answer] * len(episodes)}
        known["prompts"] = [self._prompt(task, episode) for episode in episodes]
        known["completions"] = [self._completion(episode) for episode in episodes]
        known["completion_ids"] = [[t for turn in episode.turns for t in turn.response.tokens] for episode in episodes]
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
        messages = question_messages(task, episode)
        if self._messages:
            return [{"role": message.role, "content": _content(message)} for message in messages]
        return "\n".join(message.text for message in messages)

    def _completion(self, episode: Episode) -> Any:
        if not self._messages:
            return episode.response
        messages: list[dict[str, Any]] = []
        for turn in episode.turns:
            if messages:
                messages += [{"role": message.role, "content": _content(message)} for message in turn.observation]
            messages.append({"role": "assistant", "content": turn.response.text})
        return messages


class FunctionTerm(_Function):
    """A function that is asked about one episode at a time."""

    def score(self, task: Task, episode: Episode) -> Any:
        if self._style == "episode":
            return self._function(task, episode, **self._options)
        return self._ask_in_columns(task, [episode], self._only)

    def _only(self, listed: Sequence[Any]) -> Any:
        if listed[0] is None:
            raise RewardFailure(f"reward function '{self.name}' returned None: it does not judge this task")
        return listed[0]


class GroupFunctionTerm(_Function):
    """A function that is asked about all episodes of a group at once."""

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any:
        if self._style == "episodes":
            return self._function(task, episodes, **self._options)
        return self._ask_in_columns(task, episodes, lambda listed: listed)


def _content(message: Message) -> Any:
    if not message.media:
        return message.text
    return [
        {"type": "text", "text": block.text} if isinstance(block, Text) else {"type": BLOCKS[block.kind]}
        for block in message.content
    ]


def _listed(name: str, returned: Any, count: int) -> Sequence[Any]:
    """A list with as many entries as there are completions; arrays of numpy and torch are lists too."""
    listed = returned.tolist() if hasattr(returned, "tolist") and getattr(returned, "shape", ()) != () else returned
    if not isinstance(listed, Sequence) or isinstance(listed, str | bytes) or len(listed) != count:
        few = f"{count} completion{'' if count == 1 else 's'}"
        scores = f"{count} score{'' if count == 1 else 's'}"
        raise RewardFailure(f"reward function '{name}' got {few} and must return a list of {scores}, not {shown(returned)}")
    return listed


def _judges(thing: Any) -> bool:
    return callable(getattr(thing, "score", None)) or callable(getattr(thing, "score_group", None))


def _term(built: Any, name: str) -> Term:
    """A term that has a name; ``instant`` may be left out."""
    if not _judges(built):
        raise RecipeError(
            f"reward '{name}' has no method score(task, episode) or score_group(task, episodes), so it cannot judge: "
            f"{shown(built)}."
        )
    if not isinstance(getattr(built, "name", None), str) or not built.name:
        built.name = name
    term: Term = built
    return term


def _name_of(thing: Any) -> str:
    name = getattr(thing, "__name__", "") or getattr(getattr(thing, "func", None), "__name__", "") or type(thing).__name__
    return "reward" if name == "<lambda>" else str(name)


def _style_by_count(thing: Any, name: str) -> Style:
    """The style of a callable that is surely a reward: its two parameters may have any names."""
    parameters = function_parameters(thing).values()
    needed = [p for p in parameters if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)]
    if len(needed) == 2 or any(p.kind == p.VAR_POSITIONAL for p in parameters):
        return "episode"
    raise RecipeError(f"reward function '{name}' has {len(needed)} parameters; it takes {SIGNATURES}.")
