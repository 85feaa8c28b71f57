"""report.html: a run on one self-contained page. Curves, what was paid for, before and after, and episodes as they were.

Nothing is loaded from elsewhere but clips too large for it, from ``media/`` beside it. No script is needed to read it, and
its size is bounded.
"""

from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from sensorium import __version__
from sensorium.media.decoder import Decoder, open_decoder
from sensorium.media.store import MediaStore
from sensorium.recipe.schema import MediaSection
from sensorium.recipe.yaml import read_yaml
from sensorium.record.durable import write_whole
from sensorium.record.run_directory import RunDirectory
from sensorium.report.album import Album
from sensorium.report.cards import comparison_card, group_card
from sensorium.report.console import duration
from sensorium.report.examples import Comparisons, Kind, compare_evaluations, training_groups
from sensorium.report.metrics import read_metrics
from sensorium.report.svg import Series, line_chart
from sensorium.report.tables import interval_text, share

ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
MEDIA_BYTES = 4 * 1024 * 1024
DETAILS = {
    "policy/entropy": "entropy",
    "policy/grad_norm": "gradient norm",
    "policy/kl_ref": "KL to the start",
    "policy/clip_fraction": "clipped share",
    "mismatch/kl": "KL of engine and learner",
    "groups/zero_variance": "groups without signal",
    "episodes/length_mean": "tokens an episode",
    "episodes/turns_mean": "turns an episode",
    "throughput/episodes_per_s": "episodes a second",
}


def write_report(run: RunDirectory | Path) -> Path:
    """Write a run's report.html from what its directory holds."""
    directory = run if isinstance(run, RunDirectory) else RunDirectory(run)
    write_whole(directory.report, render_report(directory))
    return directory.report


def render_report(directory: RunDirectory, *, media_bytes: int = MEDIA_BYTES, comparisons: int = 8, groups: int = 3) -> str:
    """The page of a run."""
    recipe_text = directory.recipe.read_text() if directory.recipe.exists() else ""
    recipe, _ = read_yaml(recipe_text, str(directory.recipe))
    recipe = recipe if isinstance(recipe, dict) else {}
    rows = read_metrics(directory.metrics)
    summaries = directory.summaries()
    decoder = _decoder(directory, recipe)
    album = Album(decoder.store, media_bytes, decoder)
    name = str(recipe.get("name", directory.path.name))
    sections = [
        _section("Learning", "curves", _learning(rows, summaries)),
        _section("Before and after", "table", _before_after(summaries)),
        _section("The same questions, before and after", "compared", _compared(directory, album, comparisons)),
        _section("Groups from training", "groups", _groups(directory, album, groups)),
        _section("In detail", "details", _details(rows)),
        _section("Recipe", "recipe", f"<pre>{escape(recipe_text)}</pre>" if recipe_text else ""),
    ]
    decoder.close()
    return _page(name, _head(name, recipe, rows, summaries), "".join(sections), album)


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
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8"><title>{escape(name)} · Sensorium</title>'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body>{album.definitions()}{head}<main>{body}</main>"
        f"<footer>Sensorium {__version__}</footer>\n<script>{script}</script></body></html>\n"
    )


def _section(title: str, kind: str, body: str) -> str:
    """A section; one without content is left out."""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>\n' if body else ""


def _head(
    name: str, recipe: Mapping[str, Any], rows: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]
) -> str:
    facts = []
    if recipe:
        batch = recipe.get("batch", {})
        facts.append(str(recipe["model"]["path"]))
        facts.append(str(recipe.get("algorithm", {}).get("advantage", {}).get("name", "grpo")).upper())
        facts.append(f"{batch.get('prompts_per_step', '?')} prompts × {batch.get('group_size', '?')} attempts a step")
        facts.append(f"seed {recipe.get('seed', 0)}")
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return f'<header class="top"><h1>{escape(name)}</h1><p class="facts">{line}</p>{_tiles(rows, summaries)}</header>'


