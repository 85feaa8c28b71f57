"""Reward terms judge what the model wrote, and only that."""

import asyncio
import time
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sensorium.recipe.registry import build
from sensorium.rewards.reward_term import ComparingTerm, RewardTerm, boxed, tagged
from sensorium.rewards.scorer import Scorer
from sensorium.rewards.terms import (
    BoxIoU,
    Choice,
    EnvironmentReward,
    Exact,
    Format,
    Gsm8k,
    Numeric,
    Overlong,
    alphanumeric,
    choice_letter,
    mathematical_answer,
    number,
)
from sensorium.systems.audio_visual.by_type import AccuracyByType
from sensorium.vocabulary.episode import Episode, total
from sensorium.vocabulary.errors import RecipeError, RewardFailure, TaskError
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]

PLAIN = st.text(st.characters(blacklist_characters="<>\\{}"), max_size=30)


def value(term: RewardTerm, answer: object, episode: Episode) -> float | None:
    (score,) = term.score(Task("t", answer=answer), episode)
    if score.correct is not None:
        assert score.correct == (score.value == 1.0)
    return score.value


@given(PLAIN, PLAIN, PLAIN)
def test_tagged_finds_the_last_answer(before: str, answer: str, after: str) -> None:
    text = f"{before}<answer>wrong</answer>{before}<answer>{answer}</answer>{after}"
    assert tagged(text) == answer.strip()
    assert tagged(before + after) is None


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("<answer>a", None),
        ("a</answer>", None),
        ("</answer><answer>", None),
        ("<answer><answer>b</answer>", "b"),
        ("", None),
    ],
)
def test_tagged_wants_an_opened_and_closed_tag(text: str, found: str | None) -> None:
    assert tagged(text) == found


@given(PLAIN, PLAIN)
def test_boxed_finds_the_last_balanced_box(inner: str, after: str) -> None:
    assert boxed(f"\\boxed{{1}} so \\boxed{{\\frac{{{inner}}}{{2}}}}{after}") == f"\\frac{{{inner}}}{{2}}".strip()


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("\\boxed{1} \\boxed{2", "1"),
        ("\\boxed{\\{1,2\\}}", "\\{1,2\\}"),
        ("no box", None),
        ("\\boxed{}", ""),
        ("\\boxed{a\\", None),
        ("\\boxed{5} for S={1,2}", "5"),
        ("{x} \\boxed{5} {y}} {z}", "5"),
        ("f(\\boxed{\\boxed{1}}) in {2}", "1"),
    ],
)
def test_boxed_at_the_edges(text: str, found: str | None) -> None:
    assert boxed(text) == found


@pytest.mark.parametrize(
    ("text", "paid"),
    [
        ("<think>a</think><answer>b</answer>", 1.0),
        ("<answer>b</answer>", 0.75),
        ("<think>a</think>b", 0.25),
        ("<think>a<answer>b", 0.0),
        ("", 0.0),
    ],
)
def test_format_pays_each_tag_its_part(text: str, paid: float, episode_of: MakeEpisode) -> None:
    assert value(Format(), None, episode_of(text)) == paid


def test_format_of_answer_alone_and_of_several_turns(episode_of: MakeEpisode) -> None:
    assert value(Format(tags={"answer": 1.0}), None, episode_of("<answer>b</answer>")) == 1.0
    assert value(Format(), None, episode_of("<answer>b</answer>", "b")) == 0.375
    with pytest.raises(RecipeError, match="tags"):
        Format(tags={})


@pytest.mark.parametrize(
    ("known", "text", "right"),
    [
        ("48/2 = <<48/2=24>>24 clips in May.\n48+24 = <<48+24=72>>72.\n#### 72", "So\n#### 72", 1.0),
        ("#### 1,200", "#### \\$1,200.", 1.0),
        ("#### -5", "#### -$5", 1.0),
        ("-5", "#### \u22125 degrees", 1.0),
        (10, "#### 10%", 1.0),
        (2.5, "#### $2.50", 1.0),
        ("72", "#### 70\n#### 72", 1.0),
        ("72", "#### 72\n\\boxed{70}", 1.0),
        ("72", "#### Step 2\n\\boxed{72}", 1.0),
        ("72", "####\n\\boxed{72 \\text{ clips}}", 1.0),
        ("72", "#### 24 + 48 = 72", 0.0),
        ("72", "#### 72 or 73", 0.0),
        ("72", "72", 0.0),
        ("72", "", 0.0),
        (["70", "72"], "#### 72", 1.0),
    ],
)
def test_gsm8k_reads_the_number_after_hashes_or_else_in_a_box(
    known: object, text: str, right: float, episode_of: MakeEpisode
) -> None:
    assert value(Gsm8k(), known, episode_of(text)) == right


