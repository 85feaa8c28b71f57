"""The report shows the advantages that tokens were trained with, what each turn was paid, and why something was not."""

from pathlib import Path

from sensorium.report.cards import tinted
from sensorium.report.page import render_report
from sensorium.runs.durable import write_whole
from sensorium.runs.episodes import EpisodeCredit, write_episodes
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user


def response(text: str, ends: tuple[int, ...], name: str = "r") -> Segment:
    return Segment("model", tuple(range(len(ends))), text=text, byte_ends=ends, name=name)


def test_tokens_in_a_row_with_one_advantage_are_one_run_and_no_character_is_torn() -> None:
    page = tinted(response("ab€c", (1, 2, 3, 5, 6)), (1.0, 1.0, -0.5, 0.5, 0.0), lambda text: text, 100)
    assert page == (
        '<span class="up" style="--s:0.50">ab</span><span class="up" style="--s:0.25">€</span>'
        '<span class="flat" style="--s:0.00">c</span>'
    )


def test_a_long_response_is_cut_and_says_so() -> None:
    page = tinted(response("x" * 10, (4, 10)), (1.0, -1.0), lambda text: text, 6)
    assert page.endswith('">xx</span>… (4 more characters)')


def walk(id: str, scores: tuple[Score, ...], parts: dict[str, float]) -> Episode:
    written = [response("go up", (2, 5), f"{id}{i}") for i in range(2)]
    turns = tuple(Turn(i, (user("?"),), s, i, 0, reward=0.5, parts=parts if i else {}) for i, s in enumerate(written))
    return Episode(id, "t", "g", 0, tuple(Thread((s,), (True,)) for s in written), turns, Status.FINISHED, scores=scores)


def test_a_card_shows_advantages_pay_by_turn_and_why_an_attempt_was_left_out(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    write_whole(run.recipe, "name: x\nmodel: {path: y}\n")
    scores = (Score("moves", 0.75, scope="turn", turn=1), Score("judge", None, 0.0, "turn", 0, reason="it <hung>"))
    group = Group("g", Task("t", (user("go"),)), (walk("a", scores, {"goal": 1.0, "holes": 0.0}), walk("b", (), {})))
    credits = {
        "a": EpisodeCredit("trained", ((0.5, 0.5), (0.5, -1.5))),
        "b": EpisodeCredit("dropped: no score for judge"),
    }
    write_episodes(run.episodes_of(1), 1, [group], credits=credits)
    page = render_report(run)
    assert "advantage +0.50</div>" in page
    assert "advantage -1.50 to +0.50</div>" in page
    assert '<span class="down" style="--s:0.75"> up</span>' in page
    for chip in ("goal +1.00", "holes +0.00", "moves <b>0.75</b>"):
        assert f'<span class="chip">{chip}</span>' in page
    assert "<b>judge missing</b>: it &lt;hung&gt;" in page
    assert "not trained on: no score for judge" in page
    assert "tokens were made likelier" in page


def test_a_log_of_an_older_version_is_shown_without_advantages(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    write_whole(run.recipe, "name: x\nmodel: {path: y}\n")
    write_episodes(run.episodes_of(1), 1, [Group("g", Task("t", (user("go"),)), (walk("a", (), {}),))])
    page = render_report(run)
    assert "go up" in page
    assert 'class="advantage"' not in page
