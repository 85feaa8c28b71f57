"""Options of an environment that make no sense are refused by name, before anything is played."""

from collections.abc import Sequence

from sensorium.vocabulary.errors import RecipeError, nearest


def one_of(environment: str, option: str, value: str, known: Sequence[str]) -> None:
    """Refuse a value that is not one of those known."""
    if value not in known:
        raise RecipeError(f"{environment}: option {option} cannot be '{value}'{nearest(str(value), list(known))}")


def within(environment: str, option: str, value: float, low: float, high: float) -> None:
    """Refuse a number outside of its range."""
    if not low <= value <= high:
        raise RecipeError(f"{environment}: option {option} is {value}; it must lie between {low} and {high}.")
