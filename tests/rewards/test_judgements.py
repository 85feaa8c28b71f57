"""A judgement is known by its content: made once, told apart by whatever it may depend on, repeated by a resumed run."""

import asyncio
import threading
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sensorium.data.lru import LRU
from sensorium.rewards.scorer import Scorer, judgement_keys, term_identity
from sensorium.runs.ledger import Ledger
from sensorium.vocabulary import Episode, Group, Media, Score, Status, Task, user
from tests.rewards.conftest import MakeEpisode

TASK = Task("t", (user("what?"),), "cat")


class Judge:
    """Counts how often it is asked, and pays each time less."""

    name = "judge"

    def __init__(self, deterministic: bool = True, failing: int = 0) -> None:
        self.deterministic, self.failing, self.calls = deterministic, failing, 0
        self._lock = threading.Lock()

    def score(self, task: Task, episode: Episode) -> float:
        with self._lock:
            self.calls += 1
            if self.calls <= self.failing:
                raise ConnectionError("away")
            return 1.0 / self.calls


def named(episode: Episode, id: str) -> Episode:
    return replace(episode, id=id)


def rewards(scorer: Scorer, *episodes: Episode) -> list[float | None]:
    scored = asyncio.run(scorer.score_group(Group("g", TASK, episodes)))
    return [episode.reward for episode in scored.episodes]


@pytest.mark.parametrize("ledger", [False, True])
def test_the_same_text_is_judged_once_at_the_same_time_and_later(
    ledger: bool, episode_of: MakeEpisode, tmp_path: Path
) -> None:
    judge = Judge()
    scorer = Scorer([(judge, 1.0)], judgements=Ledger(tmp_path / "ledger.sqlite") if ledger else None)
    assert rewards(scorer, named(episode_of("cat"), "a"), named(episode_of("cat"), "b")) == [1.0, 1.0]
    assert rewards(scorer, named(episode_of("cat"), "c")) == [1.0]
    assert judge.calls == 1
    assert rewards(scorer, named(episode_of("dog"), "d")) == [0.5]


def test_a_term_that_is_not_deterministic_is_asked_about_every_episode_and_its_word_is_kept(
    episode_of: MakeEpisode,
) -> None:
    judge, memory = Judge(deterministic=False), LRU(10)
    pair = named(episode_of("cat"), "a"), named(episode_of("cat"), "b")
    first = rewards(Scorer([(judge, 1.0)], judgements=memory), *pair)
    assert sorted(first, reverse=True) == [1.0, 0.5]  # type: ignore[type-var]
    assert rewards(Scorer([(judge, 1.0)], judgements=memory), *pair) == first, "a resumed run meets the same"


def test_a_judge_that_was_away_is_asked_again_by_another_episode_and_not_by_a_resumed_run(episode_of: MakeEpisode) -> None:
    judge, memory = Judge(failing=1), LRU(10)
    assert rewards(Scorer([(judge, 1.0)], judgements=memory, retries=0), named(episode_of("cat"), "a")) == [None]
    assert rewards(Scorer([(judge, 1.0)], judgements=memory, retries=0), named(episode_of("cat"), "b")) == [0.5]
    assert rewards(Scorer([(judge, 1.0)], judgements=memory, retries=0), named(episode_of("cat"), "a")) == [None]


def key(term: str, task: Task, *episodes: Episode) -> tuple[str, ...]:
    return judgement_keys(term, task, episodes).content


def test_what_a_judgement_may_depend_on_tells_it_apart(episode_of: MakeEpisode) -> None:
    episode = episode_of("cat", rewards=[1.0])
    turn = episode.turns[0]
    picture = Media("picture", "0" * 64, "cat.png")
    others = [
        (term_identity("judge", {"model": "b"}, ""), TASK, episode),
        (term_identity("judge", {"model": "a"}, 2), TASK, episode),
        ("judge", replace(TASK, answer="dog"), episode),
        ("judge", replace(TASK, messages=(user("what?", picture),)), episode),
        ("judge", replace(TASK, metadata={"type": "ocr"}), episode),
        ("judge", TASK, episode_of("Cat", rewards=[1.0])),
        ("judge", TASK, episode_of("cat", rewards=[2.0])),
        ("judge", TASK, replace(episode, turns=(replace(turn, observation=(user(picture),)),))),
        ("judge", TASK, replace(episode, turns=(replace(turn, response=replace(turn.response, tokens=(1, 2))),))),
        ("judge", TASK, replace(episode, info={"success": True})),
        (term_identity("judge", {"model": "a"}, ""), TASK, episode),
    ]
    keys = [key(term, task, one) for term, task, one in others]
    assert len(set(keys)) == len(keys)
    assert key("judge", TASK, episode) == key("judge", TASK, replace(episode, id="other", group_id="g2", index=7))
    elsewhere = replace(TASK, messages=(user("what?", replace(picture, origin="copy.png")),))
    assert key("judge", elsewhere, episode) == keys[3], "where a file lay is no part of what it is"


def test_a_group_is_judged_together_and_kept_together(episode_of: MakeEpisode) -> None:
    class Rank:
        name = "rank"
        calls = 0

        async def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[Any]:
            Rank.calls += 1
            await asyncio.sleep(0)
            order = sorted(len(e.response) for e in episodes)
            return [None if not e.response else {"place": order.index(len(e.response))} for e in episodes]

    failed = episode_of("xxxx", status=Status.FAILED, failure="torn")
    episodes = [named(e, str(i)) for i, e in enumerate((episode_of("ccc"), failed, episode_of("a"), episode_of("")))]
    scorer = Scorer([(Rank(), 2.0)])
    for _ in range(2):
        scored = asyncio.run(scorer.score_group(Group("g", TASK, tuple(episodes)))).episodes
        assert [(s.name, s.value, s.weight) for e in scored for s in e.scores] == [
            ("rank/place", 2, 2.0), ("rank", None, 2.0), ("rank/place", 1, 2.0), ("rank", None, 2.0),
        ]  # fmt: skip
        assert scored[1].scores[0].reason == "the episode failed: torn"
        assert scored[3].scores[0].reason == "reward term 'rank' gave no score"
    assert Rank.calls == 1


@pytest.mark.parametrize("instant", [True, False])
def test_a_group_judgement_of_the_wrong_length_is_missing_for_all(instant: bool, episode_of: MakeEpisode) -> None:
    class Short:
        name = "short"

        def score_group(self, task: Task, episodes: Sequence[Episode]) -> list[float]:
            return [1.0]

    Short.instant = instant  # type: ignore[attr-defined]
    scorer = Scorer([(Short(), 1.0)], retries=0)
    scored = asyncio.run(scorer.score_group(Group("g", TASK, (episode_of("a"), episode_of("b"))))).episodes
    for episode in scored:
        assert "score_group must return a list of 2 entries, one for each episode, not [1.0]" in episode.scores[0].reason


def test_a_judgement_that_a_later_step_used_is_not_forgotten_with_the_step_that_made_it(tmp_path: Path) -> None:
    """A run that goes back to step 2 would else ask again, and a judge that draws would answer otherwise."""
    ledger = Ledger(tmp_path / "ledger.sqlite")
    ledger.plan(1, 0, 4)
    ledger.put("used", (Score("judge", 0.5),))
    ledger.put("unused", (Score("judge", 0.25),))
    ledger.plan(2, 4, 8)
    assert ledger.get("used") is not None
    ledger.forget_judgements(1)
    assert ledger.get("used") == (Score("judge", 0.5),)
    assert ledger.get("unused") is None
