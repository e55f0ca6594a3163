"""Receipts, and what waits for them."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator
from itertools import islice
from typing import NamedTuple

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import Durability
from batonmq.errors import BatonError

WOKEN_AT_ONCE = 64
"""Senders of a batch that go on in one turn of the event loop."""


class Receipt(NamedTuple):
    """Proof that a message is stored.

    Attributes:
        queue: Where it is.
        offset: Its place in the queue, in messages.
        position: Where its batch is in the log of the broker, in bytes.
        place: Index of the message in its batch.
        store_unix_ms: Wall clock of the storage node.
        durability: What was really reached.
        duplicate: Whether an earlier try had stored it already.
    """

    queue: QueueRef
    offset: int
    position: int
    place: int
    store_unix_ms: int
    durability: Durability
    duplicate: bool

    @property
    def message_id(self) -> str:
        """Names the message in the cluster."""
        return f"{self.queue.broker}-{self.position:x}-{self.place:x}"


class SendOptions(NamedTuple):
    """What a message asks for.

    Attributes:
        ordering_key: Its queue is that of this key.
        queue: Exactly this queue.
        one_way: Nobody waits for a receipt.
    """

    ordering_key: str | None = None
    queue: QueueRef | None = None
    one_way: bool = False

    @property
    def any_queue(self) -> bool:
        """Whether any queue will do."""
        return self.ordering_key is None and self.queue is None


ANY_QUEUE = SendOptions()


class PendingReceipt:
    """A message on its way; await it for the receipt."""

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: BatchOutcome, index: int) -> None:
        self._outcome, self._index = outcome, index

    def __await__(self) -> Generator[object, None, Receipt]:
        return self._outcome.wait(self._index).__await__()


class BatchOutcome:
    """What the senders of one batch wait for: each on a future of its own, made when it waits.

    One that all share would need a shield for each of them, and every message pays for it.

    Attributes:
        options: What messages ask for, by index; those that ask for nothing are not in it.
        moved: Where the messages are now, if the queue did not take them.
    """

    __slots__ = ("_error", "_stored", "_waiters", "bytes_count", "moved", "options", "queue")

    def __init__(self, queue: QueueRef) -> None:
        self.queue = queue
        self.bytes_count = 0
        self.options: dict[int, SendOptions] = {}
        self.moved: list[PendingReceipt] = []
        self._error: BatonError | None = None
        self._stored = (0, 0, 0, Durability.MEMORY, False)
        self._waiters: list[asyncio.Future[None]] | None = []

    @property
    def settled(self) -> bool:
        """Whether it is known what became of the batch."""
        return self._waiters is None

    @property
    def any_queue(self) -> bool:
        """Whether any queue will do for each of the messages."""
        return all(options.any_queue for options in self.options.values())

    async def wait(self, index: int) -> Receipt:
        """The receipt of one of the messages."""
        if self._waiters is not None:
            future: asyncio.Future[None] = asyncio.Future()
            self._waiters.append(future)
            await future
        if self.moved:
            return await self.moved[index]
        if self._error is not None:
            raise self._error.with_traceback(None)
        first_offset, position, store_unix_ms, durability, duplicate = self._stored
        return Receipt(
            self.queue, first_offset + index, position, index, store_unix_ms, durability, duplicate
        )

    def settle(self, outcome: pb.AppendReceipt | BatonError) -> None:
        """Let those who wait go on with what became of the batch."""
        assert self._waiters is not None
        if isinstance(outcome, BatonError):
            self._error = outcome
        else:
            self._stored = (
                outcome.first_offset,
                outcome.position,
                outcome.store_unix_ms,
                Durability(outcome.durability),
                outcome.duplicate,
            )
        self._wake()

    def move(self, moved: list[PendingReceipt]) -> None:
        """Let those who wait go on with what each message waits for now."""
        self.moved = moved
        self._wake()

    def _wake(self) -> None:
        assert self._waiters is not None
        waiters, self._waiters = self._waiters, None
        _wake(iter(waiters))


def _wake(waiters: Iterator[asyncio.Future[None]]) -> None:
    """Wake some, and the others in the next turns of the loop.

    Who wakes sends again; so the first batch can leave while the next is being filled.
    """
    woken = list(islice(waiters, WOKEN_AT_ONCE))
    for future in woken:
        if not future.done():
            future.set_result(None)
    if woken:
        asyncio.get_running_loop().call_soon(_wake, waiters)
