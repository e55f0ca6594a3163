"""Goal: a moved group keeps all its entries, one set keeps it at every moment, and the move
completes after the crash of any node.

Method: two sets, `left` and `right`, with real disks, a real etcd and real gRPC between them. The
test writes the placements as the nameserver does, and may delay or fail calls between the sets.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc.aio
import pytest

from baton.common.v1 import queue_pb2
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq.errors import (
    BatonError,
    GroupMoved,
    InvalidArgument,
    NotServing,
    OldEpoch,
    OldMove,
    UnknownQueue,
    Unreachable,
)
from batonmq_server.offsets import group_exporter, group_importer, tombstone_expiry
from batonmq_server.offsets.core.local_placements import (
    LocalPlacement,
    LocalPlacements,
    PlacementState,
)
from batonmq_server.offsets.disk import StoredEntry
from batonmq_server.offsets.group_exporter import GroupExporter
from batonmq_server.offsets.persistence import FLOOR
from batonmq_server.runtime.etcd.session import EtcdSession, KeyValue
from batonmq_server.runtime.group_placements import GroupPlacement, decode_placement
from tests.offsets.replica_cluster import (
    Replica,
    ReplicaSet,
    hold,
    queue,
    replica_set,
)
from tests.offsets.service_calls import store_topic
from tests.support.conditions import until
from tests.support.replica_nodes import LEASE_MS, TIMEOUT_S, CallGate, Proceed

pytestmark = pytest.mark.timeout(120)

GROUP = "readers"
ELSEWHERE = ("GROUP_MOVED", "NOT_SERVING")
HOLDER = queue_pb2.Incarnation(client_id="client-a", incarnation_id=1)


@dataclass
class Scene:
    """Two sets, and etcd."""

    etcd: EtcdSession
    left: ReplicaSet
    right: ReplicaSet

    async def place(self, offsets_set: str, move: int = 0, from_set: str = "") -> None:
        """Write the placement, as the nameserver does."""
        place = GroupPlacement(offsets_set, move, from_set)
        await self.etcd.put(f"places/{GROUP}", place.encode())

    async def finished(self, move: int) -> bool:
        """Return whether the move is finished in etcd."""
        stored = await self.etcd.get(f"places/{GROUP}")
        assert stored is not None
        place = decode_placement(stored)
        return place.move == move and not place.from_set

    async def moved(self, move: int) -> None:
        """Wait until the move is finished."""
        await until(lambda: self.finished(move), timeout_s=40)


@asynccontextmanager
async def two_sets(
    endpoint: str, folder: Path, nodes_per_set: int = 1
) -> AsyncIterator[tuple[Scene, Replica, Replica]]:
    """Two sets whose leaders serve; group `readers` began at `left`."""
    cluster = f"test-{secrets.token_hex(8)}"
    async with (
        EtcdSession(endpoint, cluster, Clock()) as etcd,
        replica_set(endpoint, cluster, folder) as left,
        replica_set(endpoint, cluster, folder) as right,
    ):
        scene, leaders = Scene(etcd, left, right), []
        await scene.place("left")
        for name, one in (("left", left), ("right", right)):
            nodes = [f"{name}-{number}" for number in range(nodes_per_set)]
            one.settings = {"replica_set": name}
            one.settings["replicas"] = ",".join(nodes) if nodes_per_set > 1 else ""
            await one.start(*nodes)
            leaders.append(await leader(one))
        yield scene, leaders[0], leaders[1]


async def leader(of: ReplicaSet) -> Replica:
    """Return the node that answers, also with GROUP_MOVED."""
    leaders: list[Replica] = []

    async def look() -> bool:
        for node in of.nodes.values():
            if not node.ended.is_set():
                reason = await rejection_reason(node)
                if reason is None or reason in ELSEWHERE:
                    leaders.append(node)
                    return True
        return False

    await until(look, timeout_s=40)
    return leaders[0]


async def send(node: Replica, request: Any) -> Any:
    """Return the answer of a node, or its outcome if it has one.

    Raises:
        BatonError: the call or its item was rejected.
    """
    method = type(request).__name__.removesuffix("Request")
    try:
        answer = await getattr(node.stub, method)(request, timeout=TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    for outcome in getattr(answer, "outcomes", ()):
        if outcome.HasField("error"):
            raise error_from_pb(outcome.error)
    return answer


async def rejection_reason(node: Replica) -> str | None:
    """Return the reason for which a node rejects a call about the group; None if it answers."""
    try:
        await send(node, pb.ListResetsRequest(group=GROUP))
    except BatonError as error:
        return error.reason
    return None


async def progress(node: Replica, queue_id: int = 0) -> pb.Progress:
    answer = await send(node, pb.QueryRequest(queues=[queue(queue_id)]))
    result: pb.Progress = answer.outcomes[0].progress
    result.ClearField("idle_ms")
    return result


def commit(committed_offset: int, token: int = 1, queue_id: int = 0) -> pb.CommitRequest:
    acked = [queue_pb2.OffsetRange(first_offset=70, next_offset=80)]
    item = pb.CommitItem(
        queue=queue(queue_id), token=token, committed_offset=committed_offset, acked=acked
    )
    return pb.CommitRequest(items=[item])


def fence(expected_token: int, term: int = 1, attempt: str = "attempt-2") -> pb.FenceRequest:
    item = pb.FenceItem(
        queue=queue(),
        attempt=attempt,
        condition=pb.FENCE_CONDITION_SAME_HOLDER,
        expected_token=expected_token,
        holder=HOLDER,
    )
    return pb.FenceRequest(term=term, items=[item])


def reset(to_offset: int, queue_id: int) -> pb.ResetRequest:
    items = [pb.ResetItem(queue=queue(queue_id), to_offset=to_offset)]
    return pb.ResetRequest(op_id="op-1", by="operator", reason="test", items=items)


async def work(node: Replica) -> pb.Progress:
    """Give the group tokens, acks, maybe-seen offsets and a reset.

    Returns:
        The progress of queue 0.
    """
    await hold(node, 0, 1)
    await send(node, commit(40))
    await send(node, fence(1))
    await send(node, reset(7, queue_id=1))
    return await progress(node)


def of_group(node: Replica) -> list[StoredEntry]:
    """Return the stored entries of the group, without its local placement."""
    name = GROUP.encode() + b"\0"
    return [entry for entry in node.stored() if name in entry[0]]


async def test_moved_group_keeps_all_its_entries(etcd_endpoint: str, tmp_path: Path) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        before = await work(left)
        resets = await send(left, pb.ListResetsRequest(group=GROUP))
        holds = await send(left, pb.ListHoldsRequest(queue=queue()))
        kept = of_group(left)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        after = await progress(right)
        assert before.maybe_seen_count == 50
        # As after a failover, delivered is at its reserved bound.
        before.delivered_offset, before.unacked_count = after.delivered_offset, after.unacked_count
        before.unacked_count_min = after.unacked_count_min
        assert after == before
        assert after.delivered_offset >= 100
        assert (await send(right, pb.ListResetsRequest(group=GROUP))).resets == resets.resets
        answer = await send(right, pb.ListHoldsRequest(queue=queue()))
        assert [hold.token for hold in answer.holds] == [hold.token for hold in holds.holds]
        assert of_group(right) == kept
        assert of_group(left) == [], "the exported entries are removed"
        await send(right, commit(50, token=2))
        assert (await progress(right)).committed_offset == 50


async def test_old_set_rejects_calls_with_the_new_set(etcd_endpoint: str, tmp_path: Path) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, _):
        await work(left)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        delivery = pb.DeliveryItem(queue=queue(), token=2, first_offset=100, next_offset=110)
        calls = [
            commit(90, token=2),
            fence(2, attempt="attempt-3"),
            reset(0, 0),
            pb.RecordDeliveredRequest(items=[delivery]),
            pb.CloseRequest(items=[pb.CloseItem(queue=queue(), token=2)]),
            pb.QueryRequest(queues=[queue()]),
            pb.QueryGroupRequest(group=GROUP),
            pb.ListResetsRequest(group=GROUP),
            pb.ListHoldsRequest(queue=queue()),
            pb.DeleteGroupRequest(group=GROUP),
        ]
        for request in calls:
            with pytest.raises(GroupMoved) as refusal:
                await send(left, request)
            assert refusal.value.facts == {"group": GROUP, "offsets_set": "right", "move": "1"}
        answer = await left.stub.Touch(
            pb.TouchRequest(items=[pb.TouchItem(queue=queue(), token=2)]), timeout=TIMEOUT_S
        )
        assert isinstance(error_from_pb(answer.outcomes[0].error), GroupMoved)
        assert not (await send(left, pb.AnnounceRequest(term=1))).queues


async def test_group_can_move_back_and_forth(etcd_endpoint: str, tmp_path: Path) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await work(left)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        await send(right, commit(60, token=2))
        await scene.place("left", 2, "right")
        await scene.moved(2)
        assert (await progress(left)).committed_offset == 60
        assert await rejection_reason(right) == "GROUP_MOVED"
        await send(left, commit(65, token=2))
        await scene.place("right", 3, "left")
        await scene.moved(3)
        assert (await progress(right)).committed_offset == 65
        # Late calls of an earlier move do nothing.
        with pytest.raises(OldMove):
            await send(right, pb.ExportGroupRequest(group=GROUP, move=2, to_set="left"))
        await send(left, pb.ForgetGroupRequest(group=GROUP, move=1))
        await send(right, pb.ForgetGroupRequest(group=GROUP, move=2))
        assert (await progress(right)).committed_offset == 65
        assert of_group(right)


async def test_new_set_answers_no_call_before_the_import_is_complete(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The export has many parts; the last one is delayed, then lost."""
    monkeypatch.setattr(group_exporter, "PART_BYTES", 1)
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        before = await work(left)
        delayed, proceed_now = asyncio.Event(), asyncio.Event()
        lost: list[pb.ExportGroupResponse] = []

        async def delay_last_part(request: Any, proceed: Proceed) -> Any:
            answer = await proceed()
            if answer.last and not lost:
                delayed.set()
                await proceed_now.wait()
                lost.append(answer)
                raise Unreachable("the answer is lost")
            return answer

        left.gate.rules["ExportGroup"] = delay_last_part
        await scene.place("right", 1, "left")
        await delayed.wait()
        assert await rejection_reason(right) == "NOT_SERVING"
        with pytest.raises(NotServing):
            await send(right, commit(90, token=2))
        assert await rejection_reason(left) == "GROUP_MOVED"
        proceed_now.set()
        await scene.moved(1)
        assert (await progress(right)).committed_offset == before.committed_offset


