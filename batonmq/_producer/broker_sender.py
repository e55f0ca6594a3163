"""Sends the batches for one broker in Append requests, with retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from itertools import accumulate
from typing import Protocol

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.clock import Clock
from batonmq._common.large_messages import append_request
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._common.topic_epochs import epoch_to_name
from batonmq._connection.directory import Directory
from batonmq._core.queue_sender import MAYBE_STORED, Batch, QueueSender, maybe_stored
from batonmq._core.queues import QueueRef
from batonmq._producer.producer_settings import ProducerSettings
from batonmq._producer.receipts import BatchOutcome
from batonmq.errors import (
    BatonError,
    DiskFull,
    DuplicateSequence,
    Internal,
    NotEnoughReplicas,
    NotWritable,
    Overloaded,
    QueueNotFound,
    Retry,
    SequenceGap,
    Throttled,
    Unreachable,
)

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BATCHES_MAX = 1_024
SMALL_BYTES = 16 * 1024
"""A request below this size waits for the answer to another one, at most `HOLD_S`."""
HOLD_S = 0.002


class NotSent(Unreachable):
    """The broker could not be connected to, so nothing was sent."""

    remedy = "Check that the storage service runs. Nothing was stored; sending again is safe."


_OF_THE_QUEUE = (NotWritable, QueueNotFound)
_NOT_STORED = (DiskFull, NotEnoughReplicas, NotSent, Overloaded, Throttled, *_OF_THE_QUEUE)
"""Errors which prove that this attempt stored nothing. `NotServing` does not: a disk that fails
during a write reports it too."""


class BatchResults(Protocol):
    """Receives the results of batches from the sender of a broker."""

    def settle(self, batch: Batch[BatchOutcome], outcome: pb.AppendReceipt | BatonError) -> None:
        """Set the outcome of the batch."""
        ...

    def is_writable(self, queue: QueueRef) -> bool:
        """Return whether the latest route says that the queue is writable."""
        ...

    def topic_epoch(self, topic: str) -> int | None:
        """Return the epoch of the topic, as its latest route says; None if that is not known."""
        ...

    def move(self, sender: QueueSender[BatchOutcome], error: BatonError) -> None:
        """Move the batches of a queue that is not writable to other queues of its topic."""
        ...

    def broker_answered(self, broker: str, latency_ms: int) -> None:
        """Record that the broker has answered a request."""
        ...

    def broker_failed(self, broker: str) -> None:
        """Record a failure of the broker."""
        ...

    def reroute(self, sender: QueueSender[BatchOutcome]) -> None:
        """Move waiting batches that may go to any queue, and are not stored, to other brokers."""
        ...


class BrokerSender:
    """Sends the ready batches of one broker, with a bounded number of requests in flight."""

    def __init__(
        self,
        broker: str,
        settings: ProducerSettings,
        directory: Directory,
        clock: Clock,
        results: BatchResults,
    ) -> None:
        self._broker, self._settings = broker, settings
        self._directory, self._clock, self._results = directory, clock, results
        self._ready: dict[QueueSender[BatchOutcome], None] = {}
        self._woken, self._turn = asyncio.Event(), asyncio.Lock()
        self._answered, self._in_flight_count = asyncio.Event(), 0

    def wake(self, sender: QueueSender[BatchOutcome]) -> None:
        """Schedule `sender` if it has a batch that is ready."""
        if sender.ready and sender not in self._ready:
            self._ready[sender] = None
            self._woken.set()

    async def run(self) -> None:
        """Send until cancelled; run it as one task."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.in_flight_requests_max):
                tasks.create_task(self._work(tasks))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        """Send one request after the other."""
        while True:
            async with self._turn:
                await self._woken.wait()
                if self._settings.linger_ms:
                    await asyncio.sleep(self._settings.linger_ms / 1000)
                await self._hold()
                senders = self._take()
            if senders and (failed := await self._request(senders)):
                tasks.create_task(self._back_off(*failed))

    async def _hold(self) -> None:
        """Let a small request wait for the answer to another one, and grow meanwhile.

        A request costs services and client much more than a message. The bound keeps a distant
        broker's round trips from adding up.
        """
        sizes = accumulate(sender.next_bytes for sender in self._ready)
        if not self._in_flight_count or any(size >= SMALL_BYTES for size in sizes):
            return
        self._answered.clear()
        with suppress(TimeoutError):
            async with timeouts.timeout(HOLD_S):
                await self._answered.wait()

    def _take(self) -> list[QueueSender[BatchOutcome]]:
        unix_ms = self._clock.unix_ms()
        taken: list[QueueSender[BatchOutcome]] = []
        bytes_count = 0
        while self._ready and bytes_count < REQUEST_BYTES_MAX and len(taken) < REQUEST_BATCHES_MAX:
            sender = next(iter(self._ready))
            del self._ready[sender]
            if not sender.ready:
                continue
            try:
                bytes_count += len(sender.take(unix_ms).encoded)
            except BatonError as error:
                self._results.settle(sender.rejected(), error)
                self.wake(sender)
            else:
                taken.append(sender)
        if not self._ready:
            self._woken.clear()
        return taken

    async def _request(
        self, senders: Sequence[QueueSender[BatchOutcome]]
    ) -> tuple[list[QueueSender[BatchOutcome]], BatonError] | None:
        """Send the batches in flight of `senders`.

        Returns:
            The senders of failed batches and the error of one of them; None if none failed.
        """
        self._in_flight_count += 1
        try:
            outcomes = await self._append(senders)
        finally:
            self._in_flight_count -= 1
            self._answered.set()
        failed: list[QueueSender[BatchOutcome]] = []
        worst: BatonError | None = None
        for sender, outcome in zip(senders, outcomes, strict=True):
            if isinstance(outcome, BatonError):
                worst = outcome
                failed.append(sender)
                self._failed(sender, outcome)
            else:
                self._results.settle(sender.stored(), outcome)
            self.wake(sender)
        return (failed, worst) if worst else None

    async def _back_off(self, failed: list[QueueSender[BatchOutcome]], error: BatonError) -> None:
        failures = max(sender.failures for sender in failed)
        await self._directory.pause(error, failures)
        for sender in failed:
            sender.backing_off = False
            self.wake(sender)

    async def _append(
        self, senders: Sequence[QueueSender[BatchOutcome]]
    ) -> Sequence[pb.AppendReceipt | BatonError]:
        """Return one outcome per batch in flight; if the call failed, its error for each batch."""
        timeout_s = self._settings.request_timeout_ms / 1000
        try:
            stub = await self._directory.connected_storage(self._broker, timeout_s)
        except BatonError as error:
            not_sent = NotSent(error.message, retry_after_ms=error.retry_after_ms)
            return [not_sent] * len(senders)
        batches, epochs = list[bytes](), list[int | None]()
        for sender in senders:
            batch = sender.in_flight
            assert batch is not None
            newest = self._results.topic_epoch(sender.queue.topic)
            batch.topic_epoch = epoch_to_name(batch.topic_epoch, newest)
            batches.append(batch.encoded)
            epochs.append(batch.topic_epoch)
        request = append_request(batches, self._settings.durability.value, epochs)
        begin_ms = self._clock.monotonic_ms()
        try:
            answer = await stub.Append(request, timeout=timeout_s)
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(senders)
        self._results.broker_answered(self._broker, self._clock.monotonic_ms() - begin_ms)
        return [
            error_from_pb(outcome.error) if outcome.HasField("error") else outcome.receipt
            for outcome in answer.outcomes
        ]

    def _failed(self, sender: QueueSender[BatchOutcome], error: BatonError) -> None:
        batch = sender.in_flight
        assert batch is not None
        no_queue = isinstance(error, _OF_THE_QUEUE)
        doubt = batch.unsure
        batch.unsure = batch.unsure or not isinstance(error, _NOT_STORED)
        if no_queue and not self._results.is_writable(sender.queue):
            self._results.move(sender, error)
            return
        now_ms = self._clock.monotonic_ms()
        late_ms = now_ms - self._settings.delivery_timeout_ms
        retry = error.retry is not Retry.NEVER
        lost = isinstance(error, SequenceGap)  # a batch that was stored in memory only is lost
        throttled = isinstance(error, Throttled)  # the quota ends, not the broker
        if retry and not no_queue and not lost and not throttled:
            self._results.broker_failed(self._broker)
        if retry and batch.begin_ms > late_ms:
            log.debug("append is retried queue=%s error=%s", sender.queue, error)
            sender.retry(new_epoch=lost)
            if not throttled:
                self._results.reroute(sender)
        elif retry or isinstance(error, DuplicateSequence | Internal):
            late = maybe_stored(error) if doubt and retry else _too_late(error, batch.unsure)
            self._results.settle(sender.unknown(), late)
        else:
            self._results.settle(sender.rejected(), maybe_stored(error) if doubt else error)
        for never_sent in sender.expire(late_ms):
            self._results.settle(never_sent, _too_late(error, never_sent.unsure))


def _too_late(error: BatonError, unsure: bool) -> BatonError:
    """Return the error of a batch that timed out; it says whether the batch may be stored."""
    if not isinstance(error, Unreachable):
        return error
    kind = Unreachable if unsure else NotSent
    return kind(error.message, remedy=MAYBE_STORED if unsure else "", facts=error.facts)
