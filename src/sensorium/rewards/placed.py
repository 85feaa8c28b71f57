"""Terms that run in worker processes of the run. The scorer asks them as any other, with its deadlines, retries and cache.

A worker is ``python -m sensorium.rewards.placed FD``; ``cluster/placed_workers.py`` has the rest.

A worker that dies is replaced and its question asked again, unseen by the scorer. A judgement over which a second worker
dies is given up, and the score is missing. Instant terms stay with the driver, and terms that are given a context: the
media and the judges of the run are the driver's.
"""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sensorium.cluster.placed_workers import Answer, PlacedWorkers, serve
from sensorium.recipe.registry import resolve, takes_context
from sensorium.recipe.schema import RewardsSection
from sensorium.rewards.reward_term import ComparingTerm, Term, build_term
from sensorium.rewards.scorer import asked_of, judgement_keys, judges_groups
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

MODULE = "sensorium.rewards.placed"
TermSettings = tuple[str, dict[str, Any], str]  # a term's name in the recipe, its options, and its key there
COPIED = ("version", "deterministic", "needs_answer")


class PlacedTerm:
    """A term that workers hold under a number."""

    def __init__(self, term: Term, number: int, workers: PlacedWorkers) -> None:
        self.name, self.instant = term.name, False
        for name in COPIED:
            if hasattr(term, name):
                setattr(self, name, getattr(term, name))
        self._term, self._number, self._workers = term, number, workers

    def score(self, task: Task, episode: Episode) -> Any:
        return self._ask(task, (episode,))

    def _ask(self, task: Task, episodes: tuple[Episode, ...]) -> Any:
        keys = judgement_keys(self.name, task, episodes, deterministic=getattr(self, "deterministic", True))
        return self._workers.ask((self._number, task, episodes), keys.content)

    def close(self) -> None:
        """Close the driver's own term, which was never asked."""
        closing = getattr(self._term, "close", None)
        if closing is not None:
            closing()


class PlacedComparingTerm(PlacedTerm):
    """A comparing term; answers are extracted in place."""

    _term: ComparingTerm

    def extract(self, task: Task, episode: Episode) -> str | None:
        return self._term.extract(task, episode)


class PlacedGroupTerm(PlacedTerm):
    """A term that is asked about a whole group."""

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any:
        return self._ask(task, tuple(episodes))


def placeable(section: RewardsSection, terms: Sequence[Term]) -> dict[int, TermSettings]:
    """The settings of a recipe's terms that can run in workers, by number. RecipeError if there are none."""
    found, kept = {}, []
    for number, (asked, term) in enumerate(zip(section.terms, terms, strict=True)):
        if getattr(term, "instant", False):
            kept.append(f"'{term.name}' is plain computation")
        elif takes_context(resolve("reward", asked.name)):
            kept.append(f"'{term.name}' needs the run's media or judges")
        else:
            found[number] = (asked.name, dict(asked.options), f"rewards.terms.{number}")
    if not found:
        raise RecipeError(
            f"cluster.rewards: no term of the recipe can be asked in a worker: {', '.join(kept)}. Leave it out; a reward "
            "service elsewhere is asked by the term 'remote'."
        )
    return found


def placed_term(term: Term, number: int, workers: PlacedWorkers) -> Term:
    """A term that is asked in workers."""
    if judges_groups(term):
        return PlacedGroupTerm(term, number, workers)
    return (PlacedComparingTerm if isinstance(term, ComparingTerm) else PlacedTerm)(term, number, workers)


def open_work(settings: dict[int, TermSettings], folder: Path) -> tuple[None, Answer]:
    """Build the terms of a worker, and answer calls of them."""
    terms = {number: build_term(name, options, where) for number, (name, options, where) in settings.items()}

    def answer(question: tuple[int, Task, Sequence[Episode]]) -> Any:
        number, task, episodes = question
        return asked_of(terms[number], task, episodes)

    return None, answer


if __name__ == "__main__":
    serve(open_work)
