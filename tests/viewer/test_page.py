"""The page of ``sensorium view`` in a browser: headless Chromium, driven by playwright, over the files that the wheel has.

``SCREENSHOTS=folder pytest tests/viewer/test_page.py`` keeps pictures of what was tested there.
"""

import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

import sensorium as sn
from sensorium.api.train import outside_loop
from sensorium.cluster.event_loop import run_async
from sensorium.data.media_store import MediaStore
from sensorium.data.pictures import encode_png
from sensorium.data.shapes import Shapes
from sensorium.data.sound import encode_wav
from sensorium.engines.protocol import Sampling
from sensorium.rollout.play import Attempt
from sensorium.runs.episodes import TRANSCRIPTS, EpisodeCredit, TranscriptLine, Transcripts, write_episodes
from sensorium.runs.metrics import Notice, write_notice
from sensorium.runs.run_directory import RunDirectory
from sensorium.viewer import View
from sensorium.vocabulary import Episode, Group, Score, Segment, Status, Task, Thread, Turn, user
from tests.data.clips import CLIP, middle
from tests.recipes import quick
from tests.report.synthetic_run import make_rescoring, make_run, make_walks

pytest.importorskip("playwright", reason="the page is tested in a browser: pip install playwright")
CHROMIUM = shutil.which("chromium")
if CHROMIUM is None:
    pytest.skip("there is no Chromium: apt install chromium", allow_module_level=True)

from playwright.sync_api import Browser, Locator, Page, Route, expect, sync_playwright  # noqa: E402

LONGEST_MS = 300_000  # for what never comes; on a busy machine what does come may take long
expect.set_options(timeout=LONGEST_MS)
MARKUP = '<img src=x onerror="document.title=1">'
NUMBERS = ((1.0, -2.0), (1.0, 3.0), (0.002, -0.05))  # advantage, entropy and mismatch of first and later tokens
READY = "(one) => one.readyState || new Promise((done) => one.addEventListener('loadedmetadata', () => done(1)))"
TEXT = f"{MARKUP} at 1.0 s: click(32, 24) é"


def make_marked(folder: Path) -> RunDirectory:
    """A run of one group of two: a clip with sound and a picture; a response of markup that names a time and a place."""
    run = RunDirectory(folder).create()
    run.recipe.write_text("name: marked\nsteps: 1\nmodel: {path: 'tiny:qwen3_vl'}\n")
    store = MediaStore(run.media)
    video = store.put(CLIP, "video", "a clip", middle(frames=4, use_audio_in_video=True))
    shown = store.put(encode_png(Image.new("RGB", (64, 48), "navy")), "picture", "a sheet")
    ends = tuple(range(1, len(TEXT.encode()) + 1))
    response = Segment(
        "model", (*range(len(ends)),), text=TEXT, logprobs=(-0.5,) * len(ends), byte_ends=ends, name="a"
    )  # fmt: skip
    prompt = Segment("environment", (1, 2), text="Look.")
    turn = Turn(0, (user(f"Look {MARKUP}", video, shown),), response, 0, 1, info={"target_box": [8, 8, 40, 40]})
    scores = (Score("judge", 1.0, reason=MARKUP), Score("exact", None, reason="it was busy"))
    first = Episode("e 1", "t", "g", 0, (Thread((prompt, response), (False, True)),), (turn,), Status.FINISHED, "", scores)
    second = replace(first, id="e 2", index=1, scores=(Score("exact", 0.0, correct=False),))
    write_notice(run.health, Notice(1, "no_answer", "began", f"no answer in {'square' * 20}", True))
    answers = Transcripts(run.path / TRANSCRIPTS)
    answers.replace(["e 1"], "judge", [TranscriptLine("a model", "fidelity", f"Is it so? {MARKUP}", "Ochre, 7 of 10.")])
    answers.close()
    halves = (8, len(ends) - 8)
    given = [tuple(value for value, n in zip(pair, halves, strict=True) for _ in range(n)) for pair in NUMBERS]
    credits = {"e 1": EpisodeCredit("trained", *((turn,) for turn in given)), "e 2": EpisodeCredit("dropped: a test")}
    write_episodes(run.episodes_of(1), 1, [Group("g", Task("t", turn.observation), (first, second))], credits=credits)
    return run


