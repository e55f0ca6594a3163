"""How far a copy of something replicated has come."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, order=True)
class Position:
    """The last change that a node has, and the epoch that wrote it. `NOWHERE` for nothing.

    Of two members of an in-sync set the one with the greater position has all the other one has.
    """

    epoch: int
    version: int


NOWHERE = Position(0, 0)