async def test_each_part_of_an_export_reads_only_its_own_entries(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Else the export of a group with many queues never ends within the deadline of a part."""
    monkeypatch.setattr(group_exporter, "PART_BYTES", 1)
    read: list[StoredEntry] = []
    async with two_sets(etcd_endpoint, tmp_path) as (_, left, _):
        await work(left)
        of_prefix = left.disk.read_prefix

        async def count(*args: Any, **options: Any) -> list[StoredEntry]:
            read.extend(found := await of_prefix(*args, **options))
            return found

        monkeypatch.setattr(left.disk, "read_prefix", count)
        entries, after = list[pb.StoredEntry](), b""
        while True:
            request = pb.ExportGroupRequest(group=GROUP, move=1, to_set="right", after_key=after)
            answer = await send(left, request)
            entries += answer.entries
            if answer.last:
                break
            after = answer.entries[-1].key
        assert [(one.key, one.value) for one in entries] == of_group(left)
        assert len(entries) > 5
        assert read == of_group(left)


POINTS = (
    "before the seal",
    "after the seal",
    "after a part",
    "before the forget",
    "after the forget",
)


@pytest.mark.parametrize("side", ["left", "right"])
@pytest.mark.parametrize("point", POINTS)
async def test_move_completes_when_either_leader_crashes_at_any_step(
    etcd_endpoint: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    point: str,
    side: str,
) -> None:
    monkeypatch.setattr(group_exporter, "PART_BYTES", 1)
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, _):
        await work(left)
        reached = stop_at(left.gate, point)
        await scene.place("right", 1, "left")
        await reached.wait()
        crashing = scene.left if side == "left" else scene.right
        name = next(iter(crashing.nodes))
        await crashing.nodes[name].crash()
        left.gate.rules.clear()
        await crashing.start(name)
        await scene.moved(1)
        old, new = await leader(scene.left), await leader(scene.right)
        after = await progress(new)
        assert (after.token, after.committed_offset, after.acked_count) == (2, 40, 10)
        assert after.maybe_seen_count == 50
        assert (await progress(new, 1)).reset_epoch == 1
        assert await rejection_reason(old) == "GROUP_MOVED"
        assert of_group(old) == []


def stop_at(gate: CallGate, point: str) -> asyncio.Event:
    """Fail the calls between the sets from `point` on; the event is set at the first one."""
    reached = asyncio.Event()

    async def stop(after: int, request: Any, proceed: Proceed) -> Any:
        gate.count = getattr(gate, "count", 0) + 1  # type: ignore[attr-defined]
        if gate.count > after:  # type: ignore[attr-defined]
            if point.startswith("after"):
                await proceed()
            reached.set()
            raise Unreachable("stopped by the test")
        return await proceed()

    method = "ForgetGroup" if "forg" in point else "ExportGroup"
    count = 2 if point == "after a part" else 0
    gate.rules[method] = lambda request, proceed: stop(count, request, proceed)
    return reached


async def test_repeated_forget_completes_a_cancelled_one(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, _):
        await work(left)

        async def cancel_once(request: Any, proceed: Proceed) -> Any:
            del left.gate.rules["ForgetGroup"]
            try:
                async with asyncio.timeout(0):  # cancelled at its first await
                    return await proceed()
            except TimeoutError:
                raise Unreachable("cancelled by the test") from None

        left.gate.rules["ForgetGroup"] = cancel_once
        await scene.place("right", 1, "left")
        await scene.moved(1)
        assert "ForgetGroup" not in left.gate.rules
        assert of_group(left) == []


async def test_repeated_forget_removes_what_an_interrupted_one_has_left(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The entries are removed in parts, here of one entry; the third part fails."""
    monkeypatch.setattr(group_exporter, "PART_BYTES", 1)
    forget_part, parts = GroupExporter._forget_part, list[int]()
    left_over: list[int] = []

    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):

        async def counted(exporter: GroupExporter, group: str, move: int) -> int:
            if len(parts) == 2:
                parts.clear()
                left_over.append(len(of_group(left)))
                with pytest.raises(OldMove):
                    await exporter.export(group, move, "right", b"")
                monkeypatch.setattr(GroupExporter, "_forget_part", forget_part)
                raise Unreachable("interrupted by the test")
            parts.append(await forget_part(exporter, group, move))
            return parts[-1]

        before = await work(left)
        count = len(of_group(left))
        monkeypatch.setattr(GroupExporter, "_forget_part", counted)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        assert left_over == [count - 2]
        assert of_group(left) == []
        assert (await progress(right)).committed_offset == before.committed_offset


