"""Where a reset puts a group on a queue: what an operator asks for, in the bounds of the queue.

Knows one queue at a time, and of it only numbers that somebody else has looked up.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToOffset:
    """The same offset on every queue."""

    offset: int


@dataclass(frozen=True, slots=True)
class ToTime:
    """The first message stored at or after a time, by the clock of storage."""

    unix_ms: int


@dataclass(frozen=True, slots=True)
class ToEarliest:
    """The first message that is still kept."""


@dataclass(frozen=True, slots=True)
class ToLatest:
    """After the last message."""


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """So many messages on from the committed offset; negative for back."""

    count: int


ResetTarget = ToOffset | ToTime | ToEarliest | ToLatest | ShiftBy


@dataclass(frozen=True, slots=True)
class ResetBounds:
    """A queue, and how far the group is on it.

    Attributes:
        committed_offset: None if the group has no progress here.
        time_offset: For `ToTime`: what storage found for the time.
    """

    first_offset: int
    next_offset: int
    committed_offset: int | None = None
    time_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ResetOffset:
    """Where to put the group; `note` says where that is not what was asked for.

    Attributes:
        offset: In [first_offset, next_offset]; None to leave the queue as it is.
    """

    offset: int | None
    note: str = ""


def resolve_target(target: ResetTarget, standing: ResetBounds) -> ResetOffset:
    """Where `target` is on a queue."""
    match target:
        case ToOffset(offset):
            return _clamped(offset, standing)
        case ToTime():
            assert standing.time_offset is not None
            return _clamped(standing.time_offset, standing)
        case ToEarliest():
            return ResetOffset(standing.first_offset)
        case ToLatest():
            return ResetOffset(standing.next_offset)
        case ShiftBy(count):
            if standing.committed_offset is None:
                return ResetOffset(None, "the group has no progress to shift; left as it is")
            return _clamped(standing.committed_offset + count, standing)


def _clamped(offset: int, standing: ResetBounds) -> ResetOffset:
    if offset < standing.first_offset:
        first = standing.first_offset
        return ResetOffset(first, f"offset {offset} is not kept; {first} is the first that is")
    if offset > standing.next_offset:
        end = standing.next_offset
        return ResetOffset(end, f"offset {offset} is past the end; {end} is the end")
    return ResetOffset(offset)
