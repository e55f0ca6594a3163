"""What the lock manager asks of offsets, many queues per call, of each replica set its own.

What one set does not answer, the groups of the others don't wait for.
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
"""Fences per call; each may bring thousands of ranges along and be answered with more."""
OffsetsPeers: TypeAlias = "LeaderChannels[pb_grpc.OffsetsServiceAsyncStub]"


@dataclass(frozen=True, slots=True)
class FencedQueue:
    """A queue that was passed on, by a leader of `offsets_set` in its epoch."""

    answer: pb.Fenced
    offsets_set: str
    offsets_epoch: int


FenceOutcome = FencedQueue | BatonError


class OffsetsClient:
    """Calls of one term of leadership, to the set that keeps the group.

    Args:
        term: Sent with every fence, so that none lands after a newer leader's Announce.
    """

    def __init__(self, peers: OffsetsPeers, places: GroupPlacements, term: int) -> None:
        self._places = places
        self._sets = PerReplicaSet(lambda name: _SetClient(peers, name, term))

    async def run(self) -> None:
        """Send what is asked for, for ever; to be run as one task."""
        await self._sets.run()

    def set_of(self, group: str) -> str:
        """The set that is asked about a group."""
        return self._places.set_of(group)

    def sets(self) -> frozenset[str]:
        """Every set there is."""
        return self._places.sets()

    async def announce(self, offsets_set: str) -> dict[GroupQueue, int]:
        """Make the term known: no older one's fence is accepted again. Repeating is harmless.

        Returns:
            The token of every queue of the set that has one.

        Raises:
            OldEpoch: a newer term has announced itself.
            OffsetsUnreachable, Unreachable: not known.
        """
        return await self._sets[offsets_set].announce()

    async def observe(self, key: GroupQueue) -> Observation:
        """The queue as it is now; without progress, closed under the token to be expected.

        Raises:
            OffsetsUnreachable: it can't be seen.
        """
        return await self._of(key.group).observe(key)

    async def fence(self, item: pb.FenceItem) -> FenceOutcome:
        """What offsets decided about `item`; an error means that nothing changed.

        Raises:
            OffsetsUnreachable: it was never sent, or the group is not at the set that was asked.
            Unreachable, Internal: not known; to be repeated with the same attempt.
            BatonError: the whole call was refused; this time nothing changed.
        """
        verdict = await self._of(item.queue.group).fence(item)
        if isinstance(verdict, GroupMoved | NotServing):
            raise offsets_unreachable(verdict)
        return verdict

    def _of(self, group: str) -> _SetClient:
        return self._sets[self._places.set_of(group)]


class _SetClient:
    """Calls to one set. Answers of a deposed node are not used."""

    def __init__(self, peers: OffsetsPeers, name: str, term: int) -> None:
        self._peers, self._name, self._term = peers, name, term
        self.epoch = 0
        self._queries: Batcher[GroupQueue, Observation | BatonError] = Batcher(
            self._send_queries, items_max=1_024
        )
        self._fences: Batcher[pb.FenceItem, FenceOutcome] = Batcher(
            self._send_fences, items_max=_FENCES_MAX
        )

    async def run(self) -> None:
        """Send what is asked for, for ever; to be run as one task."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._queries.run())
            tasks.create_task(self._fences.run())

    async def announce(self) -> dict[GroupQueue, int]:
        """See `Offsets.announce`."""
        # Without an epoch, so that OldEpoch can only be about the term.
        request, tokens, epoch = pb.AnnounceRequest(term=self._term), dict[GroupQueue, int](), 0
        while True:
            try:
                answer = await self._stub().Announce(request, timeout=RPC_TIMEOUT_S)
            except grpc.aio.AioRpcError as error:
                raise from_rpc_error(error) from error
            self._check_epoch(answer.offsets_epoch)
            if epoch not in (0, answer.offsets_epoch):
                raise Unreachable(f"offsets went on under epoch {answer.offsets_epoch} meanwhile")
            epoch = answer.offsets_epoch
            tokens.update((key_from_pb(queue.queue), queue.token) for queue in answer.queues)
            if not answer.more:
                return tokens
            request.after_group = answer.queues[-1].queue.group

    async def observe(self, key: GroupQueue) -> Observation:
        """See `Offsets.observe`."""
        try:
            outcome = await self._queries.call(key)
        except OffsetsUnreachable:
            raise
        except BatonError as error:
            raise offsets_unreachable(error) from error
        if isinstance(outcome, UnknownQueue):
            token = outcome.detail.token
            return Observation(token=token, closed=True, begins_anew=token > 0)
        if isinstance(outcome, BatonError):
            raise offsets_unreachable(outcome)
        return outcome

    async def fence(self, item: pb.FenceItem) -> FenceOutcome:
        """See `Offsets.fence`."""
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
            return self._peers.stub(self._name)
        except Unreachable as error:
            raise offsets_unreachable(error) from error

    def _check_epoch(self, epoch: int) -> None:
        if epoch < self.epoch:
            raise Unreachable(f"offsets answered with epoch {epoch} after {self.epoch}")
        self.epoch = epoch


def offsets_unreachable(error: BatonError) -> OffsetsUnreachable:
    """The same failure, as an asker of a queue is told it."""
    return OffsetsUnreachable(f"offsets: {error.message}", retry_after_ms=500)


def _observation(progress: pb.Progress) -> Observation:
    return Observation(
        token=progress.token,
        closed=progress.closed,
        committed=progress.committed_offset,
        delivered=progress.delivered_offset,
        unacked_count=progress.unacked_count,
    )
