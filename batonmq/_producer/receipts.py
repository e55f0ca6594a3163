"""Receipts of sent messages, and the outcome of a batch that senders wait for."""

from __future__ import annotations

import asyncio
from collections.abc import Generator, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from typing import NamedTuple

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import Durability
from batonmq.errors import BatonError, Retry

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


class ReceiptRange(NamedTuple):
    """Proof that consecutive messages of one `send_many` are stored, in one batch.

    Attributes:
        first_index: Index of the first message among the messages of the call.
        message_count: Number of messages; their offsets follow without gaps.
        queue: The queue of the messages.
        first_offset: Offset of the first message in the queue.
        position: Position of the batch in the log of the broker, in bytes.
        first_place: Index of the first message in the batch.
        store_unix_ms: Time of storing, by the wall clock of the storage node.
        durability: The durability that was reached.
        duplicate: Whether an earlier attempt had stored the messages already.
    """

    first_index: int
    message_count: int
    queue: QueueRef
    first_offset: int
    position: int
    first_place: int
    store_unix_ms: int
    durability: Durability
    duplicate: bool

    def receipts(self) -> list[Receipt]:
        """Return one receipt per message."""
        return [
            Receipt(
                self.queue,
                self.first_offset + number,
                self.position,
                self.first_place + number,
                self.store_unix_ms,
                self.durability,
                self.duplicate,
            )
            for number in range(self.message_count)
        ]


@dataclass(frozen=True, slots=True)
class FailedRange:
    """Consecutive messages of one `send_many` that failed with the same error.

    Attributes:
        first_index: Index of the first message among the messages of the call.
        message_count: Number of messages.
    """

    first_index: int
    message_count: int
    error: BatonError


class PartlySent(BatonError):
    """Some messages of a `send_many` are stored and others have failed.

    Attributes:
        stored: The receipts.
        failed: The other messages; the errors say whether they may be stored nevertheless.
    """

    kind, reason, retry = "UNAVAILABLE", "UNREACHABLE", Retry.NEVER
    remedy = "Send the messages of `failed` again, unless their error says that they may be stored."

    def __init__(
        self,
        message: str,
        *,
        stored: Sequence[ReceiptRange] = (),
        failed: Sequence[FailedRange] = (),
    ) -> None:
        super().__init__(message)
        self.stored, self.failed = stored, failed


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

    @property
    def settled(self) -> bool:
        """Whether the message has its outcome."""
        outcome = self._outcome
        return outcome.settled and (not outcome.moved or outcome.moved[self._index].settled)

    def __await__(self) -> Generator[object, None, Receipt]:
        return self._outcome.wait(self._index).__await__()

    async def range(self, index: int) -> list[ReceiptRange | FailedRange]:
        """Return the outcome as a range of one message with an index in its `send_many`."""
        return await self._outcome.wait_for_range(self._index, 1, index)


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
        if (settled := self.when_settled()) is not None:
            await settled
        return await self.moved[index] if self.moved else self.receipt(index)

    def when_settled(self) -> asyncio.Future[None] | None:
        """Return a future that is done when the batch has its outcome; None if it has it."""
        if self._waiters is None:
            return None
        future: asyncio.Future[None] = asyncio.Future()
        self._waiters.append(future)
        return future

    def receipt(self, index: int) -> Receipt:
        """Return the receipt of the message at `index` of a settled batch that was not moved.

        Raises:
            BatonError: The batch failed.
        """
        if self._error is not None:
            raise self._error.with_traceback(None)
        first_offset, position, store_unix_ms, durability, duplicate = self._stored
        return Receipt(
            self.queue, first_offset + index, position, index, store_unix_ms, durability, duplicate
        )

    async def wait_for_all(self) -> None:
        """Wait until every message of the batch has its outcome, wherever it has moved."""
        if (settled := self.when_settled()) is not None:
            await settled
        for outcome in {pending._outcome for pending in self.moved}:
            await outcome.wait_for_all()

    async def wait_for_range(
        self, first: int, count: int, first_index: int
    ) -> list[ReceiptRange | FailedRange]:
        """Return the outcomes of `count` messages from `first` on, when the batch has its outcome.

        Args:
            first: Index in the batch of the first message.
            first_index: Index of that message among those of the `send_many`.
        """
        try:
            receipt = await self.wait(first)
        except BatonError as error:
            if not self.moved:
                return [FailedRange(first_index, count, error)]
        else:
            if not self.moved:
                return [ReceiptRange(first_index, count, *receipt)]
        outcomes: list[ReceiptRange | FailedRange] = []
        for number, pending in enumerate(self.moved[first : first + count]):
            outcomes += await pending.range(first_index + number)
        return outcomes

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
