"""Goal: the mark of a mirrored batch names its place in the source, and the records stay as they
are.

Method: batches are made as storage has them, marked, and read back by the rules of storage.
"""

from __future__ import annotations

import pytest

from batonmq._core.mirror_marks import (
    GAPS_MAX,
    MIRROR_EPOCH,
    SOURCE_OFFSET_MAX,
    MirrorMark,
    mark_of,
    marked_batch,
    next_mark,
    source_id,
)
from batonmq._core.outputs import OutputHead, OutputSource, encode_head, encode_rows, row_key
from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.queues import QueueRef
from batonmq._core.records import (
    BatchBuilder,
    Header,
    Message,
    check_batch,
    decode_records,
    encode_record,
    stamped_head,
)
from batonmq.errors import LimitExceeded

QUEUE = QueueRef("t", "a", 0)
SOURCE = source_id("c", 1, 2, QUEUE)
MESSAGES = (
    Message(b"one", "tag", ("key", "other"), {"name": "value"}),
    Message(b"two"),
)


def stored(
    first_offset: int, *, producer: tuple[int, int] = (7, 1), outputs: bool = False
) -> bytes:
    """Return a batch as storage has it."""
    builder = BatchBuilder()
    for message in MESSAGES:
        builder.add(message, encode_record(message))
    head = OutputHead(OutputSource("g", 1, "a", 0), 0, 1, 0)
    rows = encode_rows([row_key(0, 0), row_key(1, 0)], [1, 2], 0)
    batch = builder.encode(
        topic="t",
        queue_id=0,
        producer=producer,
        sequence=3,
        born_unix_ms=9,
        outputs=(encode_head(head), rows) if outputs else (b"", b""),
    )
    stamp = stamped_head(
        batch, position=5, first_offset=first_offset, store_unix_ms=8, topic_id=1, epoch=2, owner=6
    )
    return stamp + batch[len(stamp) :]


def header_at(offset: int) -> Header:
    return check_batch(stored(offset), stamped=True)


@pytest.mark.parametrize("offset", [0, 41, (1 << 32) - 1, 1 << 32, 5 << 32 | 17])
def test_mark_has_the_offset_of_the_source(offset: int) -> None:
    mark = next_mark(None, SOURCE, header_at(offset))
    batch = marked_batch(stored(offset), header_at(offset), 3, mark)
    found = mark_of(check_batch(batch, stamped=False))
    assert found == mark
    assert (found.source_id, found.first_offset, found.next_offset) == (SOURCE, offset, offset + 2)


@pytest.mark.parametrize("outputs", [False, True])
def test_marked_batch_keeps_everything_but_place_and_producer(outputs: bool) -> None:
    raw = stored(40, outputs=outputs)
    header = check_batch(raw, stamped=True)
    batch = marked_batch(raw, header, 3, next_mark(None, SOURCE, header))
    made = check_batch(batch, stamped=False)
    assert (made.topic, made.queue_id, made.count, made.born_unix_ms) == ("t", 3, 2, 9)
    assert (made.first_offset, made.position, made.topic_id, made.owner) == (0, 0, 0, 0)
    assert made.output_head_bytes == 0
    assert made.extra_key_count == 1
    records = list(decode_records(batch, made, (0, 1)))
    assert [Message(one.body, one.tag, one.keys, dict(one.properties)) for one in records] == list(
        MESSAGES
    )


def test_batches_without_a_gap_have_one_epoch_and_a_gap_begins_the_next() -> None:
    first = next_mark(None, SOURCE, header_at(10))
    second = next_mark(first, SOURCE, header_at(12))
    after_gap = next_mark(second, SOURCE, header_at(20))
    assert first.epoch == second.epoch
    assert after_gap.epoch == second.epoch + 1
    assert next_mark(after_gap, SOURCE, header_at(22)).epoch == after_gap.epoch


def test_epoch_rises_with_the_upper_bits_of_the_offset_and_its_gaps_begin_again() -> None:
    last = MirrorMark(SOURCE, MIRROR_EPOCH + 7, (1 << 32) - 1, 2)
    mark = next_mark(last, SOURCE, header_at(last.next_offset))
    assert mark.epoch > last.epoch
    assert mark.epoch & GAPS_MAX == 0
    assert mark_of(
        check_batch(marked_batch(stored(last.next_offset), header_at(last.next_offset), 0, mark),
                    stamped=False)
    ) == mark  # fmt: skip


def test_more_gaps_or_offsets_than_fit_are_refused() -> None:
    last = MirrorMark(SOURCE, MIRROR_EPOCH | GAPS_MAX, 10, 2)
    assert next_mark(last, SOURCE, header_at(12)).epoch == last.epoch
    with pytest.raises(LimitExceeded, match="after 1048576 gaps"):
        next_mark(last, SOURCE, header_at(13))
    with pytest.raises(LimitExceeded):
        next_mark(None, SOURCE, header_at(SOURCE_OFFSET_MAX))
    assert next_mark(None, SOURCE, header_at(SOURCE_OFFSET_MAX - 1)).epoch < ONE_BATCH_EPOCH


@pytest.mark.parametrize(
    "producer", [(0, 0), (7, 1), (7, MIRROR_EPOCH - 1), (7, ONE_BATCH_EPOCH), (-7, MIRROR_EPOCH)]
)
def test_batch_of_a_producer_has_no_mark(producer: tuple[int, int]) -> None:
    assert mark_of(check_batch(stored(0, producer=producer), stamped=True)) is None


def test_id_names_the_cluster_the_topic_and_the_queue() -> None:
    ids = {
        SOURCE,
        source_id("d", 1, 2, QUEUE),
        source_id("c", 2, 2, QUEUE),
        source_id("c", 1, 3, QUEUE),
        source_id("c", 1, 2, QueueRef("t", "a", 1)),
        source_id("c", 1, 2, QueueRef("t", "b", 0)),
    }
    assert len(ids) == 6
    assert all(0 < one < 1 << 63 for one in ids)
