"""CapRL's golden tables: timestamps, length, normalised choices; and the terms that ask readers, over real sockets."""

import asyncio
import threading
from collections.abc import Iterator
from random import Random
from typing import Any

import pytest

from sensorium.data.media_store import MediaStore
from sensorium.recipe.schema import JudgeEndpointSection, JudgesSection
from sensorium.rewards.judges.client import JudgeClient
from sensorium.rewards.reward_term import RewardContext
from sensorium.rewards.terms import TokenLength, timestamp_format
from sensorium.systems.caprl.caption_rows import (
    CANNOT,
    CAPRL_CANNOT,
    CaptionQuestion,
    draws,
    first_letter,
    plain_choices,
    question_of,
    question_of_block,
)
from sensorium.systems.caprl.terms import PICTURE_WEIGHTS, WEIGHTS, CaptionQA, Reading
from sensorium.vocabulary.episode import Score, total
from sensorium.vocabulary.errors import JudgeFailure, RecipeError, TaskError
from sensorium.vocabulary.task import Task

from ..services import text_reader
from .conftest import MakeEpisode
from .judges.server import Answer, judge_server, said, section_of

ROW = {"question": "Which colour?", "choices": ["A. blue", "B. red", "C. green", "D. yellow"], "answer": "B"}


@pytest.mark.parametrize(
    ("caption", "paid"),
    [
        ("no stamps", 0),
        ("[00:99] a", 0),
        ("[0:5] a", 0),
        ("[00:01:02] a", 0),
        ("[00:01 – 00:05] a", 0),
        ("[00:00] a [00:05 - 00:09] b [01:00] c", 1),
        ("[00:00] a", 1),
        ("[00:00-00:05] x [00:03] y", 1),
        ("[00:10] a [00:05] b", 0.5),
        ("[00:09 - 00:05] a [00:20] b", 0.75),
        ("[00:20 - 00:05] a [00:10] b", 0.75),
        ("[599:59] a", 1),
        ("[600:00] a", 0),
        ("[00:01 - 600:00] a [00:02] b", 0.75),
        ("[00:01\u00a0-\u00a000:05] a [٠٠:٠٣] b", 1),
    ],
)
def test_the_format_reward_is_as_published(caption: str, paid: float) -> None:
    assert timestamp_format(caption) == paid


def test_the_length_reward_falls_in_a_straight_line() -> None:
    length = TokenLength(2048, 3072)
    assert [length.value(n) for n in (1, 2048, 2304, 2560, 3071, 3072, 9999)] == [1, 1, 0.75, 0.5, 1 / 1024, 0, 0]
    paid = [Score("caption_qa", 0.5), Score("timestamps", 0.75, 0.2), Score("length", 1.0, 0.2)]
    assert total(paid) == 0.5 + 0.2 * 0.75 + 0.2 * 1.0


def test_choices_lose_letters_of_their_own_and_nothing_else() -> None:
    plain = ("x", "y", "z")
    for written in (["A. x", "B. y", "C. z"], ["A) x", "B) y", "C) z"], ["(A) x", "(B) y", "(C) z"], ["x", "y ", " z"]):
        assert plain_choices(written) == plain
    assert plain_choices(["A. Lincoln", "G. Washington"]) == ("A. Lincoln", "G. Washington")
    for wrong in (["B. x", "A. y"], ["x"], ["x", "x"], ["x", " "]):
        with pytest.raises(ValueError):
            plain_choices(wrong)


@pytest.mark.parametrize("answer", ["B", "b", "(B)", "B.", "red", "B. red"])
def test_an_answer_is_a_letter_or_an_option(answer: str) -> None:
    question = question_of({**ROW, "answer": answer})
    assert (question.choices, question.answer) == (("blue", "red", "green", "yellow"), 1)


@pytest.mark.parametrize(
    "wrong", [{**ROW, "answer": "E"}, {**ROW, "answer": None}, {**ROW, "choices": "ab"}, {"question": ""}, 3]
)
def test_a_question_that_is_none_is_refused(wrong: Any) -> None:
    with pytest.raises(ValueError):
        question_of(wrong)


def test_the_wire_form_is_read_and_written() -> None:
    block = "Which colour?\nLook closely.\n   - A) blue\n   - B) red\n   - C) green\n   - D) yellow"
    question = question_of_block(block, "B")
    assert (question.stem, question.choices, question.answer) == (
        "Which colour?\nLook closely.",
        ("blue", "red", "green", "yellow"),
        1,
    )
    assert question.block() == block


@pytest.mark.parametrize("said", [" B", "b)", "The answer is B.", "**Answer:** B", "Option B", "the correct answer is (b)"])
def test_a_reader_that_says_the_answer_is_before_its_letter_has_answered(said: str) -> None:
    assert first_letter(said) == "B"
    assert first_letter("A") == "A"
    assert first_letter("Answer") == "A"


def test_the_thoughts_of_a_reader_are_no_answer() -> None:
    assert first_letter("<think>A or so</think>\n\nThe answer is B.") == "B"
    with pytest.raises(ValueError, match="only thinks"):
        first_letter("<think>\nOkay, the caption says")


