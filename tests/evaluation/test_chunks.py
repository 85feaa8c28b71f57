"""Where chunks are cut depends on the tasks alone; a chunk is bounded in tasks and in clips."""

import asyncio
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.assembly.determinism import make_deterministic
from sensorium.assembly.models import load_model
from sensorium.assembly.playing import sampling_of
from sensorium.assembly.session import open_session
from sensorium.data.media_store import MediaStore
from sensorium.data.mixture import each_once, make_sources
from sensorium.evaluation.evaluate import attempt_of, cut, play_chunks
from sensorium.recipe.load import load_recipe
from sensorium.recipe.memory_estimate import CLIPS_AT_ONCE
from sensorium.vocabulary import Media, Task, user
from tests.evaluation.daily import write_daily


def task(id: int, *clips: int) -> Task:
    return Task(str(id), (user(*(Media("video", f"{clip:064x}") for clip in clips), Media("picture", f"{id:064x}"), "?"),))


TASKS = st.lists(st.lists(st.integers(0, 200), max_size=80), max_size=60)


@given(TASKS, st.integers(0, 10))
def test_every_task_is_in_one_chunk_and_no_chunk_is_too_large(drawn: list[list[int]], most: int) -> None:
    tasks = [task(i, *clips) for i, clips in enumerate(drawn)]
    chunks = cut(tasks, most)
    assert [place for chunk in chunks for place in chunk] == list(range(len(tasks)))
    for chunk in chunks:
        clips = {clip for place in chunk for clip in drawn[place]}
        assert len(chunk) == 1 or (len(clips) <= CLIPS_AT_ONCE and (not most or len(chunk) <= most))
    for before, after in pairwise(chunks):
        fuller = {clip for place in (*before, after.start) for clip in drawn[place]}
        assert len(fuller) > CLIPS_AT_ONCE or (most and len(before) == most), "no chunk is smaller than it must be"


def test_tasks_without_clips_are_played_at_once_unless_told_otherwise() -> None:
    tasks = [task(i) for i in range(1000)]
    assert cut(tasks) == [range(1000)]
    assert cut(tasks, 400) == [range(400), range(400, 800), range(800, 1000)]
    assert cut([]) == []


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_chunk_is_the_same_to_the_last_bit_whatever_was_played_before(temperature: float, tmp_path: Path) -> None:
    changes = {"rollout": {"max_new_tokens": 12}, "rewards": {"terms": [{"name": "choice"}]}}
    recipe = load_recipe(write_daily(tmp_path, 7, **changes))
    make_deterministic(recipe)

    async def played(chunks: list[range]) -> list[tuple[str, tuple[int, ...], tuple[float, ...]]]:
        session = open_session(recipe, load_model(recipe, recipe.model.path, MediaStore()), None)
        tasks, _ = each_once(make_sources(recipe.tasks, "evaluate", session.store))
        sampling = sampling_of(recipe.rollout, temperature)
        found = []
        given = (session.rollout, session.scorer, tasks, chunks, 2, attempt_of(0, "x"), sampling, recipe.held_out_rollout)
        async for groups in play_chunks(*given):
            for episode in (episode for group in groups for episode in group.episodes):
                response = episode.turns[0].response
                found.append((episode.id, response.tokens, response.logprobs))
        session.close()
        return found

    chunks = [range(0, 3), range(3, 6), range(6, 7)]
    whole = asyncio.run(played(chunks))
    assert len({id for id, _, _ in whole}) == 14
    assert whole[12:] == asyncio.run(played(chunks[2:]))
    assert whole[6:] == asyncio.run(played(chunks[1:]))
