"""A storage replica set: its leader crashes, is cut off, is slow, or returns.

Goal: no acknowledged message is lost under any leader; receipts are true; copies are equal byte for
byte; a node that lacks safe messages is never elected, and repairs itself.
Method: three real nodes in one process (tests/storage/replicas.py). Tests wait for states, never
for times.
"""

from __future__ import annotations

import asyncio
import shutil
import threading
from collections.abc import Callable
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from baton.storage.v1 import replication_service_pb2 as replication_pb
from baton.storage.v1 import schedule_service_pb2 as schedule_pb
from baton.storage.v1 import storage_service_pb2 as pb
from baton.storage.v1 import transaction_service_pb2 as transaction_pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, NotWritable, StillInSync
from batonmq_server.nameserver.unclean_election import UncleanElection
from batonmq_server.runtime.election import Candidacy
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.replication.position import NO_POSITION
from batonmq_server.runtime.replication.replica_set import ReplicaSetStore
from batonmq_server.storage import log_follower
from batonmq_server.storage import scrubber as scrub
from batonmq_server.storage.core import checkpoint
from batonmq_server.storage.core.epochs import EpochHistory, decode
from batonmq_server.storage.core.log_transfer import PIECE_BYTES, check_received
from batonmq_server.storage.core.recovery import decode_synced
from batonmq_server.storage.log_copy import LogCopy
from batonmq_server.storage.log_follower import LogFollower
from batonmq_server.storage.replica import StorageReplica
from batonmq_server.storage.replication_server import StorageReplicationServicer
from tests.storage.batches import batch
from tests.storage.replicas import BROKER, SEGMENT_BYTES, Replica, Scene
from tests.support.conditions import until
from tests.support.replica_nodes import LEASE_MS

pytestmark = pytest.mark.timeout(180)

PRODUCER = (77, 1)
LENGTH_AT = 8
"""Where a batch has its length."""
DUE_MS = 2_000
"""Time in which a test damages what is due."""


async def three(scene: Scene) -> Replica:
    """Wait until all three nodes are in sync; return the leader."""
    await scene.start("a", "b", "c")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b", "c")
    return leader


def others(scene: Scene, leader: Replica) -> list[str]:
    return sorted(scene.nodes.keys() - {leader.name})


def numbered(first: int, count: int, queue_id: int = 0) -> list[bytes]:
    """Return batches of one message each, with their numbers as bodies."""
    return [
        batch(b"%d" % number, queue_id=queue_id, producer=PRODUCER, sequence=number)
        for number in range(first, first + count)
    ]


async def test_empty_set_gets_in_sync_before_the_first_write(scene: Scene) -> None:
    leader = await three(scene)
    assert await leader.bodies() == []


async def test_followers_hold_the_same_bytes_as_their_leader(scene: Scene) -> None:
    leader = await three(scene)
    for queue_id in range(8):
        await leader.append(*(batch(bytes(3_000), queue_id=queue_id) for _ in range(10)))
    await scene.wait_equal()
    assert len(leader.log()) > 3, "the log has several segments"


async def test_new_leader_takes_nothing_into_a_queue_that_the_former_one_knew_as_closed(
    scene: Scene,
) -> None:
    former = await three(scene)
    late = [scene.nodes[name] for name in others(scene, former)]
    for node in late:
        node.session.topics_arrive.clear()
    await scene.put_topic(write_queue_count=7)
    taken: list[bytes] = []

    async def is_closed() -> bool:
        try:
            await former.append(*numbered(len(taken), 1, queue_id=7))
        except NotWritable:
            return True
        taken.append(b"%d" % len(taken))
        return False

    await until(is_closed)
    before = (await scene.set_record()).epoch
    await former.crash()

    async def has_begun() -> bool:
        return (await scene.set_record()).served_epoch > before

    await until(has_begun)
    for _ in range(20):
        for node in late:
            reason = (await node.rejection(*numbered(100, 1, queue_id=7))).reason
            assert reason in ("NOT_LEADER", "NOT_SERVING")
    for node in late:
        node.session.topics_arrive.set()
    leader = await scene.leader()
    assert isinstance(await leader.rejection(*numbered(100, 1, queue_id=7)), NotWritable)
    assert await leader.bodies(7) == taken
    await leader.append(*numbered(100, 1, queue_id=6))


async def test_receipt_says_replicated_only_if_two_replicas_have_the_batch(scene: Scene) -> None:
    leader = await three(scene)
    (receipt,) = await leader.append(batch(b"a"))
    assert receipt.durability == pb.DURABILITY_REPLICATED
    (receipt,) = await leader.append(batch(b"b"), durability=pb.DURABILITY_REPLICATED)
    assert receipt.durability == pb.DURABILITY_REPLICATED
    (receipt,) = await leader.append(batch(b"c"), durability=pb.DURABILITY_MEMORY)
    assert receipt.durability == pb.DURABILITY_MEMORY
    for name in others(scene, leader):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(leader.name)
    (receipt,) = await leader.append(batch(b"d"))
    assert receipt.durability == pb.DURABILITY_FSYNCED
    error = await leader.rejection(batch(b"e"), durability=pb.DURABILITY_REPLICATED)
    assert (error.reason, error.facts) == ("NOT_ENOUGH_REPLICAS", {"in_sync": "1", "limit": "2"})
    assert await leader.bodies() == [b"a", b"b", b"c", b"d"], "a rejected batch is not written"


