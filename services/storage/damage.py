"""Batches that failed their checksum, and files that can't be read: each told once."""

from __future__ import annotations

import logging

from prometheus_client import Counter

from batonmq.common.errors import DataLoss

log = logging.getLogger(__name__)


class Damage:
    """What was found since the node started.

    Args:
        counter: Raised for every damaged batch.
    """

    def __init__(self, counter: Counter) -> None:
        self._counter = counter
        self._told: set[int | str] = set()

    def __len__(self) -> int:
        return len(self._told)

    def met(self, error: DataLoss) -> None:
        """Note that a read came upon a damaged batch, or index; nothing was served."""
        if "position" in error.facts:
            self.note(int(error.facts["position"]), error.message)
        elif self._is_new(error.message):
            log.error("damaged index detail=%r", error.message)

    def note(self, position: int, detail: str) -> None:
        """Note that the batch at `position` is damaged."""
        if self._is_new(position):
            log.error("damaged batch position=%d detail=%r", position, detail)

    def _is_new(self, what: int | str) -> bool:
        if what in self._told:
            return False
        self._told.add(what)
        self._counter.inc()
        return True
