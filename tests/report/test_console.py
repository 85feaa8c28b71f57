"""The console shows a run alive on a terminal, and in few plain lines elsewhere."""

import io
import math

import pytest
from rich.console import Console

from sensorium.recipe.plan import Plan
from sensorium.report import console as module
from sensorium.report.cards import first_group_lines
from sensorium.report.charts import chart, resample, smooth, sparkline
from sensorium.report.console import ConsoleWatcher, duration
from sensorium.report.tables import comparison_table, plan_table
from sensorium.report.watcher import RunStart, Watcher, Watchers
from sensorium.runs.metrics import Notice
from sensorium.vocabulary import Episode, Group, Media, Score, Segment, Status, Task, Thread, Turn, system, user
from sensorium.vocabulary.task import EnvironmentSpec

SUMMARY = {"name": "sampled", "accuracy": 0.5, "interval": [0.45, 0.55], "tasks": 512, "episodes": 512}


class Clock:
    """A clock that the test moves."""

    def __init__(self) -> None:
        self.now = 0.0

    def monotonic(self) -> float:
        return self.now


def watch(terminal: bool, steps: int, clock: Clock) -> str:
    """Play a run of a step a second before a console; returns everything it printed."""
    stream = io.TextIOWrapper(io.BytesIO(), encoding="utf-8", write_through=True)
    watcher = ConsoleWatcher(Console(file=stream, force_terminal=terminal, width=100, color_system=None))
    watcher.started(RunStart("demo", steps))
    watcher.evaluated(0, SUMMARY)
    for step in range(1, steps + 1):
        clock.now += 1
        watcher.phase(step, "rollout", 64)
        watcher.progress(32)
        watcher.stepped(
            step, {"reward/mean": 0.01 * step, "reward/exact": 0.5, "accuracy": 0.4, "throughput/episodes_per_s": 50.0}
        )
    watcher.evaluated(steps, SUMMARY | {"accuracy": 0.9, "interval": [0.85, 0.93]})
    watcher.finished()
    stream.seek(0)
    return stream.read()


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(module, "time", clock)
    return clock


def test_without_a_terminal_a_log_gets_few_plain_lines(clock: Clock) -> None:
    text = watch(terminal=False, steps=100, clock=clock)
    lines = text.splitlines()
    assert text.isascii()
    assert len(lines) <= 15
    assert lines[0] == "demo: 100 steps to go"
    assert lines[1] == "step 0: sampled accuracy 50.0 % [45.0 to 55.0]"
    assert lines[2] == "step 1/100  reward 0.010  accuracy 0.400  50.0 episodes/s"
    assert lines[-2].startswith("step 100/100  reward 1.000")
    assert lines[-1].startswith("step 100: sampled accuracy 90.0 %")


def test_on_a_terminal_the_last_state_shows_everything(clock: Clock) -> None:
    text = watch(terminal=True, steps=40, clock=clock)
    last = text[text.rindex("step 40 of 40") :]
    for part in ("reward 0.400", "accuracy 0.400", "exact 0.50", "50.0 % → 90.0 %", "[85.0–93.0]", "50 episodes/s"):
        assert part in last
    assert "⣀" in last or "⠤" in last or "⠒" in last


def test_a_slow_first_step_is_not_what_the_others_are_expected_to_take(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("demo", 11))
    said = []
    for step, seconds in ((1, 60), (2, 1), (3, 1)):
        clock.now += seconds
        watcher.stepped(step, {"reward/mean": 0.1})
        said.append(watcher._state.line().split("  ")[-1])
    assert said == ["reward 0.100", "0:09 left", "0:08 left"]


def test_steps_of_the_warm_start_do_not_forecast_those_of_rl(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("demo", 13, warm_start=3))
    said = []
    for step, seconds in ((1, 9), (2, 1), (3, 1), (4, 60), (5, 20)):
        clock.now += seconds
        watcher.stepped(step, {"policy/loss": 0.1})
        said.append(watcher._state.left)
    assert said == ["", "0:01 left of the warm start", "", "", "2:40 left"]


