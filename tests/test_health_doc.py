"""docs/reference/health.md lists every rule by its own words, and the settings as they are."""

from pathlib import Path

from sensorium.recipe.schema import HealthSection
from sensorium.trainer.health.monitor import CLEAR_STEPS, FIRST_REMINDER
from sensorium.trainer.health.rules import RULES

PAGE = (Path(__file__).parents[1] / "docs/reference/health.md").read_text()


def test_every_rule_is_listed_by_the_first_line_of_its_docstring() -> None:
    for rule in RULES:
        assert f"| `{rule.name}` | {(rule.judge.__doc__ or '').splitlines()[0]} |" in PAGE


def test_the_settings_told_are_the_defaults() -> None:
    section = HealthSection()
    assert f"`health.stop_after` steps in a row (default {section.stop_after}; 0: never)" in PAGE
    assert f"(default {section.sight_tasks}, evenly spread; 0: no check)" in PAGE
    assert f"again after {FIRST_REMINDER}, {2 * FIRST_REMINDER}," in PAGE
    assert f"not been found for {CLEAR_STEPS}\nsteps" in PAGE
