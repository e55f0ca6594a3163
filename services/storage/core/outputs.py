"""The outputs that a log remembers: which outputs of which inputs are stored.

A transformer repeats the outputs of an input if it does not know whether they are stored. Each
batch of outputs names its inputs, so the log alone decides what is stored. What is remembered is
bounded: outputs of inputs below the committed offset of their queue are never repeated, and each
batch carries that offset, the floor.

- An owner that repeats inputs of an earlier one first opens its outputs: a record of the system
  topic raises the token of the source. From then on no batch of an earlier owner is stored.
- A batch with an older reset epoch, an older token, or an input below the floor is refused.
- A batch with outputs that are all stored, with the same digests, is a duplicate.
- A source whose outputs had to be forgotten is never taken for one that has none: see
  `SourceOutputs.forgotten_unix_ms`.
"""

from __future__ import annotations

import struct
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from batonmq._core.outputs import (
    OutputHead,
    OutputSource,
    decode_head,
    encode_head,
    head_of,
)
from batonmq._core.records import Header, column_starts, decode_records
from batonmq.errors import (
    BadBatch,
    DuplicateSequence,
    OutputMismatch,
    Overloaded,
    ProducerFenced,
)
from batonmq_server.storage.core.producers import QueueKey, StoreReceipt
from batonmq_server.storage.core.schedule import TOPIC_ID, encode_system

TOPIC = "BATON_SYS_OUTPUT"
OPENED = 6
"""Queue of the system topic; the others are those of `schedule`, `transactions` and `purge`."""
QUEUE_COUNT = 7

OUTPUTS_MAX = 1_000_000
"""Maximum number of remembered outputs."""
SOURCES_MAX = 100_000
IDLE_MS_MIN = 600_000
"""A source with a batch in this time is not forgotten."""
NUMBER_BITS = 16
DECODED_ROWS = 1_024
ROW = np.dtype(
    [
        ("key", "<u8"),
        ("digest", "<u8"),
        ("position", "<i8"),
        ("stored_offset", "<i8"),
        ("index", "<u2"),
    ]
)
_CHECKPOINT = struct.Struct(">qqI")
_SOURCE = struct.Struct(">HqqI")

Rows = npt.NDArray[np.void]
Keys = npt.NDArray[np.uint64]
_NO_ROWS: Rows = np.empty(0, ROW)


@dataclass(frozen=True, slots=True, eq=False)
class OutputBatch:
    """Head and rows of a batch of outputs.

    Attributes:
        keys: Offset of the input and number of the output of each message, as one number.
        digests: Digest of each message.
        first_key: The lowest key.
        last_key: The highest key.
        ascending: Whether the keys are in ascending order, as they are but for handlers that run
            side by side.
    """

    head: OutputHead
    keys: Keys
    digests: Keys
    first_key: int
    last_key: int
    ascending: bool

    def overlaps(self, other: OutputBatch) -> bool:
        """Whether both have an output with the same key."""
        if self.last_key < other.first_key or other.last_key < self.first_key:
            return False
        return bool(np.isin(self.keys, other.keys).any())


class StoredOutput(NamedTuple):
    """A stored output.

    Attributes:
        offset, number, digest: As in `OutputRow`.
        position: Position of its batch.
        batch_index: Its index in the batch.
        stored_offset: Its offset in its queue.
    """

    offset: int
    number: int
    digest: int
    position: int
    batch_index: int
    stored_offset: int


class _Piece(NamedTuple):
    """The remembered outputs of one stored batch, ascending by key.

    Attributes:
        stored_offset: Offset of the first message of the batch in its queue.
        indexes: Index of each output in the batch.
    """

    keys: Keys
    digests: Keys
    position: int
    stored_offset: int
    indexes: npt.NDArray[np.uint16]

    def behind(self, key: int) -> _Piece:
        """Return the part from a key on; a copy, so that the rest is freed."""
        begin = int(np.searchsorted(self.keys, np.uint64(key)))
        columns = (self.keys[begin:].copy(), self.digests[begin:].copy())
        return _Piece(*columns, self.position, self.stored_offset, self.indexes[begin:].copy())

    def rows(self) -> Rows:
        """Return the outputs as rows."""
        rows = np.empty(len(self.keys), ROW)
        rows["key"], rows["digest"], rows["position"] = self.keys, self.digests, self.position
        rows["stored_offset"] = self.stored_offset + self.indexes.astype(np.int64)
        rows["index"] = self.indexes
        return rows


