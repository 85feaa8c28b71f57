"""A run's stages as its report tells of them: where the warm start ends, and which evaluations stand before and after."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from sensorium.report.tables import interval_text, share

Summary = Mapping[str, Any]


def warm_steps(recipe: Mapping[str, Any]) -> int:
    """How many steps of a run are supervised, by its recipe."""
    section = recipe.get("warm_start") or {}
    return int(section.get("steps", 0))


@dataclass(frozen=True)
class Stage:
    """One evaluation, under the name of the moment at which it was made."""

    name: str
    summary: Summary


def stages_of(found: Sequence[Summary], warm: int) -> list[Stage]:
    """The first evaluation, that at the end of the warm start, and the last; those that a run has."""
    if not warm:
        return [Stage(name, summary) for name, summary in (("before", found[0]), ("after", found[-1]))][: len(found)]
    stages = [Stage("at start", summary) for summary in found[:1] if summary["step"] < warm]
    stages += [Stage("after warm start", summary) for summary in found if summary["step"] == warm]
    return stages + [Stage("after RL", summary) for summary in found[-1:] if summary["step"] > warm]


def by_name(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The summaries of each evaluation in order of steps; the one made most often, the main one, first."""
    found: dict[str, list[Summary]] = {}
    for summary in summaries:
        found.setdefault(summary["name"], []).append(summary)
    known = ["eval", "sampled", "greedy"]
    return sorted(found.values(), key=lambda of: (-len(of), known.index(of[0]["name"]) if of[0]["name"] in known else 9))


def widest_first(summaries: Sequence[Summary]) -> list[list[Summary]]:
    """The same, the evaluation of most tasks first: it has the say."""
    return sorted(by_name(summaries), key=lambda of: -_size(of[-1]))


def stage_table(summaries: Sequence[Summary], warm: int) -> str:
    """Accuracy stage by stage, by evaluation and by category, as a table with bars; the change is the last stage's own.

    Where nothing is right or wrong it is the mean reward.
    """
    paid = all(summary.get("accuracy") is None for summary in summaries)
    rows: list[str] = []
    heads: tuple[str, ...] = ()
    for i, found in enumerate(found for found in widest_first(summaries) if len(found) > 1):
        stages = stages_of(found, warm)
        if i == 0:
            heads = tuple(stage.name for stage in stages)
        if tuple(stage.name for stage in stages) != heads or len(stages) < 2:
            continue
        parts = [stage.summary for stage in stages]
        rows.append(_row(str(parts[-1]["name"]), parts, heads, "whole", paid))
        for name in parts[-1].get("categories", {}) if i == 0 else ():
            rows.append(_row(name, [part.get("categories", {}).get(name, {}) for part in parts], heads, "part", paid))
    if not rows:
        return ""
    change = {"after RL": "change by RL", "after warm start": "change by it"}.get(heads[-1], "change")
    head = "".join(f"<th>{name}</th>" for name in ("", *heads, change, "n"))
    accuracy = "Accuracy on held-out tasks, with its 95 % interval."
    reward = "Mean reward on held-out tasks; no reward term says right or wrong."
    note = f'<p class="note">{reward if paid else accuracy}</p>'
    return f'{note}<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{"".join(rows)}</tbody></table></div>'


def _row(name: str, parts: Sequence[Summary], heads: Sequence[str], kind: str, paid: bool) -> str:
    old, new = (part.get("reward" if paid else "accuracy") for part in parts[-2:])
    change = "–" if old is None or new is None else f"{new - old:+.3f}" if paid else f"{100 * (new - old):+.1f}"
    trend = "" if old is None or new is None or abs(new - old) < 0.02 else ("up" if new > old else "down")
    cells = "".join(f'<td data-stage="{head}">{_bar(part, paid)}</td>' for part, head in zip(parts, heads, strict=True))
    return (
        f'<tr class="{kind}"><th scope="row">{escape(name)}</th>{cells}'
        f'<td class="change {trend}">{change}</td><td class="n">{_size(parts[-1]) or "–"}</td></tr>'
    )


def _bar(part: Summary, paid: bool) -> str:
    if paid and part.get("reward") is not None:
        return f'<span class="share">{part["reward"]:.3f}</span>'
    accuracy = part.get("accuracy")
    if accuracy is None:
        return "–"
    interval = f' <span class="interval">{interval_text(part)}</span>' if part.get("interval") else ""
    return f'<span class="bar" style="--share:{accuracy:.4f}"></span><span class="share">{share(accuracy)}</span>{interval}'


def _size(part: Summary) -> int:
    return int(part.get("tasks", part.get("episodes", 0)))
