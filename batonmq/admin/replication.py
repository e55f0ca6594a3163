"""Replication state of offsets and storage, and unclean election.

The leader of each replica set reports the state. If every in-sync node of a set is lost, an
operator can allow another node to be elected, which loses data.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import grpc.aio

from baton.nameserver.v1 import nameserver_service_pb2 as nameserver_pb
from baton.offsets.v1 import replication_service_pb2 as offsets_pb
from baton.storage.v1 import replication_service_pb2 as storage_pb
from batonmq._common.rpc import from_rpc_error
from batonmq.admin.admin import Admin
from batonmq.admin.reports import Node
from batonmq.errors import BatonError

ELECT_TIMEOUT_S = 10.0
LEADER_TIMEOUT_S = 3.0
"""Timeout of a call to a leader; short, because a set may have no leader at the moment."""


_WITH_COPIES = ("offsets", "storage")
_Described = storage_pb.DescribeReplicasResponse | offsets_pb.DescribeReplicasResponse


@dataclass(frozen=True, slots=True)
class Replica:
    """One node of a replica set.

    Attributes:
        leader: Whether it is the leader, which reported this.
        epoch: Epoch of the leader.
        in_sync: Whether it has every acknowledged write, and keeps up.
        position: End of what it has durably: a version at offsets, bytes of the log at storage.
        lag: Distance to the leader, in the same unit.
        lag_ms: Time since it last had everything; None if unknown.
        problem: Permanent error that stops replication; empty if there is none.
    """

    service: str
    replica_set: str
    node_id: str
    epoch: int
    leader: bool
    in_sync: bool
    position: int
    lag: int
    lag_ms: int | None
    problem: str


async def replicas(
    admin: Admin, nodes: Iterable[Node]
) -> tuple[dict[tuple[str, str], Replica], list[str]]:
    """Return the replicas by service and node id, and the errors of leaders that failed.

    Args:
        nodes: All live nodes.
    """
    sets = sorted({(n.service, n.replica_set) for n in nodes if n.service in _WITH_COPIES})
    copies_by_node: dict[tuple[str, str], Replica] = {}
    problems: list[str] = []

    async def ask(service: str, name: str) -> None:
        try:
            copies = await replicas_of(admin, service, name, timeout_s=LEADER_TIMEOUT_S)
        except BatonError as error:
            problems.append(f"{service} {name}: {error.reason}: {error.message}")
        else:
            copies_by_node.update({(service, copy.node_id): copy for copy in copies})

    async with asyncio.TaskGroup() as tasks:
        for service, name in sets:
            tasks.create_task(ask(service, name))
    return copies_by_node, sorted(problems)


async def replicas_of(
    admin: Admin, service: str, replica_set: str, *, timeout_s: float | None = None
) -> list[Replica]:
    """Return the nodes of a replica set; empty if it is a single node without replication.

    Args:
        service: `offsets` or `storage`.
        replica_set: Name of the set; for storage the name of the broker.
        timeout_s: Timeout; None for that of `admin`.

    Raises:
        BatonError: The leader does not answer.
    """

    async def ask(limit_s: float) -> _Described | None:
        try:
            if service == "storage":
                storage = await admin.directory.storage_replication(replica_set)
                request = storage_pb.DescribeReplicasRequest()
                return await storage.DescribeReplicas(request, timeout=limit_s)
            offsets = await admin.directory.offsets_replication(replica_set)
            return await offsets.DescribeReplicas(
                offsets_pb.DescribeReplicasRequest(), timeout=limit_s
            )
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return None
            raise

    answer = await admin.ask(ask, timeout_s=timeout_s)
    if answer is None:
        return []
    return [
        Replica(
            service,
            replica_set,
            one.node_id,
            answer.epoch,
            one.leader,
            one.in_sync,
            one.position,
            one.lag,
            None if one.lag_ms < 0 else one.lag_ms,
            one.problem,
        )
        for one in answer.replicas
    ]


@dataclass(frozen=True, slots=True)
class ReplicaPosition:
    """A live node of a set, and the end of its log when it registered."""

    node_id: str
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """An unclean election: `by` allowed `node_id` to be elected instead of the in-sync nodes."""

    node_id: str
    lost: tuple[str, ...]
    epoch: int
    unix_ms: int
    by: str


@dataclass(frozen=True, slots=True)
class ElectionPlan:
    """The effect of an unclean election of a node.

    Attributes:
        epoch: Epoch of the last leader.
        served_epoch: Last epoch in which a leader answered requests.
        lost: The in-sync nodes, all down; writes that only they have are lost.
        up: The live nodes, which could be elected.
        accepted: Earlier unclean elections, newest last.
    """

    service: str
    replica_set: str
    node_id: str
    epoch: int
    served_epoch: int
    lost: tuple[str, ...]
    up: tuple[ReplicaPosition, ...]
    accepted: tuple[AcceptedLoss, ...]


async def elect(
    admin: Admin, service: str, replica_set: str, node_id: str, *, by: str = ""
) -> ElectionPlan:
    """Allow an unclean election of `node_id`, after all in-sync nodes are lost. Not retried.

    Args:
        service: `offsets` or `storage`.
        by: Name of the operator; empty for a dry run, which changes nothing.

    Returns:
        What the election loses.

    Raises:
        InvalidArgument: The set does not exist, or the node is not up.
        StillInSync: A node can be elected without loss.
    """
    request = nameserver_pb.ElectReplicaRequest(
        service=nameserver_pb.ServiceKind.Value(f"SERVICE_KIND_{service.upper()}"),
        replica_set=replica_set,
        node_id=node_id,
        execute=bool(by),
        by=by,
    )
    try:
        stub = admin.directory.nameserver()
        answer = await stub.ElectReplica(request, timeout=ELECT_TIMEOUT_S)
    except grpc.aio.AioRpcError as failure:
        raise from_rpc_error(failure) from failure
    before = answer.before
    return ElectionPlan(
        service,
        replica_set,
        node_id,
        before.epoch,
        before.served_epoch,
        tuple(before.in_sync),
        tuple(ReplicaPosition(n.node_id, n.replica_epoch, n.replica_version) for n in answer.up),
        tuple(
            AcceptedLoss(loss.node_id, tuple(loss.lost), loss.epoch, loss.unix_ms, loss.by)
            for loss in before.accepted_losses
        ),
    )
