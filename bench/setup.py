"""The setup and the messages of all benchmarks."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from batonmq._core.records import RECORD, BatchBuilder, Message, encode_record

TOPIC = "bench"
BATCH_BYTES = 512 * 1024


@dataclass(frozen=True, slots=True)
class Setup:
    """One run.

    Attributes:
        folder: Empty folder on the measured disk; removed afterwards.
        quick: Small sizes, to test the benchmarks; the figures are not published.
        say: Prints the current step.
    """

    folder: Path
    quick: bool
    say: Callable[[str], None]

    def sized(self, full: int, quick: int) -> int:
        """A size."""
        return quick if self.quick else full


def batch(
    record_bytes: int,
    *,
    queue_id: int = 0,
    count: int = 0,
    tags: Sequence[str] = ("",),
    properties: Sequence[Mapping[str, str]] = ({},),
) -> bytes:
    """Return an unstamped batch of messages with random bodies.

    Args:
        record_bytes: Size of each body.
        count: Number of messages; 0 fills a batch of 512 KiB.
        tags: Tags of the messages, by turns, as are `properties`.
    """
    each = record_bytes + RECORD.size + 12
    count = count or BATCH_BYTES // each
    body = os.urandom(record_bytes * count)
    builder = BatchBuilder()
    for index in range(count):
        at = index * record_bytes
        tag, named = tags[index % len(tags)], properties[index % len(properties)]
        message = Message(body[at : at + record_bytes], tag, (), named)
        builder.add(message, encode_record(message))
    return builder.encode(topic=TOPIC, queue_id=queue_id)
