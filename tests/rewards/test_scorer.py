"""The scorer: missing is not zero, every wait ends, and judgements are repeated from the cache."""

import ast
import asyncio
import re
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest

from sensorium.rewards.reward_term import RewardTerm
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.terms import EnvironmentReward, Exact
from sensorium.vocabulary.episode import Episode, Score, Status
from sensorium.vocabulary.errors import RecordError, RewardFailure
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]
TASK = Task("t", answer="red")


class Judge:
    """A term that does what it is told, call by call."""

    def __init__(self, *deeds: Callable[[], float], name: str = "judge", instant: bool = False) -> None:
        self.name, self.instant, self.deeds, self.calls = name, instant, deeds, 0

    def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
        deed = self.deeds[min(self.calls, len(self.deeds) - 1)]
        self.calls += 1
        return (Score(self.name, deed()),)


def fails() -> float:
    raise ConnectionError("the judge is away")


def unusable() -> float:
    raise RecordError("the file of judgements cannot be used")


def hangs() -> float:
    threading.Event().wait(60)
    return 1.0


def scored(
    episode: Episode, *terms: tuple[RewardTerm, float], task: Task = TASK, **options: object
) -> tuple[Scorer, Episode]:
    scorer = Scorer(terms, **{"deadline_s": 60.0, "retries": 0, "retry_wait_s": 0.0, **options})  # type: ignore[arg-type]
    return scorer, asyncio.run(scorer.score(task, episode))


def counts(scorer: Scorer) -> dict[str, tuple[int, int]]:
    """Missing scores and retries by term, of those that had any."""
    taken = {name: (counted.missing, counted.retries) for name, counted in scorer.take_counts().items()}
    return {name: counted for name, counted in taken.items() if any(counted)}


def test_terms_keep_their_names_weights_and_order(episode_of: MakeEpisode) -> None:
    slow = Judge(lambda: 0.5)
    _, episode = scored(episode_of("<answer>red</answer>"), (slow, 0.2), (Exact(), 0.8))
    assert [(s.name, s.value, s.weight) for s in episode.scores] == [("judge", 0.5, 0.2), ("exact", 1.0, 0.8)]
    assert episode.reward == pytest.approx(0.9)
    assert episode.correct is True


@pytest.mark.parametrize("instant", [True, False])
def test_a_term_that_raises_gives_a_missing_score_with_its_reason(instant: bool, episode_of: MakeEpisode) -> None:
    scorer, episode = scored(episode_of("<answer>red</answer>"), (Judge(fails, instant=instant), 1.0), (Exact(), 1.0))
    assert episode.scores[0].missing
    assert episode.scores[0].reason == "ConnectionError: the judge is away"
    assert episode.reward is None
    assert counts(scorer) == {"judge": (1, 0)}
    assert counts(scorer) == {}


def test_a_term_that_hangs_meets_its_deadline(episode_of: MakeEpisode) -> None:
    start = time.monotonic()
    scorer, episode = scored(episode_of("x"), (Judge(hangs), 1.0), deadline_s=0.05, retries=1)
    assert time.monotonic() - start < 50
    assert episode.scores[0].value is None
    assert "'judge' did not answer within 0.05 s (tried 2 times)" in episode.scores[0].reason
    assert counts(scorer) == {"judge": (1, 1)}


def test_a_slow_term_does_not_hold_up_other_episodes(episode_of: MakeEpisode) -> None:
    all_there = threading.Barrier(20, timeout=60)
    scorer = Scorer([(Judge(lambda: all_there.wait() * 0.0 + 1.0), 1.0)], retries=0, deadline_s=60)

    async def many() -> list[Episode]:
        return await asyncio.gather(*(scorer.score(TASK, episode_of(f"x{i}")) for i in range(20)))

    assert [e.reward for e in asyncio.run(many())] == [1.0] * 20, "they all work at the same time"


def test_a_term_that_recovers_is_heard(episode_of: MakeEpisode) -> None:
    scorer, episode = scored(episode_of("x"), (Judge(fails, fails, lambda: 0.25), 1.0), retries=2)
    assert episode.reward == 0.25
    assert counts(scorer) == {"judge": (0, 2)}


