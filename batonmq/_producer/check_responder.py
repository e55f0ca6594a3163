"""Answers the brokers that ask what became of transactions of the producer group.

The responder answers a check by ending the transaction; if that fails, the broker asks again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._connection.directory import Directory
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, decode_records, read_header
from batonmq._core.transactions import (
    PendingTransaction,
    TransactionChecker,
    TransactionState,
    broker_of,
)
from batonmq._producer.check_watcher import CheckWatcher
from batonmq._producer.transaction_sender import TransactionSender
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

RUNNING_MAX = 256
"""More checks at once are dropped; the broker asks again."""


class CheckResponder:
    """Calls the transaction checker for each check.

    Args:
        start: Runs a coroutine until the producer is closed.
    """

    def __init__(
        self,
        directory: Directory,
        sender: TransactionSender,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        group: str,
        checker: TransactionChecker,
    ) -> None:
        self._directory, self._sender, self._start = directory, sender, start
        self._group, self._checker = group, checker
        self._running: set[str] = set()

    async def run(self) -> None:
        """Keep a stream open to each broker until cancelled; run it as one task."""
        watcher = CheckWatcher(self._directory, self._start, self._group, self._take)
        await watcher.run()

    def _take(self, check: pb.TransactionCheck) -> None:
        """Start to answer a check, unless it is being answered or too many are."""
        if check.transaction_id in self._running:
            return
        if len(self._running) >= RUNNING_MAX:
            log.warning("check dropped transaction_id=%s", check.transaction_id)
            return
        self._running.add(check.transaction_id)
        self._start(self._answer(check))

    async def _answer(self, check: pb.TransactionCheck) -> None:
        try:
            state = await self._ask(check)
            await self._sender.end(check.transaction_id, state)
        except BatonError as error:
            log.warning(
                "check not answered transaction_id=%s error=%s", check.transaction_id, error
            )
        finally:
            self._running.discard(check.transaction_id)

    async def _ask(self, check: pb.TransactionCheck) -> TransactionState:
        """Return the answer of the checker; UNKNOWN if it fails."""
        try:
            answer = self._checker(pending_of(check))
            state = await answer if inspect.isawaitable(answer) else answer
        except BatonError:
            raise
        except Exception:
            log.exception("transaction checker failed transaction_id=%s", check.transaction_id)
            return TransactionState.UNKNOWN
        if not isinstance(state, TransactionState):
            log.error(
                "transaction checker must return a TransactionState, got %r transaction_id=%s",
                state,
                check.transaction_id,
            )
            return TransactionState.UNKNOWN
        return state


def pending_of(check: pb.TransactionCheck) -> PendingTransaction:
    """Return a check as the transaction checker gets it."""
    header = read_header(check.batch)
    (record,) = decode_records(check.batch, header, range(1))
    queue = QueueRef(header.topic, broker_of(check.transaction_id), header.queue_id)
    return PendingTransaction(
        check.transaction_id,
        header.topic,
        queue,
        Message(record.body, record.tag, tuple(record.keys), record.properties),
        check.begin_unix_ms,
        check.check,
    )
