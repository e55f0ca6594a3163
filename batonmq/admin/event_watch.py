"""Receives the live metric events of all nodes of a cluster."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable

import grpc.aio

from baton.metrics.v1 import metrics_service_pb2 as pb
from baton.metrics.v1 import metrics_service_pb2_grpc as pb_grpc
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import ClientEnvironment, Directory
from batonmq._connection.security import Security
from batonmq.errors import BatonError

log = logging.getLogger(__name__)

LOOK_INTERVAL_S = 5.0


class EventWatch:
    """Watches the metric events of each registered node, including nodes that register later.

    Args:
        nameserver: host:port of a nameserver, or several separated by commas.
        take: Called with each batch.
        environment: Clock, random numbers and transport, for tests.
        security: TLS and credentials; None for a connection without TLS.

    Attributes:
        following: Addresses of the nodes that are being watched.
    """

    def __init__(
        self,
        nameserver: str,
        take: Callable[[pb.MetricBatch], None],
        environment: ClientEnvironment | None = None,
        *,
        security: Security | None = None,
    ) -> None:
        secured = (environment or ClientEnvironment()).secured(security)
        self._directory = Directory(nameserver, secured.random, secured.connect)
        self._connect, self._take = secured.connect, take
        self.following: set[str] = set()

    async def run(self) -> None:
        """Watch until cancelled; run it as one task.

        Raises:
            BatonError: No nameserver answers at the start.
        """
        try:
            nodes = await self._directory.refresh()
            async with asyncio.TaskGroup() as tasks:
                while True:
                    for address in sorted({node.address for node in nodes} - self.following):
                        self.following.add(address)
                        tasks.create_task(self._follow(address))
                    await asyncio.sleep(LOOK_INTERVAL_S)
                    try:
                        nodes = await self._directory.refresh()
                    except BatonError as error:
                        log.debug("nodes not refreshed error=%s", error)
        finally:
            await self._directory.close()

    async def _follow(self, address: str) -> None:
        """Watch one node until the call ends; `run` watches it again if it is still registered."""
        channel = self._connect(address)
        try:
            call = pb_grpc.MetricsServiceStub(channel).Watch(pb.WatchRequest())
            async for answer in call:
                self._take(answer.batch)
        except grpc.aio.AioRpcError as error:
            log.debug("node not followed address=%s error=%s", address, from_rpc_error(error))
        finally:
            self.following.discard(address)
            await channel.close()
