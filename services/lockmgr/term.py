"""The parts that a leader works with during one term."""

from __future__ import annotations

from dataclasses import dataclass, field
from random import Random

from batonmq._common.clock import Clock
from batonmq_server.lockmgr.core.handover_timing import HandOverTimings
from batonmq_server.lockmgr.core.lock_entry import LockPolicy
from batonmq_server.lockmgr.core.lock_table import LockTable
from batonmq_server.lockmgr.lock_store import LockStore
from batonmq_server.lockmgr.metrics import LockmgrMetrics
from batonmq_server.lockmgr.offsets_client import OffsetsClient


@dataclass(frozen=True, slots=True, kw_only=True)
class Term:
    """One term of leadership.

    Attributes:
        number: Create revision of the leader's election key.
        timings: Phases of hand-overs, for metrics and events only.
    """

    number: int
    policy: LockPolicy
    table: LockTable
    offsets: OffsetsClient
    store: LockStore
    clock: Clock
    random: Random
    metrics: LockmgrMetrics
    timings: HandOverTimings = field(default_factory=HandOverTimings)

    def now_ms(self) -> int:
        """Return the time of the leader's monotonic clock."""
        return self.clock.monotonic_ms()
