"""Goal: the permission of a topic decides, queue by queue, what can be written and read.

Method: the whole node over gRPC with a real etcd; the topic is changed as the nameserver does.
"""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_topic_pb2 import StoredTopic
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq._core.records import read_header
from batonmq.errors import BatonError, NotReadable
from tests.storage.batches import TOPIC, TOPIC_ID, batch
from tests.storage.running_node import BROKER, TIMEOUT_S, RunningNode, running_node
from tests.support.conditions import until

READ, WRITE = nameserver_pb.TOPIC_PERMISSION_READ, nameserver_pb.TOPIC_PERMISSION_WRITE
READ_WRITE = nameserver_pb.TOPIC_PERMISSION_READ_WRITE


async def change(
    node: RunningNode,
    permission: nameserver_pb.TopicPermission.ValueType = READ_WRITE,
    *,
    write_queue_count: int = 0,
    closed: bool = False,
    queue_count: int = 8,
) -> int:
    """Write the topic and wait until the node has it; return the revision."""
    spread = nameserver_pb.QueueSpread(
        broker=BROKER, queue_count=queue_count, write_queue_count=write_queue_count, closed=closed
    )
    revision = await node.write_topic(
        StoredTopic(name=TOPIC, topic_id=TOPIC_ID, spread=[spread], permission=permission)
    )

    async def known() -> bool:
        return (await ends(node))[0] >= revision

    await until(known)
    return revision


async def ends(node: RunningNode, *queue_ids: int) -> tuple[int, list[int]]:
    """Return the revision that QueryOffsets used, and the next offsets of queues."""
    request = pb.QueryOffsetsRequest(
        queues=[
            queue_pb2.QueueRef(topic=TOPIC, broker=BROKER, queue_id=queue_id)
            for queue_id in queue_ids or (0,)
        ]
    )
    call = node.stub.QueryOffsets(request, timeout=TIMEOUT_S)
    answer, trailer = await call, dict(await call.trailing_metadata())
    return int(trailer[TOPICS_REVISION]), [o.offsets.next_offset for o in answer.outcomes]


async def reasons(node: RunningNode, *batches: bytes) -> list[str]:
    """Return the error reason of each batch; `stored` if it was stored."""
    return [
        error_from_pb(outcome.error).reason if outcome.HasField("error") else "stored"
        for outcome in await node.outcomes(*batches)
    ]


