"""What the nameserver tells of itself: Prometheus metrics and events."""

from __future__ import annotations

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from prometheus_client import CollectorRegistry, Counter, Gauge

from batonmq.common.errors import BatonError, SubscriptionConflict
from batonmq.common.rpc import error_to_pb
from services.nameserver.catalog import Catalog
from services.nameserver.core import Group, Heartbeat
from services.nameserver.store import GroupChange
from services.runtime.events import EventHub


class Telemetry:
    """Counts and publishes; the replica that made a change is the one that tells of it."""

    def __init__(self, registry: CollectorRegistry, hub: EventHub, catalog: Catalog) -> None:
        self._hub = hub
        gauges = {
            "topics": ("Topics.", lambda: len(catalog.topics)),
            "shrinking_topics": (
                "Topics with queues that go once they are read.",
                lambda: sum(topic.shrinking for topic in catalog.topics.values()),
            ),
            "groups": (
                "Consumer groups, those without members included.",
                lambda: len(catalog.groups),
            ),
            "members": ("Live members of all groups.", lambda: len(catalog.live.values)),
            "watchers": ("Open watches of routes and groups.", lambda: catalog.watcher_count),
        }
        for name, (help_text, read) in gauges.items():
            Gauge(f"baton_nameserver_{name}", help_text, registry=registry).set_function(read)
        self._heartbeats = Counter(
            "baton_nameserver_heartbeats", "Heartbeats accepted.", registry=registry
        )
        self._rejections = Counter(
            "baton_nameserver_rejections",
            "Heartbeats refused, by reason.",
            ("reason",),
            registry=registry,
        )
        self._expiries = Counter(
            "baton_nameserver_expiries", "Members removed for silence.", registry=registry
        )

    def accepted(self) -> None:
        """A heartbeat was accepted."""
        self._heartbeats.inc()

    def refused(self, error: BatonError) -> None:
        """A heartbeat was refused."""
        self._rejections.labels(error.reason).inc()

    def conflict(self, heartbeat: Heartbeat, error: SubscriptionConflict) -> None:
        """A heartbeat disagreed with its group."""
        refused = pb.SubscriptionRefused(
            group=heartbeat.group,
            client_id=heartbeat.client_id,
            differences=error_to_pb(error).differences,
        )
        self._hub.publish(pb.MetricEvent(queue=_of(heartbeat.group), subscription_refused=refused))

    def group_changed(self, change: GroupChange) -> None:
        """A call had this effect on a group, perhaps none."""
        self._expiries.inc(len(change.expired))
        if change.changed and change.group is not None:
            self._publish(change.group)

    def _publish(self, group: Group) -> None:
        changed = pb.GroupChanged(
            group=group.name, generation=group.generation, member_count=len(group.members)
        )
        self._hub.publish(pb.MetricEvent(queue=_of(group.name), group_changed=changed))


def _of(group: str) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group)
