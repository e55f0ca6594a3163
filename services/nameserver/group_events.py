"""Events of groups and their members: counted, logged and published to the metrics stream."""

from __future__ import annotations

import logging
from collections.abc import Iterator

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.rpc import differences_to_pb
from batonmq._telemetry.event_hub import EventHub
from batonmq.errors import BatonError, SubscriptionConflict
from batonmq_server.nameserver.core.differences import longest_member
from batonmq_server.nameserver.core.groups import (
    Group,
    Heartbeat,
    SubscriptionPolicy,
    assigned_members,
    hash_of,
)
from batonmq_server.nameserver.group_requests import GroupChange
from batonmq_server.nameserver.metrics import MembershipMetrics

log = logging.getLogger(__name__)

MOVES_MAX = 1_000
"""Queue moves in one Rebalanced event; a larger rebalance is published as several events."""


class GroupEvents:
    """Counts, logs and publishes; the replica that makes a change is the one that reports it.

    Args:
        member_lease_ms: Minimum time without heartbeat of a member that expires.
    """

    def __init__(self, metrics: MembershipMetrics, hub: EventHub, *, member_lease_ms: int) -> None:
        self._metrics, self._hub, self._member_lease_ms = metrics, hub, member_lease_ms

    def heartbeat_accepted(self, heartbeat: Heartbeat, generation: int) -> None:
        """Report an accepted heartbeat; `generation` is the group's."""
        self._metrics.count_heartbeat()
        if self._hub.watched:
            seen = pb.MemberSeen(client_id=heartbeat.client_id, generation=generation)
            self._hub.publish(pb.MetricEvent(queue=_group_key(heartbeat.group), member_seen=seen))

    def heartbeat_refused(self, error: BatonError) -> None:
        """Report a refused heartbeat."""
        self._metrics.count_refused_heartbeat(error.reason)

    def subscription_refused(self, heartbeat: Heartbeat, error: SubscriptionConflict) -> None:
        """Report a heartbeat that was refused because its subscription differs from the group's."""
        refused = pb.SubscriptionRefused(
            group=heartbeat.group,
            client_id=heartbeat.client_id,
            differences=differences_to_pb(error.differences),
        )
        key = _group_key(heartbeat.group)
        self._hub.publish(pb.MetricEvent(queue=key, subscription_refused=refused))

    def session_broken(self, group: str, client_id: str, silent_ms: int, generation: int) -> None:
        """Report a member that was removed because its connection broke."""
        self._metrics.count_broken_session()
        self._publish_expired(group, client_id, silent_ms, generation)

    def group_changed(self, change: GroupChange) -> None:
        """Report a group record that this replica has written."""
        group = change.group
        self._metrics.count_expired_members(len(change.expired))
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
            self._publish_expired(
                group.name, member.client_id, self._member_lease_ms, group.generation
            )
        changed = pb.GroupChanged(
            group=group.name, generation=group.generation, member_count=len(group.members)
        )
        key = _group_key(group.name)
        self._hub.publish(pb.MetricEvent(queue=key, group_changed=changed))
        if self._hub.watched:
            for event in _rebalance_events(change.before, group):
                self._hub.publish(event)
        before = change.before.subscription_generation if change.before else 0
        if group.subscription_generation != before:
            self._subscription_changed(change)

    def _subscription_changed(self, change: GroupChange) -> None:
        group = change.group
        self._metrics.count_subscription_change(group.policy.value)
        client_id = _author(change)
        differences = change.replaced.get(client_id, ())
        if group.policy is SubscriptionPolicy.WARN and differences:
            self._metrics.count_replacement()
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
        key = _group_key(group.name)
        self._hub.publish(pb.MetricEvent(queue=key, subscription_changed=changed))

    def _publish_expired(self, group: str, client_id: str, silent_ms: int, generation: int) -> None:
        expired = pb.MemberExpired(client_id=client_id, silent_ms=silent_ms, generation=generation)
        self._hub.publish(pb.MetricEvent(queue=_group_key(group), member_expired=expired))


def _author(change: GroupChange) -> str:
    """Return the client id of the member that changed the subscription.

    If it is unknown, that of the longest member with the group's subscription.
    """
    group = change.group
    if change.replaced:
        return [*change.replaced][-1]
    return longest_member(group.members, hash_of(group.terms.subscriptions))


def _group_key(group: str) -> queue_pb2.GroupQueue:
    return queue_pb2.GroupQueue(group=group)


def _rebalance_events(before: Group | None, group: Group) -> Iterator[pb.MetricEvent]:
    """Yield the events of the queues that are assigned to other members than before."""
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
        yield pb.MetricEvent(queue=_group_key(group.name), rebalanced=rebalanced)
