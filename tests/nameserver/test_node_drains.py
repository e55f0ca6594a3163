"""Drains: a node is taken out of elections only while the others of its set can go on without it.

Goal: no drain leaves a set without a leader or below its minimum, also if two are drained at once;
a refused drain changes nothing; lists have drained nodes that are down.
Method: the rule as a table; then sets and nodes are written into etcd as they write themselves, and
a real nameserver is called.
"""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, InvalidArgument, NotDrainable
from batonmq_server.nameserver.core.node_drain import DrainScene, check_service, successors
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, register_broker

SET = "broker-a"
ALL = frozenset({"a-0", "a-1", "a-2"})
SCENE = DrainScene(SET, "a-0", True, ALL, ALL, frozenset(), 1)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, ("a-1", "a-2")),
        ({"min_in_sync": 2}, ("a-1", "a-2")),
        ({"min_in_sync": 0}, ("a-1", "a-2")),
        ({"min_in_sync": 3}, "rejects writes with fewer than 3"),
        ({"up": frozenset({"a-0", "a-1"})}, ("a-1",)),
        ({"up": frozenset({"a-0", "a-1"}), "min_in_sync": 2}, "would have 1 in-sync nodes"),
        ({"drained": frozenset({"a-1"})}, ("a-2",)),
        ({"drained": frozenset({"a-0"})}, ("a-1", "a-2")),
        (
            {"drained": frozenset({"a-1", "a-2"})},
            "no node of broker-a could lead without a-0: a-1 is drained, a-2 is drained",
        ),
        ({"drained": ALL, "leads": False}, ()),
        ({"drained": ALL}, "a-1 is drained, a-2 is drained"),
        ({"in_sync": frozenset({"a-0"})}, "a-1 is not in sync, a-2 is not in sync"),
        ({"up": frozenset({"a-0"})}, "a-1 is down, a-2 is down"),
        ({"in_sync": frozenset(), "up": frozenset({"a-0"})}, "it has no other node"),
        ({"in_sync": frozenset({"a-1"})}, ("a-1",)),
        ({"in_sync": frozenset()}, "no node of broker-a could lead without a-0"),
    ],
)
def test_drain_needs_enough_other_nodes(
    changes: dict[str, Any], expected: tuple[str, ...] | str
) -> None:
    scene = replace(SCENE, **changes)
    if isinstance(expected, tuple):
        assert successors(scene) == expected
        return
    with pytest.raises(NotDrainable, match=expected):
        successors(scene)


@pytest.mark.parametrize("service", ["lockmgr", "nameserver", "gateway"])
def test_service_without_copies_is_not_drained_and_the_error_says_why(service: str) -> None:
    with pytest.raises(InvalidArgument, match=f"a node of {service} is not drained: it") as raised:
        check_service(service)
    assert "SIGTERM" in raised.value.remedy
    for drainable in ("storage", "offsets"):
        check_service(drainable)


async def put_set(etcd: EtcdSession, *names: str, min_in_sync: int = 1) -> None:
    in_sync = frozenset(names)
    record = ReplicaSetRecord(7, "a-0", in_sync, 7, min_in_sync=min_in_sync)
    await etcd.put(f"replicas/storage/{SET}", record.encode())
    for name in names:
        await register_broker(etcd, name, leader=name == "a-0", replica_set=SET)


