"""Messages of one stored batch that were delivered together and wait for a handler."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, compress

from batonmq._consumer.message import BatchColumns, ReceivedMessage
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.ordering_key import find_ordering_key
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, of_sorted
from batonmq._core.records import BARE, RECORD, Header
from batonmq._core.subscription import Filter, TagFilter

Prepare = Callable[[ReceivedMessage], None]
_BARE_BYTES = len(BARE)


class DeliveredRun:
    """Messages of one stored batch, in order; the objects are created when they are used.

    Args:
        indexes: Indexes of the messages in the stored batch, ascending, at least one.
        messages: The objects, if they were created already; one per index.
    """

    __slots__ = ("_messages", "columns", "indexes")

    def __init__(
        self,
        columns: BatchColumns,
        indexes: Sequence[int],
        messages: Sequence[ReceivedMessage] = (),
    ) -> None:
        self.columns, self.indexes, self._messages = columns, indexes, messages

    def __len__(self) -> int:
        return len(self.indexes)

    @property
    def ranges(self) -> Sequence[Range]:
        """The offsets of the messages."""
        return self.ranges_of(0, len(self.indexes))

    def ranges_of(self, begin: int, end: int) -> Sequence[Range]:
        """Return the offsets of the messages at the places [begin, end), at least one."""
        first_offset, indexes = self.columns.header.first_offset, self.indexes[begin:end]
        if isinstance(indexes, range):
            return ((first_offset + indexes.start, first_offset + indexes.stop),)
        return of_sorted(first_offset + index for index in indexes)

    @property
    def bytes_count(self) -> int:
        """Size of the messages (body, keys, tag, properties), in bytes."""
        return self.bytes_of(0, len(self.indexes))

    def bytes_of(self, begin: int, end: int) -> int:
        """Return the size of the messages at the places [begin, end), at least one, in bytes."""
        begins, indexes = self.columns.begins, self.indexes[begin:end]
        heads_bytes = RECORD.size * len(indexes)
        if isinstance(indexes, range):
            return begins[indexes.stop] - begins[indexes.start] - heads_bytes
        return sum(begins[index + 1] - begins[index] for index in indexes) - heads_bytes

    @property
    def failed_before(self) -> bool:
        """Whether a handler has failed with the first message before."""
        return bool(self._messages) and self._messages[0].attempts > 0

    def split(self, count: int) -> tuple[DeliveredRun, DeliveredRun]:
        """Return the first `count` messages and the others, of which there is at least one."""
        return (
            DeliveredRun(self.columns, self.indexes[:count], self._messages[:count]),
            DeliveredRun(self.columns, self.indexes[count:], self._messages[count:]),
        )

    def without(self, dropped: Collection[int]) -> DeliveredRun | None:
        """Return the run without the messages of some offsets; None if no message is left."""
        first_offset = self.columns.header.first_offset
        kept = [first_offset + index not in dropped for index in self.indexes]
        indexes = list(compress(self.indexes, kept))
        messages = list(compress(self._messages, kept))
        return DeliveredRun(self.columns, indexes, messages) if indexes else None

    def offset(self, number: int) -> int:
        """Return the offset of the message at a place in the run."""
        return self.columns.header.first_offset + self.indexes[number]

    def size(self, number: int) -> int:
        """Return the size of the message at a place in the run, in bytes."""
        index = self.indexes[number]
        return self.columns.begins[index + 1] - self.columns.begins[index] - RECORD.size

    def message(self, number: int) -> ReceivedMessage:
        """Return the object of the message at a place in the run."""
        if self._messages:
            return self._messages[number]
        return ReceivedMessage._of_columns(self.columns, self.indexes[number])

    def messages(self, begin: int, end: int) -> Iterator[ReceivedMessage]:
        """Return the objects of the messages at the places [begin, end) in the run, one by one."""
        if self._messages:
            return iter(self._messages[begin:end])
        return ReceivedMessage._all_of_columns(self.columns, self.indexes[begin:end])

    def ordering_keys(self) -> Iterator[str | None]:
        """Return the ordering keys without creating the other parts of the messages."""
        if self._messages:
            yield from (message.ordering_key for message in self._messages)
            return
        records, begins = self.columns.records, self.columns.begins
        for index in self.indexes:
            begin = begins[index]
            keys_bytes, tag_bytes, properties_bytes = RECORD.unpack_from(records, begin)
            begin += RECORD.size + keys_bytes + tag_bytes
            properties = records[begin : begin + properties_bytes]
            yield find_ordering_key(properties) if properties else None

    def bodies(self) -> list[bytes]:
        """Return the bodies without creating the other parts of the messages."""
        if self._messages:
            return [message.body for message in self._messages]
        records, begins, indexes = self.columns.records, self.columns.begins, self.indexes
        if isinstance(indexes, range):  # with a step of one
            first, end = indexes.start, indexes.stop
            extents = zip(begins[first:end], begins[first + 1 : end + 1], strict=True)
        else:
            extents = zip(
                [begins[index] for index in indexes],
                [begins[index + 1] for index in indexes],
                strict=True,
            )
        return [
            records[body_at:end]
            if records[begin : (body_at := begin + _BARE_BYTES)] == BARE
            else records[body_at + sum(RECORD.unpack_from(records, begin)) : end]
            for begin, end in extents
        ]


@dataclass(frozen=True, slots=True)
class Delivery:
    """What the messages of one delivery have in common.

    Attributes:
        lineage: The ownership that the messages belong to.
        ranges: Offsets to be handled; others of the batches are left out.
        wanted: The filter.
        is_redelivered: Returns whether an earlier owner may have started an offset; None if no
            offset was started.
        prepare: Changes a message before it is handed on; None if no message needs a change.
    """

    queue: QueueRef
    token: int
    lineage: int
    ranges: Sequence[Range]
    wanted: Filter
    is_redelivered: Callable[[int], bool] | None
    prepare: Prepare | None = None

    def runs(self, batches: Iterable[StoredBatch]) -> Iterator[DeliveredRun]:
        """Return the messages to be handled of stored batches."""
        for stored in batches:
            columns = self._columns(stored)
            indexes = self._accepted(columns, self._open_indexes(columns.header))
            if self.prepare is None:
                if len(indexes):
                    yield DeliveredRun(columns, indexes)
                continue
            for index in indexes:
                message = ReceivedMessage._of_columns(columns, index)
                self.prepare(message)
                yield DeliveredRun(columns, range(index, index + 1), [message])

    def _columns(self, stored: StoredBatch) -> BatchColumns:
        return BatchColumns(
            self.queue,
            self.token,
            self.lineage,
            stored.header,
            stored.records,
            stored.begins,
            None if self.wanted.hashes is None else stored.tag_hashes,
            self.is_redelivered,
        )

    def _open_indexes(self, header: Header) -> Sequence[int]:
        """Return the indexes of the messages in `ranges`; a range if they are consecutive."""
        at, end = header.first_offset, header.next_offset
        parts = [
            range(max(first, at) - at, min(range_end, end) - at)
            for first, range_end in self.ranges
            if first < end and range_end > at
        ]
        return parts[0] if len(parts) == 1 else list(chain.from_iterable(parts))

    def _accepted(self, columns: BatchColumns, indexes: Sequence[int]) -> Sequence[int]:
        """Return the indexes of the messages that pass the filter."""
        wanted = self.wanted
        if isinstance(wanted, TagFilter) and wanted.tags is None:
            return indexes
        hashes, accepted = columns.tag_hashes, wanted.hashes
        if hashes is not None and accepted is not None:
            indexes = [index for index in indexes if hashes[index] in accepted]
        messages = (ReceivedMessage._of_columns(columns, index) for index in indexes)
        passed = [wanted.accepts(one.tag, one.keys, one.properties) for one in messages]
        indexes = list(compress(indexes, passed))
        consecutive = bool(indexes) and indexes[-1] - indexes[0] + 1 == len(indexes)
        return range(indexes[0], indexes[-1] + 1) if consecutive else indexes
