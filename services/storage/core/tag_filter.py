"""Selects which of the scanned entries a pull delivers: tag filter, message limit, byte limit.

The selection works on numpy columns; there is no loop over messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batonmq_server.storage.core.consumequeue import Entries, Int64Array


class HashFilter:
    """Keeps entries with one of the given tag hashes.

    A tag with a colliding hash passes too; the client compares the tags themselves.

    Args:
        hashes: Hashes to keep, signed 32 bit; None keeps everything.
    """

    __slots__ = ("_wanted",)

    def __init__(self, hashes: frozenset[int] | None) -> None:
        self._wanted = None if hashes is None else np.array(sorted(hashes), np.int64)

    @property
    def keeps_all(self) -> bool:
        """Whether the filter keeps everything."""
        return self._wanted is None

    def kept(self, tags: Int64Array) -> npt.NDArray[np.int64]:
        """Return the indexes of the entries to keep, ascending."""
        if self._wanted is None:
            return np.arange(len(tags))
        return np.flatnonzero(np.isin(tags, self._wanted))


@dataclass(frozen=True, slots=True)
class Selection:
    """The part of the scanned entries that one pull delivers.

    Attributes:
        positions: Positions of the batches to send, ascending.
        sizes: Sizes of these batches, in bytes.
        scanned_count: Number of entries, from the first one, that the pull covers.
        kept_count: Number of covered entries that pass the filter.
        kept: Indexes of the entries that pass; None if all pass.
    """

    positions: list[int]
    sizes: list[int]
    scanned_count: int
    kept_count: int
    kept: Int64Array | None = field(default=None, compare=False)


def select(
    entries: Entries, filter_: HashFilter, *, bytes_max: int, messages_max: int
) -> Selection:
    """Select the longest run of entries, from the first one, within both limits.

    Args:
        bytes_max: Maximum size of all batches together; the first batch always fits.
        messages_max: Maximum number of entries that pass the filter.
    """
    scanned_count = len(entries)
    if filter_.keeps_all and scanned_count <= messages_max and entries.in_one_batch:
        # The usual case in a queue with few messages; it takes an eighth of the time of the rest.
        position, size = int(entries.positions[0]), int(entries.sizes[0])
        return Selection([position], [size], scanned_count, scanned_count)
    kept = filter_.kept(entries.tags)
    if len(kept) > messages_max:
        scanned_count = int(kept[messages_max])
        kept = kept[:messages_max]
    if not len(kept):
        return Selection([], [], scanned_count, 0, None if filter_.keeps_all else kept)
    positions = entries.positions[kept]
    starts = batch_starts(positions)
    sizes = entries.sizes[kept[starts]]
    batches_max = max(1, int(np.searchsorted(np.cumsum(sizes), bytes_max, "right")))
    kept_count = len(kept)
    if batches_max < len(starts):
        kept_count = int(starts[batches_max])
        scanned_count = int(kept[kept_count])
        starts, sizes = starts[:batches_max], sizes[:batches_max]
    return Selection(
        positions[starts].tolist(),
        sizes.tolist(),
        scanned_count,
        kept_count,
        None if filter_.keeps_all else kept[:kept_count],
    )


def batch_starts(positions: Int64Array) -> Int64Array:
    """Return the indexes at which a new batch begins; `positions` ascend and are not empty."""
    return np.concatenate(([0], np.flatnonzero(np.diff(positions)) + 1))
