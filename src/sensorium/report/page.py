"""report.html of a run: health, curves, accuracy stage by stage, examples, processes and the recipe.

The page loads nothing but large clips, from ``media/`` beside it. It is readable without scripts, and its size is bounded.
"""

import base64
import hashlib
from collections.abc import Mapping, Sequence
from html import escape
from itertools import pairwise
from pathlib import Path
from typing import Any, get_args

from sensorium import __version__
from sensorium.data.decoder import Decoder, open_decoder
from sensorium.data.demonstrations import DemonstrationRows, episodes_of
from sensorium.data.media_store import MediaStore, StoredMedia
from sensorium.recipe.estimators_and_losses import estimator_traits
from sensorium.recipe.plan import placed_by, placed_processes, section_name
from sensorium.recipe.schema import MediaSection
from sensorium.recipe.yaml import read_yaml, write_yaml
from sensorium.report.album import Album
from sensorium.report.cards import (
    Kind,
    compare_evaluations,
    comparison_card,
    demonstration_card,
    episode_card,
    group_card,
    training_groups,
)
from sensorium.report.charts import Axis, Series, line_chart
from sensorium.report.console import duration
from sensorium.report.tables import interval_text, majority_text, share
from sensorium.runs.durable import write_whole
from sensorium.runs.episodes import TRANSCRIPTS, credit_from_json, episode_from_json, task_from_json
from sensorium.runs.metrics import HealthRecord, Notice, SightResult, read_health, read_metrics
from sensorium.runs.run_directory import RunDirectory
from sensorium.vocabulary.errors import RecordError, SensoriumError
from sensorium.vocabulary.metric_names import DETAILS, REPLACEMENTS, WAITS
from sensorium.vocabulary.secrets import without_keys

Summary = Mapping[str, Any]
Rows = Sequence[Mapping[str, Any]]
ASSETS = Path(__file__).resolve().parents[1] / "assets" / "report"
MEDIA_BYTES = 4 * 1024 * 1024
EPISODE_BYTES, DECODED_MIB = 32 * 1024 * 1024, 64  # of a page of one episode
AGE = "staleness/share_"
STEPS_NAMED = 12
DEMONSTRATIONS = 3  # recorded ones that are shown
KIND = "accuracy/"
CURVES, AVERAGED = 6, 10  # curves in one chart, and steps in a mean
WORDS = {
    "picture": ("pictures", "pictures blanked"),
    "video": ("videos", "videos blanked"),
    "sound": ("sound", "sound muted"),
}


def _health_panel(record: HealthRecord, steps: int, planned: int = 0) -> str:
    """The health of a run: what is wrong and since when, what is over, and the sight checks; empty before a step."""
    lasting = [notice for notice in record.last() if notice.state != "ended"]
    over = [notice for notice in record.last() if notice.state == "ended"]
    sight = "".join(f"<p>{_sight(step, result)}</p>" for step, results in record.sight for result in results)
    if not (lasting or over or sight or steps):
        return ""
    lasting.sort(key=lambda notice: not notice.grave)
    kind = "well" if not lasting else "grave" if any(notice.grave for notice in lasting) else "caution"
    title = {"grave": "This run does not learn as it should", "caution": "This run needs a look"}.get(
        kind, "Healthy again" if over else "Healthy"
    )
    part = f" The run was to have {planned:,} steps: it goes on, or was interrupted." if steps < planned else ""
    title += " so far" if kind == "well" and part else ""
    none = f"Nothing was found wrong at the end of {steps:,} steps." if not lasting else f"{steps:,} steps were made."
    none += " Earlier findings that are over are listed below." if over and not lasting else ""
    none = f"<p>{none}{part}</p>" if part or not lasting else ""
    items = past = ""
    for notice in lasting:
        began = record.began(notice.rule)
        since = f'<span class="since">{f"since step {began}" if began else "since the start"}</span>'
        level = "grave" if notice.grave else "caution"
        items += f'<li class="{level}"><b>{_name(notice)}</b> {since}<p>{escape(notice.text)}</p></li>'
    for notice in over:
        steps_of = f"from step {record.began(notice.rule)} to step {notice.step}"
        past += f"<li><b>{_name(notice)}</b> {steps_of}: {escape(notice.text)}</li>"
    more = f'<ul class="over">{past}</ul>' if past else ""
    return (
        f'<section class="health {kind}"><h2>{title}</h2>{none}'
        f"{f'<ul>{items}</ul>' if items else ''}{more}{f'<div class=sight>{sight}</div>' if sight else ''}</section>\n"
    )


