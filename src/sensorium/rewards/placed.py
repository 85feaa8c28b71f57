"""Terms that are asked in workers of the run. The scorer asks them as any other, with its deadlines, retries and cache.

A worker that dies is replaced, and what it was asked is asked again of another: the scorer hears nothing of it. A judgement
over which a second one dies is given up, and the score is missing.

What stays with the driver: terms that are plain computation (``instant``), and those that are given a context, since the
media and the judges of the run are the driver's.
"""

from collections.abc import Sequence
from typing import Any

from sensorium.cluster.placed_workers import PlacedWorkers
from sensorium.recipe.names import resolve, takes_context
from sensorium.recipe.schema import RewardsSection
from sensorium.rewards.reward_term import ComparingTerm, Term
from sensorium.rewards.scorer import judgement_keys, judges_groups
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RecipeError
from sensorium.vocabulary.task import Task

MODULE = "sensorium.rewards.worker"
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
        """What the term says in some worker."""
        return self._asked(task, (episode,))

    def _asked(self, task: Task, episodes: tuple[Episode, ...]) -> Any:
        keys = judgement_keys(self.name, task, episodes, deterministic=getattr(self, "deterministic", True))
        return self._workers.ask((self._number, task, episodes), keys.content)

    def close(self) -> None:
        """Close the driver's own, which was never asked."""
        closing = getattr(self._term, "close", None)
        if closing is not None:
            closing()


class PlacedComparingTerm(PlacedTerm):
    """A term that can say what it takes for the answer; that it does in place."""

    _term: ComparingTerm

    def extract(self, task: Task, episode: Episode) -> str | None:
        """The answer as the term sees it."""
        return self._term.extract(task, episode)


class PlacedGroupTerm(PlacedTerm):
    """A term that is asked about a whole group."""

    def score_group(self, task: Task, episodes: Sequence[Episode]) -> Any:
        """What the term says of them in some worker."""
        return self._asked(task, tuple(episodes))


def placeable(section: RewardsSection, terms: Sequence[Term]) -> dict[int, tuple[str, dict[str, Any], str]]:
    """Which of a recipe's terms workers can be asked for: by number their settings. Refused if none."""
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
