"""Decoder of many Protobuf messages of one type at once: numpy decodes one field of each per step.

The number of steps is the number of fields, and a step for thousands of messages takes little
longer than for one message. Groups, a deprecated feature of Protobuf, are not supported.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

import numpy as np
import numpy.typing as npt

Int64Array = npt.NDArray[np.int64]
UInt64Array = npt.NDArray[np.uint64]
_PAD = bytes(16)
"""Bytes that are read beyond the end of a message without a check."""
_USUAL = 1_024
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
_ONE = np.uint64(1)
_CONTINUED = np.uint64(0x8080808080808080)
_SEVEN = np.uint64(0x7F7F7F7F7F7F7F7F)
_STEPS = tuple(
    (np.uint64(high), np.uint64(low), np.uint64(shift))
    for high, low, shift in (
        (0x7F007F007F007F00, 0x007F007F007F007F, 1),
        (0x3FFF00003FFF0000, 0x00003FFF00003FFF, 2),
        (0x0FFFFFFF00000000, 0x000000000FFFFFFF, 4),
    )
)


class MalformedProtobuf(ValueError):
    """The bytes are not Protobuf messages, or use a feature that is not supported."""


@dataclass(frozen=True, slots=True)
class Field:
    """One field of many messages; the last value if a message has several.

    Attributes:
        present: Shape (messages,): whether the message has the field.
        values: Shape (messages,): the number, 0 if absent; for bytes, the position of their begin.
        ends: Shape (messages,): for bytes, the position of their end; equal to `values` if absent.
    """

    present: npt.NDArray[np.bool_]
    values: Int64Array
    ends: Int64Array


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one type.

    Attributes:
        data: Bytes that contain the messages, followed by padding.
        begins: Shape (messages,): position of the start of each message.
        ends: Shape (messages,): position of the end of each message.
    """

    data: bytes
    begins: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, encoded: Sequence[bytes]) -> Self:
        """Return encoded messages, joined."""
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths)
        return cls(b"".join((*encoded, _PAD)), ends - lengths, ends)

    def within(self, field: Field) -> Messages:
        """Return the nested messages in a field; an empty one where the field is absent."""
        return Messages(self.data, field.values, field.ends)

    def some(self, places: Int64Array) -> Messages:
        """Return the messages at `places`."""
        return Messages(self.data, self.begins[places], self.ends[places])

    def fields(self) -> dict[int, Field]:
        """Return every field that at least one message has, by number.

        Raises:
            MalformedProtobuf: A message can't be decoded.
        """
        at_every_byte = np.ndarray((len(self.data) - 7,), np.uint64, self.data, 0, (1,))
        found: dict[int, Field] = {}
        unread = np.flatnonzero(self.begins < self.ends)
        at = self.begins[unread]
        while len(unread):
            tags, at = _varints(at_every_byte, at, self.ends[unread])
            kinds = tags & 7
            values, at, ends = _values(at_every_byte, kinds, at, self.ends[unread])
            for number in _distinct(tags >> 3):
                selected = tags >> 3 == number
                field = found.get(number)
                if field is None:
                    field = found[number] = self._absent()
                places = unread[selected]
                field.present[places] = True
                field.values[places] = values[selected]
                field.ends[places] = ends[selected]
            unfinished = at < self.ends[unread]
            unread, at = unread[unfinished], at[unfinished]
        return found

    def _absent(self) -> Field:
        count = len(self.begins)
        return Field(
            np.zeros(count, np.bool_), np.zeros(count, np.int64), np.zeros(count, np.int64)
        )