async def test_writes_are_rejected_with_too_few_replicas_in_sync(scene: Scene) -> None:
    scene.settings["min_in_sync"] = 2
    leader = await three(scene)
    await leader.append(*numbered(0, 1))
    quick, last = others(scene, leader)
    await scene.nodes[quick].stop()
    await scene.wait_in_sync(leader.name, last)
    await scene.nodes[last].stop()
    await until(lambda: _keep_up(leader, 1))
    error = await leader.rejection(*numbered(1, 1))
    assert (error.reason, error.facts) == ("NOT_ENOUGH_REPLICAS", {"in_sync": "1", "limit": "2"})
    assert await leader.bodies() == [b"0"]
    assert (await scene.set_record()).in_sync == {leader.name, last}, "last can still be elected"
    await scene.start(quick)
    await scene.wait_in_sync(leader.name, quick)
    (receipt,) = await leader.append(*numbered(1, 1))
    assert receipt.durability == pb.DURABILITY_REPLICATED


async def test_leader_that_starts_with_too_few_in_sync_waits_for_another_member(
    scene: Scene,
) -> None:
    """It may have messages that no other member has, and another member may be elected instead."""
    scene.settings["min_in_sync"] = 2
    leader = await three(scene)
    await leader.append(*numbered(0, 3))
    await scene.crash_all()
    epoch = (await scene.set_record()).epoch
    (again,) = await scene.start(leader.name)
    await scene.wait_epoch_above(epoch)
    assert not await again.serves()
    (follower,) = await scene.start(others(scene, leader)[0])
    assert await scene.leader() is again
    assert await again.bodies() == [b"0", b"1", b"2"]
    await scene.wait_in_sync(again.name, follower.name)
    (receipt,) = await again.append(*numbered(3, 1))
    assert (receipt.first_offset, receipt.durability) == (3, pb.DURABILITY_REPLICATED)


async def _keep_up(leader: Replica, count: int) -> bool:
    """Return whether this many replicas keep up, the leader included."""
    return sum(one.in_sync for one in (await leader.replicas()).replicas) == count


async def test_acknowledged_messages_survive_the_death_of_the_leader(scene: Scene) -> None:
    first = await three(scene)
    receipts = await first.append(*numbered(0, 50))
    before = await scene.set_record()
    await first.crash()
    second = await scene.leader()
    assert second is not first
    assert (await scene.set_record()).epoch == before.epoch + 1
    assert await second.bodies() == [b"%d" % number for number in range(50)]
    (repeated,) = await second.append(*numbered(49, 1))
    assert (repeated.duplicate, repeated.first_offset) == (True, 49)
    assert repeated.position == receipts[49].position
    (next_one,) = await second.append(*numbered(50, 1))
    assert (next_one.duplicate, next_one.first_offset) == (False, 50)
    await scene.start(first.name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_old_leader_cuts_off_its_unacknowledged_messages(scene: Scene) -> None:
    first = await three(scene)
    await first.append(*numbered(0, 5))
    await scene.wait_equal()
    first.gate.shut |= {"a", "b", "c"}
    first.session.cut = True  # it can't remove followers from the set either
    before = (await first.describe()).next_position

    async def written() -> bool:
        error = await first.rejection(batch(b"unacknowledged"), timeout_s=0.5)
        assert error.reason == "UNREACHABLE"
        return (await first.describe()).next_position > before

    await until(written)
    await first.crash()
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(5)]
    await second.append(*numbered(5, 20))
    await scene.start(first.name)
    await scene.wait_equal()
    assert await second.bodies() == [b"%d" % number for number in range(25)]


async def test_message_is_not_visible_before_the_whole_in_sync_set_has_it(scene: Scene) -> None:
    scene.settings["replica_lag_ms_max"] = 30_000  # no follower leaves the set meanwhile
    leader = await three(scene)
    await leader.append(*numbered(0, 1))
    before = (await leader.describe()).next_position
    late = scene.nodes[others(scene, leader)[0]]
    leader.gate.shut.add(late.name)

    async def synced() -> bool:
        error = await leader.rejection(*numbered(1, 1), timeout_s=0.3)
        assert error.reason == "UNREACHABLE"
        described = await leader.describe()
        return before < described.next_position == described.synced_position

    await until(synced)
    assert await leader.bodies() == [b"0"]
    leader.gate.shut.clear()

    async def shown() -> bool:
        return await leader.bodies() == [b"0", b"1"]

    await until(shown)


async def test_slow_follower_leaves_the_in_sync_set_and_joins_again(scene: Scene) -> None:
    leader = await three(scene)
    slow, fast = others(scene, leader)
    leader.gate.shut.add(slow)
    await leader.append(*numbered(0, 100))
    await scene.wait_in_sync(leader.name, fast)
    lags = {one.node_id: one for one in (await leader.replicas()).replicas}
    assert lags[slow].lag > 0
    assert not lags[slow].in_sync
    assert lags[fast].lag == 0
    leader.gate.shut.clear()
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_follower_catches_up_while_the_leader_is_written_to(scene: Scene) -> None:
    scene.settings["replica_lag_ms_max"] = 500
    leader = await three(scene)
    late = scene.nodes[others(scene, leader)[0]]
    await late.stop()
    await scene.wait_in_sync(*(name for name in scene.nodes if name != late.name))
    for number in range(100):
        await leader.append(batch(bytes(20_000), queue_id=number % 7))
    (late,) = await scene.start(late.name)
    while (await scene.set_record()).in_sync != {"a", "b", "c"}:
        await leader.append(batch(bytes(100)))
    await scene.wait_equal()


