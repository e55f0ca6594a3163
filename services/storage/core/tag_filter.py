"""Which of the scanned entries go out: tag filter, message limit, byte limit.

Everything works on whole columns; there is no loop over messages.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from batonmq_server.storage.core.consumequeue import Entries, Int64Array


class HashFilter:
    """Keeps entries whose tag hash is wanted. Colliding hashes pass; the client knows the tags.

    Args:
        hashes: Wanted hashes, signed 32 bit; None keeps everything.
    """

    __slots__ = ("_wanted",)

    def __init__(self, hashes: frozenset[int] | None) -> None:
        self._wanted = None if hashes is None else np.array(sorted(hashes), np.int64)

    @property
    def keeps_all(self) -> bool:
        """Whether nothing is filtered."""
        return self._wanted is None

    def kept(self, tags: Int64Array) -> npt.NDArray[np.int64]:
        """Indexes of the entries to keep, ascending."""
        if self._wanted is None:
            return np.arange(len(tags))
        return np.flatnonzero(np.isin(tags, self._wanted))


@dataclass(frozen=True, slots=True)
class Selection:
    """What one pull delivers of the scanned entries.

    Attributes:
        positions: Positions of the batches to send, ascending.
        sizes: Their sizes.
        scanned_count: Entries, from the first on, that the pull covers.
        kept_count: How many of them pass the filter.
        kept: Indexes of those; None if all do.
    """

    positions: list[int]
    sizes: list[int]
    scanned_count: int
    kept_count: int
    kept: Int64Array | None = field(default=None, compare=False)


def select(entries: Entries, wanted: HashFilter, *, bytes_max: int, messages_max: int) -> Selection:
    """The longest run from the first entry on that keeps both limits.

    Args:
        bytes_max: Bytes of all batches together; the first batch always fits.
        messages_max: Entries that pass the filter.
    """
    scanned_count = len(entries)
    kept = wanted.kept(entries.tags)
    if len(kept) > messages_max:
        scanned_count = int(kept[messages_max])
        kept = kept[:messages_max]
    if not len(kept):
        return Selection([], [], scanned_count, 0, None if wanted.keeps_all else kept)
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
        None if wanted.keeps_all else kept[:kept_count],
    )


def batch_starts(positions: Int64Array) -> Int64Array:
    """Indexes of the entries with which a batch begins; `positions` are not empty, ascending."""
    return np.concatenate(([0], np.flatnonzero(np.diff(positions)) + 1))
