"""The gRPC face of replication: what the leader tells its followers."""

from __future__ import annotations

from collections.abc import AsyncIterator
from typing import Any

import grpc.aio

from baton.offsets.v1 import replication_service_pb2 as pb
from baton.offsets.v1 import replication_service_pb2_grpc as pb_grpc
from batonmq.errors import InvalidArgument, LimitExceeded, OldEpoch, OldEpochDetail
from batonmq_server.offsets.core.change_log import StoreChange
from batonmq_server.offsets.follower import digest_of
from batonmq_server.offsets.persistence import ProgressStore, change_log_of
from batonmq_server.offsets.role import Role
from batonmq_server.runtime.position import Position
from batonmq_server.runtime.stuck import PROBLEM_CHARS_MAX

Context = grpc.aio.ServicerContext[Any, Any]
HOLD_MS_MAX = 10_000
PART_ENTRIES = 4_096


class ReplicationServicer(pb_grpc.ReplicationServiceServicer):
    """See replication_service.proto."""

    def __init__(self, role: Role, disk: ProgressStore) -> None:
        self._role, self._disk = role, disk

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """See the proto."""
        leadership = self._role.leadership
        at = Position(request.position.epoch, request.position.version)
        self._check(request.node_id, at.epoch)
        if request.hold_ms > HOLD_MS_MAX:
            raise LimitExceeded(
                f"hold_ms is {request.hold_ms}; the limit is {HOLD_MS_MAX}",
                facts={"field": "hold_ms", "limit": HOLD_MS_MAX, "actual": request.hold_ms},
            )
        leadership.keeper.told(request.node_id, request.problem[:PROBLEM_CHARS_MAX])
        found = await leadership.fetch(request.node_id, at, request.hold_ms)
        self._role.check_still(leadership)
        return pb.FetchResponse(
            epoch=leadership.epoch,
            changes=map(_change_pb, found or ()),
            read_all=found is None,
            version=leadership.position.version,
        )

    async def ReadAll(
        self, request: pb.ReadAllRequest, context: Context
    ) -> AsyncIterator[pb.ReadAllResponse]:
        """See the proto."""
        self._check(request.node_id, request.epoch)
        entries, at = await self._state()
        for begin in range(0, max(len(entries), 1), PART_ENTRIES):
            part = entries[begin : begin + PART_ENTRIES]
            self._role.check()
            yield pb.ReadAllResponse(
                position=at,
                entries=[pb.Entry(key=key, value=value) for key, value in part],
                last=begin + PART_ENTRIES >= len(entries),
            )

    async def Digest(self, request: pb.DigestRequest, context: Context) -> pb.DigestResponse:
        """See the proto."""
        self._check(request.node_id, request.epoch)
        entries, at = await self._state()
        digest = await digest_of(entries)
        self._role.check()
        return pb.DigestResponse(position=at, digest=digest)

    async def DescribeReplicas(
        self, request: pb.DescribeReplicasRequest, context: Context
    ) -> pb.DescribeReplicasResponse:
        """See the proto."""
        keeper = self._role.leadership.keeper
        return pb.DescribeReplicasResponse(
            replica_set=self._role.replica_set,
            epoch=keeper.epoch,
            confirmed=keeper.books.confirmed,
            min_in_sync=keeper.policy.min_in_sync,
            replicas=keeper.replicas(),
        )

    async def _state(self) -> tuple[list[tuple[bytes, bytes]], pb.Position]:
        entries = await self._disk.snapshot()
        at = change_log_of(dict(entries), kept_bytes_max=0).position
        return entries, pb.Position(epoch=at.epoch, version=at.version)

    def _check(self, name: str, seen_epoch: int) -> None:
        """Refuse who is nobody, or knows a newer leader.

        Raises:
            NotLeader, InvalidArgument, OldEpoch: refused.
        """
        epoch = self._role.leadership.epoch
        if not name:
            raise InvalidArgument("a follower has a node id", facts={"field": "node_id"})
        if seen_epoch > epoch:
            raise OldEpoch(
                f"this leader has epoch {epoch}, the follower has seen {seen_epoch}",
                detail=OldEpochDetail(epoch=epoch, current=seen_epoch),
            )


def _change_pb(change: StoreChange) -> pb.Change:
    at = change.position
    return pb.Change(
        position=pb.Position(epoch=at.epoch, version=at.version),
        entries=[pb.Entry(key=key, value=value) for key, value in change.entries],
    )
