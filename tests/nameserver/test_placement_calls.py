"""Placement of groups at offsets sets.

Goal: a group gets one offsets set, keeps it, and is moved only by a change in etcd.
Method: in-process replicas on a real etcd; the sets are entries among the nodes.
"""

from __future__ import annotations

import asyncio

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import (
    BatonError,
    GroupMoving,
    GroupNotFound,
    OffsetsUnreachable,
    SetNotFound,
)
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.group_placements import GroupPlacement, decode_placement
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica
from tests.support.conditions import until

COUNT = 200


async def locate(nameserver: Replica, group: str) -> str:
    request = pb.LocateGroupRequest(group=group)
    try:
        answer = await nameserver.stub.LocateGroup(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error
    return answer.placement.offsets_set


async def move(
    nameserver: Replica, group: str, to_set: str = "", *, dry_run: bool = False
) -> pb.MoveGroupResponse:
    request = pb.MoveGroupRequest(group=group, to_set=to_set, dry_run=dry_run)
    try:
        return await nameserver.stub.MoveGroup(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def stored(etcd: EtcdSession, group: str) -> GroupPlacement | None:
    entry = await etcd.get(f"places/{group}")
    return decode_placement(entry) if entry is not None else None


async def add_set(etcd: EtcdSession, nameserver: Replica, name: str) -> None:
    """Register a set in etcd, as if it ran."""
    node = StoredNode(
        service=pb.SERVICE_KIND_OFFSETS,
        node_id=f"{name}-0",
        replica_set=name,
        address="127.0.0.1:1",
        epoch=1,
        leader=True,
    )
    revision = await etcd.put(f"nodes/offsets/{name}-0", node.SerializeToString())
    async with asyncio.timeout(CALL_TIMEOUT_S):
        await nameserver.runtime.nodes.reached(revision)


async def finish(etcd: EtcdSession, group: str) -> None:
    """Finish the move, as the new set does when the group has arrived."""
    place = await stored(etcd, group)
    assert place is not None
    await etcd.put(f"places/{group}", GroupPlacement(place.offsets_set, place.move).encode())


async def test_new_set_changes_only_the_placements_that_it_takes(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await add_set(etcd, nameserver, "offsets-b")
    groups = [f"group-{number}" for number in range(COUNT)]
    for group in groups:
        await nameserver.set_group(group)
    before = {group: await locate(nameserver, group) for group in groups}
    assert 0.35 * COUNT < list(before.values()).count("offsets-b") < 0.65 * COUNT
    await add_set(etcd, nameserver, "offsets-c")
    assert {group: await locate(nameserver, group) for group in groups} == before, (
        "placements are kept"
    )
    targets = {
        group: (await move(nameserver, group, dry_run=True)).placement.offsets_set
        for group in groups
    }
    moved_groups = {group for group in groups if targets[group] != before[group]}
    assert {targets[group] for group in moved_groups} == {"offsets-c"}
    assert 0.2 * COUNT < len(moved_groups) < 0.47 * COUNT
    assert {(await stored(etcd, group)) for group in moved_groups} == {
        placement
        for group in moved_groups
        if (placement := await stored(etcd, group)) and not placement.move
    }, "a dry run moves nothing"


async def test_join_places_a_group_and_deletion_keeps_the_placement(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("billing", "a")
    placement = await stored(etcd, "billing")
    assert placement is not None
    assert placement.offsets_set == "offsets"
    await nameserver.leave("billing", "a")
    await nameserver.delete_group("billing")
    await add_set(etcd, nameserver, "offsets-b")
    await nameserver.join("billing", "a")
    assert await stored(etcd, "billing") == placement, "the set has the tokens of the group"


async def test_question_for_the_placement_of_a_group_that_does_not_exist_stores_nothing(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    request = pb.LocateGroupRequest(group="billing")
    answer = await nameserver.stub.LocateGroup(request, timeout=CALL_TIMEOUT_S)
    assert answer.placement == pb.Placement(offsets_set="offsets", move=-1)
    assert await stored(etcd, "billing") is None
    await nameserver.set_group("billing")
    await add_set(etcd, nameserver, "offsets-b")
    answer = await nameserver.stub.LocateGroup(request, timeout=CALL_TIMEOUT_S)
    assert answer.placement == pb.Placement(offsets_set="offsets", move=0)


async def test_move_is_written_once_and_the_next_one_is_refused_until_it_is_finished(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await add_set(etcd, nameserver, "offsets-b")
    await add_set(etcd, nameserver, "offsets-c")
    await nameserver.set_group("billing")
    begin = await locate(nameserver, "billing")
    first, second = sorted({"offsets", "offsets-b", "offsets-c"} - {begin})
    answer = await move(nameserver, "billing", first)
    assert (answer.before.offsets_set, answer.placement.offsets_set) == (begin, first)
    placement = await stored(etcd, "billing")
    assert placement is not None
    assert (placement.offsets_set, placement.move, placement.from_set) == (first, 1, begin)
    again = await move(nameserver, "billing", first)
    assert again.before == again.placement == answer.placement, "the move is in progress"
    with pytest.raises(GroupMoving) as refusal:
        await move(nameserver, "billing", second)
    assert refusal.value.facts["from_set"] == begin
    await finish(etcd, "billing")
    answer = await move(nameserver, "billing", second)
    assert (answer.placement.move, answer.placement.from_set) == (2, first)
    assert await locate(nameserver, "billing") == second


async def test_move_with_an_unknown_set_or_group_is_refused(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.set_group("billing")
    with pytest.raises(SetNotFound) as refusal:
        await move(nameserver, "billing", "nowhere")
    assert refusal.value.facts == {"offsets_set": "nowhere", "known": "offsets"}
    with pytest.raises(GroupNotFound):
        await move(nameserver, "no-group", "offsets")
    with pytest.raises(BatonError, match="offsets_set"):
        await move(nameserver, "billing", "No Set")


async def test_group_is_not_placed_without_an_offsets_set(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await etcd.delete("nodes/offsets/offsets-0")
    await until(lambda: "offsets/offsets-0" not in nameserver.runtime.nodes.values)
    await nameserver.set_group("billing")
    assert await stored(etcd, "billing") is None
    with pytest.raises(OffsetsUnreachable):
        await locate(nameserver, "billing")
    await add_set(etcd, nameserver, "offsets-b")
    assert await locate(nameserver, "billing") == "offsets-b"


async def test_topic_is_created_after_every_offsets_set_has_deleted_its_progress(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await etcd.put("places/far", GroupPlacement("away").encode())
    tries: list[int] = []

    async def is_refused() -> bool:
        try:
            await nameserver.create(f"topic-{len(tries)}")
        except grpc.aio.AioRpcError as error:
            assert isinstance(from_rpc_error(error), OffsetsUnreachable)
            return True
        tries.append(1)
        return False

    await until(is_refused)
