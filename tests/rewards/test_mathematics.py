"""Mathematical equivalence, decided outside the process, with an end to every comparison."""

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor

import pytest

from sensorium.rewards.terms import Mathematics
from sensorium.vocabulary.episode import Episode
from sensorium.vocabulary.errors import RewardFailure
from sensorium.vocabulary.task import Task

MakeEpisode = Callable[..., Episode]

pytest.importorskip("math_verify")


@pytest.fixture(scope="module")
def term() -> Iterator[Mathematics]:
    term = Mathematics(timeout_s=20)
    yield term
    term.close()


@pytest.mark.parametrize(
    ("known", "text", "right"),
    [
        ("1/2", "so \\boxed{0.5}", True),
        ("3\\sqrt{2}", "<answer>$\\sqrt{18}$</answer>", True),
        ("2x+1", "\\boxed{1+2x}", True),
        ("7", "\\boxed{8}", False),
        (7, "7", False),
        (["5", "6"], "\\boxed{6.0}", True),
    ],
)
def test_equivalence(term: Mathematics, known: object, text: str, right: bool, episode_of: MakeEpisode) -> None:
    (score,) = term.score(Task("t", answer=known), episode_of(text))
    assert (score.value, score.correct) == (float(right), right)


def test_works_from_many_threads(term: Mathematics, episode_of: MakeEpisode) -> None:
    def judge(n: int) -> float | None:
        return term.score(Task("t", answer=f"{n}/2"), episode_of(f"\\boxed{{{n / 2 if n % 2 else n}}}"))[0].value

    with ThreadPoolExecutor(6) as pool:
        assert list(pool.map(judge, range(1, 13))) == [1.0, 0.0] * 6


def test_a_comparison_without_end_is_cut_off_and_the_next_one_works(episode_of: MakeEpisode) -> None:
    term = Mathematics(timeout_s=1, processes=1)
    with pytest.raises(RewardFailure, match="within 1 "):
        term.score(Task("t", answer="1"), episode_of("\\boxed{9^{9^{9^{9}}}+x}"))
    assert term.score(Task("t", answer="1/4"), episode_of("\\boxed{0.25}"))[0].correct is True
    term.close()
