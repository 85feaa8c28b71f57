"""What is wrong with rows one by one: silent or blank media, demonstrations without reward, answers out of reach.

Each check returns reasons by the task's place in the list that it was given. Terms that ask a judge or a service are left
out, so a reward that they decide is unknown and nothing is reported of it.
"""

import copy
import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image

from sensorium.cluster.event_loop import run_async
from sensorium.data.decoder import Decoded
from sensorium.data.media_store import MediaStore
from sensorium.data.sound import DecodedAudio
from sensorium.data.video import DecodedVideo, opened, track
from sensorium.models.chat_processor import ChatProcessor
from sensorium.rewards.reward_term import Term, asks_others, expected_answers
from sensorium.rewards.scorer import Scorer, score_groups
from sensorium.vocabulary.content import Media
from sensorium.vocabulary.episode import Episode, Group, Status, Thread, Turn
from sensorium.vocabulary.plain import attempt
from sensorium.vocabulary.task import Task

Tell = Callable[[int], None]
ONE_COLOUR = 4  # levels, of 255, by which pixels of one colour may differ: what JPEG leaves
SILENCE = 1e-3  # loudest sample, full scale being 1: -60 dB
RATES = (4_000, 500_000)  # of recordings: telephones have 8,000, bats are recorded with up to 500,000
AT_ONCE = 64
PROBES = 8  # rows by which the form of answers is found
MOST_ANSWERS = 4  # of a row with several, the shortest are tried
FORMS = ("<answer>{}</answer>", "\\boxed{{{}}}", "<answer>\\boxed{{{}}}</answer>", "{}")


def media_fault(media: Media, decoded: Decoded, store: MediaStore) -> tuple[str, str]:
    """The check that a readable medium fails, and why; empty texts where nothing is wrong with it."""
    if isinstance(decoded, DecodedAudio):
        with opened(store.source_of(media), media.name, "sound") as container:
            rate = int(track(container, "audio", media.name).rate)
        if not RATES[0] <= rate <= RATES[1]:
            return "sampling rates", f"{media.name} states {rate:,} samples a second, which no recording has"
        loudest = float(np.abs(decoded.samples).max())
        if loudest < SILENCE:
            return "silent sounds", f"{media.name} is silent: its loudest sample is {loudest:.2g} of full scale"
        return "", ""
    if isinstance(decoded, DecodedVideo):
        spread = np.ptp(decoded.frames.reshape(-1, decoded.frames.shape[-1]), axis=0).max()
        what = "every frame"
    else:
        spread = max(high - low for low, high in _extrema(decoded))
        what = "the whole picture"
    blank = f"{media.name} is blank: {what} is of one colour"
    return ("blank pictures", blank) if spread <= ONE_COLOUR else ("", "")


def _extrema(picture: Image.Image) -> Sequence[tuple[float, float]]:
    found = picture.convert("RGB").getextrema()
    return [(low, high) for low, high in found]  # type: ignore[misc]  # of one channel it would be a pair of numbers


def fingerprint(decoded: Decoded) -> str:
    """A digest of what is seen or heard, however it is encoded."""
    digest = hashlib.blake2b(digest_size=16)
    if isinstance(decoded, Image.Image):
        digest.update(repr(decoded.size).encode() + decoded.convert("RGB").tobytes())
    else:
        array = decoded.samples if isinstance(decoded, DecodedAudio) else decoded.frames
        digest.update(repr(array.shape).encode() + np.ascontiguousarray(array).tobytes())
    return digest.hexdigest()


class WrittenAnswers:
    """Scores texts as responses to questions, by the terms that are computed here."""

    def __init__(self, scorer: Scorer, chat: ChatProcessor) -> None:
        self.scorer, self.chat = copy.copy(scorer), chat
        self.scorer.terms = tuple((term, weight) for term, weight in scorer.terms if not asks_others(term))
        self.whole = all(not asks_others(term) or not weight for term, weight in scorer.terms)  # the reward is known

    def with_terms(self, terms: tuple[tuple[Term, float], ...]) -> "WrittenAnswers":
        other = copy.copy(self)
        other.scorer = copy.copy(self.scorer)
        other.scorer.terms = terms
        return other

    def score(self, tasks: Sequence[Task], texts: Sequence[str], tell: Tell = lambda done: None) -> list[Episode]:
        """An episode for each task with its text as the response."""
        found: list[Episode] = []
        for start in range(0, len(tasks), AT_ONCE):
            part = zip(tasks[start : start + AT_ONCE], texts[start : start + AT_ONCE], strict=True)
            groups = [self._group(task, text, start + nth) for nth, (task, text) in enumerate(part)]
            found += [group.episodes[0] for group in run_async(score_groups(self.scorer, groups))]
            tell(len(found))
        return found

    def _group(self, task: Task, text: str, number: int) -> Group:
        name = f"written/{number}"
        response = self.chat.respond(text, name)
        turn = Turn(0, task.messages, response, 0, 0)
        thread = Thread((response,), (True,))
        return Group(name, task, (Episode(name, task.id, name, 0, (thread,), (turn,), Status.FINISHED),))


