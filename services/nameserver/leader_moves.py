"""Moves of a leadership to a named node of the set."""

from __future__ import annotations

import asyncio
import contextlib
import logging

from baton.nameserver.v1 import nameserver_service_pb2 as pb
from batonmq._common import timeouts
from batonmq.errors import NoQuorum, NotDrainable
from batonmq_server.nameserver.core.node_drain import check_successor
from batonmq_server.nameserver.node_drains import (
    FoundNode,
    NodeDrains,
    check_by,
    checked_service,
)
from batonmq_server.nameserver.node_proto import node_from_bytes
from batonmq_server.runtime.election import drain_key
from batonmq_server.runtime.etcd.session import Compare, Lease, Put

log = logging.getLogger(__name__)

EXCLUDED_MS = 10_000
"""Without a nameserver that ends the move, the other nodes may be elected again after this time."""
WAIT_S = 8.0
POLL_S = 0.1


class LeaderMoves:
    """Carries out MoveLeader: excludes all other nodes of the set from its election for a while.

    The marks are those of drains, under a lease: a leader hands over as when it is drained, and
    only the named node can follow it.
    """

    def __init__(self, drains: NodeDrains) -> None:
        self._drains, self._etcd = drains, drains.etcd

    async def move(self, request: pb.MoveLeaderRequest) -> pb.MoveLeaderResponse:
        """Carry out the call; see the proto."""
        service = checked_service(request.service, request.node_id)
        check_by(request)
        found = await self._drains.find(service, request.node_id)
        check_successor(found.scene)
        before = found.record.leader
        answer = pb.MoveLeaderResponse(
            replica_set=found.node.replica_set, leader_before=before, leader=before
        )
        if request.execute and before != request.node_id:
            await self._move(found, request.by)
            answer.leader = (await self._drains.find(service, request.node_id)).record.leader
        return answer

    async def _move(self, found: FoundNode, by: str) -> None:
        lease = await self._etcd.lease(EXCLUDED_MS)
        try:
            await self._exclude_others(found, lease, by)
            with contextlib.suppress(TimeoutError):
                async with timeouts.timeout(WAIT_S):
                    await self._led(found)
        finally:
            with contextlib.suppress(NoQuorum):
                await lease.revoke()

    async def _exclude_others(self, found: FoundNode, lease: Lease, by: str) -> None:
        """Write a mark for each other node that has none, if the set is unchanged."""
        etcd, scene = self._etcd, found.scene
        election = etcd.key("elections", found.service, scene.replica_set)
        others = sorted((scene.in_sync | scene.up) - scene.drained - {scene.node_id})
        record = etcd.key("replicas", found.service, scene.replica_set)
        revision = await etcd.txn(
            compare=[
                Compare(record, mod_revision=found.record.mod_revision),
                *(
                    Compare(drain_key(election, name), create_revision=0)
                    for name in (scene.node_id, *others)
                ),
            ],
            put=[
                Put(drain_key(election, name), self._drains.mark(found, name, by), lease)
                for name in others
            ],
        )
        if revision is None:
            raise NotDrainable(
                f"{scene.replica_set} changed while its leadership was being moved",
                remedy="Repeat the command.",
                facts={"node_id": scene.node_id},
            )
        log.info(
            "leadership moves service=%s replica_set=%s to=%s by=%s",
            found.service,
            scene.replica_set,
            scene.node_id,
            by,
        )

    async def _led(self, found: FoundNode) -> None:
        """Return once the node serves as the leader, or is gone."""
        key = self._etcd.key("nodes", found.service, found.node.node_id)
        while True:
            stored = await self._etcd.get(key)
            if stored is None or node_from_bytes(stored.value).leader:
                return
            await asyncio.sleep(POLL_S)
