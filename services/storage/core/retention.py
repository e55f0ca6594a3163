"""Decides which segments of the log are removed, and whether the disk is too full to write.

This module only decides: the caller passes segments, disk space and time. Segments are removed as a
whole, the oldest first; the segment that is written to is never removed.

Source: RocketMQ CleanCommitLogService and its watermarks. Deviations: the age of a segment counts
from the store times of its messages, not from the time of the file; forced cleaning removes no more
than needed to bring the disk below its watermark; the log may also be limited by size.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from enum import IntEnum

from batonmq.errors import DiskFull

SEGMENTS_PER_ROUND = 16
"""Maximum number of segments that one round removes."""
RATE_WINDOW_MS = 300_000
RATE_WINDOW_MS_MIN = 10_000
SAMPLE_INTERVAL_MS = 1_000


class DiskState(IntEnum):
    """How full the disk is; each state includes the actions of the states before it."""

    OK = 1
    WARN = 2
    CLEAN = 3
    CLEAN_FORCIBLY = 4
    FULL = 5


@dataclass(frozen=True, slots=True)
class DiskUsage:
    """Used and free space on the file system of the log."""

    used_bytes: int
    free_bytes: int

    @property
    def bytes_count(self) -> int:
        """Used and free bytes together."""
        return self.used_bytes + self.free_bytes

    @property
    def used_percent(self) -> float:
        """Used share of the file system, 0 to 100."""
        return 100 * self.used_bytes / self.bytes_count if self.bytes_count else 0.0


@dataclass(frozen=True, slots=True, kw_only=True)
class RetentionPolicy:
    """The rules of retention. Percentages are disk usage.

    Attributes:
        age_ms_max: Retention time of messages; 0 for unlimited.
        hours: Hours of the day, 0 to 23, at which expired messages are removed.
        log_bytes_max: Maximum size of the log, kept at any hour; 0 for unlimited.
        warn_percent: From here on the state is WARN, without any action.
        clean_percent: From here on expired messages are removed at any hour.
        clean_forcibly_percent: From here on the oldest messages are removed even if not expired.
        full_percent: From here on writes are rejected, until usage is below
            `clean_forcibly_percent`.
    """

    age_ms_max: int
    hours: frozenset[int]
    log_bytes_max: int
    warn_percent: int = 70
    clean_percent: int = 75
    clean_forcibly_percent: int = 85
    full_percent: int = 90


@dataclass(frozen=True, slots=True)
class SealedSegment:
    """A segment that is no longer written to."""

    first_position: int
    next_position: int
    purged: bool = False
    remote: bool = False
    """Whether the segment is only in the object store."""

    @property
    def stored_bytes(self) -> int:
        """Bytes on disk or in the store; a purged segment has none."""
        return 0 if self.purged else self.next_position - self.first_position

    @property
    def local_bytes(self) -> int:
        """Bytes on disk."""
        return 0 if self.remote else self.stored_bytes


@dataclass(frozen=True, slots=True)
class CleaningTime:
    """The time of a decision: the wall clock, and the hour in the node's time zone, 0 to 23."""

    unix_ms: int
    hour: int


