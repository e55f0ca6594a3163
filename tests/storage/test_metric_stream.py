"""Goal: what happens while events are gathered is in this gathering or in the next one.

Method: the stream of a node, without the node.
"""

from __future__ import annotations

import asyncio

from baton.metrics.v1 import metrics_service_pb2 as pb
from batonmq._common.aio import STEP_ITEMS
from batonmq._common.clock import Clock
from batonmq._telemetry.event_hub import EventHub
from batonmq_server.storage.core.queue_reader import ReadResult
from batonmq_server.storage.long_polls import QueueOwner
from batonmq_server.storage.metric_stream import FSYNC, StorageMetricStream


async def test_sync_of_an_append_during_a_gathering_without_appends_counts() -> None:
    hub = EventHub("storage/broker-a", 1, Clock())
    stream = StorageMetricStream(hub, "broker-a")
    reading = ReadResult(batches=[], next_offset=1, message_count=1, filtered_count=0)
    with hub.listen() as buffer:
        for number in range(2 * STEP_ITEMS):
            owner = QueueOwner("billing", "orders", "broker-a", number, 1)
            stream.delivered(owner, "client-a", 0, reading, ())
        async with asyncio.TaskGroup() as tasks:
            gathering = tasks.create_task(hub.gather_if_due())
            await asyncio.sleep(0)
            assert not gathering.done()
            stream.appended("orders", 0, (1, 100, 1))
            stream.observe_us(FSYNC, 700)
        hub.gather()
        events = buffer.take(1 << 20)
    assert [one.appended.message_count for one in events if one.HasField("appended")] == [1]
    synced = [one for one in events if one.latency.operation == pb.Latency.OPERATION_FSYNC]
    assert len(synced) == 1
