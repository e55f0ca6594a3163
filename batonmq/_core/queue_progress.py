"""The progress of a queue at its owner: received, started, finished and committed offsets.

The letters are those of the ownership protocol (docs/explanation/ownership.md):
C committed, A acked above C, M maybe seen by an earlier owner, H handlers that run, F finished and
not confirmed as acked.
"""

from __future__ import annotations

from bisect import bisect_right
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

    Every offset of [C, next) waits (received, not started), runs, was given up, or is done:
    handled, filtered or acked before. Offsets at or above `next_offset` that are already done, as
    after a fence and a new grant, are kept apart until `next_offset` has passed them. Offsets are
    kept as ranges: messages that are received, started and finished together cost as much as one.

    Args:
        running: Offsets with running handlers; those that are acked by now are left out.
        finished: Offsets that were finished under an earlier token, and perhaps not acked.
        dropped: Offsets that the request for this token claimed, and whose handlers gave up since.
            offsets does not know that they were started and are not being handled. They are
            delivered again under this token.

    Attributes:
        unconfirmed_count: Offsets that were handled or filtered since offsets confirmed acks.
        unstated_count: Those since acks were stated with a credit; the caller sets it to 0.
    """

    def __init__(
        self,
        start: GrantedProgress,
        running: Iterable[Range] = (),
        finished: Sequence[Range] = (),
        dropped: Iterable[int] = (),
    ) -> None:
        self.token = start.token
        self.reset_epoch = start.reset_epoch
        self.next_offset = start.committed
        self._maybe_seen = list(start.maybe_seen)
        self._ahead = normalize([*start.acked, *finished])
        self._waiting: list[Range] = []
        acked = normalize([(0, start.committed), *start.acked])
        self._running = dict(subtract(normalize(running), acked))
        self._given_up: set[int] = set()
        self._dropped = {offset for offset in dropped if not contains(acked, offset)}
        self._confirmed = Acks(start.committed, tuple(normalize(start.acked)))
        self._claimed: Sequence[Range] = ()
        self._version = 1 if finished else 0
        self.unconfirmed_count = self.unstated_count = 0

    @property
    def committed(self) -> int:
        """C, as confirmed by offsets."""
        return self._confirmed.committed

    def is_confirmed(self, offset: int) -> bool:
        """Whether offsets has the acknowledgement of `offset`."""
        confirmed = self._confirmed
        return offset < confirmed.committed or contains(confirmed.ranges, offset)

    @property
    def span(self) -> int:
        """Number of offsets between C and the last one received."""
        return self.next_offset - self._confirmed.committed

    @property
    def stated_span(self) -> int:
        """Number of offsets between the committed offset of `acks` and the last one received."""
        return self.next_offset - self.acks().committed

    @property
    def received_offset(self) -> int:
        """One past the highest offset received under the token, or kept from an earlier one."""
        ends = [self.next_offset, *self._running.values()]
        if self._ahead:
            ends.append(self._ahead[-1][1])
        ends += (offset + 1 for offset in self._given_up | self._dropped)
        return max(ends)

    @property
    def running(self) -> list[Range]:
        """H: offsets with running handlers."""
        return normalize(self._running.items())

    @property
    def running_count(self) -> int:
        """Number of messages in running handlers."""
        running = list(self._running.items())  # a copy: metrics are read in another thread
        return sum(end - first for first, end in running)

    @property
    def dirty(self) -> bool:
        """Whether there are acks to commit."""
        return self._version != self._confirmed.version

    def not_done(self, first: int, end: int) -> Sequence[Range]:
        """Return the offsets of [first, end) that are not handled, nor are being handled.

        Args:
            first: At least `next_offset`.
        """
        if not self._ahead and not self._running:
            return ((first, end),)
        return subtract([(first, end)], normalize([*self._ahead, *self._running.items()]))

    def is_redelivered(self, offset: int) -> bool:
        """Whether an earlier owner may have started `offset`."""
        seen = self._maybe_seen
        return offset in self._dropped or (bool(seen) and contains(seen, offset))

    def note_maybe_seen(self, ranges: Iterable[Range]) -> None:
        """Add offsets to M."""
        self._maybe_seen = normalize([*self._maybe_seen, *ranges])

    @property
    def has_redelivered(self) -> bool:
        """Whether `is_redelivered` is true of any offset."""
        return bool(self._maybe_seen) or bool(self._dropped)

    def receive(self, next_offset: int, wanted: Sequence[Range]) -> None:
        """Note that [self.next_offset, next_offset) arrived.

        Args:
            wanted: Offsets of the range to be handled, ascending; all of them are `not_done`.
        """
        received_count = next_offset - self.next_offset
        for first, end in wanted:
            if self._waiting and self._waiting[-1][1] == first:
                self._waiting[-1] = (self._waiting[-1][0], end)
            else:
                self._waiting.append((first, end))
            received_count -= end - first
        self._note_handled(received_count)
        self.next_offset = next_offset
        self._ahead = [run for run in self._ahead if run[1] > next_offset]
        self._version += 1

    def waits(self, first: int, end: int) -> bool:
        """Whether all offsets of [first, end) were received and not started."""
        index = bisect_right(self._waiting, first, key=lambda run: run[0]) - 1
        return index >= 0 and end <= self._waiting[index][1]

    def start(self, first: int, end: int) -> bool:
        """Note that a handler begins with [first, end).

        Returns:
            False, without effect, if one of the offsets does not wait (any more).
        """
        waiting = self._waiting
        index = 0
        if not waiting or not waiting[0][0] <= first < waiting[0][1]:
            index = bisect_right(waiting, first, key=lambda run: run[0]) - 1
            if index < 0:
                return False
        run_first, run_end = waiting[index]
        if end > run_end:
            return False
        rest = [(run_first, first)] if run_first < first else []
        if end < run_end:
            rest.append((end, run_end))
        waiting[index : index + 1] = rest
        self._running[first] = end
        return True

    def finish(self, first: int, end: int) -> int:
        """Note that a handler succeeded with [first, end).

        Returns:
            The number of offsets of which the result counts: those that still run.
        """
        ended = self._end(first, end)
        for begin, stop in ended:
            if self._dropped:
                self._dropped.difference_update(range(begin, stop))
            if stop > self.next_offset:
                self._ahead = normalize([*self._ahead, (max(begin, self.next_offset), stop)])
            self._note_handled(stop - begin)
        if ended:
            self._version += 1
        return sum(stop - begin for begin, stop in ended)

    def give_up(self, offset: int) -> bool:
        """Note that a handler failed, or that its result will be ignored: started, not handled.

        Returns:
            Whether the message is delivered again under this token: it was received under an
            earlier one, and not under this one yet.
        """
        if not self._end(offset, offset + 1):
            return False
        comes_again = offset >= self.next_offset
        (self._dropped if comes_again else self._given_up).add(offset)
        return comes_again

    def _note_handled(self, count: int) -> None:
        self.unconfirmed_count += count
        self.unstated_count += count

    def _end(self, first: int, end: int) -> Sequence[Range]:
        """Remove the running offsets of [first, end), and return them."""
        if self._running.get(first) == end:
            del self._running[first]
            return ((first, end),)
        running, wanted = normalize(self._running.items()), [(first, end)]
        ended = subtract(wanted, subtract(wanted, running))
        if ended:
            self._running = dict(subtract(running, ended))
        return ended

    def acks(self) -> Acks:
        """Return the offsets that are handled now, to be committed and then passed to `confirm`."""
        open_ranges = normalize([*self._waiting, *self._started()])
        committed = min(self.next_offset, open_ranges[0][0]) if open_ranges else self.next_offset
        done = [(committed, self.next_offset)] if committed < self.next_offset else []
        ranges = subtract(normalize([*done, *self._ahead]), open_ranges)
        while ranges and ranges[0][0] <= committed:
            committed = max(committed, ranges.pop(0)[1])
        return Acks(committed, tuple(ranges), self._version)

    def _started(self) -> list[Range]:
        """Return the offsets whose handlers run or have given up; not normalized."""
        return [*self._running.items(), *((offset, offset + 1) for offset in self._given_up)]

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
        return normalize(
            [*subtract(normalize(finished), self._confirmed.ranges), *self._running.items()]
        )

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
        finished = subtract(self.claimable(), self.running)
        given_up = self._given_up | self._dropped
        dropped = (offset for offset in given_up if contains(self._claimed, offset))
        return QueueProgress(start, self.running, finished, dropped)

    def close_content(self) -> CloseContent:
        """Return the content of a Close sent now; handlers that still run count as given up."""
        acks, dropped = self.acks(), of_sorted(sorted(self._dropped))
        handled = [(0, acks.committed), *acks.ranges]
        unfinished = tuple(subtract(normalize([*self._started(), *dropped]), handled))
        return CloseContent(self.token, self.reset_epoch, acks, unfinished)
