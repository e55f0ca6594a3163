"""One compaction run of a queue: which messages are kept, and the sections that it writes.

A message is kept unless a newer one of its key is below the end of the run, or it is a tombstone
whose time is over. The offsets are passed in ascending order, so when a tombstone is removed, the
messages that it deletes were removed before.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from batonmq_server.storage.core.compaction_order import Relocation, SectionRows, relocations
from batonmq_server.storage.core.compaction_source import ExaminedChunk
from batonmq_server.storage.core.consumequeue import Int64Array
from batonmq_server.storage.core.key_digests import BoolArray
from batonmq_server.storage.core.newest_offsets import NewestOffsets

_NONE = np.empty(0, np.int64)


@dataclass(frozen=True, slots=True, kw_only=True)
class RunRules:
    """The rules of one run.

    Attributes:
        newest: The newest offset of each key, of the messages that are new since the last run and
            below `compact_to`.
        compact_to: Messages from here on are kept, whatever their keys.
        tombstones_before_unix_ms: Tombstones since before this time are removed.
    """

    newest: NewestOffsets
    compact_to: int
    tombstones_before_unix_ms: int


@dataclass(slots=True)
class SectionDraft:
    """A section that a run has not written yet.

    Attributes:
        next_offset: Offset after the last message that it has taken.
        removed_count: Messages that it leaves out.
        bytes_count: Bytes of `relocations`.
    """

    first_offset: int
    next_offset: int
    removed_count: int = 0
    bytes_count: int = 0
    relocations: list[Relocation] = field(default_factory=list)
    _offsets: list[Int64Array] = field(default_factory=list)
    _tags: list[Int64Array] = field(default_factory=list)
    _tombstones: list[tuple[Int64Array, Int64Array]] = field(default_factory=list)

    @property
    def count(self) -> int:
        """Number of kept messages."""
        return sum(map(len, self._offsets))

    def take(self, chunk: ExaminedChunk, rules: RunRules, since: Int64Array) -> None:
        """Decide about the messages of a chunk. May run in another thread.

        Args:
            since: Since when each tombstone of the chunk counts; 0 if it does not yet.
        """
        kept = kept_messages(chunk, rules, since)
        counts = np.add.reduceat(kept, chunk.begins[:-1], dtype=np.int64)
        for number in np.flatnonzero(counts).tolist():
            header, raw = chunk.batches[number]
            part = kept[chunk.begins[number] : chunk.begins[number + 1]]
            self.relocations += relocations(raw, header, part)
        tombstones = chunk.tombstones & kept
        counted = tombstones & ((since > 0) | (chunk.offsets < rules.compact_to))
        self._tombstones.append((chunk.offsets[counted], since[counted]))
        self._offsets.append(chunk.offsets[kept])
        self._tags.append(chunk.tags[kept])
        self.removed_count += int(len(kept) - kept.sum())
        self.bytes_count = sum(one.header.length for one in self.relocations)
        self.next_offset = max(self.next_offset, chunk.next_offset)

    def rows(self, positions: list[int], now_unix_ms: int) -> SectionRows:
        """Return the rows of the section, given the positions of its relocated batches."""
        counts = [one.header.count for one in self.relocations]
        sizes = [one.header.length for one in self.relocations]
        return SectionRows(
            np.concatenate([_NONE, *self._offsets]),
            np.repeat(np.array(positions, np.int64), counts),
            np.repeat(np.array(sizes, np.int64), counts),
            np.concatenate([_NONE, *self._tags]),
            *self.tombstones(now_unix_ms),
        )

    def tombstones(self, now_unix_ms: int) -> tuple[Int64Array, Int64Array]:
        """Return the offsets of its tombstones that count, and since when.

        Args:
            now_unix_ms: Time at which the section is written: those that did not count before count
                from now on. The messages that they delete are in this section, or in one that is
                already safe.
        """
        offsets = np.concatenate([_NONE, *(one for one, _ in self._tombstones)])
        since = np.concatenate([_NONE, *(one for _, one in self._tombstones)])
        return offsets, np.where(since > 0, since, now_unix_ms)


def kept_messages(chunk: ExaminedChunk, rules: RunRules, since: Int64Array) -> BoolArray:
    """Return whether each message of a chunk is kept."""
    newest = rules.newest.find(chunk.keys)
    kept = ~chunk.keyed | (chunk.offsets >= rules.compact_to) | (newest <= chunk.offsets)
    over = chunk.tombstones & (since > 0) & (since <= rules.tombstones_before_unix_ms)
    return kept & ~over


def tombstone_times(chunk: ExaminedChunk, rows: SectionRows | None) -> Int64Array:
    """Return since when each message of a chunk counts as a tombstone; 0 for the others.

    Args:
        rows: The rows of its section; None for messages of the consume queue.
    """
    since = np.zeros(len(chunk.offsets), np.int64)
    if rows is not None and len(rows.tombstone_offsets):
        at = np.searchsorted(rows.tombstone_offsets, chunk.offsets)
        at = np.minimum(at, len(rows.tombstone_offsets) - 1)
        known = rows.tombstone_offsets[at] == chunk.offsets
        since[known] = rows.tombstone_since[at[known]]
    return since
