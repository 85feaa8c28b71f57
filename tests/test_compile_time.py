"""Time spent on compiling counts once however many compile, Triton's too, and is told and measured by a run."""

import sys
import threading
import types
from typing import Any, cast

import pytest

from sensorium.assembly.session import Session
from sensorium.kernels import first_use
from sensorium.kernels.first_use import compile_seconds, compiling, count_triton, take_untold_seconds
from sensorium.trainer.step_metrics import Clock


class Watch:
    """A clock that is set by hand."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now = 100.0
        monkeypatch.setattr(first_use, "time", types.SimpleNamespace(perf_counter=lambda: self.now))


def test_time_counts_once_where_one_compiles_inside_or_beside_another(monkeypatch: pytest.MonkeyPatch) -> None:
    watch, before = Watch(monkeypatch), compile_seconds()
    begun, end = threading.Event(), threading.Event()

    def compile_beside() -> None:
        with compiling():
            begun.set()
            end.wait()

    beside = threading.Thread(target=compile_beside)
    with compiling():
        watch.now += 1
        with compiling():
            watch.now += 2
            assert compile_seconds() - before == pytest.approx(3)  # it is still under way
        beside.start()
        begun.wait()
        watch.now += 4
    watch.now += 8
    end.set()
    beside.join()
    watch.now += 16
    assert compile_seconds() - before == pytest.approx(15)


def test_what_was_told_is_not_told_again(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    take_untold_seconds(0)
    with compiling():
        watch.now += 3
    assert take_untold_seconds(5) == 0
    with compiling():
        watch.now += 3
    assert take_untold_seconds(5) == pytest.approx(6)
    assert take_untold_seconds(5) == 0


def test_triton_is_listened_to_beside_others(monkeypatch: pytest.MonkeyPatch) -> None:
    heard: list[dict[str, Any]] = []
    knobs = types.SimpleNamespace(compilation=types.SimpleNamespace(listener=lambda **told: heard.append(told)))
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace(knobs=knobs))
    count_triton()
    count_triton()  # once is enough
    before = compile_seconds()
    told = {"src": None, "metadata": {}, "metadata_group": {}, "times": types.SimpleNamespace(total=2_500_000)}
    knobs.compilation.listener(**told, cache_hit=False)
    knobs.compilation.listener(**told, cache_hit=True)
    with compiling():
        knobs.compilation.listener(**told, cache_hit=False)
    assert compile_seconds() - before == pytest.approx(2.5, abs=0.1)
    assert [one["cache_hit"] for one in heard] == [False, True, False]
    monkeypatch.setitem(sys.modules, "triton", types.SimpleNamespace())  # nobody can listen to this one
    count_triton()


def test_a_step_that_compiled_says_how_long(monkeypatch: pytest.MonkeyPatch) -> None:
    watch = Watch(monkeypatch)
    session = cast(Session, types.SimpleNamespace(policy=types.SimpleNamespace(counters=types.SimpleNamespace(patches=0))))
    clock = Clock(session, lambda phase, total: None)
    assert "time/compile_s" not in clock.metrics([])
    with compiling():
        watch.now += 7
    assert clock.metrics([])["time/compile_s"] == pytest.approx(7)
    assert "time/compile_s" not in Clock(session, lambda phase, total: None).metrics([])
