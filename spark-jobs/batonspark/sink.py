"""Write rows as messages; each is stored once even if Spark repeats a write.

Every batch of messages has a producer id of its own: a hash of the query and micro-batch (or the
write id), the task, the number of the batch in the task, and its content. Storage recognizes a
repeated batch by that id and keeps the first.
"""

from __future__ import annotations

import asyncio
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from hashlib import blake2b
from secrets import token_hex

import pyarrow as pa
from pyspark import TaskContext
from pyspark.sql.datasource import (
    DataSourceArrowWriter,
    DataSourceStreamArrowWriter,
    WriterCommitMessage,
)
from pyspark.sql.types import StructType

from baton.storage.v1 import storage_service_pb2 as pb
from batonmq._common.clock import Clock
from batonmq._common.rpc import error_from_pb
from batonmq._connection.routes import query_route, writable_queues_of
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.keyed_queues import KeyedQueues
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.queues import QueueRef
from batonmq._core.records import BatchBuilder, Message, encode_record
from batonmq.admin.admin import Admin
from batonmq.errors import DuplicateSequence, NotWritable
from batonspark.cluster import ClusterClient
from batonspark.options import BadOption, WriteOptions

BATCH_BYTES_MAX = 512 * 1024
REQUEST_BYTES_MAX = 8 * 1024 * 1024
REQUEST_BATCHES_MAX = 256
_COLUMNS = ("body", "key", "tag", "properties")
_QUERY_ID, _BATCH_ID = "sql.streaming.queryId", "streaming.sql.batchId"
_CALL_S = 15.0


@dataclass(frozen=True)
class StoredMessages(WriterCommitMessage):
    """Messages that a task stored; an earlier attempt stored `repeated_count` of them."""

    message_count: int
    repeated_count: int


class MessageWriter(DataSourceArrowWriter):
    """Writes the rows of a batch job.

    A repeated task stores nothing twice. A repeated write does, unless it has the same `writeId`.
    """

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        _check(schema)
        self._options = options
        self._name = f"write/{options.write_id or token_hex(16)}"

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredMessages:
        """Store the rows of a task."""
        return write_rows(self._options, f"{self._name}/{_task().partitionId()}", iterator)


class MessageStreamWriter(DataSourceStreamArrowWriter):
    """Writes micro-batches. The id of a query is kept in its checkpoint."""

    def __init__(self, options: WriteOptions, schema: StructType) -> None:
        _check(schema)
        self._options = options

    def write(self, iterator: Iterator[pa.RecordBatch]) -> StoredMessages:
        """Store the rows of a task."""
        task = _task()
        query_id, batch_id = task.getLocalProperty(_QUERY_ID), task.getLocalProperty(_BATCH_ID)
        assert query_id is not None
        assert batch_id is not None
        name = f"stream/{query_id}/{batch_id}/{task.partitionId()}"
        return write_rows(self._options, name, iterator)


@dataclass(slots=True)
class _OpenBatch:
    """A batch that is being filled, and a hash of its messages."""

    builder: BatchBuilder
    digest: blake2b

    def is_full(self, record_bytes: int, count_max: int) -> bool:
        """Return whether the batch has no room for another record."""
        builder = self.builder
        return builder.count >= count_max or builder.bytes_count + record_bytes > BATCH_BYTES_MAX


@dataclass(frozen=True, slots=True)
class _EncodedBatch:
    """An encoded batch of messages."""

    queue: QueueRef
    count: int
    encoded: bytes


def _check(schema: StructType) -> None:
    types = {field.name: field.dataType.simpleString() for field in schema}
    wrong = [name for name in types if name not in _COLUMNS]
    if wrong or types.get("body") not in ("binary", "string"):
        raise BadOption(
            "messages are written from the columns body (BINARY or STRING), key and tag (STRING) "
            f"and properties (MAP<STRING, STRING>), got {', '.join(types)}"
        )


def _task() -> TaskContext:
    task = TaskContext.get()
    assert task is not None
    return task


def write_rows(options: WriteOptions, name: str, rows: Iterator[pa.RecordBatch]) -> StoredMessages:
    """Store rows as messages.

    Args:
        name: Name of the task; the same rows under the same name are stored once.
    """
    with ClusterClient(options.connection) as cluster:
        route = cluster.call(
            cluster.admin.ask(lambda _: query_route(cluster.admin.directory, options.topic))
        )
        queues = writable_queues_of(route)
        if not queues:
            raise NotWritable(f"topic {options.topic} has no writable queue")
        count = repeated = 0
        batches = _batches(options, name, queues, _messages(options, rows))
        for request in _requests(batches):
            repeated += cluster.call(_append(cluster.admin, request))
            count += sum(batch.count for batch in request)
        return StoredMessages(count, repeated)


