"""The parts of the bench that need no GPU."""

import asyncio
import runpy
from pathlib import Path
from xml.etree import ElementTree

import pytest

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
