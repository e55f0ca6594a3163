"""Transactions as producers see them. Pure."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from enum import Enum
from typing import NamedTuple

from batonmq._core.queues import QueueRef
from batonmq._core.records import Message
from batonmq.errors import InvalidArgument

COMMITTED_PRODUCER_ID, DISCARDED_PRODUCER_ID = -(1 << 62), -(1 << 62) - 1
"""Producer ids of a batch that commits a transaction, or moves its message to the topic of
unresolved messages; `producer_epoch` and `sequence` are the halves of the number of its id."""


class TransactionState(Enum):
    """Outcome of a local transaction, as a transaction checker reports it."""

    COMMIT = "commit"
    """It is committed: deliver the message."""
    ROLLBACK = "rollback"
    """It is rolled back, or was never begun: drop the message."""
    UNKNOWN = "unknown"
    """It is not decided yet: ask again later."""


class CommitReceipt(NamedTuple):
    """Proof that a transaction is committed.

    Attributes:
        queue: The queue of the message.
        offset: Offset of the message in the queue; -1 if it was committed so long ago that the log
            no longer has it.
        duplicate: Whether it was committed before: by an earlier attempt, or by a check-back.
    """

    queue: QueueRef
    offset: int
    duplicate: bool


@dataclass(frozen=True, slots=True)
class PendingTransaction:
    """A transaction that the broker asks about.

    Attributes:
        transaction_id: Id of the transaction.
        topic: Topic of the message.
        queue: Queue in which the message would be stored, unless the topic shrinks.
        message: The half message.
        begin_unix_ms: Time at which it was stored, by the wall clock of the storage node.
        check: Number of this check, from 1.
    """

    transaction_id: str
    topic: str
    queue: QueueRef
    message: Message
    begin_unix_ms: int
    check: int


TransactionChecker = Callable[[PendingTransaction], Awaitable[TransactionState] | TransactionState]
"""Says what became of a transaction of the producer group. It must know by records that outlive the
process, and answer UNKNOWN for a local transaction that may still be running."""


def broker_of(transaction_id: str) -> str:
    """Return the broker of a transaction.

    Raises:
        InvalidArgument: It is not the id of a transaction.
    """
    broker = transaction_id.rpartition("-")[0]
    if not broker:
        raise InvalidArgument(
            f"{transaction_id[:100]!r} is not the id of a transaction",
            remedy="Use the id of the transaction unchanged.",
            facts={"field": "transaction_id"},
        )
    return broker