def misspelt_attribute() -> float:
    return "red".lowercase()  # type: ignore[attr-defined, no-any-return]


def wrong_arguments() -> float:
    return abs(1.0, 2.0)  # type: ignore[call-arg]


def misspelt_name() -> float:
    return undefined_score  # type: ignore[name-defined, no-any-return]  # noqa: F821


def unbound() -> float:
    if not TASK.id:
        score = 1.0
    return score


def lacks_package() -> float:
    import package_that_is_not_there  # type: ignore[import-not-found]

    return float(package_that_is_not_there.score)


def unfinished() -> float:
    raise NotImplementedError


def malformed_module() -> float:
    raise SyntaxError("invalid syntax", ("/home/me/my_rewards.py", 3, 1, "def f(", 3, 7))


@pytest.mark.parametrize(
    "deed",
    [misspelt_attribute, wrong_arguments, misspelt_name, unbound, lacks_package, unfinished, malformed_module],
)
def test_a_programming_error_is_said_and_not_tried_again(deed: Callable[[], float], episode_of: MakeEpisode) -> None:
    judge, said = Judge(deed), list[str]()
    scorer = Scorer([(judge, 1.0)], retries=2, retry_wait_s=60.0)
    scorer.noted = said.append
    for i in range(3):
        episode = asyncio.run(scorer.score(TASK, episode_of(f"x{i}")))
    assert judge.calls == 3, "once an episode"
    assert "Error" in episode.scores[0].reason
    assert "tried" not in episode.scores[0].reason
    assert counts(scorer) == {"judge": (3, 0)}
    assert len(said) == 1, "the first time only"
    assert "'judge' has an error in its code and is not asked again" in said[0]


def odd_key() -> float:
    return {"verdict": 1.0}["score"]


def odd_length() -> float:
    return list[float]()[0]


def odd_number() -> float:
    return float("a good answer")


def empty_answer() -> float:
    return None.strip()  # type: ignore[attr-defined, no-any-return]


def empty_object() -> float:
    return None["score"]  # type: ignore[index, no-any-return]


def odd_literal() -> float:
    return float(ast.literal_eval("0.5 of 1"))


@pytest.mark.parametrize("deed", [odd_key, odd_length, odd_number, empty_answer, empty_object, odd_literal])
def test_what_an_odd_answer_of_a_service_raises_is_tried_again(deed: Callable[[], float], episode_of: MakeEpisode) -> None:
    judge = Judge(deed)
    with pytest.warns(UserWarning, match="is asked again"):
        scorer, episode = scored(episode_of("x"), (judge, 1.0), retries=2)
    assert judge.calls == 3
    assert "(tried 3 times)" in episode.scores[0].reason
    assert counts(scorer) == {"judge": (1, 2)}


def test_too_many_hanging_calls_are_not_added_to(episode_of: MakeEpisode) -> None:
    judge = Judge(hangs)
    _, episode = scored(episode_of("x"), (judge, 1.0), deadline_s=0.02, retries=5, concurrency=1)
    assert judge.calls == 4
    assert "still hang" in episode.scores[0].reason


def test_a_task_at_fault_is_not_asked_about_again(episode_of: MakeEpisode) -> None:
    class Slow(Exact):
        instant = False

    scorer, episode = scored(episode_of("x"), (Slow(), 1.0), task=Task("t"), retries=3)
    assert "task t" in episode.scores[0].reason
    assert counts(scorer) == {"exact": (1, 0)}


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_value_that_is_not_finite_is_missing(value: float, episode_of: MakeEpisode) -> None:
    _, episode = scored(episode_of("x"), (Judge(lambda: value, instant=True), 1.0))
    assert episode.scores[0].missing
    assert "not finite" in episode.scores[0].reason