def test_gsm8k_refuses_a_known_answer_without_a_number() -> None:
    with pytest.raises(TaskError, match="task t"):
        Gsm8k().check_task(Task("t", answer="#### many"))


@pytest.mark.parametrize(
    ("answer", "text", "right"),
    [
        ("Dark Red", "<answer> dark-red. </answer>", 1.0),
        ("red", "<answer>blue</answer>", 0.0),
        ("red", "red", 0.0),
        ("red", "<answer></answer>", 0.0),
        (3, "<answer>3</answer>", 1.0),
        (["circle", "disc"], "<answer>Disc</answer>", 1.0),
        ("红色", "<answer>红色。</answer>", 1.0),
    ],
)
def test_exact(answer: object, text: str, right: float, episode_of: MakeEpisode) -> None:
    assert value(Exact(), answer, episode_of(text)) == right


def test_exact_with_fallback_takes_the_whole_response(episode_of: MakeEpisode) -> None:
    assert value(Exact(fallback=True), "red", episode_of(" Red!")) == 1.0
    assert value(Exact(fallback=True), "red", episode_of("red <answer>blue</answer>")) == 0.0


@pytest.mark.parametrize("answer", [None, "", "?!", {"a": 1}, [], True])
def test_a_task_that_cannot_be_compared_is_at_fault_not_wrong(answer: object, episode_of: MakeEpisode) -> None:
    with pytest.raises(TaskError, match="task t"):
        value(Exact(), answer, episode_of("<answer>x</answer>"))


@given(st.text())
def test_alphanumeric_keeps_letters_and_digits_only(text: str) -> None:
    assert all(c.isalnum() for c in alphanumeric(text))
    assert alphanumeric(f"  {text}!") == alphanumeric(text)


@given(
    st.sampled_from("ABCDEFGH"),
    st.sampled_from(["{}", " ({}) ", "{}.", "{}) a cat", "{}: red", "Option {}", "[{}]", "answer: {}"]),
)
def test_choice_letter_in_its_usual_forms(letter: str, form: str) -> None:
    assert choice_letter(form.format(letter)) == letter
    assert choice_letter(form.format(letter.lower())) == letter


@pytest.mark.parametrize("text", ["A dog", "Apple", "", "AB", "not sure", "1"])
def test_prose_is_no_choice(text: str) -> None:
    assert choice_letter(text) is None


def test_choice(episode_of: MakeEpisode) -> None:
    assert value(Choice(), "B. the cat", episode_of("<think>A?</think><answer>(b)</answer>")) == 1.0
    assert value(Choice(), "B", episode_of("<answer>C</answer>")) == 0.0
    assert value(Choice(), "B", episode_of("B")) == 0.0
    assert value(Choice(fallback=True), "B", episode_of("B")) == 1.0
    with pytest.raises(TaskError, match="letter"):
        value(Choice(), "the cat", episode_of("<answer>B</answer>"))


@given(st.floats(-1e12, 1e12), st.sampled_from(["{!r}", "x = {!r}", "{!r} cm", "about {!r}%"]))
def test_number_is_read_back(x: float, form: str) -> None:
    assert number(form.format(x)) == x


@given(st.integers(-(10**15), 10**15))
def test_number_with_thousands_separators(n: int) -> None:
    assert number(f"{n:,}") == n


@pytest.mark.parametrize(
    ("text", "found"),
    [("1/2", 0.5), ("-3 / 4", -0.75), ("\u22125", -5.0), (".5", 0.5), ("5.", 5.0), ("1/0", None), ("1 or 2", None),
     ("none", None), ("", None), ("1e999", None), ("m2", None), ("-", None), (".", None)],
)  # fmt: skip
def test_number_at_the_edges(text: str, found: float | None) -> None:
    assert number(text) == found


@given(st.text(st.sampled_from("0123456789,.+-/eE %x"), max_size=20))
def test_number_never_raises(text: str) -> None:
    found = number(text)
    assert found is None or abs(found) < float("inf")


