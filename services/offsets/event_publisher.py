"""Live events of offsets: commits, fenced calls and commit times, gathered once a second.

Commits on the topic of the metrics itself are left out: each event would cause the next one.
"""

from __future__ import annotations

import asyncio
from collections import Counter, OrderedDict
from collections.abc import Iterable, Iterator
from typing import NamedTuple

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._core.names import METRICS_TOPIC
from batonmq._core.queues import GroupQueue, Incarnation
from batonmq._telemetry.event_hub import EventHub
from batonmq._telemetry.latency_sketches import LatencyKey, LatencySketches
from batonmq.errors import Fenced
from batonmq_server.offsets.core.progress import Progress
from batonmq_server.offsets.core.ranges import RangeSet
from batonmq_server.offsets.responses import queue_pb

HOLDERS_MAX = 100_000
"""Queues for which the last two holders are kept, to report a fenced call by client id."""
_COMMIT = LatencyKey(pb.Latency.OPERATION_COMMIT)
_CALLS = {
    "touch": "Touch",
    "commit": "Commit",
    "close": "Close",
    "pull": "RecordDelivered",
    "record": "RecordDelivered",
}
_Refusal = tuple[GroupQueue, int, int, str]


class _Committed(NamedTuple):
    """Progress after the last commit under a token; acked offsets are counted when it is sent."""

    committed_offset: int
    closed: bool
    holder: Incarnation | None
    acked: RangeSet
    delivered_offset: int


class EventPublisher:
    """Gathers the events of one process; callers check `hub.watched` first."""

    def __init__(self, hub: EventHub) -> None:
        self.hub = hub
        self._committed: dict[tuple[GroupQueue, int], _Committed] = {}
        self._fenced: Counter[_Refusal] = Counter()
        self._holders: OrderedDict[GroupQueue, dict[int, str]] = OrderedDict()
        self._latencies = LatencySketches()
        hub.gatherers.append(self._events)

    def now_s(self) -> float:
        """Return the time of the event loop, for `record_commit_time`."""
        return asyncio.get_running_loop().time()

    def record_commit_time(self, begin_s: float, topics: Iterable[str]) -> None:
        """Record the duration of a call that changed the progress on these topics."""
        if self.hub.watched and any(topic != METRICS_TOPIC for topic in topics):
            self._latencies.add(_COMMIT, int((self.now_s() - begin_s) * 1e6))

    def record_grant(self, key: GroupQueue, token: int, client_id: str) -> None:
        """Record the holder of a new token; an empty `client_id` for none."""
        holders = self._holders.pop(key, {})
        self._holders[key] = dict([*holders.items(), (token, client_id)][-2:])
        if len(self._holders) > HOLDERS_MAX:
            self._holders.popitem(last=False)

    def record_commit(
        self, key: GroupQueue, token: int, progress: Progress, *, closed: bool
    ) -> None:
        """Record the progress of a queue after a commit or close under a token."""
        if key.topic != METRICS_TOPIC:
            holder = progress.holder if progress.token == token else None
            self._committed[key, token] = _Committed(
                progress.committed_offset,
                closed,
                holder,
                progress.acked,
                progress.delivered_without_advance,
            )

    def record_fenced(self, op: str, key: GroupQueue, token: int, error: Fenced) -> None:
        """Record a call that was rejected because its token is fenced."""
        self._fenced[key, token, error.detail.current, _CALLS[op]] += 1

    def _events(self) -> Iterator[pb.MetricEvent]:
        committed, self._committed = self._committed, {}
        for (key, token), one in committed.items():
            committed_range = pb.CommittedRange(
                committed_offset=one.committed_offset,
                token=token,
                closed=one.closed,
                client_id=one.holder.client_id if one.holder else "",
                acked_beyond_count=one.acked.count,
                delivered_offset=one.delivered_offset,
            )
            yield pb.MetricEvent(queue=queue_pb(key), committed=committed_range)
        fenced, self._fenced = self._fenced, Counter()
        for (key, token, current, call), count in fenced.items():
            yield pb.MetricEvent(
                queue=queue_pb(key),
                fenced=pb.Fenced(
                    client_id=self._holders.get(key, {}).get(token, ""),
                    token=token,
                    current_token=current,
                    call=call,
                    count=count,
                ),
            )
        yield from self._latencies.events()
