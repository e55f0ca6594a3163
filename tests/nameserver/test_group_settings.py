"""Settings, pause and deletion of groups, through real servers on a real etcd.

Goal: the record and its gate change together, and a deleted group is never confused with a later
one of the same name.
Method: in-process replicas with the real offsets service.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import Any

import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_gate_pb2 import StoredGate
from baton.offsets.v1 import offsets_service_pb2 as offsets_pb
from baton.offsets.v1 import offsets_service_pb2_grpc as offsets_grpc
from batonmq._core.queues import GroupQueue
from batonmq.errors import GroupInUse
from batonmq_server.offsets.core.values import AckState, Instant, ProgressSource
from batonmq_server.offsets.epoch import OffsetsEpoch
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import (
    Direct,
    Replica,
    grant,
    ids,
    next_group,
    refusal,
    register_offsets,
    replica,
)
from tests.support.grpc_server import serving_at


async def gate_of(etcd: EtcdSession, group: str = "g") -> StoredGate:
    stored = await etcd.get(etcd.key("gates", group))
    assert stored is not None
    return StoredGate.FromString(stored.value)


async def revisions(etcd: EtcdSession, group: str = "g") -> tuple[int, int]:
    record, gate = [await etcd.get(etcd.key(kind, group)) for kind in ("groups", "gates")]
    assert record is not None
    assert gate is not None
    return record.mod_revision, gate.mod_revision


async def test_new_group_has_the_default_settings_and_a_gate(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    group = await nameserver.join("g", "c1")
    assert (group.policy, group.ownership, group.strategy) == (
        pb.SUBSCRIPTION_POLICY_REJECT,
        pb.OWNERSHIP_ON,
        pb.STRATEGY_STICKY,
    )
    assert await gate_of(etcd) == StoredGate(
        subscription_generation=1,
        model=pb.MESSAGE_MODEL_CLUSTERING,
        ownership=pb.OWNERSHIP_ON,
        bound=True,
    )
    assert len(set(await revisions(etcd))) == 1, "one transaction"


async def test_gate_does_not_change_with_the_members(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    first = await revisions(etcd)
    await nameserver.join("g", "c2")
    await nameserver.leave("g", "c1")
    record, gate = await revisions(etcd)
    assert (record > first[0], gate) == (True, first[1])


async def test_update_changes_only_the_given_settings(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    new_group = await nameserver.set_group("g", policy=pb.SUBSCRIPTION_POLICY_WARN)
    assert (new_group.policy, ids(new_group), list(new_group.subscriptions)) == (
        pb.SUBSCRIPTION_POLICY_WARN,
        [],
        [],
    )
    await nameserver.set_group("g", strategy=pb.STRATEGY_AVERAGE)
    group = await nameserver.join("g", "c1")
    assert (group.policy, group.strategy, group.subscription_generation) == (
        pb.SUBSCRIPTION_POLICY_WARN,
        pb.STRATEGY_AVERAGE,
        1,
    )
    same = await nameserver.set_group("g", strategy=pb.STRATEGY_AVERAGE)
    assert same.generation == group.generation


async def test_ownership_changes_only_without_members(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    error = await refusal(nameserver.set_group("g", ownership=pb.OWNERSHIP_OFF))
    assert (error.reason, error.facts) == ("GROUP_IN_USE", {"group": "g", "members": "1"})
    assert (await gate_of(etcd)).ownership == pb.OWNERSHIP_ON
    await nameserver.leave("g", "c1")
    await nameserver.set_group("g", ownership=pb.OWNERSHIP_OFF)
    assert (await gate_of(etcd)).ownership == pb.OWNERSHIP_OFF
    group = await nameserver.join("g", "c1")
    assert group.ownership == pb.OWNERSHIP_OFF
    assert group.assignments, "members read the queues assigned to them"


async def test_pause_is_in_the_record_and_in_the_gate_and_pushed(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1")
    with nameserver.watch_group("g") as call:
        assert not (await next_group(call)).HasField("pause")
        await nameserver.set_group("g", paused=True, by="op", reason="disk")
        pause = (await next_group(call)).pause
        assert (pause.by, pause.reason) == ("op", "disk")
        assert pause.since_unix_ms > 0
        assert (await gate_of(etcd)).pause == pause
        again = await nameserver.set_group("g", paused=True, by="op", reason="disk")
        assert again.pause == pause
        assert nameserver.metric("paused_groups") == 1
        await nameserver.set_group("g", paused=False, by="op")
        assert not (await next_group(call)).HasField("pause")
    assert not (await gate_of(etcd)).HasField("pause")


@pytest.mark.parametrize(
    ("settings", "reason", "field"),
    [
        ({"policy": 99}, "INVALID_ARGUMENT", "policy"),
        ({"ownership": 99}, "INVALID_ARGUMENT", "ownership"),
        ({"strategy": 99}, "INVALID_ARGUMENT", "strategy"),
        ({"paused": True}, "INVALID_ARGUMENT", "by"),
        ({"paused": False}, "INVALID_ARGUMENT", "by"),
        ({"paused": True, "by": "x" * 256}, "LIMIT_EXCEEDED", "by"),
        ({"paused": True, "by": "a\nb"}, "INVALID_ARGUMENT", "by"),
        ({"paused": True, "by": "op", "reason": "x" * 1_025}, "LIMIT_EXCEEDED", "reason"),
    ],
)
async def test_bad_settings_are_refused(
    nameserver: Replica, etcd: EtcdSession, settings: dict[str, Any], reason: str, field: str
) -> None:
    error = await refusal(nameserver.set_group("g", **settings))
    assert (error.reason, error.facts["field"]) == (reason, field)
    assert await etcd.get(etcd.key("groups", "g")) is None


async def test_room_of_a_client_is_bounded(nameserver: Replica) -> None:
    error = await refusal(nameserver.beat("g", "c1", room="x" * 128))
    assert (error.reason, error.facts["field"]) == ("LIMIT_EXCEEDED", "room")


async def test_group_deleted_and_created_again_has_a_higher_generation(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    for number in range(5):
        await nameserver.join("g", f"c{number}")
    for number in range(5):
        await nameserver.leave("g", f"c{number}")
    last = (await nameserver.group("g")).generation
    assert await nameserver.delete_group("g") == 0
    assert await etcd.get(etcd.key("groups", "g")) is None
    assert await etcd.get(etcd.key("gates", "g")) is None
    assert (await refusal(nameserver.group("g"))).reason == "GROUP_NOT_FOUND"
    created = await nameserver.join("g", "c1")
    assert created.generation > last
    assert created.subscription_generation == 1


class DeletionTwin(offsets_grpc.OffsetsServiceServicer):
    """A stand-in for offsets that first runs an action of the test on a deletion."""

    def __init__(self, first: Callable[[], Awaitable[object]]) -> None:
        self._first = first

    async def DeleteGroup(self, request: Any, context: Any) -> offsets_pb.DeleteGroupResponse:
        await self._first()
        return offsets_pb.DeleteGroupResponse(queue_count=3, offsets_epoch=request.offsets_epoch)


@asynccontextmanager
async def offsets_that_delete(
    nameserver: Replica, etcd: EtcdSession, epoch: int, first: Callable[[], Awaitable[object]]
) -> AsyncIterator[None]:
    """Yield a stand-in for offsets."""
    twin = DeletionTwin(first)  # type: ignore[abstract]
    add = partial(offsets_grpc.add_OffsetsServiceServicer_to_server, twin)
    async with serving_at(add) as address:
        await nameserver.runtime.nodes.reached(await register_offsets(etcd, address, epoch))
        yield


async def test_group_deletion_deletes_the_record_before_the_progress(
    nameserver: Replica, offsets: OffsetsEpoch, etcd: EtcdSession
) -> None:
    async def gone() -> None:
        assert await etcd.get(etcd.key("groups", "g")) is None
        assert await etcd.get(etcd.key("gates", "g")) is None

    await nameserver.set_group("g", policy=pb.SUBSCRIPTION_POLICY_WARN)
    async with offsets_that_delete(nameserver, etcd, offsets.table.epoch + 1, gone):
        assert await nameserver.delete_group("g") == 3


async def test_group_that_is_joined_during_its_deletion_keeps_its_progress(
    nameserver: Replica, offsets: OffsetsEpoch, direct: Direct
) -> None:
    key = GroupQueue("g", "flights", "broker-a", 0)
    offsets.table.reset(key, AckState(5), ProgressSource.RESET, Instant(0, 0), dry_run=False)

    async def delete_progress_late(group: str) -> int:
        await nameserver.join(group, "c1")
        return await direct.groups.progress_deleter.delete_group(group)

    await nameserver.set_group("g", policy=pb.SUBSCRIPTION_POLICY_WARN)
    with pytest.raises(GroupInUse):
        await direct.groups.store.delete("g", delete_progress_late)
    assert offsets.table.query(key).committed_offset == 5
    assert ids(await nameserver.group("g")) == ["c1"]
    await nameserver.leave("g", "c1")
    assert await nameserver.delete_group("g") == 1


async def test_repeated_deletion_finishes_one_that_offsets_did_not_confirm(
    nameserver: Replica, offsets: OffsetsEpoch, etcd: EtcdSession
) -> None:
    async def nothing() -> None:
        return

    await nameserver.set_group("g", policy=pb.SUBSCRIPTION_POLICY_WARN)
    epoch = offsets.table.epoch
    revision = await register_offsets(etcd, "127.0.0.1:1", epoch + 1)
    await nameserver.runtime.nodes.reached(revision)
    for _ in range(2):
        assert (await refusal(nameserver.delete_group("g"))).reason == "OFFSETS_UNREACHABLE"
    assert (await refusal(nameserver.group("g"))).reason == "GROUP_NOT_FOUND"
    async with offsets_that_delete(nameserver, etcd, epoch + 2, nothing):
        assert await nameserver.delete_group("g") == 3


async def test_group_is_deleted_only_without_live_members(
    nameserver: Replica, etcd: EtcdSession, etcd_endpoint: str, cluster: str
) -> None:
    await nameserver.join("g", "c1")
    error = await refusal(nameserver.delete_group("g"))
    assert (error.reason, error.facts["members"]) == ("GROUP_IN_USE", "1")
    live = await etcd.get(etcd.key("live", "g", "c1"))
    assert live is not None
    await etcd.revoke(live.lease_id)
    await nameserver.delete_group("g")
    assert (await refusal(nameserver.delete_group("g"))).reason == "GROUP_NOT_FOUND"


async def test_deletion_ends_watches_at_every_replica(
    nameserver: Replica, etcd_endpoint: str, cluster: str
) -> None:
    await nameserver.set_group("g", policy=pb.SUBSCRIPTION_POLICY_WARN)
    async with replica(etcd_endpoint, cluster) as other:
        with other.watch_group("g") as call:
            await next_group(call)
            await nameserver.delete_group("g")
            assert (await refusal(call.read())).reason == "GROUP_NOT_FOUND"


async def test_grants_of_a_deleted_group_do_not_delay_the_next_one(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await nameserver.join("g", "c1", "old")
    await grant(etcd, "g", "c1")
    await nameserver.leave("g", "c1")
    await nameserver.delete_group("g")
    group = await nameserver.join("g", "c2", "new")
    assert (group.subscriptions[0].expression, group.HasField("staged")) == ("new", False)
