"""Groups are scored side by side from the moment they are complete; what ends one scoring ends all, without noise."""

import asyncio
import threading

import pytest

from sensorium.rewards.scorer import GroupScoring, Scorer, score_groups
from sensorium.vocabulary import Episode, Group, Score, Task
from sensorium.vocabulary.errors import RecordError
from tests.rewards.conftest import MakeEpisode

WAIT = 30


class Length:
    """Plain computation."""

    name = "length"
    instant = True

    def score(self, task: Task, episode: Episode) -> Score:
        return Score(self.name, float(len(episode.response)))


class Slow(Length):
    """The same in a thread."""

    name = "slow"
    instant = False


def groups_of(episode_of: MakeEpisode, *texts: str) -> list[Group]:
    return [Group(f"g{i}", Task(f"t{i}"), (episode_of(text), episode_of(text + "!"))) for i, text in enumerate(texts)]


def test_groups_come_back_scored_in_the_order_they_were_given(episode_of: MakeEpisode) -> None:
    scorer = Scorer([(Length(), 1.0), (Slow(), 2.0)])
    scored = asyncio.run(score_groups(scorer, groups_of(episode_of, "a", "bb", "ccc")))
    assert [group.id for group in scored] == ["g0", "g1", "g2"]
    assert [[e.reward for e in group.episodes] for group in scored] == [[3, 6], [6, 9], [9, 12]]


def test_a_group_is_scored_while_the_next_is_still_awaited(episode_of: MakeEpisode) -> None:
    heard = threading.Event()

    class Heard(Slow):
        def score(self, task: Task, episode: Episode) -> Score:
            heard.set()
            return super().score(task, episode)

    async def run() -> dict[str, Group]:
        first, second = groups_of(episode_of, "a", "b")
        async with GroupScoring(Scorer([(Heard(), 1.0)])) as scoring:
            scoring.begin(first)
            assert await asyncio.to_thread(heard.wait, WAIT), "judged before all groups are there"
            scoring.begin(second)
            return await scoring.finish()

    assert list(asyncio.run(run())) == ["g0", "g1"]


def test_what_cannot_be_kept_ends_all_scoring_with_one_error(episode_of: MakeEpisode) -> None:
    class Full:
        def get(self, key: str) -> None:
            return None

        def put(self, key: str, scores: tuple[Score, ...]) -> None:
            raise RecordError("the disk is full")

    scorer = Scorer([(Slow(), 1.0)], judgements=Full())
    with pytest.raises(RecordError, match="the disk is full"):
        asyncio.run(score_groups(scorer, groups_of(episode_of, "a", "b")))