@dataclass(frozen=True)
class Judged:
    """What a check of rows found: how many it judged, the places of those with a problem, and those known to be right."""

    count: int
    problems: dict[int, str]
    right: frozenset[int] = frozenset()


def judge_demonstrations(tasks: Sequence[Task], written: WrittenAnswers, tell: Tell) -> Judged:
    """Score the demonstrations of questions: problems are those without reward, or judged wrong."""
    places = [place for place, task in enumerate(tasks) if task.environment is None and task.demonstration]
    if not written.scorer.terms:
        return Judged(0, {})
    asked = [tasks[place] for place in places]
    episodes = written.score(asked, [task.demonstration[0] for task in asked], tell)
    totals = [episode.reward if written.whole else None for episode in episodes]
    best = max((total for total in totals if total is not None), default=0.0)
    reasons = {}
    for place, episode, total in zip(places, episodes, totals, strict=True):
        if episode.correct is False:
            reasons[place] = "its demonstration is judged wrong"
        elif total is not None and (total == 0 or total < 0 < best):
            reasons[place] = f"its demonstration gets the reward {total:g}"
    right = frozenset(place for place, episode in zip(places, episodes, strict=True) if episode.correct)
    return Judged(len(places), reasons, right)


def judge_answers(
    tasks: Sequence[Task], written: WrittenAnswers, most_tokens: int, right: frozenset[int], tell: Tell
) -> Judged:
    """Find answers that no response can state; those of the ``right`` places are known to be reachable.

    Each known answer is written in the forms that terms read. Where no form is judged right for any row, the term reads a
    form of its own, and only answers that it cannot read at all are reported. A known answer may be longer than what the
    term reads of it (a worked solution): it is too long only where that, written alone, is too long as well.
    """
    term = written.scorer.comparing
    known = {place: _known_texts(task) for place, task in enumerate(tasks)}
    places = [place for place, texts in known.items() if texts]
    if term is None or not places:
        return Judged(0, {})
    alone = written.with_terms(((term, 1.0),))
    left = [place for place in places if place not in right]
    tried = [*left[:PROBES], *sorted(right & set(places))[:PROBES]]
    found = {form: sum(e.correct is True for e in _written(alone, tasks, known, tried, form, 0)) for form in FORMS}
    problems: dict[int, str] = {}
    longer: dict[int, tuple[str, ...]] = {}  # what the term reads of answers that take too many tokens
    for form in sorted(FORMS, key=lambda form: -found[form]):
        for nth in range(MOST_ANSWERS):
            asked = [place for place in left if nth < len(known[place])]
            tell(len(tasks) - len(asked))
            for place, episode in zip(asked, _written(alone, tasks, known, asked, form, nth), strict=True):
                needed = len(episode.turns[0].response.tokens)
                if episode.correct:
                    left.remove(place)
                    if needed > most_tokens:
                        problems[place] = f"its answer takes {needed} tokens, and a response may have {most_tokens}"
                        longer[place] = (term.extract(tasks[place], episode) or "",)
                elif reason := next((score.reason for score in episode.scores if score.missing), ""):
                    left.remove(place)
                    problems[place] = reason
        if not any(found.values()):
            break
    if any(found.values()):
        for form in FORMS:
            for place, episode in zip(longer, _written(alone, tasks, longer, list(longer), form, 0), strict=True):
                if episode.correct and len(episode.turns[0].response.tokens) <= most_tokens:
                    problems.pop(place, None)
        problems |= {place: f"'{term.name}' judges its own answer {tasks[place].answer!r:.60} wrong" for place in left}
    return Judged(len(places), problems)


def _known_texts(task: Task) -> tuple[str, ...]:
    """The known answers of a question as texts; none where it has no answer of that kind."""
    if task.environment is not None or task.answer is None:
        return ()
    texts, error = attempt(expected_answers, task)
    return () if error is not None else tuple(sorted(texts, key=len))


def _written(
    written: WrittenAnswers,
    tasks: Sequence[Task],
    known: Mapping[int, Sequence[str]],
    places: Sequence[int],
    form: str,
    nth: int,
) -> list[Episode]:
    return written.score([tasks[place] for place in places], [form.format(known[place][nth]) for place in places])
