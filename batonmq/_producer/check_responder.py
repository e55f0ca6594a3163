"""Answers the brokers that ask what became of transactions of the producer group.

The responder holds one stream open to the leader of every broker. It answers a check by ending the
transaction; if that fails, the broker asks again.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, decode_records, read_header
from batonmq._core.transactions import (
    PendingTransaction,
    TransactionChecker,
    TransactionState,
    broker_of,
)
from batonmq._producer.transaction_sender import TransactionSender
from batonmq.errors import BatonError, Unreachable

log = logging.getLogger(__name__)

SILENCE_S_MAX = 12.0
"""A stream that brings nothing for so long is given up: a leader sends something every 5 s."""
BROKERS_INTERVAL_S = 10.0
RUNNING_MAX = 256
"""More checks at once are dropped; the broker asks again."""


class CheckResponder:
    """Keeps the streams of checks open, and calls the transaction checker.

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
        self._watched: set[str] = set()
        self._running: set[str] = set()

    async def run(self) -> None:
        """Keep a stream open to each broker until cancelled; run it as one task."""
        while True:
            try:
                brokers = await self._directory.brokers()
            except BatonError as error:
                log.info("brokers not known error=%s", error)
                brokers = set()
            for broker in sorted(brokers - self._watched):
                self._watched.add(broker)
                self._start(self._follow(broker))
            await asyncio.sleep(BROKERS_INTERVAL_S if self._watched else 1.0)

    async def _follow(self, broker: str) -> None:
        failures = 0
        while True:
            opened = asyncio.Event()
            try:
                await self._watch(broker, opened)
                error: BatonError = Unreachable("the broker closed the stream")
            except BatonError as failure:
                error = failure
            failures = 0 if opened.is_set() else failures
            log.info("stream of checks lost broker=%s error=%s", broker, error)
            await self._directory.pause(error, failures)
            failures += 1

    async def _watch(self, broker: str, opened: asyncio.Event) -> None:
        """Open a stream, and answer its checks until it ends."""
        stub = await self._directory.transactions(broker)
        call = stub.WatchChecks(pb.WatchChecksRequest(group=self._group))
        try:
            async with asyncio.timeout(SILENCE_S_MAX) as silence:
                async for response in call:
                    opened.set()
                    silence.reschedule(asyncio.get_running_loop().time() + SILENCE_S_MAX)
                    for check in response.checks:
                        self._take(check)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        except TimeoutError:
            raise Unreachable(f"broker {broker} was silent for {SILENCE_S_MAX:.0f} s") from None
        finally:
            call.cancel()

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
            answer = self._checker(_pending(check))
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


def _pending(check: pb.TransactionCheck) -> PendingTransaction:
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