def make_clips(folder: Path) -> RunDirectory:
    """A run of three questions about a silent video of 3 s and a sound of 4 s: two at step 1, one at step 2."""
    run = RunDirectory(folder).create()
    run.recipe.write_text("name: clips\nsteps: 2\nmodel: {path: 'tiny:qwen3_omni'}\n")
    store = MediaStore(run.media)
    video = store.put(CLIP, "video", "a clip", middle(frames=4))
    heard = store.put(encode_wav(np.sin(np.arange(64_000, dtype=np.float32) / 9), 16_000), "sound", "a tone")
    asked, prompt = user(video, heard, "What is it?"), Segment("environment", (1,), text="?")
    for step, tasks in ((1, "ab"), (2, "c")):
        groups = []
        for task in tasks:
            response = Segment("model", (2,), text="a tone", name=task)
            turn, thread = Turn(0, (asked,), response, 0, 1), Thread((prompt, response), (False, True))
            episode = Episode(task, task, task, 0, (thread,), (turn,), Status.FINISHED)
            groups.append(Group(task, Task(task, (asked,)), (episode,)))
        write_episodes(run.episodes_of(step), step, groups)
    return run


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("view") / "runs"
    make_rescoring(make_run(folder / "shapes", steps=12))
    make_walks(folder / "lake")
    make_marked(folder / "marked")
    return folder


@pytest.fixture(scope="module")
def address(folder: Path) -> Iterator[str]:
    with View([folder]) as view:
        yield view.address


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=["--no-sandbox"])
        yield browser
        browser.close()


class Visit:
    """A page that is open in a browser, and what it complained of."""

    def __init__(self, browser: Browser, address: str, shots: Path, **options: Any) -> None:
        self.context = browser.new_context(**{"viewport": {"width": 1360, "height": 900}, **options})
        self.page: Page = self.context.new_page()
        self.page.set_default_timeout(LONGEST_MS)
        self.complaints: list[str] = []
        self.asked: list[str] = []
        self.address, self.shots = address, shots
        self.page.on("console", lambda message: self.complaints.append(f"{message.type}: {message.text}"))
        self.page.on("pageerror", lambda error: self.complaints.append(str(error)))
        self.page.on("request", lambda request: self.asked.append(request.url))
        self.page.goto(address)

    def open(self, run: str, words: str = "") -> Page:
        """The episodes of a run that have these words, from the list of runs on."""
        self.page.locator(".brand").click()
        self.page.locator(".runs tbody th").get_by_text(run, exact=True).click()
        self.page.get_by_role("link", name=re.compile("Episodes")).click()
        self.page.locator(".found a").first.wait_for()
        if words:
            self.page.get_by_role("searchbox").fill(words)
            self.page.wait_for_url(re.compile("text="))
        return self.page

    def keep(self, name: str) -> None:
        self.page.screenshot(path=self.shots / f"{name}.png", full_page=True)

    def draw(self, over: Locator, start: tuple[float, float], end: tuple[float, float]) -> None:
        """Move the pressed pointer over an element, between places in shares of its size."""
        over.scroll_into_view_if_needed()
        box = over.bounding_box()
        assert box is not None
        for i, (x, y) in enumerate((start, end)):
            self.page.mouse.move(box["x"] + x * box["width"], box["y"] + y * box["height"])
            self.page.mouse.up() if i else self.page.mouse.down()

    def narrow(self) -> int:
        """By how many pixels the page is wider than its window."""
        return int(self.page.evaluate("document.documentElement.scrollWidth - document.documentElement.clientWidth"))


@pytest.fixture
def visit(browser: Browser, address: str, tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Visit]:
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    shots.mkdir(parents=True, exist_ok=True)
    options = getattr(request, "param", {})
    visit = Visit(browser, address, shots, **options)
    yield visit
    visit.context.close()
    assert visit.complaints == []
    assert {url for url in visit.asked if not url.startswith((address, "blob:", "data:"))} == set()


def test_runs_are_listed_with_their_curves_and_where_their_recipes_differ(visit: Visit) -> None:
    page = visit.page
    rows = page.locator(".runs tbody tr")
    expect(rows).to_have_count(3)
    expect(rows.filter(has_text="shapes").first).to_contain_text("finished")
    expect(page.locator(".plot").first).to_contain_text("reward/mean")
    shapes, lake = (page.get_by_role("checkbox", name=f"show the curves of {name}") for name in ("shapes", "lake"))
    expect(shapes).to_be_checked()
    lake.check()
    cells = page.locator(".recipes tr").filter(has=page.get_by_role("rowheader", name="steps", exact=True)).locator("td")
    expect(cells).to_have_text(["12", "40"])
    expect(cells.nth(1)).to_have_class("differs")
    visit.keep("runs")
    page.get_by_label("find a run").fill("lake")
    expect(rows).to_have_count(1)
    page.locator(".plot").first.hover()
    expect(page.locator(".tip").first).to_contain_text("step")


def test_a_click_is_not_lost_where_the_page_is_drawn_again_meanwhile(visit: Visit) -> None:
    page = visit.page
    page.locator(".runs tbody th").get_by_text("shapes", exact=True).hover()
    page.mouse.down()
    with page.expect_response("**/api/runs") as answer:
        page.evaluate("dispatchEvent(new HashChangeEvent('hashchange'))")
    answer.value.finished()
    page.evaluate("fetch('assets/viewer/icon.svg').then((answer) => answer.text())")  # by then the answer has been taken
    page.mouse.up()
    page.wait_for_url("**/#/run/*")
    page.get_by_role("link", name="Recipe").hover()
    page.mouse.down()
    page.mouse.move(0, 0)
    page.mouse.up()
    page.locator(".brand").click()
    expect(page.locator(".runs tbody th")).to_have_count(3)  # a press without a click holds nothing up


