"""Takes groups over from other replica sets, as their placements in etcd say.

The leader of the new set does one move in these steps:

    1  writes ARRIVING: no call about the group is answered yet
    2  the old set seals the group and sends its entries in parts; each part is written
    3  writes KEPT, with the changes that the move requires; calls are answered from now on
    4  the old set removes the entries that it has sent
    5  writes to etcd that the move is finished, so that another move may follow

Every step may be repeated. After a failure this leader, or the next one, continues with the first
step that was not completed.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass

from baton.offsets.v1 import offsets_service_pb2 as pb
from baton.offsets.v1 import offsets_service_pb2_grpc as pb_grpc
from batonmq._common.aio import in_steps, wait_until
from batonmq._common.clock import Clock
from batonmq._common.rpc import answered
from batonmq.errors import BatonError, NoQuorum
from batonmq_server.offsets.codec import seal, unseal
from batonmq_server.offsets.core.change_log import Entry
from batonmq_server.offsets.core.local_placements import LocalPlacement, PlacementState
from batonmq_server.offsets.core.values import Instant, Tombstone
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.persistence import (
    FloorKey,
    PlacementKey,
    RawEntries,
    placement_entry,
    state_of_group,
    tombstone_entries,
)
from batonmq_server.runtime.etcd.mirror import EtcdMirror
from batonmq_server.runtime.etcd.session import Compare, EtcdSession, Put
from batonmq_server.runtime.group_placements import (
    PLACEMENTS_PREFIX,
    GroupPlacement,
    decode_placement,
)

log = logging.getLogger(__name__)

CALL_TIMEOUT_S = 5.0
RETRY_MS = 200
MOVES_AT_ONCE_MAX = 8


@dataclass(frozen=True, slots=True)
class PlacementDirectory:
    """The placements of all groups in etcd, and the stubs of the other replica sets.

    Attributes:
        offsets_set: Name of this replica set.
        placements: Mirror of the placements; its owner runs it.
        stub: Returns the stub of the leader of a set; raises `Unreachable` if it has no leader.
    """

    offsets_set: str
    etcd: EtcdSession
    placements: EtcdMirror
    stub: Callable[[str], pb_grpc.OffsetsServiceAsyncStub]


class GroupImporter:
    """Imports the groups that are placed at this replica set, during one epoch."""

    def __init__(self, state: EpochState, directory: PlacementDirectory, clock: Clock) -> None:
        self._table, self._history = state.table, state.history
        self._commits, self._disk = state.commits, state.disk
        self._placement_lock = state.placement_lock
        self._directory, self._clock = directory, clock
        self._pending: dict[str, GroupPlacement] = {}  # unfinished moves to this set, by group
        self._changed = asyncio.Event()

    async def run(self) -> None:
        """Import groups until cancelled."""
        placements = self._directory.placements
        on_change = self._on_change
        placements.on_change.append(on_change)
        try:
            await placements.ready()
            async for group in in_steps(list(placements.values)):
                self._note_placement(group)
            await self._create_missing_placements()
            while True:
                self._changed.clear()
                pending = dict(sorted(self._pending.items()))
                slots = asyncio.Semaphore(MOVES_AT_ONCE_MAX)
                async with asyncio.TaskGroup() as tasks:
                    for group, placement in pending.items():
                        tasks.create_task(self._try_move(group, placement, slots))
                if pending:
                    await wait_until(self._changed, RETRY_MS)
                else:
                    await self._changed.wait()
        finally:
            placements.on_change.remove(on_change)

    async def _create_missing_placements(self) -> None:
        """Write a placement for each group of this set without one, before another set gets it."""
        groups = {key.group for key, _ in self._table.items()}
        own = GroupPlacement(self._directory.offsets_set).encode()
        for group in sorted(groups - self._directory.placements.values.keys()):
            while self._table.placements.get(group) is None:
                key = PLACEMENTS_PREFIX + group
                try:
                    await self._directory.etcd.txn(
                        compare=[Compare(key, create_revision=0)], put=[Put(key, own)]
                    )
                    break
                except NoQuorum as error:
                    log.info("placement of group not written yet group=%s error=%s", group, error)
                    await asyncio.sleep(RETRY_MS / 1000)

    def _on_change(self, groups: frozenset[str]) -> None:
        for group in groups:
            self._note_placement(group)
        self._changed.set()

    def _note_placement(self, group: str) -> None:
        """Note whether etcd has an unfinished move of a group to this set.

        Only a changed placement is decoded: each new group has one.
        """
        stored = self._directory.placements.values.get(group)
        placement = decode_placement(stored) if stored is not None else None
        own = placement is not None and placement.offsets_set == self._directory.offsets_set
        if placement is not None and own and placement.from_set:
            self._pending[group] = placement
        else:
            self._pending.pop(group, None)

    async def _try_move(
        self, group: str, placement: GroupPlacement, slots: asyncio.Semaphore
    ) -> None:
        try:
            async with slots:
                await self._move(group, placement)
        except BatonError as error:
            log.info(
                "group not imported yet group=%s move=%d error=%s", group, placement.move, error
            )

    async def _move(self, group: str, placement: GroupPlacement) -> None:
        local = self._table.placements.get(group)
        if local is not None and local.move > placement.move:
            return  # the mirror of etcd is behind
        if local is None or local.move < placement.move or local.state is PlacementState.ARRIVING:
            await self._import(group, placement)
        forget = pb.ForgetGroupRequest(group=group, move=placement.move)
        stub = self._directory.stub(placement.from_set)
        await answered(stub.ForgetGroup(forget, timeout=CALL_TIMEOUT_S))
        key = PLACEMENTS_PREFIX + group
        finished = GroupPlacement(placement.offsets_set, placement.move)
        done = await self._directory.etcd.txn(
            compare=[Compare(key, mod_revision=placement.revision)],
            put=[Put(key, finished.encode())],
        )
        if done:
            log.info(
                "group moved group=%s move=%d from=%s", group, placement.move, placement.from_set
            )

    async def _import(self, group: str, placement: GroupPlacement) -> None:
        async with self._placement_lock:
            arriving = LocalPlacement(placement.move, PlacementState.ARRIVING)
            self._table.placements.put(group, arriving)
            await self._write(PlacementKey(group))
        request = pb.ExportGroupRequest(
            group=group, move=placement.move, to_set=self._directory.offsets_set
        )
        while True:
            stub = self._directory.stub(placement.from_set)
            answer = await answered(stub.ExportGroup(request, timeout=CALL_TIMEOUT_S))
            entries = [(entry.key, entry.value) for entry in answer.entries]
            for key, value in entries:
                unseal(key, value)
            async with self._placement_lock:
                await self._write(RawEntries(entries))
            if answer.last:
                break
            request.after_key = answer.entries[-1].key
        await self._open(group, placement, answer)

    async def _open(
        self, group: str, placement: GroupPlacement, last: pb.ExportGroupResponse
    ) -> None:
        """Begin to answer calls about the group, of which every entry is written by now.

        If the progress on a topic was deleted in this set, and was not deleted in the old set
        before it sealed the group, the group's progress on the topic is deleted too. Topic ids that
        this set has not seen yet are stored with the group: when this set deletes the progress for
        such an id later, the group keeps what it has made since.

        Args:
            last: The last part of the group.
        """
        topic_ids = last.topic_ids
        async with self._placement_lock:
            now = Instant(self._clock.monotonic_ms(), self._clock.unix_ms())
            own_ids = self._table.topic_ids
            ahead = {topic: one for topic, one in topic_ids.items() if one > own_ids.get(topic, 0)}
            local = LocalPlacement(placement.move, PlacementState.KEPT, topic_ids=ahead)
            queues, resets = await state_of_group(self._disk, group)
            at, value = placement_entry(group, local)
            changes: list[Entry] = [(at, seal(at, value))]
            for key, state in queues.items():
                deleted = own_ids.get(key.topic, 0) > topic_ids.get(key.topic, 0)
                if deleted and not isinstance(state, Tombstone):
                    tombstone = Tombstone(state.token + 1, state.reset_epoch + 1, now.unix_ms)
                    changes += tombstone_entries(key, tombstone)
                    queues[key] = tombstone
            if last.term > self._table.term:
                self._table.announce(last.term)
                self._commits.mark_changed(None)
            if self._table.raise_floor(last.floor_token, last.floor_reset_epoch):
                self._commits.mark_changed(FloorKey())
            await self._write(RawEntries(changes))
            for key, state in queues.items():
                self._table.restore(key, state, now)
            for reset in resets:
                self._history.put(group, reset)
            self._table.placements.put(group, local)
        log.info("group imported group=%s move=%d queues=%d", group, placement.move, len(queues))

    async def _write(self, key: PlacementKey | RawEntries) -> None:
        self._commits.check_room()
        self._commits.mark_changed(key)
        await self._commits.wait_all_durable()
