"""No data commands the terminal: control characters are printed as escapes, colours and progress bars stay."""

import io
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console
from rich.table import Table

from sensorium.report.terminal import GuardedStream, Terminal, visible

CLIPBOARD = "\x1b]52;c;aGFja2Vk\x07"
HOSTILE = (CLIPBOARD, "\x9b2J", "\x1b[8m", "a\rb", "\u202egpj.exe", "\x1bP1;2q\x1b\\", "\x00")


@pytest.mark.parametrize("text", HOSTILE)
def test_control_characters_are_visible_however_they_are_printed(text: str) -> None:
    stream = io.StringIO()
    console = Terminal(file=stream, width=200, force_terminal=True, color_system=None)
    console.print(text, markup=False)
    table = Table("path")
    table.add_row(text)
    console.print(table)
    assert not any(
        code in stream.getvalue() for code in ("\x1b]", "\x1bP", "\x1b[8m", "\x9b", "\x07", "\r", "\u202e", "\x00")
    )
    assert visible("tab\tand\nline, ü 猫") == "tab\tand\nline, ü 猫"


def test_colours_of_the_console_itself_still_reach_the_terminal() -> None:
    stream = io.StringIO()
    console = Terminal(file=stream, force_terminal=True, color_system="standard")
    console.print("red \x1b[0m", style="red", highlight=False)
    assert stream.getvalue().startswith("\x1b[31mred \\x1b[0m\x1b[0m")


def test_a_guarded_stream_lets_progress_bars_through_and_rich_past_it() -> None:
    stream = io.StringIO()
    guarded = GuardedStream(stream)
    assert guarded.write("\r\x1b[34m50 %\x1b[0m\x1b[K" + CLIPBOARD) == len("\r\x1b[34m50 %\x1b[0m\x1b[K" + CLIPBOARD)
    assert stream.getvalue() == "\r\x1b[34m50 %\x1b[0m\x1b[K" + r"\x1b]52;c;aGFja2Vk\x07"
    rich = Console(file=guarded, force_terminal=True, color_system="standard")  # type: ignore[arg-type]
    rich.print("x", style="red", highlight=False)
    assert stream.getvalue().endswith("\x1b[31mx\x1b[0m\n")


@pytest.mark.usefixtures("forked_python")
@pytest.mark.parametrize("command", ["validate", "train"])
def test_a_hostile_path_in_a_row_reaches_no_terminal(tmp_path: Path, command: str) -> None:
    row = {"id": f"t{CLIPBOARD}", "messages": [{"role": "user", "content": [
        {"type": "image", "path": f"cat{CLIPBOARD}.png"}, {"type": "text", "text": "?"}]}], "answer": "a"}  # fmt: skip
    (tmp_path / "rows.jsonl").write_text(json.dumps(row) + "\n")
    (tmp_path / "own.yaml").write_text(
        f"name: own\nsteps: 1\nmodel: {{path: 'tiny:qwen3_vl'}}\nrewards: {{terms: [{{name: exact}}]}}\n"
        f"tasks: {{train: [{{source: jsonl, options: {{path: {tmp_path / 'rows.jsonl'}}}}}]}}\n"
    )
    done = subprocess.run(
        [sys.executable, "-m", "sensorium", command, "own.yaml"],
        cwd=tmp_path,
        env={**os.environ, "FORCE_COLOR": "1"},
        capture_output=True,
        text=True,
    )
    printed = done.stdout + done.stderr
    assert done.returncode != 0
    assert "cat" in printed
    assert "\x1b]" not in printed
    assert "\x07" not in printed


def test_tracebacks_and_warnings_are_guarded(tmp_path: Path) -> None:
    code = (
        "import warnings, sensorium.cli.main as program\n"
        f"def fail(): warnings.warn({CLIPBOARD!r}); print({CLIPBOARD!r}); raise ValueError({CLIPBOARD!r})\n"
        "program.main = fail\n"
        "program.entry()"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert "\x07" not in done.stdout + done.stderr
    assert (done.stdout + done.stderr).count(r"\x1b]52") >= 3
