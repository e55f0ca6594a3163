"""`asyncio.timeout` and `asyncio.timeout_at`, also for Python 3.11.0 to 3.11.2.

On these versions `asyncio.timeout` raises CancelledError instead of TimeoutError if its task was
cancelled before, as in the clean-up after a cancellation. The task then ends without an error. So a
consumer could forget a queue that was assigned to it. Later versions compare the number of
cancellations with that at the start: https://github.com/python/cpython/issues/102780
"""

from __future__ import annotations

import asyncio
import sys
from types import TracebackType
from typing import cast

__all__ = ["timeout", "timeout_at"]

if sys.version_info >= (3, 11, 3):
    from asyncio import timeout, timeout_at
else:

    class _Timeout:
        """An `asyncio.Timeout` that knows how often its task was cancelled before it began."""

        def __init__(self, when: float | None) -> None:
            self._timeout, self._before = asyncio.Timeout(when), 0
            self.when, self.expired = self._timeout.when, self._timeout.expired
            self.reschedule = self._timeout.reschedule

        async def __aenter__(self) -> _Timeout:
            await self._timeout.__aenter__()
            self._before = _cancelling()
            return self

        async def __aexit__(
            self,
            exc_type: type[BaseException] | None,
            exc_val: BaseException | None,
            exc_tb: TracebackType | None,
        ) -> None:
            await self._timeout.__aexit__(exc_type, exc_val, exc_tb)
            cancelled = exc_type is not None and issubclass(exc_type, asyncio.CancelledError)
            if self.expired() and cancelled and _cancelling() <= self._before:
                raise TimeoutError from exc_val

    def _cancelling() -> int:
        task = asyncio.current_task()
        assert task is not None
        return task.cancelling()

    def timeout(delay: float | None) -> asyncio.Timeout:
        """See `asyncio.timeout`."""
        return timeout_at(None if delay is None else asyncio.get_running_loop().time() + delay)

    def timeout_at(when: float | None) -> asyncio.Timeout:
        """See `asyncio.timeout_at`."""
        return cast("asyncio.Timeout", _Timeout(when))
