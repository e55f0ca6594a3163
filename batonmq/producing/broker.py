"""Requests to one broker: which batches travel together, and what becomes of each."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import grpc.aio
from baton.storage.v1 import storage_service_pb2 as pb

from batonmq.common.clock import Clock
from batonmq.common.errors import (
    BatonError,
    DuplicateSequence,
    Internal,
    NotWritable,
    QueueNotFound,
    Retry,
)
from batonmq.common.rpc import error_from_pb, from_rpc_error
from batonmq.core.route import QueueId
from batonmq.core.sending import Batch, QueueSender
from batonmq.directory import Directory
from batonmq.producing.receipts import Outcome
from batonmq.producing.settings import ProducerSettings

log = logging.getLogger(__name__)

REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BATCHES_MAX = 1_024


@dataclass(frozen=True, slots=True)
class Landing:
    """What the producer does with batches that come back.

    Attributes:
        settle: The batch has its outcome.
        takes: Whether a queue takes messages, as far as is known.
        move: Gives what waits for a queue that takes none to others of its topic.
    """

    settle: Callable[[Batch[Outcome], pb.AppendReceipt | BatonError], None]
    takes: Callable[[QueueId], bool]
    move: Callable[[QueueSender[Outcome], BatonError], None]


class BrokerLoop:
    """Sends the batches that are ready for one broker, a few requests at a time."""

    def __init__(
        self,
        broker: str,
        settings: ProducerSettings,
        directory: Directory,
        clock: Clock,
        landing: Landing,
    ) -> None:
        self._broker, self._settings = broker, settings
        self._directory, self._clock, self._landing = directory, clock, landing
        self._ready: dict[QueueSender[Outcome], None] = {}
        self._woken, self._turn = asyncio.Event(), asyncio.Lock()

    def wake(self, sender: QueueSender[Outcome]) -> None:
        """The sender may have a batch that can leave."""
        if sender.ready and sender not in self._ready:
            self._ready[sender] = None
            self._woken.set()

    async def run(self) -> None:
        """Send for ever; to be run as one task."""
        async with asyncio.TaskGroup() as tasks:
            for _ in range(self._settings.in_flight_requests_max):
                tasks.create_task(self._work(tasks))

    async def _work(self, tasks: asyncio.TaskGroup) -> None:
        """Have one request under way at a time."""
        while True:
            async with self._turn:
                await self._woken.wait()
                if self._settings.linger_ms:
                    await asyncio.sleep(self._settings.linger_ms / 1000)
                senders = self._take()
            if senders and (failed := await self._request(senders)):
                tasks.create_task(self._back_off(*failed))

    def _take(self) -> list[QueueSender[Outcome]]:
        unix_ms = self._clock.unix_ms()
        taken: list[QueueSender[Outcome]] = []
        bytes_count = 0
        while self._ready and bytes_count < REQUEST_BYTES_MAX and len(taken) < REQUEST_BATCHES_MAX:
            sender = next(iter(self._ready))
            del self._ready[sender]
            if not sender.ready:
                continue
            try:
                bytes_count += len(sender.take(unix_ms).encoded)
            except BatonError as error:
                self._landing.settle(sender.refused(), error)
                self.wake(sender)
            else:
                taken.append(sender)
        if not self._ready:
            self._woken.clear()
        return taken

    async def _request(
        self, senders: Sequence[QueueSender[Outcome]]
    ) -> tuple[list[QueueSender[Outcome]], BatonError] | None:
        """Send what `senders` have taken; those that have failed, and an error of one of them."""
        outcomes = await self._append([s.in_flight.encoded for s in senders if s.in_flight])
        failed: list[QueueSender[Outcome]] = []
        worst: BatonError | None = None
        for sender, outcome in zip(senders, outcomes, strict=True):
            if isinstance(outcome, BatonError):
                worst = outcome
                failed.append(sender)
                self._failed(sender, outcome)
            else:
                self._landing.settle(sender.stored(), outcome)
            self.wake(sender)
        return (failed, worst) if worst else None

    async def _back_off(self, failed: list[QueueSender[Outcome]], error: BatonError) -> None:
        failures = max(sender.failures for sender in failed)
        await self._directory.pause(error, failures)
        for sender in failed:
            sender.backing_off = False
            self.wake(sender)

    async def _append(self, batches: list[bytes]) -> Sequence[pb.AppendReceipt | BatonError]:
        """One outcome per batch; if the call failed, its error for each."""
        try:
            stub = await self._directory.storage(self._broker)
            answer = await stub.Append(
                pb.AppendRequest(batches=batches, durability=self._settings.durability.value),
                timeout=self._settings.request_timeout_ms / 1000,
            )
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(batches)
        except BatonError as error:
            return [error] * len(batches)
        return [
            error_from_pb(outcome.error) if outcome.HasField("error") else outcome.receipt
            for outcome in answer.outcomes
        ]

    def _failed(self, sender: QueueSender[Outcome], error: BatonError) -> None:
        batch = sender.in_flight
        assert batch is not None
        no_queue = isinstance(error, NotWritable | QueueNotFound)
        batch.unsure = batch.unsure or not no_queue
        if no_queue and not self._landing.takes(sender.queue):
            self._landing.move(sender, error)
            return
        now_ms = self._clock.monotonic_ms()
        late_ms = now_ms - self._settings.delivery_timeout_ms
        retry = error.retry is not Retry.NEVER
        if retry and batch.begin_ms > late_ms:
            log.debug("append is repeated queue=%s error=%s", sender.queue, error)
            sender.again()
        elif retry or isinstance(error, DuplicateSequence | Internal):
            self._landing.settle(sender.unknown(), error)
        else:
            self._landing.settle(sender.refused(), error)
        for never_sent in sender.expire(late_ms):
            self._landing.settle(never_sent, error)
