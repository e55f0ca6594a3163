"""Metrics of replica sets: registered nodes and leaders.

Goal: a set without a leader shows 0, also a set of storage without any node. Method: the nodes are
put into a catalog, and the series are read.
"""

from __future__ import annotations

from prometheus_client import CollectorRegistry

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from baton.nameserver.v1.stored_node_pb2 import StoredNode
from batonmq_server.nameserver.core.topics import QueueSpread, Topic
from batonmq_server.nameserver.metrics import MembershipMetrics, ReplicaSetMetrics
from batonmq_server.runtime.etcd.session import KeyValue
from tests.nameserver.service_twins import Scene, open_scene

Shown = dict[tuple[str, str], float]


def register(to: Scene, kind: str, node_id: str, replica_set: str, *, leader: bool) -> None:
    service = pb.ServiceKind.Value(f"SERVICE_KIND_{kind.upper()}")
    node = StoredNode(service=service, node_id=node_id, replica_set=replica_set, leader=leader)
    to.nodes.values[f"{kind}/{node_id}"] = KeyValue(node_id, node.SerializeToString(), 1, 1)


def shown(of: Scene) -> tuple[Shown, Shown]:
    """Return nodes and leaders by kind and set."""
    registry = CollectorRegistry()
    registry.register(ReplicaSetMetrics(of.catalog))
    nodes, leaders = (
        {(s.labels["kind"], s.labels["replica_set"]): s.value for s in metric.samples}
        for metric in registry.collect()
    )
    return nodes, leaders


async def test_nodes_and_leaders_are_counted_by_set() -> None:
    async with open_scene() as scene:
        register(scene, "storage", "a-0", "broker-a", leader=True)
        register(scene, "storage", "a-1", "broker-a", leader=False)
        register(scene, "offsets", "offsets-0", "offsets", leader=False)
        register(scene, "lockmgr", "lockmgr-0", "", leader=False)
        register(scene, "lockmgr", "lockmgr-1", "", leader=True)
        register(scene, "nameserver", "nameserver-0", "", leader=True)
        nodes, leaders = shown(scene)
    sets = ("storage", "broker-a"), ("offsets", "offsets"), ("lockmgr", "lockmgr")
    assert [nodes[each] for each in sets] == [2, 1, 2]
    assert [leaders[each] for each in sets] == [1, 0, 1]
    assert len(nodes) == len(leaders) == len(sets)


async def test_broker_with_queues_is_shown_without_registered_nodes() -> None:
    async with open_scene() as scene:
        spread = (QueueSpread("broker-a", 2), QueueSpread("broker-b", 2))
        scene.catalog.topics["t"] = Topic(name="t", topic_id=1, spread=spread, create_unix_ms=0)
        register(scene, "storage", "broker-a", "", leader=True)
        nodes, leaders = shown(scene)
    assert nodes == leaders == {("storage", "broker-a"): 1, ("storage", "broker-b"): 0}


def test_rejections_with_an_alert_are_zero_before_the_first_one() -> None:
    """Otherwise the increase over the first one is 0, and no alert fires."""
    registry = CollectorRegistry()
    MembershipMetrics(registry)
    for reason in ("SUBSCRIPTION_CONFLICT", "CLIENT_ID_IN_USE"):
        labels = {"reason": reason}
        assert registry.get_sample_value("baton_nameserver_rejections_total", labels) == 0
