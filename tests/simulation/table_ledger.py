"""What is known of a compacted topic outside the cluster, and the promises that it must keep.

The topic is a table: writers send numbers, which rise per key, and tombstones. Each message has its
number as a property, because a tombstone has no body.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from batonmq._core.queues import QueueRef

NUMBER = "number"


class Entry(NamedTuple):
    """A message of the table: a value, or a tombstone."""

    key: str
    number: int
    is_tombstone: bool


Messages = Mapping[int, Entry]
"""The messages of a queue, by offset."""


@dataclass(frozen=True, slots=True)
class Pass:
    """One reading of a queue from its beginning to an end.

    Attributes:
        begin_ms, end_ms: When it began and ended.
        next_offset: The end of the queue that it has reached.
    """

    begin_ms: int
    end_ms: int
    next_offset: int
    offsets: frozenset[int]


@dataclass(slots=True)
class TableLedger:
    """The confirmed messages of a run, and what readers and members have seen.

    Attributes:
        newest: The last confirmed message of each key.
        receipts: Confirmed messages by queue and offset.
        handled: Messages that the members have handled.
        violations: Broken promises, as text with the name of the rule.
    """

    seed: str
    newest: dict[str, Entry] = field(default_factory=dict)
    receipts: dict[tuple[QueueRef, int], Entry] = field(default_factory=dict)
    handled: set[Entry] = field(default_factory=set)
    counts: Counter[str] = field(default_factory=Counter)
    violations: list[str] = field(default_factory=list)
    _passes: defaultdict[QueueRef, list[Pass]] = field(default_factory=lambda: defaultdict(list))

    def fail(self, rule: str, text: str) -> None:
        """Note a broken promise."""
        self.violations.append(f"{rule}: {text}")

    def confirmed(self, queue: QueueRef, offset: int, entry: Entry) -> None:
        """Note a receipt; the messages of a key are confirmed one after the other."""
        self.newest[entry.key] = entry
        self.receipts[queue, offset] = entry

    def values(self) -> dict[str, int]:
        """Return the table: the number of each key that is not deleted."""
        return {key: one.number for key, one in self.newest.items() if not one.is_tombstone}

    # ---- readers

    def read(self, reader: str, queue: QueueRef, offset: int, entry: Entry) -> None:
        """Check a message that a reader has got: it is the one with that receipt, if any."""
        stored = self.receipts.get((queue, offset), entry)
        if stored != entry:
            self.fail("receipt", f"{reader} reads {entry} at {queue}@{offset}, stored is {stored}")

    def passed(self, reader: str, queue: QueueRef, this: Pass) -> None:
        """Check a reading from the beginning: what an earlier one has not found stays away."""
        for before in self._passes[queue]:
            if before.end_ms > this.begin_ms:
                continue
            back = {one for one in this.offsets if one < before.next_offset} - before.offsets
            if back:
                self.fail("back", f"{reader} finds {sorted(back)[:5]} of {queue} again")
            if any(one not in this.offsets for one in before.offsets):
                self.counts["removals seen"] += 1
        self._passes[queue].append(this)

    def table_read(self, reader: str, table: Mapping[str, int]) -> None:
        """Compare the table of a reader that went on in time with what was confirmed."""
        self.counts["tables"] += 1
        wanted = self.values()
        for key in sorted(wanted.keys() | table.keys()):
            if wanted.get(key) != table.get(key):
                text = f"{reader} has {table.get(key)} for {key}, confirmed is {wanted.get(key)}"
                self.fail("table", text)

    # ---- members

    def check_delivered(self, readable: Mapping[QueueRef, Messages]) -> None:
        """Check that members have handled all that can be read, and so the newest of each key."""
        for queue, messages in readable.items():
            for offset, entry in messages.items():
                if entry not in self.handled:
                    self.fail("delivered", f"{entry} at {queue}@{offset} was never handled")

    def check_newest(self, readable: Mapping[QueueRef, Messages]) -> None:
        """Check that the newest confirmed message of each key can be read.

        A tombstone may be gone, together with all that it deletes.
        """
        found = newest_of(readable.values())
        for key, entry in sorted(self.newest.items()):
            if found.get(key, entry if entry.is_tombstone else None) != entry:
                self.fail("newest", f"{found.get(key)} is the newest of {key}, not {entry}")

    def is_clean(self, readable: Mapping[QueueRef, Messages]) -> bool:
        """Return whether each key has one message, and a deleted one has none."""
        left = Counter(one.key for messages in readable.values() for one in messages.values())
        return left == Counter(self.values().keys())


def ascending(messages: Sequence[tuple[int, Entry]], newest: dict[str, int], offset: int) -> str:
    """Return what is wrong with the order of messages that were read from an offset on, or "".

    Args:
        newest: The number of each key that the reader has seen last; it is updated.
    """
    for at, entry in messages:
        if at < offset:
            return f"offset {at} is behind {offset - 1}"
        if entry.number < (before := newest.get(entry.key, 0)):
            return f"{entry} at {at} is behind number {before}"
        newest[entry.key], offset = entry.number, at + 1
    return ""


def newest_of(queues: Iterable[Messages]) -> dict[str, Entry]:
    """Return the message of each key with the highest offset; a key has one queue."""
    return {entry.key: entry for one in queues for _, entry in sorted(one.items())}