class SourceOutputs:
    """What is remembered of a source.

    Most batches have inputs behind all others. They are kept as they came, in `_pieces`, and joined
    with the others only when the rows are read.

    Attributes:
        floor: Outputs of inputs below it are forgotten, and refused.
        used_unix_ms: Store time of its last batch.
        forgotten_unix_ms: Outputs that were stored at or before this time may be forgotten.
        last_key: The highest key that was remembered; -1 if there was none.
    """

    __slots__ = (
        "_count", "_pieces", "_rows", "floor", "forgotten_unix_ms", "last_key", "reset_epoch",
        "token", "used_unix_ms",
    )  # fmt: skip

    def __init__(
        self, head: OutputHead, used_unix_ms: int, forgotten_unix_ms: int, rows: Rows = _NO_ROWS
    ) -> None:
        self.reset_epoch, self.token, self.floor = head.reset_epoch, head.token, head.floor
        self.used_unix_ms, self.forgotten_unix_ms = used_unix_ms, forgotten_unix_ms
        self._rows, self._pieces = rows, deque[_Piece]()
        self.last_key = int(rows["key"][-1]) if len(rows) else -1
        self._count = len(rows)

    def __len__(self) -> int:
        return self._count

    @property
    def rows(self) -> Rows:
        """The outputs of inputs at or above the floor, ascending by key; not to be changed."""
        if self._pieces:
            self._rows = np.concatenate((self._rows, *(piece.rows() for piece in self._pieces)))
            self._pieces.clear()
        return self._rows

    def add(self, outputs: OutputBatch, receipt: StoreReceipt) -> None:
        """Remember the outputs of a batch."""
        keys, digests = outputs.keys, outputs.digests
        order = np.arange(len(keys)) if outputs.ascending else np.argsort(keys)
        if not outputs.ascending:
            keys, digests = keys[order], digests[order]
        indexes = order.astype(np.uint16)
        piece = _Piece(keys, digests, receipt.position, receipt.first_offset, indexes)
        if outputs.first_key < self.floor << NUMBER_BITS:
            piece = piece.behind(self.floor << NUMBER_BITS)
        if not len(piece.keys):
            return
        self._count += len(piece.keys)
        if outputs.first_key > self.last_key:
            self._pieces.append(piece)
        else:
            rows = np.concatenate((self.rows, piece.rows()))
            self._rows = rows[np.argsort(rows["key"], kind="stable")]
        self.last_key = max(self.last_key, outputs.last_key)

    def raise_floor(self, floor: int) -> None:
        """Forget the outputs of inputs below an offset."""
        self.floor, key = floor, floor << NUMBER_BITS
        if len(self._rows):
            begin = int(np.searchsorted(self._rows["key"], np.uint64(key)))
            self._rows = self._rows[begin:].copy()
            self._count -= begin
        while self._pieces and int(self._pieces[0].keys[-1]) < key:
            self._count -= len(self._pieces.popleft().keys)
        if self._pieces and int(self._pieces[0].keys[0]) < key:
            whole = len(self._pieces[0].keys)
            self._pieces[0] = self._pieces[0].behind(key)
            self._count -= whole - len(self._pieces[0].keys)

    def freed_by(self, head: OutputHead) -> int:
        """Return how many outputs are forgotten once a batch with this head is stored."""
        if head.reset_epoch > self.reset_epoch:
            return self._count
        if head.floor <= self.floor:
            return 0
        key = np.uint64(head.floor << NUMBER_BITS)
        columns = (self._rows["key"], *(piece.keys for piece in self._pieces))
        return sum(int(np.searchsorted(column, key)) for column in columns)

    def begin_epoch(self, reset_epoch: int, floor: int) -> None:
        """Forget all outputs: the progress of the input queue was reset."""
        self.reset_epoch, self.floor = reset_epoch, floor
        self._rows, self.last_key, self._count = _NO_ROWS, -1, 0
        self._pieces.clear()

    def stored(self) -> Iterator[StoredOutput]:
        """Return the outputs of now, ascending by offset and number; decoded some at a time."""
        rows = self.rows
        parts = (rows[begin : begin + DECODED_ROWS] for begin in range(0, len(rows), DECODED_ROWS))
        return (
            StoredOutput(key >> NUMBER_BITS, key & 0xFFFF, digest, position, index, stored_offset)
            for part in parts
            for key, digest, position, stored_offset, index in part.tolist()
        )


