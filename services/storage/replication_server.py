"""The gRPC face of replication: what the leader tells its followers; and who answers what."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
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
from batonmq_server.runtime.role import WhileLeader
from batonmq_server.runtime.stuck import PROBLEM_CHARS_MAX
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.core.epochs import EpochHistory, read_history
from batonmq_server.storage.leadership import FetchLimits
from batonmq_server.storage.role import Role

Context = grpc.aio.ServicerContext[Any, Any]
HOLD_MS_MAX = 10_000
BYTES_MIN, BYTES_DEFAULT, BYTES_MAX = 64 * 1024, 4 * 1024 * 1024, 16 * 1024 * 1024
EPOCHS_MAX = 1_000_000


class ReplicationServicer(pb_grpc.ReplicationServiceServicer):
    """See replication_service.proto."""

    def __init__(self, role: Role) -> None:
        self._role = role

    async def Fetch(self, request: pb.FetchRequest, context: Context) -> pb.FetchResponse:
        """See the proto."""
        leadership = self._role.leadership
        wish = FetchLimits(request.hold_ms, request.bytes_max or BYTES_DEFAULT)
        history = self._checked(request, wish)
        if history.epoch > leadership.epoch:
            raise OldEpoch(
                f"this leader has epoch {leadership.epoch}, the follower has seen {history.epoch}",
                detail=OldEpochDetail(epoch=leadership.epoch, current=history.epoch),
            )
        leadership.keeper.told(request.node_id, request.problem[:PROBLEM_CHARS_MAX])
        found = await leadership.fetch(request.node_id, request.position, history, wish)
        self._role.check_still(leadership)
        store = leadership.components.node.store
        return pb.FetchResponse(
            epoch=leadership.epoch,
            history=[pb.EpochStart(epoch=e, position=at) for e, at in leadership.history.starts],
            position=found.position,
            data=found.data,
            confirmed_position=store.readable_position,
            end_position=store.log.next_position,
            floors=found.floors,
            segment_position=found.segment[0],
            segment_bytes=found.segment[1] - found.segment[0],
            first_position=store.log.first_position,
            producers=found.producers,
        )

    async def DescribeReplicas(
        self, request: pb.DescribeReplicasRequest, context: Context
    ) -> pb.DescribeReplicasResponse:
        """See the proto."""
        leadership = self._role.leadership
        keeper = leadership.keeper
        replicas = keeper.replicas()
        for replica in replicas:  # see Leadership
            replica.position = max(replica.position - 1, 0)
        return pb.DescribeReplicasResponse(
            broker=self._role.broker,
            epoch=leadership.epoch,
            confirmed_position=leadership.components.node.store.readable_position,
            min_in_sync=keeper.policy.min_in_sync,
            replicas=replicas,
        )

    def _checked(self, request: pb.FetchRequest, wish: FetchLimits) -> EpochHistory:
        """The follower's history, after a look at everything else.

        Raises:
            InvalidArgument, LimitExceeded, WrongBroker: refused.
        """
        if not request.node_id:
            raise InvalidArgument("a follower has a node id", facts={"field": "node_id"})
        if request.broker != self._role.broker:
            raise WrongBroker(
                f"this is broker {self._role.broker}, not {request.broker}",
                facts={"asked": request.broker, "actual": self._role.broker},
            )
        limits = (
            ("hold_ms", wish.hold_ms, 0, HOLD_MS_MAX),
            ("bytes_max", wish.bytes_max, BYTES_MIN, BYTES_MAX),
            ("history", len(request.history), 0, EPOCHS_MAX),
            ("position", request.position, 0, (1 << 63) - 1),
        )
        for field, actual, least, limit in limits:
            if not least <= actual <= limit:
                raise LimitExceeded(
                    f"{field} is {actual}; it is {least} to {limit}",
                    facts={"field": field, "limit": limit, "actual": actual},
                )
        try:
            return read_history((start.epoch, start.position) for start in request.history)
        except DataLoss as error:
            raise InvalidArgument(error.message, facts={"field": "history"}) from error


class CurrentServicer:
    """Stands where a servicer is expected: each call goes to the one on the copy that is open now.

    Args:
        anywhere: Methods that followers answer too.
    """

    def __init__(
        self,
        role: Role,
        pick: Callable[[StorageComponents], Any],
        anywhere: frozenset[str] = frozenset(),
    ) -> None:
        self._role, self._pick, self._anywhere = role, pick, anywhere
        self._at_leader = WhileLeader(role, lambda: pick(role.acting))

    def __getattr__(self, method: str) -> Callable[[Any, Context], Awaitable[Any]]:
        if method not in self._anywhere:
            at_leader: Callable[[Any, Context], Awaitable[Any]] = getattr(self._at_leader, method)
            return at_leader

        async def call(request: Any, context: Context) -> Any:
            return await getattr(self._pick(self._role.copy.components), method)(request, context)

        return call