def _tiles(rows: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]) -> str:
    tiles = []
    for first, last in [(found[0], found[-1]) for found in _widest_first(summaries)[:1]]:
        if last.get("accuracy") is not None:
            was = "" if first is last else f"from {share(first.get('accuracy'))}"
            interval = f"95 % interval {interval_text(last)}" if last.get("interval") else ""
            tiles.append(_tile("held-out accuracy", share(last["accuracy"]), was, interval))
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if rewards:
        tiles.append(
            _tile("mean reward", f"{_tail(rewards):.3f}", f"from {_tail(rewards[::-1]):.3f}", "first and last 5 steps")
        )
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


def _learning(rows: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]]) -> str:
    """Reward, accuracy in training with the held-out ones, and every term by its name."""
    accuracy = [_series("training", "accuracy", rows, colour=1), *_held_out(summaries)]
    terms = [name for name in dict.fromkeys(key for row in rows for key in row) if name.startswith("reward/")]
    by_term = [
        _series(name.removeprefix("reward/"), name, rows, colour=(0, 3, 2, 4, 5)[i % 5])
        for i, name in enumerate(term for term in terms if term != "reward/mean")
    ]
    wanted = [
        ("Reward", [_series("mean reward", "reward/mean", rows)]),
        ("Accuracy", accuracy),
        ("Reward by term", by_term if len(by_term) > 1 else []),
        ("Loss of the warm start", [_warm_loss(rows)]),
    ]
    charts = [(title, series) for title, series in wanted if any(one.points for one in series)]
    wide = len(charts) if len(charts) % 2 else 0
    drawn = [
        line_chart(title, series, width=1310 if i == wide else 640) for i, (title, series) in enumerate(charts, start=1)
    ]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _held_out(summaries: Sequence[Mapping[str, Any]]) -> list[Series]:
    """Held-out accuracy over steps: of the main evaluation, and of others that were made more than twice."""
    curves = []
    for i, found in enumerate(_by_name(summaries)):
        judged = [summary for summary in found if summary.get("accuracy") is not None]
        if judged and (i == 0 or len(judged) > 2):
            points = tuple((float(summary["step"]), float(summary["accuracy"])) for summary in judged)
            intervals = tuple(tuple(summary["interval"]) if summary.get("interval") else None for summary in judged)
            name = "held out" if i == 0 else f"held out, {judged[0]['name']}"
            curves.append(Series(name, points, 2 + i % 4, marks=True, intervals=intervals))
    return curves


def _details(rows: Sequence[Mapping[str, Any]]) -> str:
    charts = [
        line_chart(title, [_series(title, metric, rows, colour=0)], width=420, height=190)
        for metric, title in DETAILS.items()
        if sum(metric in row for row in rows) > 1
    ]
    return f'<div class="charts three">{"".join(charts)}</div>' if charts else ""


def _series(name: str, metric: str, rows: Sequence[Mapping[str, Any]], colour: int = 0) -> Series:
    return Series(name, tuple((float(row["step"]), float(row[metric])) for row in rows if metric in row), colour)


def _warm_loss(rows: Sequence[Mapping[str, Any]]) -> Series:
    """The loss of steps that have no reward: those of the supervised stage."""
    return _series("loss", "policy/loss", [row for row in rows if "reward/mean" not in row], colour=4)


def _before_after(summaries: Sequence[Mapping[str, Any]]) -> str:
    """Accuracy first and last, by evaluation and by category, as a table with bars."""
    rows = []
    for i, (first, *_, last) in enumerate(found for found in _widest_first(summaries) if len(found) > 1):
        rows.append(_compared_row(str(last["name"]), first, last, "whole"))
        for name, category in last.get("categories", {}).items() if i == 0 else ():
            rows.append(_compared_row(name, first.get("categories", {}).get(name, {}), category, "part"))
    if not rows:
        return ""
    head = "<tr><th></th><th>before</th><th>after</th><th>change</th><th>n</th></tr>"
    note = '<p class="note">Accuracy on held-out tasks, with its 95 % interval.</p>'
    return f'{note}<div class="scroll"><table><thead>{head}</thead><tbody>{"".join(rows)}</tbody></table></div>'