def test_a_term_without_weight_is_recorded_and_cannot_cost_the_total(episode_of: MakeEpisode) -> None:
    _, episode = scored(
        episode_of("<answer>red</answer>"), (Judge(fails), 0.0), (Judge(lambda: 3.0, name="length"), 0.0), (Exact(), 1.0)
    )
    assert episode.reward == 1.0
    assert [s.value for s in episode.scores] == [None, 3.0, 1.0]


@pytest.mark.parametrize("returned", [None, (), "0.5", [0.5], {}, b"1", (Score("judge", 1.0), 0.5)])
def test_a_term_that_returns_something_else_is_missing(returned: object, episode_of: MakeEpisode) -> None:
    class Odd(Judge):
        def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
            return returned  # type: ignore[return-value]

    _, episode = scored(episode_of("x"), (Odd(fails), 1.0))
    assert "'judge': it must return a number, a Score, a tuple of Scores" in episode.scores[0].reason


class Unreadable(dict[str, float]):
    def items(self) -> Any:
        sys.exit("items")


class Text(str):
    def encode(self, *arguments: Any) -> bytes:
        raise RuntimeError("encode")


class Items(list[float]):
    def __iter__(self) -> Any:
        raise RuntimeError("iter")


@pytest.mark.parametrize("instant", [True, False])
@pytest.mark.parametrize("returned", [Unreadable(a=1.0), Items([1.0]), {Text("\ud800"): 1.0}])
def test_what_cannot_be_read_is_missing_and_no_crash(returned: object, instant: bool, episode_of: MakeEpisode) -> None:
    class Odd(Judge):
        def score(self, task: Task, episode: Episode) -> tuple[Score, ...]:
            return returned  # type: ignore[return-value]

    _, episode = scored(episode_of("x"), (Odd(fails, instant=instant), 1.0))
    assert episode.scores[0].missing
    assert re.search("items|iter|surrogate", episode.scores[0].reason)


@pytest.mark.parametrize("status", [Status.FAILED, Status.ABORTED])
def test_failed_episodes_are_not_judged(status: Status, episode_of: MakeEpisode) -> None:
    judge = Judge(lambda: 1.0)
    scorer, episode = scored(episode_of("x", status=status, failure="environment fell over"), (judge, 1.0), (Exact(), 1.0))
    assert [s.value for s in episode.scores] == [None, None]
    assert all("environment fell over" in s.reason for s in episode.scores)
    assert judge.calls == 0
    assert counts(scorer) == {}


def test_truncated_episodes_are_judged(episode_of: MakeEpisode) -> None:
    _, episode = scored(episode_of("<answer>red</answer>", status=Status.TRUNCATED), (Exact(), 1.0))
    assert episode.reward == 1.0


def test_judgements_are_paid_once_missing_ones_included(episode_of: MakeEpisode) -> None:
    class Cache(dict[str, tuple[Score, ...]]):
        def put(self, key: str, scores: tuple[Score, ...]) -> None:
            self[key] = scores

    cache, good, away, instant = Cache(), Judge(lambda: 0.5, name="good"), Judge(fails, name="away"), Exact()
    terms = ((good, 2.0), (away, 1.0), (instant, 1.0))
    first = scored(episode_of("x"), *terms, judgements=cache)[1]
    second = scored(episode_of("x"), *terms, judgements=cache)[1]
    assert first.scores == second.scores
    assert (good.calls, away.calls, len(cache)) == (1, 1, 2)
    scored(episode_of("y"), *terms, judgements=cache)
    assert good.calls == 2


def test_a_scorer_serves_several_event_loops(episode_of: MakeEpisode) -> None:
    scorer = Scorer([(Judge(lambda: 1.0), 1.0)], concurrency=1)

    async def several() -> list[Episode]:
        return await asyncio.gather(*(scorer.score(TASK, episode_of(f"x{i}")) for i in range(5)))

    assert [e.reward for _ in range(2) for e in asyncio.run(several())] == [1.0] * 10


def test_closing_reaches_terms_that_hold_something(episode_of: MakeEpisode) -> None:
    class Holding(Judge):
        closed = False

        def close(self) -> None:
            self.closed = True

    term = Holding(fails)
    Scorer([(term, 1.0), (Exact(), 1.0)]).close()
    assert term.closed


