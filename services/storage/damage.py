"""Batches that failed their checksum, and files that can't be read: each told once."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from batonmq.errors import DataLoss

log = logging.getLogger(__name__)


class Damage:
    """What was found since the node started.

    Args:
        counter: Raised for every damaged batch.

    Attributes:
        rotten: Position of the first batch that is damaged on the disk; None if there is none.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._told: set[int | str] = set()
        self.rotten: int | None = None

    def __len__(self) -> int:
        return len(self._told)

    def met(self, error: DataLoss) -> None:
        """Note that a read came upon a damaged batch, or index; nothing was served."""
        if error.detail.position is not None:
            self._tell(error.detail.position, error.message)
        elif self._is_new(error.message):
            log.error("damaged index detail=%r", error.message)

    def note(self, position: int, detail: str) -> None:
        """Note that the batch at `position` is damaged on the disk."""
        self.rotten = position if self.rotten is None else min(self.rotten, position)
        self._tell(position, detail)

    def _tell(self, position: int, detail: str) -> None:
        if self._is_new(position):
            log.error("damaged batch position=%d detail=%r", position, detail)

    def _is_new(self, what: int | str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        self._counter.inc()
        return True
