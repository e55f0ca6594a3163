"""How far the copies of a cluster's state have come, as their masters tell it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import grpc
import grpc.aio
from baton.common.v1 import replicas_pb2
from baton.offsets.v1 import replication_service_pb2 as offsets_pb
from baton.storage.v1 import replication_service_pb2 as storage_pb

from batonmq.admin import Admin


@dataclass(frozen=True, slots=True)
class Replica:
    """One node of a replica set.

    Attributes:
        master: Whether it is the one that answers.
        in_sync: Whether it has everything that was answered for, and so may be elected.
        position: Up to where it has everything, durably: a version, or bytes of the log.
        lag: What it lacks, in the same unit.
        lag_ms: For how long it has not had everything; None if nobody knows.
    """

    service: str
    replica_set: str
    node_id: str
    master: bool
    in_sync: bool
    position: int
    lag: int
    lag_ms: int | None


async def replicas_of(admin: Admin, service: str, replica_set: str) -> list[Replica]:
    """The nodes of a replica set, by node id; none if it is a single node without slaves.

    Args:
        service: `offsets` or `storage`.
        replica_set: Its name; of storage that of the broker.

    Raises:
        BatonError: the master does not answer.
    """

    async def ask(limit_s: float) -> Iterable[replicas_pb2.Replica]:
        try:
            if service == "storage":
                storage = await admin.directory.storage_replication(replica_set)
                request = storage_pb.DescribeReplicasRequest()
                return (await storage.DescribeReplicas(request, timeout=limit_s)).replicas
            offsets = await admin.directory.offsets_replication(replica_set)
            return (
                await offsets.DescribeReplicas(
                    offsets_pb.DescribeReplicasRequest(), timeout=limit_s
                )
            ).replicas
        except grpc.aio.AioRpcError as error:
            if error.code() is grpc.StatusCode.UNIMPLEMENTED:
                return ()
            raise

    return [
        Replica(
            service,
            replica_set,
            one.node_id,
            one.master,
            one.in_sync,
            one.position,
            one.lag,
            None if one.lag_ms < 0 else one.lag_ms,
        )
        for one in await admin.ask(ask)
    ]
