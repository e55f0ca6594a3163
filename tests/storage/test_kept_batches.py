"""Goal: a batch that the caller still has is neither read nor fetched again.

Method: a queue of batches that are only in an object store; the log is a twin with a small cache.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest

from batonmq_server.storage.core import queue_reader
from batonmq_server.storage.core.consumequeue import Entries
from batonmq_server.storage.core.queue_reader import QueueReader, ReadResult, ReadSpec
from batonmq_server.storage.core.tag_filter import HashFilter

CACHED_MAX, BATCHES = 4, 12
PER_BATCH, FAR = 5, 1_000_000
KEY = (1, 1)


class Missing(Exception):
    """A batch is not in the cache."""

    def __init__(self, position: int) -> None:
        super().__init__(position)
        self.position = position


class RemoteLog:
    """A log of which the last few fetched batches are cached."""

    def __init__(self) -> None:
        self._cached: OrderedDict[int, None] = OrderedDict()
        self.fetched: list[int] = []

    def segment_end(self, position: int) -> int:
        return (position // FAR + 1) * FAR

    def readable_count(self, positions: Sequence[int], _: Sequence[int]) -> int:
        missing = (n for n, position in enumerate(positions) if position not in self._cached)
        return next(missing, len(positions))

    def read(self, position: int, size: int) -> bytes:
        if position not in self._cached:
            raise Missing(position)
        return bytes(size)

    def fetch(self, position: int) -> None:
        self.fetched.append(position)
        self._cached[position] = None
        while len(self._cached) > CACHED_MAX:
            self._cached.popitem(last=False)


class Queue:
    """The index of a queue. Its batches are far apart in the log."""

    first_offset = 0
    next_offset = visible_offset = BATCHES * PER_BATCH

    def read(self, first_offset: int, next_offset: int) -> Entries:
        positions = np.repeat(np.arange(BATCHES) * FAR, PER_BATCH)[first_offset:next_offset]
        count = len(positions)
        return Entries(positions, np.full(count, 100), np.zeros(count, np.int64))


class NoCompaction:
    def get(self, _: object) -> None:
        return None


def read(log: RemoteLog, offset: int, kept_position: int) -> ReadResult:
    """Read as a delivery does: fetch what misses, and read again."""
    twins: list[Any] = [log, NoCompaction(), Queue()]
    reader = QueueReader(twins[0], twins[1])
    spec = ReadSpec(offset, 1 << 20, 1_000, HashFilter(None), kept_position)
    for _ in range(100):
        try:
            reading = reader.read(KEY, twins[2], spec)
        except Missing as missing:
            log.fetch(missing.position)
        else:
            assert reading is not None
            return reading
    raise AssertionError("the read never ends")


@pytest.fixture(autouse=True)
def _any_bytes_are_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(queue_reader, "verified", lambda batch, *_: batch)


@pytest.mark.parametrize("kept_position", [-1, FAR])
def test_first_batch_is_fetched_unless_the_caller_has_it(kept_position: int) -> None:
    log = RemoteLog()
    reading = read(log, PER_BATCH + 3, kept_position)
    if kept_position < 0:
        assert (reading.continues_batch, len(reading.batches), log.fetched) == (False, 1, [FAR])
    else:
        assert (reading.continues_batch, reading.batches, log.fetched) == (True, [], [])
    assert (reading.next_offset, reading.message_count) == (2 * PER_BATCH, 2)


def test_batches_behind_the_kept_one_are_read_as_far_as_they_are_cached() -> None:
    log = RemoteLog()
    for number in (2, 3):
        log.fetch(number * FAR)
    reading = read(log, PER_BATCH + 3, FAR)
    assert (reading.continues_batch, len(reading.batches)) == (True, 2)
    assert reading.next_offset == 4 * PER_BATCH
