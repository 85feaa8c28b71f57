"""The docs as a site (`make site`): all links and anchors work, nothing comes from other hosts, search finds names."""

import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from html.parser import HTMLParser
from pathlib import Path
from urllib.parse import unquote, urlsplit

import pytest

pytest.importorskip("material", reason="the docs' site is built by mkdocs-material: pip install -e '.[docs]'")
ROOT = Path(__file__).parents[1]


def build(config: Path, site: Path) -> subprocess.CompletedProcess[str]:
    # Without --quiet, with which mkdocs does not count warnings.
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--config-file", str(config)]
    return subprocess.run([*command, "--site-dir", str(site)], cwd=ROOT, capture_output=True, text=True)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("docs") / "site"
    built = build(ROOT / "mkdocs.yml", folder)
    assert built.returncode == 0, built.stderr
    return folder


class Links(HTMLParser):
    """The links of a page, what it loads, its anchors, and the text outside code."""

    def __init__(self, page: Path) -> None:
        super().__init__()
        self.links: list[str] = []
        self.loaded: list[str] = []
        self.anchors: set[str] = set()
        self.prose: list[str] = []
        self.code: list[str] = []
        self._within: list[str] = []
        self.feed(page.read_text())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        of = {name: value or "" for name, value in attrs}
        self._within += [tag] if tag in ("code", "script", "style", "title") else []
        self.anchors |= {of[name] for name in ("id", "name") if name in of}
        if tag == "a" and "href" in of:
            self.links.append(of["href"])
        elif tag == "link" and of.get("rel") in ("stylesheet", "icon", "preload", "preconnect", "prefetch"):
            self.loaded.append(of["href"])
        elif "src" in of:
            self.loaded.append(of["src"])

    def handle_endtag(self, tag: str) -> None:
        if self._within and self._within[-1] == tag:
            self._within.pop()

    def handle_data(self, data: str) -> None:
        if not self._within:
            self.prose.append(data)
        elif self._within[-1] == "code":
            self.code.append(data)


@pytest.fixture(scope="module")
def pages(site: Path) -> dict[Path, Links]:
    found = {path: Links(path) for path in site.rglob("*.html") if path.name != "404.html"}  # its links are the server's
    assert len(found) == len([*(ROOT / "docs").rglob("*.md")]) + 6
    return found


def test_every_link_and_anchor_leads_somewhere(pages: dict[Path, Links]) -> None:
    for page, of in pages.items():
        for link in [*of.links, *of.loaded]:
            parts = urlsplit(link)
            if parts.scheme:
                continue
            path = (page.parent / unquote(parts.path)).resolve() if parts.path else page
            assert path.is_file(), f"{page.name}: {link}"
            if parts.fragment and path in pages:
                assert unquote(parts.fragment) in pages[path].anchors, f"{page.name}: {link}"


def test_pages_load_nothing_from_other_hosts(pages: dict[Path, Links]) -> None:
    assert {link for of in pages.values() for link in of.loaded if urlsplit(link).scheme or link.startswith("//")} == set()


def test_markdown_that_the_site_reads_in_another_way_than_code_hosts_is_found(pages: dict[Path, Links]) -> None:
    """Lists and tables that need a blank line before them, and pipes in the code of tables."""
    for page, of in pages.items():
        prose = "".join(of.prose)
        assert not re.search(r"^ *[-*] \S|\|-+\||`|\]\(", prose, re.MULTILINE), page.name
        assert not any("\\|" in code for code in of.code if "\n" not in code), page.name


def test_pages_outside_docs_are_linked_and_other_files_are_named(pages: dict[Path, Links], site: Path) -> None:
    home = pages[site / "index.html"]
    assert {"internals/studies.html", "internals/speed_log.html", "guides/tasks.html"} <= {*home.links}
    assert "guides/rescoring.html" in pages[site / "changelog.html"].links
    assert "docs/start" in home.code


def test_a_broken_anchor_fails_the_build(tmp_path: Path) -> None:
    (tmp_path / "docs").mkdir()
    (tmp_path / "docs/page.md").write_text("# A page\n\n[here](#a-page) [there](#no-such-heading) [file](gone.md)\n")
    (tmp_path / "mkdocs.yml").write_text(f"INHERIT: {ROOT}/mkdocs.yml\nhooks: []\n")
    built = build(tmp_path / "mkdocs.yml", tmp_path / "site")
    assert built.returncode != 0
    assert "#no-such-heading" in built.stderr
    assert "gone.md" in built.stderr
    assert "#a-page" not in built.stderr


@pytest.fixture
def asked_of_browser(site: Path) -> Iterator[tuple[object, list[str]]]:
    pytest.importorskip("playwright", reason="the search is tested in a browser: pip install playwright")
    chromium = shutil.which("chromium")
    if chromium is None:
        pytest.skip("there is no Chromium: apt install chromium")
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=chromium, args=["--no-sandbox"])
        page = browser.new_page(viewport={"width": 390, "height": 800})
        asked: list[str] = []
        page.on("request", lambda request: asked.append(request.url))
        page.on("console", lambda message: asked.append(message.text))
        page.on("pageerror", lambda error: asked.append(str(error)))
        yield page, asked
        browser.close()


def test_search_finds_a_key_in_a_page_opened_from_disk(site: Path, asked_of_browser: tuple[object, list[str]]) -> None:
    page, asked = asked_of_browser
    page.goto((site / "start/how_to.html").as_uri())
    page.keyboard.press("/")
    page.keyboard.type("fresh_optimizer")
    found = page.locator(".md-search-result__link")
    found.first.wait_for(timeout=30_000)
    links = [urlsplit(found.nth(place).get_attribute("href")).path for place in range(found.count())]
    assert str(site / "reference/api.html") in links
    assert page.evaluate("document.documentElement.scrollWidth <= document.documentElement.clientWidth")
    assert [url for url in asked if not url.startswith(("file:", "blob:", "data:"))] == []
