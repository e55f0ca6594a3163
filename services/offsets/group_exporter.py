"""Hands a group over to another replica set: seals it, sends its entries, removes them later.

The seal is a durable change like any other, so it outlives this leader. After it, this set answers
no call about the group and changes nothing of it: a repeated export sends the same entries.
"""

from __future__ import annotations

import logging

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.core.local_placements import PlacementState, old_move
from batonmq_server.offsets.epoch_state import EpochState
from batonmq_server.offsets.persistence import PlacementKey, RawEntries, entries_of_group

log = logging.getLogger(__name__)

PART_BYTES = 1024 * 1024
"""Approximate size of one answer, and of what one write removes."""


class GroupExporter:
    """Seals groups that leave this replica set, and sends their stored entries."""

    def __init__(self, state: EpochState) -> None:
        self._table, self._history = state.table, state.history
        self._commits, self._disk = state.commits, state.disk
        self._placement_lock = state.placement_lock

    async def export(
        self, group: str, move: int, to_set: str, after_key: bytes
    ) -> pb.ExportGroupResponse:
        """Seal the group if it is not sealed yet, and return the entries after `after_key`.

        Raises:
            OldMove, NotServing: as `LocalPlacements.seal`.
        """
        placements = self._table.placements
        async with self._placement_lock:
            if placements.seal(group, move, to_set, self._table.topic_ids):
                self._commits.mark_changed(PlacementKey(group))
                log.info("group sealed group=%s move=%d to_set=%s", group, move, to_set)
            await self._commits.wait_all_durable()
            self._table.drop(group)
            self._history.drop(group)
        entries = await entries_of_group(self._disk, group, after_key, PART_BYTES)
        placement = placements.get(group)
        if placement is None or (placement.move, placement.state) != (move, PlacementState.GONE):
            raise old_move(group, move, placement.move if placement is not None else 0)
        return pb.ExportGroupResponse(
            offsets_epoch=self._table.epoch,
            entries=[pb.StoredEntry(key=key, value=value) for key, value in entries],
            last=sum(len(key) + len(value) for key, value in entries) < PART_BYTES,
            term=self._table.term,
            topic_ids=placement.topic_ids,
            floor_token=self._table.floor.token,
            floor_reset_epoch=self._table.floor.reset_epoch,
        )

    async def forget(self, group: str, move: int) -> None:
        """Remove the entries that were sent by `move`; do nothing if the group was imported again.

        They are removed part by part, so that other changes do not wait for all of them. From the
        first part on the group is not exported any more. A repeated call removes the rest.

        Raises:
            InvalidArgument: the group was not handed over by this move.
        """
        count = 0
        while removed := await self._forget_part(group, move):
            count += removed
        if count:
            log.info("group forgotten group=%s move=%d entries=%d", group, move, count)

    async def _forget_part(self, group: str, move: int) -> int:
        """Remove a part of the entries; return how many it had, 0 if none is left."""
        async with self._placement_lock:
            part = await entries_of_group(self._disk, group, bytes_max=PART_BYTES)
            if not self._table.placements.forget(group, move):
                part = []  # it was imported again
            else:
                self._commits.mark_changed(PlacementKey(group))
                self._commits.mark_changed(RawEntries([(key, None) for key, _ in part]))
            await self._commits.wait_all_durable()
        return len(part)
