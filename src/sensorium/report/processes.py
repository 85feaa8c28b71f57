"""The processes of a run on its page: which there were, who waited for whom, how old episodes were, who was replaced."""

from collections.abc import Iterator, Mapping, Sequence
from html import escape
from itertools import pairwise
from typing import Any

from sensorium.recipe.processes import placed_by, placed_processes, section_name
from sensorium.report.run_charts import Rows, chart_grid, metric_series
from sensorium.report.svg import Axis
from sensorium.report.tables import share

WAITS = {
    "wait/learner_for_episodes_s": "learner for episodes",
    "wait/learner_for_scores_s": "learner for scores",
    "wait/engine_for_learner_s": "engines for the learner",
}
LOSSES = {
    "engine/replaced": "engines replaced",
    "engine/restarts": "vLLM started again",
    "engine/sampled_again": "responses sampled again",
    "worker/environment_replaced": "environment workers replaced",
    "worker/rolled_again": "episodes rolled again",
    "worker/reward_replaced": "reward workers replaced",
    "worker/asked_again": "scores asked again",
    "worker/given_up": "scores given up",
}
"""Counts since the run began, or was resumed."""
AGE = "staleness/share_"
STEPS_NAMED = 12


def processes_section(recipe: Mapping[str, Any], rows: Rows, axis: Axis) -> str:
    """Nothing for a run of one process with the synchronous schedule: there one part of a step follows the other."""
    schedule = section_name(recipe.get("schedule"), "synchronous")
    parts = placed_processes(recipe)
    if not parts and schedule == "synchronous":
        return ""
    placed = placed_by(recipe) if parts else ""
    words = f"The driver{', ' if parts else ' alone'}{', '.join(parts)}{placed}. Schedule: {schedule.replace('_', ' ')}."
    waits = [metric_series(name, metric, rows, colour) for colour, (metric, name) in enumerate(WAITS.items())]
    ages = [metric_series(name, f"staleness/{name}", rows, colour) for colour, name in enumerate(("mean", "max"))]
    shares = [metric_series("effective share", "mismatch/effective_share", rows)]
    wanted = {"Seconds of a step in which one waited": waits, "Age of what was trained on, in updates": ages}
    wanted |= {"Share of the tokens that counts, in effect": shares} if any(one.points for one in ages) else {}
    drawn = chart_grid(list(wanted.items()), axis)
    return f'<p class="note">{escape(words)} {escape(_waited(rows))}</p>{drawn}{_table([*_ages(rows), *_losses(rows)])}'


def _waited(rows: Rows) -> str:
    """Who waited how much of the time, in all."""
    whole = sum(row.get("time/step_s", 0.0) for row in rows if any(metric in row for metric in WAITS))
    if not whole:
        return ""
    told = [f"{name} {share(sum(row.get(metric, 0.0) for row in rows) / whole)}" for metric, name in WAITS.items()]
    return f"Of the time of all steps waited: {', '.join(told)}."


def _ages(rows: Rows) -> Iterator[tuple[str, str]]:
    """The mean share of the tokens of each age, over the steps that tell it."""
    names = sorted({name for row in rows for name in row if name.startswith(AGE)}, key=lambda name: int(name[len(AGE) :]))
    told = sum(any(name in row for name in names) for row in rows)
    for name in names:
        age = int(name[len(AGE) :])
        yield f"tokens {age} update{'' if age == 1 else 's'} old", share(sum(row.get(name, 0.0) for row in rows) / told)


def _losses(rows: Rows) -> Iterator[tuple[str, str]]:
    """What was replaced and done again, and at which steps."""
    told = [(name, _growth(rows, metric)) for metric, name in LOSSES.items()]
    for name, grown in told:
        if grown:
            named = ", ".join(str(step) for step, _ in grown[:STEPS_NAMED]) + (", …" if len(grown) > STEPS_NAMED else "")
            yield name, f"{sum(more for _, more in grown):,.0f}, at step{'s' if len(grown) > 1 else ''} {named}"
    if not any(grown for _, grown in told) and any(metric in row for row in rows for metric in LOSSES):
        yield "replaced or done again", "nothing"


def _growth(rows: Rows, metric: str) -> list[tuple[int, float]]:
    """The steps at which a count grew, and by how much; the counts of a resumed run begin anew."""
    counts = [(0, 0.0), *((int(row["step"]), float(row[metric])) for row in rows if metric in row)]
    grown = [(step, now - (before if now >= before else 0.0)) for (_, before), (step, now) in pairwise(counts)]
    return [(step, more) for step, more in grown if more > 0]


def _table(lines: Sequence[tuple[str, str]]) -> str:
    rows = "".join(
        f'<tr class="part"><th scope="row">{escape(name)}</th><td>{escape(what)}</td></tr>' for name, what in lines
    )
    return f'<div class="scroll"><table><tbody>{rows}</tbody></table></div>' if rows else ""
