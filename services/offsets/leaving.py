"""A group leaves for another replica set: it is sealed, handed over, and forgotten.

From the seal on, which is a change like any other and so outlives this leader, nothing about the
group is answered here and nothing of it changes: every repetition hands over the same.
"""

from __future__ import annotations

import asyncio
import logging
from dataclasses import dataclass, field

from baton.offsets.v1 import offsets_service_pb2 as pb
from batonmq_server.offsets.core.homes import HomeState, old_move
from batonmq_server.offsets.core.resets import Records
from batonmq_server.offsets.core.table import ProgressTable
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.persistence import (
    DurableKey,
    HomeKey,
    Stored,
    Written,
    entries_of_group,
)

log = logging.getLogger(__name__)

PART_BYTES = 1024 * 1024
"""About so much is handed over by one call."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Keeping:
    """What an epoch keeps, and how it is kept.

    Attributes:
        moving: Held while it is decided, or written, where a group is; also while the progress of
            all groups on a topic is ended.
    """

    table: ProgressTable
    records: Records
    commits: GroupCommit[DurableKey]
    disk: Stored
    moving: asyncio.Lock = field(default_factory=asyncio.Lock)


class Leaving:
    """Hands groups over."""

    def __init__(self, keeping: Keeping) -> None:
        self._table, self._records = keeping.table, keeping.records
        self._commits, self._disk, self._moving = keeping.commits, keeping.disk, keeping.moving

    async def hand_over(
        self, group: str, move: int, to_set: str, after_key: bytes
    ) -> pb.HandOverResponse:
        """Seal the group, if it is not yet, and answer what follows `after_key`.

        Raises:
            OldMove, NotServing: see `Homes.seal`.
        """
        homes = self._table.homes
        async with self._moving:
            if homes.seal(group, move, to_set, self._table.topic_ids):
                self._commits.changed(HomeKey(group))
                log.info("group sealed group=%s move=%d to_set=%s", group, move, to_set)
            await self._commits.settled_all()
            self._table.drop(group)
            self._records.drop(group)
        found = await entries_of_group(self._disk, group)
        home = homes.get(group)
        if home is None or (home.move, home.state) != (move, HomeState.GONE):
            raise old_move(group, move, home.move if home is not None else 0)
        answer = pb.HandOverResponse(
            offsets_epoch=self._table.epoch,
            last=True,
            term=self._table.term,
            topic_ids=home.topic_ids,
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
        async with self._moving:
            found = await entries_of_group(self._disk, group)
            # From here to the last `changed` no await: who cancels the call leaves nothing halved.
            if self._table.homes.forget(group, move):
                self._commits.changed(HomeKey(group))
                self._commits.changed(Written([(key, None) for key, _ in found]))
                log.info("group forgotten group=%s move=%d entries=%d", group, move, len(found))
            await self._commits.settled_all()
