"""Unclean election: an operator allows a node outside the in-sync set to be elected.

It is for a replica set that has lost all in-sync nodes; changes that only they have are discarded.
"""

from __future__ import annotations

import logging

from baton.common.v1 import replicas_pb2
from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.errors import InvalidArgument, LimitExceeded, StillInSync
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.runtime.election import drain_key
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record

log = logging.getLogger(__name__)

BY_CHARS_MAX = 200
_SERVICES = {pb.SERVICE_KIND_STORAGE: "storage", pb.SERVICE_KIND_OFFSETS: "offsets"}


class UncleanElection:
    """Carries out ElectReplica, from etcd's own state: a copy might be older than the set."""

    def __init__(self, etcd: EtcdSession) -> None:
        self._etcd = etcd

    async def elect(self, request: pb.ElectReplicaRequest) -> pb.ElectReplicaResponse:
        """Carry out the call; see the proto."""
        service = _checked(request)
        key = self._etcd.key("replicas", service, request.replica_set)
        record = decode_record(await self._etcd.get(key))
        up = await self._up(service, request.replica_set)
        _check(request, record, up)
        await self._check_drained(service, request)
        if request.execute:
            await self._write(service, request, record)
        before = replicas_pb2.ReplicaSet.FromString(record.encode())
        return pb.ElectReplicaResponse(before=before, up=[up[name] for name in sorted(up)])

    async def _up(self, service: str, name: str) -> dict[str, pb.Node]:
        entries, _ = await self._etcd.get_prefix(f"nodes/{service}/")
        nodes = [node_from_bytes(stored.value) for stored in entries]
        return {node.node_id: node for node in nodes if node.replica_set == name}

    async def _check_drained(self, service: str, request: pb.ElectReplicaRequest) -> None:
        election = self._etcd.key("elections", service, request.replica_set)
        if await self._etcd.get(drain_key(election, request.node_id)) is not None:
            raise InvalidArgument(
                f"{request.node_id} is drained, so it would not be elected",
                remedy=f"baton cluster undrain {request.node_id}",
                facts={"field": "node_id"},
            )

    async def _write(
        self, service: str, request: pb.ElectReplicaRequest, record: ReplicaSetRecord
    ) -> None:
        """Write the accepted loss, if the set still has no leader and no in-sync node is up."""
        etcd, lost = self._etcd, sorted(record.in_sync)
        loss = replicas_pb2.AcceptedLoss(
            node_id=request.node_id,
            lost=lost,
            epoch=record.epoch,
            unix_ms=etcd.clock.unix_ms(),
            by=request.by,
        )
        key = etcd.key("replicas", service, request.replica_set)
        absent = [
            etcd.key("elections", service, request.replica_set),
            *(etcd.key("nodes", service, name) for name in lost),
        ]
        revision = await etcd.txn(
            compare=[
                Compare(key, mod_revision=record.mod_revision),
                *(Compare(one, create_revision=0) for one in absent),
            ],
            put=[Put(key, record.with_accepted_loss(loss).encode())],
        )
        if revision is None:
            raise StillInSync(
                f"{request.replica_set} has a leader, or a node of its in-sync set is up again",
                remedy="Check the replica set again: baton cluster replication.",
            )
        log.warning(
            "loss accepted service=%s replica_set=%s node_id=%s lost=%s epoch=%d by=%s",
            service,
            request.replica_set,
            request.node_id,
            ",".join(lost),
            record.epoch,
            request.by,
        )


def _checked(request: pb.ElectReplicaRequest) -> str:
    """Return the name of the service if the request is well-formed.

    Raises:
        InvalidArgument, LimitExceeded: a field is missing or malformed.
    """
    service = _SERVICES.get(request.service)
    if service is None:
        raise InvalidArgument(
            "service must be SERVICE_KIND_STORAGE or SERVICE_KIND_OFFSETS",
            facts={"field": "service"},
        )
    for field in ("replica_set", "node_id"):
        value = getattr(request, field)
        if not value or "/" in value:
            raise InvalidArgument(
                f"{field} must be a name without '/', got {value!r}", facts={"field": field}
            )
    if request.execute and not request.by:
        raise InvalidArgument("by is required with execute", facts={"field": "by"})
    if len(request.by) > BY_CHARS_MAX:
        raise LimitExceeded(
            f"by has {len(request.by)} characters; the limit is {BY_CHARS_MAX}",
            facts={"field": "by", "limit": BY_CHARS_MAX, "actual": len(request.by)},
        )
    return service


def _check(
    request: pb.ElectReplicaRequest, record: ReplicaSetRecord, up: dict[str, pb.Node]
) -> None:
    """Return if the election is possible and necessary.

    Raises:
        InvalidArgument: the set does not exist, or the node is not up.
        StillInSync: a node of the in-sync set is up.
    """
    if not record.mod_revision:
        raise InvalidArgument(
            f"replica set {request.replica_set} does not exist",
            remedy="Use a replica set that baton cluster replication shows.",
            facts={"field": "replica_set"},
        )
    if request.node_id not in up:
        raise InvalidArgument(
            f"{request.node_id} is not a live node of {request.replica_set}",
            remedy="Start the node as a member of the set first.",
            facts={"field": "node_id"},
        )
    for name in sorted(record.in_sync & up.keys()):
        raise StillInSync(
            f"node {name} of the in-sync set is up",
            remedy=f"Wait until {name} is elected. If it can't be elected, stop it for good, then "
            "repeat the command.",
            facts={"node_id": name},
        )
