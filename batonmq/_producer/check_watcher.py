"""The streams on which brokers ask what became of transactions of a producer group.

One stream is held open to the leader of every broker.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Coroutine
from typing import Any

import grpc.aio

from baton.storage.v1 import transaction_service_pb2 as pb
from batonmq._common import timeouts
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import Directory
from batonmq.errors import BatonError, Unreachable

log = logging.getLogger(__name__)

SILENCE_S_MAX = 12.0
"""A stream that brings nothing for so long is given up: a leader sends something every 5 s."""
BROKERS_INTERVAL_S = 10.0
FAILURES_MAX = 60
"""After so many failures in a row, about a minute, a broker that is not listed is removed."""


class CheckWatcher:
    """Keeps the streams of one producer group open.

    Args:
        start: Runs a coroutine until its owner is closed.
        take: Called with each check.
    """

    def __init__(
        self,
        directory: Directory,
        start: Callable[[Coroutine[Any, Any, None]], asyncio.Task[None]],
        group: str,
        take: Callable[[pb.TransactionCheck], None],
    ) -> None:
        self._directory, self._start = directory, start
        self._group, self._take = group, take
        self._watched: set[str] = set()
        self._listed: set[str] = set()

    async def run(self) -> None:
        """Keep a stream open to each broker until cancelled; run it as one task."""
        while True:
            try:
                self._listed = await self._directory.brokers()
            except BatonError as error:
                log.info("brokers not known error=%s", error)
            for broker in sorted(self._listed - self._watched):
                self._watched.add(broker)
                self._start(self._follow(broker))
            await asyncio.sleep(BROKERS_INTERVAL_S if self._watched else 1.0)

    async def _follow(self, broker: str) -> None:
        """Watch a broker until it is removed; if it is listed later, `run` watches it again."""
        failures = 0
        while failures <= FAILURES_MAX or broker in self._listed:
            opened = asyncio.Event()
            try:
                await self._watch(broker, opened)
                error: BatonError = Unreachable("the broker closed the stream")
            except BatonError as failure:
                error = failure
            failures = 0 if opened.is_set() else failures
            level = logging.DEBUG if failures else logging.INFO
            log.log(level, "stream of checks lost broker=%s error=%s", broker, error)
            await self._directory.pause(error, failures)
            failures += 1
        log.info("broker is watched no more broker=%s", broker)
        self._watched.discard(broker)

    async def _watch(self, broker: str, opened: asyncio.Event) -> None:
        """Open a stream, and answer its checks until it ends."""
        stub = await self._directory.transactions(broker)
        call = stub.WatchChecks(pb.WatchChecksRequest(group=self._group))
        try:
            async with timeouts.timeout(SILENCE_S_MAX) as silence:
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
