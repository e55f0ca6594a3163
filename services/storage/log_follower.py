"""The replication loop of a follower: fetch the leader's log, write it durably, fetch again.

Each fetch tells the leader the end of the follower's log. Where the two logs differ, the follower
cuts its own log. If the leader has already removed what the follower needs, the follower discards
its copy and starts at the leader's first position. It never returns to an older epoch. Received
bytes are checked like a log at recovery before they are written, piece by piece.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import TypeAlias

import grpc.aio

from baton.storage.v1 import replication_service_pb2 as pb
from baton.storage.v1 import replication_service_pb2_grpc as pb_grpc
from batonmq._common.backoff import Backoff
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, DataLoss, DiskFull, OldEpoch, OldEpochDetail
from batonmq_server.runtime.leader_channels import LeaderChannel
from batonmq_server.runtime.replication.follow_problem import FollowProblem
from batonmq_server.runtime.service_runtime import Runtime
from batonmq_server.storage.components import StorageComponents
from batonmq_server.storage.config import StorageSettings
from batonmq_server.storage.core import checkpoint
from batonmq_server.storage.core.checkpoint import Checkpoint
from batonmq_server.storage.core.commitlog import NO_SPACE, PositionRange
from batonmq_server.storage.core.epochs import EpochHistory, read_history
from batonmq_server.storage.core.log_transfer import check_received, split
from batonmq_server.storage.core.producers import ProducerState
from batonmq_server.storage.log_copy import LogCopy
from batonmq_server.storage.node import LogStart

log = logging.getLogger(__name__)

ReplicationPeer: TypeAlias = "LeaderChannel[pb_grpc.ReplicationServiceAsyncStub]"
CALL_TIMEOUT_S = 5.0
_BACKOFF = Backoff(first_ms=50, delay_ms_max=500)


class LogFollower:
    """Keeps this node's copy equal to the leader's log.

    Attributes:
        first_position: First position of the leader's log, from its last answer.
    """

    def __init__(
        self,
        copy: LogCopy,
        peer: ReplicationPeer,
        settings: StorageSettings,
        runtime: Runtime,
        stuck: FollowProblem,
    ) -> None:
        self._copy, self._peer, self._runtime, self._stuck = copy, peer, runtime, stuck
        self._node_id, self._broker = settings.node_id, settings.broker_name
        self._hold_ms = settings.replica_policy.hold_ms
        self.first_position = 0
        self._leader_digest = b""
        self._damaged_position: int | None = None
        self._last_answer_ms: int | None = None
        self._confirmed_position = 0

    def is_connected(self) -> bool:
        """Return whether the leader has answered recently."""
        now_ms = self._runtime.clock.monotonic_ms()
        return (
            self._last_answer_ms is not None and now_ms - self._last_answer_ms < 2 * self._hold_ms
        )

    def has_confirmed(self) -> bool:
        """Return whether this copy has all that was confirmed when the leader last answered.

        Each member of the in-sync set has.
        """
        return self._copy.components.node.store.log.synced_position >= self._confirmed_position

    async def run(self) -> None:
        """Follow the leader until cancelled; pauses while this node leads. Run it as one task."""
        failures = 0
        while True:
            try:
                await self._step()
                self._stuck.clear()
                self._damaged_position = None
                failures = 0
            except OSError as error:
                self._copy.fail(error)
            except BatonError as error:
                self._stuck.report(error)
                level = logging.WARNING if failures in (10, 1_000) else logging.DEBUG
                log.log(level, "not following position=%s error=%s", self._copy.position, error)
                delay_ms = _BACKOFF.delay_ms(failures, self._runtime.random, error.retry_after_ms)
                await asyncio.sleep(delay_ms / 1000)
                failures += 1

    async def _step(self) -> None:
        async with self._copy.writing:
            await self._copy.recover()
            components = self._copy.components
            history, end = components.node.history, components.node.store.log.next_position
        digest = history.digest
        with_history, self._leader_digest = digest != self._leader_digest, b""
        request = pb.FetchRequest(
            node_id=self._node_id,
            broker=self._broker,
            position=end,
            history=[pb.EpochStart(epoch=epoch, position=at) for epoch, at in history.starts]
            if with_history
            else (),
            history_digest=digest,
            hold_ms=self._hold_ms,
            problem=self._stuck.problem,
            damaged_position=self._damaged_position,
            has_room=components.retention.has_room,
        )
        try:
            answer = await self._peer.stub().Fetch(
                request, timeout=self._hold_ms / 1000 + CALL_TIMEOUT_S
            )
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if answer.epoch < history.epoch:
            raise OldEpoch(
                f"the leader has epoch {answer.epoch}, this node {history.epoch}",
                detail=OldEpochDetail(epoch=answer.epoch, current=history.epoch),
            )
        theirs = history
        if answer.history_digest != digest:
            if not with_history:
                return  # another leader, or an earlier version: it did not know this history
            theirs = read_history((start.epoch, start.position) for start in answer.history)
        self._leader_digest = answer.history_digest
        async with self._copy.writing:
            now = self._copy.components.node
            if now is not components.node or (now.history, now.store.log.next_position) != (
                history,
                end,
            ):
                return  # this node was leader meanwhile
            self._last_answer_ms = self._runtime.clock.monotonic_ms()
            self._confirmed_position = answer.confirmed_position
            await self._apply(components, answer, theirs)

    async def _apply(
        self, components: StorageComponents, answer: pb.FetchResponse, theirs: EpochHistory
    ) -> None:
        log_, position = components.node.store.log, answer.position
        segment = (answer.segment_position, answer.segment_position + answer.segment_bytes)
        damaged_from = components.damage.first_damaged_from(log_.first_position)
        if damaged_from is not None:
            # A leader has answered, so the damaged part can be fetched again.
            await self._copy.cut(damaged_from, damaged=True)
        elif answer.HasField("floors"):
            known = await self._decoded_producers(answer.producers)
            await self._copy.reset(LogStart(answer.floors, segment, theirs.truncated(position)))
            self._copy.components.node.store.producers.load(known)
        elif position < log_.first_position:
            await self._copy.reset(LogStart())
        elif position < log_.next_position:
            await self._copy.cut(position)
        elif position > log_.next_position:
            raise DataLoss(
                f"the leader sent the log from position {position}; "
                f"this copy ends at {log_.next_position}"
            )
        else:
            self.first_position = answer.first_position
            await self._adopt(components, theirs)
            if answer.data:
                try:
                    await self._write(components, answer.data, segment)
                except DataLoss as error:
                    self._damaged_position = error.detail.position
                    raise
                # A purged segment may contain the start of an epoch. Without that epoch the leader
                # would have this log cut there.
                await self._adopt(components, theirs)
            components.flusher.confirmed(min(answer.confirmed_position, log_.next_position))
            await self._clear_damage(components, answer)

    async def _decoded_producers(self, raw: bytes) -> Sequence[ProducerState]:
        """Decode the producers of a fetch, in a thread: there may be 100,000."""
        found: list[Checkpoint | None] = []
        await self._copy.in_thread(lambda _: found.append(checkpoint.decode(raw)), None)
        return found[0].producers if found[0] is not None else ()

    async def _adopt(self, components: StorageComponents, theirs: EpochHistory) -> None:
        """Adopt those epochs of the leader that begin at or before the end of this log."""
        node = components.node
        adopted = theirs.truncated(node.store.log.next_position)
        await self._save_history(components, replace(adopted, damaged=node.history.damaged))

    async def _clear_damage(self, components: StorageComponents, answer: pb.FetchResponse) -> None:
        """Clear the damage mark once this copy has everything confirmed: it may be elected."""
        node = components.node
        complete = node.store.log.synced_position >= answer.confirmed_position
        if node.history.damaged and node.history.epoch == answer.epoch and complete:
            log.info("copy is complete again position=%d", node.store.log.next_position)
            await self._save_history(components, replace(node.history, damaged=False))

    async def _save_history(self, components: StorageComponents, history: EpochHistory) -> None:
        if history == components.node.history:
            return
        try:
            await self._copy.in_thread(components.node.save_history, history)
        except OSError as error:
            if error.errno not in NO_SPACE:
                raise
            raise DiskFull("no space on disk for the epoch history") from error

    async def _write(
        self, components: StorageComponents, data: bytes, segment: PositionRange
    ) -> None:
        """Write the bytes that the leader sent, and update everything derived from the log.

        Raises:
            DataLoss, DiskFull: nothing from the faulty piece on was written.
            OSError: the disk has failed.
        """
        log_ = components.node.store.log
        try:
            for number, piece in enumerate(split(data, log_.next_position, segment[1])):
                if number:
                    await asyncio.sleep(0)
                self._write_piece(components, piece, segment)
        finally:  # the next fetch tells the leader that all that is written is on the disk
            await components.flusher.sync()

    def _write_piece(
        self, components: StorageComponents, piece: bytes, segment: PositionRange
    ) -> None:
        components.flusher.check()
        recovery, log_ = components.node.recovery, components.node.store.log
        batches, end = check_received(recovery, log_.next_position, piece, segment)
        try:
            log_.copy(piece, segment, end)
        except OSError as error:
            components.flusher.fail(error)
            raise
        try:
            for header, batch in batches:
                recovery.take(header, batch)
        except Exception as error:
            components.flusher.fail(error)  # log and indexes may differ: only recovery can tell
            raise
