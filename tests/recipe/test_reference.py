"""docs/reference/recipe.md is generated from the schema, in which every key has a description."""

from pathlib import Path

import pytest

from sensorium.recipe.schema import Section
from tools.recipe_page import page

PAGE = Path(__file__).parents[2] / "docs/reference/recipe.md"


def test_the_page_is_what_the_schema_says() -> None:
    assert PAGE.read_text() == page(), "the schema changed: run `make docs` and commit docs/reference/recipe.md"


@pytest.mark.parametrize("section", Section.__subclasses__(), ids=lambda section: section.__name__)
def test_every_key_says_what_it_means(section: type[Section]) -> None:
    for name, field in section.model_fields.items():
        assert field.description, f"describe {section.__name__}.{name} in schema.py"
        assert field.description in PAGE.read_text()
