"""The position of a replica's copy."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ReplicaPosition:
    """The last change that a copy has, and the epoch that wrote it; `NO_POSITION` if it has none.

    Of two replicas of an in-sync set the one with the greater position has all that the other has.
    """

    epoch: int
    version: int


NO_POSITION = ReplicaPosition(0, 0)
