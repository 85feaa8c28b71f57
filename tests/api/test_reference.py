"""docs/reference/api.md is generated from the docstrings of what ``import sensorium as sn`` gives."""

import inspect
from pathlib import Path

import pytest

import sensorium as sn
from tools.api_page import GROUPS, OTHERS, members, page, text_of

PAGE = Path(__file__).parents[2] / "docs/reference/api.md"
NAMES = [name for names in GROUPS.values() for name in names]


def test_the_page_is_what_the_docstrings_say() -> None:
    assert PAGE.read_text() == page(), "the Python API changed: run `make docs` and commit docs/reference/api.md"


def test_every_public_name_is_on_the_page_once() -> None:
    assert sorted(NAMES) == sorted({*sn.__all__, *OTHERS} - {"__version__"})


@pytest.mark.parametrize("name", sorted({*NAMES} - {"Recipe"}))  # its members are keys, which the page of recipes has
def test_every_name_and_member_says_what_it_is(name: str) -> None:
    thing = OTHERS.get(name) or getattr(sn, name)
    assert text_of(thing)
    if inspect.isclass(thing):
        for member, of in members(thing):
            assert text_of(of), f"describe {name}.{member} in its docstring"
