"""Drains of storage and offsets nodes: taking a node out of elections, and putting it back."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass

import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common.rpc import from_rpc_error
from batonmq.admin.admin import Admin
from batonmq.admin.replication import replicas_of
from batonmq.errors import BatonError

DRAIN_TIMEOUT_S = 10.0
_POLL_S = 0.1


@dataclass(frozen=True, slots=True)
class DrainPlan:
    """The effect of a drain.

    Attributes:
        leader: Whether the node led its set before; then it hands over.
        successors: Nodes that may lead instead: in sync, up and not drained.
        already_drained: Whether it was drained before.
    """

    service: str
    node_id: str
    replica_set: str
    leader: bool
    successors: tuple[str, ...]
    already_drained: bool


async def drain_node(admin: Admin, service: str, node_id: str, *, by: str = "") -> DrainPlan:
    """Take a node out of elections; if it leads, it hands over soon after. Not retried.

    Args:
        service: `offsets` or `storage`.
        by: Name of the operator; empty for a dry run, which changes nothing.

    Raises:
        InvalidArgument: The node is not up, or its service needs no drain.
        NotDrainable: Its set would have no leader, or reject writes.
    """
    request = pb.DrainNodeRequest(service=_kind(service), node_id=node_id, execute=bool(by), by=by)
    try:
        answer = await admin.directory.nameserver().DrainNode(request, timeout=DRAIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    return DrainPlan(
        service,
        node_id,
        answer.replica_set,
        answer.leader,
        tuple(answer.successors),
        answer.already_drained,
    )


async def undrain_node(admin: Admin, service: str, node_id: str, *, dry_run: bool = False) -> bool:
    """Allow a drained node to be elected again; return whether it was drained. Not retried.

    Args:
        service: `offsets` or `storage`.
    """
    request = pb.UndrainNodeRequest(service=_kind(service), node_id=node_id, execute=not dry_run)
    try:
        answer = await admin.directory.nameserver().UndrainNode(request, timeout=DRAIN_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    return answer.was_drained


async def next_leader(
    admin: Admin, service: str, replica_set: str, node_id: str, *, timeout_s: float
) -> str:
    """Return the leader of the set once it is another node than `node_id`; empty after a timeout.

    Raises:
        BatonError: No nameserver answers.
    """
    clock = asyncio.get_running_loop()
    deadline_s = clock.time() + timeout_s
    while True:
        leaders = {
            node.node_id
            for node in (await admin.cluster()).nodes
            if (node.service, node.replica_set, node.leader) == (service, replica_set, True)
        }
        if leaders and node_id not in leaders:
            return min(leaders)
        if clock.time() > deadline_s:
            return ""
        await asyncio.sleep(_POLL_S)


async def handover_obstacles(admin: Admin, service: str, plan: DrainPlan) -> list[str]:
    """Return why a drained node still leads: what its set lacks, and what its leader reports."""
    try:
        now = await drain_node(admin, service, plan.node_id)
        copies = await replicas_of(admin, service, plan.replica_set)
    except BatonError as error:
        return [error.message]
    found = [
        f"{one.node_id} can't follow: {one.problem}"
        if one.problem
        else f"{one.node_id} is not in sync by the leader's report, it lacks {one.lag}"
        for one in copies
        if one.node_id in now.successors and (one.problem or not one.in_sync)
    ]
    able = set(now.successors) - {one.node_id for one in copies if one.problem or not one.in_sync}
    if now.leader and able:
        names = ", ".join(sorted(able))
        found.append(
            f"{names} could lead: {plan.node_id} does not read the mark, because it is of an "
            "earlier version or does not reach etcd"
        )
    return found or [f"no node leads {plan.replica_set} at the moment"]


def _kind(service: str) -> pb.ServiceKind.ValueType:
    return pb.ServiceKind.Value(f"SERVICE_KIND_{service.upper()}")
