"""A group leaves for another replica set: it is sealed, handed over, and forgotten.

From the seal on, which is a change like any other and so outlives this leader, nothing about the
group is answered here and nothing of it changes: every repetition hands over the same.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.core.local_placements import PlacementState, old_move
from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetHistory
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.persistence import (
    DurableKey,
    PlacementKey,
    ProgressStore,
    RawEntries,
    entries_of_group,
)

log = logging.getLogger(__name__)

PART_BYTES = 1024 * 1024
"""About so much is handed over by one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """What an epoch keeps, and how it is kept.

    Attributes:
        placement_lock: Held while the placement of a group is decided or written, and while the
            progress of all groups on a topic is deleted.
    """

    table: ProgressTable
    records: ResetHistory
    commits: GroupCommit[DurableKey]
    disk: ProgressStore
    placement_lock: asyncio.Lock = field(default_factory=asyncio.Lock)


class GroupExporter:
    """Hands groups over."""

    def __init__(self, state: EpochState) -> None:
        self._table, self._records = state.table, state.records
        self._commits, self._disk, self._placement_lock = (
            state.commits,
            state.disk,
            state.placement_lock,
        )

    async def hand_over(
        self, group: str, move: int, to_set: str, after_key: bytes
    ) -> pb.HandOverResponse:
        """Seal the group, if it is not yet, and answer what follows `after_key`.

        Raises:
            OldMove, NotServing: see `Homes.seal`.
        """
        placements = self._table.placements
        async with self._placement_lock:
            if placements.seal(group, move, to_set, self._table.topic_ids):
                self._commits.mark_changed(PlacementKey(group))
                log.info("group sealed group=%s move=%d to_set=%s", group, move, to_set)
            await self._commits.wait_all_durable()
            self._table.drop(group)
            self._records.drop(group)
        found = await entries_of_group(self._disk, group)
        placement = placements.get(group)
        if placement is None or (placement.move, placement.state) != (move, PlacementState.GONE):
            raise old_move(group, move, placement.move if placement is not None else 0)
        answer = pb.HandOverResponse(
            offsets_epoch=self._table.epoch,
            last=True,
            term=self._table.term,
            topic_ids=placement.topic_ids,
        )
        size = 0
        for key, value in found:
            if key <= after_key:
                continue
            if size >= PART_BYTES:
                answer.last = False
                break
            answer.entries.add(key=key, value=value)
            size += len(key) + len(value)
        return answer

    async def forget(self, group: str, move: int) -> None:
        """Remove what was handed over by `move`; nothing if it came back since.

        Raises:
            InvalidArgument: it was not handed over.
        """
        async with self._placement_lock:
            found = await entries_of_group(self._disk, group)
            # From here to the last `changed` no await: who cancels the call leaves nothing halved.
            if self._table.placements.forget(group, move):
                self._commits.mark_changed(PlacementKey(group))
                self._commits.mark_changed(RawEntries([(key, None) for key, _ in found]))
                log.info("group forgotten group=%s move=%d entries=%d", group, move, len(found))
            await self._commits.wait_all_durable()
