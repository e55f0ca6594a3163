"""The log of changes of the store: the epoch of each version, and the newest changes to replicate.

A change sets and deletes keys atomically. The position of a node is stored under a key of its own,
so two nodes with the same position hold the same bytes. Pure: no I/O, no clock.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise, takewhile

from batonmq.errors import DataLoss
from batonmq_server.runtime.replication.position import ReplicaPosition

Entry = tuple[bytes, bytes | None]
"""A key and its value; None deletes the key."""

POSITION, HISTORY = b"position", b"history"
"""Names of the keys under which a node stores its position and history."""


@dataclass(frozen=True, slots=True)
class StoreChange:
    """One atomic change of the store: all of its entries are written, or none."""

    position: ReplicaPosition
    entries: Sequence[Entry]

    @property
    def bytes_count(self) -> int:
        """Approximate size in memory or in a message, in bytes."""
        return 32 + sum(len(key) + len(value or b"") + 16 for key, value in self.entries)


class ChangeLog:
    """The position of a node, its history, and its newest changes.

    Args:
        history: Epoch and first version of every epoch that has written a change, ascending.
        version: The last version.
        kept_bytes_max: Bound on the size of the changes kept in memory; the oldest are dropped
            first, and the newest is always kept.
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
    def position(self) -> ReplicaPosition:
        """Position of the last change."""
        return ReplicaPosition(self._history[-1][0] if self._history else 0, self._version)

    def next(self, epoch: int) -> tuple[ReplicaPosition, list[tuple[bytes, bytes]]]:
        """Return the position of the next change, and the values of POSITION and HISTORY there.

        Raises:
            AssertionError: a newer epoch has already written a change.
        """
        assert epoch >= self.position.epoch
        at = ReplicaPosition(epoch, self._version + 1)
        own = [(POSITION, b"%d" % at.version)]
        if epoch > self.position.epoch:
            own.append((HISTORY, encode_history([*self._history, (epoch, at.version)])))
        return at, own

    def append(self, change: StoreChange) -> None:
        """Append a change that the node has made durable.

        Raises:
            DataLoss: the change is not the next one.
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
        """Take over the state of `other`, after the node has replaced everything it stores."""
        self._history, self._version = other._history, other._version
        self._kept, self._kept_bytes = other._kept, other._kept_bytes

    def contains(self, position: ReplicaPosition) -> bool:
        """Return whether a position is in this node's history: a node there can follow this one."""
        if position.version > self._version:
            return False
        return self._epoch_of(position.version) == position.epoch

    def since(self, position: ReplicaPosition, bytes_max: int) -> list[StoreChange] | None:
        """Return the changes after `position`, up to `bytes_max`, but at least one.

        None if the changes are not kept, or `position` is not in this node's history. None also
        for an empty node: if it has lost its data, it must replace all that is left of it.
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
    """Return the stored form of a history."""
    return b" ".join(b"%d:%d" % one for one in history)


def decode_change_log(
    own: Mapping[bytes, bytes], *, kept_bytes_max: int = 64 * 1024 * 1024
) -> ChangeLog:
    """Return the log of a node with these values of POSITION and HISTORY; both may be missing.

    Raises:
        DataLoss: the values can't be read, or contradict each other.
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
