"""Ends transactions of remote clients; SendMessage begins them."""

from __future__ import annotations

import asyncio

from apache.rocketmq.v2 import definition_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._connection.directory import Directory
from batonmq._core.transactions import TransactionState, broker_of
from batonmq._producer.producer import Producer
from batonmq.errors import InvalidArgument, TransactionEnded, TransactionNotFound, Unreachable
from batonmq_server.gateway.statuses import Refused

BROKERS_INTERVAL_MS = 1_000
"""The brokers are looked up again for an unknown one, at most so often."""
_STATES = {
    pb.COMMIT: TransactionState.COMMIT,
    pb.ROLLBACK: TransactionState.ROLLBACK,
    pb.TRANSACTION_RESOLUTION_UNSPECIFIED: TransactionState.UNKNOWN,
}


class Transactions:
    """Ends transactions. An id is that of storage: any gateway can end any of them."""

    def __init__(self, producer: Producer, directory: Directory, clock: Clock) -> None:
        self._producer, self._directory, self._clock = producer, directory, clock
        self._brokers: set[str] = set()
        self._refresh_ms = 0
        self._looking_up = asyncio.Lock()

    async def end(
        self, topic: str, transaction_id: str, resolution: pb.TransactionResolution.ValueType
    ) -> None:
        """End a transaction; without a resolution only look whether it is open.

        Raises:
            Refused: The id is not of a transaction of the topic, or it has ended the other way.
            BatonError: It is unknown whether it has ended.
        """
        state = _STATES.get(resolution)
        if state is None:
            raise Refused(pb.BAD_REQUEST, f"resolution {resolution} is unknown")
        try:
            broker = broker_of(transaction_id)
            if not await self._is_broker(broker):
                # It may be down, or the id is wrong: that is not known here.
                raise Unreachable(
                    f"no storage node of broker {broker[:100]!r} is registered; the transaction "
                    "stays open until it is, and its producer is asked then"
                )
            await self._producer.end_transaction(transaction_id, state, topic=topic)
        except (InvalidArgument, TransactionNotFound, TransactionEnded) as error:
            text = f"{error.reason}: {error.message}. {error.remedy}"
            raise Refused(pb.INVALID_TRANSACTION_ID, text) from error

    async def _is_broker(self, name: str) -> bool:
        """Whether the broker is known: an id is a text of the client, and may name any.

        Calls at the same time wait for one look-up. A broker that was known and is down still is.

        Raises:
            BatonError: The brokers are not known.
        """
        if name not in self._brokers:
            async with self._looking_up:
                now_ms = self._clock.monotonic_ms()
                if name not in self._brokers and now_ms >= self._refresh_ms:
                    self._brokers |= await self._directory.brokers()
                    self._refresh_ms = now_ms + BROKERS_INTERVAL_MS
        return name in self._brokers