def test_an_evaluation_says_that_it_begins_and_how_far_it_is(clock: Clock) -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(Console(file=stream, width=100))
    watcher.started(RunStart("demo", 3))
    for phase, total in (("evaluate", 0), ("evaluate", 64), ("sight check", 32)):
        watcher.phase(1, phase, total)
        for done in (1, 16):
            clock.now += 6
            watcher.progress(done)
    lines = stream.getvalue().splitlines()[1:]
    assert [line for line in lines if line.endswith("...")] == [
        "step 0: evaluating the held-out tasks ...",
        "step 0: the sight check ...",
    ]
    assert "step 0: evaluate, 1 of 64 episodes" in lines
    assert "step 0: sight check, 16 of 32 episodes" in lines


def test_troubles_are_counted_over_the_run(clock: Clock) -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(Console(file=stream, width=100))
    watcher.started(RunStart("demo", 3))
    for step in (1, 2, 3):
        watcher.stepped(step, {"reward/mean": 0.1, "episodes/failed": 2, "episodes/dropped": 0})
    shown = Console(file=io.StringIO(), width=100, record=True)
    shown.print(watcher._state)
    text = shown.export_text()
    assert "6 episodes failed" in text
    assert "dropped" not in text


def test_a_bad_row_that_is_drawn_again_is_no_second_bad_row(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("demo", 3))
    for step in (1, 2):  # the same row in both
        watcher.stepped(step, {"reward/mean": 0.1, "tasks/skipped_bad": 1, "tasks/skipped_long": 2})
        assert "in this step: 1 skip of a bad row, 2 skips of long prompts" in watcher._state.line()
    shown = Console(file=io.StringIO(), width=100, record=True)
    shown.print(watcher._state)
    assert "2 skips of bad rows, 4 skips of long prompts" in shown.export_text()


def test_a_plain_line_counts_the_episodes_of_its_step_that_failed(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), force_terminal=False))
    watcher.started(RunStart("r", 9, episodes_per_step=32))
    watcher.stepped(1, {"throughput/episodes_per_s": 1.0, "episodes/failed": 32.0})
    assert "in this step: 32 episodes failed" in watcher._state.line()
    watcher.stepped(2, {"throughput/episodes_per_s": 1.0, "episodes/failed": 0.0})
    assert "failed" not in watcher._state.line()


def test_a_line_is_drawn_where_its_values_are() -> None:
    rising = chart([0.0, 1.0], width=10, height=4, low=0.0, high=1.0)
    assert len(rising) == 4
    assert all(len(row) == 10 for row in rising)
    assert rising[0][0] == "\u2800"
    assert rising[0][-1] != "\u2800"
    assert rising[-1][0] != "\u2800"
    assert rising[-1][-1] == "\u2800"
    assert chart([0.5], 4, 2, 0, 1) != chart([1.0], 4, 2, 0, 1)


def test_sparklines_and_smoothing_keep_to_their_width_and_mean() -> None:
    assert sparkline([0, 1, 2, 3, 4, 5, 6, 7]) == "▁▂▃▄▅▆▇█"
    assert sparkline([]) == ""
    assert len(sparkline(list(range(1000)), 24)) == 24
    values = [math.sin(i) for i in range(240)]
    assert max(smooth(values)) < max(values)
    assert sum(resample(values, 24)) / 24 == pytest.approx(sum(values) / 240)


def test_durations_read_like_a_clock() -> None:
    assert [duration(s) for s in (42, 725, 11264)] == ["0:42", "12:05", "3:07:44"]


def shown(table: object) -> str:
    console = Console(file=io.StringIO(), width=110, record=True)
    console.print(table)
    return console.export_text()


