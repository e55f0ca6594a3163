"""What the nameserver tells of itself: Prometheus metrics and events."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from prometheus_client import CollectorRegistry, Counter, Gauge

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.rpc import differences_to_pb
from batonmq._telemetry.events import EventHub
from batonmq.errors import BatonError, SubscriptionConflict
from batonmq_server.nameserver.catalog import Catalog
from batonmq_server.nameserver.core.differences import longest_member
from batonmq_server.nameserver.core.groups import (
    Group,
    Heartbeat,
    SubscriptionPolicy,
    assigned_members,
    hash_of,
)
from batonmq_server.nameserver.group_requests import GroupChange

log = logging.getLogger(__name__)

MOVES_MAX = 1_000
"""Queues in one event that change hands; more are told in several."""


class GroupEvents:
    """Counts and publishes; the replica that made a change is the one that tells of it.

    Args:
        member_lease_ms: A member that expires was silent for so long, at least.
    """

    def __init__(
        self, registry: CollectorRegistry, hub: EventHub, catalog: Catalog, member_lease_ms: int
    ) -> None:
        self._hub, self._member_lease_ms = hub, member_lease_ms
        gauges = {
            "topics": ("Topics.", lambda: len(catalog.topics)),
            "shrinking_topics": (
                "Topics with queues that go once they are read.",
                lambda: sum(topic.shrinking for topic in list(catalog.topics.values())),
            ),
            "groups": (
                "Consumer groups, those without members included.",
                lambda: len(catalog.groups),
            ),
            "differing_members": (
                "Members that ask for another subscription than their group has.",
                lambda: sum(
                    m.differs for group in list(catalog.groups.values()) for m in group.members
                ),
            ),
            "draining_groups": (
                "Groups whose queues are being given back for a new subscription.",
                lambda: sum(group.draining for group in list(catalog.groups.values())),
            ),
            "paused_groups": (
                "Groups that an operator has paused.",
                lambda: sum(group.pause is not None for group in list(catalog.groups.values())),
            ),
            "refused_clients": (
                "Clients that are refused at this time.",
                lambda: len(catalog.refused.values),
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
        self._broken_sessions = Counter(
            "baton_nameserver_broken_sessions",
            "Members removed because their connection broke.",
            registry=registry,
        )
        self._subscription_changes = Counter(
            "baton_nameserver_subscription_changes",
            "Subscriptions of groups that were changed, by policy.",
            ("policy",),
            registry=registry,
        )
        self._replacements = Counter(
            "baton_nameserver_replacements",
            "Those that were changed against the will of other members: messages are lost there.",
            registry=registry,
        )

    def accepted(self, heartbeat: Heartbeat, generation: int) -> None:
        """A heartbeat was accepted, in a group of that generation."""
        self._heartbeats.inc()
        if self._hub.watched:
            seen = pb.MemberSeen(client_id=heartbeat.client_id, generation=generation)
            self._hub.publish(pb.MetricEvent(queue=_of(heartbeat.group), member_seen=seen))

    def refused(self, error: BatonError) -> None:
        """A heartbeat was refused."""
        self._rejections.labels(error.reason).inc()

    def conflict(self, heartbeat: Heartbeat, error: SubscriptionConflict) -> None:
        """A heartbeat disagreed with its group."""
        refused = pb.SubscriptionRefused(
            group=heartbeat.group,
            client_id=heartbeat.client_id,
            differences=differences_to_pb(error.differences),
        )
        self._hub.publish(pb.MetricEvent(queue=_of(heartbeat.group), subscription_refused=refused))

    def session_broken(self, group: str, client_id: str, silent_ms: int, generation: int) -> None:
        """A member was removed because its connection broke."""
        self._broken_sessions.inc()
        self._expired(group, client_id, silent_ms, generation)

    def group_changed(self, change: GroupChange) -> None:
        """A record was written here."""
        group = change.group
        self._expiries.inc(len(change.expired))
        log.info(
            "group changed group=%s generation=%d members=%d joined=%s left=%s",
            group.name,
            group.generation,
            len(group.members),
            ",".join(change.joined) or "-",
            ",".join(change.left) or "-",
        )
        if change.expired:
            log.warning(
                "members expired group=%s generation=%d members=%s",
                group.name,
                group.generation,
                ",".join(f"{m.client_id}@{m.host}" for m in change.expired),
            )
        for member in change.expired:
            self._expired(group.name, member.client_id, self._member_lease_ms, group.generation)
        changed = pb.GroupChanged(
            group=group.name, generation=group.generation, member_count=len(group.members)
        )
        self._hub.publish(pb.MetricEvent(queue=_of(group.name), group_changed=changed))
        if self._hub.watched:
            for event in _rebalanced(change.before, group):
                self._hub.publish(event)
        before = change.before.subscription_generation if change.before else 0
        if group.subscription_generation != before:
            self._subscription_changed(change)

    def _expired(self, group: str, client_id: str, silent_ms: int, generation: int) -> None:
        expired = pb.MemberExpired(client_id=client_id, silent_ms=silent_ms, generation=generation)
        self._hub.publish(pb.MetricEvent(queue=_of(group), member_expired=expired))

    def _subscription_changed(self, change: GroupChange) -> None:
        group = change.group
        self._subscription_changes.labels(group.policy.value).inc()
        client_id = _author(change)
        differences = change.replaced.get(client_id, ())
        if group.policy is SubscriptionPolicy.WARN and differences:
            self._replacements.inc()
            log.warning(
                "subscription replaced group=%s subscription_generation=%d client_id=%s",
                group.name,
                group.subscription_generation,
                client_id,
            )
        changed = pb.SubscriptionChanged(
            group=group.name,
            subscription_generation=group.subscription_generation,
            client_id=client_id,
            differences=differences_to_pb(differences),
        )
        self._hub.publish(pb.MetricEvent(queue=_of(group.name), subscription_changed=changed))


def _author(change: GroupChange) -> str:
    """Client id of a member that asks for what the group has; if known, of who made it so."""
    group = change.group
    if change.replaced:
        return [*change.replaced][-1]
    return longest_member(group.members, hash_of(group.terms.subscriptions))


def _of(group: str) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group)


def _rebalanced(before: Group | None, group: Group) -> Iterator[pb.MetricEvent]:
    """The queues that were dealt to others than before; nothing if none was."""
    if before is not None and before.assignments == group.assignments:
        return
    old, new = assigned_members(before) if before else {}, assigned_members(group)
    moved = [
        (queue, old.get(queue, ""), new.get(queue, ""))
        for queue in dict.fromkeys((*old, *new))
        if old.get(queue) != new.get(queue)
    ]
    for begin in range(0, len(moved), MOVES_MAX):
        moves = [
            pb.Rebalanced.QueueMove(
                queue=queue_pb2.GroupQueue(
                    queue=queue_pb2.QueueRef(
                        topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id
                    )
                ),
                from_client_id=from_client_id,
                to_client_id=to_client_id,
            )
            for queue, from_client_id, to_client_id in moved[begin : begin + MOVES_MAX]
        ]
        rebalanced = pb.Rebalanced(
            generation=group.generation,
            member_count=len(group.members),
            queue_count=len(new),
            moves=moves,
        )
        yield pb.MetricEvent(queue=_of(group.name), rebalanced=rebalanced)