def _messages(options: WriteOptions, rows: Iterator[pa.RecordBatch]) -> Iterable[Message]:
    """Return the messages of rows, in the order of the rows or sorted by content."""
    found = (message for batch in rows for message in _of_batch(batch))
    return sorted(found, key=encode_record) if options.sorted else found


def _of_batch(batch: pa.RecordBatch) -> Iterator[Message]:
    columns = {name: batch.column(name).to_pylist() for name in batch.schema.names}
    nothing = [None] * batch.num_rows
    for body, key, tag, properties in zip(
        *(columns.get(name, nothing) for name in _COLUMNS), strict=True
    ):
        yield Message(
            body.encode() if isinstance(body, str) else body or b"",
            tag or "",
            tuple(key.split()) if key else (),
            {one: value or "" for one, value in properties or ()},
        )


def _batches(
    options: WriteOptions, name: str, queues: tuple[QueueRef, ...], messages: Iterable[Message]
) -> Iterator[_EncodedBatch]:
    """Return batches of messages; messages with the same first key stay in order in a queue."""
    packing = RecordCompressor(Compression[options.compression.upper()])
    keyed, opened = KeyedQueues(queues), dict[QueueRef | None, _OpenBatch]()
    count = 0
    for message in messages:
        record = encode_record(message)
        queue = keyed.of(message.keys[0]) if message.keys else None
        batch = opened.get(queue)
        if batch is not None and batch.is_full(len(record), options.rows_per_batch):
            yield _encoded(opened.pop(queue), queue, queues)
            batch = None
        if batch is None:
            digest = blake2b(f"spark/{name}/{count}".encode(), digest_size=8)
            batch = opened[queue] = _OpenBatch(BatchBuilder(packing), digest)
            count += 1
        batch.builder.add(message, record)
        batch.digest.update(record)
    for queue, batch in opened.items():
        yield _encoded(batch, queue, queues)


def _encoded(
    batch: _OpenBatch, queue: QueueRef | None, queues: tuple[QueueRef, ...]
) -> _EncodedBatch:
    once = int.from_bytes(batch.digest.digest()) >> 1 or 1
    chosen = queues[once % len(queues)] if queue is None else queue
    encoded = batch.builder.encode(
        topic=chosen.topic,
        queue_id=chosen.queue_id,
        producer=(once, ONE_BATCH_EPOCH),
        born_unix_ms=Clock().unix_ms(),
    )
    return _EncodedBatch(chosen, batch.builder.count, encoded)


def _requests(batches: Iterable[_EncodedBatch]) -> Iterator[list[_EncodedBatch]]:
    """Group batches into rounds of requests."""
    waiting: list[_EncodedBatch] = []
    size = 0
    for batch in batches:
        waiting.append(batch)
        size += len(batch.encoded)
        if len(waiting) >= REQUEST_BATCHES_MAX or size >= REQUEST_BYTES_MAX:
            yield waiting
            waiting, size = [], 0
    if waiting:
        yield waiting


async def _append(admin: Admin, batches: Sequence[_EncodedBatch]) -> int:
    """Store batches, in order in each queue; return how many messages were stored before."""
    by_broker: defaultdict[str, list[_EncodedBatch]] = defaultdict(list)
    for batch in batches:
        by_broker[batch.queue.broker].append(batch)
    async with asyncio.TaskGroup() as tasks:
        calls = [tasks.create_task(_append_at(admin, b, share)) for b, share in by_broker.items()]
    return sum(task.result() for task in calls)


async def _append_at(admin: Admin, broker: str, batches: Sequence[_EncodedBatch]) -> int:
    request = pb.AppendRequest(
        batches=[batch.encoded for batch in batches], durability=pb.DURABILITY_FSYNCED
    )

    async def ask(limit_s: float) -> int:
        stub = await admin.directory.storage(broker)
        answer = await stub.Append(request, timeout=min(limit_s, _CALL_S))
        repeated = 0
        for batch, outcome in zip(batches, answer.outcomes, strict=True):
            if outcome.HasField("error"):
                error = error_from_pb(outcome.error)
                if not isinstance(
                    error, DuplicateSequence
                ):  # an old repetition: stored, but without a receipt
                    raise error
            if outcome.HasField("error") or outcome.receipt.duplicate:
                repeated += batch.count
        return repeated

    return await admin.ask(ask)
