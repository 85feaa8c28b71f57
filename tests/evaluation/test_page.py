"""The page about evaluation names every option there is and every field of a line, and no others."""

import re
from argparse import ArgumentParser
from pathlib import Path

import pytest

from sensorium.cli import compare, evaluate
from sensorium.evaluation.summary import row_of
from sensorium.vocabulary import EnvironmentSpec, Score, Task
from tests.evaluation.made import episode, sample

PAGE = (Path(__file__).parents[2] / "docs/guides/evaluation.md").read_text()


@pytest.mark.parametrize(("name", "command"), [("eval", evaluate), ("compare", compare)])
def test_the_usage_names_every_option(name: str, command: object) -> None:
    parser = ArgumentParser()
    command.configure(parser)  # type: ignore[attr-defined]
    known = {option for action in parser._actions for option in action.option_strings if option.startswith("--")}
    usage = re.search(rf"^(sensorium {name} .*?)(?=^sensorium|^```)", PAGE, re.DOTALL | re.MULTILINE)
    assert usage is not None
    told = set(re.findall(r"--[a-z-]+", usage.group(1)))
    assert told == known - {"--help", "--checkpoint"}  # the older name of --model


def test_every_field_of_a_line_is_told() -> None:
    (line,) = [line for line in PAGE.splitlines() if line.startswith("| `samples.jsonl`")]
    told = set(re.findall(r"`([a-zA-Z/]+)`", line))
    scored = episode("e", Score("NAME", None, reason="?"))
    task = Task("t", environment=EnvironmentSpec("environment"))
    failed = type(scored)(**{**vars(scored), "failure": "?"})
    row = row_of(sample(0, terms={"NAME": 1.0}, votes=True), task, failed, 0)
    assert told == row.keys(), told ^ row.keys()
