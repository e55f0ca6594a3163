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
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
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
ROW = np.dtype(
    [
        ("key", "<u8"),
        ("digest", "<u8"),
        ("position", "<i8"),
        ("stored_offset", "<i8"),
        ("index", "<u2"),
    ]
)
_WIRE_ROW = np.dtype([("key", ">u8"), ("digest", ">u8")])
_CHECKPOINT = struct.Struct(">qqI")
_SOURCE = struct.Struct(">HqqI")

Rows = npt.NDArray[np.void]
Keys = npt.NDArray[np.uint64]


@dataclass(frozen=True, slots=True, eq=False)
class OutputBatch:
    """Head and rows of a batch of outputs.

    Attributes:
        keys: Offset of the input and number of the output of each message, as one number.
        digests: Digest of each message.
    """

    head: OutputHead
    keys: Keys
    digests: Keys


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


@dataclass(slots=True)
class SourceOutputs:
    """What is remembered of a source.

    Attributes:
        floor: Outputs of inputs below it are forgotten, and refused.
        used_unix_ms: Store time of its last batch.
        forgotten_unix_ms: Outputs that were stored at or before this time may be forgotten.
        rows: The outputs of inputs at or above the floor, ascending by key.
    """

    reset_epoch: int
    token: int
    floor: int
    used_unix_ms: int
    forgotten_unix_ms: int
    rows: Rows = field(default_factory=lambda: np.empty(0, ROW))

    def stored(self) -> Iterator[StoredOutput]:
        """Return the outputs, ascending by offset and number."""
        for key, digest, position, stored_offset, index in self.rows.tolist():
            yield StoredOutput(
                key >> NUMBER_BITS, key & 0xFFFF, digest, position, index, stored_offset
            )


def parse_outputs(batch: bytes | memoryview, header: Header) -> OutputBatch:
    """Return head and rows of a batch of outputs.

    Raises:
        BadBatch: They are damaged, or two rows are of the same output.
    """
    head = head_of(batch, header)
    at = column_starts(header).outputs + header.output_head_bytes
    rows = np.frombuffer(batch, _WIRE_ROW, header.count, at)
    keys = rows["key"].astype(np.uint64)
    if header.count > 1 and len(np.unique(keys)) < header.count:
        raise BadBatch("two messages are the same output", facts={"field": "outputs"})
    if int(keys.max() >> np.uint64(NUMBER_BITS)) + head.floor >= 1 << (64 - NUMBER_BITS):
        raise BadBatch("the offset of an input is too large", facts={"field": "outputs"})
    keys += np.uint64(head.floor << NUMBER_BITS)
    return OutputBatch(head, keys, rows["digest"].astype(np.uint64))


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
            self._check_room(len(keys), 0 if known else 1, now_unix_ms)
            return None
        if int(keys.min()) < known.floor << NUMBER_BITS:
            raise _fenced(
                head, f"input {int(keys.min()) >> NUMBER_BITS} is acknowledged: the floor is "
                f"{known.floor}", known,
            )  # fmt: skip
        if not len(known.rows) or int(keys.min()) > int(known.rows["key"][-1]):
            self._check_room(len(keys), 0, now_unix_ms)
            return None  # inputs behind all others, as most are
        at = np.searchsorted(known.rows["key"], keys)
        at[at == len(known.rows)] = 0
        found = known.rows["key"][at] == keys
        if not found.any():
            self._check_room(len(keys), 0, now_unix_ms)
            return None
        return _receipt_of(outputs, known.rows[at], found)

    def take(self, header: Header, receipt: StoreReceipt, batch: bytes | memoryview) -> None:
        """Remember the outputs of a batch of the log.

        A log that is read again may have batches from before the state of a checkpoint.
        """
        outputs = parse_outputs(batch, header)
        source = self._enter(outputs.head, receipt.store_unix_ms)
        if outputs.head.reset_epoch < source.reset_epoch:
            return
        rows = np.empty(header.count, ROW)
        rows["key"], rows["digest"] = outputs.keys, outputs.digests
        rows["position"] = receipt.position
        rows["index"] = np.arange(header.count)
        rows["stored_offset"] = np.arange(receipt.first_offset, receipt.first_offset + header.count)
        if outputs.head.floor < source.floor:
            rows = rows[rows["key"] >= np.uint64(source.floor << NUMBER_BITS)]
        ascending = not len(source.rows) or bool((rows["key"] > source.rows["key"][-1]).all())
        ascending = ascending and bool((outputs.keys[1:] > outputs.keys[:-1]).all())
        rows = np.concatenate((source.rows, rows))
        if not ascending:
            rows = rows[np.argsort(rows["key"], kind="stable")]
        self._count += len(rows) - len(source.rows)
        source.rows = rows
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
            self._sources[head.source] = SourceOutputs(
                head.reset_epoch, head.token, head.floor, used_unix_ms, forgotten_unix_ms, rows
            )
            self._count += row_count

    def _enter(self, head: OutputHead, store_unix_ms: int) -> SourceOutputs:
        """Apply a head of the log to its source, and return that."""
        known = self._sources.get(head.source)
        if known is None:
            known = self._sources[head.source] = SourceOutputs(
                head.reset_epoch, head.token, head.floor, store_unix_ms, self.forgotten_unix_ms
            )
            return known
        known.used_unix_ms = max(known.used_unix_ms, store_unix_ms)
        self._sources.move_to_end(head.source)
        if head.reset_epoch > known.reset_epoch:
            known.reset_epoch, known.floor = head.reset_epoch, head.floor
            self._count -= len(known.rows)
            known.rows = known.rows[:0].copy()
        elif head.floor > known.floor:
            known.floor = head.floor
            begin = int(np.searchsorted(known.rows["key"], np.uint64(head.floor << NUMBER_BITS)))
            self._count -= begin
            known.rows = known.rows[begin:].copy()
        known.token = max(known.token, head.token)
        return known

    def _check_room(self, count: int, sources: int, now_unix_ms: int) -> None:
        if (
            self._count + count <= self._outputs_max
            and len(self._sources) + sources <= self._sources_max
        ):
            return
        oldest = next(iter(self._sources.values()), None)
        if oldest is None or oldest.used_unix_ms > now_unix_ms - IDLE_MS_MIN:
            raise Overloaded(
                f"{self._count} outputs of {len(self._sources)} sources are remembered; the limits "
                f"are {self._outputs_max} and {self._sources_max}",
                retry_after_ms=1_000,
                facts={"limit": self._outputs_max},
            )

    def _forget_some(self) -> None:
        while len(self._sources) > 1 and (
            self._count > self._outputs_max or len(self._sources) > self._sources_max
        ):
            _, source = self._sources.popitem(last=False)
            self._count -= len(source.rows)
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
    """Return the receipt of a batch whose outputs are stored.

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
    # A log that is safe behind the begin of a batch is safe up to its end.
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
