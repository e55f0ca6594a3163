"""The producers of a run and the outcome of each message."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field
from itertools import count

from batonmq._core.records import Message
from batonmq._producer.broker_sender import NotSent
from batonmq._producer.producer import Producer
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import PendingReceipt
from batonmq._producer.send_buffer import ProducerClosed
from batonmq.errors import (
    BatonError,
    DiskFull,
    InvalidArgument,
    LimitExceeded,
    NotWritable,
    Overloaded,
    QueueNotFound,
    TopicNotFound,
)
from tests.support.member import now_us
from tools.faults.history import Send, SendOutcome
from tools.faults.member import TOPIC

CERTAIN = (
    DiskFull, InvalidArgument, LimitExceeded, NotSent, NotWritable, Overloaded, ProducerClosed,
    QueueNotFound, TopicNotFound,
)  # fmt: skip
"""Errors that guarantee that the message is not stored. After other errors it may be stored."""
PATIENT = ProducerSettings()
HASTY = ProducerSettings(delivery_timeout_ms=2_500, request_timeout_ms=2_000)
"""Times out during a failover, so that some sends fail and some are indeterminate."""
FREE = "free"
"""Tag of the messages without an ordering key."""
_BATCH, _EVERY_S, _KEYS = 20, 0.2, 20
_WAITING_MAX = 5_000


@dataclass(slots=True)
class Load:
    """The sends of all producers so far."""

    nameserver: str
    sends: list[Send] = field(default_factory=list)
    stop: asyncio.Event = field(default_factory=asyncio.Event)
    _numbers: count[int] = field(default_factory=count)

    def number(self) -> int:
        """Return the number of a new message."""
        return next(self._numbers)

    async def produce(self, name: str, settings: ProducerSettings, *, keyed: bool) -> None:
        """Send about 100 messages per second until `stop` is set; wait for all outcomes."""
        room = asyncio.Semaphore(_WAITING_MAX)
        async with asyncio.TaskGroup() as tasks, Producer(self.nameserver, settings) as producer:
            while not self.stop.is_set():
                for _ in range(_BATCH):
                    await room.acquire()
                    number = self.number()
                    key = f"{name}-{number % _KEYS}" if keyed else None
                    begin_us = now_us()
                    message = Message(str(number).encode(), "" if keyed else FREE)
                    try:
                        pending = await producer.submit(TOPIC, message, ordering_key=key)
                    except BatonError as error:
                        self._note(Send(number, key or "", begin_us, 0, SendOutcome.FAIL), error)
                        room.release()
                        continue
                    begun = Send(number, key or "", begin_us, 0, SendOutcome.INDETERMINATE)
                    tasks.create_task(self._settle(begun, pending, room))
                await asyncio.sleep(_EVERY_S)

    async def _settle(self, begun: Send, pending: PendingReceipt, room: asyncio.Semaphore) -> None:
        try:
            receipt = await pending
        except BatonError as error:
            outcome = SendOutcome.FAIL if isinstance(error, CERTAIN) else SendOutcome.INDETERMINATE
            self._note(begun._replace(outcome=outcome), error)
        else:
            queue = receipt.queue.broker, receipt.queue.queue_id
            self.sends.append(
                begun._replace(
                    end_us=now_us(), outcome=SendOutcome.OK, queue=queue, offset=receipt.offset
                )
            )
        finally:
            room.release()

    def _note(self, begun: Send, error: BatonError) -> None:
        reason = f"{type(error).__name__}: {error.reason}"
        self.sends.append(begun._replace(end_us=now_us(), reason=reason))
