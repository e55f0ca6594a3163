"""A stored batch that was checked: its header, and where its records are."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

from batonmq._core.records import (
    check_frame,
    check_lengths,
    locate_records,
    record_lengths,
    tag_hashes,
)


class StoredBatch:
    """A batch as storage has stored it.

    A delivery may use one batch for several frames, so what all of them need is found once.

    Args:
        raw: The batch.

    Attributes:
        header: Its header.
        records: Bytes that contain the records, decompressed.
        begins: Where each record begins in them, and the end of the last one.

    Raises:
        BadBatch, BadChecksum, LimitExceeded: The batch is damaged.
    """

    __slots__ = ("_raw", "_tag_hashes", "begins", "header", "records")

    def __init__(self, raw: bytes) -> None:
        self._raw = raw
        self._tag_hashes: Sequence[int] | None = None
        self.header = header = check_frame(raw, stamped=True)
        lengths = record_lengths(raw, header)
        size = sum(lengths)
        self.records, begin = locate_records(raw, header, size)
        check_lengths(min(lengths), begin + size, len(self.records))
        self.begins = tuple(accumulate(lengths, initial=begin))

    @property
    def tag_hashes(self) -> Sequence[int]:
        """The hash of each tag; 0 for a record without a tag."""
        if self._tag_hashes is None:
            self._tag_hashes = tag_hashes(self._raw, self.header)
        return self._tag_hashes
