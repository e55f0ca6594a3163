"""Looks messages up: by time, by key, by position. Only what is safe on disk is found.

Store times never go back on one node, so positions, offsets and times have the same order.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from batonmq.common.errors import BadBatch, BatonError, DataLoss, MessageNotFound
from batonmq.core.records import (
    Header,
    check_stamp,
    decode_records,
    key_hash,
    read_header,
)
from services.storage.core.consumequeue import ConsumeQueue, Int64Array
from services.storage.core.keyindex import Found
from services.storage.core.producers import QueueKey
from services.storage.core.scan import HEAD_BYTES_MAX
from services.storage.core.store import Store, verified


@dataclass(frozen=True, slots=True)
class Window:
    """Store times [from_unix_ms, to_unix_ms)."""

    from_unix_ms: int
    to_unix_ms: int


@dataclass(frozen=True, slots=True)
class Match:
    """A message in its stored batch."""

    batch: bytes
    index: int


@dataclass(frozen=True, slots=True)
class Matches:
    """Messages with a key, newest first; `more` if there may be others."""

    messages: list[Match]
    more: bool


class Queries:
    """Reads what `store` has."""

    def __init__(self, store: Store) -> None:
        self._store, self._log = store, store.log

    def search_offset(self, key: QueueKey, unix_ms: int) -> int:
        """First offset stored at or after a time; the next offset of the queue if there is none.

        Raises:
            DataLoss: a batch that had to be looked at is damaged.
        """
        queue = self._store.queues.get(key)
        if queue is None:
            return 0
        low, high = queue.first_offset, queue.visible_offset
        while low < high:
            middle = (low + high) // 2
            header = self._header_of(queue, middle)
            if header.store_unix_ms >= unix_ms:
                high = max(low, header.first_offset)
            else:
                low = header.next_offset
        return low

    def message(self, position: int, index: int) -> Match:
        """The message at `index` of the batch at `position`.

        Raises:
            MessageNotFound: there is none, or it is no longer kept.
            DataLoss: its batch is damaged.
        """
        missing = MessageNotFound(
            f"no message {index} of a batch at position {position}", facts={"position": position}
        )
        if not self._log.first_position <= position < self._log.synced_position:
            raise missing
        try:
            header = read_header(self._log.read(position, HEAD_BYTES_MAX))
        except BadBatch as error:
            raise missing from error
        key = header.topic_id, header.queue_id
        queue, offset = self._store.queues.get(key), header.first_offset
        if queue is None or header.position != position or index >= header.count:
            raise missing
        if not queue.first_offset <= offset < queue.visible_offset:
            raise missing
        if int(queue.read(offset, offset + 1).positions[0]) != position:
            raise missing  # these bytes only look like a batch
        return Match(verified(self._log.read(position, header.length), position, key), index)

    def find(
        self, topic_id: int, key: str, window: Window, *, messages_max: int, bytes_max: int
    ) -> Matches:
        """Messages of a topic that carry `key`, newest first.

        Args:
            bytes_max: Of all batches together; the first always fits.

        Raises:
            DataLoss: a batch that may hold such a message is damaged.
        """
        messages: list[Match] = []
        bytes_count = 0
        for match in self._matches(topic_id, key, window):
            bytes_count += len(match.batch)
            if messages and (len(messages) == messages_max or bytes_count > bytes_max):
                return Matches(messages, True)
            messages.append(match)
        return Matches(messages, False)

    def _matches(self, topic_id: int, key: str, window: Window) -> Iterator[Match]:
        for found in self._store.keys.find(topic_id, key_hash(key)):
            if found.stretch.last_unix_ms < window.from_unix_ms:
                return
            if found.stretch.first_unix_ms >= window.to_unix_ms:
                continue
            positions = np.unique(found.positions)
            for position in reversed(self._within(positions, found, window)):
                indexes = sorted(set(found.indexes[found.positions == position].tolist()))
                yield from self._matches_in(int(position), indexes, topic_id, key)

    def _within(self, positions: Int64Array, found: Found, window: Window) -> list[int]:
        """Those of ascending `positions` that are readable and in the window."""
        begin = int(np.searchsorted(positions, self._log.first_position))
        end = int(np.searchsorted(positions, self._log.synced_position))
        kept: list[int] = positions[begin:end].tolist()
        if found.stretch.last_unix_ms >= window.to_unix_ms:
            kept = kept[: bisect_left(kept, window.to_unix_ms, key=self._store_unix_ms)]
        if found.stretch.first_unix_ms < window.from_unix_ms:
            kept = kept[bisect_left(kept, window.from_unix_ms, key=self._store_unix_ms) :]
        return kept

    def _matches_in(
        self, position: int, indexes: list[int], topic_id: int, key: str
    ) -> Iterator[Match]:
        header = self._header_at(position)
        if header.topic_id != topic_id:
            return
        queue = topic_id, header.queue_id
        batch = verified(self._log.read(position, header.length), position, queue)
        records = list(decode_records(batch, header, indexes))
        for index, record in reversed(list(zip(indexes, records, strict=True))):
            if key in record.keys:
                yield Match(batch, index)

    def _store_unix_ms(self, position: int) -> int:
        return self._header_at(position).store_unix_ms

    def _header_of(self, queue: ConsumeQueue, offset: int) -> Header:
        """The header of the batch that holds `offset`."""
        header = self._header_at(int(queue.read(offset, offset + 1).positions[0]))
        if not header.first_offset <= offset < header.next_offset:
            raise DataLoss(
                f"the batch at {header.position} does not hold offset {offset}",
                facts={"position": header.position},
            )
        return header

    def _header_at(self, position: int) -> Header:
        """The header of the batch at `position`, which is there unless it is damaged."""
        head = self._log.read(position, HEAD_BYTES_MAX)
        try:
            header = read_header(head)
            check_stamp(head)
            if header.position != position:
                raise BadBatch(f"it names position {header.position}")
        except BatonError as error:
            raise DataLoss(
                f"the batch at {position} is damaged: {error}", facts={"position": position}
            ) from error
        return header
