"""Messages as columns: delivered runs, the buffer that they wait in, and the batch of a handler.

Goal: a message that is created from the columns when it is used equals the decoded record; offsets
outside of the delivery, filtered or done, are left out; what is started is exactly what is taken.
Method: property tests against `decode_records`, batches with every combination of parts.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence

import pyarrow
import pytest
from hypothesis import given
from hypothesis import strategies as st

from batonmq import MessageBatch, ReceivedMessage
from batonmq._consumer.delivered_run import DeliveredRun, Delivery
from batonmq._consumer.message_buffer import MessageBuffer
from batonmq._consumer.stored_batch import StoredBatch
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.flow_control import ByteBudget
from batonmq._core.queues import QueueRef
from batonmq._core.ranges import Range, of_sorted
from batonmq._core.records import (
    BatchBuilder,
    Message,
    decode_records,
    encode_record,
    read_header,
    stamped_head,
)
from batonmq._core.subscription import Filter, parse_filter
from batonmq.errors import BadChecksum

QUEUE = QueueRef("orders", "broker-a", 3)
MESSAGES = st.lists(
    st.builds(
        Message,
        st.binary(max_size=20),
        st.sampled_from(["", "a", "b", "ä"]),
        st.sampled_from([(), ("k",), ("k", "ö")]),
        st.sampled_from([{}, {"price": "7"}, {"price": "9", "ä": ""}]),
    ),
    min_size=1,
    max_size=12,
)
FILTERS = st.sampled_from(["*", "a", "a || b", "sql: price > 8"]).map(parse_filter)
EVERYTHING = parse_filter("*")


def stored(
    messages: Sequence[Message], first_offset: int = 100, *, compressed: bool = False
) -> bytes:
    """Return a batch as storage keeps it."""
    compressor = RecordCompressor(Compression.LZ4, 0) if compressed else RecordCompressor()
    builder = BatchBuilder(compressor)
    for message in messages:
        builder.add(message, encode_record(message))
    raw = builder.encode(topic=QUEUE.topic, queue_id=3, born_unix_ms=11)
    head = stamped_head(
        raw, position=4_096, first_offset=first_offset, store_unix_ms=12, topic_id=5, epoch=1
    )
    return head + raw[len(head) :]


def runs_of(
    batches: Sequence[bytes],
    ranges: Sequence[Range],
    wanted: Filter = EVERYTHING,
    flagged: Callable[[int], bool] | None = None,
) -> list[DeliveredRun]:
    delivery = Delivery(QUEUE, 7, 2, ranges, wanted, flagged)
    return list(delivery.runs(map(StoredBatch, batches)))


def bodies_of(count: int, first: int = 0) -> list[Message]:
    return [Message(b"%d" % number) for number in range(first, first + count)]


@given(MESSAGES, FILTERS, st.sets(st.integers(98, 113)), st.booleans())
def test_messages_are_those_of_the_records_that_are_open_and_pass_the_filter(
    messages: list[Message], wanted: Filter, open_offsets: set[int], compressed: bool
) -> None:
    raw = stored(messages, compressed=compressed)
    header = read_header(raw)
    expected = [
        record
        for record in decode_records(raw, header, range(header.count))
        if record.offset in open_offsets
        and wanted.accepts(record.tag, record.keys, record.properties)
    ]
    runs = runs_of([raw], of_sorted(sorted(open_offsets)), wanted, lambda offset: offset % 2 == 0)
    created = [run.message(number) for run in runs for number in range(len(run))]
    assert [(m.offset, m.tag, m.keys, m.properties, m.body) for m in created] == expected
    assert all((m.born_unix_ms, m.store_unix_ms, m.topic_id) == (11, 12, 5) for m in created)
    assert all(m.redelivered == (m.offset % 2 == 0) for m in created)
    assert all(m.message_id == f"broker-a-1000-{m.offset - 100:x}" for m in created)
    assert [body for run in runs for body in run.bodies()] == [m.body for m in created]
    ranges = [one for run in runs for one in run.ranges]
    assert [o for first, end in ranges for o in range(first, end)] == [m.offset for m in created]
    sizes = [run.size(number) for run in runs for number in range(len(run))]
    assert sum(sizes) == sum(run.bytes_count for run in runs)


def test_damaged_batch_is_refused_before_any_message_is_created() -> None:
    raw = bytearray(stored(bodies_of(3)))
    raw[-1] ^= 1
    with pytest.raises(BadChecksum):
        runs_of([bytes(raw)], [(100, 103)])


def test_message_that_was_read_does_not_keep_its_batch_in_memory() -> None:
    tagged = [Message(str(number).encode(), "paid") for number in range(1_000)]
    (run,) = runs_of([stored(tagged)], [(100, 1_100)])
    message = run.message(0)
    assert run.columns in gc.get_referents(message)
    assert message.body == b"0"
    assert run.columns not in gc.get_referents(message)


def test_message_that_has_only_a_body_never_keeps_its_batch() -> None:
    (run,) = runs_of([stored(bodies_of(1_000))], [(100, 1_100)])
    message = run.message(7)
    assert run.columns not in gc.get_referents(message)
    assert (message.body, message.tag, message.keys, message.properties) == (b"7", "", (), {})
    assert (message.born_unix_ms, message.store_unix_ms) == (11, 12)


def test_message_has_no_further_attributes() -> None:
    (run,) = runs_of([stored(bodies_of(1))], [(100, 101)])
    with pytest.raises(AttributeError, match="no attribute 'payload'"):
        _ = run.message(0).payload


# ---- the buffer


class Starts:
    """Records what was started; refuses some offsets."""

    def __init__(self, *refused: int) -> None:
        self.refused, self.started = set(refused), list[Range]()

    def __call__(self, first: int, end: int) -> bool:
        if self.refused & set(range(first, end)):
            return False
        self.started.append((first, end))
        return True


def filled(*batches: bytes) -> MessageBuffer:
    buffer = MessageBuffer(ByteBudget(1 << 20))
    for run in runs_of(batches, [(0, 1_000)]):
        buffer.add(run)
    return buffer


def test_batch_is_taken_across_stored_batches_and_started_by_ranges() -> None:
    buffer = filled(stored(bodies_of(3), 0), stored(bodies_of(4, 3), 3))
    starts = Starts()
    batch, _ = buffer.take(5, starts)
    assert batch is not None
    assert batch.bodies() == [b"0", b"1", b"2", b"3", b"4"]
    assert starts.started == [(0, 3), (3, 5)] == list(batch.ranges)
    assert len(buffer) == 2
    message, _ = buffer.take_one(starts)
    assert message is not None
    assert (message.offset, message.attempts) == (5, 1)
    rest, _ = buffer.take(5, starts)
    assert rest is not None
    assert rest.bodies() == [b"6"]
    assert len(buffer) == buffer.waiting_bytes.waiting == 0
    assert buffer.take(5, starts)[0] is None
    assert buffer.take_one(starts)[0] is None


def test_messages_that_must_not_be_started_are_dropped_alone() -> None:
    starts = Starts(1, 4)
    batch, _ = filled(stored(bodies_of(6), 0)).take(10, starts)
    assert batch is not None
    assert list(batch.offsets) == [0, 2, 3, 5]
    assert [o for first, end in starts.started for o in range(first, end)] == [0, 2, 3, 5]
    assert filled(stored(bodies_of(1), 0)).take(10, Starts(0))[0] is None
    message, _ = filled(stored(bodies_of(3), 0)).take_one(Starts(0, 1))
    assert message is not None
    assert message.offset == 2


# ---- the batch of a handler


def batch_of(count: int = 6) -> MessageBatch:
    batch, _ = filled(stored(bodies_of(2), 0), stored(bodies_of(count - 2, 2), 2)).take(
        count, Starts()
    )
    assert batch is not None
    return batch


def test_batch_is_a_sequence_of_messages() -> None:
    batch = batch_of()
    assert len(batch) == 6
    assert [message.offset for message in batch] == list(batch.offsets) == [0, 1, 2, 3, 4, 5]
    assert batch[-1].offset == 5
    assert [message.offset for message in batch[1:4:2]] == [1, 3]
    assert batch[2] is batch[2] is list(batch)[2]
    assert batch[3].attempts == 1
    assert batch[3] in batch
    assert batch.queue == QUEUE
    for index in (6, -7):
        with pytest.raises(IndexError):
            batch[index]


def test_time_is_extended_by_messages_created_before_and_after_the_call_began() -> None:
    batch, extended = batch_of(), list[int]()
    early = batch[0]
    batch.extender = lambda _, ms: extended.append(ms)
    early.extend(1)
    batch[1].extend(2)
    batch.extender = None
    early.extend(3)
    batch[2].extend(4)
    assert extended == [1, 2]


def test_batch_becomes_a_table_of_arrow() -> None:
    raw = stored([Message(b"\xff", "a", ("k", "l")), Message(b"")], 0)
    batch, _ = filled(raw).take(10, Starts())
    assert batch is not None
    table = batch.to_arrow()
    assert table.schema.field("body").type == pyarrow.binary()
    assert table.to_pylist() == [
        {
            "offset": offset,
            "body": body,
            "tag": tag,
            "keys": keys,
            "born_unix_ms": 11,
            "store_unix_ms": 12,
        }
        for offset, body, tag, keys in ((0, b"\xff", "a", ["k", "l"]), (1, b"", "", []))
    ]
    assert batch.tags == ["a", ""]
    assert batch.keys == [("k", "l"), ()]


def test_columns_of_a_batch_create_no_message() -> None:
    batch = batch_of()
    created = list[int]()
    original = ReceivedMessage._of_columns

    def count(columns: object, index: int) -> ReceivedMessage:
        created.append(index)
        return original(columns, index)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ReceivedMessage, "_of_columns", count)
        assert len(batch.bodies()) == 6
        assert len(batch.offsets) == 6
    assert created == []
