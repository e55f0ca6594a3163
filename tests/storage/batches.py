"""Batches and stores for the tests of the storage core."""

from __future__ import annotations

from dataclasses import dataclass

from batonmq._core.records import (
    BatchBuilder,
    Message,
    decode_records,
    encode_record,
    read_header,
)
from batonmq._core.subscription import SqlFilter
from batonmq.errors import BatonError
from batonmq_server.storage.core.checks import LocalTopic, check
from batonmq_server.storage.core.commitlog import CommitLog
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.keyindex import KeyIndex
from batonmq_server.storage.core.producers import ProducerTable, QueueKey, StoreReceipt
from batonmq_server.storage.core.query import MessageMatch, MessageQueries
from batonmq_server.storage.core.queue_reader import ReadSpec
from batonmq_server.storage.core.recovery import Recovery, RecoveryReport
from batonmq_server.storage.core.store import MessageStore
from batonmq_server.storage.core.tag_filter import HashFilter
from batonmq_server.testing.memory_disks import MemoryDisk

TOPIC = "orders"
TOPIC_ID = 7
TOPICS: dict[str, LocalTopic | BatonError] = {TOPIC: LocalTopic(TOPIC_ID, 8)}
ALL = HashFilter(None)
NOW = 1_700_000_000_000


def batch(
    *bodies: bytes | Message,
    queue_id: int = 0,
    topic: str = TOPIC,
    producer: tuple[int, int] = (0, 0),
    sequence: int = 0,
) -> bytes:
    """Return an unstamped batch of `bodies`."""
    builder = BatchBuilder()
    for body in bodies:
        message = Message(body) if isinstance(body, bytes) else body
        builder.add(message, encode_record(message))
    return builder.encode(topic=topic, queue_id=queue_id, producer=producer, sequence=sequence)


def tagged(*tags: str, queue_id: int = 0) -> bytes:
    """Return a batch with one message per tag; its body is the tag."""
    return batch(*(Message(tag.encode(), tag=tag) for tag in tags), queue_id=queue_id)


@dataclass(frozen=True, slots=True)
class Opened:
    """A store after recovery, its disk and the report."""

    disk: MemoryDisk
    store: MessageStore
    report: RecoveryReport


def open_store(
    disk: MemoryDisk,
    *,
    segment_bytes: int = 4_096,
    synced_position: int = 0,
    accept_loss: bool = False,
    run_entries: int = 100,
) -> Opened:
    """Recover a store as a node does at start, without the lock and a checkpoint."""
    cache = FileCache(disk)
    log = CommitLog(disk, cache, segment_bytes)
    keys = KeyIndex(disk, cache, log.segment_end, log.first_position, run_entries=run_entries)
    store = MessageStore(log, cache, ProducerTable(), 1, keys)
    report = Recovery(disk, store, synced_position=synced_position, accept_loss=accept_loss).run()
    sync(store)
    return Opened(disk, store, report)


def sync(store: MessageStore) -> frozenset[QueueKey]:
    """Sync the store as the flusher does; return the queues that have grown."""
    unsynced = store.log.unsynced()
    for file in unsynced.files:
        file.sync()
    return store.synced(unsynced.position)


def append(store: MessageStore, *batches: bytes, now: int = NOW) -> list[StoreReceipt | BatonError]:
    """Append without a sync; return the outcomes."""
    return store.append([check(one) for one in batches], TOPICS, now)


def stored(store: MessageStore, *batches: bytes) -> list[StoreReceipt]:
    """Append and sync; return the receipts. All batches must be stored."""
    outcomes = append(store, *batches)
    sync(store)
    receipts = [one for one in outcomes if isinstance(one, StoreReceipt)]
    assert len(receipts) == len(outcomes), outcomes
    return receipts


def read_spec(
    offset: int = 0,
    *,
    filter: HashFilter | SqlFilter = ALL,
    bytes_max: int = 1 << 20,
    messages_max: int = 1_000,
) -> ReadSpec:
    return ReadSpec(offset, bytes_max, messages_max, filter)


def bodies(store: MessageStore, queue_id: int = 0) -> list[bytes]:
    """Return all visible bodies of a queue, read with several pulls."""
    message_bodies: list[bytes] = []
    offset = store.offsets((TOPIC_ID, queue_id)).first_offset
    while (
        reading := store.read((TOPIC_ID, queue_id), read_spec(offset, messages_max=7))
    ) is not None:
        for raw in reading.batches:
            header = read_header(raw)
            begin = max(offset - header.first_offset, 0)
            end = min(reading.next_offset - header.first_offset, header.count)
            message_bodies += [r.body for r in decode_records(raw, header, range(begin, end))]
        offset = reading.next_offset
    return message_bodies


def message_at(queries: MessageQueries, position: int, index: int) -> MessageMatch:
    """Return the message at `index` of the batch at `position`."""
    return queries.message(queries.header(position, index), index)
