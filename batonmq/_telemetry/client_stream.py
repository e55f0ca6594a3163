"""The metrics stream of a client: its events, published to the metrics topic.

A separate producer publishes about once a second, so messages never wait for the stream. Failures
are only logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from batonmq._connection.directory import ClientEnvironment
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.metrics_publisher import MetricsPublisher, MetricsSender

LAST_BATCH_S = 1.0
"""Time that a closing client waits for its last batch."""


class ClientStream:
    """Publishes the events of one client.

    Args:
        opened: Creates the producer that publishes.
    """

    def __init__(
        self,
        client_id: str,
        environment: ClientEnvironment,
        opened: Callable[[], AbstractAsyncContextManager[MetricsSender]],
    ) -> None:
        incarnation_id = environment.random.getrandbits(63) or 1
        self.hub = EventHub(f"client/{client_id}", incarnation_id, environment.clock)
        self._publisher = MetricsPublisher(self.hub, opened)
        self._task: asyncio.Task[None] | None = None

    def start(self, tasks: asyncio.TaskGroup) -> asyncio.Task[None]:
        """Start a task that publishes until `close` or until it is cancelled."""
        self._task = tasks.create_task(self._publisher.run())
        return self._task

    async def close(self) -> None:
        """Publish the remaining events, for at most `LAST_BATCH_S`, and stop."""
        if self._task is not None:
            self._publisher.stop()
            await asyncio.wait({self._task}, timeout=LAST_BATCH_S)
            self._task.cancel()
