"""``sensorium cluster status RUN``: the processes of a run, what each does, and when that was last seen."""

import socket
import time
from argparse import ArgumentParser, Namespace
from pathlib import Path

from rich.table import Table

from sensorium.recipe.plan import placed_processes
from sensorium.recipe.yaml import read_yaml
from sensorium.report.terminal import Terminal, say
from sensorium.runs.process_table import ProcessRow, RunProcesses, alive, process_state, read_processes
from sensorium.runs.run_directory import RunDirectory, last_holder
from sensorium.vocabulary.errors import RecordError

LATE_S = 60.0


def configure(parser: ArgumentParser) -> None:
    parser.add_argument("what", choices=["status"], help="what each process does, and when that was last seen")
    parser.add_argument("directory", type=Path, help="of a run that goes on or is over: runs/NAME")


def run(arguments: Namespace) -> int:
    """Print the status of a run's processes; 1 if one is missing, or the run ended before its last step."""
    directory = arguments.directory
    if not RunDirectory(directory).exists():
        raise RecordError(RunDirectory(directory).absence())
    found, console = read_processes(directory), Terminal()
    holder = last_holder(directory)
    drivers = [row.pid for row in found.rows if row.part == "driver"] if found is not None else []
    # another driver has been started since, and has not written anything yet
    restarted = holder and holder[1] == socket.gethostname() and alive(holder[0]) and holder[0] not in drivers
    if found is None or restarted:
        text, code = _without_processes(directory)
        say(text, console)
        return code
    table = Table("part", "pid", "state", "does", "weights", "restarts", title=_headline(found))
    for row in found.rows:
        version = "" if row.version < 0 else str(row.version)
        table.add_row(row.part, str(row.pid or ""), _state(row, found), row.does, version, str(row.restarts))
    console.print(table)
    if problem := _early_end(found):
        say(problem, console)
        say(RunDirectory(directory).how_to_continue(), console)
    return int(bool(problem) or (not found.ended and any(_state(row, found) == "gone" for row in found.rows)))


def _early_end(found: RunProcesses) -> str:
    if found.end is not None:
        texts = {"finished": "", "stopped": "The run was stopped before its end."}
        return texts.get(found.end.how, f"The run failed: {found.end.cause}")
    gone = [row.pid for row in found.rows if row.part == "driver" and _state(row, found) == "gone"]
    how = "did not record how the run ended: it was killed, stopped while it started, or could not write (a full disk)"
    return f"The driver, process {gone[0]}, is gone and {how}." if gone else ""


def _without_processes(directory: Path) -> tuple[str, int]:
    recipe, _ = read_yaml((directory / "recipe.yaml").read_text(), str(directory / "recipe.yaml"))
    parts = placed_processes(recipe) if isinstance(recipe, dict) else ()
    holder, listed = last_holder(directory), ", ".join(parts)
    again = RunDirectory(directory).how_to_continue()
    if not parts:
        text = (
            f"'{directory}' is a run of one process: learner and engine are the driver's own, and there is nothing beside "
            "it. cluster.learners, cluster.engines or rollout.engine: process give it others."
        )
        if holder is None:  # it released the run directory when it ended
            return text, 0
        if holder[1] != socket.gethostname() or alive(holder[0]):
            return f"{text}\nIt goes on: process {holder[0]} on {holder[1]}.", 0
        gone = f"Its process, {holder[0]}, is gone and did not record how the run ended: it was killed."
        return f"{text}\n{gone}\n{again}", 1
    if holder is None or (holder[1] == socket.gethostname() and not alive(holder[0])):
        return f"'{directory}' ended before its processes were up ({listed}).\n{again}", 1
    return f"'{directory}' starts: process {holder[0]} on {holder[1]} waits for its processes to be up ({listed}).", 0


def _headline(found: RunProcesses) -> str:
    age = time.time() - found.written
    late = " (late: it hangs, or was killed)" if age > LATE_S and not found.ended else ""
    what = f"last heartbeat {age:.0f} s ago{late}"
    if found.ended:
        what = "ended" if found.end is None else {"stopped": "stopped before its end"}.get(found.end.how, found.end.how)
    return f"step {found.step}{f' of {found.steps}' if found.steps else ''} on {found.host}, {what}"


def _state(row: ProcessRow, found: RunProcesses) -> str:
    if found.ended:
        return "ended"
    if row.lost:
        return "gone"
    if not found.here:
        return "not seen from here"
    if row.pid is None:
        return "starts"
    if process_state(row.pid) == "T":
        return "stopped"  # by a signal: it waits for SIGCONT
    return "alive" if alive(row.pid) else "gone"
