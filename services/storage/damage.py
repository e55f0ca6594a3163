"""Batches that failed their checksum, each counted and logged once."""

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
        self._positions: set[int] = set()

    def __len__(self) -> int:
        return len(self._positions)

    def met(self, error: DataLoss) -> None:
        """Note that a read came upon a damaged batch, or index; nothing was served."""
        self.note(int(error.facts.get("position", -1)), error.message)

    def note(self, position: int, detail: str) -> None:
        """Note that the batch at `position` is damaged."""
        if position not in self._positions:
            self._positions.add(position)
            self._counter.inc()
            log.error("damaged batch position=%d detail=%r", position, detail)
