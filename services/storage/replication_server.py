"""The servicer of replication, and the proxy that dispatches calls to the current components."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import Any

import grpc.aio

from baton.storage.v1 import replication_service_pb2 as pb
from baton.storage.v1 import replication_service_pb2_grpc as pb_grpc
from batonmq.errors import (
    DataLoss,
    InvalidArgument,
    LimitExceeded,
    OldEpoch,
    OldEpochDetail,
    WrongBroker,
)
from batonmq_server.runtime.replication.follow_problem import PROBLEM_CHARS_MAX
from batonmq_server.runtime.replication.leader_servicer import LeaderServicer
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core.epochs import EpochHistory, read_history
from batonmq_server.storage.leadership import FetchLimits, FollowerReport
from batonmq_server.storage.replica import StorageReplica

Context = grpc.aio.ServicerContext[Any, Any]
HOLD_MS_MAX = 10_000
BYTES_MIN, BYTES_DEFAULT, BYTES_MAX = 64 * 1024, 4 * 1024 * 1024, 16 * 1024 * 1024
EPOCHS_MAX = 1_000_000


class StorageReplicationServicer(pb_grpc.ReplicationServiceServicer):
    """Serves ReplicationService; see replication_service.proto."""

    def __init__(self, role: StorageReplica) -> None:
        self._role = role

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """See the proto."""
        leadership = self._role.leadership
        limits = FetchLimits(request.hold_ms, request.bytes_max or BYTES_DEFAULT)
        mine = leadership.history
        equal = request.history_digest == mine.digest
        history = self._check(request, limits)
        if equal:
            history = mine
        elif not request.history and request.history_digest not in (b"", history.digest):
            return pb.FetchResponse(
                epoch=leadership.epoch,
                history=_starts(mine),
                history_digest=mine.digest,
                position=request.position,
            )
        if history.epoch > leadership.epoch:
            raise OldEpoch(
                f"this leader has epoch {leadership.epoch}, the follower has seen {history.epoch}",
                detail=OldEpochDetail(epoch=leadership.epoch, current=history.epoch),
            )
        leadership.in_sync_set.set_problem(request.node_id, request.problem[:PROBLEM_CHARS_MAX])
        damaged = request.damaged_position if request.HasField("damaged_position") else None
        report = FollowerReport(
            request.node_id, request.position, history, damaged, request.has_room
        )
        fetched = await leadership.fetch(report, limits)
        self._role.check_still(leadership)
        store = leadership.components.node.store
        return pb.FetchResponse(
            epoch=leadership.epoch,
            history=() if equal else _starts(mine),
            history_digest=mine.digest,
            position=fetched.position,
            data=fetched.data,
            confirmed_position=store.readable_position,
            end_position=store.log.next_position,
            floors=fetched.floors,
            segment_position=fetched.segment[0],
            segment_bytes=fetched.segment[1] - fetched.segment[0],
            first_position=store.log.first_position,
            producers=fetched.producers,
        )

    async def DescribeReplicas(
        self, request: pb.DescribeReplicasRequest, context: Context
    ) -> pb.DescribeReplicasResponse:
        """See the proto."""
        leadership = self._role.leadership
        in_sync_set = leadership.in_sync_set
        replicas = in_sync_set.replicas()
        for replica in replicas:  # see Leadership
            replica.position = max(replica.position - 1, 0)
        return pb.DescribeReplicasResponse(
            broker=self._role.broker,
            epoch=leadership.epoch,
            confirmed_position=leadership.components.node.store.readable_position,
            min_in_sync=in_sync_set.policy.min_in_sync,
            replicas=replicas,
        )

    def _check(self, request: pb.FetchRequest, limits: FetchLimits) -> EpochHistory:
        """Check a fetch request and return the follower's epoch history.

        Raises:
            InvalidArgument, LimitExceeded, WrongBroker: a field of the request is wrong.
        """
        if not request.node_id:
            raise InvalidArgument("node_id is required", facts={"field": "node_id"})
        if request.broker != self._role.broker:
            raise WrongBroker(
                f"the request is for broker {request.broker}, this is broker {self._role.broker}",
                facts={"asked": request.broker, "actual": self._role.broker},
            )
        bounds = (
            ("hold_ms", limits.hold_ms, 0, HOLD_MS_MAX),
            ("bytes_max", limits.bytes_max, BYTES_MIN, BYTES_MAX),
            ("history", len(request.history), 0, EPOCHS_MAX),
            ("position", request.position, 0, (1 << 63) - 1),
        )
        for field, actual, least, limit in bounds:
            if not least <= actual <= limit:
                raise LimitExceeded(
                    f"{field} must be {least} to {limit}, got {actual}",
                    facts={"field": field, "limit": limit, "actual": actual},
                )
        try:
            return read_history((start.epoch, start.position) for start in request.history)
        except DataLoss as error:
            raise InvalidArgument(error.message, facts={"field": "history"}) from error


def _starts(history: EpochHistory) -> list[pb.EpochStart]:
    return [pb.EpochStart(epoch=epoch, position=at) for epoch, at in history.starts]


class CurrentServicer:
    """A servicer that passes each call to the servicer of the components that are open now.

    Args:
        on_followers: Methods that followers answer too; the leader alone answers the others.
    """

    def __init__(
        self,
        role: StorageReplica,
        pick: Callable[[StorageComponents], Any],
        on_followers: frozenset[str] = frozenset(),
    ) -> None:
        self._role, self._pick, self._on_followers = role, pick, on_followers
        self._at_leader = LeaderServicer(role, lambda: pick(role.leading_components))

    def Deliver(self, requests: Any, context: Context) -> AsyncIterator[Any]:
        """Deliver at any node; see StorageService."""
        answers: AsyncIterator[Any] = self._pick(self._role.copy.components).Deliver(
            requests, context
        )
        return answers

    async def WatchChecks(self, request: Any, context: Context) -> AsyncIterator[Any]:
        """Ask about transactions at the leader; see TransactionService."""
        servicer = self._pick(self._role.leading_components)
        async for response in servicer.WatchChecks(request, context):
            yield response

    def __getattr__(self, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        if method not in self._on_followers:
            at_leader: Callable[[Any, Context], Awaitable[Any]] = getattr(self._at_leader, method)
            return at_leader

        async def call(request: Any, context: Context) -> Any:
            return await getattr(self._pick(self._role.copy.components), method)(request, context)

        return call
