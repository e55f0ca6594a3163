"""Looks at all groups at intervals: lag and stuck queues as metrics, changes as events.

One replica does it: of the nameservers that are registered, the one whose node id comes first.
While a replica goes or comes it may be two or none for a moment, which does no harm: they look at
the same thing, and what is stuck is still so at the next look.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.queues import GroupQueue
from batonmq._telemetry.events import EventHub
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.diagnosis import QueueDiagnosis
from batonmq_server.nameserver.inspector import GroupQueues, QueueInspector
from batonmq_server.nameserver.metrics import LagMetrics

log = logging.getLogger(__name__)

LAG_EVENTS_PER_S_MAX = 2_000
"""Queues whose lag is told at once; the others wait for the next second."""


class QueueMonitor:
    """Does the looking.

    Args:
        node_id: Of this replica.
    """

    def __init__(
        self,
        catalog: Catalog,
        inspector: QueueInspector,
        metrics: LagMetrics,
        hub: EventHub,
        *,
        node_id: str,
        interval_ms: int,
    ) -> None:
        self._catalog, self._inspector, self._metrics = catalog, inspector, metrics
        self._hub, self._node_id, self._interval_ms = hub, node_id, interval_ms
        self._told: dict[GroupQueue, QueueDiagnosis] = {}

    async def run(self) -> None:
        """Look for ever; to be run as one task."""
        await self._catalog.ready()
        while True:
            await self.look()
            await asyncio.sleep(self._interval_ms / 1000)

    async def look(self) -> None:
        """Look once, if it is this replica's turn; else show nothing."""
        if not self._on_duty():
            self._metrics.show((), {})
            self._told = {}
            return
        groups = self._catalog.groups
        targets = [
            GroupQueues(group, self._inspector.queues_of(group))
            for _, group in sorted(groups.items())
            if not group.terms.broadcasting
        ]
        found = await self._inspector.inspect(targets, patient=True)
        self._metrics.show(found, {name: len(each.members) for name, each in groups.items()})
        self._metrics.count_inspection()
        self._tell(found)
        await self._tell_lag([d for d in found if _has_lag_to_tell(d)])

    def _on_duty(self) -> bool:
        nameservers = [
            node.node_id
            for node in self._catalog.nodes()[0]
            if node.service == pb.SERVICE_KIND_NAMESERVER
        ]
        return min(nameservers, default="") == self._node_id

    def _tell(self, found: list[QueueDiagnosis]) -> None:
        """Publish what has changed since the last look."""
        stuck = {d.evidence.key: d for d in found if d.finding.reason.stuck}
        changed = [
            d
            for d in found
            if (d.evidence.key in stuck or d.evidence.key in self._told)
            and self._was(d.evidence.key) != d.finding.reason
        ]
        self._told = stuck
        for diagnosis in changed:
            self._hub.publish(_event(diagnosis))
        counts = Counter((d.evidence.group.name, d.finding.reason) for d in changed)
        for (group, reason), count in counts.items():
            level = logging.WARNING if reason.stuck else logging.INFO
            log.log(level, "queues changed group=%s reason=%s queues=%d", group, reason, count)

    async def _tell_lag(self, found: list[QueueDiagnosis]) -> None:
        for index, diagnosis in enumerate(found):
            if not self._hub.watched:
                return
            if index % LAG_EVENTS_PER_S_MAX == LAG_EVENTS_PER_S_MAX - 1:
                await asyncio.sleep(1)
            self._hub.publish(_lag(diagnosis))

    def _was(self, key: GroupQueue) -> str:
        before = self._told.get(key)
        return before.finding.reason if before else ""


def _event(diagnosis: QueueDiagnosis) -> metrics_pb.MetricEvent:
    finding = diagnosis.finding
    return metrics_pb.MetricEvent(
        queue=_queue(diagnosis),
        stuck_changed=metrics_pb.StuckChanged(reason=finding.reason, message=finding.message),
    )


def _has_lag_to_tell(diagnosis: QueueDiagnosis) -> bool:
    e = diagnosis.evidence
    return (
        e.progress is not None and e.log is not None and (e.group.member_count or e.lag_count) > 0
    )


def _lag(diagnosis: QueueDiagnosis) -> metrics_pb.MetricEvent:
    e = diagnosis.evidence
    assert e.progress is not None and e.log is not None
    return metrics_pb.MetricEvent(
        queue=_queue(diagnosis),
        queue_lag=metrics_pb.QueueLag(
            committed_offset=e.progress.committed_offset,
            delivered_offset=e.progress.delivered_offset,
            next_offset=e.log.next_offset,
            acked_beyond_count=e.progress.acked_count,
            oldest_unacked_ms=e.lag_ms,
            client_id=e.owner,
        ),
    )


def _queue(diagnosis: QueueDiagnosis) -> queue_pb2.GroupQueue:
    key = diagnosis.evidence.key
    return queue_pb2.GroupQueue(
        group=key.group,
        queue=queue_pb2.QueueRef(topic=key.topic, broker=key.broker, queue_id=key.queue_id),
    )