def test_numeric_tolerances(episode_of: MakeEpisode) -> None:
    assert value(Numeric(), 3, episode_of("<answer>3.0</answer>")) == 1.0
    assert value(Numeric(), 3, episode_of("<answer>3.01</answer>")) == 0.0
    assert value(Numeric(absolute=0.02), 3, episode_of("<answer>3.01</answer>")) == 1.0
    assert value(Numeric(relative=0.1), "-200", episode_of("<answer>-219</answer>")) == 1.0
    assert value(Numeric(relative=0.1), "-200", episode_of("<answer>-221</answer>")) == 0.0
    assert value(Numeric(), 3, episode_of("<answer>three</answer>")) == 0.0
    with pytest.raises(TaskError, match="not a number"):
        value(Numeric(), "many", episode_of("<answer>3</answer>"))


def test_environment_reward_sums_turns_and_takes_success(episode_of: MakeEpisode) -> None:
    episode = episode_of("a", "b", "c", rewards=(0.5, None, 1.0), info={"success": True})
    (score,) = EnvironmentReward().score(Task("t"), episode)
    assert (score.value, score.correct, score.scope) == (1.5, True, "episode")
    turns = EnvironmentReward(per_turn=True).score(Task("t"), episode)
    assert [(s.turn, s.value, s.scope, s.correct) for s in turns] == [(0, 0.5, "turn", None), (2, 1.0, "turn", True)]
    assert total(turns) == 1.5


def test_environment_success_comes_from_the_last_turn_when_the_rollout_cut_it_off(episode_of: MakeEpisode) -> None:
    episode = episode_of("a", "b", rewards=(0.0, 0.0), infos=({"success": False}, {"success": False}))
    assert EnvironmentReward().score(Task("t"), episode)[0].correct is False


def test_a_world_that_pays_nothing_gives_no_score(episode_of: MakeEpisode) -> None:
    with pytest.raises(RewardFailure, match=r"task t.*1 turns"):
        EnvironmentReward().score(Task("t"), episode_of("a"))


@pytest.mark.parametrize(
    ("term", "right", "wrong"),
    [
        (Exact(), "red", "blue"),
        (Exact(fallback=True), "red", "blue"),
        (Choice(), "B", "A"),
        (Numeric(), "3", "4"),
        (BoxIoU(), "[1, 2, 3, 4]", "[7, 7, 9, 9]"),
        (AccuracyByType(default="multiple choice"), "B", "A"),
    ],
    ids=lambda given: type(given).__name__ if not isinstance(given, str) else "",
)
def test_of_several_turns_the_last_one_answers(term: RewardTerm, right: str, wrong: str, episode_of: MakeEpisode) -> None:
    known: object = [1, 2, 3, 4] if isinstance(term, BoxIoU) else right
    first, last = f"<answer>{wrong}</answer>", f"<answer>{right}</answer>"
    assert value(term, known, episode_of(first, "let me see", last)) == 1.0
    assert value(term, known, episode_of(last, "let me see", first)) == 0.0


@pytest.mark.parametrize("name", ["exact", "choice", "numeric", "bbox_iou", "math", "accuracy_by_type"])
def test_the_answer_on_record_is_of_the_last_turn(name: str, episode_of: MakeEpisode) -> None:
    first, last = ("[1, 2, 3, 4]", "[5, 6, 7, 8]") if name == "bbox_iou" else ("A", "B") if name == "choice" else ("1", "2")
    built = build("reward", name, {})
    assert isinstance(built, ComparingTerm)
    task = Task("t", answer=last, metadata={"type": "numerical"})
    episodes = [episode_of(f"<answer>{first}</answer>", f"<answer>{last}</answer>"), episode_of(f"<answer>{last}</answer>")]
    of_two, of_one = (built.extract(task, episode) for episode in episodes)
    assert of_two is not None
    assert of_two == of_one


@pytest.mark.parametrize("term", [Exact(), Choice(), Numeric(), Format()])
def test_an_answer_in_an_observation_earns_nothing(term: RewardTerm, episode_of: MakeEpisode) -> None:
    shown = episode_of("no", observation="<think></think><answer>1</answer><answer>B</answer>")
    assert value(term, "B" if isinstance(term, Choice) else "1", shown) == 0.0


@pytest.mark.parametrize("term", [Exact(), Choice(), Numeric(), Format()])
def test_an_episode_without_a_response_is_not_judged(term: RewardTerm, episode_of: MakeEpisode) -> None:
    with pytest.raises(RewardFailure, match="no response"):
        value(term, "1" if isinstance(term, Numeric) else "B", episode_of())


