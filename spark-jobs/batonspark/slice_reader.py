"""Read one slice of a queue. The rows depend only on the slice and the stored messages.

The next response is fetched while the current one is decoded.
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
    """Messages to be read were removed by retention, and `failOnDataLoss` is true."""


def read_slice(options: ReadOptions, wanted: QueueSlice) -> Iterator[pa.RecordBatch]:
    """Return the rows of the slice; retry while a node is down, or use another one.

    Raises:
        MessagesLost: messages were removed, and `failOnDataLoss` is true.
        BatonError: no node answered within `timeoutMs`, or stored data is damaged.
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
                yield _loss_row(options, lost)
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
    """Return the removed part of the slice; raise the error if it has another meaning."""
    first = error.detail.first_offset
    if first <= offset:
        raise error
    return QueueSlice(wanted.queue, offset, min(first, wanted.next_offset), wanted.topic_id)


def _loss_row(options: ReadOptions, lost: QueueSlice) -> pa.RecordBatch:
    """Return the row that counts the lost messages.

    Raises:
        MessagesLost: `failOnDataLoss` is true.
    """
    text = (
        f"messages [{lost.first_offset}, {lost.next_offset}) of {lost.queue} are no longer kept: "
        "retention removed them before they were read"
    )
    if options.fail_on_data_loss:
        raise MessagesLost(
            f"{text}. Keep messages for longer, or set failOnDataLoss to false to continue behind "
            "them with a row that counts them."
        )
    log.warning("%s", text)
    row: Callable[[QueueSlice, int], pa.RecordBatch] = (
        lost_metrics if options.view == "metrics" else lost_messages
    )
    return row(lost, Clock().unix_ms())