def parse_outputs(batch: bytes | memoryview, header: Header) -> OutputBatch:
    """Return head and rows of a batch of outputs.

    Raises:
        BadBatch: They are damaged, or two rows are of the same output.
    """
    head = head_of(batch, header)
    at = column_starts(header).outputs + header.output_head_bytes
    columns = np.frombuffer(batch, ">u8", 2 * header.count, at).astype(np.uint64)
    keys, digests = columns[::2].copy(), columns[1::2].copy()
    ascending = bool((keys[1:] > keys[:-1]).all())
    if not ascending and len(np.unique(keys)) < header.count:
        raise BadBatch("two messages are the same output", facts={"field": "outputs"})
    first, last = (keys[0], keys[-1]) if ascending else (keys.min(), keys.max())
    floor_key = head.floor << NUMBER_BITS
    if int(last) + floor_key >= 1 << 64:
        raise BadBatch("the offset of an input is too large", facts={"field": "outputs"})
    keys += np.uint64(floor_key)
    return OutputBatch(
        head, keys, digests, int(first) + floor_key, int(last) + floor_key, ascending
    )


class OutputTable:
    """The outputs of a log, derived from it.

    Args:
        outputs_max: Maximum number of remembered outputs.
        sources_max: Maximum number of sources.

    Attributes:
        forgotten_unix_ms: Outputs of a source that is not known, and that were stored at or before
            this time, may be forgotten.
    """

    def __init__(self, outputs_max: int = OUTPUTS_MAX, sources_max: int = SOURCES_MAX) -> None:
        self._outputs_max, self._sources_max = outputs_max, sources_max
        self._sources: OrderedDict[OutputSource, SourceOutputs] = OrderedDict()
        self._count = 0
        self.forgotten_unix_ms = 0

    def __len__(self) -> int:
        return self._count

    @property
    def source_count(self) -> int:
        """Number of known sources."""
        return len(self._sources)

    def get(self, source: OutputSource) -> SourceOutputs | None:
        """Return what is remembered of a source; None if it is not known."""
        return self._sources.get(source)

    def sources(self) -> list[tuple[OutputSource, SourceOutputs]]:
        """Return all sources, the one that is silent for longest first."""
        return list(self._sources.items())

    @staticmethod
    def concerns(queue: QueueKey) -> bool:
        """Return whether the batches of a queue open outputs."""
        return queue == (TOPIC_ID, OPENED)

    def check_head(self, head: OutputHead) -> None:
        """Check that an owner may store outputs.

        Raises:
            ProducerFenced: The progress of the input queue was reset since, or another owner has
                stored or opened outputs.
        """
        known = self._sources.get(head.source)
        if known is None:
            return
        if head.reset_epoch < known.reset_epoch:
            raise _fenced(
                head, f"the queue was reset since: reset epoch {known.reset_epoch}, "
                f"not {head.reset_epoch}", known,
            )  # fmt: skip
        if head.token < known.token:
            raise _fenced(
                head, f"token {head.token} is fenced: token {known.token} has stored", known
            )

    def has_room(self, outputs_count: int, sources_count: int) -> bool:
        """Return whether so many more outputs, of so many new sources, are within the limits."""
        return (
            self._count + outputs_count <= self._outputs_max
            and len(self._sources) + sources_count <= self._sources_max
        )

    def check(self, outputs: OutputBatch, now_unix_ms: int) -> StoreReceipt | None:
        """Return the receipt of an earlier attempt of this batch; None if the batch is new.

        Raises:
            ProducerFenced: As `check_head`; or an input is acknowledged already.
            OutputMismatch: An output of the same input and number is stored, with another digest.
            DuplicateSequence: Some of the outputs are stored, and others are not.
            Overloaded: Too many outputs are remembered.
        """
        head, keys = outputs.head, outputs.keys
        self.check_head(head)
        known = self._sources.get(head.source)
        if known is None or head.reset_epoch > known.reset_epoch:
            self._check_room(outputs, now_unix_ms)
            return None
        if outputs.first_key < known.floor << NUMBER_BITS:
            raise _fenced(
                head, f"input {outputs.first_key >> NUMBER_BITS} is acknowledged: the floor is "
                f"{known.floor}", known,
            )  # fmt: skip
        if outputs.first_key > known.last_key or not len(rows := known.rows):
            self._check_room(outputs, now_unix_ms)
            return None  # inputs behind all others, as most are
        at = np.searchsorted(rows["key"], keys)
        at[at == len(rows)] = 0
        found = rows["key"][at] == keys
        if not found.any():
            self._check_room(outputs, now_unix_ms)
            return None
        return _receipt_of(outputs, rows[at], found)

    def take(self, outputs: OutputBatch, receipt: StoreReceipt) -> None:
        """Remember the outputs of a batch of the log.

        A log that is read again may have batches from before the state of a checkpoint.
        """
        source = self._enter(outputs.head, receipt.store_unix_ms)
        if outputs.head.reset_epoch < source.reset_epoch:
            return
        before = len(source)
        source.add(outputs, receipt)
        self._count += len(source) - before
        self._forget_some()

    def open(self, header: Header, receipt: StoreReceipt, batch: bytes | memoryview) -> None:
        """Raise tokens as a batch of the system topic says."""
        for record in decode_records(bytes(batch), header, range(header.count)):
            self._enter(decode_head(record.body), receipt.store_unix_ms)
        self._forget_some()

    def forget_before(self, unix_ms: int) -> None:
        """Note that outputs stored at or before a time may be forgotten: the log lacks batches."""
        self.forgotten_unix_ms = max(self.forgotten_unix_ms, unix_ms)
        for source in self._sources.values():
            source.forgotten_unix_ms = max(source.forgotten_unix_ms, unix_ms)

    def snapshot(self) -> OutputSnapshot:
        """Return a snapshot; another thread may encode it."""
        return OutputSnapshot(
            self.forgotten_unix_ms,
            [
                (OutputHead(key, one.reset_epoch, one.token, one.floor), one.used_unix_ms,
                 one.forgotten_unix_ms, one.rows)
                for key, one in self._sources.items()
            ],
        )  # fmt: skip

    def restore(self, raw: bytes) -> None:
        """Load what `OutputSnapshot.encode` has returned into the empty table."""
        if not raw:
            return
        self.forgotten_unix_ms, _, count = _CHECKPOINT.unpack_from(raw)
        at = _CHECKPOINT.size
        for _ in range(count):
            head_bytes, used_unix_ms, forgotten_unix_ms, row_count = _SOURCE.unpack_from(raw, at)
            at += _SOURCE.size
            head = decode_head(raw[at : at + head_bytes])
            at += head_bytes
            rows = np.frombuffer(raw, ROW, row_count, at).copy()
            at += row_count * ROW.itemsize
            self._sources[head.source] = SourceOutputs(head, used_unix_ms, forgotten_unix_ms, rows)
            self._count += row_count

    def _enter(self, head: OutputHead, store_unix_ms: int) -> SourceOutputs:
        """Apply a head of the log to its source, and return that."""
        known = self._sources.get(head.source)
        if known is None:
            known = self._sources[head.source] = SourceOutputs(
                head, store_unix_ms, self.forgotten_unix_ms
            )
            return known
        known.used_unix_ms = max(known.used_unix_ms, store_unix_ms)
        self._sources.move_to_end(head.source)
        before = len(known)
        if head.reset_epoch > known.reset_epoch:
            known.begin_epoch(head.reset_epoch, head.floor)
        elif head.floor > known.floor:
            known.raise_floor(head.floor)
        self._count += len(known) - before
        known.token = max(known.token, head.token)
        return known

    def _check_room(self, outputs: OutputBatch, now_unix_ms: int) -> None:
        """Check that a batch fits once its floor has risen and idle sources are forgotten.

        Raises:
            Overloaded: A source that is in use would be forgotten.
        """
        count, known = len(outputs.keys), self._sources.get(outputs.head.source)
        if self.has_room(count, known is None):
            return
        freed = known.freed_by(outputs.head) if known is not None else 0
        excess = self._count + count - freed - self._outputs_max
        sources = len(self._sources) + (known is None) - self._sources_max
        for source in self._sources.values():  # they are forgotten in this order
            if excess <= 0 and sources <= 0:
                return
            if source.used_unix_ms > now_unix_ms - IDLE_MS_MIN:
                raise Overloaded(
                    f"{self._count} outputs of {len(self._sources)} sources are remembered; the "
                    f"limits are {self._outputs_max} and {self._sources_max}",
                    retry_after_ms=1_000,
                    facts={"limit": self._outputs_max},
                )
            if source is not known:
                excess -= len(source)
                sources -= 1

    def _forget_some(self) -> None:
        while len(self._sources) > 1 and (
            self._count > self._outputs_max or len(self._sources) > self._sources_max
        ):
            _, source = self._sources.popitem(last=False)
            self._count -= len(source)
            self.forgotten_unix_ms = max(
                self.forgotten_unix_ms, source.used_unix_ms, source.forgotten_unix_ms
            )


