"""Hooks of mkdocs (``mkdocs.yml``): the docs as a site, from the same files that code hosts show.

The README is the home page, the pages of ``OUTSIDE`` are on the site as well, and the folders of docs are the navigation,
so a new page needs no entry. A link to a file that is no page leads to the repository, or is plain text where
``repo_url`` is not set. A page's name in prose, docs/guides/tasks.md, is a link.
"""

import posixpath
import re
from pathlib import Path

from mkdocs.config.defaults import MkDocsConfig
from mkdocs.exceptions import PluginError
from mkdocs.structure.files import File, Files
from mkdocs.structure.pages import Page

ROOT = Path(__file__).parents[1]
OUTSIDE = {
    "README.md": "index.md",
    "CHANGELOG.md": "changelog.md",
    "CONTRIBUTING.md": "contributing.md",
    "SECURITY.md": "security.md",
    "studies/README.md": "internals/studies.md",
    "bench/LOG.md": "internals/speed_log.md",
}
"""Pages that are not in docs, by their place on the site."""
LOGS = {"changelog.md", "internals/speed_log.md"}
"""Pages that name everything once; a search finds others before them."""
SECTIONS = {"start": "Start", "guides": "Guides", "guides/systems": "From other systems", "reference": "Reference",
            "internals": "Internals"}  # fmt: skip
"""Folders in the order of the navigation; one in another is the last entry there."""
FIRST = (
    "start/how_to.md", "start/digits.md", "start/own_environment.md", "start/browser.md", "start/python.md",
    "guides/tasks.md", "guides/media.md", "guides/environments.md", "guides/own_parts.md", "guides/judges.md",
    "guides/evaluation.md", "guides/view.md", "guides/experiments.md",
    "reference/recipe.md", "reference/cli.md", "reference/api.md", "reference/metrics.md", "reference/health.md",
)  # fmt: skip
"""Pages at the beginning of their folders, in this order; the others follow by name."""

FENCE = r"^(?P<fence> *```).*?^(?P=fence)"
CODE = r"(?P<ticks>`+)(?!`)(?:(?!\n\n).)+?(?<!`)(?P=ticks)(?!`)"
LINK = r"(?P<image>!?)\[(?P<text>(?:[^\[\]]|\[[^\]]*\])*)\]\((?P<target>[^()\s]+)\)"
NAME = r"(?<![\w/.-])(?P<name>docs/[\w/]+\.md(?:#[\w-]+)?)"
MARKUP = re.compile(f"{FENCE}|{LINK}|{CODE}|{NAME}", re.MULTILINE | re.DOTALL)


def on_files(files: Files, config: MkDocsConfig) -> Files:
    """Add the pages that are outside docs, and set the navigation."""
    for path, place in OUTSIDE.items():
        files.append(File.generated(config, place, content=(ROOT / path).read_text(encoding="utf-8")))
    config.nav = navigation([file.src_uri for file in files.documentation_pages()])
    return files


def navigation(pages: list[str]) -> list[object]:
    """The entries of mkdocs' ``nav``: the home page, a section for each folder, and the project's pages."""
    if gone := set(FIRST) - {*pages}:
        raise PluginError(f"FIRST in tools/docs_site.py names pages that are gone: {', '.join(sorted(gone))}")
    entries: dict[str, list[object]] = {}
    for page in [*FIRST, *sorted({*pages} - {*FIRST})]:
        entries.setdefault(posixpath.dirname(page), []).append(page)
    for folder in [*SECTIONS, *sorted(entries.keys() - SECTIONS.keys() - {""})]:
        entries[posixpath.dirname(folder)].append({SECTIONS.get(folder, folder): entries[folder]})
    top = entries[""]
    loose = [entry for entry in top if isinstance(entry, str) and entry != "index.md"]
    return [{"Home": "index.md"}, *(entry for entry in top if isinstance(entry, dict)), {"Project": loose}]


def on_page_markdown(markdown: str, page: Page, config: MkDocsConfig, files: Files) -> str:
    """Lead links to where their targets are on the site, or outside it."""
    here = page.file.src_uri
    if here in LOGS:
        page.meta["search"] = {"boost": 0.3}
    if here == "index.md":
        page.meta["hide"] = ["navigation"]  # a list of itself; the tabs lead on
    source = {place: path for path, place in OUTSIDE.items()}.get(here, f"docs/{here}")

    def placed(found: re.Match[str]) -> str:
        if found["ticks"]:  # code hosts need the backslash in code of a table, and do not show it
            in_table = markdown.rfind("\n|", 0, found.start()) == markdown.rfind("\n", 0, found.start())
            return found[0].replace("\\|", "|") if in_table else found[0]
        if found["name"]:
            target = _target(found["name"], "", here, files)
            return found[0] if target is None else f"[{found['name']}]({target})"
        if not found["target"] or re.match(r"[a-z]+:|#", found["target"]):
            return found[0]
        target = _target(found["target"], posixpath.dirname(source), here, files)
        if target is not None:
            return f"{found['image']}[{found['text']}]({target})"
        path = posixpath.normpath(posixpath.join(posixpath.dirname(source), found["target"].partition("#")[0]))
        if not (ROOT / path).exists():
            return found[0]  # mkdocs reports it
        if config.repo_url:
            return f"[{found['text']}]({config.repo_url.rstrip('/')}/blob/main/{path})"
        return f"`{path}`" if found["text"].strip("/") == path else f"{found['text']} (`{path}`)"

    return MARKUP.sub(placed, markdown)


def _target(link: str, folder: str, here: str, files: Files) -> str | None:
    """A link from a file in ``folder`` of the repository, as a link from the page ``here``; None if it is to no page."""
    path, sign, anchor = link.partition("#")
    path = posixpath.normpath(posixpath.join(folder, path))
    place = OUTSIDE.get(path, path.removeprefix("docs/") if path.startswith("docs/") else "")
    if not place or files.get_file_from_path(place) is None:
        return None
    return posixpath.relpath(place, posixpath.dirname(here) or ".") + sign + anchor
