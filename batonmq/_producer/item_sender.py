"""Stores messages that are each a batch of their own: scheduled messages and half messages.

One request has many batches. A batch that is retried keeps its bytes, and so its producer id and
sequence. Each producer id has at most one batch in flight, so one producer uses many ids. A message
with an id of its own is stored under that one, and never under another.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Coroutine, Iterator, Sequence
from dataclasses import dataclass
from random import Random
from typing import Any, Generic, Protocol, TypeVar

from batonmq._common.batcher import Batcher
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._core.queue_sender import ONE_BATCH_EPOCH, SEQUENCE_LIMIT, maybe_stored
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder
from batonmq.errors import BatonError, DuplicateSequence, NotWritable, QueueNotFound, Retry

REQUEST_ITEMS_MAX = 1_024
REQUEST_BYTES_MAX = 8 * 1024 * 1024
_OF_THE_QUEUE = (NotWritable, QueueNotFound)
"""Errors after which another queue may take the message: this attempt has not stored it."""


class BatchItem(Protocol):
    """An item of a request: a batch, and what else is to be known about it."""

    @property
    def batch(self) -> bytes:
        """The batch."""
        ...


Item = TypeVar("Item", bound=BatchItem)
Stored = TypeVar("Stored")


@dataclass(frozen=True, slots=True)
class OutgoingMessage(Generic[Item]):
    """A message to store.

    Attributes:
        bytes_count: Size of its record.
        choose: Returns the queue; called again if that queue is no longer writable.
        late_ms: Monotonic time from which on no attempt is repeated.
        item: Makes the item of the request from the batch; called for each attempt.
        once: Producer id of this message alone, 63 bits; 0 for one of the sender.
    """

    builder: BatchBuilder
    bytes_count: int
    choose: Callable[[], QueueRef]
    late_ms: int
    item: Callable[[bytes], Item]
    once: int = 0


class ItemSender(Generic[Item, Stored]):
    """Stores messages, and repeats what may not have arrived.

    Args:
        run: Runs a coroutine until the producer is closed.
        request: Sends items to a broker; returns one outcome each, in order.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        random: Random,
        run: Callable[[Coroutine[Any, Any, None]], object],
        request: Callable[[str, Sequence[Item]], Awaitable[Sequence[Stored | BatonError]]],
    ) -> None:
        self._directory, self._clock, self._random = directory, clock, random
        self._run, self._send_items = run, request
        self._batchers: dict[str, Batcher[Item, Stored | BatonError]] = {}
        self._lanes: dict[QueueRef, list[_Lane]] = {}

    async def send(
        self, sending: OutgoingMessage[Item], queue: QueueRef
    ) -> tuple[QueueRef, Stored]:
        """Store a message; try another queue if the queue is not writable.

        Returns:
            The queue, and what storage answered.

        Raises:
            BatonError: The message is not stored, or it is unknown whether it is.
        """
        refusals = 0
        while True:
            lane = self._take_lane(queue, sending.once)
            batch = self._encode(sending.builder, queue, lane)
            unsure = True  # if this is cancelled while it waits, the batch may be stored
            try:
                stored = await self._repeat(sending, queue, batch)
            except _Rejected as refused:
                unsure = refused.unsure
                error = refused.error
                if unsure or not isinstance(error, _OF_THE_QUEUE):
                    raise error from None
                other = sending.choose()
                stays = other == queue and isinstance(error, NotWritable)
                if stays or self._clock.monotonic_ms() >= sending.late_ms:
                    raise error from None
            else:
                unsure = False
                lane.stored()
                return queue, stored
            finally:
                if unsure:
                    lane.skip_sequence()
                if (lanes := self._lanes.get(queue)) is not None and not sending.once:
                    lanes.append(lane)
            # From the second refusal on, the route is probably older than the change of the topic.
            if refusals or other == queue:
                await self._directory.pause(error, refusals)
            queue = other
            refusals += 1

    def forget_topic(self, name: str) -> None:
        """Forget the producer ids that were used for a deleted topic."""
        self._lanes = {queue: lanes for queue, lanes in self._lanes.items() if queue.topic != name}

    def _take_lane(self, queue: QueueRef, once: int) -> _Lane:
        if once:
            return _Lane(once, ONE_BATCH_EPOCH)
        lanes = self._lanes.setdefault(queue, [])
        return lanes.pop() if lanes else _Lane(self._random.getrandbits(63) or 1)

    def _encode(self, builder: BatchBuilder, queue: QueueRef, lane: _Lane) -> bytes:
        return builder.encode(
            topic=queue.topic,
            queue_id=queue.queue_id,
            producer=(lane.producer_id, lane.epoch),
            sequence=lane.sequence,
            born_unix_ms=self._clock.unix_ms(),
        )

    async def _repeat(
        self, sending: OutgoingMessage[Item], queue: QueueRef, batch: bytes
    ) -> Stored:
        """Send the same bytes until there is a receipt, and return it.

        Raises:
            _Rejected: The batch is not stored, or it is unknown whether it is.
        """
        unsure, failures = False, 0
        while True:
            outcome = await self._batcher(queue.broker).call(sending.item(batch))
            if not isinstance(outcome, BatonError):
                return outcome
            doubt = unsure and not isinstance(outcome, DuplicateSequence)
            unsure = unsure or outcome.kind in ("UNAVAILABLE", "INTERNAL")
            moved = isinstance(outcome, _OF_THE_QUEUE) and not unsure
            over = self._clock.monotonic_ms() >= sending.late_ms
            if over or moved or outcome.retry is Retry.NEVER:
                raise _Rejected(maybe_stored(outcome) if doubt else outcome, unsure)
            await self._directory.pause(outcome, failures)
            failures += 1

    def _batcher(self, broker: str) -> Batcher[Item, Stored | BatonError]:
        batcher = self._batchers.get(broker)
        if batcher is None:

            async def request(items: Sequence[Item]) -> Sequence[Stored | BatonError]:
                return [
                    outcome
                    for part in parts(items)
                    for outcome in await self._send_items(broker, part)
                ]

            batcher = self._batchers[broker] = Batcher(request, items_max=REQUEST_ITEMS_MAX)
            self._run(batcher.run())
        return batcher


class _Rejected(Exception):
    """A batch has no receipt; `unsure` if it may be stored."""

    def __init__(self, error: BatonError, unsure: bool) -> None:
        self.error, self.unsure = error, unsure


@dataclass(slots=True)
class _Lane:
    """A producer id on one queue, with at most one batch in flight."""

    producer_id: int
    epoch: int = 0
    sequence: int = 0

    def stored(self) -> None:
        self.sequence = (self.sequence + 1) % SEQUENCE_LIMIT

    def skip_sequence(self) -> None:
        """Start a new epoch, because the last batch may be stored with the current sequence."""
        self.epoch += 1
        self.sequence = 0


def parts(items: Sequence[Item]) -> Iterator[Sequence[Item]]:
    """Split `items` into parts that fit `REQUEST_BYTES_MAX`; a part has at least one item."""
    begin, size = 0, 0
    for index, item in enumerate(items):
        size += len(item.batch)
        if size > REQUEST_BYTES_MAX and index > begin:
            yield items[begin:index]
            begin, size = index, len(item.batch)
    yield items[begin:]