async def test_new_leader_of_either_set_continues_the_move(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """Seal and imported entries are replicated changes: the followers have them."""
    async with two_sets(etcd_endpoint, tmp_path, nodes_per_set=2) as (scene, left, right):
        before = await work(left)
        await _all_in_sync(scene)
        reached = stop_at(left.gate, "after the seal")
        await scene.place("right", 1, "left")
        await reached.wait()
        await left.crash()
        await right.crash()
        (successor,) = [node for name, node in scene.left.nodes.items() if name != left.name]

        async def rejects() -> bool:
            return await rejection_reason(successor) == "GROUP_MOVED"

        await until(rejects, timeout_s=40)
        await scene.moved(1)
        after = await progress(await leader(scene.right))
        assert after.committed_offset == before.committed_offset
        assert after.token == before.token


async def _all_in_sync(scene: Scene) -> None:
    async def look() -> bool:
        for name in ("left", "right"):
            stored = await scene.etcd.get(f"replicas/offsets/{name}")
            if stored is None or stored.value.count(name.encode() + b"-") < 3:
                return False
        return True

    await until(look, timeout_s=4 * LEASE_MS / 1000)


async def test_acks_during_a_move_are_neither_lost_nor_counted_twice(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """Acks during five moves go to the set that keeps the group; answered acks are never lost."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        answered, stop = [0], asyncio.Event()

        async def ack() -> None:
            node, offset = left, 0
            while not stop.is_set():
                item = pb.CommitItem(queue=queue(), token=1, committed_offset=min(offset + 1, 100))
                try:
                    answer = await send(node, pb.CommitRequest(items=[item]))
                except GroupMoved as error:
                    node = left if error.detail.offsets_set == "left" else right
                except NotServing:
                    await asyncio.sleep(0.01)
                else:
                    offset = answer.outcomes[0].committed.committed_offset
                    assert offset >= answered[-1]
                    answered.append(offset)

        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(ack())
            for move in range(1, 6):
                sets = ("left", "right") if move % 2 else ("right", "left")
                seen = len(answered)
                await until(lambda seen=seen: len(answered) > seen + 3)  # type: ignore[misc]
                await scene.place(sets[1], move, sets[0])
                await scene.moved(move)
            stop.set()
        assert (await progress(right)).committed_offset == answered[-1]


async def test_fence_attempt_repeated_at_the_new_set_gets_the_same_answer(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The lock manager repeats an attempt without answer at the set that keeps the group now."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        first = await send(left, fence(1))
        await scene.place("right", 1, "left")
        await scene.moved(1)
        again = await send(right, fence(1))
        assert again.outcomes[0].fenced == first.outcomes[0].fenced
        assert (await progress(right)).token == 2


async def test_term_of_the_lock_manager_moves_with_the_group(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """A lock manager with an old term is rejected by the new set too."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        await send(left, pb.AnnounceRequest(term=9))
        await scene.place("right", 1, "left")
        await scene.moved(1)
        with pytest.raises(OldEpoch):
            await send(right, pb.AnnounceRequest(term=8))
        with pytest.raises(OldEpoch):
            await send(right, fence(1, term=8))
        assert (await send(right, fence(1, term=9))).outcomes[0].fenced.token == 2


async def test_forgotten_tokens_are_not_issued_again_at_the_new_set(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The old set has forgotten the queue; only its floor knows that the queue had two tokens."""
    monkeypatch.setattr(tombstone_expiry, "KEPT_MS", -1)
    monkeypatch.setattr(tombstone_expiry, "INTERVAL_S", 0.01)
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        await send(left, fence(1))
        await send(left, pb.DeleteGroupRequest(group=GROUP))
        await until(lambda: not of_group(left))
        await scene.place("right", 1, "left")
        await scene.moved(1)
        await send(right, pb.AnnounceRequest(term=1))
        request = fence(0, attempt="attempt-7")
        request.items[0].condition = pb.FENCE_CONDITION_CLOSED_OR_DRAINED
        assert (await send(right, request)).outcomes[0].fenced.token == 4
        assert next(value for key, value in right.stored() if key == FLOOR).endswith(b"3:1")


async def test_topic_deleted_during_a_move_is_deleted_for_the_group(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The sets get the deletion one after the other, each before or after the group moves."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        reached = stop_at(left.gate, "after the seal")
        await scene.place("right", 1, "left")
        await reached.wait()
        for node in (left, right):
            await send(node, pb.DeleteTopicRequest(topic="news", topic_id=7))
        left.gate.rules.clear()
        await scene.moved(1)
        assert not (await send(right, pb.QueryGroupRequest(group=GROUP))).queues
        request = fence(2, attempt="attempt-7")
        request.items[0].condition = pb.FENCE_CONDITION_CLOSED_OR_DRAINED
        again = await send(right, request)
        assert again.outcomes[0].fenced.token == 3, "no token is issued twice"


async def test_late_topic_deletion_does_not_delete_newer_progress_of_a_moved_group(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """The old set deleted the topic's progress before the move, the new set does it after it."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await send(left, pb.DeleteTopicRequest(topic="news", topic_id=7))
        await hold(left, 0)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        await send(right, pb.DeleteTopicRequest(topic="news", topic_id=7))
        assert (await progress(right)).token == 1
        await send(right, pb.DeleteTopicRequest(topic="news", topic_id=8))
        assert not (await send(right, pb.QueryGroupRequest(group=GROUP))).queues


async def test_group_without_a_placement_belongs_to_one_set(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await store_topic(scene.etcd)
        request = reset(7, queue_id=0)
        request.items[0].queue.group = "strangers"
        answers = await asyncio.wait_for(
            _all_of(send(left, request), send(right, request)), TIMEOUT_S
        )
        assert sorted(type(answer).__name__ for answer in answers) == [
            "GroupMoved",
            "ResetResponse",
        ]


async def test_question_about_a_group_that_does_not_exist_does_not_place_it(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    unknown = queue()
    unknown.group = "strangers"
    async with two_sets(etcd_endpoint, tmp_path) as (scene, *leaders):
        for node in leaders:
            for request in (
                pb.QueryGroupRequest(group="strangers"),
                pb.ListResetsRequest(group="strangers"),
                pb.ListHoldsRequest(queue=unknown),
                pb.DeleteGroupRequest(group="strangers"),
            ):
                answer = await send(node, request)
                answer.ClearField("offsets_epoch")
                assert answer == type(answer)()
            with pytest.raises(UnknownQueue):
                await send(node, pb.QueryRequest(queues=[unknown]))
        assert await scene.etcd.get("places/strangers") is None


async def test_group_that_exists_is_placed_by_the_first_question(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await scene.etcd.put("gates/strangers", StoredGate().SerializeToString())

        async def placed() -> bool:
            await send(left, pb.QueryGroupRequest(group="strangers"))
            return await scene.etcd.get("places/strangers") is not None

        await until(placed)
        with pytest.raises(GroupMoved):
            await send(right, pb.QueryGroupRequest(group="strangers"))


async def _all_of(*calls: Any) -> list[Any]:
    results: list[Any] = []

    async def one(call: Any) -> None:
        try:
            results.append(await call)
        except BatonError as error:
            results.append(error)

    async with asyncio.TaskGroup() as tasks:
        for call in calls:
            tasks.create_task(one(call))
    return results


async def test_stored_group_gets_its_placement_when_its_set_starts(
    etcd_endpoint: str, tmp_path: Path
) -> None:
    """A group stored without a placement is not given to another set."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, right):
        await hold(left, 0)
        await scene.etcd.delete(f"places/{GROUP}")
        await left.crash()
        await scene.left.start(left.name)

        async def placed() -> bool:
            return await scene.etcd.get(f"places/{GROUP}") is not None

        await until(placed)
        assert await rejection_reason(right) == "GROUP_MOVED"
        assert (await progress(await leader(scene.left))).token == 1


async def test_new_placement_is_read_without_all_others(
    etcd_endpoint: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each new group has one: with 100,000 of them that held the event loop for a second."""
    async with two_sets(etcd_endpoint, tmp_path) as (scene, left, _):
        own = GroupPlacement("right").encode()
        for number in range(50):
            await scene.etcd.put(f"places/group-{number:02}", own)
        decoded = 0

        def counted(stored: KeyValue) -> GroupPlacement:
            nonlocal decoded
            decoded += 1
            return decode_placement(stored)

        monkeypatch.setattr(group_importer, "decode_placement", counted)
        await hold(left, 0)
        await scene.place("right", 1, "left")
        await scene.moved(1)
        assert 0 < decoded < 150, "those of before may arrive late, once at each set"


def test_seal_is_lifted_only_by_a_later_move() -> None:
    placements = LocalPlacements()
    assert placements.seal("g", 1, "b", {"t": 5})
    assert not placements.seal("g", 1, "b", {"t": 9}), "a repetition changes nothing"
    assert placements.get("g") == LocalPlacement(1, PlacementState.GONE, "b", {"t": 5})
    with pytest.raises(OldMove):
        placements.seal("g", 1, "c", {})
    with pytest.raises(GroupMoved):
        placements.check("g")
    placements.put("g", LocalPlacement(2, PlacementState.ARRIVING))
    with pytest.raises(NotServing):
        placements.check("g")
    with pytest.raises(NotServing):
        placements.seal("g", 3, "c", {})
    placements.put("g", LocalPlacement(2, PlacementState.KEPT, topic_ids={"u": 4}))
    placements.check("g")
    assert placements.topic_id("g", "u") == 4
    assert not placements.forget("g", 1)
    assert placements.seal("g", 3, "c", {"t": 6, "u": 1})
    assert placements.get("g") == LocalPlacement(3, PlacementState.GONE, "c", {"t": 6, "u": 4})
    assert placements.forget("g", 3)
    assert placements.get("g") == LocalPlacement(3, PlacementState.FORGOTTEN, "c")
    assert placements.forget("g", 3), "a repeated call removes what is left"
    with pytest.raises(GroupMoved):
        placements.check("g")
    with pytest.raises(OldMove):
        placements.seal("g", 3, "c", {})


def test_group_that_was_not_handed_over_is_not_forgotten() -> None:
    placements = LocalPlacements()
    with pytest.raises(InvalidArgument):
        placements.forget("g", 1)
    placements.put("g", LocalPlacement(2, PlacementState.KEPT))
    for move in (2, 3):
        with pytest.raises(InvalidArgument):
            placements.forget("g", move)
    assert not placements.forget("g", 1), "move 1 is another move"
