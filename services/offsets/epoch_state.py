"""The state of one epoch: in memory, on the disk, and on the way there."""

from __future__ import annotations

import asyncio
from dataclasses import dataclass, field

from batonmq_server.offsets.core.progress_table import ProgressTable
from batonmq_server.offsets.core.resets import ResetHistory
from batonmq_server.offsets.group_commit import GroupCommit
from batonmq_server.offsets.persistence import DurableKey, ProgressStore


@dataclass(frozen=True, slots=True, kw_only=True)
class EpochState:
    """The progress and the recorded resets of one epoch, and the means to make changes durable.

    Attributes:
        commits: Makes changes of `table` and `history` durable in `disk`.
        placement_lock: Held while the placement of a group is decided or written, and while the
            progress of all groups on a topic is deleted.
    """

    table: ProgressTable
    history: ResetHistory
    commits: GroupCommit[DurableKey]
    disk: ProgressStore
    placement_lock: asyncio.Lock = field(default_factory=asyncio.Lock)
