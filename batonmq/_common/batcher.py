"""Batching of calls: one call in flight, and items that arrive meanwhile go into the next."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Awaitable, Callable, Hashable, Sequence
from typing import Generic, TypeVar

from batonmq.errors import Overloaded

Item = TypeVar("Item")
Outcome = TypeVar("Outcome")


class Batcher(Generic[Item, Outcome]):
    """Collects items while a batch is in flight and sends them together, in order.

    Args:
        send: Takes 1 to `items_max` items and returns as many outcomes, in order. An exception
            is raised in every caller of that batch.
        items_max: Largest number of items in a batch.
        waiting_max: Largest number of waiting items; more are rejected with `Overloaded`.
        key: Items with the same key go into different batches; None: any may share one.
    """

    def __init__(
        self,
        send: Callable[[Sequence[Item]], Awaitable[Sequence[Outcome]]],
        *,
        items_max: int = 256,
        waiting_max: int = 100_000,
        key: Callable[[Item], Hashable] | None = None,
    ) -> None:
        self._key = key
        self._send, self._items_max, self._waiting_max = send, items_max, waiting_max
        self._waiting: deque[tuple[Item, asyncio.Future[Outcome]]] = deque()
        self._arrived = asyncio.Event()
        self._ended = False

    async def call(self, item: Item) -> Outcome:
        """Return the outcome of `item`. Cancelling the call leaves the item in its batch.

        Raises:
            Overloaded: Too many items wait.
        """
        if len(self._waiting) >= self._waiting_max:
            raise Overloaded(
                f"{len(self._waiting)} items wait to be sent; the limit is {self._waiting_max}",
                retry_after_ms=100,
                facts={"limit": self._waiting_max},
            )
        future: asyncio.Future[Outcome] = asyncio.get_running_loop().create_future()
        if self._ended:
            future.cancel()
        else:
            self._waiting.append((item, future))
            self._arrived.set()
        return await future

    async def run(self) -> None:
        """Send batches until cancelled; to be run once, as one task.

        Cancellation also cancels all waiting callers, and every later call.
        """
        try:
            while True:
                await self._arrived.wait()
                while self._waiting:
                    await self._send_next()
                self._arrived.clear()
        finally:
            self._ended = True
            for _, future in self._waiting:
                future.cancel()
            self._waiting.clear()

    def _take(self) -> list[tuple[Item, asyncio.Future[Outcome]]]:
        """Return the next batch."""
        size = min(len(self._waiting), self._items_max)
        taken = [self._waiting.popleft() for _ in range(size)]
        if self._key is None:
            return taken
        first: dict[Hashable, tuple[Item, asyncio.Future[Outcome]]] = {}
        key = self._key
        later = [entry for entry in taken if first.setdefault(key(entry[0]), entry) is not entry]
        self._waiting.extendleft(reversed(later))
        return list(first.values())

    async def _send_next(self) -> None:
        batch = self._take()
        try:
            outcomes = await self._send([item for item, _ in batch])
        except asyncio.CancelledError:
            for _, future in batch:
                future.cancel()
            raise
        except Exception as error:  # noqa: BLE001  raised in every caller
            for _, future in batch:
                if not future.done():
                    future.set_exception(error)
            return
        for (_, future), outcome in zip(batch, outcomes, strict=True):
            if not future.done():
                future.set_result(outcome)
