"""The follower's side of replication: fetches the changes of the leader and makes them durable.

A fetch request tells the leader which changes the follower has durably. If the histories of the two
have diverged, or the follower is too far behind, the follower replaces everything it has by the
leader's state. It never goes back to an older epoch.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
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
"""First time and interval of the comparison of all entries with the leader.

Source: RocketMQ SlaveSynchronize."""
DIGEST_STEP = 4_096
"""Entries digested without an await."""
_BACKOFF = Backoff(first_ms=50, delay_ms_max=1_000)


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
        self._expected: tuple[ReplicaPosition, bytes] | None = None

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
            hold_ms=self._hold_ms,
            problem=self.follow_problem.problem,
        )
        try:
            await self._fetch_digest(stub, before)
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
            until = self._expected[0].version - self.changes.position.version
            if 0 <= until <= len(changes):
                await self._write(changes[:until])
                changes = changes[until:]
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
        self._expected = None

    async def _fetch_digest(
        self, stub: pb_grpc.ReplicationServiceAsyncStub, before: ReplicaPosition
    ) -> None:
        """Fetch the digest of the leader's state at intervals, at a position not yet reached."""
        now_ms = self._runtime.clock.monotonic_ms()
        if now_ms < self._compare_ms or not before.version:
            return
        self._compare_ms = now_ms + SYNC_ALL_MS
        request = pb.DigestRequest(node_id=self._node_id, epoch=before.epoch)
        answer = await stub.Digest(request, timeout=CALL_TIMEOUT_S)
        self._expected = (
            ReplicaPosition(answer.position.epoch, answer.position.version),
            answer.digest,
        )

    async def _compare(self) -> None:
        """Compare all entries with the digest of the leader; if they differ, read all next.

        Raises:
            DataLoss: the copies differ.
        """
        assert self._expected is not None
        (at, digest), self._expected = self._expected, None
        if self.changes.position != at:
            return  # another leader was elected since the digest was fetched
        if await state_digest(await self.disk.snapshot()) == digest:
            log.info("copy equals that of the leader position=%s", at)
            return
        self.changes.replace_with(ChangeLog((), 0, kept_bytes_max=self._kept_bytes_max))
        raise DataLoss(
            f"the copy at {at} differs from that of the leader; everything is read again"
        )


async def state_digest(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Return the BLAKE2b-256 of the keys and values of a state, with their lengths.

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
