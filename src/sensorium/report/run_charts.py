"""The charts of a run. All have the same axis of steps, with a line where the warm start ends and RL begins."""

from collections.abc import Mapping, Sequence
from typing import Any

from sensorium.report.stages import by_name
from sensorium.report.svg import Axis, Series, line_chart

Rows = Sequence[Mapping[str, Any]]
DETAILS = {
    "policy/entropy": "entropy",
    "policy/grad_norm": "gradient norm",
    "policy/kl_ref": "KL to the start",
    "policy/clip_fraction": "clipped share",
    "value/loss": "loss of the critic",
    "value/explained_variance": "variance that the critic explains",
    "mismatch/kl": "KL of engine and learner",
    "groups/zero_variance": "groups of equal reward",
    "episodes/length_mean": "tokens an episode",
    "episodes/turns_mean": "turns an episode",
    "throughput/episodes_per_s": "episodes a second",
}


def step_axis(rows: Rows, summaries: Rows, warm: int) -> Axis:
    """From the first step of anything to the last; divided where RL begins."""
    steps = [float(one["step"]) for one in (*rows, *summaries)] or [0.0]
    divided = 0 < warm < max(steps)
    return Axis(min(steps), max(steps), warm if divided else None)


def learning_charts(rows: Rows, summaries: Rows, axis: Axis) -> str:
    """Reward, accuracy in training with the held-out ones, and every term by its name."""
    accuracy = [metric_series("training", "accuracy", rows, colour=1), *_held_out(summaries)]
    terms = [name for name in dict.fromkeys(key for row in rows for key in row) if name.startswith("reward/")]
    by_term = [
        metric_series(name.removeprefix("reward/"), name, rows, colour=(0, 3, 2, 4, 5)[i % 5])
        for i, name in enumerate(term for term in terms if term != "reward/mean")
    ]
    wanted = [
        ("Reward", [metric_series("mean reward", "reward/mean", rows)]),
        ("Accuracy", accuracy),
        ("Reward by term", by_term if len(by_term) > 1 else []),
        ("Loss of the warm start", [_warm_loss(rows)]),
    ]
    return chart_grid(wanted, axis)


def chart_grid(wanted: Sequence[tuple[str, Sequence[Series]]], axis: Axis) -> str:
    """Charts side by side, those without a point left out; the last of an odd number takes the page's whole width."""
    charts = [(title, series) for title, series in wanted if any(one.points for one in series)]
    wide = len(charts) if len(charts) % 2 else 0
    drawn = [line_chart(title, series, axis=axis, wide=i == wide) for i, (title, series) in enumerate(charts, start=1)]
    return f'<div class="charts">{"".join(drawn)}</div>' if drawn else ""


def detail_charts(rows: Rows, axis: Axis) -> str:
    """What to look at when something is odd, small."""
    charts = [
        line_chart(title, [metric_series(title, metric, rows, colour=0)], axis=axis, width=420, height=190)
        for metric, title in DETAILS.items()
        if sum(metric in row for row in rows) > 1
    ]
    return f'<div class="charts three">{"".join(charts)}</div>' if charts else ""


def _held_out(summaries: Rows) -> list[Series]:
    """Held-out accuracy over steps: of the main evaluation, and of others that were made more than twice."""
    curves = []
    for i, found in enumerate(by_name(summaries)):
        judged = [summary for summary in found if summary.get("accuracy") is not None]
        if judged and (i == 0 or len(judged) > 2):
            points = tuple((float(summary["step"]), float(summary["accuracy"])) for summary in judged)
            intervals = tuple(tuple(summary["interval"]) if summary.get("interval") else None for summary in judged)
            name = "held out" if i == 0 else f"held out, {judged[0]['name']}"
            curves.append(Series(name, points, 2 + i % 4, marks=True, intervals=intervals))
    return curves


def metric_series(name: str, metric: str, rows: Rows, colour: int = 0) -> Series:
    """A metric over the steps that have it."""
    return Series(name, tuple((float(row["step"]), float(row[metric])) for row in rows if metric in row), colour)


def _warm_loss(rows: Rows) -> Series:
    """The loss of steps that have no reward: those of the supervised stage."""
    return metric_series(
        "loss", "policy/loss", [row for row in rows if "groups/trained" not in row and "reward/mean" not in row], 4
    )
