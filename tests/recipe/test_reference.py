"""docs/reference/recipe.md has every key of the schema, each with a line that says what it means, and is up to date."""

from pathlib import Path

import pytest

from sensorium.recipe.reference_page import DESCRIPTIONS, description, reference
from sensorium.recipe.schema import Section

PAGE = Path(__file__).parents[2] / "docs/reference/recipe.md"
SECTIONS = Section.__subclasses__()


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text() == reference(), "the schema changed: run `make docs` and commit docs/reference/recipe.md"


@pytest.mark.parametrize("section", SECTIONS, ids=lambda section: section.__name__)
def test_every_key_says_what_it_means(section: type[Section]) -> None:
    page = PAGE.read_text()
    for name, field in section.model_fields.items():
        key = f"{section.__name__}.{name}"
        assert bool(field.description) != (key in DESCRIPTIONS), f"describe {key} in schema.py or in descriptions.py"
        assert description(section, name) in page


def test_nothing_is_described_that_is_not_there() -> None:
    known = {f"{section.__name__}.{name}" for section in SECTIONS for name in section.model_fields}
    assert set(DESCRIPTIONS) <= known
