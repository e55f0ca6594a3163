"""The follower's side of replication: fetches the changes of the leader and makes them durable.

A fetch request tells the leader which changes the follower has durably. If the histories of the two
have diverged, or the follower is too far behind, the follower replaces everything it has by the
leader's state. It never goes back to an older epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import blake2b
from typing import TypeAlias

import grpc.aio

from baton.offsets.v1 import replication_service_pb2 as pb
from baton.offsets.v1 import replication_service_pb2_grpc as pb_grpc
from batonmq._common import timeouts
from batonmq._common.backoff import Backoff
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, DataLoss, DiskFull, OldEpoch, OldEpochDetail, Unreachable
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.core.change_log import ChangeLog, Entry, StoreChange
from batonmq_server.offsets.persistence import ProgressStore, change_log_of, read_change_log
from batonmq_server.runtime.leader_channels import LeaderChannel
from batonmq_server.runtime.replication.follow_problem import FollowProblem
from batonmq_server.runtime.replication.position import ReplicaPosition
from batonmq_server.runtime.service_runtime import Runtime

log = logging.getLogger(__name__)

ReplicationChannel: TypeAlias = "LeaderChannel[pb_grpc.ReplicationServiceAsyncStub]"
CALL_TIMEOUT_S = 5.0
READ_ALL_TIMEOUT_S, PART_TIMEOUT_S = 120.0, 10.0
"""Timeouts of ReadAll, for the call and for one part: the leader may be dead without an error."""
SYNC_ALL_FIRST_MS, SYNC_ALL_MS = 10_000, 60_000
"""First time and interval of the comparison of all entries with the leader; it lasts longer than
the interval if there are many.

Source: RocketMQ SlaveSynchronize."""
COMPARED_BYTES, COMPARE_PAUSE_MS = 128 * 1024, 100
"""Size of a part of the comparison, and the time from one part to the next. The follower takes no
change while it compares a part, so commits wait for it: some milliseconds."""
DIGEST_STEP = 4_096
"""Entries digested without an await; a part has fewer."""
_BACKOFF = Backoff(first_ms=50, delay_ms_max=1_000)


@dataclass(frozen=True, slots=True)
class _ExpectedPart:
    """The digest of the leader's entries with keys after `after`, up to `until`; None: all."""

    position: ReplicaPosition
    digest: bytes
    after: bytes
    until: bytes | None