def test_what_is_pressed_on_a_page_that_is_being_left_is_not_lost(visit: Visit) -> None:
    """The page stays until the next one has come: here that of the same episode, after the list of runs and back."""
    page = visit.open("lake")
    page.locator(".found a").first.click()
    page.locator(".turn").first.wait_for()
    page.locator(".episode").evaluate("page => (page.dataset.left = '')")
    held: list[Route] = []
    page.route("**/api/runs", lambda route: None)
    page.route("**/api/episode?*", lambda route: held.append(route))
    page.locator(".brand").click()
    page.wait_for_url("**/#/")
    with page.expect_request("**/api/episode?*"):
        page.go_back()
    page.get_by_role("button", name="What if …").click()
    held[-1].continue_()
    expect(page.locator(".episode:not([data-left]) .what-if")).to_be_visible()
    with page.expect_request("**/api/episode?*"):
        page.keyboard.press("j")
    page.keyboard.press("w")
    held[-1].continue_()
    expect(page.locator(".neighbours")).to_contain_text("2 of")
    expect(page.locator(".what-if")).to_be_visible()


def test_a_search_that_is_typed_does_not_take_the_address_of_the_next_page(visit: Visit) -> None:
    page = visit.open("lake")
    page.evaluate("""() => {
        const search = document.querySelector("input[type=search]");
        search.value = "right";
        search.dispatchEvent(new Event("input", { bubbles: true }));
        document.querySelector(".found a").click();
    }""")
    page.locator(".turn").first.wait_for()
    page.wait_for_timeout(400)  # longer than a search waits for the next letter
    assert "/episode?" in page.url


def test_episodes_are_found_by_words_numbers_and_keys(visit: Visit) -> None:
    page = visit.open("shapes")
    expect(page.get_by_role("status").filter(has_text="episodes")).to_contain_text("1 to 50 of 256 episodes")
    visit.keep("episodes")
    page.keyboard.press("/")
    page.keyboard.type("green response:answer")
    expect(page).to_have_url(re.compile(r"text=green\+response%3Aanswer"))
    expect(page.locator(".count")).to_have_text(re.compile(r"1 to \d+ of (?!256)\d+ episodes"))
    page.locator("select[name=correct]").select_option("false")
    expect(page.locator(".found .right")).to_have_count(0)
    page.get_by_text("clear", exact=True).click()
    expect(page.locator(".count")).to_contain_text("256")
    page.locator("select[name=sort]").select_option("disagreement")
    page.locator("select[name=log]").select_option("train")
    expect(page.locator(".count")).to_contain_text("128")
    page.keyboard.press("/")
    page.keyboard.press("Escape")  # leaves the field, and no more
    for _ in range(3):
        page.keyboard.press("j")
    page.keyboard.press("k")
    chosen = page.evaluate("document.activeElement.dataset.id")
    assert page.locator(".found a").nth(1).get_attribute("data-id") == chosen
    page.keyboard.press("Enter")
    expect(page.locator(".neighbours")).to_contain_text("2 of 50")
    page.keyboard.press("j")
    expect(page.locator(".neighbours")).to_contain_text("3 of 50")
    page.keyboard.press("Escape")
    expect(page.locator("select[name=sort]")).to_have_value("disagreement")
    expect(page.locator(".found a").nth(2)).to_be_focused()
    page.keyboard.press("ArrowRight")
    expect(page.locator(".count")).to_contain_text("51 to 100 of 128")


def test_a_walk_is_a_film_that_plays_and_steps_and_is_saved(visit: Visit) -> None:
    page = visit.open("lake")
    page.locator("select[name=sort]").select_option("turns")
    page.wait_for_url(re.compile("sort=turns"))
    page.locator(".found li").first.locator("a").click()
    clock, turns = page.locator(".film .clock"), page.locator(".turn")
    turns.first.wait_for()
    count = turns.count()
    assert count > 2
    expect(clock).to_have_text(f"1 of {count}")
    visit.keep("film")
    page.keyboard.press("ArrowRight")
    expect(clock).to_have_text(f"2 of {count}")
    expect(page.locator(".action")).to_contain_text("turn 2")
    page.locator(".film select").select_option("8")
    page.keyboard.press(" ")
    expect(clock).to_have_text(f"{count} of {count}")
    for kind, head in (("GIF", b"GIF89a"), ("MP4", b"ftyp")):
        with page.expect_download() as download:
            page.get_by_text(f"save as {kind}").click()
        assert head in Path(download.value.path()).read_bytes()[:16]
    assert page.locator("aside .found").count()


