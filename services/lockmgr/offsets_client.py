"""Calls of the lock manager to offsets: many queues per call, with separate calls per replica set.

A replica set that does not answer delays its own groups only.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TypeAlias

import grpc.aio

from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.batcher import Batcher
from batonmq._common.rpc import error_from_pb, from_rpc_error
from batonmq._core.queues import GroupQueue
from batonmq.errors import (
    BatonError,
    GroupMoved,
    NotServing,
    OffsetsUnreachable,
    UnknownQueue,
    Unreachable,
)
from batonmq_server.lockmgr.core.lock_entry import Observation
from batonmq_server.lockmgr.lock_proto import key_from_pb, key_to_pb
from batonmq_server.runtime.group_placements import GroupPlacements
from batonmq_server.runtime.leader_channels import LeaderChannels
from batonmq_server.runtime.per_replica_set import PerReplicaSet

RPC_TIMEOUT_S = 2.0
_FENCES_MAX = 64
"""Fences per call; each may carry thousands of ranges, and its answer more."""
OffsetsChannels: TypeAlias = "LeaderChannels[pb_grpc.OffsetsServiceAsyncStub]"


@dataclass(frozen=True, slots=True)
class FencedQueue:
    """A fence that passed; the set and the epoch are those of the leader that issued the token."""

    answer: pb.Fenced
    offsets_set: str
    offsets_epoch: int


FenceOutcome = FencedQueue | BatonError


class OffsetsClient:
    """Calls of one term of leadership, each to the replica set that keeps the group.

    Args:
        term: Sent with every fence, so that offsets rejects it after a newer leader's Announce.
    """

    def __init__(self, channels: OffsetsChannels, placements: GroupPlacements, term: int) -> None:
        self._placements = placements
        self._sets = PerReplicaSet(lambda name: _SetClient(channels, name, term))

    async def run(self) -> None:
        """Send the queued calls until cancelled."""
        await self._sets.run()

    def set_of(self, group: str) -> str:
        """Return the replica set that keeps the group."""
        return self._placements.set_of(group)

    def sets(self) -> frozenset[str]:
        """Return all replica sets."""
        return self._placements.sets()

    async def announce(self, offsets_set: str) -> dict[GroupQueue, int]:
        """Announce the term: the set rejects fences of older terms from then on. Idempotent.

        Returns:
            The token of every queue of the set that has one.

        Raises:
            OldEpoch: a newer term was announced.
            OffsetsUnreachable, Unreachable: it is not known whether the set has the term.
        """
        return await self._sets[offsets_set].announce()

    async def observe(self, key: GroupQueue) -> Observation:
        """Return the queue as it is now; a queue without progress is closed.

        Raises:
            OffsetsUnreachable: offsets did not answer.
        """
        return await self._client_of(key.group).observe(key)

    async def fence(self, item: pb.FenceItem) -> FenceOutcome:
        """Return what offsets decided about `item`; a returned error means that nothing changed.

        Raises:
            OffsetsUnreachable: the fence was not sent, or the replica set does not keep the group.
            Unreachable, Internal: the outcome is not known; repeat it with the same attempt.
            BatonError: the whole call was rejected; this try has changed nothing.
        """
        outcome = await self._client_of(item.queue.group).fence(item)
        if isinstance(outcome, GroupMoved | NotServing):
            raise offsets_unreachable(outcome)
        return outcome

    def _client_of(self, group: str) -> _SetClient:
        return self._sets[self._placements.set_of(group)]


class _SetClient:
    """Calls to one replica set. Answers of a deposed leader are rejected."""

    def __init__(self, channels: OffsetsChannels, name: str, term: int) -> None:
        self._channels, self._name, self._term = channels, name, term
        self.epoch = 0
        self._queries: Batcher[GroupQueue, Observation | BatonError] = Batcher(
            self._send_queries, items_max=1_024
        )
        self._fences: Batcher[pb.FenceItem, FenceOutcome] = Batcher(
            self._send_fences, items_max=_FENCES_MAX
        )

    async def run(self) -> None:
        """Send the queued calls until cancelled."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._queries.run())
            tasks.create_task(self._fences.run())

    async def announce(self) -> dict[GroupQueue, int]:
        """See `OffsetsClient.announce`."""
        # Without an epoch, so that OldEpoch always means the term.
        request, tokens, epoch = pb.AnnounceRequest(term=self._term), dict[GroupQueue, int](), 0
        while True:
            try:
                answer = await self._stub().Announce(request, timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._check_epoch(answer.offsets_epoch)
            if epoch not in (0, answer.offsets_epoch):
                raise Unreachable(
                    f"offsets changed epoch from {epoch} to {answer.offsets_epoch} during Announce"
                )
            epoch = answer.offsets_epoch
            tokens.update((key_from_pb(queue.queue), queue.token) for queue in answer.queues)
            if not answer.more:
                return tokens
            request.after_group = answer.queues[-1].queue.group

    async def observe(self, key: GroupQueue) -> Observation:
        """See `OffsetsClient.observe`."""
        try:
            outcome = await self._queries.call(key)
        except OffsetsUnreachable:
            raise
        except BatonError as error:
            raise offsets_unreachable(error) from error
        if isinstance(outcome, UnknownQueue):
            token, floor_token = outcome.detail.token, outcome.detail.floor_token
            return Observation(token=token, closed=True, floor_token=floor_token, deleted=token > 0)
        if isinstance(outcome, BatonError):
            raise offsets_unreachable(outcome)
        return outcome

    async def fence(self, item: pb.FenceItem) -> FenceOutcome:
        """See `OffsetsClient.fence`."""
        return await self._fences.call(item)

    async def _send_queries(self, keys: Sequence[GroupQueue]) -> Sequence[Observation | BatonError]:
        request = pb.QueryRequest(offsets_epoch=self.epoch, queues=[key_to_pb(key) for key in keys])
        try:
            answer = await self._stub().Query(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._check_epoch(answer.offsets_epoch)
        return [
            error_from_pb(outcome.error)
            if outcome.HasField("error")
            else _observation(outcome.progress)
            for outcome in answer.outcomes
        ]

    async def _send_fences(self, items: Sequence[pb.FenceItem]) -> Sequence[FenceOutcome]:
        request = pb.FenceRequest(term=self._term, offsets_epoch=self.epoch, items=items)
        try:
            answer = await self._stub().Fence(request, timeout=RPC_TIMEOUT_S)
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        self._check_epoch(answer.offsets_epoch)
        return [
            error_from_pb(outcome.error)
            if outcome.HasField("error")
            else FencedQueue(outcome.fenced, self._name, answer.offsets_epoch)
            for outcome in answer.outcomes
        ]

    def _stub(self) -> pb_grpc.OffsetsServiceAsyncStub:
        try:
            return self._channels.stub(self._name)
        except Unreachable as error:
            raise offsets_unreachable(error) from error

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Unreachable(f"offsets answered with epoch {epoch}, older than {self.epoch}")
        self.epoch = epoch


def offsets_unreachable(error: BatonError) -> OffsetsUnreachable:
    """Return the same failure as the error that the requester of a queue gets."""
    return OffsetsUnreachable(f"offsets: {error.message}", retry_after_ms=500)


def _observation(progress: pb.Progress) -> Observation:
    return Observation(
        token=progress.token,
        closed=progress.closed,
        committed=progress.committed_offset,
        delivered=max(progress.delivered_offset, progress.advance_to),
        reset_epoch=progress.reset_epoch,
        unacked_count=progress.unacked_count,
    )