def packed(data: bytes, field: Field) -> tuple[Int64Array, Int64Array]:
    """Return the count of numbers of a packed field in each message, and all numbers.

    Raises:
        MalformedProtobuf: The field is not packed.
    """
    begins, ends = field.values, field.ends
    if not field.present.any():
        return np.zeros(len(begins), np.int64), np.zeros(0, np.int64)
    lengths = ends - begins
    total = int(lengths.sum())
    # Positions of all bytes of all fields, ascending, and whether each ends a number.
    first = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    places = first + np.arange(total)
    last = np.frombuffer(data, np.uint8)[places] < 0x80
    starts = places[np.append(True, last[:-1])] if total else places
    if total and not bool(last[np.cumsum(lengths)[lengths > 0] - 1].all()):
        raise MalformedProtobuf("a packed number is truncated")
    at_every_byte = np.ndarray((len(data) - 7,), np.uint64, data, 0, (1,))
    numbers, _ = _varints(at_every_byte, starts, np.full(len(starts), len(data) - len(_PAD)))
    sums = np.append(0, np.cumsum(last))
    stops = np.cumsum(lengths)
    return sums[stops] - sums[stops - lengths], numbers


def zigzag(values: Int64Array) -> Int64Array:
    """Return the decoded numbers of a `sint` field."""
    return (values >> 1) ^ -(values & 1)


def _values(
    at_every_byte: UInt64Array, kinds: Int64Array, at: Int64Array, limits: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Return of each field its value or the start of its bytes, its end, and its bytes' end."""
    fixed = (kinds == _FIXED64) | (kinds == _FIXED32)
    if bool((fixed | (kinds == _VARINT) | (kinds == _BYTES)).all()) is False:
        raise MalformedProtobuf("a field has a wire type that is not supported")
    values, after = _varints(at_every_byte, at, np.where(fixed, len(at_every_byte), limits))
    if fixed.any():
        wide = kinds == _FIXED64
        raw = at_every_byte[at]
        narrow = raw & np.uint64(0xFFFFFFFF)
        values = np.where(fixed, np.where(wide, raw, narrow).view(np.int64), values)
        after = np.where(fixed, at + np.where(wide, 8, 4), after)
    bytes_begin = after
    has_bytes = kinds == _BYTES
    if bool((values[has_bytes] < 0).any()):
        raise MalformedProtobuf("a length is negative")
    after = np.where(has_bytes, after + np.where(has_bytes, values, 0), after)
    if bool((after > limits).any()):
        raise MalformedProtobuf("a field is longer than its message")
    return np.where(has_bytes, bytes_begin, values), after, after


def _varints(
    at_every_byte: UInt64Array, at: Int64Array, limits: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """Return the numbers at some positions, and the positions after them.

    Seven bits of each of up to eight bytes are pushed together in three steps; of what is longer,
    and of negative numbers, the rest is looked at then.
    """
    words = at_every_byte[at]
    ends = ~words & _CONTINUED
    masks = ((ends & (~ends + _ONE)) << _ONE) - _ONE  # all bytes up to the last of the number
    lengths = (np.bitwise_count(masks) >> 3).astype(np.int64)
    numbers = words & masks & _SEVEN
    for high, low, shift in _STEPS:
        numbers = ((numbers & high) >> shift) | (numbers & low)
    long = ends == 0
    if long.any():
        more = at_every_byte[np.minimum(at[long] + 8, len(at_every_byte) - 1)]
        two = (more & np.uint64(0x80)) != 0
        if bool((two & (more & np.uint64(0x8000) != 0)).any()):
            raise MalformedProtobuf("a number has more than ten bytes")
        upper = (more & np.uint64(0x7F)) << np.uint64(56)
        top = np.where(two, (more >> np.uint64(8)) & _ONE, 0).astype(np.uint64) << np.uint64(63)
        numbers[long] |= upper | top
        lengths[long] += 1 + two
    after = at + lengths
    if bool((after > limits).any()):
        raise MalformedProtobuf("a number is truncated")
    return numbers.view(np.int64), after


def _distinct(numbers: Int64Array) -> list[int]:
    """Return the distinct numbers; usually there is one."""
    first = int(numbers[0])
    if bool((numbers == first).all()):
        return [first]
    few = (
        int(numbers.min()) >= 0 and int(numbers.max()) < _USUAL
    )  # such numbers are counted without sorting
    distinct: list[int] = (
        np.flatnonzero(np.bincount(numbers)) if few else np.unique(numbers)
    ).tolist()
    return distinct