async def drain(nameserver: Replica, node_id: str, **fields: Any) -> pb.DrainNodeResponse:
    values: dict[str, Any] = {
        "service": pb.SERVICE_KIND_STORAGE,
        "node_id": node_id,
        "execute": True,
        "by": "ops@host",
    }
    request = pb.DrainNodeRequest(**(values | fields))
    try:
        return await nameserver.stub.DrainNode(request, timeout=CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def undrain(nameserver: Replica, node_id: str, *, execute: bool = True) -> bool:
    request = pb.UndrainNodeRequest(
        service=pb.SERVICE_KIND_STORAGE, node_id=node_id, execute=execute
    )
    return (await nameserver.stub.UndrainNode(request, timeout=CALL_TIMEOUT_S)).was_drained


async def listed(nameserver: Replica) -> list[tuple[str, str]]:
    answer = await nameserver.stub.DescribeCluster(
        pb.DescribeClusterRequest(include_drained=True), timeout=CALL_TIMEOUT_S
    )
    return [(one.node_id, one.by) for one in answer.drained]


async def test_drain_is_listed_until_it_is_ended(nameserver: Replica, etcd: EtcdSession) -> None:
    await put_set(etcd, "a-0", "a-1")
    planned = await drain(nameserver, "a-0", execute=False, by="")
    assert (planned.leader, list(planned.successors), planned.replica_set) == (True, ["a-1"], SET)
    assert await listed(nameserver) == [], "a dry run changes nothing"
    await drain(nameserver, "a-0")
    assert (await drain(nameserver, "a-0", by="another@host")).already_drained
    await etcd.delete("nodes/storage/a-0")
    assert await listed(nameserver) == [("a-0", "ops@host")], "also while the node is down"
    assert await undrain(nameserver, "a-0", execute=False)
    assert await listed(nameserver) == [("a-0", "ops@host")], "a dry run changes nothing"
    assert await undrain(nameserver, "a-0")
    assert not await undrain(nameserver, "a-0")
    assert await listed(nameserver) == []


async def test_refused_drain_changes_nothing(nameserver: Replica, etcd: EtcdSession) -> None:
    await put_set(etcd, "a-0", "a-1", min_in_sync=2)
    with pytest.raises(NotDrainable) as raised:
        await drain(nameserver, "a-0")
    assert raised.value.facts == {"node_id": "a-0", "in_sync": "1", "limit": "2"}
    assert await listed(nameserver) == []


async def test_only_one_of_two_nodes_is_drained_if_both_are_at_once(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd, "a-0", "a-1")
    refused: list[str] = []

    async def try_to_drain(node_id: str) -> None:
        try:
            await drain(nameserver, node_id)
        except NotDrainable:
            refused.append(node_id)

    async with asyncio.TaskGroup() as tasks:
        for node_id in ("a-0", "a-1"):
            tasks.create_task(try_to_drain(node_id))
    assert len(await listed(nameserver)) == 1
    assert len(refused) == 1


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"service": pb.SERVICE_KIND_LOCKMGR}, "a node of lockmgr is not drained"),
        ({"service": pb.SERVICE_KIND_UNSPECIFIED}, "service must be"),
        ({"node_id": ""}, "node_id must be a name"),
        ({"node_id": "a/b"}, "node_id must be a name"),
        ({"node_id": "z-9"}, "z-9 is not a live node of storage"),
        ({"by": ""}, "by is required with execute"),
        ({"by": "x" * 201}, "by has 201 characters"),
    ],
)
async def test_invalid_drain_is_refused(
    nameserver: Replica, etcd: EtcdSession, fields: dict[str, Any], message: str
) -> None:
    await put_set(etcd, "a-0", "a-1")
    with pytest.raises(BatonError, match=message):
        await drain(nameserver, **({"node_id": "a-0"} | fields))
    assert await listed(nameserver) == []


async def test_unclean_election_of_a_drained_node_is_refused(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd, "a-0", "a-1")
    await drain(nameserver, "a-1")
    record = ReplicaSetRecord(7, "a-0", frozenset({"a-0"}), 7)
    await etcd.put(f"replicas/storage/{SET}", record.encode())
    await etcd.delete("nodes/storage/a-0")
    request = pb.ElectReplicaRequest(
        service=pb.SERVICE_KIND_STORAGE, replica_set=SET, node_id="a-1", execute=True, by="ops"
    )
    with pytest.raises(grpc.aio.AioRpcError) as raised:
        await nameserver.stub.ElectReplica(request, timeout=CALL_TIMEOUT_S)
    assert "a-1 is drained" in from_rpc_error(raised.value).message
