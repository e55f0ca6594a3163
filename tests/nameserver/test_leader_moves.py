"""Goal: a leadership moves to the named node only, and a failed move excludes no node for long.

Method: a set and its nodes are written into etcd as they write themselves, and a real nameserver
is called; the test plays the nodes.
"""

from __future__ import annotations

import asyncio
from typing import Any

import grpc.aio
import pytest

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError
from batonmq_server.nameserver import leader_moves
from batonmq_server.runtime.etcd.session import EtcdSession
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, register_broker
from tests.nameserver.test_node_drains import SET, drain, listed, put_set
from tests.support.conditions import until

MARKS = f"elections/storage/{SET}/drained/"


async def move(nameserver: Replica, node_id: str, **fields: Any) -> pb.MoveLeaderResponse:
    values: dict[str, Any] = {
        "service": pb.SERVICE_KIND_STORAGE,
        "node_id": node_id,
        "execute": True,
        "by": "ops@host",
    }
    request = pb.MoveLeaderRequest(**(values | fields))
    try:
        return await nameserver.stub.MoveLeader(request, timeout=2 * CALL_TIMEOUT_S)
    except grpc.aio.AioRpcError as error:
        raise from_rpc_error(error) from error


async def excluded(etcd: EtcdSession) -> list[str]:
    entries, _ = await etcd.get_prefix(MARKS)
    return [stored.key.removeprefix(MARKS) for stored in entries]


async def test_all_other_nodes_are_excluded_until_the_named_one_leads(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    await put_set(etcd, "a-0", "a-1", "a-2")
    planned = await move(nameserver, "a-1", execute=False, by="")
    assert (planned.replica_set, planned.leader_before, planned.leader) == (SET, "a-0", "a-0")
    assert await excluded(etcd) == [], "a dry run changes nothing"
    async with asyncio.TaskGroup() as tasks:
        moving = tasks.create_task(move(nameserver, "a-1"))

        async def marked() -> bool:
            return await excluded(etcd) == ["a-0", "a-2"]

        await until(marked)
        assert await listed(nameserver) == [], "a move is no drain"
        record = ReplicaSetRecord(8, "a-1", frozenset({"a-0", "a-1", "a-2"}), 8)
        await etcd.put(f"replicas/storage/{SET}", record.encode())
        await register_broker(etcd, "a-1", leader=True, replica_set=SET)
    answer = moving.result()
    assert (answer.leader_before, answer.leader) == ("a-0", "a-1")
    assert await excluded(etcd) == []
    assert (await move(nameserver, "a-1")).leader == "a-1", "it leads already"


async def test_move_without_an_end_excludes_no_node_afterwards(
    nameserver: Replica, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_moves, "WAIT_S", 0.3)
    await put_set(etcd, "a-0", "a-1")
    answer = await move(nameserver, "a-1")
    assert answer.leader == "a-0"
    assert await excluded(etcd) == []


async def test_move_keeps_the_marks_of_drained_nodes(
    nameserver: Replica, etcd: EtcdSession, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(leader_moves, "WAIT_S", 0.3)
    await put_set(etcd, "a-0", "a-1", "a-2")
    await drain(nameserver, "a-2")
    await move(nameserver, "a-1")
    assert await excluded(etcd) == ["a-2"]
    with pytest.raises(BatonError, match="a-2 can't lead broker-a: it is drained") as raised:
        await move(nameserver, "a-2")
    assert raised.value.remedy == "End the drain of the node: baton cluster undrain a-2."


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"node_id": "a-2"}, "a-2 can't lead broker-a: it is not in sync"),
        ({"node_id": "z-9"}, "z-9 is not a live node of storage"),
        ({"service": pb.SERVICE_KIND_GATEWAY}, "a node of gateway is not drained"),
        ({"by": ""}, "by is required with execute"),
    ],
)
async def test_invalid_move_is_refused_and_excludes_no_node(
    nameserver: Replica, etcd: EtcdSession, fields: dict[str, Any], message: str
) -> None:
    await put_set(etcd, "a-0", "a-1")
    await register_broker(etcd, "a-2", leader=False, replica_set=SET)
    with pytest.raises(BatonError, match=message):
        await move(nameserver, **({"node_id": "a-1"} | fields))
    assert await excluded(etcd) == []
