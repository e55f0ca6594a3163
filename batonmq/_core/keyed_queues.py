"""Where a message goes."""

from __future__ import annotations

import zlib
from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
from numpy.typing import NDArray

from batonmq._core.queues import QueueRef

TOPICS_REVISION = "baton-topics-revision"
"""Trailing metadata of storage's QueryOffsets: the etcd revision of the topic that the answer is
by, decimal; of several topics the lowest. What a node answers by a revision in which a queue takes
no more messages is final: it waits for the last message, and no other can come."""
Scores: TypeAlias = NDArray[np.uint64]
_REMEMBERED_MAX = 10_000
_MIX = (np.uint64(0xBF58476D1CE4E5B9), np.uint64(0x94D049BB133111EB))
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))


class KeyedQueues:
    """Gives each ordering key a queue, by rendezvous hashing: the queue with the highest score.

    So with a queue more only the keys move that go to the new one, and with one less only those
    that were there. The score is the last step of SplitMix64 over 64 bits: the upper half is the
    CRC-32 of the key, the lower half the CRC-32 of `broker/queue_id`, both of UTF-8.

    Args:
        queues: Those of one topic that take messages, ascending; not empty.
    """

    def __init__(self, queues: tuple[QueueRef, ...]) -> None:
        self.queues = queues
        self._lower = _lower_halves([f"{queue.broker}/{queue.queue_id}" for queue in queues])
        self._remembered: dict[str, QueueRef] = {}

    def of(self, ordering_key: str) -> QueueRef:
        """The queue of the key: the same one as long as the queues stay the same."""
        queue = self._remembered.get(ordering_key)
        if queue is None:
            if len(self._remembered) >= _REMEMBERED_MAX:
                self._remembered.clear()
            queue = self.queues[_highest(ordering_key, self._lower)]
            self._remembered[ordering_key] = queue
        return queue


def highest(key: str, names: Sequence[str]) -> int:
    """Index of the name that a key goes to, by the same hashing."""
    return _highest(key, _lower_halves(names))


def _lower_halves(names: Sequence[str]) -> Scores:
    return np.array([zlib.crc32(name.encode()) for name in names], np.uint64)


def _highest(key: str, lower: Scores) -> int:
    score = lower | np.uint64(zlib.crc32(key.encode()) << 32)
    score ^= score >> _SHIFTS[0]
    score *= _MIX[0]
    score ^= score >> _SHIFTS[1]
    score *= _MIX[1]
    score ^= score >> _SHIFTS[2]
    return int(score.argmax())