class Retention:
    """Tracks the disk usage and decides by the policy.

    Args:
        segment_bytes: Size of new segments.

    Attributes:
        state: State of the disk at the last observation.
        seconds_until_full: Estimated time until writes are rejected, at the growth rate of the last
            5 minutes; infinite if the usage does not grow.
    """

    def __init__(self, policy: RetentionPolicy, segment_bytes: int) -> None:
        self._policy, self._segment_bytes = policy, segment_bytes
        self._no_space = False
        self._samples: deque[tuple[int, int]] = deque()
        self.usage = DiskUsage(0, 0)
        self.state = DiskState.OK
        self.seconds_until_full = math.inf

    def observe(self, usage: DiskUsage, unwritten_bytes: int, now_ms: int) -> DiskState:
        """Record the disk usage; return the new state.

        Args:
            unwritten_bytes: Used bytes that are allocated by the log but not written yet.
            now_ms: Monotonic time.
        """
        self.remeasure(usage)
        self._sample(now_ms, usage.used_bytes - unwritten_bytes)
        return self.state

    def remeasure(self, usage: DiskUsage) -> None:
        """Update usage and state together, between two observations.

        So a rejection never has a figure that contradicts it, and space that was freed counts for
        the next write.
        """
        self.usage = usage
        self._no_space = self._no_space and usage.free_bytes < self._segment_bytes
        self.state = self._state()

    def record_no_space(self) -> None:
        """Record that a write found no space: writes are rejected until a segment fits."""
        self._no_space = True
        self.state = DiskState.FULL

    @property
    def has_room(self) -> bool:
        """Whether the disk has room for a leader: it would accept writes now, and for a while."""
        spare = self.usage.free_bytes >= 2 * self._segment_bytes
        return spare and self.state < DiskState.CLEAN_FORCIBLY

    def rejection(self) -> DiskFull | None:
        """Return why writes are rejected now; None if they are accepted."""
        if self.state is not DiskState.FULL:
            return None
        policy, usage = self._policy, self.usage
        return DiskFull(
            f"the disk is {usage.used_percent:.1f} % full, {usage.free_bytes} bytes are free; "
            f"writes are rejected from {policy.full_percent} % on or if there is no space",
            remedy=f"Free space, or shorten the retention time; writes are accepted again "
            f"below {policy.clean_forcibly_percent} %.",
            retry_after_ms=1_000,
            facts={
                "used_percent": f"{usage.used_percent:.1f}",
                "limit_percent": policy.full_percent,
                "free_bytes": usage.free_bytes,
            },
        )

    def keep_from(
        self,
        sealed: Sequence[SealedSegment],
        log_bytes: int,
        moment: CleaningTime,
        newest_unix_ms: Callable[[SealedSegment], int],
        held_from: Callable[[], float],
    ) -> int:
        """Return the position from which the log is kept.

        It is the first position of `sealed` if no segment is removed.

        Args:
            sealed: Segments that may be removed, oldest first, at least one.
            log_bytes: Size of the log on disk, including the segment that is written to.
            newest_unix_ms: Returns a time by which all messages of a segment were stored. Called
                only for segments for which it matters.
            held_from: Returns the position from which topics with a longer retention need the
                log; limits of size and of the disk are stronger. Called only if it matters.
        """
        policy = self._policy
        age_due = policy.age_ms_max > 0 and (
            moment.hour in policy.hours or self.state >= DiskState.CLEAN
        )
        old_unix_ms = moment.unix_ms - policy.age_ms_max
        surplus_bytes = self._surplus_bytes()
        keep_from = sealed[0].first_position
        held: float | None = None
        for segment in sealed[:SEGMENTS_PER_ROUND]:
            short = surplus_bytes > 0 and not segment.remote  # else its removal frees no space
            must_go = short or 0 < policy.log_bytes_max < log_bytes
            if not must_go:
                if not age_due or newest_unix_ms(segment) > old_unix_ms:
                    break
                held = held_from() if held is None else held
                if segment.next_position > held:
                    break
            keep_from = segment.next_position
            log_bytes -= segment.stored_bytes
            surplus_bytes -= segment.local_bytes
        return keep_from

    def _state(self) -> DiskState:
        policy, percent = self._policy, self.usage.used_percent
        stays_full = self.state is DiskState.FULL and percent >= policy.clean_forcibly_percent
        if percent >= policy.full_percent or stays_full or self._no_space:
            return DiskState.FULL
        if percent >= policy.clean_forcibly_percent:
            return DiskState.CLEAN_FORCIBLY
        if percent >= policy.clean_percent:
            return DiskState.CLEAN
        return DiskState.WARN if percent >= policy.warn_percent else DiskState.OK

    def _surplus_bytes(self) -> int:
        """Return how many bytes must be removed even if they have not expired."""
        surplus = 0
        if self.state >= DiskState.CLEAN_FORCIBLY:
            allowed = self._bytes_at(self._policy.clean_forcibly_percent)
            surplus = self.usage.used_bytes - allowed + 1
        if self._no_space:
            surplus = max(surplus, self._segment_bytes - self.usage.free_bytes)
        return surplus

    def _bytes_at(self, percent: int) -> int:
        return -(-self.usage.bytes_count * percent // 100)

    def _sample(self, now_ms: int, used_bytes: int) -> None:
        samples = self._samples
        if not samples or now_ms - samples[-1][0] >= SAMPLE_INTERVAL_MS:
            samples.append((now_ms, used_bytes))
        while now_ms - samples[0][0] > RATE_WINDOW_MS:
            samples.popleft()
        begin_ms, begin_bytes = samples[0]
        grown, room = used_bytes - begin_bytes, self._bytes_at(self._policy.full_percent)
        room = max(0, room - used_bytes)
        if self.state is DiskState.FULL:
            self.seconds_until_full = 0.0
        elif now_ms - begin_ms < RATE_WINDOW_MS_MIN or grown <= 0:
            self.seconds_until_full = math.inf
        else:
            self.seconds_until_full = room / grown * (now_ms - begin_ms) / 1000
