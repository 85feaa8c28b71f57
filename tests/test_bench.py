"""The parts of the bench that need no GPU."""

import runpy
from pathlib import Path
from xml.etree import ElementTree

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
