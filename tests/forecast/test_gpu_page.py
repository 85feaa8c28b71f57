"""docs/start/gpu.md shows a recipe that loads, and what its commands say of it."""

import json
import re
import shlex
from pathlib import Path

import pytest

from sensorium.cli.main import main

PAGE = (Path(__file__).parents[2] / "docs/start/gpu.md").read_text()
COMMANDS = re.findall(r"^sensorium plan (.*?) +# (.*)$", PAGE, re.MULTILINE)


@pytest.fixture(autouse=True)
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    Path("pictures.yaml").write_text(re.search(r"```yaml\n(.*?)```", PAGE, re.DOTALL)[1])


@pytest.mark.parametrize(("command", "told"), COMMANDS)
def test_a_command_says_what_the_page_says(command: str, told: str, capsys: pytest.CaptureFixture[str]) -> None:
    refused = main(["plan", *shlex.split(command), "--json"])
    out, err = capsys.readouterr()
    gib = re.search(r"[\d.]+ GiB", told)[0]
    if told.startswith("does not fit"):
        assert refused
        assert f"({gib})" in err.partition("Settings bring it down to")[2]
    else:
        assert gib == f"{json.loads(out)['rank']['total'] / (1 << 30):.1f} GiB"


def test_the_recipe_with_lora_is_planned(capsys: pytest.CaptureFixture[str]) -> None:
    (changes,) = re.findall(r"the same recipe and `([^`]*)`", PAGE)
    assert main(["plan", "pictures.yaml", *changes.split(), "--gpus", "1", "--kind", "h200"]) == 0
    assert len(COMMANDS) == 9
