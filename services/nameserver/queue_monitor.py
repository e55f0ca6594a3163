"""Inspection of all groups at intervals: lag and stuck queues as metrics, changes as events.

One replica inspects: of the registered nameservers, the one with the lowest node id. While a
replica starts or stops, two or none may inspect for a moment, which does no harm: all replicas see
the same state, and a stuck queue is still stuck at the next inspection.
"""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as metrics_pb
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.aio import in_steps
from batonmq._core.queues import GroupQueue
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.diagnosis import QueueDiagnosis
from batonmq_server.nameserver.core.groups import Group
from batonmq_server.nameserver.inspector import InspectionTarget, QueueInspector
from batonmq_server.nameserver.metrics import LagMetrics

log = logging.getLogger(__name__)

LAG_EVENTS_PER_S_MAX = 2_000
"""Lag events that are published per second."""


class QueueMonitor:
    """Inspects all groups, shows metrics and publishes events.

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
        self._stuck: dict[GroupQueue, QueueDiagnosis] = {}

    async def run(self) -> None:
        """Inspect until cancelled; to be run as one task."""
        await self._catalog.ready()
        while True:
            await self.inspect()
            await asyncio.sleep(self._interval_ms / 1000)

    async def inspect(self) -> None:
        """Inspect once if this is the inspecting replica; otherwise show no metrics."""
        if not self._is_inspecting():
            await self._metrics.show((), {})
            self._stuck = {}
            return
        groups = self._catalog.groups
        targets = await self._targets(groups)
        diagnoses = await self._inspector.inspect(targets, patient=True)
        await self._metrics.show(
            diagnoses, {name: len(each.members) for name, each in groups.items()}
        )
        self._metrics.count_inspection()
        await self._publish_changes(diagnoses)
        await self._publish_lag([d for d in diagnoses if _has_known_lag(d)])

    async def _targets(self, groups: Mapping[str, Group]) -> list[InspectionTarget]:
        """Return the queues of each group; of one whose queues are not known now, none."""
        counted = [group for _, group in sorted(groups.items()) if not group.terms.broadcasting]
        targets = []
        async for group in in_steps(counted):
            with suppress(BatonError):
                queues = await self._inspector.queues_to_inspect(group)
                targets.append(InspectionTarget(group, queues))
        return targets

    def _is_inspecting(self) -> bool:
        nameservers = [
            node.node_id
            for node in self._catalog.nodes()[0]
            if node.service == pb.SERVICE_KIND_NAMESERVER
        ]
        return min(nameservers, default="") == self._node_id

    async def _publish_changes(self, diagnoses: list[QueueDiagnosis]) -> None:
        """Publish queues that got stuck, changed their reason or recovered since the last time."""
        stuck: dict[GroupQueue, QueueDiagnosis] = {}
        changed: list[QueueDiagnosis] = []
        async for diagnosis in in_steps(diagnoses):
            key, reason = diagnosis.evidence.key, diagnosis.finding.reason
            if reason.stuck:
                stuck[key] = diagnosis
            if (reason.stuck or key in self._stuck) and self._reason_before(key) != reason:
                changed.append(diagnosis)
                self._hub.publish(_stuck_event(diagnosis))
        self._stuck = stuck
        counts = Counter((d.evidence.group.name, d.finding.reason) for d in changed)
        for (group, reason), count in counts.items():
            level = logging.WARNING if reason.stuck else logging.INFO
            log.log(
                level, "queue diagnosis changed group=%s reason=%s queues=%d", group, reason, count
            )

    async def _publish_lag(self, diagnoses: list[QueueDiagnosis]) -> None:
        for index, diagnosis in enumerate(diagnoses):
            if not self._hub.watched:
                return
            if index % LAG_EVENTS_PER_S_MAX == LAG_EVENTS_PER_S_MAX - 1:
                await asyncio.sleep(1)
            self._hub.publish(_lag_event(diagnosis))

    def _reason_before(self, key: GroupQueue) -> str:
        before = self._stuck.get(key)
        return before.finding.reason if before else ""


def _stuck_event(diagnosis: QueueDiagnosis) -> metrics_pb.MetricEvent:
    finding = diagnosis.finding
    return metrics_pb.MetricEvent(
        queue=_queue(diagnosis),
        stuck_changed=metrics_pb.StuckChanged(reason=finding.reason, message=finding.message),
    )


def _has_known_lag(diagnosis: QueueDiagnosis) -> bool:
    e = diagnosis.evidence
    return (
        e.progress is not None and e.log is not None and (e.group.member_count or e.lag_count) > 0
    )


def _lag_event(diagnosis: QueueDiagnosis) -> metrics_pb.MetricEvent:
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