class Follower:
    """Keeps the copy of this node equal to that of the leader.

    Attributes:
        writing: Lock of the task that may write to `disk`.
        changes: The change log of this node.
        leader: Epoch and last version of the leader, from its last answer.
        follow_problem: The problem because of which this node can't follow, if any.
    """

    def __init__(
        self,
        disk: ProgressStore,
        changes: ChangeLog,
        leader_channel: ReplicationChannel,
        settings: OffsetsSettings,
        runtime: Runtime,
        follow_problem: FollowProblem,
    ) -> None:
        self.disk, self.changes, self._leader_channel, self.follow_problem = (
            disk,
            changes,
            leader_channel,
            follow_problem,
        )
        self._runtime, self.writing = runtime, asyncio.Lock()
        self._node_id, self._hold_ms = settings.node_id, settings.replica_policy.hold_ms
        self._kept_bytes_max = settings.replica_kept_bytes_max
        self.leader = ReplicaPosition(0, 0)
        self._compare_ms = runtime.clock.monotonic_ms() + SYNC_ALL_FIRST_MS
        self._next_comparison_ms = 0
        self._compared_key = b""  # all entries up to this key are compared
        self._expected: _ExpectedPart | None = None

    async def reload(self) -> None:
        """Read the change log from the disk again, after this node was the leader."""
        await self.disk.wait_idle()
        self.changes.replace_with(read_change_log(self.disk, kept_bytes_max=self._kept_bytes_max))

    def has_room(self) -> bool:
        """Return whether the next change could be written; if not, report it to the leader."""
        try:
            self.disk.check_room()
        except DiskFull as error:
            self.follow_problem.report(error)
            return False
        return True

    async def run(self) -> None:
        """Follow the leader until cancelled; wait while this node itself is the leader."""
        failures = 0
        while True:
            try:
                await self._step()
                if self.has_room():
                    self.follow_problem.clear()
                failures = 0
            except BatonError as error:
                self.follow_problem.report(error)
                level = logging.WARNING if failures == 10 else logging.DEBUG
                log.log(level, "not following position=%s error=%s", self.changes.position, error)
                delay_ms = _BACKOFF.delay_ms(failures, self._runtime.random, error.retry_after_ms)
                await asyncio.sleep(delay_ms / 1000)
                failures += 1

    async def _step(self) -> None:
        async with self.writing:
            before = self.changes.position
        stub = self._leader_channel.stub()
        request = pb.FetchRequest(
            node_id=self._node_id,
            position=pb.Position(epoch=before.epoch, version=before.version),
            problem=self.follow_problem.problem,
        )
        try:
            await self._fetch_digest(stub, before)
            request.hold_ms = self._hold_until_next_part()
            answer = await stub.Fetch(request, timeout=self._hold_ms / 1000 + CALL_TIMEOUT_S)
            everything = await self._read_all(stub, before) if answer.read_all else None
        except grpc.aio.AioRpcError as error:
            raise from_rpc_error(error) from error
        if answer.epoch < before.epoch:
            raise OldEpoch(
                f"the leader has epoch {answer.epoch}, this node {before.epoch}",
                detail=OldEpochDetail(epoch=answer.epoch, current=before.epoch),
            )
        async with self.writing:
            if self.changes.position != before:
                return  # this node was the leader during the call
            self.leader = ReplicaPosition(answer.epoch, answer.version)
            if everything is not None:
                await self._replace_all(everything)
            else:
                await self._apply([_change(one) for one in answer.changes])

    async def _apply(self, changes: list[StoreChange]) -> None:
        """Write changes in one write, or in two if a comparison is due between them."""
        at = self.changes.position
        for change in changes:
            if change.position.version != at.version + 1 or change.position.epoch < at.epoch:
                raise DataLoss(f"the leader sent {change.position} after {at}")
            at = change.position
        if self._expected is not None:
            until = self._expected.position.version - self.changes.position.version
            if until <= len(changes):
                await self._write(changes[: max(0, until)])
                changes = changes[max(0, until) :]
                await self._compare()
        await self._write(changes)

    async def _write(self, changes: list[StoreChange]) -> None:
        newest: dict[bytes, bytes | None] = {}
        for change in changes:
            newest.update(change.entries)
        if newest:
            await self.disk.write(list(newest.items()))
        for change in changes:
            self.changes.append(change)

    async def _read_all(
        self, stub: pb_grpc.ReplicationServiceAsyncStub, before: ReplicaPosition
    ) -> list[tuple[bytes, bytes]]:
        entries: list[tuple[bytes, bytes]] = []
        request = pb.ReadAllRequest(node_id=self._node_id, epoch=before.epoch)
        now_s = asyncio.get_running_loop().time
        try:
            async with timeouts.timeout(PART_TIMEOUT_S) as silence:
                async for part in stub.ReadAll(request, timeout=READ_ALL_TIMEOUT_S):
                    silence.reschedule(now_s() + PART_TIMEOUT_S)
                    entries += [(entry.key, entry.value) for entry in part.entries]
                    if part.last:
                        return entries
        except TimeoutError:
            log.warning("ReadAll timed out waiting for the next part entries=%d", len(entries))
        raise Unreachable("the leader stopped before the last part of ReadAll", retry_after_ms=200)

    async def _replace_all(self, entries: list[tuple[bytes, bytes]]) -> None:
        changes = change_log_of(dict(entries), kept_bytes_max=self._kept_bytes_max)
        if changes.position < self.changes.position:
            # Of an older epoch, or of a leader whose own epoch is not on its disk yet.
            raise OldEpoch(f"a copy at the older position {changes.position} is rejected")
        log.warning(
            "this node replaces all its progress by that of the leader position=%s was=%s",
            changes.position,
            self.changes.position,
        )
        await self.disk.replace(entries)
        self.changes.replace_with(changes)
        self._expected, self._compared_key = None, b""

    async def _fetch_digest(
        self, stub: pb_grpc.ReplicationServiceAsyncStub, before: ReplicaPosition
    ) -> None:
        """Fetch the digest of the leader's next part, at a position that is not yet reached."""
        now_ms = self._runtime.clock.monotonic_ms()
        if now_ms < self._compare_ms or not before.version or self._expected is not None:
            return
        if not self._compared_key:
            self._next_comparison_ms = now_ms + SYNC_ALL_MS
        self._compare_ms = now_ms + COMPARE_PAUSE_MS
        request = pb.DigestRequest(
            node_id=self._node_id,
            epoch=before.epoch,
            after_key=self._compared_key,
            bytes_max=COMPARED_BYTES,
        )
        answer = await stub.Digest(request, timeout=CALL_TIMEOUT_S)
        self._expected = _ExpectedPart(
            ReplicaPosition(answer.position.epoch, answer.position.version),
            answer.digest,
            answer.after_key,
            answer.last_key or None,
        )
        async with self.writing:
            if self.changes.position == before == self._expected.position:
                await self._compare()

    def _hold_until_next_part(self) -> int:
        """Return how long the leader may hold a request: not beyond the next comparison."""
        if self._expected is not None:
            return self._hold_ms  # the leader has a change for this node
        left_ms = self._compare_ms - self._runtime.clock.monotonic_ms()
        return min(self._hold_ms, max(0, left_ms))

    async def _compare(self) -> None:
        """Compare a part of all entries with the digest of the leader.

        Raises:
            DataLoss: the copies differ; all entries are read next.
        """
        assert self._expected is not None
        part, self._expected = self._expected, None
        if self.changes.position != part.position:
            return  # another leader was elected since the digest was fetched
        own = await self.disk.read_part(part.after, part.until)
        if await state_digest(own.entries) != part.digest:
            self.changes.replace_with(ChangeLog((), 0, kept_bytes_max=self._kept_bytes_max))
            raise DataLoss(
                f"the copy at {part.position} differs from that of the leader; everything is read "
                "again"
            )
        self._compared_key = part.until or b""
        if part.until is None:
            self._compare_ms = max(self._compare_ms, self._next_comparison_ms)
            log.info("copy equals that of the leader position=%s", part.position)


async def state_digest(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the BLAKE2b-256 of keys and values, with their lengths.

    Works in steps: between two, other tasks run, such as the lease renewal of the leader.
    """
    digest = blake2b(digest_size=32)
    for number, (key, value) in enumerate(entries, start=1):
        digest.update(b"%d %d " % (len(key), len(value)))
        digest.update(key)
        digest.update(value)
        if number % DIGEST_STEP == 0:
            await asyncio.sleep(0)
    return digest.digest()


def _change(read: pb.Change) -> StoreChange:
    entries: list[Entry] = [
        (entry.key, entry.value if entry.HasField("value") else None) for entry in read.entries
    ]
    return StoreChange(ReplicaPosition(read.position.epoch, read.position.version), entries)
