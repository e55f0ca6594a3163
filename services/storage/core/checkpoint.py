"""The checkpoint file: the position up to which the indexes are durable, and the state there.

A checkpoint describes one moment, at the end of the log. It is written after everything that it
refers to is durable. Recovery trusts the indexes below its position and reads only the log after
it. The file is replaced as a whole. A damaged file counts as missing: the indexes are rebuilt.

    checkpoint, big-endian:
    at  size  field
     0     4  magic "BTNC"
     4     2  version: 5 if a queue is compacted; else 4; 3 if there are no outputs; 2 if there
              is no transaction either
     6     2  reserved, 0
     8     8  position
    16     8  store time of the last batch, Unix milliseconds
    24     8  open run of the key index: its first position
    32     8  store time of its first batch with a key; 0 if there is none
    40     8  store time of its last batch with a key
    48     4  its row count
    52     4  CRC-32C of the rows
    56     4  topic count t
    60     4  queue count q
    64     4  producer count p
    68     4  producer-queue count r
    72     4  kept-batch count b
    76     4  waiting-batch count w
    80        t names: 1 length, then ASCII
              q queues: 4 index of the topic's name, 8 topic id, 4 queue id, 8 first offset,
                8 next offset, 8 position of the first batch or of one before it (-1: none)
              p producers of a topic and owner, least recently used first within these: 8 id,
                4 epoch, 8 last used, 4 its number of pairs, 4 owner
              r pairs: 8 topic id, 4 queue id, 1 its number of batches
              b batches, oldest first: 4 sequence, 4 count, 8 first offset, 8 position,
                8 next position, 8 store time, 4 checksum of the producer
              w scheduled batches: 8 delivery time, 8 schedule id, 8 position
              in version 5: 4 length of the sections of compacted queues, which follow: 8 topic id,
                4 queue id, 8 first offset, 8 next offset, 8 compacted to, 8 position of the order,
                4 its length, 8 position of the data, 8 its end, 4 messages, 8 their bytes,
                8 earliest time of a tombstone (0: none)
              in versions 4 and 5: 4 length of the transactions, which follow; then the outputs, see
                below
              from version 3 on the transactions, which may be empty in versions 4 and 5:
                4 group count, then each group: 2 number, 1 length, then ASCII
                4 count of open ones, then each, little-endian: 8 id, 8 position, 4 time of the next
                  check in Unix seconds, 2 number of its group, 1 number of checks
                4 count of ended ones, then each, oldest end first: 8 id, 8 position of the end,
                  1 outcome (1 committed, 2 rolled back, 3 discarded)
     end   4  CRC-32C of everything before

The outputs are 8 forgotten-until time of unknown sources, 8 reserved, 4 count of sources, and then
each source, the one that is silent for longest first: 2 length of its output head, 8 time of its
last batch, 8 forgotten-until time, 4 count of outputs, the output head, and little-endian for each
output 8 offset of the input times 65,536 plus number, 8 digest, 8 position, 8 offset in its queue,
2 index in its batch.

Version 1 has neither owners nor checksums of the producer, and one row for all topics of a
producer. It is read, not written.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import Any, NamedTuple

import numpy as np

from batonmq._core.checksum import crc32c
from batonmq_server.storage.core.compacted import Section
from batonmq_server.storage.core.delay_queue import ROW as DELAY_ROW
from batonmq_server.storage.core.keyindex import OpenRun, RunExtent
from batonmq_server.storage.core.producers import (
    ProducerState,
    QueueKey,
    StoredBatch,
    StoreReceipt,
)

PATH = "checkpoint"
MAGIC, OUTPUT_VERSION, VERSION, PLAIN_VERSION, OLD_VERSION = 0x42544E43, 4, 3, 2, 1
COMPACTED_VERSION = 5
HEAD = struct.Struct(">IHHqqqqqIIIIIIII")
CRC = struct.Struct(">I")
_LENGTH = struct.Struct(">I")
ROWS_AT_ONCE = 4_096
"""Rows that are converted in one call, which takes about 1 ms."""
QUEUE_ROW = np.dtype(
    [
        ("topic", ">u4"),
        ("topic_id", ">i8"),
        ("queue_id", ">u4"),
        ("first_offset", ">i8"),
        ("next_offset", ">i8"),
        ("first_position", ">i8"),
    ]
)
OLD_PRODUCER_ROW = np.dtype(
    [("producer_id", ">i8"), ("epoch", ">u4"), ("used_unix_ms", ">i8"), ("pair_count", ">u4")]
)
PRODUCER_ROW = np.dtype([*OLD_PRODUCER_ROW.descr, ("owner", ">u4")])
PAIR_ROW = np.dtype([("topic_id", ">i8"), ("queue_id", ">u4"), ("batch_count", "u1")])
OLD_BATCH_ROW = np.dtype(
    [
        ("sequence", ">u4"),
        ("count", ">u4"),
        ("first_offset", ">i8"),
        ("position", ">i8"),
        ("next_position", ">i8"),
        ("store_unix_ms", ">i8"),
    ]
)
BATCH_ROW = np.dtype([*OLD_BATCH_ROW.descr, ("checksum", ">u4")])
SECTION_ROW = np.dtype(
    [
        ("topic_id", ">i8"),
        ("queue_id", ">u4"),
        ("first_offset", ">i8"),
        ("next_offset", ">i8"),
        ("compacted_to", ">i8"),
        ("order_position", ">i8"),
        ("order_bytes", ">u4"),
        ("data_position", ">i8"),
        ("data_end", ">i8"),
        ("message_count", ">u4"),
        ("bytes_count", ">i8"),
        ("tombstone_unix_ms", ">i8"),
    ]
)
_ROWS = (QUEUE_ROW, PRODUCER_ROW, PAIR_ROW, BATCH_ROW)
_ROWS_BY_VERSION = {
    COMPACTED_VERSION: _ROWS,
    OUTPUT_VERSION: _ROWS,
    VERSION: _ROWS,
    PLAIN_VERSION: _ROWS,
    OLD_VERSION: (QUEUE_ROW, OLD_PRODUCER_ROW, PAIR_ROW, OLD_BATCH_ROW),
}


class QueueState(NamedTuple):
    """A consume queue at the checkpoint; `first_position` is -1 if it never had a batch."""

    topic: str
    topic_id: int
    queue_id: int
    first_offset: int
    next_offset: int
    first_position: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """The content of a checkpoint file; see the module.

    Attributes:
        waiting: The scheduled batches, as `DelaySnapshot.encode` returns them.
        transactions: The transactions, as `Transactions.restore` reads them; empty if there were
            none.
        outputs: The remembered outputs, as `OutputTable.restore` reads them; empty if there are
            none.
        sections: The sections of compacted queues.
    """

    position: int
    store_unix_ms: int
    open_run: OpenRun
    queues: Sequence[QueueState]
    producers: Sequence[ProducerState]
    waiting: bytes = b""
    transactions: bytes = b""
    outputs: bytes = b""
    sections: Sequence[tuple[QueueKey, Section]] = field(default_factory=list)


def encode(checkpoint: Checkpoint) -> bytes:
    """Return the content of the file."""
    names = {
        name: number
        for number, name in enumerate(dict.fromkeys(q.topic for q in checkpoint.queues))
    }
    producers = checkpoint.producers
    pairs = [pair for producer in producers for pair in producer.queues.items()]
    columns: tuple[list[tuple[int, ...]], ...] = (
        [(names[queue.topic], *queue[1:]) for queue in checkpoint.queues],
        [(*producer[:3], len(producer.queues), producer.owner) for producer in producers],
        [(*key, len(batches)) for key, batches in pairs],
        [
            (
                sequence, count, receipt.first_offset, receipt.position, receipt.next_position,
                receipt.store_unix_ms, checksum,
            )
            for _, batches in pairs
            for sequence, count, receipt, checksum in batches
        ],
    )  # fmt: skip
    run, at = checkpoint.open_run, checkpoint.open_run.extent
    version, behind = PLAIN_VERSION, checkpoint.transactions
    if checkpoint.outputs or checkpoint.sections:
        version = OUTPUT_VERSION
        behind = _LENGTH.pack(len(behind)) + behind + checkpoint.outputs
    elif behind:
        version = VERSION
    if checkpoint.sections:
        version = COMPACTED_VERSION
        rows = np.array([(*key, *section) for key, section in checkpoint.sections], SECTION_ROW)
        behind = _LENGTH.pack(rows.nbytes) + rows.tobytes() + behind
    head = HEAD.pack(
        MAGIC, version, 0, checkpoint.position, checkpoint.store_unix_ms, at.first_position,
        at.first_unix_ms, at.last_unix_ms, run.count, run.crc, len(names), *map(len, columns),
        len(checkpoint.waiting) // DELAY_ROW.itemsize,
    )  # fmt: skip
    content = b"".join(
        (
            head,
            *(bytes((len(name),)) + name.encode("ascii") for name in names),
            *(part for rows in zip(columns, _ROWS, strict=True) for part in _encoded(*rows)),
            checkpoint.waiting,
            behind,
        )
    )
    return content + CRC.pack(crc32c(content))


def _encoded(rows: Sequence[tuple[int, ...]], dtype: np.dtype[np.void]) -> Iterator[bytes]:
    """Yield rows as bytes, in parts: no other thread runs while numpy converts one."""
    for at in range(0, len(rows), ROWS_AT_ONCE):
        yield np.array(rows[at : at + ROWS_AT_ONCE], dtype).tobytes()


def decode(raw: bytes) -> Checkpoint | None:
    """Decode a file; None if it is missing, damaged or of another version."""
    content = _good(raw)
    if not content:
        return None
    (
        _, version, _, position, store_unix_ms, run_position, first_unix_ms, last_unix_ms,
        run_count, run_crc, *counts,
    ) = HEAD.unpack_from(content)  # fmt: skip
    at, names = HEAD.size, []
    for _ in range(counts[0]):
        length = content[at]
        names.append(content[at + 1 : at + 1 + length].decode("ascii"))
        at += 1 + length
    columns: list[Any] = []
    for count, dtype in zip(counts[1:-1], _ROWS_BY_VERSION[version], strict=True):
        columns.append(np.frombuffer(content, dtype, count, at).tolist())
        at += count * dtype.itemsize
    extent = RunExtent(run_position, position, first_unix_ms, last_unix_ms)
    waiting_to = at + counts[-1] * DELAY_ROW.itemsize
    return Checkpoint(
        position,
        store_unix_ms,
        OpenRun(extent, run_count, run_crc),
        [QueueState(names[row[0]], *row[1:]) for row in columns[0]],
        _producers(*columns[1:]),
        content[at:waiting_to],
        *_behind(version, content[waiting_to:]),
    )


def _behind(version: int, raw: bytes) -> tuple[bytes, bytes, list[tuple[QueueKey, Section]]]:
    """Return transactions, outputs and sections, which are behind the scheduled batches."""
    if version < OUTPUT_VERSION:
        return (raw if version == VERSION else b""), b"", []
    sections: list[tuple[QueueKey, Section]] = []
    if version == COMPACTED_VERSION:
        rows, raw = _split(raw)
        for topic_id, queue_id, *values in np.frombuffer(rows, SECTION_ROW).tolist():
            sections.append(((topic_id, queue_id), Section(*values)))
    return *_split(raw), sections


def _split(raw: bytes) -> tuple[bytes, bytes]:
    """Return the part with a length at the start, and what follows."""
    (length,) = _LENGTH.unpack_from(raw)
    at = _LENGTH.size + length
    return raw[_LENGTH.size : at], raw[at:]


def of_producers(position: int, producers: Sequence[ProducerState]) -> bytes:
    """Return the file of a checkpoint that contains only producers."""
    return encode(
        Checkpoint(position, 0, OpenRun(RunExtent(position, position), 0, 0), (), producers)
    )


def position_of(raw: bytes) -> int:
    """Return the position of a checkpoint: the log was safe up to it; 0 if there is none."""
    content = _good(raw)
    return int(HEAD.unpack_from(content)[3]) if content else 0


def _good(raw: bytes) -> bytes:
    """Return the content without its checksum; empty if the checksum or version is wrong."""
    content = raw[: -CRC.size]
    if len(content) < HEAD.size or raw[-CRC.size :] != CRC.pack(crc32c(content)):
        return b""
    magic, version, *_ = HEAD.unpack_from(content)
    return content if magic == MAGIC and version in _ROWS_BY_VERSION else b""


def _producers(
    producers: list[tuple[int, ...]],
    pairs: list[tuple[int, int, int]],
    batches: list[tuple[int, ...]],
) -> list[ProducerState]:
    """Return the producers of rows of any version."""
    stored: Iterator[StoredBatch] = (
        (row[0], row[1], StoreReceipt(row[2], row[3], row[4], row[5]), _last(row, 6))
        for row in batches
    )
    queues = (
        ((topic_id, queue_id), tuple(islice(stored, batch_count)))
        for topic_id, queue_id, batch_count in pairs
    )
    return [
        ProducerState(row[0], row[1], row[2], dict(islice(queues, row[3])), _last(row, 4))
        for row in producers
    ]


def _last(row: tuple[int, ...], at: int) -> int:
    """Return the column `at`, the last one since version 2; 0 in version 1."""
    return row[at] if len(row) > at else 0