def _name(notice: Notice) -> str:
    return escape(notice.rule.replace("_", " "))


def _sight(step: int, found: SightResult) -> str:
    shown, blanked = WORDS.get(found.kind, (found.kind, f"{found.kind} blanked"))
    when = "at the start" if step == 0 else f"after step {step}"
    before, after = f"{escape(found.measure)} <b>{found.shown:.2f}</b>", f"<b>{found.blanked:.2f}</b>"
    if found.measure == "accuracy":
        before, after = f"<b>{share(found.shown)}</b> right", f"<b>{share(found.blanked)}</b>"
    return f"Sight check {when}, {found.tasks} held-out tasks: {before} with {shown}, {after} with {blanked}."


def _stages_of(found: Sequence[Summary], warm: int) -> list[tuple[str, Summary]]:
    if not warm:
        return [("before", found[0]), ("after", found[-1])][: len(found)]
    stages = [("at start", summary) for summary in found[:1] if summary["step"] < warm]
    stages += [("after warm start", summary) for summary in found if summary["step"] == warm]
    return stages + [("after RL", summary) for summary in found[-1:] if summary["step"] > warm]


def _by_name(summaries: Sequence[Summary]) -> list[list[Summary]]:
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary["name"], []).append(summary)
    known = ["eval", "sampled", "greedy"]
    return sorted(found.values(), key=lambda of: (-len(of), known.index(of[0]["name"]) if of[0]["name"] in known else 9))


def _widest_first(summaries: Sequence[Summary]) -> list[list[Summary]]:
    return sorted(_by_name(summaries), key=lambda of: -_size(of[-1]))


