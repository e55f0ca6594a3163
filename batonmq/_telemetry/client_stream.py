"""What a client tells live of itself, if its settings say so: to the topic of the metrics.

It is sent about once a second, by a producer of its own: messages wait for none of it, and what
fails there is only logged.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractAsyncContextManager

from batonmq._connection.directory import ClientEnvironment
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.metrics_publisher import MetricsPublisher, MetricsSender

LAST_BATCH_S = 1.0
"""How long a client that closes waits for its last batch."""


class ClientStream:
    """The stream of one client.

    Args:
        opened: Makes the producer that publishes.
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
        """Publish until `close`, or until the task is cancelled."""
        self._task = tasks.create_task(self._publisher.run())
        return self._task

    async def close(self) -> None:
        """Publish what there is, but not for long."""
        if self._task is not None:
            self._publisher.stop()
            await asyncio.wait({self._task}, timeout=LAST_BATCH_S)
            self._task.cancel()
