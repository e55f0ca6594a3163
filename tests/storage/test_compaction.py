"""Goal: the parts of a compaction: keys as columns, bounded memory, slices of batches, orders.

Method: each part alone, against the plain code that does the same for one message.
"""

from __future__ import annotations

from random import Random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from batonmq._columns.batch_columns import check_batch, record_columns
from batonmq._core.compression import Compression, RecordCompressor
from batonmq._core.ordering_key import find_ordering_key, with_ordering_key
from batonmq._core.records import (
    BatchBuilder,
    Message,
    decode_records,
    encode_record,
    read_header,
    stamped_head,
)
from batonmq.errors import BadBatch
from batonmq_server.storage.core import checkpoint
from batonmq_server.storage.core.checkpoint import Checkpoint
from batonmq_server.storage.core.checks import LocalTopic, check, check_takes
from batonmq_server.storage.core.compacted import CompactedPart, Section
from batonmq_server.storage.core.compaction_need import compacted_from
from batonmq_server.storage.core.compaction_order import (
    CompactionOrder,
    SectionRows,
    decode_order,
    encode_order,
    is_relocated,
    relocations,
    written_unix_ms,
)
from batonmq_server.storage.core.compaction_policy import CompactionPolicy
from batonmq_server.storage.core.consumequeue import ConsumeQueue
from batonmq_server.storage.core.files import FileCache
from batonmq_server.storage.core.key_digests import KeyDigester, check_keyed, key_bounds
from batonmq_server.storage.core.keyindex import OpenRun, RunExtent
from batonmq_server.storage.core.newest_offsets import BYTES_PER_KEY, NewestOffsets
from batonmq_server.testing.memory_disks import MemoryDisk
from tests.storage.batches import TOPIC, batch

_KEY = "baton.ordering_key"
_TEXT = st.text(st.characters(codec="utf-8", exclude_characters="\x01\x02"), max_size=12)
_PROPERTIES = st.dictionaries(
    st.one_of(_TEXT.filter(bool), st.just(f"x{_KEY}"), st.just(_KEY), st.just("baton.or")),
    st.one_of(_TEXT, st.just(_KEY), st.text("k", min_size=60, max_size=1_024)),
    max_size=4,
)


@settings(max_examples=200, deadline=None)
@given(st.lists(st.tuples(_PROPERTIES, st.binary(max_size=8)), min_size=1, max_size=8))
def test_keys_of_a_batch_are_those_of_its_messages(
    messages: list[tuple[dict[str, str], bytes]],
) -> None:
    """Also if a name or value looks like the name of an ordering key."""
    raw = batch(*(Message(body, properties=properties) for properties, body in messages))
    bounds = key_bounds(record_columns(raw, read_header(raw)))
    for number, (properties, body) in enumerate(messages):
        begin, end = int(bounds.begins[number]), int(bounds.ends[number])
        found = bytes(bounds.raw[begin:end]).decode() if begin >= 0 else None
        assert found == properties.get(_KEY)
        assert bounds.empty_bodies[number] == (not body)


def test_of_repeated_properties_the_last_one_is_the_key() -> None:
    properties = f"{_KEY}\x01old\x02a\x01b\x02{_KEY}\x01new\x02c\x01d\x02".encode()
    assert find_ordering_key(properties) == "new"
    builder = BatchBuilder()
    head = (0).to_bytes(2, "big") * 2 + len(properties).to_bytes(4, "big")
    builder.add(Message(b"body"), head + properties + b"body")
    raw = builder.encode(topic=TOPIC, queue_id=0)
    bounds = key_bounds(record_columns(raw, read_header(raw)))
    assert bytes(bounds.raw[bounds.begins[0] : bounds.ends[0]]) == b"new"


def test_digests_are_equal_for_equal_keys_only() -> None:
    random = Random(1)
    keys = ["", "\0", "\0\0", *(f"{n}" for n in range(2_000)), *("k" * n for n in range(1, 1_025))]
    sent = random.sample(keys, len(keys)) + random.sample(keys, len(keys))
    raw = batch(*(with_ordering_key(Message(b""), key) for key in sent))
    bounds = key_bounds(record_columns(raw, read_header(raw)))
    digests = KeyDigester(7).digests(bounds)
    pairs = list(zip(digests.high.tolist(), digests.low.tolist(), strict=True))
    known = dict(zip(sent, pairs, strict=True))
    assert [known[key] for key in sent] == pairs
    assert len(set(pairs)) == len(keys)
    assert KeyDigester(8).digests(bounds).high.tolist() != digests.high.tolist()


def test_newest_offsets_are_those_of_a_dict_within_their_memory() -> None:
    random, digester = Random(2), KeyDigester(1)
    newest, model = NewestOffsets(5_000), dict[str, int]()
    at = 0
    while newest.has_room(1_000):
        sent = [f"key-{random.randrange(10_000)}" for _ in range(1_000)]
        raw = batch(*(with_ordering_key(Message(b"x"), key) for key in sent))
        keys = digester.digests(key_bounds(record_columns(raw, read_header(raw))))
        newest.add(keys, np.arange(at, at + 1_000))
        model.update(zip(sent, range(at, at + 1_000), strict=True))
        at += 1_000
    assert 4_000 < len(newest) == len(model) <= 5_000
    assert newest.bytes_count == BYTES_PER_KEY * len(model)
    asked = [*model, "unknown"]
    raw = batch(*(with_ordering_key(Message(b"x"), key) for key in asked))
    found = newest.find(digester.digests(key_bounds(record_columns(raw, read_header(raw)))))
    assert found.tolist() == [*model.values(), -1]


