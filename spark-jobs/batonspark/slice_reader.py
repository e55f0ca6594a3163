"""Reads one slice of a queue. What comes depends on nothing but the slice and what is stored.

While one answer becomes rows, the next one is on its way.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future

import pyarrow as pa

from batonmq._common.clock import Clock
from batonmq.errors import OffsetOutOfRange
from batonspark.cluster import ClusterClient, FetchedRange, QueueFetcher
from batonspark.decode import (
    QueueSlice,
    lost_messages,
    lost_metrics,
    messages,
    metrics,
    rows_within,
)
from batonspark.options import ReadOptions

log = logging.getLogger(__name__)


class MessagesLost(Exception):
    """Messages that were to be read are no longer kept, and `failOnDataLoss` is true."""


def read_slice(options: ReadOptions, wanted: QueueSlice) -> Iterator[pa.RecordBatch]:
    """The rows of the slice; a node that goes away is waited for, or another one is asked.

    Raises:
        MessagesLost: see there.
        BatonError: nobody answered within `timeoutMs`, or what is stored is damaged.
    """
    decode = metrics if options.view == "metrics" else messages
    with ClusterClient(options.connection) as cluster:
        source = QueueFetcher(cluster.admin, wanted.queue, followers=options.followers)

        def fetch(offset: int) -> Future[FetchedRange]:
            return cluster.submit(source.fetch(offset, wanted.next_offset))

        offset, coming = wanted.first_offset, fetch(wanted.first_offset)
        while True:
            try:
                found = coming.result()
            except OffsetOutOfRange as error:
                lost = _lost(wanted, offset, error)
                yield _told(options, lost)
                offset = lost.next_offset
                if offset == wanted.next_offset:
                    return
                coming = fetch(offset)
                continue
            offset = found.next_offset
            if offset < wanted.next_offset:
                coming = fetch(offset)
            part = QueueSlice(wanted.queue, found.offset, offset, wanted.topic_id)
            yield from rows_within(decode(found.batches, part), options.rows_per_batch)
            if offset == wanted.next_offset:
                return


def _lost(wanted: QueueSlice, offset: int, error: OffsetOutOfRange) -> QueueSlice:
    """What of the slice is no longer kept, if that is what the refusal means."""
    first = error.detail.first_offset
    if first <= offset:
        raise error
    return QueueSlice(wanted.queue, offset, min(first, wanted.next_offset), wanted.topic_id)


def _told(options: ReadOptions, lost: QueueSlice) -> pa.RecordBatch:
    """The row that counts the loss.

    Raises:
        MessagesLost: there may be none.
    """
    text = (
        f"messages [{lost.first_offset}, {lost.next_offset}) of {lost.queue} are no longer kept: "
        "retention was faster than this reader"
    )
    if options.fail_on_data_loss:
        raise MessagesLost(
            f"{text}. Keep messages for longer, or set failOnDataLoss to false to go on behind "
            "them, with a row that counts them."
        )
    log.warning("%s", text)
    row: Callable[[QueueSlice, int], pa.RecordBatch] = (
        lost_metrics if options.view == "metrics" else lost_messages
    )
    return row(lost, Clock().unix_ms())
