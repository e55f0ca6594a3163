"""Brokers that are replica sets.

Goal: a route has each broker once, with the address of its leader, also after an election; queues
are spread over brokers, not over their nodes.
Method: node entries as storage writes them, and the answers of the nameserver.
"""

from __future__ import annotations

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, register_broker
from tests.support.conditions import until


async def leads_to(nameserver: Replica, broker: str, address: str) -> None:
    """Wait until the route of `flights` has the address; no broker may be in it twice."""

    async def look() -> bool:
        route = await nameserver.route("flights")
        assert len({entry.broker for entry in route.brokers}) == len(route.brokers)
        return pb.BrokerAddress(broker=broker, address=address) in route.brokers

    await until(look)


async def test_route_follows_the_leader_of_a_broker(nameserver: Replica, etcd: EtcdSession) -> None:
    fields = {"replica_set": "broker-a"}
    await register_broker(etcd, "a-0", "127.0.0.1:10", epoch=4, **fields)
    await register_broker(etcd, "a-1", "127.0.0.1:11", epoch=0, leader=False, **fields)
    await leads_to(nameserver, "broker-a", "127.0.0.1:10")
    await register_broker(etcd, "a-1", "127.0.0.1:11", epoch=5, **fields)
    await leads_to(nameserver, "broker-a", "127.0.0.1:11")
    await register_broker(etcd, "a-0", "127.0.0.1:10", epoch=0, leader=False, **fields)
    await etcd.delete(etcd.key("nodes", "storage", "broker-a"))
    await leads_to(nameserver, "broker-a", "127.0.0.1:11")


async def test_broker_without_leader_stays_in_the_route(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    fields = {"replica_set": "broker-a"}
    await register_broker(etcd, "a-1", "127.0.0.1:11", epoch=0, leader=False, **fields)
    await etcd.delete(etcd.key("nodes", "storage", "broker-a"))
    await leads_to(nameserver, "broker-a", "127.0.0.1:11")


async def test_queues_are_spread_over_brokers_not_over_their_nodes(
    nameserver: Replica, etcd: EtcdSession
) -> None:
    for name in ("b-0", "b-1", "b-2"):
        leader = name == "b-1"
        await register_broker(etcd, name, leader=leader, replica_set="broker-b")

    async def listed() -> bool:
        answer = await nameserver.stub.DescribeCluster(
            pb.DescribeClusterRequest(), timeout=CALL_TIMEOUT_S
        )
        return sum(node.replica_set == "broker-b" for node in answer.nodes) == 3

    await until(listed)
    created = await nameserver.create("trains", 8)
    assert {part.broker: part.queue_count for part in created.topic.spread} == {
        "broker-a": 4,
        "broker-b": 4,
    }