@pytest.mark.parametrize("compression", list(Compression))
@given(kept=st.lists(st.booleans(), min_size=1, max_size=12))
@settings(max_examples=40, deadline=None)
def test_relocated_batches_have_the_kept_messages_at_their_offsets(
    compression: Compression, kept: list[bool]
) -> None:
    builder = BatchBuilder(RecordCompressor(compression))
    for number in range(len(kept)):
        keys = tuple(f"key{number}-{n}" for n in range(number % 3))
        message = with_ordering_key(Message(b"%d" % number * 40, f"t{number}", keys), f"{number}")
        builder.add(message, encode_record(message))
    raw = builder.encode(topic=TOPIC, queue_id=3, producer=(5, 1), sequence=9, born_unix_ms=77)
    head = stamped_head(
        raw, position=500, first_offset=1_000, store_unix_ms=123, topic_id=7, epoch=2, owner=11
    )
    stored = head + raw[len(head) :]
    header = read_header(stored)
    wanted = [
        one
        for one, keeps in zip(
            decode_records(stored, header, range(header.count)), kept, strict=True
        )
        if keeps
    ]
    found = []
    for one in relocations(stored, header, np.array(kept)):
        done = one.finished(1 << 40)
        head = stamped_head(
            done.batch, position=9, first_offset=done.header.first_offset,
            store_unix_ms=done.header.store_unix_ms, topic_id=7, epoch=3, owner=11,
        )  # fmt: skip
        again = head + done.batch[len(head) :]
        after = check_batch(again, stamped=True)
        assert is_relocated(after)
        assert written_unix_ms(after) == 1 << 40
        assert (after.queue_id, after.born_unix_ms, after.store_unix_ms) == (3, 77, 123)
        assert (after.count, after.length) == (done.header.count, done.header.length)
        found += list(decode_records(again, after, range(after.count)))
    assert found == wanted


def test_order_is_read_as_it_was_written() -> None:
    offsets, positions, sizes, tags = (np.arange(5) * n for n in (1, 100, 7, -3))
    order = CompactionOrder(
        topic=TOPIC, topic_id=7, queue_id=2, first_offset=0, next_offset=50, compacted_to=40,
        data_position=100, data_end=900, queue_position=1_000, removed_count=45,
        rows=SectionRows(offsets, positions, sizes, tags, np.array([3]), np.array([1 << 41])),
    )  # fmt: skip
    raw = encode_order(order)
    again = decode_order(read_header(raw), raw)
    for name in ("offsets", "positions", "sizes", "tags", "tombstone_offsets", "tombstone_since"):
        assert getattr(again.rows, name).tolist() == getattr(order.rows, name).tolist()
    assert encode_order(again) == raw
    with pytest.raises(BadBatch):
        decode_order(read_header(other := batch(b"short")), other)


def test_section_replaces_those_that_it_covers() -> None:
    part = CompactedPart()
    for first, end in ((0, 10), (10, 20), (30, 40), (0, 20)):
        part.put(_section(first, end))
    assert [(one.first_offset, one.next_offset) for one in part.sections] == [(0, 20), (30, 40)]
    found = part.find(19)
    assert found is not None and found.first_offset == 0
    assert part.find(20) is None, "a copy that lacks a part of the log has gaps"
    assert part.covered_from(20) == 30
    assert part.covered_from(40) is None


def test_run_that_was_interrupted_is_repeated_from_the_end_of_its_sections() -> None:
    queue = ConsumeQueue(FileCache(MemoryDisk()), "consumequeue/t-1/0", first_offset=20)
    assert compacted_from(queue, None) == 20
    part = CompactedPart()
    part.put(_section(0, 20)._replace(compacted_to=50))
    assert compacted_from(queue, part) == 20, "the run was to end at 50"
    part.put(_section(0, 10)._replace(compacted_to=8))
    assert compacted_from(queue, part) == 8


def test_checkpoint_has_the_sections() -> None:
    run = OpenRun(RunExtent(9, 9), 0, 0)
    sections = [((7, 1), _section(0, 10)), ((7, 2), _section(5, 6))]
    for transactions, outputs in ((b"", b""), (b"as they are", b""), (b"", b"others")):
        written = Checkpoint(9, 1, run, [], [], b"", transactions, outputs, sections)
        assert checkpoint.decode(checkpoint.encode(written)) == written


def test_message_without_a_key_names_itself_and_the_remedy() -> None:
    raw = batch(with_ordering_key(Message(b"1"), "k"), Message(b"2", properties={"a": "b"}))
    with pytest.raises(BadBatch, match="message 1 of 2") as refused:
        check_keyed(TOPIC, raw, read_header(raw))
    assert "ordering key" in refused.value.remedy
    check_takes(check(raw), LocalTopic(7, 8))
    with pytest.raises(BadBatch):
        check_takes(check(raw), LocalTopic(7, 8, compaction=CompactionPolicy()))


def _section(first: int, end: int) -> Section:
    return Section(first, end, end, 1_000, 50, 500, 900, 3, 400, 0)
