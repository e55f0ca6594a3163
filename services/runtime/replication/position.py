"""How far a copy of something replicated has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class ReplicaPosition:
    """The last change that a node has, and the epoch that wrote it. `NO_POSITION` for nothing.

    Of two members of an in-sync set the one with the greater position has all the other one has.
    """

    epoch: int
    version: int


NO_POSITION = ReplicaPosition(0, 0)
