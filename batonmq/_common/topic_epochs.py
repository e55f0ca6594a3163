"""The epochs of topics that attempts to store a batch name; see `AppendRequest.topic_epochs`."""

from __future__ import annotations

UNKNOWN_EPOCH = (1 << 32) - 1
"""What a sender names if it does not know the epoch."""


def epoch_to_name(named: int | None, newest: int | None) -> int | None:
    """Return the epoch that the next attempt names: never a lower one than an attempt before.

    Args:
        named: The epoch that the attempts before have named; None for none.
        newest: The epoch of the newest route; None if it does not say.
    """
    if newest is None or named is None:
        return newest if named is None else named
    return max(named, newest)
