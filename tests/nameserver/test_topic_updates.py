"""Updates of topics, through a real server on a real etcd.

Goal: an update is visible at once, is made completely or not at all, and retiring queues are
removed only when they are read.
Method: in-process replicas; stand-ins for storage and offsets answer by their contracts as each
test scripts.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Replica,
    refusal,
    register_broker,
    register_offsets,
    replica,
)
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

INTERVAL_MS = 50


async def update(
    nameserver: Replica, topic: str, queue_count: int = 0, permission: Any = 0
) -> pb.Topic:
    request = pb.UpdateTopicRequest(topic=topic, queue_count=queue_count, permission=permission)
    return (await nameserver.stub.UpdateTopic(request, timeout=CALL_TIMEOUT_S)).topic


def spread(topic: pb.Topic) -> list[tuple[str, int, int]]:
    return [(part.broker, part.queue_count, part.write_queue_count) for part in topic.spread]


async def test_added_queues_exist_at_once(nameserver: Replica, etcd: EtcdSession) -> None:
    await register_broker(etcd, "broker-b")
    await until(lambda: len(nameserver.runtime.nodes.values) == 3)
    updated = await update(nameserver, "flights", 12)
    assert spread(updated) == [("broker-a", 8, 0), ("broker-b", 4, 0)]
    assert (await nameserver.route("flights")).topic == updated
    assert updated.permission == pb.TOPIC_PERMISSION_READ_WRITE


async def test_retiring_queues_take_no_messages_at_once_and_the_route_is_pushed(
    nameserver: Replica,
) -> None:
    with nameserver.watch_route("flights") as call:
        await call.read()
        await update(nameserver, "flights", 3)
        pushed = (await call.read()).route
    assert spread(pushed.topic) == [("broker-a", 8, 3)]
    again = await nameserver.create("flights", 3)
    assert not again.created


async def test_epoch_rises_when_queues_stop_and_begin_again(nameserver: Replica) -> None:
    assert (await update(nameserver, "flights", 4)).epoch == 1
    opened = await update(nameserver, "flights", 8)
    assert (opened.epoch, [part.opened_epoch for part in opened.spread]) == (2, [2])
    assert (await nameserver.route("flights")).topic == opened


async def test_permission_is_changed_alone(nameserver: Replica) -> None:
    updated = await update(nameserver, "flights", permission=pb.TOPIC_PERMISSION_READ)
    assert updated.permission == pb.TOPIC_PERMISSION_READ
    assert spread(updated) == [("broker-a", 8, 0)]
    assert (await update(nameserver, "flights", 9)).permission == pb.TOPIC_PERMISSION_READ


async def test_retention_is_stored_and_changed_alone(nameserver: Replica) -> None:
    request = pb.CreateTopicRequest(topic="kept", retention_ms=1_000)
    created = await nameserver.stub.CreateTopic(request, timeout=CALL_TIMEOUT_S)
    assert (created.topic.retention_ms, created.topic.retention_bytes) == (1_000, 0)

    async def change(**retention: Any) -> tuple[int, int]:
        asked = pb.UpdateTopicRequest(topic="kept", **retention)
        topic = (await nameserver.stub.UpdateTopic(asked, timeout=CALL_TIMEOUT_S)).topic
        assert topic == (await nameserver.route("kept")).topic
        return topic.retention_ms, topic.retention_bytes

    assert await change(retention_bytes=2**40) == (1_000, 2**40)
    assert await change() == (1_000, 2**40)
    assert await change(retention_ms=0) == (0, 2**40)
    again = await nameserver.stub.CreateTopic(
        pb.CreateTopicRequest(topic="kept"), timeout=CALL_TIMEOUT_S
    )
    assert not again.created, "a creation without retention takes the topic as it is"
    error = await refusal(nameserver.stub.CreateTopic(request, timeout=CALL_TIMEOUT_S))
    assert error.reason == "TOPIC_EXISTS"
    assert "retention_ms 0, not 1000" in error.message
    assert await change() == (0, 2**40)


@pytest.mark.parametrize("field", ["retention_ms", "retention_bytes"])
async def test_negative_retention_is_refused(nameserver: Replica, field: str) -> None:
    values: dict[str, Any] = {field: -1}
    for call in (
        nameserver.stub.CreateTopic(
            pb.CreateTopicRequest(topic="bad", **values), timeout=CALL_TIMEOUT_S
        ),
        nameserver.stub.UpdateTopic(
            pb.UpdateTopicRequest(topic="flights", **values), timeout=CALL_TIMEOUT_S
        ),
    ):
        error = await refusal(call)
        assert error.reason == "INVALID_ARGUMENT"
        assert field in error.message
        assert error.remedy
    assert (await refusal(nameserver.route("bad"))).reason == "TOPIC_NOT_FOUND"


async def test_compaction_is_fixed_and_its_settings_are_changed_alone(
    nameserver: Replica,
) -> None:
    compaction = pb.Compaction(min_lag_ms=5)
    request = pb.CreateTopicRequest(topic="table", queue_count=2, compaction=compaction)
    created = await nameserver.stub.CreateTopic(request, timeout=CALL_TIMEOUT_S)
    defaults = pb.Compaction(tombstone_retention_ms=86_400_000, min_lag_ms=5, dirty_percent=50)
    assert created.topic.compaction == defaults

    async def change(**asked: Any) -> pb.Topic:
        update = pb.UpdateTopicRequest(topic="table", **asked)
        topic = (await nameserver.stub.UpdateTopic(update, timeout=CALL_TIMEOUT_S)).topic
        assert topic == (await nameserver.route("table")).topic
        return topic

    changed = await change(compaction=pb.Compaction(dirty_percent=10))
    assert changed.compaction == pb.Compaction(
        tombstone_retention_ms=86_400_000, min_lag_ms=5, dirty_percent=10
    )
    assert await change(queue_count=2) == changed
    for asked, field in (
        ({"queue_count": 3}, "queue_count"),
        ({"retention_ms": 1}, "retention"),
        ({"compaction": pb.Compaction(dirty_percent=100)}, "dirty_percent"),
        ({"compaction": pb.Compaction(min_lag_ms=-1)}, "min_lag_ms"),
    ):
        error = await refusal(change(**asked))
        assert error.reason == "INVALID_ARGUMENT", asked
        assert error.facts["field"] == field
        assert error.remedy
    assert (await nameserver.route("table")).topic == changed, "refused means: nothing changed"


async def test_topic_is_compacted_or_not_for_ever(nameserver: Replica) -> None:
    async def create(topic: str, **asked: Any) -> pb.CreateTopicResponse:
        request = pb.CreateTopicRequest(topic=topic, queue_count=8, **asked)
        return await nameserver.stub.CreateTopic(request, timeout=CALL_TIMEOUT_S)

    await create("table", compaction=pb.Compaction())
    assert not (await create("table", compaction=pb.Compaction())).created
    compaction = pb.Compaction(min_lag_ms=1)
    refused = (
        create("table"),
        create("table", compaction=compaction),
        create("flights", compaction=pb.Compaction()),
    )
    for call in refused:
        assert (await refusal(call)).reason == "TOPIC_EXISTS"
    error = await refusal(create("both", compaction=pb.Compaction(), retention_ms=1))
    assert error.reason == "INVALID_ARGUMENT"
    update = pb.UpdateTopicRequest(topic="flights", compaction=compaction)
    error = await refusal(nameserver.stub.UpdateTopic(update, timeout=CALL_TIMEOUT_S))
    assert "not compacted" in error.message


async def test_update_without_a_change_writes_nothing(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    before = await etcd.get(etcd.key("topics", "flights"))
    await update(nameserver, "flights", 8, pb.TOPIC_PERMISSION_READ_WRITE)
    assert await etcd.get(etcd.key("topics", "flights")) == before


async def test_concurrent_topic_updates_are_all_made(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    async with replica(etcd_endpoint, cluster) as other, asyncio.TaskGroup() as tasks:
        for _ in range(4):
            tasks.create_task(update(nameserver, "flights", 20))
            tasks.create_task(update(other, "flights", permission=pb.TOPIC_PERMISSION_WRITE))

    async def both_made() -> bool:
        topic = (await nameserver.route("flights")).topic
        state = spread(topic), topic.permission
        return state == ([("broker-a", 20, 0)], pb.TOPIC_PERMISSION_WRITE)

    await until(both_made)


@pytest.mark.parametrize(
    ("request_", "reason"),
    [
        (pb.UpdateTopicRequest(topic="no-topic", queue_count=3), "TOPIC_NOT_FOUND"),
        (pb.UpdateTopicRequest(topic="flights", queue_count=1_025), "LIMIT_EXCEEDED"),
        (pb.UpdateTopicRequest(topic="a/b", queue_count=1), "INVALID_NAME"),
        (pb.UpdateTopicRequest(topic="BATON_SYS_METRICS", queue_count=1), "INVALID_NAME"),
        (
            pb.UpdateTopicRequest(topic="flights", permission=99),  # type: ignore[arg-type]
            "INVALID_ARGUMENT",
        ),
    ],
)
async def test_invalid_topic_updates_are_refused(
    nameserver: Replica, request_: pb.UpdateTopicRequest, reason: str
) -> None:
    error = await refusal(nameserver.stub.UpdateTopic(request_, timeout=CALL_TIMEOUT_S))
    assert error.reason == reason


async def test_route_request_does_not_create_a_topic_by_default(nameserver: Replica) -> None:
    assert (await refusal(nameserver.route("new"))).reason == "TOPIC_NOT_FOUND"


async def test_route_request_creates_a_topic_if_configured(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    settings: dict[str, Any] = {"auto_create_topics": True, "auto_create_queue_count": 3}
    async with replica(etcd_endpoint, cluster, **settings) as configured:
        await until(lambda: len(configured.runtime.nodes.values) == 2)
        async with asyncio.TaskGroup() as tasks:
            requests = [tasks.create_task(configured.route("new")) for _ in range(5)]
        assert {(r.result().topic.topic_id, *spread(r.result().topic)) for r in requests} == {
            (1, ("broker-a", 3, 0))
        }
        for name, reason in (("BATON_SYS_X", "INVALID_NAME"), ("a/b", "INVALID_NAME")):
            assert (await refusal(configured.route(name))).reason == reason
        with configured.watch_route("other") as call:
            assert (await refusal(call.read())).reason == "TOPIC_NOT_FOUND"
        member = await refusal(configured.join("g", "c1"))
        assert (member.reason, member.facts) == ("TOPIC_NOT_FOUND", {"topic": "flights"})


async def test_topic_created_on_demand_takes_its_settings_from_an_inherited_template(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    settings: dict[str, Any] = {
        "auto_create_topics": True,
        "auto_create_queue_count": 3,
        "auto_create_template": "template",
    }
    async with replica(etcd_endpoint, cluster, **settings) as configured:
        await until(lambda: len(configured.runtime.nodes.values) == 2)
        stub = configured.stub
        request = pb.CreateTopicRequest(topic="template", queue_count=5)
        await stub.CreateTopic(request, timeout=CALL_TIMEOUT_S)
        plain = (await configured.route("plain")).topic
        assert (spread(plain), plain.permission) == (
            [("broker-a", 3, 0)],
            pb.TOPIC_PERMISSION_READ_WRITE,
        )
        change = pb.UpdateTopicRequest(
            topic="template", permission=pb.TOPIC_PERMISSION_WRITE, inherited=True
        )
        assert (await stub.UpdateTopic(change, timeout=CALL_TIMEOUT_S)).topic.inherited
        created = (await configured.route("heir")).topic
        assert (spread(created), created.permission, created.inherited) == (
            [("broker-a", 5, 0)],
            pb.TOPIC_PERMISSION_WRITE,
            False,
        )
        other = pb.UpdateTopicRequest(topic="template", queue_count=6)
        assert (await stub.UpdateTopic(other, timeout=CALL_TIMEOUT_S)).topic.inherited


class StorageTwin(storage_grpc.StorageServiceServicer):
    """Answers QueryOffsets with `ends` by queue id, as of the topics of `revision`.

    Attributes:
        first: Called once, before the next answer.
    """

    def __init__(self) -> None:
        self.ends: dict[int, tuple[int, int]] = {}
        self.revision = 0
        self.call_count = 0
        self.first: Callable[[], Awaitable[object]] | None = None

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, context: Any
    ) -> storage_pb.QueryOffsetsResponse:
        self.call_count += 1
        if (first := self.first) is not None:
            self.first = None
            await first()
        context.set_trailing_metadata(((TOPICS_REVISION, str(self.revision)),))
        bounds = [self.ends.get(queue.queue_id, (0, 0)) for queue in request.queues]
        return storage_pb.QueryOffsetsResponse(
            outcomes=[
                storage_pb.QueryOffsetsOutcome(
                    offsets=storage_pb.QueueOffsets(first_offset=first, next_offset=end)
                )
                for first, end in bounds
            ]
        )


class OffsetsTwin(offsets_grpc.OffsetsServiceServicer):
    """Answers QueryGroup with `committed` by group and queue id of `flights`; it has progress on
    no topic before that is created.
    """

    def __init__(self) -> None:
        self.epoch = 2
        self.committed: dict[tuple[str, int], int] = {}

    async def DeleteTopic(
        self, request: offsets_pb.DeleteTopicRequest, context: Any
    ) -> offsets_pb.DeleteTopicResponse:
        return offsets_pb.DeleteTopicResponse(offsets_epoch=self.epoch)

    async def QueryGroup(
        self, request: offsets_pb.QueryGroupRequest, context: Any
    ) -> offsets_pb.QueryGroupResponse:
        return offsets_pb.QueryGroupResponse(
            queues=[
                offsets_pb.Progress(
                    queue=queue_pb2.GroupQueue(
                        group=group,
                        queue=queue_pb2.QueueRef(
                            topic="flights", broker="broker-a", queue_id=queue_id
                        ),
                    ),
                    committed_offset=committed,
                )
                for (group, queue_id), committed in self.committed.items()
                if group == request.group
            ]
        )


class Scene:
    """A replica whose topic `flights` has 4 queues, of which 2 are retiring."""

    def __init__(self, nameserver: Replica, etcd: EtcdSession) -> None:
        self.nameserver, self.etcd = nameserver, etcd
        self.storage = StorageTwin()  # type: ignore[abstract]
        self.offsets = OffsetsTwin()  # type: ignore[abstract]

    async def spread(self) -> list[tuple[str, int, int]]:
        return spread((await self.nameserver.route("flights")).topic)

    async def wait_for_calls(self) -> None:
        """Wait until the replica has called storage, and decided, at least once from now on."""
        before = self.storage.call_count
        await until(lambda: self.storage.call_count >= before + 3)

    async def shrunk(self, queue_count: int = 2) -> None:
        """Wait until the topic has only `queue_count` queues."""

        async def is_shrunk() -> bool:
            return await self.spread() == [("broker-a", queue_count, 0)]

        await until(is_shrunk)


@asynccontextmanager
async def open_scene(etcd_endpoint: str, cluster: str, etcd: EtcdSession) -> AsyncIterator[Scene]:
    async with replica(etcd_endpoint, cluster, shrink_interval_ms=INTERVAL_MS) as nameserver:
        scene = Scene(nameserver, etcd)
        add_storage = storage_grpc.add_StorageServiceServicer_to_server
        add_offsets = offsets_grpc.add_OffsetsServiceServicer_to_server
        async with serving_at(
            lambda server: add_storage(scene.storage, server),
            lambda server: add_offsets(scene.offsets, server),
        ) as address:
            await register_broker(etcd, "broker-a", address)
            revision = await register_offsets(etcd, address, scene.offsets.epoch)
            await nameserver.runtime.nodes.reached(revision)
            await nameserver.create("flights", 4)
            await nameserver.join("readers", "c1")
            await update(nameserver, "flights", 2)
            stored = await etcd.get(etcd.key("topics", "flights"))
            assert stored is not None
            scene.storage.revision = stored.mod_revision
            yield scene


async def test_retiring_queues_are_removed_once_the_last_group_has_read_them(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with open_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.ends = {2: (0, 10), 3: (5, 20)}
        for committed in ({}, {2: 10, 3: 19}, {2: 9, 3: 20}):
            scene.offsets.committed = {("readers", q): c for q, c in committed.items()}
            await scene.wait_for_calls()
            assert await scene.spread() == [("broker-a", 4, 2)], committed
        scene.offsets.committed = {("readers", 2): 10, ("readers", 3): 20}
        await scene.shrunk()


async def test_retiring_queue_is_kept_until_its_broker_has_the_change(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with open_scene(etcd_endpoint, cluster, etcd) as scene:
        revision, scene.storage.revision = scene.storage.revision, scene.storage.revision - 1
        await scene.wait_for_calls()
        assert await scene.spread() == [("broker-a", 4, 2)]
        scene.storage.revision = revision
        await scene.shrunk()


async def test_retiring_queues_take_messages_again_after_growing(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with open_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.ends = {3: (0, 1)}
        await scene.wait_for_calls()
        await update(scene.nameserver, "flights", 4)
        scene.storage.ends = {}
        before = scene.storage.call_count
        await until(lambda: not scene.nameserver.metric("shrinking_topics"))
        assert await scene.spread() == [("broker-a", 4, 0)]
        assert scene.storage.call_count <= before + 1


async def test_overtaken_replica_removes_no_queue(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    """The topic grows during the call to storage."""
    async with open_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.ends = {3: (0, 1)}
        await scene.wait_for_calls()
        grown = asyncio.Event()

        async def grow() -> None:
            await update(scene.nameserver, "flights", 3)
            scene.storage.ends = {}
            grown.set()

        scene.storage.first = grow
        await grown.wait()
        stored = await etcd.get(etcd.key("topics", "flights"))
        assert stored is not None
        await scene.wait_for_calls()
        assert await scene.spread() == [("broker-a", 4, 3)]
        scene.storage.revision = stored.mod_revision
        await scene.shrunk(3)


async def test_retiring_queue_is_kept_while_its_broker_is_down(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with open_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.revision = 0
        await etcd.delete(etcd.key("nodes", "storage", "broker-a"))
        await until(lambda: len(scene.nameserver.runtime.nodes.values) == 1)
        assert await scene.spread() == [("broker-a", 4, 2)]
