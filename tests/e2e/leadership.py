"""Waits until a service has a leader, and until its replicas are in sync."""

from __future__ import annotations

from batonmq.admin.admin import Admin
from batonmq.admin.replication import replicas_of
from batonmq.errors import BatonError
from batonmq_server.local.cluster import LocalCluster
from batonmq_server.local.cluster_state import leader_process
from tests.support.conditions import until


async def leader(
    admin: Admin, cluster: LocalCluster, service: str, but: str = "", broker: str = ""
) -> str:
    """Return the name of the leader, once it is another process than `but`.

    Args:
        broker: Broker whose storage leader is returned.
    """
    names: list[str] = []

    async def look() -> bool:
        name = await leader_process(admin, cluster, service, broker)
        names[:] = [name] if name is not None else []
        return bool(names) and names[0] != but

    await until(look, timeout_s=60)
    return names[0]


async def in_sync(admin: Admin, service: str, broker: str) -> None:
    """Wait until every replica is in sync."""

    async def look() -> bool:
        if service == "lockmgr":
            return True
        try:
            replica_list = await replicas_of(admin, service, broker)
        except BatonError:
            return False
        return bool(replica_list) and all(one.in_sync for one in replica_list)

    await until(look, timeout_s=60)
