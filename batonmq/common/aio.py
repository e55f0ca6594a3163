"""Small things asyncio lacks."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

T = TypeVar("T")


async def unless(event: asyncio.Event, work: Coroutine[Any, Any, T]) -> T | None:
    """The result of `work`, or None if `event` is set first, in which case `work` is cancelled.

    If both happen, the result wins. What `work` raises is raised as it is.
    """
    results: list[T] = []
    errors: list[Exception] = []

    async def run() -> None:
        try:
            results.append(await work)
        except Exception as error:  # noqa: BLE001  raised below, outside of the group
            errors.append(error)

    try:
        async with asyncio.TaskGroup() as tasks:
            working = tasks.create_task(run())
            waiting = tasks.create_task(event.wait())
            await asyncio.wait({working, waiting}, return_when=asyncio.FIRST_COMPLETED)
            waiting.cancel()
            working.cancel()
    finally:
        work.close()  # who is cancelled at once has not begun it
    for error in errors:
        raise error
    return results[0] if results else None


async def wait_until(event: asyncio.Event, timeout_ms: int) -> bool:
    """Whether `event` was set within `timeout_ms`."""
    try:
        async with asyncio.timeout(timeout_ms / 1000):
            await event.wait()
    except TimeoutError:
        return False
    return True


def only_error(group: BaseExceptionGroup[BaseException]) -> BaseException:
    """The one error inside, however deep, or the group if there are several."""
    inner: BaseException = group
    while isinstance(inner, BaseExceptionGroup) and len(inner.exceptions) == 1:
        inner = inner.exceptions[0]
    return inner
