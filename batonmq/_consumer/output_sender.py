"""Sends the outputs of transformers to one broker, in Append requests, with retries."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from contextlib import suppress
from typing import Protocol

import grpc.aio

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.large_messages import append_request
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._common.topic_epochs import epoch_to_name
from batonmq._consumer.session import Session
from batonmq._core.output_lanes import OutputQueue
from batonmq.errors import (
    BatonError,
    DiskFull,
    NotEnoughReplicas,
    NotWritable,
    Overloaded,
    QueueNotFound,
    Retry,
    Throttled,
)

log = logging.getLogger(__name__)

REQUESTS_MAX = 4
REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BATCHES_MAX = 1_024
REQUEST_TIMEOUT_S = 5.0
SMALL_BYTES = 16 * 1024
"""A request below this size waits for the answer to another one, at most `HOLD_S`."""
HOLD_S = 0.002
LOG_INTERVAL_S = 10.0
_NOT_STORED = (DiskFull, NotEnoughReplicas, NotWritable, Overloaded, QueueNotFound, Throttled)
"""Errors which prove that this attempt stored nothing."""

Input = object


class OutputResults(Protocol):
    """Receives what became of batches of outputs."""

    def encode(self, queue: OutputQueue[Input]) -> bytes | None:
        """Return the next batch of a queue; None if nothing of its lane may be sent now."""
        ...

    def stored(self, queue: OutputQueue[Input]) -> None:
        """Note that the batch in flight is stored."""
        ...

    def refused(self, queue: OutputQueue[Input], error: BatonError) -> bool:
        """Deal with an error that a repetition does not end; return False if it is none."""
        ...

    def topic_epoch(self, topic: str) -> int | None:
        """Return the epoch of the topic, as its latest route says; None if it does not."""
        ...

    def wake(self, queue: OutputQueue[Input]) -> None:
        """Send the next batch of a queue, if it has one that is ready."""
        ...


class BrokerOutputs:
    """Sends the outputs for one broker, with a bounded number of requests in flight."""

    def __init__(self, broker: str, session: Session, results: OutputResults) -> None:
        self._broker, self._session, self._results = broker, session, results
        self._ready: dict[OutputQueue[Input], None] = {}
        self._woken, self._turn = asyncio.Event(), asyncio.Lock()
        self._answered, self._in_flight_count = asyncio.Event(), 0
        self._logged_s = -LOG_INTERVAL_S

    def wake(self, queue: OutputQueue[Input]) -> None:
        """Schedule a queue if it has a batch that is ready."""
        if queue.ready and not queue.scheduled:
            queue.scheduled = True
            self._ready[queue] = None
            self._woken.set()

    async def run(self) -> None:
        """Send until cancelled; run it as one task."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(REQUESTS_MAX):
                tasks.create_task(self._work(tasks))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            async with self._turn:
                await self._woken.wait()
                await self._hold()
                queues, batches = self._take()
            if queues and (failed := await self._request(queues, batches)):
                tasks.create_task(self._back_off(*failed))

    async def _hold(self) -> None:
        """Let a small request wait for the answer to another one, and grow meanwhile."""
        size = sum(queue.waiting_bytes for queue in self._ready)
        if not self._in_flight_count or size >= SMALL_BYTES:
            return
        self._answered.clear()
        with suppress(TimeoutError):
            async with timeouts.timeout(HOLD_S):
                await self._answered.wait()

    def _take(self) -> tuple[list[OutputQueue[Input]], list[bytes]]:
        queues: list[OutputQueue[Input]] = []
        batches: list[bytes] = []
        size = 0
        while self._ready and size < REQUEST_BYTES_MAX and len(batches) < REQUEST_BATCHES_MAX:
            queue = next(iter(self._ready))
            del self._ready[queue]
            queue.scheduled = False
            if not queue.ready or (batch := self._results.encode(queue)) is None:
                continue
            queues.append(queue)
            batches.append(batch)
            size += len(batch)
        if not self._ready:
            self._woken.clear()
        return queues, batches

    async def _request(
        self, queues: Sequence[OutputQueue[Input]], batches: Sequence[bytes]
    ) -> tuple[list[OutputQueue[Input]], BatonError] | None:
        """Send batches; return the queues of those that are to be repeated, and an error of them.

        Whether the call is cancelled or fails, what was sent stays in flight.
        """
        self._in_flight_count += 1
        try:
            outcomes = await self._append(queues, batches)
        finally:
            self._in_flight_count -= 1
            self._answered.set()
        failed: list[OutputQueue[Input]] = []
        worst: BatonError | None = None
        for queue, outcome in zip(queues, outcomes, strict=True):
            if not isinstance(outcome, BatonError):
                self._results.stored(queue)
                self._results.wake(queue)
                continue
            queue.failed(unsure=not isinstance(outcome, _NOT_STORED))
            if self._results.refused(queue, outcome):
                queue.backing_off = False
                self._results.wake(queue)
            else:
                worst = outcome
                failed.append(queue)
        return None if worst is None else (failed, worst)

    async def _append(
        self, queues: Sequence[OutputQueue[Input]], batches: Sequence[bytes]
    ) -> Sequence[pb.AppendReceipt | BatonError]:
        for queue in queues:
            newest = self._results.topic_epoch(queue.queue.topic)
            queue.topic_epoch = epoch_to_name(queue.topic_epoch, newest)
        epochs = [queue.topic_epoch for queue in queues]
        request = append_request(batches, pb.DURABILITY_UNSPECIFIED, epochs)
        try:
            stub = await self._session.directory.connected_storage(self._broker, REQUEST_TIMEOUT_S)
            answer = await stub.Append(request, timeout=REQUEST_TIMEOUT_S)
        except grpc.aio.AioRpcError as failure:
            return [from_rpc_error(failure)] * len(batches)
        except BatonError as error:
            return [error] * len(batches)
        return [
            error_from_pb(outcome.error) if outcome.HasField("error") else outcome.receipt
            for outcome in answer.outcomes
        ]

    async def _back_off(self, queues: Sequence[OutputQueue[Input]], error: BatonError) -> None:
        now_s = asyncio.get_running_loop().time()
        if now_s - self._logged_s >= LOG_INTERVAL_S:
            self._logged_s = now_s
            level = logging.ERROR if error.retry is Retry.NEVER else logging.WARNING
            log.log(level, "outputs not stored, trying again broker=%s: %s", self._broker, error)
        # A queue that was cleared since, because its input queue was revoked, has no failures.
        retries = max(0, max(queue.failures for queue in queues) - 1)
        await self._session.directory.pause(error, retries)
        for queue in queues:
            queue.backing_off = False
            self._results.wake(queue)
