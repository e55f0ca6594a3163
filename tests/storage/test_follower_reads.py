"""Reading from followers.

Goal: a follower serves what the whole in-sync set has, under the same checks as the leader. Readers
use it if there is no leader or if they lag far behind; otherwise it sends them back to the leader.
Method: three real nodes in one process (tests/storage/replicas.py), an offsets twin that keeps the
records, and at the end a real consumer that loses its leader.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from random import Random
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq._connection.directory import Directory
from batonmq._consumer.puller import Puller
from batonmq._core.ordering_key import ORDERING_KEY
from batonmq._core.queues import QueueRef
from batonmq._core.records import Message, decode_records, read_header
from batonmq.admin.admin import Admin
from batonmq.admin.message_queries import MessageQueries
from batonmq.errors import BatonError, NotLeader
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import replica
from tests.storage.batches import TOPIC, batch
from tests.storage.offsets_twin import OffsetsTwin
from tests.storage.replicas import BROKER, Replica, Scene
from tests.storage.running_node import GROUP, pull_request
from tests.support.conditions import until
from tests.support.grpc_server import serving_at

pytestmark = pytest.mark.timeout(180)
TIMEOUT_S = 20


@pytest.fixture
async def offsets(scene: Scene) -> AsyncIterator[OffsetsTwin]:
    twin = OffsetsTwin()  # type: ignore[abstract]
    async with (
        serving_at(
            lambda server: offsets_grpc.add_OffsetsServiceServicer_to_server(twin, server)
        ) as address,
        EtcdSession(scene.endpoint, scene.cluster, Clock()) as session,
    ):
        node = StoredNode(node_id="o", address=address, leader=True, epoch=1)
        await session.put(session.key("nodes", "offsets", "o"), node.SerializeToString())
        yield twin


async def three(scene: Scene) -> tuple[Replica, Replica]:
    """Wait until all three nodes are in sync; return the leader and one follower."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    return leader, scene.nodes[min(scene.nodes.keys() - {leader.name})]


@asynccontextmanager
async def reader_at_start(
    scene: Scene, etcd_endpoint: str, group: str = GROUP
) -> AsyncIterator[Puller]:
    """Yield a reader of queue 0 from offset 0, of a group without ownership."""
    async with EtcdSession(scene.endpoint, scene.cluster, Clock()) as session:
        gate = StoredGate(ownership=nameserver_pb.OWNERSHIP_OFF)
        await session.put(session.key("gates", GROUP), gate.SerializeToString())
    queue = QueueRef(TOPIC, BROKER, 0)
    async with (
        replica(etcd_endpoint, scene.cluster) as nameserver,
        Puller(nameserver.address, group=group) as puller,
    ):
        await puller.assign([queue])
        puller._reset_epochs[queue] = 0  # this cluster has no offsets
        await puller.seek(queue, 0)
        yield puller


async def read_until(puller: Puller, bodies: list[bytes], count: int) -> None:
    """Add the bodies that the reader gets, at most ten by poll, until there are `count`."""
    while len(bodies) < count:
        for messages in (await puller.poll(count_max=10)).values():
            bodies += [message.body for message in messages]