@dataclass(frozen=True, slots=True)
class OutputSnapshot:
    """The table at one moment: head, times and rows of each source."""

    forgotten_unix_ms: int
    sources: Sequence[tuple[OutputHead, int, int, Rows]]

    def encode(self) -> bytes:
        """Return the bytes of a checkpoint; empty if there is nothing to remember."""
        if not self.sources and not self.forgotten_unix_ms:
            return b""
        parts = [_CHECKPOINT.pack(self.forgotten_unix_ms, 0, len(self.sources))]
        for head, used_unix_ms, forgotten_unix_ms, rows in self.sources:
            raw = encode_head(head)
            parts += (
                _SOURCE.pack(len(raw), used_unix_ms, forgotten_unix_ms, len(rows)),
                raw,
                rows.tobytes(),
            )
        return b"".join(parts)


def encode_opened(heads: Iterable[OutputHead]) -> bytes:
    """Return the unstamped batch of the system topic that opens the outputs of owners."""
    return encode_system([encode_head(head) for head in heads], OPENED, TOPIC)


def _receipt_of(outputs: OutputBatch, rows: Rows, found: npt.NDArray[np.bool_]) -> StoreReceipt:
    """Return the receipt of a batch if its outputs are stored.

    Args:
        rows: The stored output for each message; any row where there is none.
        found: Whether the output of each message is stored.
    """
    other = found & (rows["digest"] != outputs.digests)
    if other.any():
        key = int(outputs.keys[int(other.argmax())])
        raise mismatch(outputs.head.source, key >> NUMBER_BITS, key & 0xFFFF)
    if not found.all():
        raise DuplicateSequence(
            f"{int(found.sum())} of {len(found)} outputs of {outputs.head.source} are stored "
            "already",
            remedy="Nothing of this batch is stored now. Open the outputs, and send only what is "
            "missing.",
            facts={"content": "some"},
        )
    first, newest = rows[0], int(rows["position"].max())
    first_offset = int(first["stored_offset"]) - int(first["index"])
    # A log that is safe behind the start of a batch is safe up to its end.
    return StoreReceipt(first_offset, int(first["position"]), newest + 1, 0, duplicate=True)


def mismatch(source: OutputSource, offset: int, number: int) -> OutputMismatch:
    """Return the error of an output that differs from the stored one."""
    return OutputMismatch(
        f"output {number} of input {offset} of {source} is stored with other content",
        facts={"source": str(source), "offset": offset, "number": number},
    )


def _fenced(head: OutputHead, why: str, known: SourceOutputs) -> ProducerFenced:
    return ProducerFenced(
        f"outputs of {head.source} are refused: {why}",
        remedy="The queue has another owner by now, which handles its messages.",
        facts={"token": head.token, "current": known.token, "reset_epoch": known.reset_epoch},
    )
