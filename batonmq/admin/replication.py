"""How far the copies of a cluster's state have come, as their leaders tell it; and what to do when
all that have everything are lost."""

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
"""Bound of the question to a leader: that there is none just now is an answer, too."""


_WITH_COPIES = ("offsets", "storage")
_Described = storage_pb.DescribeReplicasResponse | offsets_pb.DescribeReplicasResponse


@dataclass(frozen=True, slots=True)
class Replica:
    """One node of a replica set.

    Attributes:
        leader: Whether it is the one that answers.
        epoch: Of the leader.
        in_sync: Whether it has everything that was answered for, and so may be elected.
        position: Up to where it has everything, durably: a version, or bytes of the log.
        lag: What it lacks, in the same unit.
        lag_ms: For how long it has not had everything; None if nobody knows.
        problem: Why it can't follow, if that does not pass by itself; else empty.
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
    """Every copy, by service and node id, and which leaders do not answer.

    Args:
        nodes: All that are up.
    """
    sets = sorted({(n.service, n.replica_set) for n in nodes if n.service in _WITH_COPIES})
    found: dict[tuple[str, str], Replica] = {}
    problems: list[str] = []

    async def ask(service: str, name: str) -> None:
        try:
            copies = await replicas_of(admin, service, name, timeout_s=LEADER_TIMEOUT_S)
        except BatonError as error:
            problems.append(f"{service} {name}: {error.reason}: {error.message}")
        else:
            found.update({(service, copy.node_id): copy for copy in copies})

    async with asyncio.TaskGroup() as tasks:
        for service, name in sets:
            tasks.create_task(ask(service, name))
    return found, sorted(problems)


async def replicas_of(
    admin: Admin, service: str, replica_set: str, *, timeout_s: float | None = None
) -> list[Replica]:
    """The nodes of a replica set, by node id; none if it is a single node without followers.

    Args:
        service: `offsets` or `storage`.
        replica_set: Its name; of storage that of the broker.
        timeout_s: Another bound than the usual one.

    Raises:
        BatonError: the leader does not answer.
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
    """A node of a set that is up, and how far its copy had come when it registered."""

    node_id: str
    epoch: int
    position: int


@dataclass(frozen=True, slots=True)
class AcceptedLoss:
    """That somebody has let `node_id` be elected without those that were in sync."""

    node_id: str
    lost: tuple[str, ...]
    epoch: int
    unix_ms: int
    by: str


@dataclass(frozen=True, slots=True)
class ElectionPlan:
    """What is given up if a node is elected that is not in sync.

    Attributes:
        epoch: Of the last leader.
        served_epoch: The last one in which anything was answered.
        lost: Those that are in sync, none of them up: what only they have is given up.
        up: Who could be elected in their place.
        accepted: Earlier losses, the newest last.
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
    """Let a node be elected that is not in sync, as all that are in sync are lost; asked once.

    Args:
        service: `offsets` or `storage`.
        by: Who does it; empty changes nothing, and tells what would be given up.

    Raises:
        InvalidArgument: there is no such set, or the node is not up.
        StillInSync: somebody can be elected without a loss.
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
