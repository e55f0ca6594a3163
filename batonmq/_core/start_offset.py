"""The offset at which a group without progress on a queue starts."""

from __future__ import annotations

from typing import Literal

ConsumeFrom = Literal["first", "last", "timestamp"]

TIMESTAMP_AGE_MS = 30 * 60 * 1000
"""Without `start_unix_ms`, `timestamp` starts this long before the creation of the consumer."""


def effective_start(consume_from: ConsumeFrom, *, retry: bool, added: bool) -> ConsumeFrom:
    """Return where to start on one queue: `first` if none of its messages may be skipped.

    `last` also skips the few messages of a small, new topic.

    Args:
        retry: The queue is of the group's retry topic. The group itself sent its messages back, so
            none is skipped.
        added: The queue was added after the group began to read the topic. All its messages were
            sent to a group that existed, so none is skipped.

    Source: RocketMQ computePullFromWhere. Deviations: under `timestamp` RocketMQ starts at the end
        of a retry topic, and its broker delivers all messages of a small topic.
    """
    return "first" if retry or added else consume_from


def start_offset(start: ConsumeFrom, first: int, end: int, found: int) -> int:
    """Return the offset that `start` means in a queue that holds [first, end).

    Args:
        found: First offset stored at or after the start time; for `timestamp` only.
    """
    if start == "first":
        return first
    return end if start == "last" else min(max(found, first), end)