async def test_read_only_topic_accepts_no_messages(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a"))
        await change(node, READ)
        (outcome,) = await node.outcomes(batch(b"b"))
        error = error_from_pb(outcome.error)
        assert error.reason == "NOT_WRITABLE"
        assert error.facts == {"topic": TOPIC, "queue_id": "0"}
        assert (await node.pull()).next_offset == 1
        await change(node, READ_WRITE)
        assert await reasons(node, batch(b"b")) == ["stored"]


async def test_write_only_topic_returns_no_messages(etcd_endpoint: str, tmp_path: Path) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await change(node, WRITE)
        assert await reasons(node, batch(b"a")) == ["stored"]
        with pytest.raises(NotReadable) as refused:
            await node.pull(hold_ms=20_000)
        assert refused.value.facts == {"topic": TOPIC}
        assert refused.value.retry_after_ms > 0, "without a delay consumers would poll in a loop"
        assert node.offsets.recorded == []


async def test_long_poll_ends_when_its_topic_becomes_write_only(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node, asyncio.TaskGroup() as tasks:
        pull = tasks.create_task(rejection_of_pull(node))
        await node.wait_long_polls(1)
        await change(node, WRITE)
        assert isinstance(await pull, NotReadable)


async def rejection_of_pull(node: RunningNode) -> BatonError | None:
    try:
        await node.pull(hold_ms=20_000)
    except BatonError as error:
        return error
    return None


async def test_closed_queues_accept_no_messages_and_can_be_read(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", queue_id=5), batch(b"b", queue_id=2))
        await change(node, write_queue_count=3)
        assert await reasons(
            node, *(batch(b"c", queue_id=queue_id) for queue_id in (2, 3, 5, 8))
        ) == ["stored", "NOT_WRITABLE", "NOT_WRITABLE", "QUEUE_NOT_FOUND"]
        assert (await node.pull(queue_id=5)).next_offset == 1
        await change(node, queue_count=3)
        assert await reasons(node, batch(b"c", queue_id=5)) == ["QUEUE_NOT_FOUND"]
        await change(node, queue_count=8)
        (receipt,) = await node.append(batch(b"d", queue_id=5))
        assert receipt.first_offset == 1, "the offsets of the queue continue"


async def test_retry_of_a_stored_batch_gets_its_receipt_from_a_closed_queue(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        raw = batch(b"a", queue_id=5, producer=(9, 1))
        (first,) = await node.append(raw)
        for topic in ({"write_queue_count": 3}, {"permission": READ}):
            await change(node, **topic)
            (again,) = await node.append(raw)
            assert (again.first_offset, again.position) == (first.first_offset, first.position)
            assert again.duplicate


async def test_end_of_a_closed_queue_is_final(etcd_endpoint: str, tmp_path: Path) -> None:
    """A message that is stored but not safe yet counts; no message follows it."""
    async with running_node(
        etcd_endpoint, tmp_path, flush="async", flush_interval_ms=60_000
    ) as node:
        await node.append(batch(b"a", queue_id=5), durability=pb.DURABILITY_MEMORY)
        assert (await ends(node, 5))[1] == [0], "the message is not safe yet"
        revision = await change(node, write_queue_count=3)
        assert await ends(node, 5) == (revision, [1])
        assert await reasons(node, batch(b"b", queue_id=5)) == ["NOT_WRITABLE"]


async def test_offsets_below_the_first_offset_are_reported_as_lost(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, retention_bytes=8_192, disk_interval_ms=20
    ) as node:
        for n in range(12):
            await node.append(batch(b"%d" % n + bytes(1_500)))
        first = await cleaned(node)
        answer = await node.pull(offset=1, messages_max=2)
        assert (answer.lost_count, answer.next_offset) == (first - 1, first + 2)
        assert read_header(answer.batches[0]).first_offset == first
        assert node.offsets.recorded[-1] == ("billing", 0, 1, first + 2)
        again = await node.pull(offset=0, messages_max=2)
        assert again.lost_count == first
        labels = {"group": "billing", "topic": TOPIC}
        counted = node.runtime.registry.get_sample_value(
            "baton_storage_lost_messages_total", labels
        )
        assert counted == first - 1, "each lost message counts once"


async def test_pull_over_only_lost_messages_is_answered_at_once(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, retention_bytes=8_192, disk_interval_ms=20
    ) as node:
        await node.append(batch(b"a", queue_id=3), batch(b"b", queue_id=3))
        for _ in range(12):
            await node.append(batch(bytes(1_500)))
        await cleaned(node)
        answer = await node.pull(queue_id=3, hold_ms=20_000)
        assert (answer.lost_count, answer.next_offset, list(answer.batches)) == (2, 2, [])
        assert node.offsets.recorded == [("billing", 3, 0, 2)]
        (receipt,) = await node.append(batch(b"c", queue_id=3))
        assert receipt.first_offset == 2
        assert (await node.pull(queue_id=3, offset=2)).lost_count == 0


async def test_lost_messages_of_an_unrecorded_pull_do_not_count(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(
        etcd_endpoint, tmp_path, segment_bytes=4_096, retention_bytes=8_192, disk_interval_ms=20
    ) as node:
        for _ in range(12):
            await node.append(batch(bytes(1_500)))
        first = await cleaned(node)
        node.offsets.tokens["billing", 0] = 7
        with pytest.raises(BatonError):
            await node.pull()
        labels = {"group": "billing", "topic": TOPIC}
        counter = "baton_storage_lost_messages_total"
        assert node.runtime.registry.get_sample_value(counter, labels) is None
        await node.pull(token=7)
        assert node.runtime.registry.get_sample_value(counter, labels) == first


async def cleaned(node: RunningNode) -> int:
    """Wait until two of six segments are left; return the first offset of queue 0."""

    async def done() -> bool:
        return (await node.describe()).first_position == 4 * 4_096

    await until(done)
    next_offset = (await ends(node, 0))[1][0]
    return (await node.pull(group="onlooker", offset=next_offset)).queue_first_offset


async def test_topic_that_leaves_the_broker_takes_no_messages_and_says_what_is_held(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with running_node(etcd_endpoint, tmp_path) as node:
        await node.append(batch(b"a", queue_id=5))
        due = Clock().unix_ms() + 3_600_000
        item = schedule_pb.ScheduleItem(batch=batch(b"later", queue_id=2), deliver_unix_ms=due)
        await node.schedule.Schedule(schedule_pb.ScheduleRequest(items=[item]), timeout=TIMEOUT_S)
        revision = await change(node, closed=True)
        assert await reasons(node, batch(b"b", queue_id=0), batch(b"b", queue_id=5)) == [
            "NOT_WRITABLE",
            "NOT_WRITABLE",
        ]
        assert (await node.pull(queue_id=5)).next_offset == 1
        call = node.stub.QueryHeld(pb.QueryHeldRequest(topic=TOPIC), timeout=TIMEOUT_S)
        (held,) = (await call).held
        assert dict(await call.trailing_metadata())[TOPICS_REVISION] == str(revision)
        assert (held.topic, held.scheduled_count) == (TOPIC, 1)
        assert (held.first_deliver_unix_ms, held.last_deliver_unix_ms) == (due, due)
