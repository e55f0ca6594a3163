"""The changes of offsets by number: which epoch wrote which, and the newest of them to send on.

A change sets keys and takes keys away, all at once. Where a node stands is a key too, so that every
node with the same position holds the same bytes. Pure.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from batonmq.errors import DataLoss
from batonmq_server.runtime.position import Position

Entry = tuple[bytes, bytes | None]
"""A key and its value; None takes the key away."""

POSITION, HISTORY = b"position", b"history"
"""Names of the keys under which a node keeps where it stands."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One step: everything in it, or nothing."""

    position: Position
    entries: Sequence[Entry]

    @property
    def bytes_count(self) -> int:
        """About how much it is to keep or to send, bytes."""
        return 32 + sum(len(key) + len(value or b"") + 16 for key, value in self.entries)


class ChangeLog:
    """What a node has, and the last changes that brought it there.

    Args:
        history: Epoch and first version, of every epoch that has written something; ascending.
        version: The last one.
        kept_bytes_max: Older changes than fit in are forgotten; one always fits.
    """

    def __init__(
        self,
        history: Sequence[tuple[int, int]],
        version: int,
        *,
        kept_bytes_max: int = 64 * 1024 * 1024,
    ) -> None:
        self._history, self._version = list(history), version
        self._kept: deque[StoreChange] = deque()
        self._kept_bytes, self._kept_bytes_max = 0, kept_bytes_max

    @property
    def position(self) -> Position:
        """The last change."""
        return Position(self._history[-1][0] if self._history else 0, self._version)

    def next(self, epoch: int) -> tuple[Position, list[tuple[bytes, bytes]]]:
        """Where the next change would lead, and what a node that is there holds by name.

        Raises:
            AssertionError: a newer epoch has written already.
        """
        assert epoch >= self.position.epoch
        at = Position(epoch, self._version + 1)
        own = [(POSITION, b"%d" % at.version)]
        if epoch > self.position.epoch:
            own.append((HISTORY, encode_history([*self._history, (epoch, at.version)])))
        return at, own

    def append(self, change: StoreChange) -> None:
        """The node has this change now, durably; it is the next one.

        Raises:
            DataLoss: it is not.
        """
        at = change.position
        if at.version != self._version + 1 or at.epoch < self.position.epoch:
            raise DataLoss(f"change {at} does not follow {self.position}")
        if at.epoch > self.position.epoch:
            self._history.append((at.epoch, at.version))
        self._version = at.version
        self._kept.append(change)
        self._kept_bytes += change.bytes_count
        while self._kept_bytes > self._kept_bytes_max and len(self._kept) > 1:
            self._kept_bytes -= self._kept.popleft().bytes_count

    def replace_with(self, other: ChangeLog) -> None:
        """The node has begun anew: go on from where `other` is."""
        self._history, self._version = other._history, other._version
        self._kept, self._kept_bytes = other._kept, other._kept_bytes

    def contains(self, position: Position) -> bool:
        """Whether that is a point of this node's history, so that who stands there can go on."""
        if position.version > self._version:
            return False
        return self._epoch_of(position.version) == position.epoch

    def since(self, position: Position, bytes_max: int) -> list[StoreChange] | None:
        """The changes after `position`, as many as fit, but one in any case.

        None if they are not kept, and for who has nothing: one that has lost what it had must not
        look as if it had some of it, nor keep what is left of something else.
        """
        missing = self._version - position.version
        if not self.contains(position) or missing > len(self._kept):
            return None
        if not position.version and self._version:
            return None
        wanted = [self._kept[i] for i in range(len(self._kept) - missing, len(self._kept))]
        room = bytes_max

        def fits(change: StoreChange) -> bool:
            nonlocal room
            room -= change.bytes_count
            return room >= 0

        return list(takewhile(fits, wanted)) or wanted[:1]

    def _epoch_of(self, version: int) -> int:
        return max((epoch for epoch, first in self._history if first <= version), default=0)


def encode_history(history: Sequence[tuple[int, int]]) -> bytes:
    """The epochs that have written, as a value."""
    return b" ".join(b"%d:%d" % one for one in history)


def decode_change_log(
    own: Mapping[bytes, bytes], *, kept_bytes_max: int = 64 * 1024 * 1024
) -> ChangeLog:
    """The log of a node that holds these values under POSITION and HISTORY, or neither.

    Raises:
        DataLoss: they can't be read, or contradict each other.
    """
    try:
        version = int(own.get(POSITION, b"0"))
        parts = own.get(HISTORY, b"").split()
        history = [
            (int(epoch), int(first)) for epoch, _, first in (p.partition(b":") for p in parts)
        ]
    except ValueError as error:
        raise DataLoss(f"stored position or history can't be read: {error}") from error
    rising = all(a < b and c < d for (a, c), (b, d) in pairwise(history))
    if not rising or (version > 0) != bool(history) or (history and history[-1][1] > version):
        raise DataLoss(f"stored version {version} contradicts the history {history}")
    return ChangeLog(history, version, kept_bytes_max=kept_bytes_max)
