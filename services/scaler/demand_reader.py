"""Reads the demand of groups through the nameserver, at most once per group and interval."""

from __future__ import annotations

import asyncio
import logging
from collections import OrderedDict
from dataclasses import dataclass, field

from batonmq._common.clock import Clock
from batonmq.admin.admin import Admin
from batonmq.errors import BatonError, Overloaded
from batonmq_server.runtime.log_limiter import LogLimiter
from batonmq_server.scaler.core.demand import Demand, demand_of
from batonmq_server.scaler.metrics import ScalerMetrics

log = logging.getLogger(__name__)

READS_AT_ONCE = 8
WAITING_MAX = 512
"""Calls that may wait for a read; more are refused."""
STUCK_INTERVAL_MS = 300_000
"""Time between two lines of log about the same reason of the same group."""


@dataclass(slots=True)
class _Entry:
    lock: asyncio.Lock = field(default_factory=asyncio.Lock)
    read_ms: int = 0
    result: Demand | BatonError | None = None


class DemandReader:
    """Reads, keeps and reports the demand of groups.

    Args:
        admin: Client of the cluster; the caller closes it.
        age_ms: Age up to which a demand answers further calls.
        groups_max: Groups that are kept.
    """

    def __init__(
        self, admin: Admin, clock: Clock, metrics: ScalerMetrics, *, age_ms: int, groups_max: int
    ) -> None:
        self._admin, self._clock, self._metrics = admin, clock, metrics
        self._age_ms, self._groups_max = age_ms, groups_max
        self._entries: OrderedDict[str, _Entry] = OrderedDict()
        self._room = asyncio.Semaphore(READS_AT_ONCE)
        self._waiting = 0
        self._lines = LogLimiter(clock.monotonic_ms, STUCK_INTERVAL_MS)

    async def read(self, group: str) -> Demand:
        """Return the demand of a group; calls at the same time share one read.

        Raises:
            Overloaded: Too many calls wait.
            GroupNotFound, PermissionDenied: As the nameserver says.
            Unreachable: The lag is unknown.
        """
        if self._waiting >= WAITING_MAX:
            raise Overloaded(
                f"{self._waiting} calls wait for the lag of a group; that is the limit",
                remedy="Repeat the call, or raise the polling interval of the triggers.",
                retry_after_ms=self._age_ms,
            )
        entry = self._entries.setdefault(group, _Entry())
        self._entries.move_to_end(group)
        self._waiting += 1
        try:
            async with entry.lock:
                if not self._is_fresh(entry):
                    entry.result = await self._read(group)
                    entry.read_ms = self._clock.monotonic_ms()
        finally:
            self._waiting -= 1
            while len(self._entries) > self._groups_max:
                oldest, _ = self._entries.popitem(last=False)
                self._metrics.forget(oldest)
        if isinstance(entry.result, BatonError):
            raise entry.result.with_traceback(None)
        assert entry.result is not None
        return entry.result

    def _is_fresh(self, entry: _Entry) -> bool:
        age_ms = self._clock.monotonic_ms() - entry.read_ms
        return entry.result is not None and age_ms < self._age_ms

    async def _read(self, group: str) -> Demand | BatonError:
        """Return the demand, or why it is unknown, which answers waiting calls, too."""
        try:
            async with self._room:
                queues = await self._admin.why_stuck(group)
            demand = demand_of(group, queues)
        except BatonError as error:
            self._metrics.forget(group)
            return error
        self._report(group, demand)
        return demand

    def _report(self, group: str, demand: Demand) -> None:
        """Set the metrics, and log why queues are stuck: KEDA's contract has no field for it."""
        if group in self._entries:
            self._metrics.read(group, demand)
        for reason, queue in demand.stuck.items():
            if self._lines.count((group, reason)):
                log.log(
                    logging.INFO if reason == "NO_MEMBER" else logging.WARNING,
                    "group is stuck group=%s reason=%s queues=%d waiting=%d: %s %s",
                    group,
                    reason,
                    demand.stuck_counts[reason],
                    demand.waiting_messages,
                    queue.message,
                    queue.remedy,
                )
