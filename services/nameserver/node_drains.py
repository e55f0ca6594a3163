"""Drains: an operator takes a node out of elections for maintenance, and puts it back."""

from __future__ import annotations

import asyncio
import logging

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq.errors import InvalidArgument, LimitExceeded, NotDrainable
from batonmq_server.nameserver.core.node_drain import DrainScene, check_service, successors
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from batonmq_server.runtime.replication.replica_set import ReplicaSetRecord, decode_record

log = logging.getLogger(__name__)

BY_CHARS_MAX = 200
CATCH_UP_S = 5.0


class NodeDrains:
    """Carries out DrainNode and UndrainNode from etcd's own state, and lists drained nodes.

    Attributes:
        mirror: Mirror of `drains/`; to be run as one task.
    """

    def __init__(self, etcd: EtcdSession) -> None:
        self._etcd = etcd
        self.mirror = EtcdMirror(etcd, "drains/")

    def drained(self) -> list[pb.DrainedNode]:
        """Return the drained nodes by service and node id."""
        values = list(self.mirror.values.values())
        nodes = [pb.DrainedNode.FromString(stored.value) for stored in values]
        return sorted(nodes, key=lambda node: (node.service, node.node_id))

    async def drain(self, request: pb.DrainNodeRequest) -> pb.DrainNodeResponse:
        """Carry out the call; see the proto."""
        service = _checked_service(request.service, request.node_id)
        _check_by(request)
        node = await self._live_node(service, request.node_id)
        record = decode_record(
            await self._etcd.get(self._etcd.key("replicas", service, node.replica_set))
        )
        scene = await self._scene(service, node, record)
        already = node.node_id in scene.drained
        others = successors(scene)
        if request.execute and not already:
            await self._mark(service, node, record, others, request.by)
        return pb.DrainNodeResponse(
            replica_set=node.replica_set,
            leader=node.leader,
            successors=others,
            already_drained=already,
        )

    async def undrain(self, request: pb.UndrainNodeRequest) -> pb.UndrainNodeResponse:
        """Carry out the call; see the proto."""
        service = _checked_service(request.service, request.node_id)
        key = self._etcd.key("drains", service, request.node_id)
        stored = await self._etcd.get(key)
        if request.execute and stored is not None:
            # A mark that is gone meanwhile is what the call asks for.
            revision = await self._etcd.txn(
                compare=[Compare(key, create_revision=stored.create_revision)], delete=[key]
            )
            await self._caught_up(revision)
            log.info("node undrained service=%s node_id=%s", service, request.node_id)
        return pb.UndrainNodeResponse(was_drained=stored is not None)

    async def _live_node(self, service: str, node_id: str) -> pb.Node:
        stored = await self._etcd.get(self._etcd.key("nodes", service, node_id))
        if stored is None:
            raise InvalidArgument(
                f"{node_id} is not a live node of {service}",
                remedy="Name a node that `baton cluster status` shows.",
                facts={"field": "node_id"},
            )
        node = node_from_bytes(stored.value)
        node.replica_set = node.replica_set or node_id
        return node

    async def _scene(self, service: str, node: pb.Node, record: ReplicaSetRecord) -> DrainScene:
        entries, _ = await self._etcd.get_prefix(f"nodes/{service}/")
        nodes = [node_from_bytes(stored.value) for stored in entries]
        marks, _ = await self._etcd.get_prefix(f"drains/{service}/")
        return DrainScene(
            node.replica_set,
            node.node_id,
            record.in_sync,
            frozenset(one.node_id for one in nodes if one.replica_set == node.replica_set),
            frozenset(pb.DrainedNode.FromString(mark.value).node_id for mark in marks),
            record.min_in_sync,
        )

    async def _mark(
        self,
        service: str,
        node: pb.Node,
        record: ReplicaSetRecord,
        others: tuple[str, ...],
        by: str,
    ) -> None:
        """Write the mark if the set is unchanged, and none of the others was drained meanwhile."""
        etcd = self._etcd
        mark = pb.DrainedNode(
            service=node.service,
            node_id=node.node_id,
            replica_set=node.replica_set,
            unix_ms=etcd.clock.unix_ms(),
            by=by,
        )
        key = etcd.key("drains", service, node.node_id)
        revision = await etcd.txn(
            compare=[
                Compare(
                    etcd.key("replicas", service, node.replica_set),
                    mod_revision=record.mod_revision,
                ),
                *(Compare(etcd.key("drains", service, name), create_revision=0) for name in others),
            ],
            put=[Put(key, mark.SerializeToString())],
        )
        if revision is None:
            raise NotDrainable(
                f"{node.replica_set} changed while {node.node_id} was being drained",
                remedy="Repeat the command.",
                facts={"node_id": node.node_id},
            )
        await self._caught_up(revision)
        log.info(
            "node drained service=%s node_id=%s replica_set=%s by=%s",
            service,
            node.node_id,
            node.replica_set,
            by,
        )

    async def _caught_up(self, revision: int | None) -> None:
        """Wait until `drained` shows the write, for a while; the write is in force anyway."""
        try:
            async with asyncio.timeout(CATCH_UP_S):
                await self.mirror.reached(revision or 0)
        except TimeoutError:
            log.warning("the mirror of drains lags behind revision=%s", revision)


def _checked_service(kind: pb.ServiceKind.ValueType, node_id: str) -> str:
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


def _check_by(request: pb.DrainNodeRequest) -> None:
    if request.execute and not request.by:
        raise InvalidArgument("by is required with execute", facts={"field": "by"})
    if len(request.by) > BY_CHARS_MAX:
        raise LimitExceeded(
            f"by has {len(request.by)} characters; the limit is {BY_CHARS_MAX}",
            facts={"field": "by", "limit": BY_CHARS_MAX, "actual": len(request.by)},
        )
