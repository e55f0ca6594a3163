"""Goal: micro-batches and filters select the right slices, each once.

Method: the pure rules, with offsets and filters made by hand or by Hypothesis. No session.
"""

from __future__ import annotations

from datetime import UTC, datetime

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pyspark.sql.datasource import (
    EqualTo,
    GreaterThan,
    GreaterThanOrEqual,
    In,
    IsNotNull,
    LessThan,
    LessThanOrEqual,
)
from pyspark.sql.streaming.datasource import ReadAllAvailable

from batonmq._core.queues import QueueRef
from batonspark.offsets import batch_end, key_of, queue_of, queue_offsets, sorted_offsets
from batonspark.options import read_options
from batonspark.read_plan import OFFSET_MAX, ReadFilter, narrow
from batonspark.slice_reader import MessagesLost
from batonspark.source import QueueStreamReader

OFFSETS = st.dictionaries(st.sampled_from(["a/0", "a/1", "b/0", "b/1"]), st.integers(0, 1_000))
QUEUE = QueueRef("orders", "broker-0", 3)


@given(OFFSETS, OFFSETS, st.integers(0, 500))
def test_micro_batch_advances_every_queue_and_never_goes_back(
    begin: dict[str, int], end: dict[str, int], rows_max: int
) -> None:
    batch_offsets = batch_end(begin, end, rows_max)
    assert batch_offsets.keys() == begin.keys() | end.keys()
    for key, offset in batch_offsets.items():
        first = begin.get(key, 0)
        assert first <= offset <= max(first, end.get(key, 0))
        assert offset > first or end.get(key, 0) <= first
    if rows_max:
        rows = sum(offset - begin.get(key, 0) for key, offset in batch_offsets.items())
        assert rows <= max(rows_max, len(batch_offsets))


def test_limit_of_a_micro_batch_includes_the_first_message_of_each_queue() -> None:
    end = {"a/0": 1, "a/1": 1, "b/0": 4, "b/1": 0}
    assert batch_end({}, end, 3) == {"a/0": 1, "a/1": 1, "b/0": 1, "b/1": 0}
    assert batch_end({}, end, 1) == {"a/0": 1, "a/1": 1, "b/0": 1, "b/1": 0}
    assert batch_end({}, end, 5) == {"a/0": 1, "a/1": 1, "b/0": 3, "b/1": 0}


def test_micro_batch_without_a_limit_has_all_messages() -> None:
    assert batch_end({"a/0": 3}, {"a/0": 10, "b/0": 4}, 0) == {"a/0": 10, "b/0": 4}


def test_offsets_are_sorted_and_name_their_queues() -> None:
    assert list(sorted_offsets({"topic_id": 1, "b/0": 2, "a/10": 3})) == ["a/10", "b/0", "topic_id"]
    assert queue_offsets({"topic_id": 1, "b/0": 2}) == {"b/0": 2}
    assert queue_of("orders", key_of(QUEUE)) == QUEUE


class _Cut(QueueStreamReader):
    """A reader of a queue that has lost messages that were read already."""

    def _ends(self) -> dict[str, int]:
        return {"a/0": 40, "a/1": 9, "topic_id": 1}


def test_stream_continues_at_the_end_of_a_shortened_queue_if_data_loss_is_allowed() -> None:
    options = {"nameserver": "127.0.0.1:9", "topic": "orders"}
    begin = {"a/0": 50, "a/1": 5, "topic_id": 1}
    reader = _Cut(read_options({**options, "failOnDataLoss": "false"}))
    end = reader.latestOffset(begin, ReadAllAvailable())
    assert end == {"a/0": 40, "a/1": 9, "topic_id": 1}
    (part,) = reader.partitions(begin, end)
    assert (part.slice.queue.queue_id, part.slice.first_offset, part.slice.next_offset) == (1, 5, 9)
    with pytest.raises(MessagesLost, match="a/0 ends at 40, before 50"):
        _Cut(read_options(options)).latestOffset(begin, ReadAllAvailable())


def test_filters_narrow_queues_and_offsets() -> None:
    wanted = narrow(
        ReadFilter(),
        [
            EqualTo(("broker",), "broker-0"),
            In(("queue_id",), (1, 3)),
            GreaterThan(("offset",), 4),
            LessThanOrEqual(("offset",), 9),
            IsNotNull(("offset",)),
            EqualTo(("properties", "offset"), 3),
        ],
        "",
    )
    assert (wanted.first_offset, wanted.next_offset) == (5, 10)
    assert wanted.includes(QUEUE)
    assert not wanted.includes(QueueRef("orders", "broker-1", 3))
    assert not wanted.includes(QueueRef("orders", "broker-0", 2))


def test_filters_of_the_view_metrics_use_the_sys_columns() -> None:
    filters = [EqualTo(("queue_id",), 5), GreaterThanOrEqual(("sys_offset",), 7)]
    wanted = narrow(ReadFilter(), filters, "sys_")
    assert wanted.includes(QUEUE)
    assert (wanted.first_offset, wanted.next_offset) == (7, OFFSET_MAX)


def test_time_filters_are_rounded_to_whole_milliseconds() -> None:
    since = datetime(2026, 1, 31, 12, 0, 0, 1_500, tzinfo=UTC)
    wanted = narrow(
        ReadFilter(), [GreaterThan(("store_time",), since), LessThan(("store_time",), since)], ""
    )
    unix_ms = int(since.timestamp() * 1_000)
    assert (wanted.from_unix_ms, wanted.to_unix_ms) == (unix_ms, unix_ms)
