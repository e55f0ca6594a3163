"""A follower's part: fetch what the leader has changed, make it durable, ask for more.

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
from batonmq._common.backoff import Backoff
from batonmq._common.rpc import from_rpc_error
from batonmq.errors import BatonError, DataLoss, DiskFull, OldEpoch, OldEpochDetail, Unreachable
from batonmq_server.offsets.config import OffsetsSettings
from batonmq_server.offsets.core.change_log import ChangeLog, Entry, StoreChange
from batonmq_server.offsets.persistence import ProgressStore, change_log_of, read_change_log
from batonmq_server.runtime.peers import Peer
from batonmq_server.runtime.position import Position
from batonmq_server.runtime.process import Runtime
from batonmq_server.runtime.stuck import Stuck

log = logging.getLogger(__name__)

ReplicationPeer: TypeAlias = "Peer[pb_grpc.ReplicationServiceAsyncStub]"
CALL_TIMEOUT_S = 5.0
READ_ALL_TIMEOUT_S, PART_TIMEOUT_S = 120.0, 10.0
"""A leader that is dead, and has not said so, is not waited for any longer."""
SYNC_ALL_FIRST_MS, SYNC_ALL_MS = 10_000, 60_000
"""When a follower compares all it has with the leader. Source: RocketMQ SlaveSynchronize."""
DIGESTED_AT_ONCE = 4_096
_BACKOFF = Backoff(first_ms=50, delay_ms_max=1_000)


class Follower:
    """Keeps this node's copy like the leader's.

    Attributes:
        writing: Held by whoever may write to `disk`.
        changes: Where this node stands.
        leader: The leader's last answer: its epoch and version.
        stuck: Whether it can't follow.
    """

    def __init__(
        self,
        disk: ProgressStore,
        changes: ChangeLog,
        peer: ReplicationPeer,
        settings: OffsetsSettings,
        runtime: Runtime,
        stuck: Stuck,
    ) -> None:
        self.disk, self.changes, self._peer, self.stuck = disk, changes, peer, stuck
        self._runtime, self.writing = runtime, asyncio.Lock()
        self._node_id, self._hold_ms = settings.node_id, settings.replica_policy.hold_ms
        self._kept_bytes_max = settings.replica_kept_bytes_max
        self.leader = Position(0, 0)
        self._compare_ms = runtime.clock.monotonic_ms() + SYNC_ALL_FIRST_MS
        self._expected: tuple[Position, bytes] | None = None

    async def reload(self) -> None:
        """This node is no leader any more: go on from what is on the disk."""
        await self.disk.wait_idle()
        self.changes.replace_with(read_change_log(self.disk, kept_bytes_max=self._kept_bytes_max))

    def has_room(self) -> bool:
        """Whether the next change could be written here; if not, the leader is told."""
        try:
            self.disk.check_room()
        except DiskFull as error:
            self.stuck.met(error)
            return False
        return True

    async def run(self) -> None:
        """Follow for ever; waits while this node writes by itself. To be run as one task."""
        failures = 0
        while True:
            try:
                await self._step()
                if self.has_room():
                    self.stuck.passed()
                failures = 0
            except BatonError as error:
                self.stuck.met(error)
                level = logging.WARNING if failures == 10 else logging.DEBUG
                log.log(level, "not following position=%s error=%s", self.changes.position, error)
                delay_ms = _BACKOFF.delay_ms(failures, self._runtime.random, error.retry_after_ms)
                await asyncio.sleep(delay_ms / 1000)
                failures += 1

    async def _step(self) -> None:
        async with self.writing:
            before = self.changes.position
        stub = self._peer.stub()
        request = pb.FetchRequest(
            node_id=self._node_id,
            position=pb.Position(epoch=before.epoch, version=before.version),
            hold_ms=self._hold_ms,
            problem=self.stuck.problem,
        )
        try:
            await self._ask_digest(stub, before)
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
                return  # it was leader meanwhile
            self.leader = Position(answer.epoch, answer.version)
            if everything is not None:
                await self._begin_anew(everything)
            else:
                await self._adopt([_change(one) for one in answer.changes])

    async def _adopt(self, found: list[StoreChange]) -> None:
        """Take changes over in one write, or in two if a comparison is due between them."""
        at = self.changes.position
        for change in found:
            if change.position.version != at.version + 1 or change.position.epoch < at.epoch:
                raise DataLoss(f"the leader sent {change.position} after {at}")
            at = change.position
        if self._expected is not None:
            until = self._expected[0].version - self.changes.position.version
            if 0 <= until <= len(found):
                await self._write(found[:until])
                found = found[until:]
                await self._compare()
        await self._write(found)

    async def _write(self, found: list[StoreChange]) -> None:
        newest: dict[bytes, bytes | None] = {}
        for change in found:
            newest.update(change.entries)
        if newest:
            await self.disk.write(list(newest.items()))
        for change in found:
            self.changes.append(change)

    async def _read_all(
        self, stub: pb_grpc.ReplicationServiceAsyncStub, before: Position
    ) -> list[tuple[bytes, bytes]]:
        entries: list[tuple[bytes, bytes]] = []
        request = pb.ReadAllRequest(node_id=self._node_id, epoch=before.epoch)
        now_s = asyncio.get_running_loop().time
        try:
            async with asyncio.timeout(PART_TIMEOUT_S) as silence:
                async for part in stub.ReadAll(request, timeout=READ_ALL_TIMEOUT_S):
                    silence.reschedule(now_s() + PART_TIMEOUT_S)
                    entries += [(entry.key, entry.value) for entry in part.entries]
                    if part.last:
                        return entries
        except TimeoutError:
            log.warning("the leader fell silent entries=%d", len(entries))
        raise Unreachable("the leader ended before it had sent everything", retry_after_ms=200)

    async def _begin_anew(self, entries: list[tuple[bytes, bytes]]) -> None:
        changes = change_log_of(dict(entries), kept_bytes_max=self._kept_bytes_max)
        if changes.position.epoch < self.changes.position.epoch:
            raise OldEpoch(f"everything of epoch {changes.position.epoch} is refused")
        log.warning("begins anew position=%s was=%s", changes.position, self.changes.position)
        await self.disk.replace(entries)
        self.changes.replace_with(changes)
        self._expected = None

    async def _ask_digest(
        self, stub: pb_grpc.ReplicationServiceAsyncStub, before: Position
    ) -> None:
        """From time to time learn what the leader's state comes to, at a position still to come."""
        now_ms = self._runtime.clock.monotonic_ms()
        if now_ms < self._compare_ms or not before.version:
            return
        self._compare_ms = now_ms + SYNC_ALL_MS
        request = pb.DigestRequest(node_id=self._node_id, epoch=before.epoch)
        answer = await stub.Digest(request, timeout=CALL_TIMEOUT_S)
        self._expected = Position(answer.position.epoch, answer.position.version), answer.digest

    async def _compare(self) -> None:
        """Compare all that is on the disk; begin anew with the next step if it is not the same.

        Raises:
            DataLoss: it is not the same.
        """
        assert self._expected is not None
        (at, digest), self._expected = self._expected, None
        if self.changes.position != at:
            return  # there was another leader meanwhile
        if await digest_of(await self.disk.snapshot()) == digest:
            log.info("same as the leader position=%s", at)
            return
        self.changes.replace_with(ChangeLog((), 0, kept_bytes_max=self._kept_bytes_max))
        raise DataLoss(f"what is stored at {at} is not what the leader has; all is read anew")


async def digest_of(entries: Sequence[tuple[bytes, bytes]]) -> bytes:
    """What a state comes to: BLAKE2b-256 of its keys and values, with their lengths.

    Lets others go on now and then: a leader whose state is large has a lease to keep.
    """
    found = blake2b(digest_size=32)
    for number, (key, value) in enumerate(entries, start=1):
        found.update(b"%d %d " % (len(key), len(value)))
        found.update(key)
        found.update(value)
        if number % DIGESTED_AT_ONCE == 0:
            await asyncio.sleep(0)
    return found.digest()


def _change(read: pb.Change) -> StoreChange:
    entries: list[Entry] = [
        (entry.key, entry.value if entry.HasField("value") else None) for entry in read.entries
    ]
    return StoreChange(Position(read.position.epoch, read.position.version), entries)