def test_tokens_media_and_places_of_an_episode_are_shown_together(visit: Visit) -> None:
    page = visit.open("marked")
    page.locator(".found a").filter(has_text="judge").click()
    response = page.locator("pre.tokens")
    expect(response).to_have_text(TEXT.replace("é", "·é"))  # a dot for the token whose bytes are no character yet
    expect(response.locator(".token.up")).to_have_count(8)
    assert float(response.locator(".token.down").first.evaluate("one => one.style.getPropertyValue('--s')")) == 1
    page.keyboard.press("c")
    expect(response.locator(".token.rare")).to_have_count(len(TEXT.encode()))
    expect(page.locator(".tools")).to_contain_text("-0.5 to -0.5")
    response.locator(".token").first.hover()
    expect(page.get_by_role("tooltip")).to_contain_text("probability 0.607")
    expect(page.get_by_role("tooltip")).to_contain_text("entropy 1mismatch +0.002")
    for shares in (["0.500", "1.000"], ["0.020", "0.500"]):  # full at 2 nats; at a difference of 0.1
        page.keyboard.press("c")
        found = [response.locator(".token").nth(i).evaluate("one => one.style.getPropertyValue('--s')") for i in (0, 9)]
        assert found == shares
    expect(response.locator(".token.down")).to_have_count(len(TEXT.encode()) - 8)
    expect(page.locator(".place")).to_have_count(2)
    assert page.locator(".place circle").evaluate("one => [one.cx.baseVal.value, one.cy.baseVal.value]") == [32, 24]
    frames = page.locator(".frames button")
    expect(frames).to_have_count(4)
    cursor = page.locator(".wave .cursor")
    before = cursor.get_attribute("x1")
    frames.nth(2).click()
    expect(frames.nth(2)).to_have_class("at")
    assert cursor.get_attribute("x1") != before
    response.locator("[data-time]").first.click()
    expect(response.locator(".token.now").first).to_have_text("1")
    expect(page.locator(".hearing .clock")).to_have_text("1.00 s")
    page.locator("video").evaluate(READY)
    assert page.locator("video").evaluate("one => one.currentTime") == pytest.approx(1.0, abs=0.05)
    visit.keep("episode")
    page.keyboard.press("w")
    editor = page.locator(".editor").first
    editor.locator("canvas.still").wait_for()
    visit.draw(editor.locator(".drawing"), (0.25, 0), (0.75, 0.5))
    expect(editor.get_by_label("box %")).to_have_value(re.compile("2[456] 0 7[456] (49|50|51)"))
    editor.get_by_role("button", name="blur").click()
    visit.draw(editor.locator(".wave"), (0, 0.5), (0.5, 0.5))
    assert float(editor.get_by_label("to s").input_value()) == pytest.approx(1.5, abs=0.1)
    editor.get_by_role("button", name="mute").click()
    expect(page.locator(".what-if .chips .chip")).to_have_text([re.compile("blur 2. 0 7"), re.compile("mute 0 to 1")])
    visit.keep("what_if_clip")
    page.keyboard.press("w")
    expect(page.locator("aside .found a")).to_have_count(2)
    page.locator("aside .found a").nth(1).click()
    expect(page.locator(".facts").first).to_contain_text("attempt 2 of 2")
    page.locator("[data-mode=mismatch]").click()
    expect(page.locator(".legend")).to_contain_text("not recorded")
    expect(page.locator(".legend")).to_contain_text("dropped: a test")


def test_a_rescoring_shows_its_terms_and_leads_to_the_episodes_that_change(visit: Visit) -> None:
    page = visit.open("shapes")
    page.get_by_role("link", name="Scored again 1").click()
    expect(page.get_by_role("rowheader", name="reward/token_length")).to_be_visible()
    expect(page.locator(".notes")).to_contain_text("advantages change sign")
    expect(page.locator("pre").last).to_contain_text("sensorium rescore")
    rows = page.locator(".rescored tbody tr")
    whole = page.locator(".count").text_content()
    page.get_by_label("episodes").select_option("true")
    expect(page.locator(".count")).not_to_have_text(whole)
    visit.keep("rescored")
    expect(rows.filter(has=page.locator(".differs"))).to_have_count(rows.count())
    reward = rows.first.locator("td").nth(1).text_content()
    rows.first.get_by_role("link").click()
    expect(page.locator("aside .rescored .sum td")).to_have_text(reward)
    expect(page.locator(".neighbours")).to_contain_text("1 of")
    visit.keep("rescored_episode")
    page.keyboard.press("Escape")
    expect(page.get_by_label("episodes")).to_have_value("true")


def test_markup_of_an_episode_stays_text(visit: Visit) -> None:
    page = visit.open("marked", "onerror")
    expect(page.locator(".found .response").first).to_contain_text(MARKUP)
    page.locator(".found a").filter(has_text="judge").click()
    expect(page.locator(".message.user .text")).to_contain_text(MARKUP)
    expect(page.locator(".reason").first).to_have_text(MARKUP)
    assert page.locator("img[src=x]").count() == 0
    assert page.title() != "1"