def test_reward_failure_tells_its_own_reason(episode_of: MakeEpisode) -> None:
    def refuses() -> float:
        raise RewardFailure("quota spent")

    assert scored(episode_of("x"), (Judge(refuses), 1.0))[1].scores[0].reason == "quota spent"


@pytest.mark.parametrize("raised", [SystemExit(0), KeyboardInterrupt(), asyncio.CancelledError(), GeneratorExit()])
def test_a_term_that_tries_to_end_the_process_gives_a_missing_score(raised: BaseException, episode_of: MakeEpisode) -> None:
    def leaves() -> float:
        raise raised

    for instant in (False, True):
        if not (instant and isinstance(raised, KeyboardInterrupt)):  # in place that is a real Ctrl-C
            _, episode = scored(episode_of("x"), (Judge(leaves, instant=instant), 1.0))
            assert type(raised).__name__ in episode.scores[0].reason


@pytest.mark.filterwarnings("error")
def test_what_is_tried_again_is_said_and_counted_and_timed(episode_of: MakeEpisode) -> None:
    judge, said = Judge(*[fails] * 10, lambda: 0.25), list[str]()
    scorer = Scorer([(judge, 1.0), (Exact(), 1.0)], retries=20, retry_wait_s=0.0)
    scorer.noted = said.append
    asyncio.run(scorer.score(TASK, episode_of("x")))
    assert len(said) == 2, "the first time and the tenth"
    assert "'judge'" in said[0]
    assert "ConnectionError: the judge is away" in said[0]
    assert "10" in said[1]
    row = scorer.take_metrics()
    assert row["retries/judge"] == 10
    assert row["time/reward/judge_max_s"] >= row["time/reward/judge_mean_s"] > 0
    assert not any("exact" in name for name in row), "plain computation is not timed"
    assert scorer.take_metrics() == {"retries/judge": 0}


def test_a_term_without_instant_is_taken_for_slow_and_may_be_async(episode_of: MakeEpisode) -> None:
    class Waiting:
        name = "waiting"

        async def score(self, task: Task, episode: Episode) -> float:
            await asyncio.sleep(0)
            return float(threading.current_thread() is not threading.main_thread())

    assert scored(episode_of("x"), (Waiting(), 1.0))[1].reward == 1.0


def test_an_instant_term_that_is_async_says_so(episode_of: MakeEpisode) -> None:
    class Waiting:
        name, instant = "waiting", True

        async def score(self, task: Task, episode: Episode) -> float:
            return 1.0

    assert "cannot be instant" in scored(episode_of("x"), (Waiting(), 1.0))[1].scores[0].reason


def test_closing_a_term_that_hangs_or_raises_ends_and_is_said(episode_of: MakeEpisode) -> None:
    class Holding(Judge):
        def close(self) -> None:
            self.deeds[0]()

    said: list[str] = []
    scorer = Scorer([(Holding(hangs, name="a"), 1.0), (Holding(fails, name="b"), 1.0)], deadline_s=0.05)
    scorer.noted = said.append
    scorer.close()
    assert ["0.05 s" in said[0], "the judge is away" in said[1]] == [True, True]


def test_pay_without_names_and_named_pay_stand_side_by_side(episode_of: MakeEpisode) -> None:
    episode = episode_of("a", "b", rewards=[1.0, 0.5])
    named = replace(episode.turns[1], parts={"goal": 0.5})
    episode = replace(episode, turns=(episode.turns[0], named))
    scored = asyncio.run(Scorer([(EnvironmentReward(), 1.0)]).score(Task("t"), episode))
    assert {score.name: score.value for score in scored.scores} == {"environment": 1.0, "environment/goal": 0.5}


def test_a_file_of_judgements_that_cannot_be_used_ends_the_run(episode_of: MakeEpisode) -> None:
    judge = Judge(unusable)
    with pytest.raises(RecordError, match="cannot be used"):
        scored(episode_of("red"), (judge, 1.0), retries=3)
    assert judge.calls == 1
