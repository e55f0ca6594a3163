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
    """

    def __init__(self, on_damage: Callable[[], None]) -> None:
        self._on_damage = on_damage
        self._reported: set[int | str] = set()
        self._batches: set[int] = set()

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
        self._batches.add(position)
        self._report(position, detail)

    def first_damaged_from(self, position: int) -> int | None:
        """Return the position of the first batch that is damaged on the disk; None without any.

        Args:
            position: First position of the log: earlier batches were removed meanwhile.
        """
        return min((at for at in self._batches if at >= position), default=None)

    def _report(self, position: int, detail: str) -> None:
        if self._is_new(position):
            log.error("damaged batch position=%d detail=%r", position, detail)

    def _is_new(self, what: int | str) -> bool:
        if what in self._reported:
            return False
        self._reported.add(what)
        self._on_damage()
        return True