def _compared_row(name: str, was: Mapping[str, Any], now: Mapping[str, Any], kind: str) -> str:
    old, new = was.get("accuracy"), now.get("accuracy")
    change = "–" if old is None or new is None else f"{100 * (new - old):+.1f}"
    trend = "" if old is None or new is None or abs(new - old) < 0.02 else ("up" if new > old else "down")
    return (
        f'<tr class="{kind}"><th scope="row">{escape(name)}</th><td>{_bar(was)}</td><td>{_bar(now)}</td>'
        f'<td class="change {trend}">{change}</td><td class="n">{_size(now)}</td></tr>'
    )


def _bar(part: Mapping[str, Any]) -> str:
    accuracy = part.get("accuracy")
    if accuracy is None:
        return "–"
    interval = f'<span class="interval">{interval_text(part)}</span>' if part.get("interval") else ""
    return f'<span class="bar" style="--share:{accuracy:.4f}"></span><span class="share">{share(accuracy)}</span>{interval}'


def _compared(directory: RunDirectory, album: Album, limit: int) -> str:
    found = compare_evaluations(directory, limit)
    if found is None:
        return ""
    walks = any(len(pair.after.turns) > 1 for pair in found.shown)
    cards = "".join(comparison_card(pair, album) for pair in found.shown[:: 2 if walks else 1])
    return f'{_tally(found)}<div class="cards">{cards}</div>'


def _tally(found: Comparisons) -> str:
    """All compared questions as one bar, so that the examples can be weighed."""
    order: tuple[Kind, ...] = ("learned", "kept", "still wrong", "lost", "not judged")
    total = sum(found.counts.values()) or 1
    kinds = [(kind, count) for kind in order if (count := found.counts.get(kind, 0))]
    bar = "".join(f'<i class="{kind.split()[0]}" style="flex-grow:{count}"></i>' for kind, count in kinds)
    keys = "".join(f'<span class="{kind.split()[0]}"><i></i>{kind} <b>{count}</b></span>' for kind, count in kinds)
    words = (
        f"{total} held-out questions at step {found.first} and at step {found.last}; examples of each kind, chosen by rule."
    )
    tally = f'<div class="tally"><div class="tally-bar">{bar}</div><div class="tally-keys">{keys}</div></div>'
    return f'<p class="note">{words}</p>{tally}'


def _groups(directory: RunDirectory, album: Album, each: int) -> str:
    found = training_groups(directory, each)
    if not found:
        return ""
    note = "Attempts at one question are compared with each other: what is paid above the group’s mean becomes more likely."
    cards = "".join(group_card(step, group, album) for step, group in found)
    return f'<p class="note">{note}</p><div class="cards">{cards}</div>'


def _by_name(summaries: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The summaries of each evaluation in order of steps; the one made most often, the main one, first."""
    found: dict[str, list[Mapping[str, Any]]] = {}
    for summary in summaries:
        found.setdefault(summary["name"], []).append(summary)
    known = ["eval", "sampled", "greedy"]
    return sorted(found.values(), key=lambda of: (-len(of), known.index(of[0]["name"]) if of[0]["name"] in known else 9))


def _widest_first(summaries: Sequence[Mapping[str, Any]]) -> list[list[Mapping[str, Any]]]:
    """The same, the evaluation of most tasks first: it has the say."""
    return sorted(_by_name(summaries), key=lambda of: -_size(of[-1]))


def _size(part: Mapping[str, Any]) -> int:
    return int(part.get("tasks", part.get("episodes", 0)))


def _tail(values: Sequence[float]) -> float:
    last = values[-5:]
    return sum(last) / len(last)
