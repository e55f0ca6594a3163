"""The servicer of replication: the calls of the followers to the leader."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator, Sequence
from typing import Any

import grpc.aio

from baton.offsets.v1 import replication_service_pb2 as pb
from baton.offsets.v1 import replication_service_pb2_grpc as pb_grpc
from batonmq.errors import InvalidArgument, LimitExceeded, OldEpoch, OldEpochDetail
from batonmq_server.offsets.core.change_log import StoreChange
from batonmq_server.offsets.disk import UNLIMITED, StoredEntry
from batonmq_server.offsets.follower import state_digest
from batonmq_server.offsets.newest_position import position_after
from batonmq_server.offsets.persistence import ProgressStore
from batonmq_server.offsets.replica import OffsetsReplica
from batonmq_server.runtime.replication.follow_problem import PROBLEM_CHARS_MAX
from batonmq_server.runtime.replication.position import NO_POSITION, ReplicaPosition

Context = grpc.aio.ServicerContext[Any, Any]
HOLD_MS_MAX = 10_000
ENTRIES_PER_PART = 4_096
PART_BYTES = 1024 * 1024
"""Approximate size of a part of ReadAll; an entry may be larger."""

_POSITION_MAX = (1 << 63) - 1


class ReplicationServicer(pb_grpc.ReplicationServiceServicer):
    """Answers every call of replication_service.proto."""

    def __init__(self, replica: OffsetsReplica, disk: ProgressStore) -> None:
        self._replica, self._disk = replica, disk

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """See the proto."""
        leadership = self._replica.leadership
        at = ReplicaPosition(request.position.epoch, request.position.version)
        self._check(request.node_id, at.epoch)
        bounds = (
            ("hold_ms", request.hold_ms, HOLD_MS_MAX),
            ("position.epoch", at.epoch, _POSITION_MAX),
            ("position.version", at.version, _POSITION_MAX),
        )
        for field, actual, limit in bounds:
            if not 0 <= actual <= limit:
                raise LimitExceeded(
                    f"{field} must be 0 to {limit}, got {actual}",
                    facts={"field": field, "limit": limit, "actual": actual},
                )
        leadership.in_sync_set.set_problem(request.node_id, request.problem[:PROBLEM_CHARS_MAX])
        changes = await leadership.fetch(request.node_id, at, request.hold_ms)
        self._replica.check_still(leadership)
        return pb.FetchResponse(
            epoch=leadership.epoch,
            changes=map(_change_pb, changes or ()),
            read_all=changes is None,
            version=leadership.position.version,
        )

    async def ReadAll(
        self, request: pb.ReadAllRequest, context: Context
    ) -> AsyncIterator[pb.ReadAllResponse]:
        """See the proto."""
        self._check(request.node_id, request.epoch)
        position_entries, entries = await self._disk.read_part(b"")
        position = _position_pb(position_entries)
        sent_count = 0
        for part in _parts(entries):
            sent_count += len(part)
            self._replica.leadership.reach_follower(request.node_id)
            yield pb.ReadAllResponse(
                position=position,
                entries=[pb.Entry(key=key, value=value) for key, value in part],
                last=sent_count == len(entries),
            )

    async def Digest(self, request: pb.DigestRequest, context: Context) -> pb.DigestResponse:
        """See the proto."""
        self._check(request.node_id, request.epoch)
        bytes_max = request.bytes_max or UNLIMITED
        part = await self._disk.read_part(request.after_key, bytes_max=bytes_max)
        entries = part.entries
        digest = await state_digest(entries)
        self._replica.check()
        ended = sum(len(key) + len(value) for key, value in entries) < bytes_max
        return pb.DigestResponse(
            position=_position_pb(part.position),
            digest=digest,
            after_key=request.after_key,
            last_key=b"" if ended else entries[-1][0],
        )

    async def DescribeReplicas(
        self, request: pb.DescribeReplicasRequest, context: Context
    ) -> pb.DescribeReplicasResponse:
        """See the proto."""
        in_sync_set = self._replica.leadership.in_sync_set
        return pb.DescribeReplicasResponse(
            replica_set=self._replica.name,
            epoch=in_sync_set.epoch,
            confirmed=in_sync_set.tracker.confirmed,
            min_in_sync=in_sync_set.policy.min_in_sync,
            replicas=in_sync_set.replicas(),
        )

    def _check(self, node_id: str, seen_epoch: int) -> None:
        """Return if this node may answer a follower.

        Raises:
            NotLeader: this node is not the leader.
            InvalidArgument: the follower has no node id.
            OldEpoch: the follower has seen a newer leader.
        """
        epoch = self._replica.leadership.epoch
        if not node_id:
            raise InvalidArgument("node_id is required", facts={"field": "node_id"})
        if seen_epoch > epoch:
            raise OldEpoch(
                f"this leader has epoch {epoch}, the follower has seen {seen_epoch}",
                detail=OldEpochDetail(epoch=epoch, current=seen_epoch),
            )


def _position_pb(entries: Sequence[StoredEntry]) -> pb.Position:
    at = position_after(NO_POSITION, entries)
    return pb.Position(epoch=at.epoch, version=at.version)


def _change_pb(change: StoreChange) -> pb.Change:
    at = change.position
    return pb.Change(
        position=pb.Position(epoch=at.epoch, version=at.version),
        entries=[pb.Entry(key=key, value=value) for key, value in change.entries],
    )


def _parts(entries: Sequence[StoredEntry]) -> Iterator[Sequence[StoredEntry]]:
    """Yield the entries in parts of `ENTRIES_PER_PART` or `PART_BYTES`; without entries, one."""
    begin = size = 0
    for index, (key, value) in enumerate(entries):
        if size >= PART_BYTES or index - begin == ENTRIES_PER_PART:
            yield entries[begin:index]
            begin, size = index, 0
        size += len(key) + len(value)
    yield entries[begin:]
