"""The progress of a queue at its owner: received, started, finished and committed offsets.

The letters are those of the ownership protocol (docs/explanation/ownership.md):
C committed, A acked above C, M maybe seen by an earlier owner, H handlers that run, F finished and
not confirmed as acked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batonmq._core.ranges import Range, contains, normalize, of_sorted, subtract


@dataclass(frozen=True, slots=True)
class GrantedProgress:
    """The content of a grant: the token, and the group's progress on the queue."""

    token: int
    reset_epoch: int
    committed: int
    acked: tuple[Range, ...] = ()
    maybe_seen: tuple[Range, ...] = ()


@dataclass(frozen=True, slots=True)
class Acks:
    """Handled offsets: all below `committed`, and `ranges` at or above it."""

    committed: int
    ranges: tuple[Range, ...]
    version: int = 0


@dataclass(frozen=True, slots=True)
class CloseContent:
    """The content of a Close; once sent it never changes (protocol section 9)."""

    token: int
    reset_epoch: int
    acks: Acks
    unfinished: tuple[Range, ...]


class QueueProgress:
    """The progress on one queue under one token.

    Every offset of [C, next) is open (received, not finished) or done: handled, filtered or acked
    before. Offsets at or above `next_offset` that are already done, as after a fence and a new
    grant, are kept apart until `next_offset` has passed them.

    Args:
        running: Offsets with running handlers; those that are acked by now are left out.
        finished: Offsets that were finished under an earlier token, and perhaps not acked.
        dropped: Offsets that the request for this token claimed, and whose handlers gave up since.
            offsets does not know that they were started and are not being handled.
    """

    def __init__(
        self,
        start: GrantedProgress,
        running: Iterable[int] = (),
        finished: Sequence[Range] = (),
        dropped: Iterable[int] = (),
    ) -> None:
        self.token = start.token
        self.reset_epoch = start.reset_epoch
        self.next_offset = start.committed
        self._maybe_seen = list(start.maybe_seen)
        self._ahead = normalize([*start.acked, *finished])
        self._open: OrderedDict[int, None] = OrderedDict()
        acked = normalize([(0, start.committed), *start.acked])
        self._running = {offset for offset in running if not contains(acked, offset)}
        self._given_up: set[int] = set()
        self._dropped = {offset for offset in dropped if not contains(acked, offset)}
        self._confirmed = Acks(start.committed, tuple(normalize(start.acked)))
        self._claimed: Sequence[Range] = ()
        self._version = 1 if finished else 0
        self.unconfirmed_count = 0

    @property
    def committed(self) -> int:
        """C, as confirmed by offsets."""
        return self._confirmed.committed

    @property
    def span(self) -> int:
        """Number of offsets between C and the last one received."""
        return self.next_offset - self._confirmed.committed

    @property
    def received_offset(self) -> int:
        """One past the highest offset received under the token, or kept from an earlier one."""
        kept = self._running | self._given_up | self._dropped
        ahead = self._ahead[-1][1] if self._ahead else 0
        return max(self.next_offset, ahead, max(kept, default=-1) + 1)

    @property
    def running(self) -> frozenset[int]:
        """H: offsets with running handlers."""
        return frozenset(self._running)

    @property
    def running_count(self) -> int:
        """Number of handlers that run."""
        return len(self._running)

    @property
    def dirty(self) -> bool:
        """Whether there are acks to commit."""
        return self._version != self._confirmed.version

    def is_done(self, offset: int) -> bool:
        """Whether `offset`, which is not received yet, was handled before or is being handled."""
        return offset in self._running or (bool(self._ahead) and contains(self._ahead, offset))

    def is_redelivered(self, offset: int) -> bool:
        """Whether an earlier owner may have started `offset`."""
        seen = self._maybe_seen
        return offset in self._dropped or (bool(seen) and contains(seen, offset))

    def note_maybe_seen(self, ranges: Iterable[Range]) -> None:
        """Add offsets to M."""
        self._maybe_seen = normalize([*self._maybe_seen, *ranges])

    def receive(self, next_offset: int, wanted: Sequence[int]) -> None:
        """Note that [self.next_offset, next_offset) arrived.

        Args:
            wanted: Offsets of the range to be handled, ascending; `is_done` is False for each.
        """
        self._open.update(dict.fromkeys(wanted))
        self.unconfirmed_count += next_offset - self.next_offset - len(wanted)
        self.next_offset = next_offset
        self._ahead = [run for run in self._ahead if run[1] > next_offset]
        self._version += 1

    def start(self, offset: int) -> bool:
        """Note that a handler begins; return False if the offset does not wait (any more)."""
        if offset not in self._open or offset in self._running or offset in self._given_up:
            return False
        self._running.add(offset)
        return True

    def finish(self, offset: int) -> bool:
        """Note that a handler succeeded; return False if its result does not count any more."""
        if offset not in self._running:
            return False
        self._running.remove(offset)
        self._dropped.discard(offset)
        if self._open.pop(offset, 0) == 0:
            self._ahead = normalize([*self._ahead, (offset, offset + 1)])
        self._version += 1
        self.unconfirmed_count += 1
        return True

    def give_up(self, offset: int) -> None:
        """Note that a handler failed, or that its result will be ignored: started, not handled."""
        if offset in self._running:
            self._running.remove(offset)
            self._given_up.add(offset)

    def acks(self) -> Acks:
        """Return the offsets that are handled now, to be committed and then passed to `confirm`."""
        oldest_open = next(iter(self._open), self.next_offset)
        started = self._running | self._given_up
        committed = min(self.next_offset, oldest_open, *started)
        open_ranges = of_sorted(sorted(self._open.keys() | started))
        done = [(committed, self.next_offset)] if committed < self.next_offset else []
        ranges = subtract(normalize([*done, *self._ahead]), open_ranges)
        while ranges and ranges[0][0] <= committed:
            committed = max(committed, ranges.pop(0)[1])
        return Acks(committed, tuple(ranges), self._version)

    def confirm(self, acks: Acks) -> None:
        """Note that offsets has stored `acks` durably."""
        if acks.version >= self._confirmed.version:
            self._confirmed = acks
            self.unconfirmed_count = 0

    def claimable(self) -> list[Range]:
        """Return H + F: the offsets to claim when the queue is acquired again (section 11)."""
        acks = self.acks()
        below = (self._confirmed.committed, acks.committed)
        finished = [*([below] if below[0] < below[1] else []), *acks.ranges]
        running = of_sorted(sorted(self._running))
        return normalize([*subtract(normalize(finished), self._confirmed.ranges), *running])

    def claim(self, ranges_max: int) -> Sequence[Range]:
        """Return the part of `claimable` that a request claims, and remember it."""
        self._claimed = self.claimable()[:ranges_max]
        return self._claimed

    def renewed(self, start: GrantedProgress) -> QueueProgress:
        """Return the progress under a new grant; it keeps H and F if the reset epoch is the same.

        Offsets that were received and not started are forgotten; they are delivered again.
        """
        if start.reset_epoch != self.reset_epoch:
            return QueueProgress(start)
        finished = subtract(self.claimable(), of_sorted(sorted(self._running)))
        dropped = (offset for offset in self._given_up if contains(self._claimed, offset))
        return QueueProgress(start, self._running, finished, dropped)

    def close_content(self) -> CloseContent:
        """Return the content of a Close sent now; handlers that still run count as given up."""
        acks, started = self.acks(), self._running | self._given_up | self._dropped
        handled = [(0, acks.committed), *acks.ranges]
        unfinished = tuple(subtract(of_sorted(sorted(started)), handled))
        return CloseContent(self.token, self.reset_epoch, acks, unfinished)
