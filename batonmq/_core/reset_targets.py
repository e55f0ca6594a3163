"""Targets of a reset: the offset that an operator asks for, within the bounds of a queue."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ToOffset:
    """Reset every queue to the same offset."""

    offset: int


@dataclass(frozen=True, slots=True)
class ToTime:
    """Reset to the first message stored at or after a time, by the clock of storage."""

    unix_ms: int


@dataclass(frozen=True, slots=True)
class ToEarliest:
    """Reset to the first message that is still kept."""


@dataclass(frozen=True, slots=True)
class ToLatest:
    """Reset to the end of the queue, after the last message."""


@dataclass(frozen=True, slots=True)
class ShiftBy:
    """Reset to the committed offset plus `count` messages; a negative count goes back."""

    count: int


ResetTarget = ToOffset | ToTime | ToEarliest | ToLatest | ShiftBy


@dataclass(frozen=True, slots=True)
class ResetBounds:
    """Offsets of a queue and of the group on it.

    Attributes:
        first_offset: First offset that is kept.
        next_offset: Offset after the last message.
        committed_offset: None if the group has no progress on the queue.
        time_offset: The offset that storage found for the time of `ToTime`.
    """

    first_offset: int
    next_offset: int
    committed_offset: int | None = None
    time_offset: int | None = None


@dataclass(frozen=True, slots=True)
class ResetOffset:
    """Offset to which a queue is reset.

    Attributes:
        offset: In [first_offset, next_offset]; None to leave the queue unchanged.
        note: A sentence for the operator if the offset is not the requested one.
    """

    offset: int | None
    note: str = ""


def resolve_target(target: ResetTarget, bounds: ResetBounds) -> ResetOffset:
    """Return the offset of `target` on a queue."""
    match target:
        case ToOffset(offset):
            return _clamped(offset, bounds)
        case ToTime():
            assert bounds.time_offset is not None
            return _clamped(bounds.time_offset, bounds)
        case ToEarliest():
            return ResetOffset(bounds.first_offset)
        case ToLatest():
            return ResetOffset(bounds.next_offset)
        case ShiftBy(count):
            if bounds.committed_offset is None:
                return ResetOffset(
                    None, "the group has no progress to shift; the queue stays unchanged"
                )
            return _clamped(bounds.committed_offset + count, bounds)


def _clamped(offset: int, bounds: ResetBounds) -> ResetOffset:
    if offset < bounds.first_offset:
        first = bounds.first_offset
        return ResetOffset(first, f"offset {offset} is no longer kept; {first} is the first offset")
    if offset > bounds.next_offset:
        end = bounds.next_offset
        return ResetOffset(end, f"offset {offset} is beyond the end; {end} is the end")
    return ResetOffset(offset)
