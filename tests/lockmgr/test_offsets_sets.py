"""Goal: a replica set of offsets that does not answer delays its own groups, and no others.

Method: a lock manager with a real etcd and a real offsets service. A second group is placed at a
set that does not exist, until the test moves it to the real one.
"""

from __future__ import annotations

from baton.common.v1 import queue_pb2
from baton.lockmgr.v1 import lockmgr_service_pb2 as pb
from baton.lockmgr.v1 import stored_lock_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.nameserver.v1.stored_group_pb2 import StoredGroup
from batonmq._common.rpc import error_from_pb
from batonmq.errors import BatonError
from batonmq_server.runtime.etcd.session import Put
from batonmq_server.runtime.group_placements import GroupPlacement
from tests.lockmgr.scene import OPEN, TIMEOUT_S, TOPIC, Member, Node, Scene
from tests.support.conditions import until

FAR = "far"
LOCK = f"locks/{FAR}/{TOPIC}/broker-a/0"


def far_queue() -> queue_pb2.GroupQueue:
    inner = queue_pb2.QueueRef(topic=TOPIC, broker="broker-a", queue_id=0)
    return queue_pb2.GroupQueue(group=FAR, queue=inner)


async def far_group(s: Scene, member: Member, token: int = 0) -> None:
    """Place a group at an absent set; `member` owns its queue if there is a token."""
    group = StoredGroup(
        name=FAR,
        generation=1,
        members=[nameserver_pb.Member(incarnation=member.incarnation)],
        subscriptions=[nameserver_pb.Subscription(topic=TOPIC, expression="*")],
        assignments=[
            nameserver_pb.TopicAssignment(
                topic=TOPIC,
                brokers=[nameserver_pb.BrokerAssignment(broker="broker-a", member_numbers=[1])],
            )
        ],
    )
    put = [
        Put(f"groups/{FAR}", group.SerializeToString()),
        Put(f"gates/{FAR}", StoredGate(**OPEN).SerializeToString()),
        Put(f"places/{FAR}", GroupPlacement("away").encode()),
    ]
    if token:
        lock = stored_lock_pb2.StoredLock(owner=member.incarnation, token=token, acquire_seq=1)
        lock.queue.CopyFrom(far_queue())
        put.append(Put(LOCK, lock.SerializeToString()))
    assert await s.etcd.txn(compare=(), put=put)


async def state(node: Node, member: Member, token: int) -> str:
    request = pb.KeepAliveRequest(
        incarnation=member.incarnation,
        acquire_seq=9,
        holds=[pb.Hold(queue=far_queue(), token=token)],
    )
    (report,) = (await node.stub.KeepAlive(request, timeout=TIMEOUT_S)).reports
    return pb.HoldState.Name(report.state).removeprefix("HOLD_STATE_")


async def acquire(node: Node, member: Member, seq: int) -> pb.Grant | BatonError:
    request = pb.AcquireRequest(
        incarnation=member.incarnation,
        acquire_seq=seq,
        generation=1,
        items=[pb.AcquireItem(queue=far_queue())],
    )
    async for answer in node.stub.Acquire(request, timeout=TIMEOUT_S):
        return answer.grant if answer.HasField("grant") else error_from_pb(answer.error)
    raise AssertionError("no outcome")


async def test_new_leader_does_not_wait_for_an_absent_set(scene: Scene) -> None:
    """Queues of its groups are neither renewed nor granted until the set answers."""
    here, far = Member("here"), Member("far")
    await far_group(scene, far, token=5)
    node = await scene.leader()
    assert (await here.acquire(node, await scene.set_group(here))).token == 1
    assert await here.state(node, 1) == "OK"
    assert await state(node, far, 5) == "PENDING"
    refusal = await acquire(node, far, 7)
    assert isinstance(refusal, BatonError)
    assert refusal.reason == "HANDOVER_PENDING"
    assert refusal.facts["step"] == "announce"
    await scene.etcd.put(f"places/{FAR}", GroupPlacement("offsets").encode())

    async def confirmed() -> bool:
        return await state(node, far, 5) == "NOT_OWNER"

    await until(confirmed)
    grant = await acquire(node, far, 8)
    assert isinstance(grant, pb.Grant)
    assert grant.token == 6, "the token is greater than the one in etcd"
    assert grant.offsets_set == "offsets"


async def test_queue_of_an_absent_set_is_refused_and_others_are_granted(scene: Scene) -> None:
    node, here, far = await scene.leader(), Member("here"), Member("far")
    await far_group(scene, far)
    refusal = await acquire(node, far, 1)
    assert isinstance(refusal, BatonError)
    assert refusal.reason == "OFFSETS_UNREACHABLE"
    assert (await here.acquire(node, await scene.set_group(here))).token == 1
