"""Digests of the ordering keys of a batch, as columns: which messages have the same key.

A digest has 128 bits in two columns. It is a multilinear hash with random multipliers: four sums of
the products of 32-bit words and 64-bit numbers, of which the upper halves count. So two different
keys have the same digest with a probability of 2^-128, whatever the keys, if they were chosen
without knowledge of the multipliers. A new seed per run also means that a digest is never stored.

Source: Lemire and Kaser, Strongly universal string hashing is fast (2014).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from batonmq._columns.batch_columns import RecordColumns, record_columns
from batonmq._core.ordering_key import ORDERING_KEY, ORDERING_KEY_BYTES_MAX
from batonmq._core.records import Header
from batonmq.errors import BadBatch

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]
BoolArray = npt.NDArray[np.bool_]

_NEEDLE: Final = np.frombuffer(f"{ORDERING_KEY}\x01".encode(), np.uint8)
_HEAD: Final = _NEEDLE[:8].view(np.uint64)[0]
_END: Final = 2
_LANES: Final = 4
_WORD: Final = 4
_NO_KEY = np.int64(-1)


@dataclass(frozen=True, slots=True)
class KeyBounds:
    """Where the ordering keys of records are.

    Attributes:
        raw: Bytes that contain the keys.
        begins: Shape (count,), first byte of each key in `raw`; -1 without a key.
        ends: Shape (count,), byte after each key.
        empty_bodies: Shape (count,), whether the body of the message is empty.
    """

    raw: npt.NDArray[np.uint8]
    begins: Int64Array
    ends: Int64Array
    empty_bodies: BoolArray

    @property
    def keyed(self) -> BoolArray:
        """Whether each message has an ordering key."""
        return self.begins >= 0


@dataclass(frozen=True, slots=True)
class Digests:
    """Digests of keys, each column of shape (count,)."""

    high: UInt64Array
    low: UInt64Array

    def __len__(self) -> int:
        return len(self.high)

    def __getitem__(self, chosen: Int64Array | BoolArray) -> Digests:
        return Digests(self.high[chosen], self.low[chosen])


def key_bounds(columns: RecordColumns) -> KeyBounds:
    """Find the ordering keys of records.

    The key is that of `find_ordering_key`: of repeated properties the last one counts.
    """
    empty_bodies = columns.bounds[:, 4] == columns.bounds[:, 5]
    raw, starts = _properties(columns)
    count = len(columns.bounds)
    begins, ends = np.full(count, _NO_KEY), np.zeros(count, np.int64)
    at, of = _places(raw, starts)
    if len(at):
        last = np.append(of[1:] != of[:-1], True)
        at, of = at[last] + len(_NEEDLE), of[last]
        stops = np.append(np.flatnonzero(raw == _END), len(raw))
        begins[of] = at
        ends[of] = np.minimum(stops[np.searchsorted(stops, at)], starts[of + 1])
    return KeyBounds(raw, begins, ends, empty_bodies)


def check_keyed(topic: str, batch: bytes, header: Header) -> None:
    """Check that each message of a batch has an ordering key, as a compacted topic demands.

    Raises:
        BadBatch: one has none.
    """
    missing = np.flatnonzero(~key_bounds(record_columns(batch, header)).keyed)
    if len(missing):
        raise BadBatch(
            f"message {int(missing[0])} of {header.count} in the batch has no ordering key; topic "
            f"{topic} is compacted: it keeps the newest message of each key",
            remedy="Send each message with an ordering key, or to a topic without compaction.",
            facts={"field": "ordering_key"},
        )


class KeyDigester:
    """Computes digests with multipliers that follow from a seed.

    Args:
        seed: Random number; digests of one seed can be compared.
    """

    def __init__(self, seed: int) -> None:
        words = ORDERING_KEY_BYTES_MAX // _WORD + 2
        self._multipliers = np.random.default_rng(seed).integers(
            0, np.iinfo(np.uint64).max, (words, _LANES), np.uint64, endpoint=True
        )

    def digests(self, bounds: KeyBounds) -> Digests:
        """Return the digest of each key; a message without a key counts as one with an empty key.

        Raises:
            BadBatch: a key is longer than 1,024 bytes.
        """
        lengths = bounds.ends - np.maximum(bounds.begins, 0)
        lengths = np.where(bounds.keyed, lengths, 0)
        if len(lengths) and int(lengths.max()) > ORDERING_KEY_BYTES_MAX:
            raise BadBatch(
                f"an ordering key has {int(lengths.max())} bytes", facts={"field": "ordering_key"}
            )
        sums = self._multipliers[0] + lengths.astype(np.uint64)[:, None] * self._multipliers[1]
        words = -(-lengths // _WORD)
        least = 0
        while least < (int(words.max()) if len(words) else 0):
            most = max(4, 2 * least)
            chosen = np.flatnonzero((words > least) & (words <= most))
            if len(chosen):
                sums[chosen] += self._products(bounds, chosen, lengths[chosen], most)
            least = most
        halves = sums >> np.uint64(32)
        shift = np.uint64(32)
        return Digests(halves[:, 0] << shift | halves[:, 1], halves[:, 2] << shift | halves[:, 3])

    def _products(
        self, bounds: KeyBounds, chosen: Int64Array, lengths: Int64Array, words: int
    ) -> UInt64Array:
        """Return the sums of the products of keys with at most `words` words of 4 bytes."""
        columns = np.arange(words * _WORD)
        at = bounds.begins[chosen][:, None] + columns
        padded = bounds.raw[np.minimum(at, len(bounds.raw) - 1)]
        padded[columns >= lengths[:, None]] = 0
        numbers = padded.view("<u4").astype(np.uint64)
        products: UInt64Array = numbers @ self._multipliers[2 : 2 + words]
        return products


def _properties(columns: RecordColumns) -> tuple[npt.NDArray[np.uint8], Int64Array]:
    """Return the properties of all records one behind the other, and where each begins and ends."""
    section = np.frombuffer(columns.section, np.uint8)
    first, lengths = columns.bounds[:, 3], columns.bounds[:, 4] - columns.bounds[:, 3]
    starts = np.concatenate(([0], lengths.cumsum()))
    picked = np.arange(int(starts[-1])) + np.repeat(first - starts[:-1], lengths)
    return section[picked], starts


def _places(raw: npt.NDArray[np.uint8], starts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """Return where names of an ordering key begin in `raw`, ascending, and in which records."""
    room = len(raw) - len(_NEEDLE) + 1
    if room <= 0:
        return np.empty(0, np.int64), np.empty(0, np.int64)
    at_every_byte = np.ndarray((room,), np.uint64, raw, 0, (1,))
    at = np.flatnonzero(at_every_byte == _HEAD)
    at = at[(raw[at[:, None] + np.arange(len(_NEEDLE))] == _NEEDLE).all(axis=1)]
    of = np.searchsorted(starts, at, "right") - 1
    is_first = at == starts[of]
    follows = raw[np.maximum(at - 1, 0)] == _END
    inside = at + len(_NEEDLE) <= starts[of + 1]
    kept = (is_first | follows) & inside
    return at[kept], of[kept]