async def test_empty_node_starts_at_the_first_position_of_the_leader(scene: Scene) -> None:
    """Retention has removed the older log. Offsets continue, also those of an empty queue.

    The sequences of producers without a batch in the log continue too.
    """
    scene.settings |= {"retention_bytes": 4 * 64 * 1024, "disk_interval_ms": 50}
    leader = await three(scene)
    late = scene.nodes[others(scene, leader)[0]]
    await late.stop()
    await scene.wait_in_sync(*(name for name in scene.nodes if name != late.name))
    await leader.append(*numbered(0, 7, queue_id=3))
    for _ in range(40):
        await leader.append(batch(bytes(20_000)), batch(bytes(20_000), queue_id=1))

    async def removed() -> bool:
        return (await leader.describe()).first_position > 0

    await until(removed)
    (late,) = await scene.start(late.name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    for name in others(scene, late):
        await scene.nodes[name].crash()
    await until(late.serves)
    assert (await late.read(3, 7)).queue_next_offset == 7
    (repeated,) = await late.append(*numbered(6, 1, queue_id=3))
    assert (repeated.duplicate, repeated.first_offset) == (True, 6)
    (receipt,) = await late.append(batch(b"next", queue_id=3))
    assert receipt.first_offset == 7


async def test_follower_takes_what_it_lacks_in_pieces(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its readers wait for one piece at most, and damage does not undo the pieces before it."""
    scene.members, scene.settings = ("a", "b"), {"segment_bytes": 1 << 20}
    await scene.start("a", "b")
    leader = await scene.leader()
    late = scene.nodes[others(scene, leader)[0]]
    await scene.wait_in_sync("a", "b")
    await late.stop()
    await scene.wait_in_sync(leader.name)
    receipts = await leader.append(*(batch(bytes(5_000), queue_id=n % 8) for n in range(100)))
    rot(leader, receipts[60].position)
    sizes: list[int] = []

    def check(recovery: Any, position: int, data: bytes, segment: Any) -> Any:
        sizes.append(len(data))
        return check_received(recovery, position, data, segment)

    monkeypatch.setattr(log_follower, "check_received", check)
    await scene.start(late.name)

    async def state() -> Any:
        return next(one for one in (await leader.replicas()).replicas if not one.leader)

    async def has_problem() -> bool:
        return bool((await state()).problem)

    await until(has_problem)
    reported = (await state()).position
    assert receipts[60].position - PIECE_BYTES < reported <= receipts[60].position
    assert decode_synced((late.folder / "synced").read_bytes()) == reported
    rot(leader, receipts[60].position)  # a second flip repairs it
    await scene.wait_in_sync("a", "b")
    await scene.wait_equal()
    assert 5_000 < max(sizes) <= PIECE_BYTES


async def test_leader_serves_while_it_prepares_the_begin_of_a_new_copy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With many producers that takes seconds, as long as a lease."""
    scene.settings |= {"retention_bytes": 4 * SEGMENT_BYTES, "disk_interval_ms": 50}
    leader = await three(scene)
    late = scene.nodes[others(scene, leader)[0]]
    await late.stop()
    await scene.wait_in_sync(*(name for name in scene.nodes if name != late.name))
    for _ in range(40):
        await leader.append(batch(bytes(20_000)))

    async def removed() -> bool:
        return (await leader.describe()).first_position > 0

    await until(removed)
    begun, served, blocked = threading.Event(), threading.Event(), list[bool]()
    of_producers = checkpoint.of_producers

    def slow(position: int, producers: Any) -> bytes:
        begun.set()
        blocked.append(not served.wait(5))
        return of_producers(position, producers)

    monkeypatch.setattr(checkpoint, "of_producers", slow)
    await scene.start(late.name)
    await until(begun.is_set)
    await leader.append(batch(b"meanwhile"))
    served.set()
    await scene.wait_in_sync("a", "b", "c")
    assert not any(blocked)


async def test_stopped_follower_continues_from_its_checkpoint(scene: Scene) -> None:
    leader = await three(scene)
    await leader.append(*numbered(0, 300))
    follower = scene.nodes[others(scene, leader)[0]]
    await scene.wait_equal()
    await follower.stop()
    await leader.append(*numbered(300, 10))
    await scene.start(follower.name)
    await scene.wait_in_sync("a", "b", "c")
    await leader.crash()
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(310)]


@pytest.mark.parametrize("part", ["log", "epochs"])
async def test_damaged_copy_repairs_itself_from_the_others(scene: Scene, part: str) -> None:
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    follower = scene.nodes[others(scene, leader)[0]]
    await scene.wait_equal()
    await follower.stop()
    path = (
        follower.folder / "epochs" if part == "epochs" else min((follower.folder / "log").iterdir())
    )
    content = bytearray(path.read_bytes())
    content[receipts[20].position + 100 if part == "log" else 12] ^= 1
    path.write_bytes(content)
    (follower,) = await scene.start(follower.name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    await leader.append(*numbered(50, 1))
    await leader.crash()
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(51)]


async def test_leader_that_stops_cleanly_removes_no_follower_from_the_in_sync_set(
    scene: Scene,
) -> None:
    """No follower can fetch while it stops: if it removed them from the set, it would be alone."""
    scene.settings["replica_lag_ms_max"] = 30_000  # so that no follower leaves before it stops
    leader = await three(scene)
    followers = others(scene, leader)
    before = (await leader.describe()).next_position
    leader.gate.shut |= set(followers)
    async with asyncio.TaskGroup() as tasks:
        refused = tasks.create_task(leader.rejection(*numbered(0, 1)))

        async def written() -> bool:
            return (await leader.describe()).next_position > before

        await until(written)
        await leader.stop()
    assert refused.result().reason == "UNREACHABLE"
    assert (await scene.leader()).name in followers
    await scene.wait_in_sync(*followers)


async def test_node_that_lost_safe_messages_is_not_elected(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In etcd the node is in sync; it dies with the others and restarts first."""
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    await scene.wait_equal()
    damaged, good = (scene.nodes[name] for name in others(scene, leader))
    await scene.crash_all()
    before = await scene.set_record()
    assert before.in_sync == {"a", "b", "c"}
    rot(damaged, receipts[20].position)
    refused: list[str] = []
    stand = ReplicaSetStore.candidacy

    async def counted(self: ReplicaSetStore) -> Candidacy | None:
        candidacy = await stand(self)
        if candidacy is None:
            refused.append(damaged.name)
        return candidacy

    monkeypatch.setattr(ReplicaSetStore, "candidacy", counted)
    (damaged,) = await scene.start(damaged.name)
    await until(lambda: len(refused) >= 3)
    await scene.wait_vacant()
    refused_count = len(refused)
    await until(lambda: len(refused) >= refused_count + 3)
    assert await scene.set_record() == before
    await scene.start(good.name)
    assert (await scene.leader()).name == good.name
    assert (await scene.set_record()).epoch == before.epoch + 1
    await scene.wait_in_sync(damaged.name, good.name)
    await scene.wait_equal(damaged.name, good.name)
    assert await scene.nodes[good.name].bodies() == [b"%d" % number for number in range(50)]


async def test_node_that_loses_safe_messages_during_its_election_resigns(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The scrub may find damage between the node's own check and its election."""
    roles: list[StorageReplica] = []
    begin, stand = StorageReplica.begin, ReplicaSetStore.candidacy
    armed = asyncio.Event()
    hit: list[ReplicaSetStore] = []

    def noted(self: StorageReplica, copy: LogCopy, following: LogFollower) -> None:
        begin(self, copy, following)
        roles.append(self)

    async def damaged_meanwhile(self: ReplicaSetStore) -> Candidacy | None:
        candidacy = await stand(self)
        if candidacy is None or not armed.is_set():
            return candidacy
        if await scene.has_leader():
            return None  # it crashes soon; an attempt could come just after that
        if not hit:
            hit.append(self)
            (copy,) = [role.copy for role in roles if role.replica_set is self]
            async with copy.writing:
                await copy.cut(receipts[20].position, damaged=True)
        elif hit[0] is not self and (await self.read()).epoch == before.epoch:
            return None  # the other follower is elected
        return candidacy

    monkeypatch.setattr(StorageReplica, "begin", noted)
    monkeypatch.setattr(ReplicaSetStore, "candidacy", damaged_meanwhile)
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    await scene.wait_equal()
    before = await scene.set_record()
    armed.set()
    await leader.crash()
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(50)]
    assert (await scene.set_record()).epoch == before.epoch + 2
    await scene.wait_in_sync(*others(scene, leader))
    await scene.wait_equal(*others(scene, leader))


@pytest.mark.long
async def test_follower_adopts_no_epoch_whose_earlier_log_it_lacks(scene: Scene) -> None:
    """Otherwise it could be elected as a node that has everything."""
    first = await three(scene)
    late = scene.nodes[others(scene, first)[0]]
    await late.stop()
    await scene.wait_in_sync(*(name for name in scene.nodes if name != late.name))
    for _ in range(100):
        await first.append(batch(bytes(20_000)))
    await first.crash()
    second = await scene.leader()
    begin = decode((second.folder / "epochs").read_bytes()).starts[-1][1]
    (late,) = await scene.start(late.name)
    behind = 0
    while (end := (await late.describe()).next_position) < begin:
        history = decode((late.folder / "epochs").read_bytes())
        assert history.starts[-1][1] <= (await late.describe()).next_position
        behind += end > 0
    assert behind, "no partial copy was observed"
    await scene.wait_in_sync(second.name, late.name)


@pytest.mark.long
async def test_member_with_an_empty_disk_has_no_position_until_it_has_everything(
    scene: Scene,
) -> None:
    """Otherwise it could be elected with a part of the log, because the epoch began earlier."""
    leader = await three(scene)
    for _ in range(100):
        await leader.append(batch(bytes(20_000)))
    end = (await leader.describe()).next_position
    name = others(scene, leader)[0]
    await scene.nodes[name].crash()
    shutil.rmtree(scene.folder / name)
    (empty,) = await scene.start(name)

    def history() -> EpochHistory:
        return decode((empty.folder / "epochs").read_bytes())

    partial_count = 0
    while True:
        epochs = history()
        at = (await empty.describe()).next_position
        if at == end:
            break
        assert epochs.position(at) == NO_POSITION
        partial_count += at > 0
    assert partial_count, "no partial copy was observed"
    await until(lambda: not history().damaged)
    await scene.wait_in_sync(*scene.nodes)
    await scene.wait_equal()


async def test_follower_rejects_calls_for_the_leader(scene: Scene) -> None:
    leader = await three(scene)
    follower = scene.nodes[others(scene, leader)[0]]
    error = await follower.rejection(batch(b"a"))
    assert error.reason == "NOT_LEADER"
    assert not await follower.serves()
    item = schedule_pb.ScheduleItem(batch=batch(b"a"), deliver_unix_ms=Clock().unix_ms() + 1_000)
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await follower.scheduling.Schedule(schedule_pb.ScheduleRequest(items=[item]), timeout=20)
    assert from_rpc_error(refused.value).reason == "NOT_LEADER"


@pytest.mark.long
async def test_only_the_serving_leader_delivers_due_batches_and_once(scene: Scene) -> None:
    leader = await three(scene)
    soon, later = Clock().unix_ms() + 500, Clock().unix_ms() + 10_000
    items = [
        schedule_pb.ScheduleItem(batch=batch(body), deliver_unix_ms=at)
        for body, at in ((b"soon", soon), (b"later", later))
    ]
    request = schedule_pb.ScheduleRequest(items=items)
    answer = await leader.scheduling.Schedule(request, timeout=20)
    assert all(outcome.HasField("receipt") for outcome in answer.outcomes)

    async def delivered() -> bool:
        return await leader.bodies() == [b"soon"]

    await until(delivered)
    await leader.crash()
    second = await scene.leader()

    async def all_delivered() -> bool:
        return await second.bodies() == [b"soon", b"later"]

    await until(all_delivered)
    await scene.start(leader.name)
    await scene.wait_equal()
    assert await second.bodies() == [b"soon", b"later"]


async def cancel_once_more(leader: Replica, request: schedule_pb.CancelScheduledRequest) -> None:
    """Repeat a cancel whose answer was lost."""
    await leader.scheduling.CancelScheduled(request, timeout=20)


async def test_repeated_cancel_waits_for_the_first_one(scene: Scene) -> None:
    """Its answer was lost; NOT_SCHEDULED to the repeated call would mean that it was delivered."""
    leader = await three(scene)
    at = Clock().unix_ms() + 3_600_000
    item = schedule_pb.ScheduleItem(batch=batch(b"later"), deliver_unix_ms=at)
    answer = await leader.scheduling.Schedule(schedule_pb.ScheduleRequest(items=[item]), timeout=20)
    schedule_id = answer.outcomes[0].receipt.schedule_id
    request = schedule_pb.CancelScheduledRequest(schedule_id=schedule_id)
    leader.gate.shut |= {"a", "b", "c"}
    with pytest.raises(grpc.aio.AioRpcError) as unknown:
        await leader.scheduling.CancelScheduled(request, timeout=0.3)
    assert unknown.value.code() is grpc.StatusCode.DEADLINE_EXCEEDED
    async with asyncio.TaskGroup() as tasks:
        repeated = tasks.create_task(cancel_once_more(leader, request))
        await asyncio.sleep(0.3)  # an early answer would be seen
        assert not repeated.done()
        leader.gate.shut.clear()
    with pytest.raises(grpc.aio.AioRpcError) as over:
        await leader.scheduling.CancelScheduled(request, timeout=20)
    assert from_rpc_error(over.value).reason == "NOT_SCHEDULED"


async def test_follower_with_a_damaged_log_repairs_itself_while_it_runs(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "ROUND_INTERVAL_S", 0.05)
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    await scene.wait_equal()
    rot(scene.nodes[others(scene, leader)[0]], receipts[20].position)
    await scene.wait_equal()
    await scene.wait_in_sync("a", "b", "c")
    assert (await scene.set_record()).leader == leader.name


async def until_resigned(scene: Scene, leader: Replica) -> None:
    """Wait until another node leads, or none."""

    async def resigned() -> bool:
        return (await scene.set_record()).leader != leader.name

    await until(resigned)


async def test_leader_with_a_damaged_log_resigns_and_repairs_itself(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "ROUND_INTERVAL_S", 0.05)
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    await scene.wait_equal()
    rot(leader, receipts[20].position)

    await until_resigned(scene, leader)
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(50)]
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_scheduled_batch_that_is_damaged_at_the_leader_is_delivered_by_another(
    scene: Scene,
) -> None:
    leader = await three(scene)
    item = schedule_pb.ScheduleItem(batch=batch(b"due"), deliver_unix_ms=Clock().unix_ms() + DUE_MS)
    request = schedule_pb.ScheduleRequest(items=[item])
    (outcome,) = (await leader.scheduling.Schedule(request, timeout=20)).outcomes
    await scene.wait_equal()
    rot(leader, _position(outcome.receipt.schedule_id))

    async def delivered() -> bool:
        return await (await scene.leader()).bodies() == [b"due"]

    await until(delivered)
    assert (await scene.set_record()).leader != leader.name
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_half_message_that_is_damaged_at_the_leader_is_asked_about_by_another(
    scene: Scene,
) -> None:
    scene.settings |= {"transaction_check_first_ms": DUE_MS}
    leader = await three(scene)
    item = transaction_pb.BeginItem(batch=batch(b"paid"), group="shop")
    begin = transaction_pb.BeginRequest(items=[item])
    (outcome,) = (await leader.transactions.Begin(begin, timeout=20)).outcomes
    name = outcome.receipt.transaction_id
    await scene.wait_equal()
    rot(leader, _position(name))

    async def asked() -> list[str]:
        watch = transaction_pb.WatchChecksRequest(group="shop")
        try:
            async with asyncio.timeout(2 * DUE_MS / 1_000):
                async for answer in (await scene.leader()).transactions.WatchChecks(watch):
                    if answer.checks:
                        return [one.transaction_id for one in answer.checks]
        except (grpc.aio.AioRpcError, TimeoutError):
            pass
        return []

    async def is_asked() -> bool:
        return await asked() == [name]

    await until(is_asked)
    assert (await scene.set_record()).leader != leader.name


