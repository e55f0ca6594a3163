"""Finds messages by time, key or position. Only safe messages are found.

Store times never decrease on one node, so positions, offsets and times have the same order; but for
batches that a compaction has written again.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batonmq._core.records import (
    Header,
    check_stamp,
    decode_records,
    key_hash,
    read_header,
)
from batonmq.errors import BadBatch, BatonError, DataLoss, DataLossDetail, MessageNotFound
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.compaction_order import is_relocated, written_unix_ms
from batonmq_server.storage.core.consumequeue import ConsumeQueue, Int64Array
from batonmq_server.storage.core.keyindex import KeyHits
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_reader import verified
from batonmq_server.storage.core.scan import HEAD_BYTES_MAX
from batonmq_server.storage.core.store import MessageStore

CANDIDATES_MAX = 2_000
"""Maximum number of messages that one search by key reads; some may only have the same hash."""
REMOVED_BYTES_MAX = 16 * 1024 * 1024
"""Maximum bytes of batches that one search by key reads although they are trimmed or compacted."""
_NEVER_MS = 1 << 62


@dataclass(frozen=True, slots=True)
class TimeWindow:
    """Store times [from_unix_ms, to_unix_ms)."""

    from_unix_ms: int
    to_unix_ms: int

    def contains(self, header: Header) -> bool:
        """Return whether the messages of a batch were stored in it."""
        return self.from_unix_ms <= header.store_unix_ms < self.to_unix_ms


@dataclass(frozen=True, slots=True)
class MessageMatch:
    """A message: its stored batch, and its index in the batch."""

    batch: bytes
    index: int


@dataclass(frozen=True, slots=True)
class KeyMatches:
    """Messages with a key, newest first; `more` is True if there may be others."""

    messages: list[MessageMatch]
    more: bool


@dataclass(slots=True)
class SearchProbe:
    """The offset that a search reads; 0 before the first one."""

    offset: int = 0


class MessageQueries:
    """Finds messages in `store`."""

    def __init__(self, store: MessageStore) -> None:
        self._store, self._log = store, store.log

    def search_offset(self, key: QueueKey, unix_ms: int, probe: SearchProbe | None = None) -> int:
        """Return the first offset stored at or after a time, or the next offset of the queue.

        Args:
            probe: Gets each offset before its batch is read: after an error, the failed one.

        Raises:
            DataLoss: a batch that had to be read is damaged.
        """
        queue = self._store.queues.get(key)
        if queue is None:
            return 0
        found = self._search_compacted(key, unix_ms)
        if found is not None:
            return found
        low, high = queue.first_offset, queue.visible_offset
        while low < high:
            middle = (low + high) // 2
            if probe is not None:
                probe.offset = middle
            header = self._header_of(queue, middle)
            if header.store_unix_ms >= unix_ms:
                high = max(low, header.first_offset)
            else:
                low = header.next_offset
        return low

    def store_unix_ms(self, queue: ConsumeQueue, offset: int) -> int:
        """Return when the message at a visible offset was stored.

        Raises:
            DataLoss: its batch is damaged.
        """
        return self._header_of(queue, offset).store_unix_ms

    def header(self, position: int, index: int) -> Header:
        """Return the header of the batch at `position`, which has a message `index`.

        Its messages are not read; pass it to `message` for that.

        Raises:
            MessageNotFound: there is no such message, or it is no longer kept.
        """
        missing = MessageNotFound(
            f"no batch at position {position:x} has a message {index:x} (hex, as in the id)",
            detail=DataLossDetail(position=position),
        )
        if not self._log.first_position <= position < self._store.readable_position:
            raise missing
        try:
            header = read_header(self._log.read(position, HEAD_BYTES_MAX))
        except BadBatch as error:
            raise missing from error
        key = header.topic_id, header.queue_id
        queue, offset = self._store.queues.get(key), header.first_offset
        if queue is None or header.position != position or index >= header.count:
            raise missing
        if is_relocated(header) or offset < queue.first_offset:
            if not self._store.is_kept(header):
                raise missing
            return header
        if not queue.first_offset <= offset < queue.visible_offset:
            raise missing
        if int(queue.read(offset, offset + 1).positions[0]) != position:
            raise missing  # the bytes at `position` only look like a batch
        return header

    def message(self, header: Header, index: int) -> MessageMatch:
        """Return the message at `index` of the batch with a header that `header` returned.

        Raises:
            DataLoss: its batch is damaged.
        """
        position, key = header.position, (header.topic_id, header.queue_id)
        return MessageMatch(verified(self._log.read(position, header.length), position, key), index)

    def find(
        self, topic_id: int, key: str, window: TimeWindow, *, messages_max: int, bytes_max: int
    ) -> KeyMatches:
        """Find the messages of a topic with `key`, newest first.

        Args:
            bytes_max: Maximum size of all batches together; the first one always fits.

        Raises:
            DataLoss: a batch that may contain such a message is damaged.
            DamagedRun: a file of the key index is damaged.
        """
        messages: list[MessageMatch] = []
        bytes_count = removed_bytes = candidate_count = 0
        for candidate in self._candidates(topic_id, key, window):
            if (
                candidate_count >= CANDIDATES_MAX
                or bytes_count > bytes_max
                or removed_bytes > REMOVED_BYTES_MAX
            ):
                return KeyMatches(messages, True)
            candidate_count += candidate.count
            removed_bytes += candidate.removed_bytes
            bytes_count += 0 if candidate.indexes else len(candidate.batch)
            for index in candidate.indexes:
                bytes_count += len(candidate.batch)
                if messages and (len(messages) == messages_max or bytes_count > bytes_max):
                    return KeyMatches(messages, True)
                messages.append(MessageMatch(candidate.batch, index))
        return KeyMatches(messages, candidate_count > CANDIDATES_MAX)

    def _candidates(self, topic_id: int, key: str, window: TimeWindow) -> Iterator[_Candidate]:
        """Yield the batches with messages that have the hash of `key`, newest first."""
        compacted = any(queue[0] == topic_id for queue in self._store.compacted.parts)
        for hits in self._store.keys.find(topic_id, key_hash(key)):
            if compacted:  # a relocated batch is younger than its messages
                ever = TimeWindow(0, _NEVER_MS)
                yield from self._candidates_of(hits, ever, topic_id, key, window)
                continue
            if hits.extent.last_unix_ms < window.from_unix_ms:
                return
            if hits.extent.first_unix_ms >= window.to_unix_ms:
                continue
            yield from self._candidates_of(hits, window, topic_id, key, window)

    def _candidates_of(
        self, hits: KeyHits, window: TimeWindow, topic_id: int, key: str, searched: TimeWindow
    ) -> Iterator[_Candidate]:
        for position in reversed(self._within(np.unique(hits.positions), hits, window)):
            begin, end = np.searchsorted(hits.positions, (position, position + 1))
            indexes = sorted(set(hits.indexes[begin:end].tolist()))
            yield self._read_candidate(position, indexes, topic_id, key, searched)

    def _within(self, positions: Int64Array, hits: KeyHits, window: TimeWindow) -> list[int]:
        """Return those of the ascending `positions` that are readable and in the time window."""
        begin = int(np.searchsorted(positions, self._log.first_position))
        end = int(np.searchsorted(positions, self._store.readable_position))
        kept = [at for at in positions[begin:end].tolist() if not self._log.is_purged(at)]
        if hits.extent.last_unix_ms >= window.to_unix_ms:
            kept = kept[: bisect_left(kept, window.to_unix_ms, key=self._store_unix_ms)]
        if hits.extent.first_unix_ms < window.from_unix_ms:
            kept = kept[bisect_left(kept, window.from_unix_ms, key=self._store_unix_ms) :]
        return kept

    def _read_candidate(
        self, position: int, indexes: list[int], topic_id: int, key: str, searched: TimeWindow
    ) -> _Candidate:
        header = self._header_at(position)
        if header.topic_id != topic_id or not searched.contains(header):
            return _Candidate(b"", 1, [])
        queue = topic_id, header.queue_id
        # Checked first: a damaged header could look like that of a removed batch.
        batch = verified(self._log.read(position, header.length), position, queue)
        if not self._store.is_kept(header):
            return _Candidate(b"", 1, [], header.length)  # only its bytes remain
        if indexes[-1] >= header.count:
            raise DataLoss(
                f"the key index refers to message {indexes[-1]} of the batch at {position}, which "
                f"has {header.count}",
                remedy="Stop the node and run: baton fsck DIR --repair.",
                detail=DataLossDetail(position=position),
            )
        newest = indexes[-CANDIDATES_MAX:]
        records = list(decode_records(batch, header, newest))
        matches = [i for i, one in zip(newest, records, strict=True) if key in one.keys]
        return _Candidate(batch, len(indexes), matches[::-1])

    def _store_unix_ms(self, position: int) -> int:
        return written_unix_ms(self._header_at(position))

    def _search_compacted(self, key: QueueKey, unix_ms: int) -> int | None:
        """As `search_offset` in the compacted part of a queue; None if all of it is older."""
        part = self._store.compacted.get(key)
        if part is None:
            return None
        sections = [section for section in part.sections if section.message_count]
        rows = self._store.compacted.rows

        def stored(section: Section, index: int) -> int:
            return self._header_at(int(rows(section).positions[index])).store_unix_ms

        at = bisect_left(sections, unix_ms, key=lambda one: stored(one, -1))
        if at == len(sections):
            return None
        section = sections[at]
        index = bisect_left(
            range(section.message_count), unix_ms, key=lambda one: stored(section, one)
        )
        return int(rows(section).offsets[index])

    def _header_of(self, queue: ConsumeQueue, offset: int) -> Header:
        """Return the header of the batch that contains `offset`."""
        header = self._header_at(int(queue.read(offset, offset + 1).positions[0]))
        if not header.first_offset <= offset < header.next_offset:
            raise DataLoss(
                f"the batch at {header.position} does not contain offset {offset}",
                detail=DataLossDetail(position=header.position),
            )
        return header

    def _header_at(self, position: int) -> Header:
        """Return the header of the batch at `position`.

        Raises:
            DataLoss: the batch is damaged.
        """
        head = self._log.read(position, HEAD_BYTES_MAX)
        try:
            header = read_header(head)
            check_stamp(head)
            if header.position != position:
                raise BadBatch(f"its header has position {header.position}")
        except BatonError as error:
            raise DataLoss(
                f"the batch at {position} is damaged: {error}",
                detail=DataLossDetail(position=position),
            ) from error
        return header


@dataclass(frozen=True, slots=True)
class _Candidate:
    """A batch with `count` messages that have the hash of a key; `indexes` have the key itself.

    Attributes:
        removed_bytes: Its size if its messages are trimmed or compacted.
    """

    batch: bytes
    count: int
    indexes: list[int]
    removed_bytes: int = 0