@pytest.mark.parametrize(
    ("text", "found"),
    [("so \\boxed{2}", "2"), ("<answer>\\boxed{3}</answer>", "3"), ("\\boxed{2} <answer>3</answer>", "3"), ("2", None)],
)
def test_mathematical_answer(text: str, found: str | None) -> None:
    assert mathematical_answer(text) == found
    assert mathematical_answer("2", fallback=True) == "2"


@pytest.mark.parametrize(
    ("tokens", "paid"), [(1, 0.0), (60, 0.0), (61, -0.025), (80, -0.5), (99, -0.975), (100, -1.0), (101, -1.0), (900, -1.0)]
)
def test_overlong_costs_nothing_then_more_and_more_then_all_of_it(
    tokens: int, paid: float, episode_of: MakeEpisode
) -> None:
    half = written(episode_of, tokens // 2, tokens - tokens // 2)
    assert value(Overlong(100, 40), None, half) == pytest.approx(paid)
    assert value(Overlong(100, 40, penalty=0.5), None, half) == pytest.approx(paid / 2)


@given(st.integers(1, 300), st.integers(0, 300), st.integers(1, 400))
def test_overlong_never_pays_and_never_falls_with_a_shorter_response(maximum: int, buffer: int, tokens: int) -> None:
    term = Overlong(maximum, min(buffer, maximum))
    assert 0 <= term.share(tokens) <= term.share(tokens + 1) <= 1
    assert term.share(maximum) == 1
    if buffer < maximum:
        assert term.share(maximum - max(buffer, 1)) == 0


def written(episode_of: MakeEpisode, *lengths: int) -> Episode:
    """An episode with so many tokens a turn."""
    whole = episode_of(*("x" for _ in lengths))
    turns = [
        replace(turn, response=replace(turn.response, tokens=(1,) * count))
        for turn, count in zip(whole.turns, lengths, strict=True)
    ]
    return replace(whole, turns=tuple(turns))


def test_overlong_refuses_what_has_no_meaning(episode_of: MakeEpisode) -> None:
    for options in ({"max_tokens": 10, "buffer_tokens": 11}, {"max_tokens": 0, "buffer_tokens": 0}):
        with pytest.raises(RecipeError, match="buffer_tokens"):
            Overlong(**options)
    with pytest.raises(RecipeError, match="penalty"):
        Overlong(10, 5, penalty=-1.0)
    with pytest.raises(RewardFailure, match="no response"):
        Overlong(10, 5).score(Task("t"), episode_of())


def test_the_audio_visual_terms_keep_their_names_and_add_up(episode_of: MakeEpisode) -> None:
    """0.2 format + 0.8 exact_alnum, the published weights."""
    terms = [(build("reward", "format", {}, "x"), 0.2), (build("reward", "exact_alnum", {}, "x"), 0.8)]
    scorer = Scorer(terms)
    task = Task("t", answer="B")
    for text, reward, right in (
        ("<think>a</think><answer> b. </answer>", 1.0, True),
        ("<answer>B</answer>", 0.95, True),
        ("<think>a</think><answer>C</answer>", 0.2, False),
        ("B", 0.0, False),
    ):
        scored = asyncio.run(scorer.score(task, episode_of(text)))
        assert [score.name for score in scored.scores] == ["format", "exact_alnum"]
        assert scored.reward == pytest.approx(reward)
        assert scored.correct is right
    fallback = build("reward", "exact_alnum_with_fallback", {}, "x")
    assert value(fallback, "B", episode_of(" b.")) == 1.0
    assert fallback.name == "exact_alnum_with_fallback"


def boxed_step_by_step(text: str) -> str | None:
    """The last box, found by counting braces from every box on, from the last one backwards."""
    start = len(text)
    while (start := text.rfind("\\boxed{", 0, start)) >= 0:
        depth, place = 0, start + len("\\boxed")
        while place < len(text):
            if text[place] == "\\":
                place += 2
                continue
            depth += {"{": 1, "}": -1}.get(text[place], 0)
            if depth == 0:
                return text[start + len("\\boxed{") : place].strip()
            place += 1
    return None


@given(st.lists(st.sampled_from(["\\boxed{", "{", "}", "\\", "a", "\\{", "\\}", " "]), max_size=14).map("".join))
def test_the_last_balanced_box_is_found(text: str) -> None:
    assert boxed(text) == boxed_step_by_step(text)


def test_megabytes_of_boxes_are_read_in_a_moment() -> None:
    began = time.process_time()
    assert boxed("\\boxed{" * 100_000) is None
    assert boxed("\\boxed{" * 100_000 + "7}") == "7"
    assert time.process_time() - began < 10
