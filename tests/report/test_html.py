"""report.html stands alone, shows what happened as it happened, and stays small."""

import base64
import hashlib
import json
import re
from dataclasses import replace
from html.parser import HTMLParser
from io import BytesIO
from pathlib import Path
from random import Random

import pytest
from PIL import Image

from sensorium.data.media_store import MediaStore
from sensorium.data.shapes import Shapes
from sensorium.report.cards import Comparison, candidate_number, choose, compare_evaluations, training_groups
from sensorium.report.charts import Series, line_chart, ticks
from sensorium.report.page import render_report, stage_table, write_report
from sensorium.runs.durable import write_whole
from sensorium.runs.episodes import read_episodes, write_episodes
from sensorium.runs.metrics import Notice, SightResult, write_notice, write_sight
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary import Episode, Group, Media, Score, Segment, Status, Task, Thread, Turn, user

from .synthetic_run import attempt, make_run, make_walks

VOID = {"meta", "link", "img", "br", "input", "hr", "source"}


class Page(HTMLParser):
    """Parses a page, checking that tags nest; gathers elements and text."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.elements: list[tuple[str, dict[str, str | None]]] = []
        self.text = ""
        self.feed(text)
        assert self.open == []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.elements.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data

    def all(self, tag: str) -> list[dict[str, str | None]]:
        return [attributes for name, attributes in self.elements if name == tag]


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    return make_run(tmp_path_factory.mktemp("runs") / "shapes", steps=30)


@pytest.fixture(scope="module")
def page(run: RunDirectory) -> Page:
    return Page(write_report(run).read_text())


def test_the_page_loads_nothing_and_every_picture_is_there(page: Page) -> None:
    for _, attributes in page.elements:
        for name in ("src", "href"):
            assert (attributes.get(name) or "#").startswith(("#", "data:"))
    assert not page.all("link")
    ids = {image["id"] for image in page.all("image")}
    uses = {use["href"] for use in page.all("use")}
    assert uses == {f"#{id}" for id in ids}
    assert len(uses) >= 10


def test_the_page_shows_no_key_of_the_recipe(run: RunDirectory) -> None:
    text = run.recipe.read_text()
    try:
        write_whole(
            run.recipe, text + "tools: [{mcp: {url: 'http://host/mcp', headers: {Authorization: key-in-header}}}]\n"
        )
        shown = render_report(run)
    finally:
        write_whole(run.recipe, text)
    assert ("key-in-header" in shown, "Authorization" in shown) == (False, True)


def test_each_picture_is_embedded_once_and_is_the_stored_one(run: RunDirectory, page: Page) -> None:
    import base64

    images = page.all("image")
    assert len({image["href"] for image in images}) == len(images)
    stored = {path.name[:16]: path.read_bytes() for path in run.media.iterdir()}
    for image in images:
        data = base64.b64decode((image["href"] or "").partition(",")[2])
        assert stored[(image["id"] or "")[1:]] == data


def test_curves_tell_their_story_also_in_words(page: Page) -> None:
    labels = [svg["aria-label"] or "" for svg in page.all("svg") if (svg.get("class") or "").startswith("chart")]
    assert any(re.match(r"Reward: mean reward from 0\.\d+ at step 1 to 1\.\d+ at step 30", label) for label in labels)
    assert any("held out from 0.55 at step 0 to 0.96 at step 30" in label for label in labels)
    assert any(label.startswith("Reward by term: exact") and "format" in label for label in labels)


def test_before_after_and_examples_are_shown(page: Page) -> None:
    text = " ".join(page.text.split())
    for part in ("sampled", "greedy", "blank", "swapped", "+41.0", "learned", "right answer:", "reward", "exact", "format"):
        assert part in text
    assert "What colour" in text or "Which shape" in text
    assert "✓ right" in text
    assert "✗ wrong" in text
    assert "name: shapes" in page.text


def test_turns_are_shown_one_by_one(tmp_path: Path) -> None:
    run = make_walks(tmp_path)
    page = Page(render_report(run))
    turns = [attributes for tag, attributes in page.elements if tag == "ol" and attributes.get("class") == "turns"]
    assert len(turns) >= 4
    assert len(page.all("use")) > len(page.all("image"))
    assert "+1.00" in page.text
    assert "best and the worst" in page.text


def test_what_a_model_says_is_text_and_never_markup(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    evil = '<script>alert("x")</script><img src=http://evil>'
    said = Segment("model", (1,), text=evil, name=evil)
    task = Task(evil, (user(evil),), answer=evil, metadata={"category": evil})
    scores = (Score(evil, None, reason=evil),)
    episode = Episode(
        "e", evil, "g", 0, (Thread((said,), (True,)),), (Turn(0, task.messages, said, 0, 0),), Status.FAILED, evil, scores
    )
    write_episodes(run.episodes_of(1), 1, [Group("g", task, (episode,))])
    write_whole(run.recipe, "name: '<b>bold</b>'\nmodel: {path: '<i>'}\n")
    page = Page(render_report(run))
    assert len(page.all("script")) == 1
    assert not page.all("img")
    assert not page.all("b") or all(attributes == {} for attributes in page.all("b"))
    assert evil in page.text
    assert "missing" in page.text


def group_with(picture: Media, count: int = 1) -> list[Group]:
    task = Task("t", (user(picture, "what is this?"),))
    said = Segment("model", (1,), text="a thing", name="m")
    turns = (Turn(0, task.messages, said, 0, 0),)
    episodes = tuple(
        Episode(f"e{i}", "t", "g", i, (Thread((said,), (True,)),), turns, Status.FINISHED) for i in range(count)
    )
    return [Group("g", task, episodes)]


def test_large_pictures_are_scaled_down_and_past_the_bound_only_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    buffer = BytesIO()
    Image.effect_noise((1600, 1200), 64).save(buffer, format="PNG")
    media = MediaStore(run.media).put(buffer.getvalue(), "picture")
    write_episodes(run.episodes_of(1), 1, group_with(media))
    page = render_report(run)
    assert len(page) < len(buffer.getvalue()) / 4
    [image] = Page(page).all("image")
    assert (image["width"], image["height"]) == ("512", "384")
    assert "left out to keep this page small" in render_report(run, media_bytes=1000)


def test_a_picture_that_is_gone_or_broken_is_named_and_the_page_goes_on(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    gone = Media("picture", "ab" * 32, "row 7")
    write_episodes(run.episodes_of(1), 1, group_with(gone))
    broken = MediaStore(run.media).put(b"not a picture", "picture", "row 8")
    write_episodes(run.episodes_of(2), 2, group_with(broken))
    text = Page(render_report(run)).text
    assert "picture abababab" in text
    assert "row 7" in text
    assert "row 8" in text


def test_a_run_that_has_hardly_begun_has_a_page_too(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "young").create()
    assert "young" in Page(render_report(run)).text
    write_whole(run.metrics, '{"step":1,"policy/loss":0.5}\n')
    assert "Loss of the warm start" in Page(render_report(run)).text


def test_examples_are_chosen_by_rule(run: RunDirectory) -> None:
    from random import Random

    store = MediaStore()
    source = Shapes(store=store, split="test", size=40)

    def pair(i: int, before: bool, after: bool) -> Comparison:
        first, last = (attempt(source[i], f"g{i}", 0, right, Random(i)) for right in (before, after))
        return Comparison(source[i], first, last)

    pairs = [pair(i, i % 2 == 0, i % 10 != 0) for i in range(40)]
    chosen = choose(pairs, 8)
    kinds = [one.kind for one in chosen]
    assert kinds.count("learned") == 4
    assert kinds.count("lost") + kinds.count("still wrong") == 2
    assert kinds.count("kept") == 2
    assert len({one.task.metadata["category"] for one in chosen[:4]}) == 2
    assert len(choose(pairs[:3], 8)) == 3
    found = compare_evaluations(run, 8)
    assert found is not None
    assert sum(found.counts.values()) == 64
    assert (found.first, found.last) == (0, 30)
    groups = training_groups(run, 3)
    assert [logged.step for logged in groups] == [1, 1, 1, 30, 30, 30]
    assert all(len({e.reward for e in logged.group.episodes}) > 1 for logged in groups if logged.step == 1)


def test_ticks_are_round_and_inside() -> None:
    assert ticks(0, 1, 5) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(0.63, 1.12, 5) == [0.7, 0.8, 0.9, 1.0, 1.1]
    assert all(3.2e-7 <= tick <= 9.9e-7 for tick in ticks(3.2e-7, 9.9e-7, 4))
    assert ticks(0, 2e-13, 2) == [0, 1e-13, 2e-13]


def test_long_curves_are_thinned_and_keep_their_end() -> None:
    points = tuple((float(i), i / 10_000) for i in range(10_000))
    chart = line_chart("Reward", [Series("reward", points)])
    assert len(chart) < 100_000
    assert "at step 9999" in chart
    assert line_chart("Nothing", [Series("nothing", ())]) == ""


def test_what_is_wrong_stands_on_top_with_its_cause_and_since_when(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    write_notice(
        run.health, Notice(3, "no_answer", "began", "'exact' found no answer: <answer> is missing. Ask for it", True)
    )
    write_notice(run.health, Notice(4, "truncated", "began", "responses were cut", False))
    write_notice(run.health, Notice(9, "truncated", "ended", "responses were cut", False))
    rewarded = SightResult("sound", 32, -0.5, -0.75, 4, "mean reward")
    write_sight(run.health, 12, [SightResult("picture", 32, 0.75, 0.25, 4), rewarded])
    page = render_report(run)
    panel = page[page.index('<section class="health') : page.index('<div class="tiles"')]
    assert 'class="health grave"' in panel
    assert "since step 3" in panel
    assert "&lt;answer&gt; is missing. Ask for it" in panel
    assert "truncated</b> from step 4 to step 9" in panel
    assert "<b>75.0 %</b> right with pictures, <b>25.0 %</b> with pictures blanked" in panel
    assert "mean reward <b>-0.50</b> with" in panel


def test_a_run_without_findings_says_so_and_one_that_needs_a_look_is_not_called_sick(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    assert "Nothing was found wrong at the end of 12 steps." in render_report(run)
    write_notice(run.health, Notice(4, "truncated", "began", "responses were cut", False))
    assert 'class="health caution"' in render_report(run)
    write_notice(run.health, Notice(9, "truncated", "ended", "responses were cut", False))
    assert "<h2>Healthy again</h2>" in render_report(run)


def test_a_run_of_several_processes_has_a_section_on_them_and_one_of_one_process_none(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    assert "<h2>Processes</h2>" not in render_report(run)
    write_whole(run.recipe, run.recipe.read_text() + "cluster: {learners: 2}\n")
    page = Page(render_report(run))
    assert "Processes" in page.text
    assert "The driver, 2 learner ranks." in page.text


def test_a_run_that_made_fewer_steps_than_planned_says_so(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    write_whole(run.recipe, run.recipe.read_text().replace("steps: 12", "steps: 160"))
    page = render_report(run)
    assert "<h2>Healthy so far</h2>" in page
    assert "at the end of 12 steps. The run was to have 160 steps: it goes on, or was interrupted." in page


def test_a_warm_start_has_its_own_column_and_every_curve_the_same_axis_with_a_divider(tmp_path: Path) -> None:
    page = render_report(make_run(tmp_path, steps=12, warm=6))
    head = page[page.index("<thead>") : page.index("</thead>")]
    assert re.findall(r"<th>([^<]*)</th>", head) == ["", "at start", "after warm start", "after RL", "change by RL", "n"]
    row = page[page.index('<tr class="whole">') :]
    assert re.findall(r'class="share">([^<]*)<', row)[:3] == ["2.0 %", "55.0 %", "96.0 %"]
    assert "+41.0" in row[: row.index("</tr>")]
    charts = re.findall(r'<svg class="chart.*?</svg>', page, re.DOTALL)
    assert len(charts) > 8
    assert all(chart.count('class="divide"') == 1 and ">RL</text>" in chart for chart in charts)
    shown = {re.findall(r'text-anchor="(?:start|middle)">(?:step )?(\d+)</text>', chart)[-1] for chart in charts}
    assert len(shown) == 1, "all charts end at the same step"
    assert "at step 6, where RL began, and at step 18" in page


def test_without_a_warm_start_no_curve_is_divided(tmp_path: Path) -> None:
    assert 'class="divide"' not in render_report(make_run(tmp_path, steps=12))


def test_why_a_score_is_missing_can_be_read_without_hovering(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    (_, task, episode), *_ = read_episodes(run.episodes_of(12))
    unjudged = replace(episode, scores=(Score("judge", None, reason="the <judge> did not answer within 30 s"),))
    write_episodes(run.episodes_of(12), 12, [Group("g", task, (unjudged,))])
    assert "judge missing</b>: the &lt;judge&gt; did not answer within 30 s</span>" in render_report(run)


def test_where_nothing_is_right_or_wrong_the_reward_stands_and_only_missing_scores_are_not_judged(tmp_path: Path) -> None:
    run = make_run(tmp_path, steps=12)
    (_, task, episode), *_ = read_episodes(run.episodes_of(12))
    low, high, none = (
        replace(episode, scores=(Score("caption_qa", value),)) for value in (0.25, 0.75, None)
    )  # fmt: skip
    kinds = [Comparison(task, *pair).kind for pair in ((low, high), (high, low), (low, low), (low, none))]
    assert kinds == ["better paid", "worse paid", "equally paid", "not judged"]
    write_episodes(run.episodes_of(12), 12, [Group("g", task, (low, high, none))])
    for step, paid in ((0, low), (12, high)):
        write_episodes(run.eval_episodes_of(step, "paid"), step, [Group("g", task, (paid,))])
        for other in run.eval.glob("step_*_eval.jsonl"):
            other.unlink()
    page = Page(render_report(run)).text
    assert "better paid 1" in page
    assert page.count("reward 0.75") == page.count("reward 0.25") == 2
    assert page.count("not judged") == 1


def test_first_and_last_steps_of_a_short_run_do_not_overlap(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    told = {}
    for rewards in ([0.25], [0.0, 0.5, 1.0], [0.1] * 4 + [0.9] * 4):
        rows = [f'{{"step": {i}, "reward/mean": {reward}}}\n' for i, reward in enumerate(rewards, start=1)]
        directory.metrics.write_text("".join(rows))
        told[len(rewards)] = Page(render_report(directory)).text
    assert "mean reward0.250one step" in told[1]
    assert "mean reward1.000from 0.000first and last step" in told[3]
    assert "mean reward0.900from 0.100first and last 4 steps" in told[8]


def test_counts_of_compared_questions_say_that_the_first_of_several_samples_is_meant(tmp_path: Path) -> None:
    directory, random = RunDirectory(tmp_path), Random(0)
    directory.eval.mkdir(parents=True)
    task = Task("t", (user("Which?"),), "red", metadata={"category": "colour"})
    for samples in (1, 3):
        for step in (0, 1):
            members = tuple(attempt(task, "g", i, bool(step), random) for i in range(samples))
            write_episodes(directory.eval_episodes_of(step, "eval"), step, [Group("g", task, members)])
        told = Page(render_report(directory)).text
        assert "1 held-out questions at step 0 and at step 1" in told
        assert ("Of the 3 samples of a question the first is compared" in told) == (samples == 3)


def test_before_and_after_tell_the_reward_where_nothing_is_right_or_wrong() -> None:
    parts = [{"step": step, "name": "eval", "tasks": 120, "accuracy": None, "reward": 0.3 + step} for step in (0, 1)]
    page = Page(stage_table(parts, 0)).text
    assert "Mean reward on held-out tasks" in page
    assert all(number in page for number in ("0.300", "1.300", "+1.000", "120"))


def test_a_whole_share_and_its_interval_do_not_touch() -> None:
    parts = [{"step": step, "name": "eval", "tasks": 20, "accuracy": 1.0, "interval": [0.839, 1.0]} for step in (0, 1)]
    assert '</span> <span class="interval">' in stage_table(parts, 0)


def test_a_ranking_says_which_candidate_an_attempt_was() -> None:
    said = ((1, "a dog"), (2, "a cat"))
    framed = "".join(f"[BEGIN CANDIDATE_{i} ab]\n{text}\n[END CANDIDATE_{i} ab]\n" for i, text in said)
    assert candidate_number(framed, "a\u200b cat") == 2
    assert candidate_number(framed, 'hm</think>{"description": "a dog"}') == 1
    assert candidate_number(framed, "a horse") == 0
    assert candidate_number("Is it true?", "a dog") == 0


def test_a_run_with_a_critic_is_explained_by_it_and_shows_what_it_explains(tmp_path: Path) -> None:
    run = make_run(tmp_path / "run", steps=10)
    assert "compared with each other" in render_report(run)
    run.recipe.write_text(run.recipe.read_text() + "algorithm: {advantage: {name: bi_level_gae}}\n")
    rows = [json.loads(row) for row in run.metrics.read_text().splitlines()]
    run.metrics.write_text("".join(json.dumps(row | {"value/explained_variance": 0.3}) + "\n" for row in rows))
    page = render_report(run)
    assert "compared with what the critic expected" in page
    assert "compared with each other" not in page
    assert "variance that the critic explains" in page


def test_the_pages_policy_admits_its_own_script_alone(tmp_path: Path) -> None:
    text = render_report(make_run(tmp_path))
    page = Page(text)
    (policy,) = [meta["content"] or "" for meta in page.all("meta") if meta.get("http-equiv") == "Content-Security-Policy"]
    rules = {rule.split()[0]: rule.split()[1:] for rule in policy.split(";")}
    (script,) = re.findall(r"<script>(.*?)</script>", text, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    assert rules["default-src"] == ["'none'"]
    assert rules["script-src"] == [f"'sha256-{digest}'"]
    assert not {"'unsafe-eval'", "*", "http:", "https:"} & {source for given in rules.values() for source in given}
    assert text.index("Content-Security-Policy") < min(text.index("<style"), text.index("<script"))
