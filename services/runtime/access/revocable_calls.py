"""Open calls, such as long polls and streams, that end when a permission or a credential ends."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from batonmq.errors import BatonError

EXPIRY_MARGIN_S = 0.1
"""Time after the expiry of a token at which its open calls end: the loop has another clock."""


class RevocableCalls:
    """The open calls of one process. Call `recheck` after each change of permissions."""

    def __init__(self) -> None:
        self._open: dict[asyncio.Task[Any], Callable[[], BatonError | None]] = {}
        self._ended: dict[asyncio.Task[Any], BatonError] = {}

    @contextmanager
    def until_revoked(
        self, refusal: Callable[[], BatonError | None], left_s: float | None
    ) -> Iterator[None]:
        """Cancel the code inside when `refusal` returns an error, and raise that.

        Args:
            refusal: Returns why the call would be rejected now; None if it would not.
            left_s: Time until the credentials of the caller expire; None if they don't.
        """
        task = asyncio.current_task()
        assert task is not None
        self._open[task] = refusal
        timer = None
        if left_s is not None:
            timer = asyncio.get_running_loop().call_later(
                left_s + EXPIRY_MARGIN_S, self._recheck_one, task
            )
        try:
            yield
        except asyncio.CancelledError:
            error = self._ended.get(task)
            if error is None:
                raise
            task.uncancel()
            raise error from None
        finally:
            if timer is not None:
                timer.cancel()
            self._open.pop(task, None)
            self._ended.pop(task, None)

    def recheck(self) -> None:
        """End the calls that would be rejected now."""
        for task in self._open:
            self._recheck_one(task)

    def _recheck_one(self, task: asyncio.Task[Any]) -> None:
        refusal = self._open.get(task)
        if refusal is not None and task not in self._ended and (error := refusal()) is not None:
            self._ended[task] = error
            task.cancel()