@pytest.mark.parametrize("visit", [{"viewport": {"width": 390, "height": 800}, "has_touch": True}], indirect=True)
def test_on_a_phone_nothing_is_wider_than_the_page(visit: Visit) -> None:
    page = visit.page
    page.get_by_role("checkbox", name="show the curves of lake").check()
    page.locator(".recipes").wait_for()
    visit.keep("phone_runs")
    assert visit.narrow() == 0
    widths = page.locator(".recipes td").evaluate_all("cells => cells.map((cell) => cell.clientWidth)")
    assert min(widths) > 100
    visit.open("lake")
    visit.keep("phone_episodes")
    assert visit.narrow() == 0
    page.locator(".found a").first.click()
    page.locator(".episode").wait_for()
    visit.keep("phone_film")
    assert visit.narrow() == 0
    visit.open("marked")
    page.locator(".found a").first.click()
    expect(page.locator(".frames button")).to_have_count(4)
    visit.keep("phone_episode")
    assert visit.narrow() == 0


@pytest.mark.parametrize("visit", [{"viewport": {"width": 360, "height": 740}, "has_touch": True}], indirect=True)
def test_a_long_word_of_a_finding_is_broken_on_a_phone(visit: Visit) -> None:
    page = visit.page
    page.locator(".runs tbody th").get_by_text("marked", exact=True).click()
    expect(page.locator(".health")).to_contain_text("no answer in")
    assert visit.narrow() == 0
    page.goto(f"{visit.address}#/")
    page.locator(".runs tbody th").get_by_text("shapes", exact=True).click()
    expect(page.locator(".tabs")).to_contain_text("Scored again 1")
    assert visit.narrow() == 0


@pytest.mark.parametrize("visit", [{"color_scheme": "dark"}], indirect=True)
def test_a_dark_system_has_a_dark_page(visit: Visit) -> None:
    visit.page.locator(".plot").first.wait_for()
    colours = visit.page.evaluate(
        "(({color, backgroundColor}) => [color, backgroundColor])(getComputedStyle(document.body))"
    )
    ink, paper = (sum(map(int, re.findall(r"\d+", colour)[:3])) for colour in colours)
    assert paper < 150 < 600 < ink
    visit.keep("dark_runs")
    visit.open("marked")
    visit.page.locator(".found a").first.click()
    expect(visit.page.locator(".frames button")).to_have_count(4)
    visit.keep("dark_episode")


@pytest.mark.usefixtures("forked_python")
def test_a_run_is_followed_while_it_trains(browser: Browser, tmp_path: Path) -> None:
    runs = tmp_path / "runs"
    runs.mkdir()
    changes = ["steps=6", "name=followed", "batch.prompts_per_step=2", "batch.group_size=2", "evaluation.at_start=false"]
    command = [sys.executable, "-m", "sensorium", "train", "shapes", *changes, "evaluation.every=0", "checkpoint.every=0"]
    with View([runs]) as view:
        visit = Visit(browser, view.address, tmp_path)
        expect(visit.page.locator(".runs")).to_contain_text("No runs yet")
        log = tmp_path / "log.txt"
        with log.open("w") as file:
            run = subprocess.Popen(command, cwd=tmp_path, stdout=file, stderr=file)
        try:
            while not (runs / "followed/metrics.jsonl").exists() and run.poll() is None:
                time.sleep(0.01)
            run.send_signal(signal.SIGSTOP)  # or it might be over before the page shows it
            link = visit.page.get_by_role("link", name="followed")
            link.wait_for()
            link.click()
            expect(visit.page.locator("#live")).to_have_text("live")
            run.send_signal(signal.SIGCONT)
            expect(visit.page.locator(".facts")).to_contain_text("6 / 6")
            expect(visit.page.locator(".facts")).to_contain_text("finished")
            expect(visit.page.locator(".tabs")).to_contain_text("Episodes 24")
            expect(visit.page.locator(".plot").first).to_contain_text("reward/mean")
            run.wait(60)
        finally:
            run.kill()
            run.wait()
        assert run.returncode in (0, 3), log.read_text()
        assert visit.complaints == []
        visit.context.close()


EVENTS = "window.EventSource = class { constructor() { window.events = this; } close() {} }"


