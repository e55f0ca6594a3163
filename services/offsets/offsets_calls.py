"""The base of all calls of the offsets service.

A call reads its request, applies it in memory, waits until the result is durable, and answers.
There is no await between the first and the last item of a call being applied. Every answer, also an
error, waits for the newest change of the queues that it is about (protocol 3, 6.8).
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, ParamSpec, TypeVar

import grpc.aio

from baton.common.v1 import error_pb2
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_to_pb
from batonmq._core.queues import GroupQueue
from batonmq.errors import BatonError, Fenced
from batonmq_server.offsets.core.resets import ResetExecutor
from batonmq_server.offsets.core.values import Instant
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.group_exporter import GroupExporter
from batonmq_server.offsets.group_modes import GroupModes
from batonmq_server.offsets.persistence import TokenChangeKey
from batonmq_server.offsets.placement_resolver import PlacementResolver
from batonmq_server.offsets.request_reader import RequestReader
from batonmq_server.offsets.telemetry import OffsetsTelemetry
from batonmq_server.offsets.topic_queues import TopicQueues

Context = grpc.aio.ServicerContext[Any, Any]
P = ParamSpec("P")
Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServicerParts:
    """The parts of one epoch that its calls work with."""

    state: EpochState
    clock: Clock
    modes: GroupModes
    telemetry: OffsetsTelemetry
    resolver: PlacementResolver
    queues: TopicQueues
    exporter: GroupExporter


class OffsetsCalls(pb_grpc.OffsetsServiceServicer):
    """Base of the classes that answer the calls: one class for each kind of caller."""

    def __init__(self, parts: ServicerParts) -> None:
        state = parts.state
        self._table, self._commits, self._disk = state.table, state.commits, state.disk
        self._placement_lock = state.placement_lock
        self._resets = ResetExecutor(state.table, state.history)
        self._clock, self._modes, self._telemetry = parts.clock, parts.modes, parts.telemetry
        self._resolver, self._exporter = parts.resolver, parts.exporter
        self._queues = parts.queues
        self._reader = RequestReader(state.table, state.table.limits.ack_ranges_max)

    def _now(self) -> Instant:
        return Instant(self._clock.monotonic_ms(), self._clock.unix_ms())

    def _check_change(self, seen_epoch: int) -> None:
        """Reject a change from a caller with a newer epoch, or one that can't become durable.

        Raises:
            OldEpoch: the caller has seen a newer epoch.
            DiskFull, BatonError: as `GroupCommit.check_room`.
        """
        self._table.check_epoch(seen_epoch)
        self._commits.check_room()

    async def _resolve(self, keys: Iterable[GroupQueue]) -> None:
        """Look up the placement of groups that are not known here, before anything is applied.

        Calls with a token need no lookup: without progress here this set never issued the token.
        """
        await self._resolver.resolve({key.group for key in keys})

    async def _check_kept(self, group: str) -> None:
        """Reject a call about a group that this replica set does not keep.

        Raises:
            GroupMoved, NotServing: as `PlacementResolver.check`.
        """
        await self._resolver.resolve([group])
        self._resolver.check(group)

    async def _is_placed(self, group: str) -> bool:
        """Return False if a group does not exist and has no placement: no set has progress of it.

        For calls that create no progress: they do not place such a group.

        Raises:
            GroupMoved, NotServing: as `PlacementResolver.check`.
        """
        placed = not await self._resolver.resolve([group], self._modes.exists)
        self._resolver.check(group, placed=placed)
        return placed

    def _mark_token_changed(self, key: GroupQueue) -> None:
        """Write a queue and the record of its new token, both in one write."""
        self._commits.mark_changed(key)
        change = self._table.query(key).token_change
        assert change is not None
        self._commits.mark_changed(TokenChangeKey(key, change))

    def _item_error(
        self, op: str, key: GroupQueue, token: int, error: BatonError
    ) -> error_pb2.Error:
        """Return the error of one item, counted if its token is fenced."""
        if isinstance(error, Fenced):
            self._telemetry.report_fenced(op, key, token, error)
        return error_to_pb(error)


def attempt(call: Callable[P, Result], *args: P.args, **kwargs: P.kwargs) -> Result | BatonError:
    """Return the result of a call for one item, or the error that it raised."""
    try:
        return call(*args, **kwargs)
    except BatonError as error:
        return error
