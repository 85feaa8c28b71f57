"""Functions of other systems may be coroutines or not: either way the value is waited for."""

from inspect import isawaitable
from typing import Any


async def awaited(value: Any) -> Any:
    """The value, or what it comes to."""
    return await value if isawaitable(value) else value