def test_an_ended_run_is_not_spared_and_its_age_is_counted_on(browser: Browser, address: str, tmp_path: Path) -> None:
    """The page's clock stands still but where it is moved, so an answer takes exactly as long as the test says."""
    visit = Visit(browser, address, tmp_path)
    page = visit.page
    link = page.locator(".runs tbody th a").get_by_text("shapes", exact=True).get_attribute("href")
    page.add_init_script(EVENTS)
    page.clock.install()
    page.goto(f"{address}{link}")
    page.reload()
    page.locator(".plot").first.wait_for()
    page.clock.pause_at(time.time() + 3600)
    page.clock.run_for(1000)
    age = page.locator(".facts time")
    expect(age).to_have_text("1 hour ago")
    page.clock.fast_forward(3_600_000)
    expect(age).to_have_text("2 hours ago")

    held: list[Route] = []
    page.route("**/api/run?*", lambda route: held.append(route))

    def changed(alive: bool) -> None:
        page.evaluate(f"events.onmessage({{data: '{json.dumps({'alive': alive})}'}})")

    def answer(took_ms: int) -> None:
        page.clock.run_for(took_ms)
        page.locator(".charts").evaluate("charts => (charts.firstChild.id = 'before')")
        held[-1].continue_()
        page.locator("#before").wait_for(state="detached")

    with page.expect_request("**/api/run?*"):
        changed(True)
    answer(1000)
    page.clock.run_for(15_000)
    changed(True)
    page.clock.run_for(1000)
    assert len(held) == 1, "a run that goes on is spared for 20 s after an answer of 1 s"
    with page.expect_request("**/api/run?*"):
        changed(False)
    answer(1000)
    changed(False)
    with page.expect_request("**/api/run?*"):
        page.clock.run_for(2001)
    visit.context.close()


def test_a_page_of_another_origin_gets_nothing(browser: Browser, address: str) -> None:
    context = browser.new_context()
    context.route("http://evil.example/", lambda route: route.fulfill(body="<title>evil</title>", content_type="text/html"))
    page = context.new_page()
    page.goto("http://evil.example/")
    attempts = """async (address) => {
      const loaded = (name, source) => new Promise((done) => {
        const one = document.createElement(name);
        one.onload = () => done(true);
        one.onerror = () => done(false);
        one.src = source;
        document.body.append(one);
      });
      const fetched = (mode) => fetch(address + "api/runs", { mode }).then((answer) => answer.text(), () => "");
      return [await fetched("cors"), await fetched("no-cors"), await loaded("script", address + "assets/report/report.js"),
        await loaded("img", address + "assets/viewer/icon.svg")];
    }"""
    assert page.evaluate(attempts, address) == ["", "", False, False]
    page.evaluate(
        "address => document.body.append(Object.assign(document.createElement('iframe'), {src: address}))", address
    )
    page.wait_for_timeout(300)
    assert all("Sensorium" not in frame.content() for frame in page.frames[1:])
    context.close()


def test_pictures_shown_are_those_of_the_run(visit: Visit) -> None:
    page = visit.open("marked")
    page.locator(".found a").first.click()
    shot = page.locator(".message.user .frame img")
    shot.wait_for()
    source = str(shot.evaluate("one => one.src"))
    assert Image.open(BytesIO(page.request.get(source).body())).size == (64, 48)
    shot.click()
    expect(page.locator("dialog.large img")).to_be_visible()
    page.keyboard.press("Escape")
    expect(page.locator("dialog")).to_be_hidden()


def test_what_judges_answered_is_searched_and_shown(visit: Visit) -> None:
    page = visit.open("marked", "judge:ochre")
    expect(page.locator(".count")).to_contain_text("1 to 1 of 1 episode")
    page.locator(".found a").click()
    judges = page.locator(".judges")
    expect(judges).to_contain_text("a model")
    expect(judges).to_contain_text("Ochre, 7 of 10.")
    judges.get_by_text("the question").click()
    expect(judges.locator("details pre")).to_have_text(f"Is it so? {MARKUP}")


def make_asked(folder: Path) -> RunDirectory:
    """A run of two answers of the shipped model, which has no checkpoint but what it began with."""
    run = RunDirectory(folder).create()
    run.recipe.write_text(json.dumps(quick("asked", steps=1)))
    model = sn.load("package:shapes", device="cpu")
    tasks = [Shapes(store=model.policy.chat.store, kinds=("colour",), picture_size=64)[i] for i in range(2)]
    stream = model._rollout.stream(tasks, 1, Attempt(0, 1), Sampling(max_new_tokens=6))
    groups = outside_loop(lambda: run_async(stream.in_order()))  # playwright has one here
    store = MediaStore(run.media)
    for task in tasks:
        store.take(task.messages[0].media[0], model.policy.chat.store)
    write_episodes(run.episodes_of(1), 1, groups)
    model.close()
    return run


