"""Topics of the system.

Goal: system topics are created once brokers are registered, and extended to brokers added later.
Method: real replicas; brokers register one after the other.
"""

from __future__ import annotations

from typing import Any

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._core.names import ALERTS_TOPIC, METRICS_TOPIC
from batonmq_server.runtime.etcd.session import EtcdSession
from tests.nameserver.replica import CALL_TIMEOUT_S, Replica, register_broker, replica
from tests.support.conditions import until


async def spread(running: Replica) -> dict[str, dict[str, int]]:
    """Queues of each topic, by broker."""
    answer = await running.stub.ListTopics(pb.ListTopicsRequest(), timeout=CALL_TIMEOUT_S)
    return {
        topic.name: {part.broker: part.queue_count for part in topic.spread}
        for topic in answer.topics
    }


async def test_system_topics_are_created_once_and_extended_to_new_brokers(
    etcd_endpoint: str, cluster: str, etcd: EtcdSession
) -> None:
    settings: dict[str, Any] = {"metrics_stream": True, "metrics_queue_count": 2}
    async with (
        replica(etcd_endpoint, cluster, node_id="n1", **settings) as first,
        replica(etcd_endpoint, cluster, node_id="n2", **settings) as second,
    ):
        for running in (first, second):

            async def made(running: Replica = running) -> bool:
                return len(await spread(running)) == 2

            await until(made)
            queue_counts = await spread(running)
            assert queue_counts == {METRICS_TOPIC: {"broker-a": 2}, ALERTS_TOPIC: {"broker-a": 1}}
        await register_broker(etcd, "broker-b", "127.0.0.1:2")

        async def widened() -> bool:
            return (await spread(second))[METRICS_TOPIC] == {"broker-a": 2, "broker-b": 1}

        await until(widened)
        assert (await spread(second))[ALERTS_TOPIC] == {"broker-a": 1}


async def test_system_topics_are_not_created_if_disabled(nameserver: Replica) -> None:
    assert list(await spread(nameserver)) == ["flights"]
