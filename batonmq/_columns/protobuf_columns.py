"""Fields of many Protobuf messages of one type at once: with numpy, a field of each in a step.

So a message costs as many steps as it has fields, and a step for thousands of messages costs
little more than for one. Pure: bytes in, arrays out. Groups, which nobody writes any more, are not
read.
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
"""So much is looked at behind a place without asking whether it is there."""
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


class NotReadable(ValueError):
    """These bytes are no Protobuf messages, or such as this module does not read."""


@dataclass(frozen=True, slots=True)
class Field:
    """A field as far as messages have it, the last value if it is there several times.

    Attributes:
        present: Shape (messages,).
        values: Shape (messages,): of a number its value, 0 where it is absent; of bytes where they
            begin.
        ends: Shape (messages,): of bytes where they end, equal to the beginning where absent.
    """

    present: npt.NDArray[np.bool_]
    values: Int64Array
    ends: Int64Array


@dataclass(frozen=True, slots=True)
class Messages:
    """Messages of one type.

    Attributes:
        data: In which they lie, with room behind.
        begins: Where each begins; `ends` where it ends.
    """

    data: bytes
    begins: Int64Array
    ends: Int64Array

    @classmethod
    def of(cls, encoded: Sequence[bytes]) -> Self:
        """Messages one behind the other."""
        lengths = np.fromiter(map(len, encoded), np.int64, len(encoded))
        ends = np.cumsum(lengths)
        return cls(b"".join((*encoded, _PAD)), ends - lengths, ends)

    def within(self, field: Field) -> Messages:
        """The messages that a field holds; empty ones where it is absent."""
        return Messages(self.data, field.values, field.ends)

    def some(self, places: Int64Array) -> Messages:
        """Some of the messages."""
        return Messages(self.data, self.begins[places], self.ends[places])

    def fields(self) -> dict[int, Field]:
        """All fields that one of the messages has, by number.

        Raises:
            NotReadable: see there.
        """
        at_every_byte = np.ndarray((len(self.data) - 7,), np.uint64, self.data, 0, (1,))
        found: dict[int, Field] = {}
        who = np.flatnonzero(self.begins < self.ends)
        at = self.begins[who]
        while len(who):
            tags, at = _varints(at_every_byte, at, self.ends[who])
            kinds = tags & 7
            values, at, ends = _values(at_every_byte, kinds, at, self.ends[who])
            for number in _distinct(tags >> 3):
                mine = tags >> 3 == number
                field = found.get(number)
                if field is None:
                    field = found[number] = self._absent()
                places = who[mine]
                field.present[places] = True
                field.values[places] = values[mine]
                field.ends[places] = ends[mine]
            going_on = at < self.ends[who]
            who, at = who[going_on], at[going_on]
        return found

    def _absent(self) -> Field:
        count = len(self.begins)
        return Field(
            np.zeros(count, np.bool_), np.zeros(count, np.int64), np.zeros(count, np.int64)
        )


def packed(data: bytes, field: Field) -> tuple[Int64Array, Int64Array]:
    """The numbers of a packed field: how many each message has, and all of them.

    Raises:
        NotReadable: they are not packed.
    """
    begins, ends = field.values, field.ends
    if not field.present.any():
        return np.zeros(len(begins), np.int64), np.zeros(0, np.int64)
    lengths = ends - begins
    total = int(lengths.sum())
    # Places of all bytes of all fields, ascending, and of those the ones that end a number.
    first = np.repeat(begins - (np.cumsum(lengths) - lengths), lengths)
    places = first + np.arange(total)
    last = np.frombuffer(data, np.uint8)[places] < 0x80
    starts = places[np.append(True, last[:-1])] if total else places
    if total and not bool(last[np.cumsum(lengths)[lengths > 0] - 1].all()):
        raise NotReadable("a packed number is cut short")
    at_every_byte = np.ndarray((len(data) - 7,), np.uint64, data, 0, (1,))
    numbers, _ = _varints(at_every_byte, starts, np.full(len(starts), len(data) - len(_PAD)))
    sums = np.append(0, np.cumsum(last))
    stops = np.cumsum(lengths)
    return sums[stops] - sums[stops - lengths], numbers


def zigzag(values: Int64Array) -> Int64Array:
    """Numbers of a `sint` field."""
    return (values >> 1) ^ -(values & 1)


def _values(
    at_every_byte: UInt64Array, kinds: Int64Array, at: Int64Array, limits: Int64Array
) -> tuple[Int64Array, Int64Array, Int64Array]:
    """Of each field its value or where its bytes begin, where it ends, and where its bytes end."""
    fixed = (kinds == _FIXED64) | (kinds == _FIXED32)
    if bool((fixed | (kinds == _VARINT) | (kinds == _BYTES)).all()) is False:
        raise NotReadable("a field is of a type that is not read")
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
        raise NotReadable("a length is negative")
    after = np.where(has_bytes, after + np.where(has_bytes, values, 0), after)
    if bool((after > limits).any()):
        raise NotReadable("a field is longer than its message")
    return np.where(has_bytes, bytes_begin, values), after, after


def _varints(
    at_every_byte: UInt64Array, at: Int64Array, limits: Int64Array
) -> tuple[Int64Array, Int64Array]:
    """The numbers at some places, and the places behind them.

    Seven bits of each of up to eight bytes are pushed together in three steps; of what is longer,
    and of negative numbers, the rest is looked at then.
    """
    words = at_every_byte[at]
    ends = ~words & _CONTINUED
    masks = ((ends & (~ends + _ONE)) << _ONE) - _ONE  # all bytes up to the first that ends it
    lengths = (np.bitwise_count(masks) >> 3).astype(np.int64)
    numbers = words & masks & _SEVEN
    for high, low, shift in _STEPS:
        numbers = ((numbers & high) >> shift) | (numbers & low)
    long = ends == 0
    if long.any():
        more = at_every_byte[np.minimum(at[long] + 8, len(at_every_byte) - 1)]
        two = (more & np.uint64(0x80)) != 0
        if bool((two & (more & np.uint64(0x8000) != 0)).any()):
            raise NotReadable("a number has more than ten bytes")
        upper = (more & np.uint64(0x7F)) << np.uint64(56)
        top = np.where(two, (more >> np.uint64(8)) & _ONE, 0).astype(np.uint64) << np.uint64(63)
        numbers[long] |= upper | top
        lengths[long] += 1 + two
    after = at + lengths
    if bool((after > limits).any()):
        raise NotReadable("a number is cut short")
    return numbers.view(np.int64), after


def _distinct(numbers: Int64Array) -> list[int]:
    """Which numbers there are; mostly it is one."""
    first = int(numbers[0])
    if bool((numbers == first).all()):
        return [first]
    few = int(numbers.min()) >= 0 and int(numbers.max()) < _USUAL  # then there is no need to sort
    distinct: list[int] = (
        np.flatnonzero(np.bincount(numbers)) if few else np.unique(numbers)
    ).tolist()
    return distinct
