"""Goal: `baton produce` of an endless input needs no more memory with each message.

Method: the summary of the receipts, which is all that is kept of a message.
"""

from __future__ import annotations

import tracemalloc

from batonmq import Durability, QueueRef, Receipt
from batonmq.cli.output import Output, OutputFormat
from batonmq.cli.produce import _ReceiptSummary

QUEUE = QueueRef("t", "broker-0", 0)


def receipt(offset: int) -> Receipt:
    return Receipt(QUEUE, offset, 0, 0, 0, Durability.FSYNCED, duplicate=False)


def test_summary_of_many_receipts_stays_small() -> None:
    summary = _ReceiptSummary(Output(OutputFormat.TABLE))
    summary.add(receipt(0))
    tracemalloc.start()
    try:
        for offset in range(1, 20_000):
            summary.add(receipt(offset))
        grown_bytes, _ = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert grown_bytes < 10_000


def test_summary_has_count_and_range_of_the_offsets() -> None:
    summary = _ReceiptSummary(Output(OutputFormat.TABLE))
    for offset in (7, 3, 5):
        summary.add(receipt(offset))
    (stored,) = summary._stored.values()
    assert (stored.count, stored.first_offset, stored.next_offset) == (3, 3, 8)