async def test_leader_with_a_damaged_log_stays_if_no_other_member_has_it(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A node must keep the undamaged part; reads of the damaged part fail."""
    monkeypatch.setattr(scrub, "ROUND_INTERVAL_S", 0.05)
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    for name in others(scene, leader):
        await scene.nodes[name].stop()
    await scene.wait_in_sync(leader.name)
    rot(leader, receipts[20].position)

    async def damage_found() -> bool:
        return (await leader.describe()).damaged_batch_count > 0

    await until(damage_found)
    assert await leader.serves()
    with pytest.raises(BatonError) as refused:
        await leader.bodies()
    assert refused.value.reason == "DATA_LOSS"


async def test_leader_resigns_for_damage_although_retention_has_removed_an_earlier_one(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scrub, "ROUND_INTERVAL_S", 0.05)
    scene.settings |= {"retention_bytes": 4 * SEGMENT_BYTES, "disk_interval_ms": 50}
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    late = others(scene, leader)
    for name in late:
        await scene.nodes[name].stop()
    await scene.wait_in_sync(leader.name)
    rot(leader, receipts[20].position)

    async def damage_found() -> bool:
        return (await leader.describe()).damaged_batch_count > 0

    await until(damage_found)
    stored = [(await leader.append(batch(bytes(20_000))))[0] for _ in range(40)]

    async def removed() -> bool:
        return (await leader.describe()).first_position > receipts[20].position

    await until(removed)
    await scene.start(*late)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    first_position = (await leader.describe()).first_position
    rot(leader, next(at for one in stored if (at := one.position - first_position) >= 0))
    assert (await scene.set_record()).leader == leader.name

    await until_resigned(scene, leader)
    await scene.wait_equal()


async def test_follower_that_receives_only_damaged_bytes_reports_it(
    scene: Scene, caplog: pytest.LogCaptureFixture
) -> None:
    """It keeps trying: the leader may be repaired."""
    scene.members = ("a", "b")
    await scene.start("a", "b")
    leader = await scene.leader()
    (follower_name,) = others(scene, leader)
    await scene.nodes[follower_name].stop()
    await scene.wait_in_sync(leader.name)
    receipts = await leader.append(*numbered(0, 50))
    rot(leader, receipts[20].position)
    await scene.start(follower_name)

    async def problem() -> str:
        by_name = {replica.node_id: replica for replica in (await leader.replicas()).replicas}
        return by_name[follower_name].problem

    async def told() -> bool:
        return (await problem()).startswith("DATA_LOSS: ")

    await until(told)
    (line,) = [
        one
        for one in caplog.records
        if one.name == "batonmq_server.runtime.replication.follow_problem"
    ]
    assert line.levelname == "ERROR"
    assert "remedy='Check the disk; restore the node from a replica.'" in line.getMessage()
    rot(leader, receipts[20].position)  # a second flip repairs the batch of the leader

    async def is_healthy() -> bool:
        return await problem() == ""

    await until(is_healthy)
    await scene.wait_in_sync("a", "b")
    await scene.wait_equal()


class Fetches:
    """Changes the fetches that leaders answer, and keeps how many epochs each had.

    Attributes:
        histories: Number of epochs in the request and in the answer.
        earlier: The leader is one of an earlier version.
        change: Called with each request and answer.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.histories: list[tuple[int, int]] = []
        self.earlier = False
        self.change: Callable[[replication_pb.FetchRequest, replication_pb.FetchResponse], None]
        self.change = lambda request, answer: None
        fetch = StorageReplicationServicer.Fetch

        async def answered(
            servicer: StorageReplicationServicer,
            request: replication_pb.FetchRequest,
            context: Any,
        ) -> replication_pb.FetchResponse:
            sent, earlier = len(request.history), self.earlier
            if earlier:
                request.ClearField("history_digest")
            answer = await fetch(servicer, request, context)
            if earlier:
                answer.ClearField("history_digest")
            self.change(request, answer)
            self.histories.append((sent, len(answer.history)))
            return answer

        monkeypatch.setattr(StorageReplicationServicer, "Fetch", answered)


async def write_epochs(scene: Scene, count: int) -> Replica:
    """Let several leaders write one batch each; return the last one."""
    leader = await three(scene)
    for number in range(count - 1):
        await leader.append(*numbered(number, 1))
        await scene.wait_equal()
        await leader.crash()
        await scene.start(leader.name)
        leader = await scene.leader()
        await scene.wait_in_sync("a", "b", "c")
    await leader.append(*numbered(count - 1, 1))
    return leader


async def test_fetches_have_no_history_while_leader_and_follower_have_the_same(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    leader = await write_epochs(scene, 3)
    await until(lambda: fetches.histories[-4:] == [(0, 0)] * 4)
    fetches.histories.clear()
    for number in range(3, 20):
        await leader.append(*numbered(number, 1))
    assert set(fetches.histories) == {(0, 0)}
    late = others(scene, leader)[0]
    await scene.nodes[late].crash()
    await scene.start(late)  # a new process sends its history once
    await until(lambda: any(sent and not answered for sent, answered in fetches.histories))
    await scene.wait_in_sync("a", "b", "c")
    await leader.crash()
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(20)]
    await scene.start(leader.name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_leader_of_an_earlier_version_gets_the_history_and_resets_no_copy(
    scene: Scene, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """It takes requests that were sent to a leader of this version for those of empty copies."""
    fetches = Fetches(monkeypatch)
    leader = await write_epochs(scene, 2)
    await until(lambda: fetches.histories[-4:] == [(0, 0)] * 4)
    fetches.histories.clear()
    caplog.clear()
    fetches.earlier = True
    for number in range(2, 10):
        await leader.append(*numbered(number, 1))
    assert (2, 2) in fetches.histories
    assert set(fetches.histories) <= {(0, 0), (0, 2), (2, 2)}
    assert (0, 2) in fetches.histories
    fetches.earlier = False
    await until(lambda: fetches.histories[-1] == (0, 0))
    assert await leader.bodies() == [b"%d" % number for number in range(10)]
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    assert not [one for one in caplog.messages if "discarding" in one or "cutting" in one]


async def test_leader_whose_bytes_are_damaged_at_a_follower_examines_its_log_at_once(
    scene: Scene,
) -> None:
    """Another member has all of it: the leader resigns, and does not wait for its scrub."""
    scene.settings |= {"scrub_bytes_per_s": 0}
    leader = await three(scene)
    late, other = others(scene, leader)
    await scene.nodes[late].stop()
    await scene.wait_in_sync(leader.name, other)
    receipts = await leader.append(*numbered(0, 50))
    rot(leader, receipts[20].position)
    assert (await scene.set_record()).leader == leader.name
    await scene.start(late)

    await until_resigned(scene, leader)
    second = await scene.leader()
    assert await second.bodies() == [b"%d" % number for number in range(50)]
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_leader_that_can_not_read_its_log_for_a_follower_examines_it_at_once(
    scene: Scene,
) -> None:
    """The length of a batch is damaged, so the leader does not even find the next one."""
    scene.settings |= {"scrub_bytes_per_s": 0}
    leader = await three(scene)
    late, other = others(scene, leader)
    await scene.nodes[late].stop()
    await scene.wait_in_sync(leader.name, other)
    receipts = await leader.append(*numbered(0, 50))
    rot(leader, receipts[20].position, at=LENGTH_AT)
    await scene.start(late)

    await until_resigned(scene, leader)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


async def test_bytes_that_were_damaged_on_the_way_change_nothing_at_the_leader(
    scene: Scene, monkeypatch: pytest.MonkeyPatch
) -> None:
    fetches = Fetches(monkeypatch)
    scene.members = ("a", "b")
    await scene.start("a", "b")
    leader = await scene.leader()
    await scene.wait_in_sync("a", "b")
    reported: list[int] = []

    def damage(request: replication_pb.FetchRequest, answer: replication_pb.FetchResponse) -> None:
        if request.HasField("damaged_position"):
            reported.append(request.damaged_position)
        if answer.data and not reported:
            answer.data = answer.data[:-1] + bytes([answer.data[-1] ^ 1])

    fetches.change = damage
    (receipt,) = await leader.append(*numbered(0, 1))
    assert reported == [receipt.position]
    await scene.wait_equal()
    assert (await leader.describe()).damaged_batch_count == 0
    assert (await scene.set_record()).leader == leader.name


def _position(name: str) -> int:
    """Return the position in the id of a scheduled batch or transaction."""
    return int(name.rpartition("-")[2], 16) & (1 << 64) - 1


def rot(node: Replica, position: int, at: int = 100) -> None:
    """Flip a bit of the batch at `position`, which is in the first segment."""
    with min((node.folder / "log").iterdir()).open("r+b") as file:
        file.seek(position + at)
        (byte,) = file.read(1)
        file.seek(position + at)
        file.write(bytes([byte ^ 1]))


async def test_node_that_accepts_the_loss_leads_if_every_copy_is_damaged(scene: Scene) -> None:
    leader = await three(scene)
    receipts = await leader.append(*numbered(0, 50))
    await scene.wait_equal()
    await scene.crash_all()
    for node in scene.nodes.values():
        rot(node, receipts[20].position)
    epoch = (await scene.set_record()).epoch
    (first,) = await scene.start("a", accept_loss=True)
    assert (await scene.leader()).name == first.name
    assert (await scene.set_record()).epoch == epoch + 1
    assert await first.bodies() == [b"%d" % number for number in range(20)]
    await scene.start("b", "c")
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()


@pytest.mark.long
async def test_operator_may_accept_the_loss_of_messages_of_lost_nodes(
    scene: Scene, etcd_endpoint: str
) -> None:
    """If the lost nodes return later, they get what the elected node has."""
    leader = await three(scene)
    await leader.append(*numbered(0, 3))
    late_name, follower_name = others(scene, leader)
    late = scene.nodes[late_name]

    async def seen() -> bool:
        return await late.bodies() == [b"0", b"1", b"2"]

    await until(seen)
    leader.gate.shut.add(late_name)
    await scene.wait_in_sync(leader.name, follower_name)
    await leader.append(*numbered(3, 3))
    async with asyncio.TaskGroup() as tasks:
        for name in (leader.name, follower_name):
            tasks.create_task(scene.nodes[name].crash())
    await scene.wait_vacant()
    assert not await late.serves(), "it is not in sync"
    async with EtcdSession(etcd_endpoint, scene.cluster, Clock()) as session:
        request = nameserver_pb.ElectReplicaRequest(
            service=nameserver_pb.SERVICE_KIND_STORAGE,
            replica_set=BROKER,
            node_id=late_name,
            execute=True,
            by="ops",
        )

        async def accepted() -> bool:
            try:
                await UncleanElection(session).elect(request)
            except StillInSync:  # the entries of the lost nodes are removed with their leases
                return False
            return True

        await until(accepted)
    assert await scene.leader() is late
    assert await late.bodies() == [b"0", b"1", b"2"]
    (receipt,) = await late.append(batch(b"instead"))
    assert receipt.first_offset == 3
    await scene.start(leader.name, follower_name)
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    (loss,) = (await scene.set_record()).accepted
    assert (loss.node_id, set(loss.lost)) == (late_name, {leader.name, follower_name})


async def test_node_without_replicas_becomes_the_first_member_of_a_set(scene: Scene) -> None:
    (alone,) = await scene.start("b", replicas="")
    await alone.append(*numbered(0, 30))
    await alone.stop()
    leader = await three(scene)
    assert leader.name == "b"
    await scene.wait_equal()
    assert await leader.bodies() == [b"%d" % number for number in range(30)]
    (receipt,) = await leader.append(*numbered(29, 1))
    assert receipt.duplicate


async def test_set_does_not_start_while_a_member_still_runs_without_replicas(scene: Scene) -> None:
    """It is registered as a node, with messages that the others do not have."""
    (alone,) = await scene.start("b", replicas="")
    await alone.append(*numbered(0, 30))
    await alone.stop()
    async with EtcdSession(scene.endpoint, scene.cluster, Clock()) as session:
        entry = StoredNode(node_id="b", leader=True, replica_set=BROKER)
        await session.put(session.key("nodes", "storage", "b"), entry.SerializeToString())
        await scene.start("a", "c")
        with pytest.raises(TimeoutError):
            async with asyncio.timeout(LEASE_MS / 2000):
                await until(scene.has_leader)
    await scene.start("b")
    assert (await scene.leader()).name == "b"
    await scene.wait_in_sync("a", "b", "c")
    await scene.wait_equal()
    assert await scene.nodes["b"].bodies() == [b"%d" % number for number in range(30)]


@pytest.mark.long
async def test_leadership_ends_before_its_lease_while_etcd_is_unreachable(scene: Scene) -> None:
    """So that it never answers beside the next leader; reads are still served."""
    leader = await three(scene)
    await leader.append(*numbered(0, 3))
    for node in scene.nodes.values():
        node.session.cut = True

    async def ended() -> bool:
        return not await leader.serves()

    await until(ended)
    error = await leader.rejection(*numbered(3, 1))
    assert error.reason == "NO_QUORUM"
    assert await leader.bodies() == [b"0", b"1", b"2"]
    for node in scene.nodes.values():
        node.session.cut = False
    again = await scene.leader()
    (receipt,) = await again.append(*numbered(3, 1))
    assert receipt.first_offset == 3


@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"node_id": ""}, "INVALID_ARGUMENT"),
        ({"broker": "broker-b"}, "WRONG_BROKER"),
        ({"position": -1}, "LIMIT_EXCEEDED"),
        ({"hold_ms": 10_001}, "LIMIT_EXCEEDED"),
        ({"bytes_max": 1}, "LIMIT_EXCEEDED"),
        ({"history": [(2, 0), (1, 10)]}, "INVALID_ARGUMENT"),
        ({"history": [(99, 0)]}, "OLD_EPOCH"),
    ],
)
async def test_invalid_fetch_requests_are_rejected(
    scene: Scene, fields: dict[str, Any], reason: str
) -> None:
    scene.members = ("a", "b")
    await scene.start("a", "b")
    leader = await scene.leader()
    history = [
        replication_pb.EpochStart(epoch=epoch, position=at)
        for epoch, at in fields.pop("history", ())
    ]
    valid = {"node_id": "b", "broker": BROKER, "history": history}
    with pytest.raises(grpc.aio.AioRpcError) as refused:
        await leader.replication.Fetch(replication_pb.FetchRequest(**(valid | fields)), timeout=20)
    assert from_rpc_error(refused.value).reason == reason
