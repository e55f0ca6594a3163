"""Lists transactions that have not ended."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._core.queues import QueueRef
from batonmq._core.transactions import broker_of
from batonmq.admin._broker_names import broker_names
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, InvalidArgument, TransactionNotFound

PAGE_MAX = 1_000
SCANNED_MAX = 20_000
"""Open transactions of a broker that a search by key reads: each is a read of the log."""


@dataclass(frozen=True, slots=True)
class TransactionDetail:
    """A transaction that has not ended.

    Attributes:
        queue: Queue of the message; None if the half message is damaged.
        keys: Keys of the message.
        begin_unix_ms: Time at which the half message was stored, by the clock of its broker; 0 if
            it is damaged.
        checks: Number of checks so far.
        next_check_unix_ms: Time from which the next check is due.
        live_producers: Producers of the group that can be asked; with 0 the transaction waits.
        problem: Why the half message can't be read; empty if it can.
    """

    transaction_id: str
    group: str
    queue: QueueRef | None
    keys: tuple[str, ...]
    begin_unix_ms: int
    checks: int
    next_check_unix_ms: int
    live_producers: int
    problem: str

    @property
    def why_open(self) -> str:
        """Why the transaction has not ended yet."""
        if self.problem:
            return "the half message is damaged: it ends with a message in BATON_SYS_UNRESOLVED"
        if not self.live_producers:
            return f"no producer of group {self.group} with a transaction checker is alive"
        if not self.checks:
            return "its producer has not ended it, and no check was due yet"
        return f"no producer knows its state yet; {self.checks} checks were sent"


class Transactions:
    """Reads open transactions.

    Args:
        admin: Client of the cluster; the caller closes it.
    """

    def __init__(self, admin: Admin) -> None:
        self._admin = admin

    async def find(
        self, *, group: str = "", topic: str = "", key: str = "", count_max: int = 100
    ) -> tuple[tuple[TransactionDetail, ...], int, tuple[str, ...]]:
        """Return the oldest transactions of each broker.

        Args:
            group: Only those of this producer group.
            topic: Only those with a message for this topic.
            key: Only those with a message with this key; among the oldest SCANNED_MAX of a broker.
            count_max: Maximum number of transactions of each broker.

        Returns:
            The transactions, oldest first; the number of all open transactions of the brokers; and
            the errors of brokers that failed.

        Raises:
            Unreachable: No nameserver responds.
        """
        brokers = await broker_names(self._admin)
        async with asyncio.TaskGroup() as tasks:
            calls = [
                tasks.create_task(self._of_broker(broker, group, (topic, key), count_max))
                for broker in brokers
            ]
        found = [one for call in calls for one in call.result()[0]]
        found.sort(key=lambda one: (one.begin_unix_ms, one.transaction_id))
        problems = tuple(call.result()[2] for call in calls if call.result()[2])
        return tuple(found), sum(call.result()[1] for call in calls), problems

    async def show(self, transaction_id: str) -> TransactionDetail:
        """Return one open transaction.

        Raises:
            TransactionNotFound: It is not open.
        """
        broker = broker_of(transaction_id)
        try:
            position = int(transaction_id.rpartition("-")[2], 16)
        except ValueError:
            raise InvalidArgument(
                f"{transaction_id[:100]!r} is not the id of a transaction",
                facts={"field": "transaction_id"},
            ) from None
        after_id = f"{broker}-{position - 1:x}" if position else ""
        request = pb.ListTransactionsRequest(transactions_max=1, after_id=after_id)
        answer = await self._ask(broker, request)
        for one in answer.transactions:
            if one.transaction_id == transaction_id:
                return _detail(one)
        raise TransactionNotFound(
            f"transaction {transaction_id} is not open: it has ended, or the id is unknown",
            facts={"transaction_id": transaction_id},
        )

    async def _of_broker(
        self, broker: str, group: str, wanted: tuple[str, str], count_max: int
    ) -> tuple[list[TransactionDetail], int, str]:
        found: list[TransactionDetail] = []
        after_id, open_count, scanned = "", 0, 0
        try:
            while True:
                request = pb.ListTransactionsRequest(
                    transactions_max=PAGE_MAX if any(wanted) else min(count_max, PAGE_MAX),
                    after_id=after_id,
                    group=group,
                )
                answer = await self._ask(broker, request)
                open_count, after_id = answer.open_count, answer.next_after_id
                found += filter(_selector(*wanted), map(_detail, answer.transactions))
                scanned += len(answer.transactions)
                if not after_id or len(found) >= count_max:
                    return found[:count_max], open_count, ""
                if wanted[1] and scanned >= SCANNED_MAX:
                    problem = f"only the oldest {scanned} open transactions were compared"
                    return found, open_count, f"{broker}: {problem}"
        except BatonError as error:
            return found, open_count, f"{broker}: {error.reason}: {error.message}"

    async def _ask(
        self, broker: str, request: pb.ListTransactionsRequest
    ) -> pb.ListTransactionsResponse:
        async def ask(limit_s: float) -> pb.ListTransactionsResponse:
            stub = await self._admin.directory.transactions(broker)
            return await stub.ListTransactions(request, timeout=limit_s)

        return await self._admin.ask(ask)


def _selector(topic: str, key: str) -> Callable[[TransactionDetail], bool]:
    """Return whether a transaction is for a topic and has a key; empty for any."""

    def selects(one: TransactionDetail) -> bool:
        of_topic = not topic or (one.queue is not None and one.queue.topic == topic)
        return of_topic and (not key or key in one.keys)

    return selects


def _detail(one: pb.OpenTransaction) -> TransactionDetail:
    broker = broker_of(one.transaction_id)
    return TransactionDetail(
        one.transaction_id,
        one.group,
        QueueRef(one.topic, broker, one.queue_id) if one.topic else None,
        tuple(one.keys),
        one.begin_unix_ms,
        one.checks,
        one.next_check_unix_ms,
        one.live_producers,
        one.problem,
    )
