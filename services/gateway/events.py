"""The metric events of remote clients: what they sent, were handed, and handled.

Counts are gathered about once a second. At most `CLIENTS_MAX` clients have their own counts within
one gathering; those of all others have no client id. The offsets of hand-outs are always exact.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from baton.common.v1 import queue_pb2
from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.latency_sketches import LatencyKey, LatencySketches

CLIENTS_MAX = 1_000
RUNS_MAX = 4_096
"""Runs of offsets in one event; more are in several events."""
OFFSETS_MAX = 200_000
"""Offsets that wait for a gathering, of all queues; beyond it they are published at once."""


@dataclass(slots=True)
class _HandOut:
    """The offsets of one queue that one client was handed under one token."""

    group: str
    queue: QueueRef
    token: int
    client_id: str
    offsets: set[int] = field(default_factory=set)
    repeated_count: int = 0


@dataclass(slots=True)
class _Counts:
    """What one client did with messages of one topic; `group` is empty for what it sent."""

    group: str
    topic: str
    client_id: str
    handled: int = 0
    dead_lettered: int = 0
    sent: pb.Sent = field(default_factory=pb.Sent)


class RemoteEvents:
    """Gathers the events while the hub is watched."""

    def __init__(self, hub: EventHub, clock: Clock) -> None:
        self._hub, self._clock = hub, clock
        self._hand_outs: dict[tuple[str, QueueRef, int, str], _HandOut] = {}
        self._offset_count = 0
        self._counts: dict[tuple[str, str, str], _Counts] = {}
        self._latencies = LatencySketches()
        hub.gatherers.append(self._events)

    def handed_out(
        self,
        group: str,
        queue: QueueRef,
        offset: int,
        *,
        token: int,
        client_id: str,
        attempt: int,
    ) -> None:
        """Note a delivery to a remote client."""
        if not self._hub.watched:
            return
        key = group, queue, token, client_id
        known = self._hand_outs.get(key)
        if known is not None and offset in known.offsets:
            self._publish(self._hand_outs.pop(key))  # a second time: in an event of its own
            known = None
        if known is None:
            known = self._hand_outs[key] = _HandOut(group, queue, token, client_id)
        known.offsets.add(offset)
        known.repeated_count += attempt > 1
        self._offset_count += 1
        if self._offset_count >= OFFSETS_MAX:
            for one in self._taken():
                self._publish(one)

    def begun(self, group: str, topic: str, store_unix_ms: int) -> None:
        """Note the time from the store of a message to its first delivery to a remote client."""
        if self._hub.watched:
            what = LatencyKey(pb.Latency.OPERATION_END_TO_END, group, topic)
            self._latencies.add(what, max(0, self._clock.unix_ms() - store_unix_ms) * 1_000)

    def handled(self, group: str, topic: str, client_id: str, took_ms: int) -> None:
        """Note an acknowledgement that is durable."""
        if self._hub.watched:
            self._of(group, topic, client_id).handled += 1
            what = LatencyKey(pb.Latency.OPERATION_HANDLE, group, topic)
            self._latencies.add(what, took_ms * 1_000)

    def dead_lettered(self, group: str, topic: str, client_id: str) -> None:
        """Note a message that was stored among the dead letters."""
        if self._hub.watched:
            self._of(group, topic, client_id).dead_lettered += 1

    def sent(self, topic: str, client_id: str, *, stored: int, failed: int, size: int) -> None:
        """Note the outcome of a send call; `size` are the bytes of its bodies."""
        if self._hub.watched:
            counts = self._of("", topic, client_id).sent
            counts.message_count += stored
            counts.failed_count += failed
            counts.byte_count += size if stored else 0

    def _of(self, group: str, topic: str, client_id: str) -> _Counts:
        key = group, topic, client_id
        counts = self._counts.get(key)
        if counts is None:
            if len(self._counts) >= CLIENTS_MAX:
                key = group, topic, ""
            counts = self._counts.setdefault(key, _Counts(*key))
        return counts

    def _taken(self) -> list[_HandOut]:
        hand_outs, self._hand_outs = list(self._hand_outs.values()), {}
        self._offset_count = 0
        return hand_outs

    def _publish(self, one: _HandOut) -> None:
        self._offset_count = max(0, self._offset_count - len(one.offsets))
        for event in _hand_out_events(one):
            self._hub.publish(event)

    def _events(self) -> Iterator[pb.MetricEvent]:
        for one in self._taken():
            yield from _hand_out_events(one)
        counts, self._counts = self._counts, {}
        for each in counts.values():
            yield from _count_events(each)
        yield from self._latencies.events()


def runs_of(offsets: Iterable[int]) -> Iterator[tuple[int, int, list[int]]]:
    """Yield ranges [first, next) of offsets with their runs, `RUNS_MAX` in each at most.

    The runs are as those of `DeliveredRange`: how many offsets are missing, how many follow, and so
    on; empty if none of the range is missing.
    """
    first = following = 0
    runs: list[int] = []
    for offset in sorted(offsets):
        if len(runs) >= 2 * RUNS_MAX and offset != following:
            yield first, following, runs
            runs = []
        if not runs:
            first, runs = offset, [0, 0]
        elif offset != following:
            runs += [offset - following, 0]
        runs[-1] += 1
        following = offset + 1
    if runs:
        yield first, following, runs if len(runs) > 2 else []


def _hand_out_events(one: _HandOut) -> Iterator[pb.MetricEvent]:
    repeated = one.repeated_count
    for first, following, runs in runs_of(one.offsets):
        handed = pb.RemoteDelivered(
            range=queue_pb2.OffsetRange(first_offset=first, next_offset=following),
            token=one.token,
            message_count=sum(runs[1::2]) if runs else following - first,
            client_id=one.client_id,
            redelivered_count=repeated,
            runs=runs,
        )
        repeated = 0
        yield pb.MetricEvent(queue=_queue(one.group, one.queue), remote_delivered=handed)


def _count_events(one: _Counts) -> Iterator[pb.MetricEvent]:
    queue = queue_pb2.GroupQueue(group=one.group, queue=queue_pb2.QueueRef(topic=one.topic))
    if one.handled:
        handled = pb.Handled(client_id=one.client_id, message_count=one.handled)
        yield pb.MetricEvent(queue=queue, handled=handled)
    if one.dead_lettered:
        dead = pb.DeadLettered(client_id=one.client_id, message_count=one.dead_lettered)
        yield pb.MetricEvent(queue=queue, dead_lettered=dead)
    if one.sent.message_count or one.sent.failed_count:
        one.sent.client_id = one.client_id
        yield pb.MetricEvent(queue=queue, sent=one.sent)


def _queue(group: str, queue: QueueRef) -> queue_pb2.GroupQueue:
    ref = queue_pb2.QueueRef(topic=queue.topic, broker=queue.broker, queue_id=queue.queue_id)
    return queue_pb2.GroupQueue(group=group, queue=ref)