def test_options_of_rows_with_small_letters_are_read_as_caprl_sends_them() -> None:
    assert question_of_block("Which colour?\n   - a) blue\n   - b) a) red", "B") == CaptionQuestion(
        "Which colour?", ("blue", "a) red"), 1
    )
    offered = "Which colour?\n   - A) blue\n   - B) red\n   - C) Can not answer based on the caption"
    assert question_of_block(offered, "B").choices == ("blue", "red")
    with pytest.raises(ValueError, match="letter of its place"):
        question_of_block("Which shape?\n   - A) round\n   - E) odd\n   - C) flat", "C")


@pytest.mark.parametrize("count", [2, 3, 4, 5])
@pytest.mark.parametrize("extra", ["E", "F", "EF"])
def test_caprls_own_option_is_dropped_whatever_its_letter(count: int, extra: str) -> None:
    """CapRL's shuffle_options writes F) below any number of options, and its data have E)."""
    choices = ("blue", "red", "green", "grey", "white")[:count]
    block = CaptionQuestion("Which colour?", choices, 1).block()
    added = "".join(f"\n   - {letter}) {CAPRL_CANNOT}" for letter in extra)
    assert question_of_block(block + added, "B") == CaptionQuestion("Which colour?", choices, 1)
    written = [f"{'ABCDE'[place]}) {choice}" for place, choice in enumerate(choices)]
    row = {"question": "Which colour?", "choices": [*written, f"{extra[0]}) {CAPRL_CANNOT}"], "answer": "B"}
    assert question_of(row) == CaptionQuestion("Which colour?", choices, 1)
    with pytest.raises(ValueError, match="'F'"):
        question_of_block(block + added, "F")
    with pytest.raises(ValueError, match="letter"):
        question_of_block(block + "\n   - Z) none of these", "B")


def test_an_answer_that_is_caprls_own_option_stays_one() -> None:
    row = {"question": "Which colour?", "choices": ["blue", "red", CAPRL_CANNOT], "answer": "C"}
    assert question_of(row) == CaptionQuestion("Which colour?", ("blue", "red", CAPRL_CANNOT), 2)


def test_draws_shuffle_relabel_and_offer_a_way_out() -> None:
    question = question_of(ROW)
    drawn = draws([question], 64, Random(0))
    assert len({draw.order for draw in drawn}) > 12
    assert {draw.letter for draw in drawn} == set("ABCD")
    for draw in drawn:
        assert f"{draw.letter}) red" in draw.text
        assert draw.text.endswith(f"E) {CANNOT}")
    assert len(draws([question] * 3, 0, Random(0))) == 3  # all_qa: each once
    assert [first_letter(reply) for reply in ("B", " (c) green", "The", "<b>")] == ["B", "C", "T", "B"]
    with pytest.raises(ValueError, match="no letter"):
        first_letter("42")


def test_the_judge_weights_are_as_published() -> None:
    assert WEIGHTS == {"factuality": 0.30, "temporal_alignment": 0.25, "coverage": 0.25, "no_hallucination": 0.20}
    assert sum(PICTURE_WEIGHTS.values()) == pytest.approx(1)


@pytest.fixture(scope="module")
def context() -> Iterator[RewardContext]:
    server = text_reader.Server(("127.0.0.1", 0), text_reader.Reader)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    endpoint = JudgeEndpointSection(base_url=f"http://127.0.0.1:{server.server_address[1]}/v1")
    client = JudgeClient(JudgesSection(endpoints={"reader": (endpoint,)}))
    yield RewardContext(MediaStore(), client)
    client.close()
    server.shutdown()


def test_a_reader_that_does_not_answer_leaves_the_score_missing_and_not_lower(episode_of: MakeEpisode) -> None:
    def half(request: dict[str, Any]) -> Answer | str:
        return Answer("no", 400) if "Which shape?" in said(request) else "A"

    rows = [{**ROW, "answer": "A"}, {**ROW, "question": "Which shape?", "choices": ["cube", "ball"], "answer": "A"}]
    with judge_server(half) as server:
        client = JudgeClient(section_of(server.url, retries=0))
        term = CaptionQA("judge", draws=0, context=RewardContext(MediaStore(), client))
        with pytest.raises(JudgeFailure, match="1 of 2"):
            asyncio.run(term.score(Task("t", metadata={"questions": rows}), episode_of("a cube")))
        assert asyncio.run(term.score(Task("t", metadata={"questions": rows[:1]}), episode_of("a cube"))).value in (
            0.0,
            1.0,
        )
        client.close()


def test_a_caption_is_paid_by_what_can_be_read_from_it(context: RewardContext, episode_of: MakeEpisode) -> None:
    term = CaptionQA("reader", context=context)
    task = Task(
        "t", metadata={"questions": [ROW, {**ROW, "question": "Which shape?", "choices": ["cube", "ball"], "answer": "A"}]}
    )
    for caption, least, most in (("a red cube", 1, 1), ("a ball", 0, 0), ("a red thing", 0.01, 0.99)):
        score = asyncio.run(term.score(task, episode_of(caption)))
        assert least <= score.value <= most
    again = asyncio.run(term.score(task, episode_of("a red thing")))
    assert again == asyncio.run(term.score(task, episode_of("a red thing")))
    with pytest.raises(TaskError, match="no questions"):
        asyncio.run(term.score(Task("t"), episode_of("x")))
    with pytest.raises(RecipeError, match="no endpoint"):
        CaptionQA("other", context=context)
    with pytest.raises(RecipeError, match="no prompt"):
        Reading("reader", prompt="longer")
