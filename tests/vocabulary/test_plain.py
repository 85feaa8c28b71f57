"""Plain values: what is a number becomes one, everything else is a ValueError that shows it."""

from decimal import Decimal
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch

from sensorium.vocabulary.plain import json_of, number_of, shown, text_of, truth_of, words


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (True, 1.0),
        (3, 3.0),
        (np.float32(0.5), 0.5),
        (np.int64(3), 3.0),
        (np.bool_(True), 1.0),
        (np.array(2), 2.0),
        (torch.tensor(0.25), 0.25),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        (Fraction(1, 2), 0.5),
        (Decimal("0.5"), 0.5),
    ],
)
def test_numbers_of_any_library_become_floats(value: Any, number: float) -> None:
    assert number_of(value) == number
    assert type(number_of(value)) is float


class Mean:
    """Raises whatever is asked of it."""

    def __repr__(self) -> str:
        raise SystemExit(1)

    __str__ = __float__ = __repr__  # type: ignore[assignment]


def test_what_is_no_number_is_refused_whatever_it_is() -> None:
    for value in ("0.5", None, [1.0], np.array([1.0]), torch.ones(1), 1j, 10**400, 10**5000, Mean(), object()):
        with pytest.raises(ValueError):
            number_of(value)


def test_what_is_shown_repeats_and_can_be_written() -> None:
    assert "0x" not in shown(object())
    assert len(shown("x" * 10**6)) < 200
    shown("\ud800").encode()
    words(ValueError("\ud800")).encode()
    assert "fails" in shown(Mean())


def test_truths_and_texts() -> None:
    assert truth_of(np.bool_(True)) is True
    assert truth_of(0) is False
    with pytest.raises(ValueError, match="neither"):
        truth_of("yes")
    with pytest.raises(ValueError, match="surrogate"):
        text_of("a\ud800")


def test_json_holds_numbers_texts_lists_and_objects_and_nothing_else() -> None:
    assert json_of({"a": np.arange(2), "b": (1, torch.tensor(2.0)), "c": None}) == {"a": [0, 1], "b": [1, 2.0], "c": None}
    endless: list[Any] = []
    endless.append(endless)
    for value in ({1: 2}, {"a": object()}, {"a": "\ud800"}, endless, {"a": 10**5000}, np.zeros(10**6)):
        with pytest.raises(ValueError):
            json_of(value)
