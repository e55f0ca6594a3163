"""The metrics stream of a service: its events, from the first to the last one of the process."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._telemetry.metrics_publisher import StreamStart
from batonmq_server.runtime.event_publisher import event_publisher
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.runtime.stopped_incarnation import StoppedIncarnation
from batonmq_server.runtime.unsent_batches import UnsentBatches

log = logging.getLogger(__name__)

LAST_BATCHES_S = 1.0
"""Time that a stopping process without a data directory has to publish its last batches."""


class NodeRecord:
    """What a node leaves for its next incarnation: a mark in etcd, and batches in a file.

    Args:
        folder: Data directory of the process; None for none, then batches can't be kept.
    """

    def __init__(self, mark: StoppedIncarnation, folder: Path | None) -> None:
        self._mark = mark
        self._file = None if folder is None else UnsentBatches(folder)

    async def take(self) -> StreamStart:
        """See IncarnationRecord; waits for etcd."""
        batches = await asyncio.to_thread(self._file.read) if self._file is not None else []
        started = pb.ProcessStarted(previous_incarnation_id=await self._mark.take())
        return StreamStart(batches, pb.MetricEvent(process_started=started))

    def last_event(self) -> pb.MetricEvent:
        """See IncarnationRecord."""
        return pb.MetricEvent(process_stopped=pb.ProcessStopped())

    async def forget_batches(self) -> None:
        """See IncarnationRecord."""
        if self._file is not None:
            await asyncio.to_thread(self._file.remove)

    def keep(self, batches: Sequence[bytes]) -> bool:
        """See IncarnationRecord; blocks until the file is durable."""
        if self._file is None:
            log.warning(
                "last metrics are lost batches=%d: the metrics topic can't be reached, and the "
                "process has no data directory to keep them in",
                len(batches),
            )
            return False
        return self._file.write(batches)


class ServiceStream:
    """Publishes the events of a service process, unless its settings say not to.

    Args:
        folder: Data directory of the process; None for none. A process with one keeps its last
            batches there; one without publishes them while it stops.
    """

    def __init__(self, runtime: Runtime, folder: Path | None) -> None:
        self._hub, self._keeps = runtime.hub, folder is not None
        self._mark = StoppedIncarnation(runtime.etcd, runtime.service, runtime.settings.node_id)
        record = NodeRecord(self._mark, folder)
        self._publisher = event_publisher(runtime, record)
        self._on = runtime.settings.metrics_stream
        self._task: asyncio.Task[None] | None = None

    def listen(self) -> None:
        """Collect events from now on; called before the process takes calls."""
        if self._on:
            self._publisher.listen()

    def start(self, tasks: asyncio.TaskGroup) -> None:
        """Start the task that publishes, until `end` or until it is cancelled."""
        if self._on:
            self._task = tasks.create_task(self._publisher.run())

    async def end(self, running: Sequence[asyncio.Task[None]]) -> None:
        """Publish or keep the remaining events, and mark the graceful stop.

        Args:
            running: Tasks that are being cancelled; after them no event follows.
        """
        if self._task is None:
            return
        await asyncio.wait(running)
        self._publisher.stop()
        if not self._keeps:
            await asyncio.wait({self._task}, timeout=LAST_BATCHES_S)
        self._task.cancel()
        await asyncio.wait({self._task})
        if self._publisher.complete:
            await self._mark.leave(self._hub.incarnation_id)
