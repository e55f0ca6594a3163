"""A transaction of a producer: a half message that waits for its end."""

from __future__ import annotations

import logging
from collections.abc import Awaitable, Callable
from types import TracebackType

from batonmq._core.queues import QueueRef
from batonmq._core.transactions import CommitReceipt, TransactionState
from batonmq._producer.transaction_sender import TransactionSender
from batonmq.errors import BatonError

log = logging.getLogger(__name__)


class Transaction:
    """A transaction that has begun: its half message is stored, and no consumer sees it.

    Attributes:
        transaction_id: Id of the transaction; `Producer.end_transaction` ends it in any process.
        topic: Topic of the message.
        queue: Queue of the message, unless the topic shrinks before the commit.
        receipt: Receipt of the commit; None before.
    """

    def __init__(self, sender: TransactionSender, queue: QueueRef, transaction_id: str) -> None:
        self._sender = sender
        self.transaction_id, self.topic, self.queue = transaction_id, queue.topic, queue
        self.receipt: CommitReceipt | None = None
        self._is_decided = False

    async def commit(self) -> CommitReceipt:
        """Commit: the message gets its offset, and consumers see it. A second call does nothing.

        Raises:
            TransactionEnded: It was rolled back, or discarded at its limit.
            TransactionNotFound: It ended so long ago that its outcome is forgotten.
            TopicNotFound: The topic was deleted since.
            Unreachable: No outcome within the delivery timeout; it may be committed. The broker
                will ask the transaction checker of the group.
        """
        self._is_decided = True
        if self.receipt is None:
            self.receipt = await self._sender.commit(self.transaction_id, self.topic)
        return self.receipt

    async def rollback(self) -> None:
        """Roll back: no consumer ever sees the message. A second call does nothing.

        Raises:
            TransactionEnded: It was committed, or discarded at its limit.
            TransactionNotFound, Unreachable: As for `commit`.
        """
        self._is_decided = True
        await self._sender.end(self.transaction_id, TransactionState.ROLLBACK)

    def leave_open(self) -> None:
        """Let the end of the block end nothing: the broker will ask the transaction checker.

        Use it if the outcome of the local transaction is not known, for example because the
        connection to the database was lost during its commit.
        """
        self._is_decided = True

    @property
    def is_decided(self) -> bool:
        """Whether the end of the block has nothing left to do."""
        return self._is_decided


class TransactionBlock:
    """Begins a transaction at the start of an `async with` block, and ends it with the block.

    Without an error the transaction is committed, with an error it is rolled back. If the block is
    cancelled, the transaction stays open: the broker asks the transaction checker.
    """

    def __init__(self, begin: Callable[[], Awaitable[Transaction]]) -> None:
        self._begin = begin
        self._transaction: Transaction | None = None

    async def __aenter__(self) -> Transaction:
        self._transaction = await self._begin()
        return self._transaction

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        transaction = self._transaction
        assert transaction is not None
        if transaction.is_decided:
            return
        if error is None:
            await transaction.commit()
        elif isinstance(error, Exception):
            try:
                await transaction.rollback()
            except BatonError as failure:  # the error of the block matters more
                log.warning(
                    "transaction not rolled back transaction_id=%s error=%s",
                    transaction.transaction_id,
                    failure,
                )
