"""docs/guides/scaling.md shows what its command computes, and its commands are ours."""

import re
import runpy
import shlex
from pathlib import Path
from xml.etree import ElementTree

from sensorium.cli import plan
from sensorium.cli.main import Parser
from sensorium.recipe.load import load_recipe

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/guides/scaling.md").read_text()


def test_a_row_of_the_page_is_what_the_simulator_says() -> None:
    scaling = runpy.run_path(str(ROOT / "bench/scaling.py"))
    (synchronous,) = [curve for curve in scaling["CURVES"] if curve.name == "synchronous"]
    found = scaling["best_point"](synchronous, 32)
    shown = re.search(r"^\| synchronous \|(.*)\|$", PAGE, re.MULTILINE)[1].split("|")
    run = found.run
    assert shown[2].strip() == f"{run.step_s:.1f} ({run.tokens_per_s / 32:,.0f})"
    parts = " | ".join(f"{part:.1f}" for part in (run.rollout_s, run.update_s, run.gather_s, run.push_s, run.other_s))
    assert f"| synchronous, 32 | {found.engines} + {32 - found.engines} | {parts} |" in PAGE


def test_the_picture_has_a_curve_for_each_schedule() -> None:
    picture = ElementTree.parse(ROOT / "docs/guides/scaling.svg").getroot()
    lines = [part for part in picture if part.tag.endswith("}polyline")]
    assert len(lines) == 5
    assert all(len(line.get("points").split()) == 6 for line in lines)


def test_the_commands_of_the_page_are_ours() -> None:
    commands = [line for line in PAGE.splitlines() if line.startswith("sensorium plan ")]
    assert len(commands) == 2
    for line in commands:
        parser = Parser(prog="sensorium plan", allow_abbrev=False)
        plan.configure(parser)
        given = parser.parse_intermixed_args(shlex.split(line)[2:])
        assert load_recipe(given.recipe, given.overrides).name == given.recipe
