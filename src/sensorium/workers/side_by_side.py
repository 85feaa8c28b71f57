"""Coroutines side by side: what ends one of them ends all, and is raised alone instead of in a group of errors."""

import asyncio
from collections.abc import Coroutine, Iterable
from typing import Any, TypeVar

Result = TypeVar("Result")


async def side_by_side(coroutines: Iterable[Coroutine[Any, Any, Result]]) -> list[Result]:
    """Their results, in the order given. Unlike ``asyncio.gather`` it leaves nobody running behind an error."""
    try:
        async with asyncio.TaskGroup() as crowd:
            running = [crowd.create_task(coroutine) for coroutine in coroutines]
    except BaseExceptionGroup as failed:
        raise first_error(failed) from failed
    return [run.result() for run in running]


def first_error(failed: BaseExceptionGroup[BaseException]) -> BaseException:
    """The first error of a group of errors, or of groups within it: one says enough."""
    error: BaseException = failed
    while isinstance(error, BaseExceptionGroup):
        error = error.exceptions[0]
    return error
