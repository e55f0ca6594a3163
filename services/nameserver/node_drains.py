"""Drains: an operator takes a node out of elections for maintenance, and puts it back."""

from __future__ import annotations

import logging
from dataclasses import dataclass

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common import timeouts
from batonmq.errors import InvalidArgument, LimitExceeded, NoQuorum, NotDrainable
from batonmq_server.nameserver.core.node_drain import DrainScene, check_service, successors
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.runtime.election import drain_key
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, KeyValue, Put
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record

log = logging.getLogger(__name__)

BY_CHARS_MAX = 200
LIST_TIMEOUT_S = 1.0
"""A list of drained nodes waits this long for etcd, and then is the last known one."""


@dataclass(frozen=True, slots=True)
class FoundNode:
    """A live node, and its set as etcd has it."""

    service: str
    node: pb.Node
    record: ReplicaSetRecord
    scene: DrainScene


class NodeDrains:
    """Carries out DrainNode and UndrainNode from etcd's own state, and lists drained nodes."""

    def __init__(self, etcd: EtcdSession) -> None:
        self.etcd = etcd
        self._known: list[pb.DrainedNode] = []

    async def drained(self) -> list[pb.DrainedNode]:
        """Return the drained nodes by service and node id; the last known ones without etcd."""
        try:
            async with timeouts.timeout(LIST_TIMEOUT_S):
                nodes = [_mark(stored) for stored in await self._marks("elections/")]
        except (NoQuorum, TimeoutError) as error:
            log.warning("drained nodes not read error=%s", error)
        else:
            self._known = sorted(nodes, key=lambda node: (node.service, node.node_id))
        return self._known

    async def drain(self, request: pb.DrainNodeRequest) -> pb.DrainNodeResponse:
        """Carry out the call; see the proto."""
        service = checked_service(request.service, request.node_id)
        check_by(request)
        found = await self.find(service, request.node_id)
        already = request.node_id in found.scene.drained
        others = successors(found.scene)
        if request.execute and not already:
            await self._write(found, others, request.by)
        return pb.DrainNodeResponse(
            replica_set=found.node.replica_set,
            leader=found.node.leader,
            successors=others,
            already_drained=already,
        )

    async def undrain(self, request: pb.UndrainNodeRequest) -> pb.UndrainNodeResponse:
        """Carry out the call; see the proto."""
        service = checked_service(request.service, request.node_id)
        marks = [
            stored
            for stored in await self._marks(f"elections/{service}/")
            if _mark(stored).node_id == request.node_id
        ]
        if request.execute and marks:
            # A mark that is gone meanwhile is what the call asks for.
            for stored in marks:
                await self.etcd.txn(
                    compare=[Compare(stored.key, create_revision=stored.create_revision)],
                    delete=[stored.key],
                )
            log.info("node undrained service=%s node_id=%s", service, request.node_id)
        return pb.UndrainNodeResponse(was_drained=bool(marks))

    async def _marks(self, prefix: str) -> list[KeyValue]:
        entries, _ = await self.etcd.get_prefix(prefix)
        marks = [stored for stored in entries if stored.key.split("/")[-2] == "drained"]
        return [stored for stored in marks if not stored.lease_id]  # others are moves of a leader

    async def find(self, service: str, node_id: str) -> FoundNode:
        """Return a node and the state of its set.

        Raises:
            InvalidArgument: the node is not up.
        """
        entries, _ = await self.etcd.get_prefix(f"nodes/{service}/")
        nodes = {node.node_id: node for node in (node_from_bytes(one.value) for one in entries)}
        node = nodes.get(node_id)
        if node is None:
            raise InvalidArgument(
                f"{node_id} is not a live node of {service}",
                remedy="Name a node that `baton cluster status` shows.",
                facts={"field": "node_id"},
            )
        node.replica_set = node.replica_set or node_id
        etcd = self.etcd
        record = decode_record(await etcd.get(etcd.key("replicas", service, node.replica_set)))
        marks = await self._marks(etcd.key("elections", service, node.replica_set) + "/")
        scene = DrainScene(
            replica_set=node.replica_set,
            node_id=node_id,
            leads=node.leader,
            in_sync=record.in_sync,
            up=frozenset(
                one.node_id for one in nodes.values() if one.replica_set == node.replica_set
            ),
            drained=frozenset(_mark(stored).node_id for stored in marks),
            min_in_sync=record.min_in_sync,
        )
        return FoundNode(service, node, record, scene)

    def mark(self, found: FoundNode, node_id: str, by: str) -> bytes:
        """Return the value of the mark of a node in the set of `found`."""
        return pb.DrainedNode(
            service=found.node.service,
            node_id=node_id,
            replica_set=found.node.replica_set,
            unix_ms=self.etcd.clock.unix_ms(),
            by=by,
        ).SerializeToString()

    async def _write(self, found: FoundNode, others: tuple[str, ...], by: str) -> None:
        """Write the mark if the set is unchanged, and none of the others was drained meanwhile."""
        etcd, node = self.etcd, found.node
        mark = self.mark(found, node.node_id, by)
        election = etcd.key("elections", found.service, node.replica_set)
        record_key = etcd.key("replicas", found.service, node.replica_set)
        revision = await etcd.txn(
            compare=[
                Compare(record_key, mod_revision=found.record.mod_revision),
                *(Compare(drain_key(election, name), create_revision=0) for name in others),
            ],
            put=[Put(drain_key(election, node.node_id), mark)],
        )
        if revision is None:
            raise NotDrainable(
                f"{node.replica_set} changed while {node.node_id} was being drained",
                remedy="Repeat the command.",
                facts={"node_id": node.node_id},
            )
        log.info(
            "node drained service=%s node_id=%s replica_set=%s by=%s",
            found.service,
            node.node_id,
            node.replica_set,
            by,
        )


def _mark(stored: KeyValue) -> pb.DrainedNode:
    return pb.DrainedNode.FromString(stored.value)


def checked_service(kind: pb.ServiceKind.ValueType, node_id: str) -> str:
    """Return the name of the service if the fields are well-formed.

    Raises:
        InvalidArgument: a field is missing or malformed, or the service has no drains.
    """
    known = kind in pb.ServiceKind.values()
    check_service(pb.ServiceKind.Name(kind).removeprefix("SERVICE_KIND_").lower() if known else "")
    if not node_id or "/" in node_id:
        raise InvalidArgument(
            f"node_id must be a name without '/', got {node_id!r}", facts={"field": "node_id"}
        )
    return "storage" if kind == pb.SERVICE_KIND_STORAGE else "offsets"


def check_by(
    request: pb.DrainNodeRequest
    | pb.MoveLeaderRequest
    | pb.MoveQueuesRequest
    | pb.RemoveBrokerRequest,
) -> None:
    """Return if the name of the operator is well-formed.

    Raises:
        InvalidArgument, LimitExceeded: it is missing or too long.
    """
    if request.execute and not request.by:
        raise InvalidArgument("by is required with execute", facts={"field": "by"})
    if len(request.by) > BY_CHARS_MAX:
        raise LimitExceeded(
            f"by has {len(request.by)} characters; the limit is {BY_CHARS_MAX}",
            facts={"field": "by", "limit": BY_CHARS_MAX, "actual": len(request.by)},
        )
