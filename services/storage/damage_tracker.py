"""Damaged batches and unreadable files: each is logged and counted once."""

from __future__ import annotations

import logging
from collections.abc import Callable

from batonmq.errors import DataLoss

log = logging.getLogger(__name__)


class DamageTracker:
    """The damage found since the node started.

    Args:
        on_damage: Called once for each damaged batch or index.

    Attributes:
        first_damaged_position: Position of the first batch that the scrub found damaged on the
            disk; None if there is none.
    """

    def __init__(self, on_damage: Callable[[], None]) -> None:
        self._on_damage = on_damage
        self._reported: set[int | str] = set()
        self.first_damaged_position: int | None = None

    def __len__(self) -> int:
        return len(self._reported)

    def report_error(self, error: DataLoss) -> None:
        """Record that a read failed on a damaged batch or index."""
        if error.detail.position is not None:
            self._report(error.detail.position, error.message)
        elif self._is_new(error.message):
            log.error("damaged index detail=%r", error.message)

    def report_batch(self, position: int, detail: str) -> None:
        """Record that the batch at `position` is damaged on the disk."""
        self.first_damaged_position = (
            position
            if self.first_damaged_position is None
            else min(self.first_damaged_position, position)
        )
        self._report(position, detail)

    def _report(self, position: int, detail: str) -> None:
        if self._is_new(position):
            log.error("damaged batch position=%d detail=%r", position, detail)

    def _is_new(self, what: int | str) -> bool:
        if what in self._reported:
            return False
        self._reported.add(what)
        self._on_damage()
        return True
