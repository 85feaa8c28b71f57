"""SVG code that a model (or an attacker) wrote is drawn or refused in bounded time and memory, and reads nothing."""

import os
import time
from contextlib import suppress
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from sensorium.envs import svg
from sensorium.envs.svg import SvgRefused, checked, draw, svg_in

COPIES = [f'<g id="a{n + 1}">' + f'<use href="#a{n}"/>' * 10 + "</g>" for n in range(9)]
BOMB = '<g id="a0"><rect/></g>' + "".join(COPIES)
REFUSED = {
    "an external entity": '<!DOCTYPE svg [<!ENTITY x SYSTEM "file:///etc/passwd">]><svg><title>&x;</title></svg>',
    "an entity bomb": '<!DOCTYPE svg [<!ENTITY a "aaaa"><!ENTITY b "&a;&a;&a;">]><svg>&b;</svg>',
    "an undefined entity": "<svg>&x;</svg>",
    "a script": "<svg><script>alert(1)</script></svg>",
    "an event": '<svg onload="alert(1)"/>',
    "foreign content": "<svg><foreignObject><p/></foreignObject></svg>",
    "a local file": '<svg><image href="/etc/passwd"/></svg>',
    "a file URL": '<svg><use href="file:///etc/passwd#a"/></svg>',
    "a web address": '<svg><use xlink:href="https://example.org/a.svg#a"/></svg>',
    "a data URI": '<svg><use href="data:image/svg+xml;base64,AAAA"/></svg>',
    "a URL in an attribute": '<svg><rect fill="url(http://example.org/a)"/></svg>',
    "an import in a style": "<svg><style>@import 'http://example.org'</style></svg>",
    "a hidden URL in a style": "<svg><style>rect{fill:u\\72l(/etc/passwd)}</style></svg>",
    "a hidden URL by a comment": '<svg><rect style="fill:ur/**/l(/etc/passwd)"/></svg>',
    "comments without an end": f"<svg><rect style='{'/*' * 24_000}'/><script/></svg>",
    "escapes without an end": f"<svg><rect style='{chr(92) * 40_000}'/><script/></svg>",
    "references without an end": f"<svg><rect style='{'url(' * 10_000}'/></svg>",
    "a filter": '<svg><filter id="f"><feTurbulence numOctaves="50"/></filter><rect filter="url(#f)"/></svg>',
    "a style sheet of its own": '<?xml-stylesheet href="a.css"?><svg/>',
    "a use-bomb": f"<svg>{BOMB}</svg>",
    "an element that refers to itself": '<svg><g id="a"><use href="#a"/></g></svg>',
    "masks in a circle": '<svg><mask id="a"><g mask="url(#b)"/></mask><mask id="b"><g mask="url(#a)"/></mask></svg>',
    "deep nesting": f"<svg>{'<g>' * 300}{'</g>' * 300}</svg>",
    "too many elements": f"<svg>{'<g/>' * 6000}</svg>",
    "a billion nodes": f"<svg>{'<rect/>' * 1_000_000}</svg>",
    "no XML": "<svg><rect></svg>",
    "another document": "<html/>",
    "half a character": "<svg>\ud800</svg>",
}  # fmt: skip


@pytest.mark.parametrize("what", REFUSED)
def test_is_refused_before_it_is_drawn(what: str) -> None:
    began = time.process_time()
    with pytest.raises(SvgRefused):
        checked(REFUSED[what])
    assert time.process_time() - began < 1.0


@pytest.mark.parametrize(
    "code",
    [
        '<svg width="100000" height="100000"><rect width="100%" height="100%"/></svg>',
        '<svg viewBox="0 0 1e30 1e30"><rect width="1e30" height="1e30"/></svg>',
        '<svg viewBox="NaN 0 -1 0"><rect width="NaN" height="inf"/></svg>',
        "<svg/>",
        '<svg viewBox="0 0 9 9"><text x="1" y="5">no font</text></svg>',
    ],
)
def test_strange_sizes_are_drawn_at_the_size_asked_for(code: str) -> None:
    assert draw(code, 32).shape == (32, 32, 3)


def test_code_that_kills_the_renderer_is_refused_and_the_next_one_is_drawn() -> None:
    pattern = '<pattern id="p" width="1000000" height="1000000" patternUnits="userSpaceOnUse"><rect width="1" height="1"/>'
    code = f'<svg viewBox="0 0 100 100">{pattern}</pattern><rect width="100" height="100" fill="url(#p)"/></svg>'
    with pytest.raises(SvgRefused, match="could not be drawn"):
        draw(code, 64)
    assert draw('<svg viewBox="0 0 1 1"><rect width="1" height="1" fill="red"/></svg>', 16)[0, 0].tolist() == [255, 0, 0]


def test_a_renderer_that_takes_too_long_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    slow = '<filter id="f"><feTurbulence numOctaves="5000"/></filter><rect width="999" height="999" filter="url(#f)"/>'
    draw("<svg/>", 16)
    monkeypatch.setattr(svg, "DEADLINE_S", 0.2)
    with pytest.raises(SvgRefused, match=r"longer than 0\.2 s"):
        svg._drawn(f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 999 999">{slow}</svg>', 1024)


def test_the_renderer_itself_can_open_no_file(tmp_path: Path) -> None:
    Image.new("RGB", (8, 8), "red").save(tmp_path / "red.png")
    named = f'<image href="{tmp_path / "red.png"}" width="8" height="8"/>'
    past_the_check = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 8 8">{named}</svg>'
    assert svg._drawn(past_the_check, 8).min() == 255
    (process, *_) = svg._idle
    limits = Path(f"/proc/{process.pid}/limits").read_text()
    assert [line.split()[3] for line in limits.splitlines() if line.startswith("Max open files")] == ["0"]
    assert os.path.realpath(f"/proc/{process.pid}/cwd") == "/"


def test_use_gradients_and_clips_of_its_own_are_drawn() -> None:
    code = (
        '<svg width="10" height="10"><defs><linearGradient id="g"><stop stop-color="blue"/></linearGradient>'
        '<clipPath id="c"><rect width="10" height="5"/></clipPath><rect id="r" width="10" height="10" fill="url(#g)"/>'
        '</defs><use xlink:href="#r" clip-path="url(#c)"/></svg>'
    )
    picture = draw(code, 20)
    assert picture[4, 4].tolist() == [0, 0, 255]
    assert picture[16, 4].tolist() == [255, 255, 255]
    assert draw('<svg viewBox="0 0 2 1"><rect width="2" height="1"/></svg>', 20)[[1, 10], 10].max(axis=1).tolist() == [
        255,
        0,
    ]


PIECES = ["<svg>", "</svg>", "<rect/>", "<g>", "</g>", 'id="a"', "<use href='#a'/>", "&", "\0", "é", "<!--", "-->", "]]>"]


@settings(max_examples=60, deadline=None)
@given(st.one_of(st.text(max_size=60), st.lists(st.sampled_from(PIECES), max_size=12).map("".join)))
def test_any_text_is_drawn_or_refused(text: str) -> None:
    for code in (text, f"<svg>{text}</svg>", f'<svg viewBox="{text}"/>', svg_in(text) or ""):
        with suppress(SvgRefused):
            assert draw(code, 16).dtype == np.uint8