def stage_table(summaries: Sequence[Summary], warm: int) -> str:
    """Accuracy, or mean reward if nothing is right or wrong, by stage, evaluation and category, and the last change."""
    by_reward = all(summary.get("accuracy") is None for summary in summaries)
    rows: list[str] = []
    heads: tuple[str, ...] = ()
    for i, found in enumerate(found for found in _widest_first(summaries) if len(found) > 1):
        stages = _stages_of(found, warm)
        names, parts = tuple(name for name, _ in stages), [summary for _, summary in stages]
        heads = names if i == 0 else heads
        if names != heads or len(stages) < 2:
            continue
        rows.append(_row(str(parts[-1]["name"]), parts, heads, "whole", by_reward))
        for name in parts[-1].get("categories", {}) if i == 0 else ():
            rows.append(_row(name, [part.get("categories", {}).get(name, {}) for part in parts], heads, "part", by_reward))
    if not rows:
        return ""
    change = {"after RL": "change by RL", "after warm start": "change by it"}.get(heads[-1], "change")
    head = "".join(f"<th>{name}</th>" for name in ("", *heads, change, "n"))
    accuracy = "Accuracy on held-out tasks, with its 95 % interval."
    reward = "Mean reward on held-out tasks; no reward term says right or wrong."
    if chance := majority_text(_widest_first(summaries)[0][-1]):
        accuracy += f" Always giving the most frequent answer would score {escape(chance)}."
    note = f'<p class="note">{reward if by_reward else accuracy}</p>'
    return f'{note}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def kinds_table(rows: Rows) -> str:
    """Accuracy in training by kind of task: the mean of its first and of its last steps; empty where there are no kinds."""
    cells = []
    for name in sorted({key for row in rows for key in row if key.startswith(KIND)}):
        known = [float(row[name]) for row in rows if name in row]
        few = max(1, min(AVERAGED, len(known) // 2))
        early, late = sum(known[:few]) / few, sum(known[-few:]) / few
        parts = [{"accuracy": early}, {"accuracy": late, "tasks": len(known)}]
        cells.append(_row(name.removeprefix(KIND), parts, ("first", "last"), "part", by_reward=False))
    if not cells:
        return ""
    head = "".join(f"<th>{name}</th>" for name in ("", "first", "last", "change", "steps"))
    note = (
        f"Accuracy in training, as the mean of the first and of the last {AVERAGED} steps (or half of them) with that kind."
    )
    table = f"<table><thead><tr>{head}</tr></thead><tbody>{''.join(cells)}</tbody></table>"
    return f'<p class="note">{note}</p><div class="scroll">{table}</div>'


def _row(name: str, parts: Sequence[Summary], heads: Sequence[str], kind: str, by_reward: bool) -> str:
    old, new = (part.get("reward" if by_reward else "accuracy") for part in parts[-2:])
    change = "–" if old is None or new is None else f"{new - old:+.3f}" if by_reward else f"{100 * (new - old):+.1f}"
    trend = "" if old is None or new is None or abs(new - old) < 0.02 else ("up" if new > old else "down")
    cells = "".join(
        f'<td data-stage="{head}">{_bar(part, by_reward)}</td>' for part, head in zip(parts, heads, strict=True)
    )
    return (
        f'<tr class="{kind}"><th scope="row">{escape(name)}</th>{cells}'
        f'<td class="change {trend}">{change}</td><td class="n">{_size(parts[-1]) or "–"}</td></tr>'
    )


def _bar(part: Summary, by_reward: bool) -> str:
    if by_reward and part.get("reward") is not None:
        return f'<span class="share">{part["reward"]:.3f}</span>'
    accuracy = part.get("accuracy")
    if accuracy is None:
        return "–"
    interval = f' <span class="interval">{interval_text(part)}</span>' if part.get("interval") else ""
    return f'<span class="bar" style="--share:{accuracy:.4f}"></span><span class="share">{share(accuracy)}</span>{interval}'


def _size(part: Summary) -> int:
    return int(part.get("tasks", part.get("episodes", 0)))


def _learning_charts(rows: Rows, summaries: Rows, axis: Axis) -> str:
    accuracy = [_metric_series("training", "accuracy", rows, colour=1), *_held_out(summaries)]
    terms = [name for name in dict.fromkeys(key for row in rows for key in row) if name.startswith("reward/")]
    by_term = [
        _metric_series(name.removeprefix("reward/"), name, rows, colour=(0, 3, 2, 4, 5)[i % 5])
        for i, name in enumerate(term for term in terms if term != "reward/mean")
    ]
    kinds = [name for name in dict.fromkeys(key for row in rows for key in row) if name.startswith(KIND)]
    by_kind = [_metric_series(name.removeprefix(KIND), name, rows, colour=i) for i, name in enumerate(kinds)]
    supervised = [row for row in rows if "groups/trained" not in row and "reward/mean" not in row]
    wanted = [
        ("Reward", [_metric_series("mean reward", "reward/mean", rows)]),
        ("Accuracy", accuracy),
        ("Accuracy by kind of task", by_kind if len(by_kind) <= CURVES else []),
        ("Reward by term", by_term if len(by_term) > 1 else []),
        ("Level of the curriculum", [_metric_series("level", "planner/level", rows, 3)]),
        ("Loss of the warm start", [_metric_series("loss", "policy/loss", supervised, 4)]),
    ]
    return _chart_grid(wanted, axis)


def _chart_grid(wanted: Sequence[tuple[str, Sequence[Series]]], axis: Axis) -> str:
    charts = [(title, series) for title, series in wanted if any(one.points for one in series)]
    wide = len(charts) if len(charts) % 2 else 0
    drawn = [line_chart(title, series, axis=axis, wide=i == wide) for i, (title, series) in enumerate(charts, start=1)]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def _detail_charts(rows: Rows, axis: Axis) -> str:
    charts = [
        line_chart(title, [_metric_series(title, metric, rows, colour=0)], axis=axis, width=420, height=190)
        for metric, title in DETAILS.items()
        if sum(metric in row for row in rows) > 1
    ]
    return f'<div class="charts three">{"".join(charts)}</div>' if charts else ""


def _held_out(summaries: Rows) -> list[Series]:
    curves = []
    for i, found in enumerate(_by_name(summaries)):
        judged = [summary for summary in found if summary.get("accuracy") is not None]
        if judged and (i == 0 or len(judged) > 2):
            points = tuple((float(summary["step"]), float(summary["accuracy"])) for summary in judged)
            intervals = tuple(tuple(summary["interval"]) if summary.get("interval") else None for summary in judged)
            name = "held out" if i == 0 else f"held out, {judged[0]['name']}"
            curves.append(Series(name, points, 2 + i % 4, marks=True, intervals=intervals))
    return curves


def _metric_series(name: str, metric: str, rows: Rows, colour: int = 0) -> Series:
    return Series(name, tuple((float(row["step"]), float(row[metric])) for row in rows if metric in row), colour)


def processes_section(recipe: Mapping[str, Any], rows: Rows, axis: Axis) -> str:
    """Processes, waits, staleness and replacements; empty for one process with the synchronous schedule."""
    schedule = section_name(recipe.get("schedule"), "synchronous")
    parts = placed_processes(recipe)
    if not parts and schedule == "synchronous":
        return ""
    placed = placed_by(recipe) if parts else ""
    words = f"The driver{', ' if parts else ' alone'}{', '.join(parts)}{placed}. Schedule: {schedule.replace('_', ' ')}. "
    whole = sum(row.get("time/step_s", 0.0) for row in rows if any(metric in row for metric in WAITS))
    if whole:
        waited = [f"{name} {share(sum(row.get(metric, 0.0) for row in rows) / whole)}" for metric, name in WAITS.items()]
        words += f"Of the time of all steps waited: {', '.join(waited)}."
    waits = [_metric_series(name, metric, rows, colour) for colour, (metric, name) in enumerate(WAITS.items())]
    ages = [_metric_series(name, f"staleness/{name}", rows, colour) for colour, name in enumerate(("mean", "max"))]
    shares = [_metric_series("effective share", "mismatch/effective_share", rows)]
    wanted = {"Seconds of a step in which one waited": waits, "Age of what was trained on, in updates": ages}
    wanted |= {"Share of the tokens that counts, in effect": shares} if any(one.points for one in ages) else {}
    drawn = _chart_grid(list(wanted.items()), axis)
    names = sorted({name for row in rows for name in row if name.startswith(AGE)}, key=lambda name: int(name[len(AGE) :]))
    count = sum(any(name in row for name in names) for row in rows)
    lines = []
    for name in names:
        age = int(name[len(AGE) :])
        mean = share(sum(row.get(name, 0.0) for row in rows) / count)
        lines.append((f"tokens {age} update{'' if age == 1 else 's'} old", mean))
    replaced = [(name, grown) for metric, name in REPLACEMENTS.items() if (grown := _growth(rows, metric))]
    for name, grown in replaced:
        named = ", ".join(str(step) for step, _ in grown[:STEPS_NAMED]) + (", …" if len(grown) > STEPS_NAMED else "")
        lines.append((name, f"{sum(more for _, more in grown):,.0f}, at step{'s' if len(grown) > 1 else ''} {named}"))
    if not replaced and any(metric in row for row in rows for metric in REPLACEMENTS):
        lines.append(("replaced or done again", "nothing"))
    cells = "".join(
        f'<tr class="part"><th scope="row">{escape(name)}</th><td>{escape(what)}</td></tr>' for name, what in lines
    )
    table = f'<div class="scroll"><table><tbody>{cells}</tbody></table></div>' if cells else ""
    return f'<p class="note">{escape(words)}</p>{drawn}{table}'


def _growth(rows: Rows, metric: str) -> list[tuple[int, float]]:  # counts of a resumed run start again at 0
    counts = [(0, 0.0), *((int(row["step"]), float(row[metric])) for row in rows if metric in row)]
    grown = [(step, now - (before if now >= before else 0.0)) for (_, before), (step, now) in pairwise(counts)]
    return [(step, more) for step, more in grown if more > 0]


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
    given = recipe.get("media") or {}
    media = MediaSection.model_validate({key: given[key] for key in MediaSection.model_fields if key in given})
    cache = media.cache.expanduser() if media.cache is not None else directory.decoded  # clips that the run decoded
    decoder = open_decoder(
        MediaStore(directory.media if directory.media.is_dir() else None),
        cache,
        cache_gib=media.cache_gib if cache.is_dir() else 0.0,
        memory_gib=0.0,
        threads=media.threads,
    )
    album = Album(decoder.store, media_bytes, decoder)
    name = str(recipe.get("name", directory.path.name))
    warm = int((recipe.get("warm_start") or {}).get("steps", 0))
    steps = [float(one["step"]) for one in (*rows, *summaries)] or [0.0]
    forked = directory.forked_at()
    axis = Axis(min(steps), max(steps), warm if 0 < warm < max(steps) else None, forked[1] if forked else None)
    sections = [
        section("Learning", "curves", _learning_charts(rows, summaries, axis)),
        section("Stage by stage" if warm else "Before and after", "table", stage_table(summaries, warm)),
        section("Training by kind of task", "table", kinds_table(rows)),
        section("The same questions, before and after", "compared", _compared(directory, album, comparisons, warm)),
        section("Recorded demonstrations", "groups", _demonstrations(recipe, album)),
        section("Groups from training", "groups", _groups(directory, album, groups, _estimator(recipe))),
        section("Processes", "table processes", processes_section(recipe, rows, axis)),
        section("In detail", "details", _detail_charts(rows, axis)),
        section("Recipe", "recipe", f"<pre>{escape(recipe_text)}</pre>" if recipe_text else ""),
    ]
    decoder.close()
    health = _health_panel(read_health(directory.health), len(rows), warm + int(recipe.get("steps", 0)))
    facts = []
    if recipe:
        batch = recipe.get("batch", {})
        attempts = f"{batch.get('prompts_per_step', '?')} prompts × {batch.get('group_size', '?')} attempts a step"
        facts = [str(recipe["model"]["path"]), _estimator(recipe).upper(), attempts, f"seed {recipe.get('seed', 0)}"]
    if forked:
        run, step, changed = forked
        named = ", ".join(list(changed)[:4]) + (" and more" if len(changed) > 4 else "")
        facts.append(f"forked from {Path(run).name} after step {step}{f', with another {named}' if named else ''}")
    tiles = _tiles(rows, summaries, warm)
    return document(name, facts, health + tiles, sections, album.definitions())


def render_episode(directory: RunDirectory, row: Mapping[str, Any]) -> str:
    """A page of one logged episode that needs no other file."""
    task, episode = task_from_json(row["task"]), episode_from_json(row["episode"])
    store = StoredMedia(directory.media)
    decoder = Decoder(store, memory_mib=DECODED_MIB)
    try:
        judged = directory.path / TRANSCRIPTS
        album = Album(store, EPISODE_BYTES, decoder, clip_bytes=EPISODE_BYTES, judged=judged)
        card = episode_card(task, episode, album, credit_from_json(row, episode), f"step {row['step']}")
    finally:
        decoder.close()
    return document(episode.id, [], "", [f'<div class="cards">{card}</div>'], album.definitions())


def document(name: str, facts: Sequence[str], head: str, sections: Sequence[str], definitions: str = "") -> str:
    """A page with the style and the script of all our pages."""
    style, script = ((ASSETS / file).read_text() for file in ("report.css", "report.js"))
    line = "".join(f"<span>{escape(fact)}</span>" for fact in facts)
    return (
        f'<!doctype html>\n<html lang="en"><head><meta charset="utf-8">{_policy(script)}'
        f"<title>{escape(name)} · Sensorium</title>"
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<style>{style}</style></head>\n<body>{definitions}"
        f'<header class="top"><h1>{escape(name)}</h1><p class="facts">{line}</p>{head}</header>'
        f"<main>{''.join(sections)}</main>"
        f"<footer>Sensorium {__version__}</footer>\n<script>{script}</script></body></html>\n"
    )


def _policy(script: str) -> str:
    """Content security policy: only the page's own script, and media of the page and the folder beside it.

    Opened as a file, a page has no origin in some browsers, so ``file:`` is listed too. Inline styles can load nothing.
    """
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode()
    media = "'self' file: data:"
    rules = (
        f"default-src 'none'; script-src 'sha256-{digest}'; style-src 'unsafe-inline'; img-src {media}; media-src {media}; "
        "base-uri 'none'; form-action 'none'"
    )
    return f'<meta http-equiv="Content-Security-Policy" content="{rules}">'


def section(title: str, kind: str, body: str) -> str:
    """A section of a page; empty without a body."""
    return f'<section class="{kind}"><h2>{escape(title)}</h2>{body}</section>\n' if body else ""


def _tiles(rows: Sequence[Mapping[str, Any]], summaries: Sequence[Mapping[str, Any]], warm: int) -> str:
    tiles = []
    for found in _widest_first(summaries)[:1]:
        stages = _stages_of(found, warm)
        stage, last = stages[-1] if stages else ("", {})
        if last.get("accuracy") is not None:
            was = "".join(f"from {share(s['accuracy'])}" for _, s in stages[-2:-1] if s.get("accuracy") is not None)
            since = "since RL began; " if was and warm and stage == "after RL" else ""
            interval = f"{since}95 % interval {interval_text(last)}" if last.get("interval") else since
            chance = f"; majority answer {escape(majority)}" if (majority := majority_text(last)) else ""
            tiles.append(tile("held-out accuracy", share(last["accuracy"]), was, interval + chance))
    rewards = [row["reward/mean"] for row in rows if "reward/mean" in row]
    if len(rewards) == 1:
        tiles.append(tile("mean reward", f"{rewards[0]:.3f}", "", "one step"))
    elif rewards:
        count = min(5, len(rewards) // 2)
        early, late = sum(rewards[:count]) / count, sum(rewards[-count:]) / count
        below = f"first and last {count} steps" if count > 1 else "first and last step"
        tiles.append(tile("mean reward", f"{late:.3f}", f"from {early:.3f}", below))
    if rows:
        seconds = sum(row.get("time/step_s", 0.0) for row in rows)
        episodes = sum(row.get("throughput/episodes_per_s", 0.0) * row.get("time/step_s", 0.0) for row in rows)
        tiles.append(tile("steps", f"{rows[-1]['step']:,}", "", f"{round(episodes):,} episodes" if episodes else ""))
        if seconds:
            a_second = episodes / seconds
            rate = f"{a_second:{',.0f' if a_second >= 10 else '.2g'}} episodes a second" if episodes else ""
            tiles.append(tile("training time", duration(seconds), "", rate))
    return f'<div class="tiles">{"".join(tiles)}</div>' if tiles else ""


def tile(name: str, value: str, beside: str, below: str) -> str:
    """A number in large type."""
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
    total = sum(found.counts.values()) or 1
    kinds = [(kind, count) for kind in get_args(Kind) if (count := found.counts.get(kind, 0))]
    bar = "".join(f'<i class="{kind.split()[0]}" style="flex-grow:{count}"></i>' for kind, count in kinds)
    keys = "".join(f'<span class="{kind.split()[0]}"><i></i>{kind} <b>{count}</b></span>' for kind, count in kinds)
    first = f"at step {found.first}{', where RL began,' if warm and found.first == warm else ''}"
    words = f"{total} held-out questions {first} and at step {found.last}; examples of each kind, chosen by rule."
    if found.samples > 1:
        words += f" Of the {found.samples} samples of a question the first is compared: the counts are not the accuracy."
    tally = f'<div class="tally"><div class="tally-bar">{bar}</div><div class="tally-keys">{keys}</div></div>'
    return f'<p class="note">{words}</p>{tally}<div class="cards">{cards}</div>'


def _estimator(recipe: Mapping[str, Any]) -> str:
    return str(recipe.get("algorithm", {}).get("advantage", {}).get("name", "grpo"))


def _demonstrations(recipe: Mapping[str, Any], album: Album) -> str:
    """What a warm start read, as far as the recording is still there: its facts and its first episodes."""
    section = recipe.get("warm_start") or {}
    if not section.get("demonstrations") or not section.get("steps"):
        return ""
    try:
        rows = DemonstrationRows(Path(str(section["demonstrations"])).expanduser(), album.decoder.store)
        cards = "".join(demonstration_card(task, episode, album) for task, episode in episodes_of(rows, DEMONSTRATIONS))
        note = ". ".join(rows.summary.lines)
    except (SensoriumError, OSError) as error:
        cards, note = "", f"The demonstrations that the warm start read cannot be shown: {error}"
    return f'<p class="note">{escape(note)}</p><div class="cards">{cards}</div>'


def _groups(directory: RunDirectory, album: Album, each: int, estimator: str) -> str:
    found = training_groups(directory, each)
    if not found:
        return ""
    note = "Attempts at one question are compared with each other: those above the group’s mean reward become more likely."
    if estimator_traits(estimator).critic:
        note = "Each attempt is compared with what the critic expected of it: what turns out better becomes more likely."
    if any(credit.advantages for logged in found for credit in logged.credits.values()):
        note += " The advantage says how much: above 0 (green) tokens were made likelier, below 0 (red) less likely."
    cards = "".join(group_card(logged, album) for logged in found)
    return f'<p class="note">{note}</p><div class="cards">{cards}</div>'
