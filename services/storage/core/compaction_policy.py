"""How a compacted topic is compacted."""

from __future__ import annotations

from typing import NamedTuple

TOMBSTONE_RETENTION_MS = 86_400_000
DIRTY_PERCENT = 50


class CompactionPolicy(NamedTuple):
    """The settings of a compacted topic.

    Attributes:
        tombstone_retention_ms: How long a tombstone is kept after the messages that it deletes
            are gone.
        min_lag_ms: Minimum age of a message that is removed because of a newer one, and of the
            newer one.
        dirty_percent: A queue is compacted when this share of its bytes, at least, was stored
            since the last time.
    """

    tombstone_retention_ms: int = TOMBSTONE_RETENTION_MS
    min_lag_ms: int = 0
    dirty_percent: int = DIRTY_PERCENT
