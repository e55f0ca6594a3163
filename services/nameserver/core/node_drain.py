"""When a node of a replica set may be drained for maintenance. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq.errors import InvalidArgument, NotDrainable


@dataclass(frozen=True, slots=True)
class DrainScene:
    """A replica set at the moment of a drain.

    Attributes:
        node_id: The node to drain.
        leads: Whether it leads the set.
        in_sync: In-sync set, as etcd lists it; it may have nodes that are down.
        up: Registered nodes of the set.
        drained: Drained nodes of the set.
        min_in_sync: In-sync replicas that a write needs; 0 if not known.
    """

    replica_set: str
    node_id: str
    leads: bool
    in_sync: frozenset[str]
    up: frozenset[str]
    drained: frozenset[str]
    min_in_sync: int


def successors(scene: DrainScene) -> tuple[str, ...]:
    """Return the nodes that may lead while the node is drained, by node id.

    There may be none if the node is drained already and does not lead.

    Raises:
        NotDrainable: there is none, or they are fewer than a write needs; the message says why for
            each other node.
    """
    others = (scene.in_sync & scene.up) - scene.drained - {scene.node_id}
    if scene.node_id in scene.drained and not scene.leads:
        return tuple(sorted(others))
    facts: dict[str, str | int] = {
        "node_id": scene.node_id,
        "in_sync": len(others),
        "limit": scene.min_in_sync,
    }
    if not others:
        raise NotDrainable(
            f"no node of {scene.replica_set} could lead without {scene.node_id}: {_states(scene)}",
            facts=facts,
        )
    if len(others) < scene.min_in_sync:
        raise NotDrainable(
            f"{scene.replica_set} would have {len(others)} in-sync nodes without {scene.node_id}, "
            f"and rejects writes with fewer than {scene.min_in_sync}: {_states(scene)}",
            facts=facts,
        )
    return tuple(sorted(others))


def check_successor(scene: DrainScene) -> None:
    """Return if the node may lead its set, or leads it.

    Raises:
        NotDrainable: it is not in sync, or drained.
    """
    problem = "drained" if scene.node_id in scene.drained else "not in sync"
    if problem == "drained" or scene.node_id not in scene.in_sync:
        raise NotDrainable(
            f"{scene.node_id} can't lead {scene.replica_set}: it is {problem}",
            remedy=f"End the drain of the node: baton cluster undrain {scene.node_id}."
            if problem == "drained"
            else "Wait until it is in sync: baton cluster replication.",
            facts={"node_id": scene.node_id},
        )


def _states(scene: DrainScene) -> str:
    """Return in words what each other node of the set is."""

    def state(name: str) -> str:
        if name not in scene.up:
            return "down"
        if name not in scene.in_sync:
            return "not in sync"
        return "drained" if name in scene.drained else "in sync"

    names = sorted((scene.in_sync | scene.up | scene.drained) - {scene.node_id})
    if not names:
        return "it has no other node"
    return ", ".join(f"{name} is {state(name)}" for name in names)


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
