"""Open calls, such as long polls and streams, that end when a permission or a credential ends."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import dataclass
from typing import Any, TypeVar

from batonmq.errors import BatonError

Item = TypeVar("Item")

EXPIRY_MARGIN_S = 0.1
"""Time after the expiry of a token at which its open calls end: the loop has another clock."""
RECHECK_S = 1.0
"""Time until the next look, if the token is still valid then: the wall clock was set back."""


@dataclass(slots=True, eq=False)
class OpenCall:
    """A call that may end by a revocation.

    Attributes:
        refusal: Returns why the call would be rejected now; None if it would not.
        error: Why it ends; None while it does not.
        sending: Whether an item of its stream is on its way to gRPC.
        cancelled: Whether its task was cancelled for `error`.
        timer: Looks at the credentials when they expire; None if they don't.
    """

    task: asyncio.Task[Any]
    refusal: Callable[[], BatonError | None]
    error: BatonError | None = None
    sending: bool = False
    cancelled: bool = False
    timer: asyncio.TimerHandle | None = None

    def recheck(self) -> None:
        """End the call if it would be rejected now."""
        if self.error is not None or (error := self.refusal()) is None:
            return
        self.error = error
        # A task that is cancelled inside gRPC sends no status: its client would wait for ever.
        if not self.sending:
            self.cancelled = True
            self.task.cancel()

    async def items(self, stream: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
        """Yield the items of a stream; a call that ends meanwhile ends after the present item."""
        async with aclosing(stream):
            async for item in stream:
                if self.error is not None:
                    break
                self.sending = True
                yield item
                self.sending = False
                if self.error is not None:
                    break


class RevocableCalls:
    """The open calls of one process. Call `recheck` after each change of permissions."""

    def __init__(self) -> None:
        self._open: set[OpenCall] = set()

    @contextmanager
    def until_revoked(
        self, refusal: Callable[[], BatonError | None], left_s: float | None
    ) -> Iterator[OpenCall]:
        """Cancel the code inside when `refusal` returns an error, and raise that.

        The items of a stream must pass through `OpenCall.items`.

        Args:
            refusal: Returns why the call would be rejected now; None if it would not.
            left_s: Time until the credentials of the caller expire; None if they don't.
        """
        task = asyncio.current_task()
        assert task is not None
        call = OpenCall(task, refusal)
        self._open.add(call)
        loop = asyncio.get_running_loop()

        def expire() -> None:
            call.recheck()
            if call.error is None:
                call.timer = loop.call_later(RECHECK_S, expire)

        if left_s is not None:
            call.timer = loop.call_later(left_s + EXPIRY_MARGIN_S, expire)
        try:
            yield call
        except asyncio.CancelledError:
            if not call.cancelled:
                raise
        finally:
            if call.timer is not None:
                call.timer.cancel()
            self._open.discard(call)
            if call.cancelled:
                task.uncancel()
        if call.error is not None:
            raise call.error

    def recheck(self) -> None:
        """End the calls that would be rejected now."""
        for call in list(self._open):
            call.recheck()
