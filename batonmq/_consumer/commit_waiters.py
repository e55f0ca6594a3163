"""Callers that wait until offsets has the acknowledgement of a message."""

from __future__ import annotations

import asyncio

from batonmq._core.queue_progress import QueueProgress
from batonmq.errors import Fenced


class CommitWaiters:
    """The offsets of one queue whose acknowledgement a caller waits for.

    One future per message: it is done when a commit that includes the message is confirmed.
    """

    def __init__(self) -> None:
        self._waiting: list[tuple[int, asyncio.Future[None]]] = []

    def __len__(self) -> int:
        return len(self._waiting)

    def add(self, offset: int) -> asyncio.Future[None]:
        """Return a future that is done when offsets has the acknowledgement of `offset`.

        It fails with `Fenced` if the queue is lost before that: the message may be redelivered.
        """
        future = asyncio.get_running_loop().create_future()
        future.add_done_callback(_retrieve)
        self._waiting.append((offset, future))
        return future

    def settle(self, progress: QueueProgress) -> None:
        """End the waits for offsets that are confirmed."""
        left = []
        for offset, future in self._waiting:
            if not progress.is_confirmed(offset):
                left.append((offset, future))
            elif not future.done():
                future.set_result(None)
        self._waiting = left

    def fail(self) -> None:
        """Fail all waits: the results of the queue's messages do not count any more."""
        waiting, self._waiting = self._waiting, []
        for _, future in waiting:
            if not future.done():
                future.set_exception(
                    Fenced("the queue was lost before the acknowledgement was committed")
                )


def _retrieve(future: asyncio.Future[None]) -> None:
    """Retrieve the exception, so that asyncio logs no warning for a caller that has gone."""
    if not future.cancelled():
        future.exception()
