"""The state of a local cluster: its leaders, and what is missing."""

from __future__ import annotations

from batonmq.admin.admin import Admin
from batonmq.admin.replication import replicas_of
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster


async def leader_process(
    admin: Admin, cluster: LocalCluster, service: str, replica_set: str = ""
) -> str | None:
    """Return the name of the leader's process, or of any process if the service has no leader.

    Args:
        replica_set: For storage the broker; empty if there is only one set.

    Returns:
        None if there is no leader.

    Raises:
        BatonError: no nameserver answers.
    """
    nodes = [
        node
        for node in (await admin.cluster()).nodes
        if node.service == service and node.leader and replica_set in ("", node.replica_set)
    ]
    newest = max(nodes, key=lambda node: node.epoch, default=None)
    if newest is None:
        return None
    names = cluster.options.names_of(service)
    return next((name for name in names if cluster.addresses[name] == newest.address), None)


async def first_problem(admin: Admin, cluster: LocalCluster) -> str:
    """Return a problem: a process that is not registered, a missing leader, a replica that is not
    in sync; empty if there is no problem.
    """
    for endpoint in cluster.addresses["etcd"].split(","):
        if not await cluster.is_etcd_healthy(endpoint):
            return f"etcd at {endpoint} does not answer"
    try:
        nodes = (await admin.cluster()).nodes
        kept = [node for node in nodes if node.service in ("storage", "offsets")]
        sets = sorted({(node.service, node.replica_set) for node in kept})
        copies = [one for each in sets for one in await replicas_of(admin, *each)]
    except BatonError as error:
        return f"{error.reason}: {error.message}"
    there = {node.address for node in nodes}
    away = [name for name in cluster.options.names if cluster.addresses[name] not in there]
    behind = [one.node_id for one in copies if not one.in_sync]
    if not any(node.service == "lockmgr" and node.leader for node in nodes):
        return "there is no leader of the lock managers"
    return f"not registered: {away}; not in sync: {behind}" if away or behind else ""
