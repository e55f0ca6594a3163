"""Read one slice of a queue. The rows depend only on the slice and the stored messages.

The next response is fetched while the current one is decoded.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future
from dataclasses import replace

import pyarrow as pa

from batonmq._common.clock import Clock
from batonmq.errors import OffsetOutOfRange, OldTopic, QueueNotFound
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
    """Messages to be read were removed, and `failOnDataLoss` is true."""


REMOVED, CREATED_AGAIN = "retention removed them", "the topic was deleted and created again"


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
            except (OffsetOutOfRange, QueueNotFound) as error:
                rest = replace(wanted, first_offset=offset)
                lost, why = _lost(cluster, rest, error)
                yield _loss_row(options, lost, why)
                offset = lost.next_offset
                if offset == wanted.next_offset:
                    return
                coming = fetch(offset)
                continue
            offset = found.next_offset
            if offset < wanted.next_offset:
                coming = fetch(offset)
            part = replace(wanted, first_offset=found.offset, next_offset=offset)
            try:
                rows = decode(found.batches, part)
            except OldTopic as error:
                rest = replace(wanted, first_offset=found.offset)
                yield _loss_row(options, *_lost(cluster, rest, error))
                return
            yield from rows_within(rows, options.rows_per_batch)
            if offset == wanted.next_offset:
                return


def _lost(
    cluster: ClusterClient, rest: QueueSlice, error: OffsetOutOfRange | QueueNotFound | OldTopic
) -> tuple[QueueSlice, str]:
    """Return the lost part of a slice, and why; raise the error if it has another meaning."""
    if isinstance(error, OffsetOutOfRange) and error.detail.first_offset > rest.first_offset:
        after = min(error.detail.first_offset, rest.next_offset)
        return replace(rest, next_offset=after), REMOVED
    extents = cluster.extents(rest.queue.topic)
    if rest.topic_id in {0, *(extent.topic_id for extent in extents.values())}:
        raise error
    return rest, CREATED_AGAIN


def _loss_row(options: ReadOptions, lost: QueueSlice, why: str) -> pa.RecordBatch:
    """Return the row that counts the lost messages.

    Raises:
        MessagesLost: `failOnDataLoss` is true.
    """
    text = (
        f"messages [{lost.first_offset}, {lost.next_offset}) of {lost.queue} are no longer kept: "
        f"{why} before they were read"
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