def test_before_and_after_stand_side_by_side_with_categories_and_intervals() -> None:
    after = SUMMARY | {
        "accuracy": 0.9,
        "interval": [0.87, 0.93],
        "categories": {"colour": {"accuracy": 0.95, "tasks": 128}},
    }
    before = SUMMARY | {"categories": {"colour": {"accuracy": 0.6, "tasks": 128}}}
    blank = {"name": "blank", "accuracy": 0.25, "tasks": 512}
    text = shown(comparison_table([before, blank], [after, blank]))
    rows = [" ".join(line.split()) for line in text.splitlines()]
    assert "sampled 50.0 % [45.0–55.0] 90.0 % [87.0–93.0] +40.0 512" in rows
    assert "colour 60.0 % 95.0 % +35.0 128" in rows
    assert "blank 25.0 % 25.0 % +0.0 512" in rows


def test_what_was_not_judged_is_a_dash_not_a_zero() -> None:
    text = shown(comparison_table([], [{"name": "eval", "accuracy": None, "tasks": 0}]))
    assert "0.0 %" not in text
    assert "–" in text


def test_the_plan_is_printed_with_its_numbers() -> None:
    plan = Plan(20, 120, 256, 32, 1, 140, 30720, 32, "", 4096, 7, None, 0, {}, False, "no: eager")
    text = shown(plan_table(plan))
    assert "256 episodes, one update of 32 groups; at most 4,096 tokens written" in text
    assert "120 steps, 140 updates, of them 20 supervised; 30,720 episodes" in text
    assert "not counted" in text


def test_several_watchers_hear_everything() -> None:
    heard = []

    class Ear(Watcher):
        def stepped(self, step: int, metrics: object) -> None:
            heard.append(step)

    Watchers([Ear(), Watcher(), Ear()]).stepped(3, {})
    assert heard == [3, 3]


@pytest.mark.parametrize("width", [80, 100, 160])
def test_labels_and_terms_have_room_at_any_width(width: int, clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=width))
    watcher.started(RunStart("demo", 40, warm_start=10))
    names = ("exact", "format", "overlong", "judge_of_reasoning", "box_overlap")
    for step in (1, 2, 3):
        watcher.stepped(
            step,
            {"reward/mean": 0.1, "episodes/failed": 2, "throughput/episodes_per_s": 50.0, "time/step_s": 2.0}
            | {f"reward/{name}": 0.5 for name in names}
            | {f"time/{part}_s": 0.3 for part in module.PHASES},
        )
    watcher.evaluated(0, SUMMARY)
    watcher.diagnosed(Notice(2, "no_answer", "began", "'exact' found no answer", True))
    shown = Console(file=io.StringIO(), width=width, record=True)
    shown.print(watcher._state)
    text = shown.export_text()
    assert "…" not in text
    for word in (
        "terms",
        "held out",
        "speed",
        "left out",
        "health",
        "no answer (since step 2)",
        *(f"{n} 0.50" for n in names),
    ):
        assert word in text, word
    assert all(len(line.rstrip()) <= width for line in text.splitlines())


def test_held_out_accuracy_is_told_stage_by_stage(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("demo", 40, warm_start=10))
    for step, accuracy in ((0, 0.02), (10, 0.55), (20, 0.7), (40, 0.96)):
        watcher.evaluated(step, SUMMARY | {"accuracy": accuracy, "interval": None})
    shown = Console(file=io.StringIO(), width=100, record=True)
    shown.print(watcher._state)
    assert "2.0 % → 55.0 % after the warm start → 96.0 %  at step 40" in shown.export_text()


def test_where_nothing_is_right_or_wrong_the_held_out_reward_is_told(clock: Clock) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("captions", 40))
    for step, reward in ((0, 0.3875), (40, 0.705)):
        watcher.evaluated(step, {"name": "eval", "accuracy": None, "reward": reward, "tasks": 120, "judged": 0})
    assert "step 40: eval reward 0.705 (no reward term said right or wrong)" in watcher.console.file.getvalue()  # type: ignore[attr-defined]
    shown = Console(file=io.StringIO(), width=100, record=True)
    shown.print(watcher._state)
    assert "reward 0.388 → reward 0.705  at step 40" in shown.export_text()