def test_what_edits_a_sound_lies_inside_the_panel(browser: Browser, tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "runs/heard").create()
    run.recipe.write_text("name: heard\nsteps: 1\nmodel: {path: 'tiny:qwen2_audio'}\n")
    wave = encode_wav(np.sin(np.arange(32_000, dtype=np.float32) / 9), 16_000)
    heard = user(MediaStore(run.media).put(wave, "sound", "a tone"), "What is it?")
    prompt, response = Segment("environment", (1,), text="?"), Segment("model", (2,), text="a tone", name="a")
    turn = Turn(0, (heard,), response, 0, 1)
    episode = Episode("e", "t", "g", 0, (Thread((prompt, response), (False, True)),), (turn,), Status.FINISHED)
    write_episodes(run.episodes_of(1), 1, [Group("g", Task("t", (heard,)), (episode,))])
    with View([tmp_path / "runs"], device="cpu") as view:
        visit = Visit(browser, view.address, Path(os.environ.get("SCREENSHOTS", tmp_path)))
        page = visit.open("heard")
        page.locator(".found a").first.click()
        page.get_by_role("button", name="What if …").click()
        page.locator(".editor .wave").wait_for()
        visit.keep("what_if_sound")
        panel, editor, mute = (
            page.locator(place).first.bounding_box() for place in (".what-if", ".tools-of", ".tools-of button")
        )
        assert panel is not None
        assert editor is not None
        assert mute is not None
        assert mute["x"] + mute["width"] <= editor["x"] + editor["width"] <= panel["x"] + panel["width"]
        assert visit.complaints == []
        visit.context.close()


@pytest.fixture
def clips(browser: Browser, tmp_path: Path) -> Iterator[Visit]:
    """The page of an episode of a silent video and a sound, opened from a list of three."""
    make_clips(tmp_path / "runs/clips")
    with View([tmp_path / "runs"], device="cpu") as view:
        visit = Visit(browser, view.address, Path(os.environ.get("SCREENSHOTS", tmp_path)))
        visit.open("clips").locator(".found a").last.click()
        visit.page.locator(".turn").first.wait_for()
        yield visit
        visit.context.close()
        assert visit.complaints == []


def test_an_episode_keeps_its_neighbours_and_what_it_is_swapped_with(browser: Browser, clips: Visit) -> None:
    page = clips.page
    expect(page.locator(".neighbours")).to_contain_text("3 of 3")
    page.reload()
    expect(page.locator(".neighbours")).to_contain_text("3 of 3")
    page.keyboard.press("k")
    expect(page.locator(".neighbours")).to_contain_text("2 of 3")
    shared = Visit(browser, page.url, clips.shots)  # in a browser that has seen no list
    shared.page.get_by_role("button", name="What if …").click()
    for medium in (0, 1):
        editor = shared.page.locator(f".editor[data-medium='{medium}']")
        editor.get_by_text("swap with").click()
        expect(editor.locator(".swaps button")).to_have_count(1)
    editor.locator(".swaps button").click()
    expect(shared.page.locator(".what-if .chips .chip")).to_have_text(re.compile("sound 2: swap with a"))
    expect(shared.page.locator(".neighbours")).to_have_text("")
    assert shared.complaints == []
    shared.context.close()


def test_one_cursor_moves_the_files_of_a_video_and_of_a_sound_beside_it(clips: Visit) -> None:
    page = clips.page
    expect(page.locator(".frames button")).to_have_count(4)
    wave, clock = page.locator(".wave"), page.locator(".hearing .clock")
    wave.wait_for()
    files = "[...document.querySelectorAll('video, audio')]"
    page.evaluate(f"Promise.all({files}.map({READY}))")

    def places() -> list[float]:
        """Where the files are once both have moved."""
        found: list[float] = page.evaluate(f"sought.then(() => {files}.map((one) => one.currentTime))")
        return found

    seek = "(one) => new Promise((done) => one.addEventListener('seeked', done, { once: true }))"
    for share, times in ((0.5, [2.0, 2.0]), (0.9, [3.0, 3.6])):  # the video ends at 3 s
        page.evaluate(f"void (window.sought = Promise.all({files}.map({seek})))")
        clips.draw(wave, (share, 0.5), (share, 0.5))
        assert places() == pytest.approx(times, abs=0.1)
        assert float(str(clock.text_content()).removesuffix(" s")) == pytest.approx(times[1], abs=0.1)
    page.evaluate(f"void (window.sought = Promise.all({files}.map({seek})))")
    page.locator(".frames button").nth(1).click()
    video, sound = places()
    assert 0 < video < 1.5
    assert sound == pytest.approx(video, abs=0.01)
    page.evaluate("Object.defineProperty(document.querySelector('audio'), 'currentTime', { value: 2.5 })")
    page.evaluate("void document.querySelector('audio').dispatchEvent(new Event('timeupdate'))")  # as while it plays
    expect(clock).to_have_text("2.50 s")
    assert places() == [video, 2.5]


def test_no_seconds_are_muted_of_a_video_that_was_not_heard(clips: Visit) -> None:
    page = clips.page
    page.keyboard.press("w")
    video, sound = (page.locator(f".editor[data-medium='{n}']") for n in range(2))
    video.locator("canvas.still").wait_for()
    sound.locator(".wave").wait_for()
    for editor, shown in ((video, 0), (sound, 1)):
        for one in (editor.get_by_role("button", name="mute"), editor.get_by_label("from s"), editor.get_by_label("to s")):
            expect(one.and_(page.locator(":visible"))).to_have_count(shown)


