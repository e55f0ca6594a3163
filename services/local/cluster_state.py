"""How a local cluster stands: which process leads, and what is wrong with it."""

from __future__ import annotations

from batonmq.admin.admin import Admin
from batonmq.admin.replication import replicas_of
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster


async def leader_process(
    admin: Admin, cluster: LocalCluster, service: str, replica_set: str = ""
) -> str | None:
    """Name of the process that leads, if one does; of services without a leader any one.

    Args:
        replica_set: Of storage that is the broker; empty if there is but one set.

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
    """Something that is not as it should be: who is not registered, does not lead, or is not in
    sync; empty if there is nothing.
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
        return "no lock manager leads"
    return f"{away} are not registered, {behind} not in sync" if away or behind else ""
