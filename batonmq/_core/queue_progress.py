"""What the owner of a queue knows of its messages: received, started, finished, committed.

Words and letters are those of the ownership protocol: C committed, A acked above it, M maybe
seen, H running handlers, F finished and not yet confirmed as acked.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from batonmq._core.ranges import Range, contains, normalize, of_sorted, subtract


@dataclass(frozen=True, slots=True)
class GrantedProgress:
    """What a grant tells: the token and where to go on."""

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
    """One queue under one token.

    Every offset of [C, next) is open (received, not finished) or done: handled, filtered or acked
    before. Offsets at or above `next_offset` that are done already, as after losing and regaining
    the queue, are kept apart until `next_offset` has passed them.

    Args:
        running: Handlers that still run; those of offsets that are acked by now count no more.
        finished: What was finished under an earlier token, and perhaps not acked.
        dropped: What the request for this token claimed and its handler gave up since: offsets
            does not know that it was started and is not being handled.
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
        """C as confirmed by offsets."""
        return self._confirmed.committed

    @property
    def span(self) -> int:
        """Offsets between C and what was received."""
        return self.next_offset - self._confirmed.committed

    @property
    def running(self) -> frozenset[int]:
        """H: offsets whose handlers run."""
        return frozenset(self._running)

    @property
    def running_count(self) -> int:
        """How many those are."""
        return len(self._running)

    @property
    def dirty(self) -> bool:
        """Whether there is something to commit."""
        return self._version != self._confirmed.version

    def is_done(self, offset: int) -> bool:
        """Whether `offset`, not yet received, was handled before, or is being handled."""
        return offset in self._running or (bool(self._ahead) and contains(self._ahead, offset))

    def is_redelivered(self, offset: int) -> bool:
        """Whether an earlier holder may have started `offset`."""
        seen = self._maybe_seen
        return offset in self._dropped or (bool(seen) and contains(seen, offset))

    def note_maybe_seen(self, ranges: Iterable[Range]) -> None:
        """Add to M."""
        self._maybe_seen = normalize([*self._maybe_seen, *ranges])

    def receive(self, next_offset: int, wanted: Sequence[int]) -> None:
        """[self.next_offset, next_offset) arrived.

        Args:
            wanted: Offsets of it to be handled, ascending; `is_done` is False for each.
        """
        self._open.update(dict.fromkeys(wanted))
        self.unconfirmed_count += next_offset - self.next_offset - len(wanted)
        self.next_offset = next_offset
        self._ahead = [run for run in self._ahead if run[1] > next_offset]
        self._version += 1

    def start(self, offset: int) -> bool:
        """A handler begins; False if the offset is not (or no longer) waiting here."""
        if offset not in self._open or offset in self._running or offset in self._given_up:
            return False
        self._running.add(offset)
        return True

    def finish(self, offset: int) -> bool:
        """A handler has ended well; False if its result no longer counts."""
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
        """A handler has ended badly, or its result will be ignored: started, not handled."""
        if offset in self._running:
            self._running.remove(offset)
            self._given_up.add(offset)

    def acks(self) -> Acks:
        """What is handled by now; to be committed, and then passed to `confirm`."""
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
        """offsets has `acks` durably."""
        if acks.version >= self._confirmed.version:
            self._confirmed = acks
            self.unconfirmed_count = 0

    def in_hand(self) -> list[Range]:
        """H + F: what may be claimed when the queue is acquired again (section 11)."""
        acks = self.acks()
        below = (self._confirmed.committed, acks.committed)
        finished = [*([below] if below[0] < below[1] else []), *acks.ranges]
        running = of_sorted(sorted(self._running))
        return normalize([*subtract(normalize(finished), self._confirmed.ranges), *running])

    def claim(self, ranges_max: int) -> Sequence[Range]:
        """What a request for the queue claims of `in_hand`; remembered until the next one."""
        self._claimed = self.in_hand()[:ranges_max]
        return self._claimed

    def renewed(self, start: GrantedProgress) -> QueueProgress:
        """The progress under a new grant: keeps H and F if the reset epoch is the same.

        What was received and not started is forgotten; it comes again.
        """
        if start.reset_epoch != self.reset_epoch:
            return QueueProgress(start)
        finished = subtract(self.in_hand(), of_sorted(sorted(self._running)))
        dropped = (offset for offset in self._given_up if contains(self._claimed, offset))
        return QueueProgress(start, self._running, finished, dropped)

    def closing(self) -> CloseContent:
        """What a Close says now: handlers that still run count as given up."""
        acks, started = self.acks(), self._running | self._given_up | self._dropped
        handled = [(0, acks.committed), *acks.ranges]
        unfinished = tuple(subtract(of_sorted(sorted(started)), handled))
        return CloseContent(self.token, self.reset_epoch, acks, unfinished)
