"""Where each schedule stops scaling, simulated on 2 to 1,024 GPUs: the table and the picture of docs/guides/scaling.md.

python bench/scaling.py docs/guides/scaling.svg      writes the picture, prints the table; three minutes on one core
"""

import math
import sys
from dataclasses import dataclass
from pathlib import Path

from sensorium.forecast.costs import Costs, StepWork, costs_of, kinds, machine, published_configs
from sensorium.forecast.simulator import Deployment, ScheduleName, SimulatedRun, simulate
from sensorium.recipe.model_shape import shape_by_config

MODEL, KIND = "Qwen2.5-VL-7B", "h200"
WORK = StepWork(prompts=512, group=16, prompt=600, response=1000, tail=8.0, patches=2400)
SCORING_S = 5.0
GPUS = (2, 8, 32, 128, 512, 1024)
SHARES = (1 / 4, 1 / 2, 3 / 4)
STEPS = 3


@dataclass(frozen=True)
class Curve:
    """A schedule to simulate. ``pushed``: weights go through a file, as they do today, or nowhere (to show its price)."""

    name: str
    schedule: ScheduleName
    staleness: int
    pushed: bool
    colour: str


CURVES = (
    Curve("synchronous", "synchronous", 0, True, "#2a6f97"),
    Curve("one_step_off", "one_step_off", 1, True, "#61a5c2"),
    Curve("asynchronous, 1 step old at most", "asynchronous", 1, True, "#c1440e"),
    Curve("asynchronous, 4 steps", "asynchronous", 4, True, "#e09f3e"),
    Curve("asynchronous, 4 steps, push for free", "asynchronous", 4, False, "#9a8c98"),
)
WIDTH, HEIGHT, LEFT, RIGHT, TOP, BOTTOM = 760, 380, 64, 250, 24, 46


@dataclass(frozen=True)
class Point:
    """The fastest division of so many GPUs."""

    curve: str
    gpus: int
    engines: int
    run: SimulatedRun


def best_point(curve: Curve, gpus: int, work: StepWork = WORK) -> Point:
    """Try some divisions of the GPUs into engines and ranks, and keep the fastest."""
    shape = shape_by_config(published_configs()[MODEL])
    costs = Costs(costs_of(shape, recompute="selective"), machine(kinds()[KIND]))
    pushed = shape.total * 2 if curve.pushed else 0.0
    tried = []
    for engines in sorted({min(gpus - 1, max(1, round(share * gpus))) for share in SHARES}):
        plan = Deployment(
            engines=engines, learners=gpus - engines, apart=True, schedule=curve.schedule, staleness=curve.staleness,
            scoring_s=SCORING_S, pushed_bytes=pushed,
        )  # fmt: skip
        tried.append(Point(curve.name, gpus, engines, simulate(costs, costs, work, plan, steps=STEPS)))
    return min(tried, key=lambda point: point.run.step_s)


def row(point: Point) -> str:
    """A row of the table."""
    run = point.run
    parts = (run.rollout_s, run.update_s, run.gather_s, run.push_s, run.other_s)
    shown = " | ".join(f"{part:.1f}" for part in parts)
    speed = f"{run.tokens_per_s:,.0f} | {run.tokens_per_s / point.gpus:,.0f}"
    busy = f"{run.engines_busy:.0%}, {run.learners_busy:.0%}"
    gpus = f"{point.gpus:,} | {point.engines} + {point.gpus - point.engines}"
    return f"| {gpus} | {run.step_s:.1f} | {speed} | {shown} | {busy} |"


def table(points: list[Point]) -> str:
    """All rows, by schedule."""
    lines = []
    for curve in CURVES:
        lines += [f"\n**{curve.name}**\n", "| GPUs | engines + ranks | step, s | tokens/s | a GPU | rollout | update |"]
        lines[-1] += " gather | push | other | engines, ranks busy |"
        lines += ["|" + "---|" * 11, *(row(point) for point in points if point.curve == curve.name)]
    return "\n".join(lines)


def draw(points: list[Point]) -> str:
    """Tokens a second against GPUs, both in powers of two."""
    right, bottom = WIDTH - RIGHT, HEIGHT - BOTTOM
    low, high = 3, math.ceil(math.log10(max(point.run.tokens_per_s for point in points)))

    def x(gpus: float) -> float:
        return LEFT + (right - LEFT) * math.log2(gpus / GPUS[0]) / math.log2(GPUS[-1] / GPUS[0])

    def y(speed: float) -> float:
        return bottom - (bottom - TOP) * (math.log10(speed) - low) / (high - low)

    parts = [f'<path d="M{LEFT} {TOP}V{bottom}H{right}" fill="none" stroke="#888"/>']
    parts += [f'<text x="{x(gpus):.0f}" y="{bottom + 16}" text-anchor="middle">{gpus:,}</text>' for gpus in GPUS]
    parts.append(f'<text x="{(LEFT + right) / 2:.0f}" y="{bottom + 36}" text-anchor="middle">GPUs (simulated)</text>')
    for power in range(low, high + 1):
        at = y(10**power)
        parts.append(f'<line x1="{LEFT}" x2="{right}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{LEFT - 6}" y="{at + 4:.1f}" text-anchor="end">{10**power:,}</text>')
    parts.append(f'<text x="{LEFT}" y="14">sampled tokens a second</text>')
    for i, curve in enumerate(CURVES):
        own = [(x(point.gpus), y(point.run.tokens_per_s)) for point in points if point.curve == curve.name]
        line = " ".join(f"{a:.1f},{b:.1f}" for a, b in own)
        parts.append(f'<polyline points="{line}" fill="none" stroke="{curve.colour}" stroke-width="2"/>')
        parts += [f'<circle cx="{a:.1f}" cy="{b:.1f}" r="3" fill="{curve.colour}"/>' for a, b in own]
        parts.append(f'<text x="{right + 12}" y="{TOP + 16 + 18 * i}" fill="{curve.colour}">{curve.name}</text>')
    size = f'width="{WIDTH}" height="{HEIGHT}"'
    head = f'<svg xmlns="http://www.w3.org/2000/svg" {size} font-family="sans-serif" font-size="12">'
    return "\n".join([head, '<rect width="100%" height="100%" fill="white"/>', *parts, "</svg>", ""])


def main() -> None:
    """Simulate, draw, print."""
    points = []
    for curve in CURVES:
        for gpus in GPUS:
            points.append(best_point(curve, gpus))
            print(row(points[-1]), file=sys.stderr, flush=True)
    Path(sys.argv[1]).write_text(draw(points))
    print(table(points))


if __name__ == "__main__":
    main()
