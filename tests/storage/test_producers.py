"""Goal: a retry gets its first receipt, a gap or an old epoch gets an error, memory is bounded.

Method: the table is called with headers that the test builds.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest

from batonmq._core.queue_sender import ONE_BATCH_EPOCH
from batonmq._core.records import Header, read_header
from batonmq.errors import DuplicateSequence, ProducerFenced, SequenceGap
from batonmq_server.storage.core.producers import (
    BATCHES_KEPT,
    IDLE_MS_MAX,
    SEQUENCES,
    ProducerState,
    ProducerTable,
    StoredBatch,
    StoreReceipt,
    states_below,
)
from tests.storage.batches import batch

QUEUE = (7, 0)
VICTIM, STRANGER = 11, 12
"""Owners: numbers of two identities."""


def header(
    sequence: int,
    count: int = 10,
    *,
    producer_id: int = 5,
    epoch: int = 1,
    owner: int = 0,
    checksum: int = 77,
    topic: str = "TopicTest",
) -> Header:
    return replace(
        read_header(batch(b"x")),
        producer_id=producer_id,
        producer_epoch=epoch,
        sequence=sequence,
        count=count,
        owner=owner,
        checksum=checksum,
        topic=topic,
    )


def receipt(first_offset: int = 0, store_unix_ms: int = 0) -> StoreReceipt:
    return StoreReceipt(first_offset, first_offset * 100, first_offset * 100 + 100, store_unix_ms)


def record(table: ProducerTable, one: Header, stored: StoreReceipt) -> None:
    assert table.check(one, QUEUE) is None
    table.record(one, QUEUE, stored)


def test_batch_in_sequence_is_new() -> None:
    table = ProducerTable()
    for number in range(20):
        record(table, header(number * 10), receipt(number))


def test_batch_without_producer_is_always_new() -> None:
    table = ProducerTable()
    record(table, header(0, producer_id=0), receipt())
    record(table, header(0, producer_id=0), receipt())
    assert len(table) == 0


def test_retry_of_the_last_batches_gets_the_first_receipt() -> None:
    table = ProducerTable()
    for number in range(BATCHES_KEPT):
        record(table, header(number * 10), receipt(number))
    for number in range(BATCHES_KEPT):
        again = table.check(header(number * 10), QUEUE)
        assert again == replace(receipt(number), duplicate=True)


def test_older_retry_is_a_duplicate_sequence() -> None:
    table = ProducerTable()
    for number in range(BATCHES_KEPT + 1):
        record(table, header(number * 10), receipt(number))
    with pytest.raises(DuplicateSequence) as refused:
        table.check(header(0), QUEUE)
    assert refused.value.facts == {"sequence": "0", "expected": "60"}


def test_same_sequence_with_another_count_is_not_the_same_batch() -> None:
    table = ProducerTable()
    record(table, header(0, 10), receipt())
    with pytest.raises(DuplicateSequence):
        table.check(header(0, 9), QUEUE)


def test_gap_is_rejected_with_expected_and_actual_sequence() -> None:
    table = ProducerTable()
    record(table, header(0, 10), receipt())
    with pytest.raises(SequenceGap) as refused:
        table.check(header(11), QUEUE)
    assert refused.value.facts == {"expected": "10", "actual": "11"}


def test_unknown_producer_may_start_at_any_sequence() -> None:
    table = ProducerTable()
    record(table, header(12_345), receipt())
    with pytest.raises(SequenceGap):
        table.check(header(99_999), QUEUE)


def test_sequences_wrap() -> None:
    table = ProducerTable()
    last = header(SEQUENCES - 5, 10)
    record(table, last, receipt(1))
    record(table, header(5), receipt(2))
    assert table.check(last, QUEUE) == replace(receipt(1), duplicate=True)
    with pytest.raises(SequenceGap) as refused:
        table.check(header(16), QUEUE)
    assert refused.value.facts["expected"] == "15"


def test_each_queue_has_its_own_sequence() -> None:
    table = ProducerTable()
    record(table, header(0), receipt(1))
    assert table.check(header(0), (7, 1)) is None
    assert table.check(header(0), (8, 0)) is None


def test_old_epoch_is_fenced_on_each_queue() -> None:
    table = ProducerTable()
    record(table, header(0, epoch=2), receipt())
    for queue in (QUEUE, (7, 1)):
        with pytest.raises(ProducerFenced) as refused:
            table.check(header(10, epoch=1), queue)
        assert refused.value.facts == {"epoch": "1", "current": "2"}


def test_new_epoch_may_start_at_any_sequence() -> None:
    table = ProducerTable()
    record(table, header(0, epoch=1), receipt(1))
    record(table, header(0, epoch=2), receipt(2))
    assert table.check(header(0, epoch=2), QUEUE) == replace(receipt(2), duplicate=True)


def test_least_recently_used_producer_is_removed_first() -> None:
    table = ProducerTable(producers_max=2)
    for producer_id in (1, 2):
        record(table, header(0, producer_id=producer_id), receipt())
    record(table, header(10, producer_id=1), receipt())
    record(table, header(0, producer_id=3), receipt())
    assert len(table) == 2
    assert table.check(header(0, producer_id=2), QUEUE) is None
    assert table.check(header(10, producer_id=1), QUEUE) is not None


def test_producers_of_one_batch_do_not_push_out_the_others() -> None:
    table = ProducerTable(producers_max=2)
    for producer_id in (1, 2):
        record(table, header(0, producer_id=producer_id), receipt())
    for producer_id in (1, 2, 3):
        record(
            table, header(0, producer_id=producer_id, epoch=ONE_BATCH_EPOCH), receipt(producer_id)
        )
    for producer_id in (1, 2):
        assert table.check(header(0, producer_id=producer_id), QUEUE) is not None
    results = [
        table.check(header(0, producer_id=i, epoch=ONE_BATCH_EPOCH), QUEUE) for i in (1, 2, 3)
    ]
    assert results == [None, *(replace(receipt(i), duplicate=True) for i in (2, 3))]


def test_loaded_table_keeps_both_kinds_of_producers_apart() -> None:
    table, loaded = ProducerTable(), ProducerTable()
    record(table, header(0), receipt(1))
    record(table, header(0, epoch=ONE_BATCH_EPOCH), receipt(2))
    loaded.load(table.snapshot().states())
    assert loaded.check(header(0), QUEUE) == replace(receipt(1), duplicate=True)
    assert loaded.check(header(0, epoch=ONE_BATCH_EPOCH), QUEUE) == replace(
        receipt(2), duplicate=True
    )


def test_number_of_producer_queue_pairs_is_bounded() -> None:
    table = ProducerTable(queues_max=3)
    for producer_id in (1, 2):
        for queue_id in (0, 1):
            table.record(header(0, producer_id=producer_id), (7, queue_id), receipt())
    assert len(table) == 1


def test_producer_expires_after_seven_days() -> None:
    table = ProducerTable()
    record(table, header(0, producer_id=1), receipt(store_unix_ms=0))
    record(table, header(0, producer_id=2), receipt(store_unix_ms=1))
    table.expire(IDLE_MS_MAX - 1)
    assert len(table) == 2
    table.expire(IDLE_MS_MAX)
    assert len(table) == 1
    assert table.check(header(77, producer_id=1), QUEUE) is None


def test_state_below_a_position_comes_only_from_batches_before_it() -> None:
    """The log from there on restores the rest, in order."""
    table, fresh = ProducerTable(), ProducerTable()
    record(table, header(0, producer_id=5), receipt(1))
    record(table, header(0, producer_id=6), receipt(2))
    record(table, header(10, producer_id=5), receipt(3))
    record(table, header(0, producer_id=7), receipt(4))
    position = receipt(3).position
    states = states_below(table.snapshot(), position, queues_max=10)
    assert [one.producer_id for one in states] == [6, 5], "longest silent first"
    (kept,) = states_below(table.snapshot(), position, queues_max=1)
    assert kept.producer_id == 5
    fresh.load(states)
    record(fresh, header(10, producer_id=5), receipt(3))
    record(fresh, header(0, producer_id=7), receipt(4))
    assert fresh.snapshot() == table.snapshot()


def test_other_bytes_under_a_stored_sequence_are_an_error_and_get_no_receipt() -> None:
    table = ProducerTable()
    record(table, header(0, checksum=1), receipt(1))
    with pytest.raises(DuplicateSequence, match="other content") as refused:
        table.check(header(0, checksum=2), QUEUE)
    assert refused.value.facts == {"sequence": "0", "content": "other"}
    assert table.check(header(0, checksum=1), QUEUE) == replace(receipt(1), duplicate=True)


def test_batch_of_another_identity_does_not_take_the_sequence_of_a_producer() -> None:
    table = ProducerTable()
    record(table, header(0, owner=VICTIM), receipt(1))
    record(table, header(10, owner=STRANGER), receipt(2))
    record(table, header(10, owner=VICTIM), receipt(3))


def test_epoch_of_another_identity_fences_no_producer() -> None:
    table = ProducerTable()
    record(table, header(0, owner=VICTIM), receipt(1))
    record(table, header(0, owner=STRANGER, epoch=4_000_000_000), receipt(2))
    record(table, header(10, owner=VICTIM), receipt(3))


def test_epoch_in_one_topic_fences_no_producer_in_another_topic() -> None:
    table = ProducerTable()
    record(table, header(0), receipt(1))
    table.record(header(0, epoch=4_000_000_000), (8, 0), receipt(2))
    record(table, header(10), receipt(3))


def test_many_producers_of_one_topic_evict_none_of_another_topic() -> None:
    table = ProducerTable(producers_max=20)
    for producer_id in range(1, 6):
        record(table, header(0, producer_id=producer_id), receipt(producer_id))
    for producer_id in range(1, 1_000):
        table.record(header(0, producer_id=producer_id), (8, 0), receipt())
    assert len(table) == 20
    for producer_id in range(1, 6):
        assert table.check(header(0, producer_id=producer_id), QUEUE) is not None


def test_many_producers_of_one_identity_in_many_topics_evict_none_of_another() -> None:
    table = ProducerTable(producers_max=20)
    for producer_id in range(1, 6):
        record(table, header(0, producer_id=producer_id, owner=VICTIM), receipt(producer_id))
    for number in range(1, 1_000):
        flood = header(0, producer_id=number, owner=STRANGER)
        table.record(flood, (number % 100, 0), receipt())
    for producer_id in range(1, 6):
        result = table.check(header(0, producer_id=producer_id, owner=VICTIM), QUEUE)
        assert result is not None


def test_members_of_a_group_share_the_ids_of_messages_that_are_sent_back() -> None:
    """Two members send one message back: the copies differ in client and reason."""
    table = ProducerTable()
    first, second = (
        header(0, 1, epoch=ONE_BATCH_EPOCH, owner=one, checksum=one, topic="%RETRY%billing")
        for one in (11, 12)
    )
    record(table, first, receipt(1))
    assert table.check(second, QUEUE) == replace(receipt(1), duplicate=True)


def test_one_batch_of_another_identity_is_not_a_repetition_in_an_ordinary_topic() -> None:
    table = ProducerTable()
    record(table, header(0, epoch=ONE_BATCH_EPOCH, owner=STRANGER), receipt(1))
    record(table, header(0, epoch=ONE_BATCH_EPOCH, owner=VICTIM), receipt(2))


def test_producer_from_before_access_control_keeps_its_sequence() -> None:
    table = ProducerTable()
    record(table, header(0), receipt(1))
    assert table.check(header(0, owner=VICTIM), QUEUE) == replace(receipt(1), duplicate=True)
    record(table, header(10, owner=VICTIM), receipt(2))
    assert table.check(header(10, owner=VICTIM), QUEUE) == replace(receipt(2), duplicate=True)


def test_producer_from_before_access_control_keeps_its_sequences_in_each_queue() -> None:
    table, other = ProducerTable(), (7, 1)
    record(table, header(0), receipt(1))
    table.record(header(0), other, receipt(2))
    record(table, header(10, owner=VICTIM), receipt(3))
    assert table.check(header(0, owner=VICTIM), other) == replace(receipt(2), duplicate=True)
    with pytest.raises(SequenceGap):
        table.check(header(20, owner=VICTIM), other)
    table.record(header(10, owner=VICTIM), other, receipt(4))
    assert table.check(header(10, owner=VICTIM), other) == replace(receipt(4), duplicate=True)
    record(table, header(0, epoch=2, owner=VICTIM), receipt(5))
    with pytest.raises(ProducerFenced):
        table.check(header(20, owner=VICTIM), other)


def test_state_below_a_position_leaves_out_the_oldest_of_the_largest_shares() -> None:
    table = ProducerTable()
    kept = {(1, 7): 2, (1, 8): 2, (2, 7): 1}
    for (owner, topic_id), count in {(1, 7): 5, (1, 8): 3, (2, 7): 1}.items():
        batches: tuple[StoredBatch, ...] = ((0, 1, receipt(1), 5),)
        queues = {(topic_id, 0): batches}
        numbers = range(10 * topic_id, 10 * topic_id + count)
        table.load(ProducerState(number, 1, 1, queues, owner) for number in numbers)
    states = states_below(table.snapshot(), receipt(2).position, queues_max=5)
    shares = Counter((one.owner, next(iter(one.queues))[0]) for one in states)
    assert shares == kept
    assert [one.producer_id for one in states] == [73, 74, 81, 82, 70]
