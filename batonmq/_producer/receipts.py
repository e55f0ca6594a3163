"""Receipts of sent messages, and the outcome of a batch that senders wait for."""

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
"""Waiting senders of a batch that are woken in one iteration of the event loop."""


class Receipt(NamedTuple):
    """Proof that a message is stored.

    Attributes:
        queue: The queue of the message.
        offset: Offset of the message in the queue.
        position: Position of its batch in the log of the broker, in bytes.
        place: Index of the message in its batch.
        store_unix_ms: Time of storing, by the wall clock of the storage node.
        durability: The durability that was reached.
        duplicate: Whether an earlier attempt had stored the message already.
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
        """Id of the message, unique in the cluster."""
        return f"{self.queue.broker}-{self.position:x}-{self.place:x}"


class SendOptions(NamedTuple):
    """Options of one message.

    Attributes:
        ordering_key: The message goes to the queue of this key.
        queue: The message goes to this queue.
        one_way: The sender does not wait for a receipt.
    """

    ordering_key: str | None = None
    queue: QueueRef | None = None
    one_way: bool = False

    @property
    def any_queue(self) -> bool:
        """Whether the message may go to any queue of its topic."""
        return self.ordering_key is None and self.queue is None


ANY_QUEUE = SendOptions()


class PendingReceipt:
    """A message in flight; await it to get the receipt."""

    __slots__ = ("_index", "_outcome")

    def __init__(self, outcome: BatchOutcome, index: int) -> None:
        self._outcome, self._index = outcome, index

    def __await__(self) -> Generator[object, None, Receipt]:
        return self._outcome.wait(self._index).__await__()


class BatchOutcome:
    """The outcome of one batch, which the senders of its messages wait for.

    Each sender waits on its own future, created when it starts to wait. One shared future would
    need a shield per sender, which costs time for every message.

    Attributes:
        options: Options of messages, by index; a message without options has no entry.
        moved: The messages in their new batches, if the queue did not accept this batch.
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
        """Whether the batch has its outcome."""
        return self._waiters is None

    @property
    def any_queue(self) -> bool:
        """Whether every message of the batch may go to any queue."""
        return all(options.any_queue for options in self.options.values())

    async def wait(self, index: int) -> Receipt:
        """Return the receipt of the message at `index`, when the batch has its outcome.

        Raises:
            BatonError: The batch failed.
        """
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
        """Set the outcome of the batch and wake the waiting senders."""
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
        """Replace this outcome by those of the batches that now have the messages."""
        self.moved = moved
        self._wake()

    def _wake(self) -> None:
        assert self._waiters is not None
        waiters, self._waiters = self._waiters, None
        _wake(iter(waiters))


def _wake(waiters: Iterator[asyncio.Future[None]]) -> None:
    """Wake `WOKEN_AT_ONCE` senders now and the others in later iterations of the event loop.

    A woken sender often sends again, so the next batch can leave while another is filled.
    """
    woken = list(islice(waiters, WOKEN_AT_ONCE))
    for future in woken:
        if not future.done():
            future.set_result(None)
    if woken:
        asyncio.get_running_loop().call_soon(_wake, waiters)
