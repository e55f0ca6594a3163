"""Watches the events of the services that concern hand-overs, for one viewer.

A node serves at most 16 watchers, so there is one watch for each viewer, and a bound for all. It
begins when a page of hand-overs is first opened, and ends with the sessions of the viewer.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterator
from typing import Any

from batonmq._core.queues import QueueRef
from batonmq.admin.event_watch import EventWatch
from batonmq.errors import BatonError
from batonmq_server.console.core.handover_log import (
    HandoverLog,
    Phases,
    QueueEvent,
    duplicate_text,
    handed_over_text,
)
from batonmq_server.console.viewers import Viewer

log = logging.getLogger(__name__)

WATCHES_MAX = 4
RETRY_S = 5.0
_MANNERS = ("", "GRACEFUL", "UNFINISHED", "LEASE_EXPIRED", "DRAIN_TIMED_OUT", "FORCED")
"""Names of `baton.metrics.v1.HandedOver.Manner` by number."""


class EventReader:
    """Keeps the log of hand-overs of each viewer that has asked for one."""

    def __init__(self) -> None:
        self._logs: dict[str, HandoverLog] = {}
        self._watching: dict[str, asyncio.Task[None]] = {}
        self._tasks: asyncio.TaskGroup | None = None

    async def run(self) -> None:
        """Run until cancelled; events are read meanwhile."""
        async with asyncio.TaskGroup() as self._tasks:
            await asyncio.Event().wait()

    def log_of(self, viewer: Viewer) -> HandoverLog:
        """Return the log of a viewer; begin to watch if it is not watched for this viewer."""
        known = self._logs.get(viewer.credential)
        if known is not None:
            return known
        made = self._logs[viewer.credential] = HandoverLog()
        if self._tasks is not None:
            while len(self._watching) >= WATCHES_MAX:
                self._end(next(iter(self._watching)))
            task = self._tasks.create_task(self._keep(viewer, made))
            self._watching[viewer.credential] = task
        return made

    def is_watching(self, viewer: Viewer) -> bool:
        """Return whether the events of the services are read for a viewer."""
        task = self._watching.get(viewer.credential)
        return task is not None and not task.done()

    def forget(self, credential: str) -> None:
        """End the watch of a viewer."""
        if credential in self._watching:
            self._end(credential)
        self._logs.pop(credential, None)

    def _end(self, credential: str) -> None:
        self._watching.pop(credential).cancel()
        self._logs.pop(credential, None)

    async def _keep(self, viewer: Viewer, kept: HandoverLog) -> None:
        def take(batch: Any) -> None:
            kept.add(events_of(batch))

        while True:
            watch = EventWatch(
                viewer.nameserver, take, viewer.environment, security=viewer.security
            )
            try:
                await watch.run()
            except* BatonError as errors:
                log.debug("events not watched error=%s", errors.exceptions[0])
            await asyncio.sleep(RETRY_S)


def events_of(batch: Any) -> Iterator[QueueEvent]:
    """Yield the events of a `baton.metrics.v1.MetricBatch` that concern hand-overs."""
    for event in batch.events:
        kind = event.WhichOneof("kind")
        found = _told(kind, getattr(event, kind)) if kind in _KINDS else None
        if found is not None:
            queue = event.queue.queue
            ref = QueueRef(queue.topic, queue.broker, queue.queue_id)
            yield QueueEvent(event.unix_ms, event.queue.group, ref, *found)


_KINDS = ("handed_over", "fenced", "delivered", "lock_forced", "progress_reset")


def _told(kind: str, value: Any) -> tuple[str, str] | None:
    """Return kind and text of an event; None if it does not concern hand-overs."""
    if kind == "handed_over":
        manner = _MANNERS[value.manner] if value.manner < len(_MANNERS) else str(value.manner)
        phases = Phases(value.contend_ms, value.drain_ms, value.fence_ms, value.persist_ms)
        text = handed_over_text(value.previous_client_id, value.client_id, manner, phases)
        return "drain", text
    if kind == "fenced":
        return "fenced", (
            f"{value.call} of {value.client_id} under token {value.token} rejected "
            f"{max(1, value.count)} times: the token is {value.current_token} now"
        )
    if kind == "delivered" and value.redelivered_count:
        return "duplicate", duplicate_text(value.client_id, value.redelivered_count)
    if kind == "lock_forced":
        owner = value.previous_client_id or "no owner"
        return "forced", f"{value.by} released it from {owner}: {value.reason}"
    if kind == "progress_reset":
        return "reset", (
            f"{value.by} moved the progress from {value.from_offset} to {value.to_offset}: "
            f"{value.reason}"
        )
    return None
