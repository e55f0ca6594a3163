"""Where a group without progress on a queue begins."""

from __future__ import annotations

from typing import Literal

ConsumeFrom = Literal["first", "last", "timestamp"]

TIMESTAMP_AGE_MS = 30 * 60 * 1000
"""A consumer that is told no time begins so long before its own start."""


def effective_start(consume_from: ConsumeFrom, *, retry: bool, added: bool) -> ConsumeFrom:
    """The rule for one queue.

    Nothing else counts: also the few messages of a small, fresh topic are skipped by `last`.

    Args:
        retry: The queue is of the group's retry topic: what is in it was sent back by the group
            itself, so it is never skipped.
        added: The queue came to its topic after the group had begun with the topic: all of its
            messages were sent to a group that was there.

    Source: RocketMQ computePullFromWhere. Differs for a retry topic under `timestamp`, where it
        begins at the end, and for small topics, of which RocketMQ's broker hands out everything.
    """
    return "first" if retry or added else consume_from


def start_offset(place: ConsumeFrom, first: int, end: int, found: int) -> int:
    """The offset that `place` means in a queue that holds [first, end).

    Args:
        found: First offset stored at or after the wished time; counts for `timestamp` only.
    """
    if place == "first":
        return first
    return end if place == "last" else min(max(found, first), end)
