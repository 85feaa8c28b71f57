"""Episode logs stay within their bounds, and a run that was killed and resumed ends with the same files."""

from pathlib import Path

from hypothesis import given, settings
from hypothesis import strategies as st

from sensorium.runs.durable import to_line
from sensorium.runs.episodes import Retention
from sensorium.runs.run_directory import RunDirectory, step_of

GROUPS, MEMBERS = 3, 2


def write_step(run: RunDirectory, step: int, evaluation: bool = False) -> None:
    rows = [{"step": step, "episode": {"group_id": f"{step}/{g}"}} for g in range(GROUPS * 5) for _ in range(MEMBERS)]
    lines = [to_line(row) for row in rows]
    run.episodes_of(step).write_text("".join(lines[: GROUPS * MEMBERS]))
    if evaluation:
        run.eval_episodes_of(step).write_text("".join(lines))


def sizes(run: RunDirectory) -> dict[int, int]:
    return {step_of(path): len(path.read_text().splitlines()) for path in sorted(run.episodes.glob("*"))}


def play(run: RunDirectory, retention: Retention, first: int, last: int) -> list[str]:
    notes = []
    for step in range(first, last + 1):
        write_step(run, step, evaluation=step % 2 == 0)
        notes += retention.apply(step)
    return notes


def test_recent_steps_are_whole_and_older_ones_thin_out_evenly(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    assert play(run, Retention(run, 5, 4, 1 << 30), 1, 25) == []
    whole, sample = GROUPS * MEMBERS, MEMBERS
    assert sizes(run) == {1: whole, 8: sample, 16: sample} | dict.fromkeys(range(21, 26), whole)


def test_nothing_is_thinned_where_all_steps_are_to_stay(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    play(run, Retention(run, 0, 4, 1 << 30), 1, 25)
    assert list(sizes(run).values()) == [GROUPS * MEMBERS] * 25


def test_the_first_and_the_last_evaluations_are_whole(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    play(run, Retention(run, 5, 4, 1 << 30), 1, 60)
    logs = [len(path.read_text().splitlines()) for path in sorted(run.eval.glob("*.jsonl"))]
    assert logs == [30, *[16] * 9, *[30] * 20]


def test_within_a_budget_the_oldest_go_and_it_is_said_once(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    write_step(run, 1)
    one = run.episodes_of(1).stat().st_size
    retention = Retention(run, 0, 0, 6 * one)
    notes = []
    for step in range(1, 21):
        write_step(run, step)
        notes += retention.apply(step)
    assert sum(path.stat().st_size for path in run.episodes.glob("*")) <= 6 * one
    assert min(sizes(run)) == 1, "the first step is kept to compare with"
    assert max(sizes(run)) == 20
    assert len(notes) == 1
    assert "logging.episodes_gib" in notes[0]


@settings(max_examples=15)
@given(
    full=st.integers(1, 6), sampled=st.integers(0, 6), budget=st.integers(600, 6000),
    killed=st.integers(2, 30), back=st.integers(0, 12),
)  # fmt: skip
def test_a_killed_and_resumed_run_ends_with_the_same_files(
    tmp_path_factory, full: int, sampled: int, budget: int, killed: int, back: int
) -> None:
    found = []
    for interrupted in (False, True):
        run = RunDirectory(tmp_path_factory.mktemp("run")).create()
        bounds = (full, sampled, budget)
        if interrupted:
            play(run, Retention(run, *bounds), 1, killed)
            checkpoint = max(0, killed - back)
            run.drop_after(checkpoint)
            play(run, Retention(run, *bounds), checkpoint + 1, 30)
        else:
            play(run, Retention(run, *bounds), 1, 30)
        found.append({path.relative_to(run.path): path.read_bytes() for path in sorted(run.path.rglob("*.jsonl"))})
    assert found[0] == found[1]


def test_a_damaged_log_stays_and_is_named(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path).create()
    retention = Retention(run, 2, 9, 1 << 30)
    play(run, retention, 1, 3)
    run.episodes_of(2).write_text('{"step": 2, "episode": {"group_id"\n{}\n')
    notes = play(run, retention, 4, 6)
    assert len(notes) == 1
    assert "step_000002.jsonl' is damaged" in notes[0]
