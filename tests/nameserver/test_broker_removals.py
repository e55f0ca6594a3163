"""Removals of brokers and moves of queues, through a real server on a real etcd.

Goal: a broker that is being removed gets no queues, what it holds is named, and its records go
only when it holds nothing and its nodes are gone.
Method: an in-process replica; stand-ins for storage and offsets answer by their contracts as each
test scripts.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from baton.common.v1 import error_pb2, queue_pb2, replicas_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as storage_pb
from baton.storage.v1 import storage_service_pb2_grpc as storage_grpc
from batonmq._common.contract import CLOSED_QUEUES_CONTRACT, CONTRACT
from batonmq._common.rpc import error_to_pb
from batonmq._core.keyed_queues import TOPICS_REVISION
from batonmq.errors import DataLoss, InvalidArgument, NoBroker, NotServing, QueueNotFound
from batonmq_server.nameserver import retirement
from batonmq_server.nameserver.broker_removals import BrokerRemovals
from batonmq_server.nameserver.core.removal_obstacle import unread_obstacle
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.topic_proto import topic_to_bytes
from batonmq_server.nameserver.topic_store import TopicStore
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    CALL_TIMEOUT_S,
    Replica,
    refusal,
    register_broker,
    register_offsets,
    replica,
)
from tests.nameserver.test_topic_updates import OffsetsTwin, StorageTwin
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

INTERVAL_MS = 50
ALL = "broker-a", "broker-b", "broker-c"


class HoldingTwin(StorageTwin):
    """Answers QueryHeld with `held`, as of the newest topics."""

    def __init__(self) -> None:
        super().__init__()
        self.held: list[storage_pb.HeldMessages] = []
        self.revision = 1 << 60
        self.errors: dict[int, error_pb2.Error] = {}
        """Errors of queues by id."""
        self.asked: list[int] = []
        """For each QueryHeld, the number of answered calls before."""

    async def QueryOffsets(
        self, request: storage_pb.QueryOffsetsRequest, context: Any
    ) -> storage_pb.QueryOffsetsResponse:
        answer = await super().QueryOffsets(request, context)
        for queue, outcome in zip(request.queues, answer.outcomes, strict=True):
            if queue.queue_id in self.errors:
                outcome.error.CopyFrom(self.errors[queue.queue_id])
        return answer

    async def QueryHeld(
        self, request: storage_pb.QueryHeldRequest, context: Any
    ) -> storage_pb.QueryHeldResponse:
        self.asked.append(self.call_count)
        context.set_trailing_metadata(((TOPICS_REVISION, str(self.revision)),))
        return storage_pb.QueryHeldResponse(held=self.held)


class RedriveTwin(OffsetsTwin):
    """Has `redriven` offsets of each dead-letter topic acked, on queue 0 of broker-c."""

    def __init__(self) -> None:
        super().__init__()
        self.redriven: dict[str, tuple[int, int]] = {}

    async def QueryGroup(
        self, request: offsets_pb.QueryGroupRequest, context: Any
    ) -> offsets_pb.QueryGroupResponse:
        answer = await super().QueryGroup(request, context)
        if request.group in self.redriven:
            first, end = self.redriven[request.group]
            queue = queue_pb2.QueueRef(topic=request.group, broker="broker-c", queue_id=0)
            acked = queue_pb2.OffsetRange(first_offset=first, next_offset=end)
            answer.queues.add(
                queue=queue_pb2.GroupQueue(group=request.group, queue=queue), acked=[acked]
            )
        return answer


class RemovalScene:
    """A replica with three brokers, and the topic `flights` with two queues on each."""

    def __init__(self, nameserver: Replica, etcd: EtcdSession, address: str) -> None:
        self.nameserver, self.etcd, self.address = nameserver, etcd, address
        self.storage = HoldingTwin()  # type: ignore[abstract]
        self.offsets = RedriveTwin()  # type: ignore[abstract]

    async def register(self, broker: str, **fields: Any) -> None:
        fields = {"contract": CONTRACT} | fields
        await register_broker(self.etcd, broker, self.address, **fields)

    async def register_old(self, service: Any, name: str) -> None:
        """Register a node of a version that does not know closed queues."""
        node = StoredNode(
            service=service,
            node_id=f"{name}-0",
            address="127.0.0.1:1",
            contract=CLOSED_QUEUES_CONTRACT - 1,
        )
        key = self.etcd.key("nodes", name, f"{name}-0")
        revision = await self.etcd.put(key, node.SerializeToString())
        await self.nameserver.runtime.nodes.reached(revision)

    async def spread(self, topic: str = "flights") -> dict[str, int]:
        """Return the number of writable queues of a topic by broker."""
        route = await self.nameserver.route(topic)
        return {one.broker: 0 if one.closed else one.queue_count for one in route.topic.spread}

    async def remove(self, broker: str, **fields: Any) -> pb.RemoveBrokerResponse:
        values: dict[str, Any] = {"execute": True, "by": "ops@host"} | fields
        request = pb.RemoveBrokerRequest(broker=broker, **values)
        return await self.nameserver.stub.RemoveBroker(request, timeout=CALL_TIMEOUT_S)

    async def move(self, **fields: Any) -> pb.MoveQueuesResponse:
        values: dict[str, Any] = {"topic": "flights", "execute": True, "by": "ops@host"} | fields
        request = pb.MoveQueuesRequest(**values)
        return await self.nameserver.stub.MoveQueues(request, timeout=CALL_TIMEOUT_S)

    async def ensure_unresolved(self, broker: str) -> None:
        request = pb.EnsureUnresolvedTopicRequest(broker=broker)
        await self.nameserver.stub.EnsureUnresolvedTopic(request, timeout=CALL_TIMEOUT_S)

    async def stop(self, broker: str) -> None:
        """End the registration of a broker."""
        await self.etcd.delete(self.etcd.key("nodes", "storage", broker))
        nodes = self.nameserver.runtime.nodes.values
        await until(lambda: f"storage/{broker}" not in nodes)

    async def create_late(self, topic: str, broker: str) -> None:
        """Create a topic as a nameserver does that does not have the mark of a broker yet."""
        late = Topic(name=topic, topic_id=77, spread=(QueueSpread(broker, 2),), create_unix_ms=1)
        await self.etcd.put(self.etcd.key("topics", topic), topic_to_bytes(late))

    async def becomes(self, expected: dict[str, int]) -> None:
        async def look() -> bool:
            return await self.spread() == expected

        await until(look)


@asynccontextmanager
async def removal_scene(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> AsyncIterator[RemovalScene]:
    async with replica(etcd_endpoint, cluster, shrink_interval_ms=INTERVAL_MS) as nameserver:
        scene = RemovalScene(nameserver, etcd, "")
        add_storage = storage_grpc.add_StorageServiceServicer_to_server
        add_offsets = offsets_grpc.add_OffsetsServiceServicer_to_server
        async with serving_at(
            lambda server: add_storage(scene.storage, server),
            lambda server: add_offsets(scene.offsets, server),
        ) as scene.address:
            for broker in ALL:
                await scene.register(broker)
            revision = await register_offsets(etcd, scene.address, scene.offsets.epoch)
            await nameserver.runtime.nodes.reached(revision)
            await nameserver.create("flights", 6)
            yield scene


async def test_removed_broker_is_empty_then_gone_and_its_name_is_not_used_again(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        record = replicas_pb2.ReplicaSet(leader="broker-c", in_sync=["broker-c"])
        await etcd.put(etcd.key("replicas", "storage", "broker-c"), record.SerializeToString())
        planned = await scene.remove("broker-c", execute=False)
        assert [(one.topic, one.queue_count) for one in planned.moves] == [("flights", 2)]
        assert not planned.HasField("removal")
        assert await scene.spread() == dict.fromkeys(ALL, 2), "a dry run changes nothing"
        done = await scene.remove("broker-c")
        assert (done.removal.broker, done.removal.by) == ("broker-c", "ops@host")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        await scene.nameserver.create("new", 6)
        assert await scene.spread("new") == {"broker-a": 3, "broker-b": 3}
        empty = await scene.remove("broker-c")
        assert (list(empty.obstacles), list(empty.nodes_up)) == ([], ["broker-c"])
        assert not empty.removal.forgotten_unix_ms, "its node is up"
        await scene.stop("broker-c")
        assert (await scene.remove("broker-c")).removal.forgotten_unix_ms
        assert await etcd.get(etcd.key("replicas", "storage", "broker-c")) is None
        await scene.register("broker-c")
        await until(lambda: "storage/broker-c" in scene.nameserver.runtime.nodes.values)
        await scene.nameserver.create("newer", 6)
        assert await scene.spread("newer") == {"broker-a": 3, "broker-b": 3}
        assert isinstance(await refusal(scene.remove("broker-c", cancel=True)), InvalidArgument)


async def test_broker_stays_until_messages_for_later_are_delivered(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.held = [
            storage_pb.HeldMessages(
                topic="flights",
                scheduled_count=3,
                first_deliver_unix_ms=5,
                last_deliver_unix_ms=9,
            )
        ]
        (obstacle,) = (await scene.remove("broker-c")).obstacles
        assert obstacle.kind == pb.REMOVAL_OBSTACLE_KIND_SCHEDULED
        assert (obstacle.topic, obstacle.count, obstacle.last_unix_ms) == ("flights", 3, 9)
        request = pb.QueryRetiringRequest(topic="flights")
        answer = await scene.nameserver.stub.QueryRetiring(request, timeout=CALL_TIMEOUT_S)
        assert list(answer.obstacles) == [obstacle]
        calls = scene.storage.call_count
        await until(lambda: scene.storage.call_count >= calls + 3)
        assert (await scene.spread())["broker-c"] == 0, "its queues still exist"
        scene.storage.held = []
        await scene.becomes({"broker-a": 3, "broker-b": 3})


async def test_removal_can_be_cancelled(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        assert isinstance(await refusal(scene.remove("broker-c", cancel=True)), InvalidArgument)
        await scene.remove("broker-c")
        assert not (await scene.remove("broker-c", cancel=True)).HasField("removal")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        moved = await scene.move()
        assert moved.moved_count == 2
        await scene.becomes(dict.fromkeys(ALL, 2))


async def test_last_broker_is_not_removed(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.remove("broker-c")
        await scene.remove("broker-b")
        assert isinstance(await refusal(scene.remove("broker-a")), NoBroker)
        assert isinstance(await refusal(scene.remove("broker-z")), InvalidArgument)


async def test_broker_of_an_earlier_version_keeps_writable_queues(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.register("broker-c", contract=CLOSED_QUEUES_CONTRACT - 1)
        nodes = scene.nameserver.runtime.nodes.values
        old = await etcd.get(etcd.key("nodes", "storage", "broker-c"))
        assert old is not None
        await until(lambda: nodes["storage/broker-c"].value == old.value)
        for call in (
            scene.remove("broker-c"),
            scene.move(from_broker="broker-c", to_broker="broker-a"),
        ):
            error = await refusal(call)
            assert isinstance(error, InvalidArgument)
            assert "earlier version" in error.message
        moved = await scene.move(from_broker="broker-c", to_broker="broker-a", queue_count=1)
        assert moved.moved_count == 1


@pytest.mark.parametrize("target", ["broker-z", "broker-b"])
async def test_queues_move_to_no_broker_that_is_unknown_or_being_removed(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, target: str
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.remove("broker-b")
        error = await refusal(scene.move(from_broker="broker-a", to_broker=target))
        assert isinstance(error, InvalidArgument)
        assert error.facts["field"] == "to_broker"


async def test_broker_is_asked_once_what_it_holds_for_all_topics_that_leave_it(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        names = [f"topic-{number}" for number in range(5)]
        for name in names:
            await scene.nameserver.create(name, 6)
        scene.storage.held = [
            storage_pb.HeldMessages(topic=name, scheduled_count=1) for name in names
        ]
        await scene.remove("broker-c")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        asked, calls = len(scene.storage.asked), scene.storage.call_count
        await until(lambda: len(scene.storage.asked) >= asked + 4)
        looks = scene.storage.call_count - calls
        assert looks >= 3 * len(names), "each topic was looked at in each round"


async def test_broker_is_not_asked_what_it_holds_while_a_group_has_messages_to_read(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.ends = {0: (0, 7), 1: (0, 7)}
        await scene.nameserver.join("readers", "one")
        await scene.remove("broker-c")
        asked, calls = len(scene.storage.asked), scene.storage.call_count
        await until(lambda: scene.storage.call_count >= calls + 3)
        assert len(scene.storage.asked) == asked


async def test_removed_broker_gets_a_queue_for_unresolved_messages_only_if_it_asks_in_time(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    unresolved = "BATON_SYS_UNRESOLVED"
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.remove("broker-c")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        await scene.ensure_unresolved("broker-a")
        assert await scene.spread(unresolved) == {"broker-a": 1, "broker-b": 1}
        await scene.ensure_unresolved("broker-c")
        assert await scene.spread(unresolved) == dict.fromkeys(ALL, 1)

        async def left() -> bool:
            await scene.remove("broker-c")
            return "broker-c" not in await scene.spread(unresolved)

        await until(left)
        await scene.stop("broker-c")
        assert (await scene.remove("broker-c")).removal.forgotten_unix_ms
        await scene.register("broker-c")
        await until(lambda: "storage/broker-c" in scene.nameserver.runtime.nodes.values)
        for asker in ALL:
            await scene.ensure_unresolved(asker)
        assert "broker-c" not in await scene.spread(unresolved)


async def test_queues_that_a_late_nameserver_gives_to_a_removed_broker_are_moved_off(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.remove("broker-c")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        await scene.stop("broker-c")
        assert (await scene.remove("broker-c")).removal.forgotten_unix_ms
        await scene.create_late("late", "broker-c")

        async def moved() -> bool:
            return bool((await scene.remove("broker-c")).moves)

        await until(moved)
        assert await scene.spread("late") == {"broker-a": 1, "broker-b": 1, "broker-c": 0}


async def test_broker_is_not_forgotten_while_etcd_has_queues_on_it(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.remove("broker-c")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        await scene.stop("broker-c")
        await scene.create_late("late", "broker-c")
        monkeypatch.setattr(BrokerRemovals, "_topics_on", lambda *_: [])  # the mirror lags
        error = await refusal(scene.remove("broker-c"))
        assert isinstance(error, NotServing)
        assert "topic late" in error.message


async def test_records_that_are_in_use_are_an_error_to_retry(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        election = etcd.key("elections", "storage", "broker-c")
        await etcd.put(election, b"broker-c")
        await scene.remove("broker-c")
        await scene.becomes({"broker-a": 3, "broker-b": 3})
        await scene.stop("broker-c")
        error = await refusal(scene.remove("broker-c"))
        assert isinstance(error, NotServing)
        assert error.retry_after_ms
        await etcd.delete(election)
        assert (await scene.remove("broker-c")).removal.forgotten_unix_ms


async def test_topic_that_is_deleted_meanwhile_does_not_stop_the_others(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.nameserver.create("a-first", 6)
        update = TopicStore.update

        async def late(store: TopicStore, name: str, change: Any) -> Any:
            if name == "a-first":
                await store.delete(name)
            return await update(store, name, change)

        monkeypatch.setattr(TopicStore, "update", late)
        assert [one.topic for one in (await scene.remove("broker-c")).moves] == ["flights"]


async def test_dead_letters_that_were_all_redriven_do_not_keep_a_broker(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        dead = "%DLQ%readers"
        await scene.nameserver.create(dead, 3)
        await scene.nameserver.set_group(dead)
        scene.storage.ends = {0: (10, 20)}  # retention has removed what was before
        scene.offsets.redriven = {dead: (10, 19)}
        obstacles = (await scene.remove("broker-c")).obstacles
        assert [(one.topic, one.count) for one in obstacles] == [(dead, 1)]
        scene.offsets.redriven = {dead: (10, 20)}

        async def left() -> bool:
            return "broker-c" not in await scene.spread(dead)

        await until(left)


async def test_gateway_of_an_earlier_version_keeps_brokers_writable(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.register_old(pb.SERVICE_KIND_GATEWAY, "gateway")
        for call in (
            scene.remove("broker-c"),
            scene.move(from_broker="broker-c", to_broker="broker-a"),
        ):
            error = await refusal(call)
            assert isinstance(error, InvalidArgument)
            assert "gateway-0 is of an earlier version" in error.message


async def test_nameserver_of_an_earlier_version_is_found_also_if_nothing_has_to_be_closed(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        await scene.nameserver.delete("flights")
        await scene.register_old(pb.SERVICE_KIND_NAMESERVER, "nameserver")
        error = await refusal(scene.remove("broker-c"))
        assert isinstance(error, InvalidArgument)
        assert "nameserver-0 is of an earlier version" in error.message


async def test_queue_whose_end_is_not_known_keeps_its_broker(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.errors = {1: error_to_pb(DataLoss("damaged"))}
        await scene.remove("broker-c")
        (obstacle,) = (await scene.remove("broker-c")).obstacles
        assert obstacle.kind == pb.REMOVAL_OBSTACLE_KIND_UNREACHABLE
        assert "damaged" in obstacle.message
        scene.storage.errors = {1: error_to_pb(QueueNotFound("not known yet"))}
        (obstacle,) = (await scene.remove("broker-c")).obstacles
        assert obstacle.kind == pb.REMOVAL_OBSTACLE_KIND_REMOVING


async def test_answer_stops_at_its_limit(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    looks: list[object] = []
    find = unread_obstacle

    def counted(*arguments: Any) -> Any:
        looks.append(arguments)
        return find(*arguments)

    async with removal_scene(etcd_endpoint, cluster, etcd) as scene:
        scene.storage.ends = {0: (0, 7), 1: (0, 7)}
        for name in ("one", "two", "three"):
            await scene.nameserver.join(name, "member")
        monkeypatch.setattr(retirement, "OBSTACLES_MAX", 3)
        monkeypatch.setattr(retirement, "unread_obstacle", counted)
        answer = await scene.remove("broker-c", execute=False)
        assert len(answer.obstacles) == len(looks) == 3
