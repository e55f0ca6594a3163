"""Goal: the metric events of remote clients have every delivery, and bounded counts of clients."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._core.queues import QueueRef
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.gateway import events
from batonmq_server.gateway.events import RemoteEvents, runs_of

QUEUE = QueueRef("orders", "a", 3)


def hand_out(remote: RemoteEvents, *offsets: int, client_id: str = "c1", attempt: int = 1) -> None:
    for offset in offsets:
        remote.handed_out("g", QUEUE, offset, token=5, client_id=client_id, attempt=attempt)


async def gathered(hub: EventHub, *, work: Sequence[tuple[int, ...]] = ()) -> list[pb.MetricEvent]:
    """Return the events of one gathering, with deliveries of these offsets before."""
    remote = RemoteEvents(hub, Clock())
    with hub.listen() as listener:
        for offsets in work:
            hand_out(remote, *offsets)
        hub.gather()
        return list(hub.batch(1, listener).events)


async def test_hand_outs_name_their_client_token_and_exact_offsets() -> None:
    (event,) = await gathered(EventHub("gateway/g", 1, Clock()), work=[(7, 9, 10), (12,)])
    assert (event.queue.group, event.queue.queue.queue_id) == ("g", 3)
    handed = event.remote_delivered
    assert (handed.client_id, handed.token, handed.message_count) == ("c1", 5, 4)
    assert (handed.range.first_offset, handed.range.next_offset) == (7, 13)
    assert list(handed.runs) == [0, 1, 1, 2, 1, 1]


async def test_message_that_is_handed_out_twice_within_a_second_is_in_two_events() -> None:
    hub = EventHub("gateway/g", 1, Clock())
    remote = RemoteEvents(hub, Clock())
    with hub.listen() as listener:
        hand_out(remote, 7, 8)
        hand_out(remote, 7, attempt=2)
        hub.gather()
        first, second = (one.remote_delivered for one in hub.batch(1, listener).events)
    assert (first.message_count, first.redelivered_count) == (2, 0)
    assert (second.range.first_offset, second.redelivered_count) == (7, 1)


async def test_nothing_is_kept_while_nobody_watches() -> None:
    hub = EventHub("gateway/g", 1, Clock())
    remote = RemoteEvents(hub, Clock())
    hand_out(remote, 7)
    remote.handled("g", "orders", "c1", 10)
    remote.sent("orders", "c1", stored=1, failed=0, size=3)
    with hub.listen() as listener:
        hub.gather()
        assert not listener.waiting


async def test_counts_beyond_the_bound_of_clients_have_no_client_id() -> None:
    hub = EventHub("gateway/g", 1, Clock())
    remote = RemoteEvents(hub, Clock())
    with hub.listen() as listener:
        for number in range(events.CLIENTS_MAX + 50):
            remote.handled("g", "orders", f"c{number}", 10)
            remote.dead_lettered("g", "orders", f"c{number}")
        hub.gather()
        found = list(hub.batch(1, listener).events)
    handled = {
        one.handled.client_id: one.handled.message_count
        for one in found
        if one.handled.message_count
    }
    assert len(handled) == events.CLIENTS_MAX + 1
    assert handled[""] == 50
    assert sum(one.dead_lettered.message_count for one in found) == events.CLIENTS_MAX + 50


async def test_sent_messages_are_counted_by_client_and_topic() -> None:
    hub = EventHub("gateway/g", 1, Clock())
    remote = RemoteEvents(hub, Clock())
    with hub.listen() as listener:
        remote.sent("orders", "c1", stored=2, failed=1, size=30)
        remote.sent("orders", "c1", stored=0, failed=1, size=9)
        hub.gather()
        (event,) = hub.batch(1, listener).events
    sent = event.sent
    assert (sent.client_id, sent.message_count, sent.failed_count) == ("c1", 2, 2)
    assert (sent.byte_count, event.queue.queue.topic) == (30, "orders")


async def test_many_offsets_are_published_before_they_fill_the_memory(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(events, "OFFSETS_MAX", 10)
    hub = EventHub("gateway/g", 1, Clock())
    remote = RemoteEvents(hub, Clock())
    with hub.listen() as listener:
        hand_out(remote, *range(25))
        published = [one.remote_delivered.message_count for one in hub.batch(1, listener).events]
    assert published == [10, 10]


@given(st.sets(st.integers(0, 300)), st.integers(1, 8))
def test_runs_are_exactly_the_offsets(offsets: set[int], runs_max: int) -> None:
    before, events.RUNS_MAX = events.RUNS_MAX, runs_max
    try:
        ranges = list(runs_of(offsets))
    finally:
        events.RUNS_MAX = before
    found: list[int] = []
    for first, following, runs in ranges:
        assert len(runs) <= 2 * runs_max
        at = first
        for missing, there in zip(runs[::2], runs[1::2], strict=True):
            found += range(at + missing, at + missing + there)
            at += missing + there
        if not runs:
            found += range(first, following)
        else:
            assert at == following
    assert found == sorted(offsets)
