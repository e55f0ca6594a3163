"""When a node of a replica set may be drained for maintenance. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.errors import InvalidArgument, NotDrainable


@dataclass(frozen=True, slots=True)
class DrainScene:
    """A replica set at the moment of a drain.

    Attributes:
        node_id: The node to drain.
        in_sync: In-sync set, as etcd lists it; it may have nodes that are down.
        up: Registered nodes of the set.
        drained: Drained nodes of the set.
        min_in_sync: In-sync replicas that a write needs; 0 if not known.
    """

    replica_set: str
    node_id: str
    in_sync: frozenset[str]
    up: frozenset[str]
    drained: frozenset[str]
    min_in_sync: int


def successors(scene: DrainScene) -> tuple[str, ...]:
    """Return the nodes that may lead while the node is drained, by node id.

    Raises:
        NotDrainable: there is none, or they are fewer than a write needs.
    """
    others = (scene.in_sync & scene.up) - scene.drained - {scene.node_id}
    facts: dict[str, str | int] = {
        "node_id": scene.node_id,
        "in_sync": len(others),
        "limit": scene.min_in_sync,
    }
    if not others:
        raise NotDrainable(
            f"no other node of {scene.replica_set} is in sync, up and not drained, so it would "
            f"have no leader without {scene.node_id}",
            facts=facts,
        )
    if len(others) < scene.min_in_sync:
        raise NotDrainable(
            f"{scene.replica_set} would have {len(others)} in-sync nodes without {scene.node_id}, "
            f"and rejects writes with fewer than {scene.min_in_sync}",
            facts=facts,
        )
    return tuple(sorted(others))


_WITHOUT_DRAIN = {
    "lockmgr": "it keeps its state in etcd; when it stops it gives up its leadership, and another "
    "lock manager continues with all locks",
    "nameserver": "it keeps its state in etcd; when it stops its clients use another nameserver",
    "gateway": "it stores nothing; when it stops its clients connect to another gateway",
}


def check_service(service: str) -> None:
    """Return if nodes of the service are drained.

    Raises:
        InvalidArgument: they need not be; the message says why.
    """
    if service in ("storage", "offsets"):
        return
    reason = _WITHOUT_DRAIN.get(service)
    raise InvalidArgument(
        f"a node of {service} is not drained: {reason}"
        if reason
        else "service must be SERVICE_KIND_STORAGE or SERVICE_KIND_OFFSETS",
        remedy=f"Check that another {service} is up (baton cluster status), then stop the process "
        "with SIGTERM."
        if reason
        else "",
        facts={"field": "service"},
    )
