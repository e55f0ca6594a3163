"""Stores half messages, and ends transactions."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Coroutine, Sequence
from random import Random
from typing import Any

import grpc.aio

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._common.batcher import Batcher
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message
from batonmq._core.transactions import CommitReceipt, TransactionState, broker_of
from batonmq._producer.item_sender import ItemSender, OutgoingMessage
from batonmq._producer.producer_settings import ProducerSettings, compressor_of
from batonmq.errors import BatonError, InvalidArgument, Retry, Unreachable

ENDS_MAX = 1_024
CHECK_AFTER_MS_MAX = 86_400_000
_STATES = {
    TransactionState.COMMIT: pb.TRANSACTION_STATE_COMMITTED,
    TransactionState.ROLLBACK: pb.TRANSACTION_STATE_ROLLED_BACK,
    TransactionState.UNKNOWN: pb.TRANSACTION_STATE_UNKNOWN,
}


class TransactionSender:
    """Begins and ends transactions.

    Args:
        run: Runs a coroutine until the producer is closed.
    """

    def __init__(
        self,
        directory: Directory,
        clock: Clock,
        random: Random,
        run: Callable[[Coroutine[Any, Any, None]], object],
        settings: ProducerSettings,
    ) -> None:
        self._directory, self._clock, self._run = directory, clock, run
        self._settings, self._packing = settings, compressor_of(settings)
        self._items: ItemSender[pb.BeginItem, pb.BeginReceipt] = ItemSender(
            directory,
            clock,
            random,
            run,
            self._begin,
        )
        self._enders: dict[str, Batcher[pb.EndItem, pb.EndReceipt | BatonError]] = {}
        self._closed: BatonError | None = None

    async def begin(
        self,
        group: str,
        message: Message,
        record: bytes,
        choose: Callable[[], QueueRef],
        check_after_ms: int,
    ) -> tuple[QueueRef, str]:
        """Store a half message; return its queue and the id of its transaction.

        Args:
            record: The message, encoded.
            choose: Returns the queue; called again if that queue is no longer writable.
            check_after_ms: Age at the first check; 0 for the setting of the broker.

        Raises:
            BatonError: It is not stored, or it is unknown whether it is.
        """
        builder = BatchBuilder(self._packing)
        builder.add(message, record)
        sending = OutgoingMessage(
            builder,
            len(record),
            choose,
            self._clock.monotonic_ms() + self._settings.delivery_timeout_ms,
            lambda batch: pb.BeginItem(batch=batch, group=group, check_after_ms=check_after_ms),
        )
        queue, receipt = await self._items.send(sending, choose())
        return queue, receipt.transaction_id

    async def commit(self, transaction_id: str, topic: str) -> CommitReceipt:
        """Commit a transaction; see `Transaction.commit`.

        Args:
            topic: Topic of the message.
        """
        receipt = await self.end(transaction_id, TransactionState.COMMIT, topic)
        queue = QueueRef(topic, broker_of(transaction_id), receipt.queue_id)
        return CommitReceipt(queue, receipt.first_offset, receipt.duplicate)

    async def end(
        self, transaction_id: str, state: TransactionState, topic: str = ""
    ) -> pb.EndReceipt:
        """End a transaction, or say that its state is not known.

        Args:
            topic: Topic of the message; if it is of another one, the transaction is not found.

        Raises:
            TransactionNotFound, TransactionEnded, TopicNotFound: It can't end so.
            Unreachable: No outcome within the delivery timeout; it may have ended so.
        """
        broker = broker_of(transaction_id)
        item = pb.EndItem(transaction_id=transaction_id, state=_STATES[state], topic=topic)
        late_ms = self._clock.monotonic_ms() + self._settings.delivery_timeout_ms
        failures = 0
        while True:
            outcome = await self._call(broker, item)
            if not isinstance(outcome, BatonError):
                return outcome
            if outcome.retry is Retry.NEVER or self._clock.monotonic_ms() >= late_ms:
                raise outcome
            await self._directory.pause(outcome, failures)
            failures += 1

    def forget_topic(self, name: str) -> None:
        """See `ItemSender`."""
        self._items.forget_topic(name)

    def close(self, error: BatonError) -> None:
        """Fail every later call; those that wait end without an outcome."""
        self._closed = error

    async def _call(self, broker: str, item: pb.EndItem) -> pb.EndReceipt | BatonError:
        if self._closed is not None:
            raise self._closed
        try:
            return await self._ender(broker).call(item)
        except asyncio.CancelledError:
            task = asyncio.current_task()
            if self._closed is None or (task is not None and task.cancelling()):
                raise
            raise Unreachable(
                "the producer was closed; whether the transaction has ended is not known",
                remedy="Do nothing: the broker asks the transaction checker of the group.",
            ) from None

    @property
    def _timeout_s(self) -> float:
        return self._settings.request_timeout_ms / 1000

    def _ender(self, broker: str) -> Batcher[pb.EndItem, pb.EndReceipt | BatonError]:
        ender = self._enders.get(broker)
        if ender is None:

            async def request(items: Sequence[pb.EndItem]) -> Sequence[pb.EndReceipt | BatonError]:
                return await self._end(broker, items)

            ender = self._enders[broker] = Batcher(request, items_max=ENDS_MAX)
            self._run(ender.run())
        return ender

    async def _begin(
        self, broker: str, items: Sequence[pb.BeginItem]
    ) -> Sequence[pb.BeginReceipt | BatonError]:
        return await begin_items(self._directory, broker, items, self._timeout_s)

    async def _end(
        self, broker: str, items: Sequence[pb.EndItem]
    ) -> Sequence[pb.EndReceipt | BatonError]:
        """Return one outcome per item; if the call failed, its error for each item."""
        try:
            stub = await self._directory.transactions(broker)
            answer = await stub.End(pb.EndRequest(items=items), timeout=self._timeout_s)
        except grpc.aio.AioRpcError as error:
            return [from_rpc_error(error)] * len(items)
        except BatonError as error:
            return [error] * len(items)
        return [
            error_from_pb(one.error) if one.HasField("error") else one.receipt
            for one in answer.outcomes
        ]


async def begin_items(
    directory: Directory, broker: str, items: Sequence[pb.BeginItem], timeout_s: float
) -> list[pb.BeginReceipt | BatonError]:
    """Return one outcome per item; if the call failed, its error for each item."""
    try:
        stub = await directory.transactions(broker)
        answer = await stub.Begin(pb.BeginRequest(items=items), timeout=timeout_s)
    except grpc.aio.AioRpcError as error:
        return [from_rpc_error(error)] * len(items)
    except BatonError as error:
        return [error] * len(items)
    return [
        error_from_pb(one.error) if one.HasField("error") else one.receipt
        for one in answer.outcomes
    ]


def checked_after_ms(check_after_ms: int | None) -> int:
    """Return the age of a transaction at its first check; 0 for None, the setting of the broker.

    Raises:
        InvalidArgument: It is not 1 ms to 24 h.
    """
    if check_after_ms is None:
        return 0
    if not 1 <= check_after_ms <= CHECK_AFTER_MS_MAX:
        raise InvalidArgument(
            f"check_after_ms must be 1 to {CHECK_AFTER_MS_MAX}, got {check_after_ms}",
            facts={"field": "check_after_ms", "limit": CHECK_AFTER_MS_MAX},
        )
    return check_after_ms


def needs_group(group: str) -> str:
    """Return the producer group, which transactions need.

    Raises:
        InvalidArgument: The producer has no group.
    """
    if not group:
        raise InvalidArgument(
            "a transaction needs a producer group",
            remedy='Name it: Producer(..., group="payments"). All programs that can answer for its '
            "transactions use the same name.",
            facts={"field": "group"},
        )
    return group
