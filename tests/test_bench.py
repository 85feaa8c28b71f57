"""The parts of the bench that need no GPU."""

import asyncio
import json
import logging
import os
import runpy
import sys
from importlib.util import find_spec
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch

from sensorium.engines.protocol import Request, Sampling

BENCH = Path(__file__).parents[1] / "bench"


def test_curves_are_drawn_from_the_points_of_each_axis() -> None:
    curves = runpy.run_path(str(BENCH / "curves.py"))
    base = curves["BASE"]
    points = [
        base | {axis: value, "rollout_s": 1.0 + i, "update_s": 2.0 + i, "tokens": 1}
        for axis, (_, values) in curves["AXES"].items()
        for i, value in enumerate(values)
        if value != base[axis] or axis == "group"
    ]
    picture = ElementTree.fromstring(curves["draw"](points))
    panels = [child for child in picture if child.tag.endswith("}g")]
    assert len(panels) == len(curves["AXES"]) == 4
    for panel, (title, values) in zip(panels, curves["AXES"].values(), strict=True):
        said = [text.text for text in panel.iter() if text.tag.endswith("}text")]
        assert title in said
        assert {str(value) for value in values} <= set(said)
        assert sum(circle.tag.endswith("}circle") for circle in panel.iter()) == 2 * len(values)


def test_peers_that_are_not_installed_are_said_to_be_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    peers = runpy.run_path(str(BENCH / "peer_step.py"))
    monkeypatch.setitem(peers["peer_steps"].__globals__, "find_spec", lambda name: None if name == "trl" else object())
    found = peers["peer_steps"](None)
    assert found == dict.fromkeys(("trl", "trl and vllm"), "not timed: trl not installed")


def test_responses_of_a_step_have_the_lengths_of_the_tail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    workload, step = runpy.run_path(str(BENCH / "workload.py")), runpy.run_path(str(BENCH / "step.py"))
    work = workload["Workload"](prompts=4, group=2, pixels=28, new_tokens=20, tail=3.0)

    class Engine:
        async def generate(self, request: Request, episodes: object) -> int:
            return request.sampling.max_new_tokens

    engine = Engine()
    step["_cut_responses"](engine, work)
    request = Request("thread", (), Sampling(max_new_tokens=60), (0,), 0, "name")
    for number in (0, 1):
        asked = [asyncio.run(engine.generate(request, None)) for _ in range(8)]
        assert asked == [length for group in work.lengths(number) for length in group]


def test_a_case_is_compared_with_the_baseline_of_its_command(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(BENCH.parent)
    cases = runpy.run_path(str(BENCH / "all_workloads.py"))
    today = json.loads(cases["BASELINES"].read_text())["today"]
    assert {command for name, command in cases["CASES"].items() if name in ("W1", "Q35", "W2", "W3", "A3B")} <= set(today)
    baseline = today[cases["CASES"]["W1"]]
    assert cases["over"](baseline | {"step_s": 1.1 * baseline["step_s"]}, baseline) == pytest.approx(1.1)
    assert cases["over"]({"tokens_per_s": 50.0}, {"tokens_per_s": 100.0}) == 2.0
    assert cases["over"]({"step_s": 1.0}, {}) == 0.0
    around = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    found = cases["_result"](cases["CASES"]["W1"] + " --unknown", 60, around)
    assert found.startswith("failed:")
    assert "--unknown" in found
    assert cases["_result"](cases["CASES"]["W1"], 5, {}).startswith("not run")


def test_engines_are_summed_up_by_what_a_step_took_and_how_far_their_log_probs_are(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    engines = runpy.run_path(str(BENCH / "engines.py"))
    row = {"episodes/length_mean": 16.0, "time/rollout_s": 0.5, "time/update_s": 0.25, "mismatch/prob_error": 1.01}
    parity = {
        "engine/push_s": 0.1,
        "engine/parity_s": 0.2,
        "engine/parity_mean/picture": 0.0,
        "engine/parity_max/text": 9.0,
    }
    found = engines["summary"]([row | {"time/update_s": 9.0}, row, row | parity], engines["TINY"])
    assert (found["tokens_per_s"], found["update_s"], found["push_s"]) == (256, 0.25, 0.1)
    assert found["prob_error"] == 1.01
    assert found["prob_error_by_modality"] == {"picture": 1.01}
    assert found["probe_error_by_modality"] == {"picture": 1.0}
    monkeypatch.setitem(
        engines["time_engines"].__globals__, "_in_child", lambda *given: {"failed": "vLLM is not installed"}
    )
    told = engines["time_engines"]("W1", engines["TINY"], 1, True)
    assert told["engines"]["vllm"] == {"failed": "vLLM is not installed"}
    assert "vllm_over_native" not in told


def test_the_step_on_a_cpu_is_timed_on_a_tiny_model_and_without_a_peer_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    time_cpu = runpy.run_path(str(BENCH / "cpu_step.py"))["time_cpu"]
    monkeypatch.setitem(time_cpu.__globals__, "find_spec", lambda name: None if name == "trl" else object())
    before = torch.get_num_threads(), torch.are_deterministic_algorithms_enabled(), logging.root.manager.disable
    try:
        found = time_cpu(1, tiny=True)
    finally:
        torch.set_num_threads(before[0])
        torch.use_deterministic_algorithms(before[1])
        logging.disable(before[2])
    assert found["peer"] == "not timed: trl not installed"
    assert found["workload"] == "tiny: 2 x 4 x 16"
    shares = found["shares_of_our_step"]
    assert 0 < shares["time/rollout_s"] < 1
    assert 0 < shares["time/update_s"] < 1


def test_both_sides_are_asked_the_same_questions(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    workload = runpy.run_path(str(BENCH / "workload.py"))
    ours = workload["Arithmetic"](store=None, size=8)
    texts = [ours[index].messages[0].text for index in range(8)]
    assert texts == [workload["arithmetic"](index) for index in range(8)]
    assert len(set(texts)) == 8


def test_kernels_of_rollout_and_update_are_switched_off_together_and_timed_apart(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    bench = runpy.run_path(str(BENCH / "kernel_times.py"))
    table = bench["operations"]()
    assert len({each.name for each in table}) == len(table)
    pairs = bench["pairs_of"](table)
    assert sorted(each.name for pair in pairs for each in pair) == sorted(each.name for each in table)
    assert all({each.phase for each in pair} in ({"rollout", "update"}, {pair[0].phase}) for pair in pairs)
    on, off = bench["Measured"](3.0, 1.5, 1.5, ()), bench["Measured"](4.0, 1.8, 2.1, ())
    found = {each.phase: bench["row_of"](each, off, on)["ratio"] for each in table}
    assert found == {"rollout": 1.1, "update": 1.2, "both": 1.3}


@pytest.mark.skipif(find_spec("triton") is None, reason="triton is not installed")
def test_every_kernel_can_be_switched_off_and_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(BENCH))
    for each in runpy.run_path(str(BENCH / "kernel_times.py"))["operations"]():
        with each.off():  # refuses a place that is no longer there
            assert each.places or each.towers is not None