@pytest.mark.parametrize(
    ("summary", "cause"),
    [
        ({"tasks": 0, "episodes": 0, "failed": 0}, "no held-out task could be played"),
        ({"tasks": 2, "episodes": 4, "failed": 4}, "all 4 episodes failed"),
        ({"tasks": 2, "episodes": 4, "failed": 1}, "no episode has a reward"),
    ],
)
def test_an_evaluation_that_measured_nothing_names_its_cause(summary: dict[str, int], cause: str) -> None:
    watcher = ConsoleWatcher(Console(file=io.StringIO(), width=100))
    watcher.started(RunStart("clips", 40))
    watcher.evaluated(40, {"name": "eval", "accuracy": None, "reward": None, "judged": 0, **summary})
    shown = watcher.console.file.getvalue()  # type: ignore[attr-defined]
    assert cause in shown
    assert "right or wrong" not in shown


def test_findings_are_printed_when_they_begin_last_and_end() -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(Console(file=stream, width=60))
    for step, state in ((3, "began"), (13, "goes on"), (30, "ended")):
        watcher.diagnosed(Notice(step, "slower_computing", state, "said as a warning before"))
        watcher.diagnosed(Notice(step, "no_answer", state, "'exact' found no [answer]: there is no tag. Ask for it", True))
    assert stream.getvalue().splitlines() == [
        "step 3: health: 'exact' found no [answer]: there is no tag. Ask for it",
        "step 13: health: still: 'exact' found no [answer]: there is no tag. Ask for it",
        "step 30: health: over: no_answer",
    ]


def test_a_finding_from_before_the_resume_is_not_printed_as_a_new_one() -> None:
    stream = io.StringIO()
    watcher = ConsoleWatcher(Console(file=stream, width=60))
    watcher.started(RunStart("clips", 40, first=20))
    watcher.diagnosed(Notice(1, "no_answer", "before", "'exact' found no answer", True))
    line = stream.getvalue().splitlines()[-1]
    assert not line.startswith("step ")
    assert "since step 1, found before the run was resumed" in line
    assert "'exact' found no answer" in line
    watcher.diagnosed(Notice(21, "no_answer", "goes on", "'exact' found no answer", True))
    assert stream.getvalue().splitlines()[-1].startswith("step 21: health: still: ")


def test_the_first_group_shows_prompt_media_response_and_what_each_term_paid() -> None:
    picture = Media("picture", "0" * 64, "cat.png")
    said = Segment("model", (5,), text="a \x1b[31mcat", logprobs=(0.0,), name="e")
    scores = (Score("exact", 0.0, weight=0.9), Score("judge", None, reason="timed out"))
    thread, turn = Thread((Segment("environment", (1,)), said), (False, True)), Turn(0, (), said, 0, 1)
    episode = Episode("e", "t", "g", 0, (thread,), (turn,), Status.FINISHED, scores=scores)
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii", write_through=True)
    watcher = ConsoleWatcher(Console(file=stream, width=100))
    watcher.began(Group("g", Task("row 3", (user(picture, "What is this?"),), "cat"), (episode, episode)))
    stream.seek(0)
    lines = [" ".join(line.split()) for line in stream.read().splitlines()]
    assert lines[:7] == [
        "first task row 3",
        "user [picture cat.png] What is this?",
        "known answer cat",
        r"response a \x1b[31mcat",
        "paid by exact 0 ? 0.9",
        "paid by judge missing: timed out",
        "total none, so it is not trained on (the 2 attempts: none, none)",
    ]


def test_the_first_group_of_an_environment_begins_with_its_system_prompt() -> None:
    said = Segment("model", (5,), text="Left", logprobs=(0.0,), name="e")
    turn = Turn(0, (user("the lake"),), said, 0, 0)
    episode = Episode("e", "t", "g", 0, (Thread((said,), (True,)),), (turn,), Status.FINISHED, head=(system("Walk."),))
    lines = list(first_group_lines(Group("g", Task("seed 3", environment=EnvironmentSpec("frozen_lake")), (episode,))))
    assert lines[:4] == [("first task", "seed 3"), ("system", "Walk."), ("user", "the lake"), ("response", "Left")]