def test_a_field_that_cannot_be_asked_is_marked_before_it_is(clips: Visit) -> None:
    page, panel = clips.page, clips.page.locator(".what-if")
    page.keyboard.press("w")
    panel.locator("canvas.still").wait_for()
    chips, ask = panel.locator(".chips .chip"), panel.get_by_role("button", name="Ask", exact=True)
    mute = panel.get_by_role("button", name="mute")
    panel.get_by_label("new answer").select_option("sampled")
    cases = [("frame", ("", "1.5", "9"), "2", panel.get_by_role("button", name="drop frame"))]
    cases += [("to s", ("", "0"), "1.37", mute)]
    cases += [
        ("tokens at most", ("", "5000"), "3", ask),
        ("seed", ("1.5", "-1"), "2", ask),
        ("temperature", ("",), "0.57", ask),
    ]
    for name, wrong, right, press in cases:
        field = panel.get_by_role("spinbutton", name=name)
        before = chips.count()
        for value in wrong:
            field.fill(value)
            press.click()
            expect(field).to_have_attribute("aria-invalid", "true")
            expect(panel.get_by_role("alert").filter(has_text=re.compile("."))).to_have_count(1)
            expect(chips).to_have_count(before)
        field.fill(right)
        expect(field).to_have_attribute("aria-invalid", "false")
        if press is not ask:
            press.click()
            expect(chips).to_have_count(before + 1)
    assert not [url for url in clips.asked if "api/what_if/" in url]
    page.route("**/api/what_if/answer", lambda route: route.fulfill(body='{"problem": "asked"}\n'))
    with page.expect_request("**/api/what_if/answer") as asked:
        ask.click()
    assert asked.value.post_data_json["new"] == {"max_new_tokens": 3, "seed": 2, "temperature": 0.57}


def test_what_if_that_could_not_be_loaded_is_closed_and_tried_again(clips: Visit) -> None:
    page, panel = clips.page, clips.page.locator(".what-if")
    page.route("**/api/what_if?*", lambda route: route.fulfill(json={"problem": "not now"}, status=500))
    page.keyboard.press("w")
    expect(panel.get_by_role("alert")).to_have_text("not now")
    page.keyboard.press("w")
    expect(panel).to_have_count(0)
    page.unroute("**/api/what_if?*")
    page.keyboard.press("w")
    expect(panel.get_by_role("button", name="Ask", exact=True)).to_be_visible()
    expect(panel).to_have_count(1)
    assert len(clips.complaints) == 1, "the browser's own, of the refusal"
    clips.complaints.clear()


def test_a_model_is_asked_what_if_on_a_desk_and_on_a_phone(browser: Browser, tmp_path: Path) -> None:
    make_asked(tmp_path / "runs/asked")
    shots = Path(os.environ.get("SCREENSHOTS", tmp_path))
    with View([tmp_path / "runs"], device="cpu") as view:
        visit = Visit(browser, view.address, shots, has_touch=True)
        page = visit.open("asked")
        page.locator(".found a").first.click()
        page.locator(".turn").first.wait_for()
        page.keyboard.press("w")
        visit.draw(page.locator(".drawing"), (0.01, 0.01), (0.5, 1))
        expect(page.get_by_label("box %")).to_have_value(re.compile(r"[0-2] [0-2] (49|50|51) 100"))
        page.get_by_role("button", name="blur", exact=True).click()
        page.get_by_label("box %").fill("0 0 100 100")
        page.get_by_role("button", name="blank", exact=True).click()
        expect(page.locator(".what-if .chips .chip")).to_have_count(2)
        page.get_by_label("without blur").click()
        page.get_by_role("button", name="Ask", exact=True).click()
        expect(page.locator(".answered pre.tokens").first.locator(".token.down").first).to_be_visible()
        expect(page.locator(".answered pre.new .token").first).to_be_visible()
        expect(page.locator(".answered tbody tr")).to_have_count(2)
        page.locator(".answered .token.down").first.hover()
        expect(page.get_by_role("tooltip")).to_contain_text("moves by -")
        visit.keep("what_if")
        page.get_by_role("button", name="map", exact=True).click()
        expect(page.locator(".heat .cell")).to_have_count(16)
        page.set_viewport_size({"width": 390, "height": 800})
        visit.keep("phone_what_if")
        assert visit.narrow() == 0
        page.locator(".brand").click()
        page.locator(".runs tbody th").first.wait_for()  # else the button is one of the page that is being left
        page.go_back()
        page.get_by_role("button", name="What if …").click()
        page.locator(".drawing").wait_for()
        assert visit.complaints == []
        visit.context.close()
