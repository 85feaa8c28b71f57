"""report.html: a run on one self-contained page. Curves, what was paid for, before and after, and episodes as they were.

Nothing is loaded from elsewhere but clips too large for it, from ``media/`` beside it. No script is needed to read it, and
its size is bounded.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any, get_args

from sensorium import __version__
from sensorium.media.decoder import Decoder, open_decoder
from sensorium.media.store import MediaStore
from sensorium.recipe.schema import MediaSection
from sensorium.recipe.traits import estimator_traits
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.record.durable import write_whole
from sensorium.record.findings import read_health
from sensorium.record.metrics import read_metrics
from sensorium.record.run_directory import RunDirectory
from sensorium.report.album import Album
from sensorium.report.cards import comparison_card, group_card
from sensorium.report.console import duration
from sensorium.report.examples import Comparisons, Kind, compare_evaluations, training_groups
from sensorium.report.health_panel import health_panel
from sensorium.report.processes import processes_section
from sensorium.report.run_charts import detail_charts, learning_charts, step_axis
from sensorium.report.stages import stage_table, stages_of, warm_steps, widest_first
from sensorium.report.tables import interval_text, share
from sensorium.vocabulary.errors import RecordError, SensoriumError
from sensorium.vocabulary.secrets import without_keys

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
MEDIA_BYTES = 4 * 1024 * 1024


def write_report(run: RunDirectory | Path) -> Path:
    """Write a run's report.html from what its directory holds."""
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    try:
        page = render_report(directory)
    except SensoriumError:
        raise
    except Exception as error:  # a file of the run may hold anything; its checkpoints do not depend on it
        raise RecordError(
            f"the report of '{directory.path}' cannot be written: {type(error).__name__}: {error}. A file in its eval/ or "
            "episodes/ may be damaged: remove it, or put back a copy."
        ) from error
    write_whole(directory.report, page)
    return directory.report


def render_report(directory: RunDirectory, *, media_bytes: int = MEDIA_BYTES, comparisons: int = 8, groups: int = 3) -> str:
    """The page of a run."""
    recipe_text = directory.recipe.read_text() if directory.recipe.exists() else ""
    recipe, _ = read_yaml(recipe_text, str(directory.recipe))
    recipe = recipe if isinstance(recipe, dict) else {}
    if (public := without_keys(recipe)) != recipe:
        recipe_text = write_yaml(public)
    rows = read_metrics(directory.metrics)
    summaries = directory.summaries()
    decoder = _decoder(directory, recipe)
    album = Album(decoder.store, media_bytes, decoder)
    name = str(recipe.get("name", directory.path.name))
    warm = warm_steps(recipe)
    axis = step_axis(rows, summaries, warm)
    sections = [
        _section("Learning", "curves", learning_charts(rows, summaries, axis)),
        _section("Stage by stage" if warm else "Before and after", "table", stage_table(summaries, warm)),
        _section("The same questions, before and after", "compared", _compared(directory, album, comparisons, warm)),
        _section("Groups from training", "groups", _groups(directory, album, groups, _estimator(recipe))),
        _section("Processes", "table processes", processes_section(recipe, rows, axis)),
        _section("In detail", "details", detail_charts(rows, axis)),
        _section("Recipe", "recipe", f"<pre>{escape(recipe_text)}</pre>" if recipe_text else ""),
    ]
    decoder.close()
    health = health_panel(read_health(directory.health), len(rows), warm + int(recipe.get("steps", 0)))
    head = _head(name, recipe, health, _tiles(rows, summaries, warm))
    return _page(name, head, "".join(sections), album)


def _decoder(directory: RunDirectory, recipe: Mapping[str, Any]) -> Decoder:
    """Of the run's media; what the run decoded is found again where it kept it."""
    store = MediaStore(directory.media if directory.media.is_dir() else None)
    said = recipe.get("media") or {}
    section = MediaSection.model_validate({key: said[key] for key in MediaSection.model_fields if key in said})
    folder = section.cache.expanduser() if section.cache is not None else directory.decoded
    kept = section.cache_gib if folder.is_dir() else 0.0
    return open_decoder(store, folder, cache_gib=kept, memory_gib=0.0, threads=section.threads)


def _page(name: str, head: str, body: str, album: Album) -> str:
    style, script = ((ASSETS / file).read_text() for file in ("report.css", "report.js"))
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{_policy(script)}'
        f"<title>{escape(name)} · Sensorium</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body>{album.definitions()}{head}<main>{body}</main>"
        f"<footer>Sensorium {__version__}</footer>\n<script>{script}</script></body></html>\n"
    )