async def pull(node: Replica, **fields: Any) -> pb.PullResponse:
    try:
        return await node.stub.Pull(pull_request(**fields), timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def rejection(node: Replica, **fields: Any) -> BatonError | None:
    """Return the error of a pull; None if it is answered."""
    try:
        await pull(node, **fields)
    except BatonError as error:
        return error
    return None


async def not_leading(node: Replica) -> bool:
    return not await node.serves()


def bodies(answer: pb.PullResponse) -> list[bytes]:
    message_bodies = []
    for raw in answer.batches:
        header = read_header(raw)
        message_bodies += [
            record.body for record in decode_records(raw, header, range(header.count))
        ]
    return message_bodies


async def wait_visible(node: Replica, count: int) -> None:
    """Wait until a node has `count` visible messages in queue 0.

    A follower rejects reads while it lags, which a pause of a loaded machine can cause too.
    """

    async def look() -> bool:
        try:
            return len(await node.bodies()) == count
        except NotLeader:
            return False

    await until(look)


async def three_with_a_message(scene: Scene) -> tuple[Replica, Replica]:
    """Return the leader and one follower of three nodes; both serve the message `a`."""
    leader, follower = await three(scene)
    await leader.append(batch(b"a"))
    await wait_visible(follower, 1)
    return leader, follower


async def test_follower_records_a_delivery_before_it_answers(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    leader, follower = await three(scene)
    await leader.append(batch(b"a"), batch(b"b"))
    await wait_visible(follower, 2)
    answer = await pull(follower)
    assert bodies(answer) == [b"a", b"b"]
    assert offsets.recorded == [(GROUP, 0, 0, 2)]
    offsets.tokens[GROUP, 0] = 5
    with pytest.raises(BatonError) as refused:
        await pull(follower)
    assert refused.value.reason == "FENCED"


async def test_follower_commits_no_acknowledgements(scene: Scene, offsets: OffsetsTwin) -> None:
    leader, follower = await three(scene)
    await leader.append(batch(b"a"), batch(b"b"))
    await wait_visible(follower, 2)
    acks = offsets_pb.Acks(committed_offset=1)
    assert not (await pull(follower, offset=1, progress=acks)).progress_taken
    assert (await pull(leader, offset=1, progress=acks)).progress_taken
    assert [item.HasField("progress") for item in offsets.items] == [False, True]


async def test_follower_with_a_leader_redirects_readers_to_it_at_once(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    _, follower = await three_with_a_message(scene)
    assert (await pull(follower)).next_node_id == ""
    refused = await rejection(follower, offset=1, hold_ms=30_000)
    assert refused is not None
    assert refused.reason == "NOT_LEADER"


@pytest.mark.long
async def test_follower_serves_long_polls_while_etcd_has_no_leader(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    leader, follower = await three_with_a_message(scene)
    leader.gate.shut.add(follower.name)
    (other,) = scene.nodes.keys() - {leader.name, follower.name}
    await scene.wait_in_sync(leader.name, other)  # so that the follower is not elected
    await scene.nodes[other].crash()
    await leader.crash()

    async def keeps() -> bool:
        return (await pull(follower)).next_node_id == follower.name

    await until(keeps)
    begin_ms = Clock().monotonic_ms()
    answer = await pull(follower, offset=1, hold_ms=1_500)
    assert (len(answer.batches), answer.next_node_id) == (0, follower.name)
    assert Clock().monotonic_ms() - begin_ms >= 1_450


@pytest.mark.long
async def test_follower_without_etcd_and_leader_rejects_long_polls(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    leader, follower = await three_with_a_message(scene)
    for node in scene.nodes.values():
        node.session.lose()
    await leader.crash()

    async def refuses() -> bool:
        answer = await pull(follower)
        assert bodies(answer) == [b"a"]
        return "etcd does not answer" in str(await rejection(follower, offset=1))

    await until(refuses)
    refused = await rejection(follower, offset=1, hold_ms=30_000)
    assert refused is not None
    assert (refused.reason, refused.facts) == ("NOT_LEADER", {"node": follower.name})
    assert (await pull(follower)).next_node_id == ""
    with pytest.raises(BatonError, match="etcd does not answer"):
        await follower.read(offset=1)


async def test_follower_that_does_not_reach_the_leader_rejects_long_polls(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    leader, follower = await three_with_a_message(scene)
    leader.gate.shut.add(follower.name)

    async def refuses() -> bool:
        return "does not reach the leader" in str(await rejection(follower, offset=1))

    await until(refuses)
    refused = await rejection(follower, offset=1, hold_ms=30_000)
    assert refused is not None
    assert (refused.reason, refused.facts["leader"]) == ("NOT_LEADER", leader.name)
    assert (await pull(follower)).next_node_id == ""


@pytest.mark.long
@pytest.mark.parametrize("group", [GROUP, ""], ids=["group", "no-group"])
async def test_reader_of_a_cut_off_node_follows_the_next_leader(
    scene: Scene, etcd_endpoint: str, group: str
) -> None:
    """No node has etcd for a while; then all but the former leader have it again."""
    leader, _ = await three(scene)
    await leader.append(batch(b"before"))
    bodies: list[bytes] = []
    async with reader_at_start(scene, etcd_endpoint, group) as reader:
        async with asyncio.timeout(60):
            await read_until(reader, bodies, 1)
        for node in scene.nodes.values():
            node.session.lose()
        await until(lambda: not_leading(leader))
        for node in scene.nodes.values():
            if node is not leader:
                node.session.restore()
        serving = await scene.leader()
        assert serving is not leader
        await serving.append(batch(b"after"))
        async with asyncio.timeout(30):
            await read_until(reader, bodies, 2)
    assert bodies == [b"before", b"after"]


async def test_lagging_follower_rejects_offsets_it_does_not_have(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    leader, follower = await three(scene)
    with pytest.raises(BatonError) as refused:
        await pull(follower, offset=7)
    assert refused.value.reason == "NOT_LEADER"
    with pytest.raises(BatonError) as refused:
        await follower.read(offset=7)
    assert refused.value.reason == "NOT_LEADER"
    with pytest.raises(BatonError) as refused:
        await pull(leader, offset=7)
    assert refused.value.reason == "OFFSET_AHEAD_OF_LOG"


async def test_follower_without_its_leader_serves_no_compacted_topic(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    """Its leader may have removed messages that it still has."""
    await scene.put_topic(nameserver_pb.Compaction(dirty_percent=50))
    leader, follower = await three(scene)
    await leader.append(batch(Message(b"a", properties={ORDERING_KEY: "k"})))
    await wait_visible(follower, 1)
    leader.gate.shut.add(follower.name)

    async def refuses() -> bool:
        try:
            await follower.read()
        except NotLeader as error:
            return "may lack compactions" in error.message
        return False

    await until(refuses)
    assert "may lack compactions" in str(await rejection(follower))
    assert bodies(await pull(leader)) == [b"a"]
    leader.gate.shut.clear()
    await wait_visible(follower, 1)


async def test_lagging_consumer_is_redirected_to_a_follower_and_back(
    scene: Scene, offsets: OffsetsTwin
) -> None:
    scene.settings["memory_window_bytes"] = 50_000
    leader, follower = await three(scene)
    for _ in range(20):
        await leader.append(batch(bytes(5_000)))
    await wait_visible(follower, 20)
    assert (await pull(leader, messages_max=1)).next_node_id == follower.name
    assert (await pull(follower, messages_max=1)).next_node_id == follower.name
    assert (await pull(follower, offset=15, messages_max=1)).next_node_id == ""
    assert (await pull(leader, offset=15, messages_max=1)).next_node_id == ""


async def test_reader_tries_the_leader_and_then_each_node_in_turn(
    scene: Scene, etcd_endpoint: str
) -> None:
    leader, _ = await three(scene)
    async with replica(etcd_endpoint, scene.cluster) as nameserver:
        directory = Directory(nameserver.address, Random(1))
        await directory.refresh()
        readers = [""]
        for _ in range(4):
            readers.append(directory.next_reader(BROKER, readers[-1]))
        assert readers == ["", "a", "b", "c", ""]
        assert directory.next_reader(BROKER, "gone") == ""
        assert directory.next_reader("other", "") == ""
        await directory.close()
    assert leader.name in readers


@pytest.mark.long
async def test_messages_are_queried_at_a_follower_while_there_is_no_leader(
    scene: Scene, etcd_endpoint: str
) -> None:
    scene.members = ("a", "b")
    await scene.start("a", "b")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b")
    (receipt,) = await leader.append(batch(b"stored"))
    (follower,) = [node for node in scene.nodes.values() if node is not leader]
    await wait_visible(follower, 1)
    leader.gate.shut.add(follower.name)
    await scene.wait_in_sync(leader.name)  # so the other one can't be elected
    await leader.crash()
    async with (
        replica(etcd_endpoint, scene.cluster) as nameserver,
        Admin(nameserver.address) as admin,
    ):

        async def gone() -> bool:
            return [n.node_id for n in (await admin.cluster()).nodes] == [follower.name]

        await until(gone)
        message = await MessageQueries(admin).message(f"{BROKER}-{receipt.position}-0")
    assert message.body == b"stored"


async def test_reader_continues_while_there_is_no_leader(scene: Scene, etcd_endpoint: str) -> None:
    """All messages are read from a follower, each exactly once."""
    scene.settings["replica_lag_ms_max"] = 500
    leader, follower = await three(scene)
    await leader.append(*(batch(b"%d" % number) for number in range(100)))
    await wait_visible(follower, 100)
    bodies: list[bytes] = []
    async with reader_at_start(scene, etcd_endpoint) as reader:
        await read_until(reader, bodies, 10)
        for node in scene.nodes.values():
            node.session.cut = True
        await leader.crash()
        await read_until(reader, bodies, 100)
    assert bodies == [b"%d" % number for number in range(100)]
