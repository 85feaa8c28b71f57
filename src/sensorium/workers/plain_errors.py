"""Errors as plain data, for another process: by their class's name and their text."""

from collections.abc import Mapping
from typing import Any

from sensorium.vocabulary import errors


def plain_error(error: BaseException) -> dict[str, str]:
    """An error by its class and text."""
    known = isinstance(error, errors.SensoriumError)
    return {"error": str(error) if known else repr(error), "kind": type(error).__name__}


def error_of(plain: Mapping[str, Any], otherwise: type[errors.SensoriumError], who: str) -> errors.SensoriumError:
    """The error; one that is not of ours is an ``otherwise`` of who failed."""
    kind = getattr(errors, plain["kind"], None)
    if isinstance(kind, type) and issubclass(kind, errors.SensoriumError):
        return kind(plain["error"])
    return otherwise(f"{who} failed: {plain['error']}")