def _policy(script: str) -> str:
    """The page's content security policy: its own script and no other, media of its own and of the folder beside it.

    A page that is opened as a file has no origin of its own in some browsers, so files are named beside 'self'. Styles are
    inline, in attributes too; they cannot load anything.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    media = "'self' file: data:"
    rules = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src {media}; media-src {media}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def _section(title: str, kind: str, body: str) -> str:
    """A section; one without content is left out."""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>\n' if body else ""


def _head(name: str, recipe: Mapping[str, Any], health: str, tiles: str) -> str:
    facts = []
    if recipe:
        batch = recipe.get("batch", {})
        facts.append(str(recipe["model"]["path"]))
        facts.append(_estimator(recipe).upper())
        facts.append(f"{batch.get('prompts_per_step', '?')} prompts × {batch.get('group_size', '?')} attempts a step")
        facts.append(f"seed {recipe.get('seed', 0)}")
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<header class="top"><h1>{escape(name)}</h1><p class="facts">{line}</p>{health}{tiles}</header>'


def _tiles(rows: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]], warm: int) -> str:
    tiles = []
    for found in widest_first(summaries)[:1]:
        stages = stages_of(found, warm)
        last = stages[-1].summary if stages else {}
        if last.get("accuracy") is not None:
            was = [share(stage.summary["accuracy"]) for stage in stages[-2:-1] if stage.summary.get("accuracy") is not None]
            since = "since RL began; " if was and warm and stages[-1].name == "after RL" else ""
            interval = f"{since}95 % interval {interval_text(last)}" if last.get("interval") else since
            tiles.append(
                _tile("held-out accuracy", share(last["accuracy"]), "".join(f"from {one}" for one in was), interval)
            )
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if rewards:
        tiles.append(_reward_tile(rewards))
    if rows:
        seconds = sum(row.get("time/step_s", 0.0) for row in rows)
        episodes = sum(row.get("throughput/episodes_per_s", 0.0) * row.get("time/step_s", 0.0) for row in rows)
        tiles.append(_tile("steps", f"{rows[-1]['step']:,}", "", f"{round(episodes):,} episodes" if episodes else ""))
        if seconds:
            rate = f"{episodes / seconds:,.0f} episodes a second" if episodes else ""
            tiles.append(_tile("training time", duration(seconds), "", rate))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def _tile(name: str, value: str, beside: str, below: str) -> str:
    return (
        f'<div class="tile"><span class="name">{escape(name)}</span><span class="value">{escape(value)}</span>'
        f'<span class="beside">{escape(beside)}</span><span class="below">{escape(below)}</span></div>'
    )


def _compared(directory: RunDirectory, album: Album, limit: int, warm: int) -> str:
    found = compare_evaluations(directory, limit, warm)
    if found is None:
        return ""
    walks = any(len(pair.after.turns) > 1 for pair in found.shown)
    cards = "".join(comparison_card(pair, album) for pair in found.shown[:: 2 if walks else 1])
    return f'{_tally(found, warm)}<div class="cards">{cards}</div>'


def _tally(found: Comparisons, warm: int) -> str:
    """All compared questions as one bar, so that the examples can be weighed."""
    total = sum(found.counts.values()) or 1
    kinds = [(kind, count) for kind in get_args(Kind) if (count := found.counts.get(kind, 0))]
    bar = "".join(f'<i class="{kind.split()[0]}" style="flex-grow:{count}"></i>' for kind, count in kinds)
    keys = "".join(f'<span class="{kind.split()[0]}"><i></i>{kind} <b>{count}</b></span>' for kind, count in kinds)
    first = f"at step {found.first}{', where RL began,' if warm and found.first == warm else ''}"
    words = f"{total} held-out questions {first} and at step {found.last}; examples of each kind, chosen by rule."
    if found.samples > 1:
        words += f" Of the {found.samples} samples of a question the first is compared: the counts are not the accuracy."
    tally = f'<div class="tally"><div class="tally-bar">{bar}</div><div class="tally-keys">{keys}</div></div>'
    return f'<p class="note">{words}</p>{tally}'


def _estimator(recipe: Mapping[str, Any]) -> str:
    return str(recipe.get("algorithm", {}).get("advantage", {}).get("name", "grpo"))


def _groups(directory: RunDirectory, album: Album, each: int, estimator: str) -> str:
    found = training_groups(directory, each)
    if not found:
        return ""
    note = "Attempts at one question are compared with each other: what is paid above the group’s mean becomes more likely."
    if estimator_traits(estimator).critic:
        note = "Each attempt is compared with what the critic expected of it: what turns out better becomes more likely."
    if any(credit.advantages for logged in found for credit in logged.credits.values()):
        note += " The advantage says how much: above 0 (green) tokens were made likelier, below 0 (red) less likely."
    cards = "".join(group_card(logged, album) for logged in found)
    return f'<p class="note">{note}</p><div class="cards">{cards}</div>'


def _reward_tile(rewards: Sequence[float]) -> str:
    """The mean of the last steps, and of as many first ones, at most five; no step is in both."""
    if len(rewards) < 2:
        return _tile("mean reward", f"{rewards[0]:.3f}", "", "one step")
    count = min(5, len(rewards) // 2)
    first, last = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
    below = f"first and last {count} steps" if count > 1 else "first and last step"
    return _tile("mean reward", f"{last:.3f}", f"from {first:.3f}", below)
