"""Leaderships of replica sets: spreading them evenly over the hosts, and moving one."""

from __future__ import annotations

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.admin._leader_plan import LeaderMove, LedSet, plan_moves
from batonmq.admin.admin import Admin
from batonmq.admin.replication import replicas

__all__ = ["LeaderMove", "move_leader", "plan_leader_spread"]

MOVE_TIMEOUT_S = 15.0


async def plan_leader_spread(admin: Admin, service: str) -> tuple[list[LeaderMove], list[str]]:
    """Return the moves that spread the leaders of a service evenly, and errors of its leaders.

    Only nodes that are up, in sync and not drained count as possible leaders. The host of a node is
    that of its address.

    Args:
        service: `offsets` or `storage`.
    """
    cluster = await admin.cluster()
    nodes = [node for node in cluster.nodes if node.service == service]
    copies, problems = await replicas(admin, nodes)
    drained = {one.node_id for one in cluster.drained if one.service == service}
    hosts = {
        node.node_id: node.address.rpartition(":")[0]
        for node in nodes
        if node.leader
        or (
            (copy := copies.get((service, node.node_id))) is not None
            and copy.in_sync
            and not copy.problem
            and node.node_id not in drained
        )
    }
    sets = [
        LedSet(
            service,
            leader.replica_set,
            leader.node_id,
            {
                node.node_id: hosts[node.node_id]
                for node in nodes
                if node.replica_set == leader.replica_set and node.node_id in hosts
            },
        )
        for leader in nodes
        if leader.leader and (service, leader.node_id) in copies
    ]
    return plan_moves(sorted(sets, key=lambda one: one.replica_set)), problems


async def move_leader(admin: Admin, service: str, node_id: str, *, by: str = "") -> str:
    """Make a node the leader of its set; return the leader after the call. Not retried.

    Args:
        service: `offsets` or `storage`.
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: The node is not up, or of a service without replica sets.
        NotDrainable: The node is not in sync, or drained.
    """
    request = pb.MoveLeaderRequest(
        service=pb.ServiceKind.Value(f"SERVICE_KIND_{service.upper()}"),
        node_id=node_id,
        execute=bool(by),
        by=by,
    )
    try:
        answer = await admin.directory.nameserver().MoveLeader(request, timeout=MOVE_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    return answer.leader
