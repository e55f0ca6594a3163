"""Progress of long work: one line on standard error, redrawn in place, only on a terminal."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from batonmq._common.clock import Clock
from batonmq.cli.text_table import truncate

_INTERVAL_MS = 250
_BAR_WIDTH = 20
_ERASE = "\r\x1b[K"


class ProgressLine:
    """The line that shows how far some work is.

    Args:
        what: What is counted, such as "messages sent".
        total: How many there will be; None if that is unknown.
    """

    shown: ProgressLine | None = None
    """The line that is on the terminal, which other output has to erase first."""

    def __init__(self, what: str, total: int | None = None) -> None:
        self._what, self._total = what, total
        self._clock = Clock()
        self._start_ms = self._drawn_ms = self._clock.monotonic_ms()

    def update(self, done: int) -> None:
        """Show the number of things that are done; calls in quick succession draw once."""
        now_ms = self._clock.monotonic_ms()
        if now_ms - self._drawn_ms >= _INTERVAL_MS:
            self._drawn_ms = now_ms
            self.draw(done)

    def draw(self, done: int) -> None:
        """Show the number of things that are done, at once."""
        seconds = (self._clock.monotonic_ms() - self._start_ms) // 1000
        text = f"{done:,} {self._what} {seconds // 60}:{seconds % 60:02d}"
        if self._total:
            filled = min(done, self._total) * _BAR_WIDTH // self._total
            text += f" [{'#' * filled}{'.' * (_BAR_WIDTH - filled)}]"
        text = truncate(text, shutil.get_terminal_size().columns - 1)
        sys.stderr.write(_ERASE + text)
        sys.stderr.flush()
        ProgressLine.shown = self

    @staticmethod
    def erase() -> None:
        """Take the line off the terminal, so that other output can be printed."""
        if ProgressLine.shown is not None:
            ProgressLine.shown = None
            sys.stderr.write(_ERASE)
            sys.stderr.flush()


@contextmanager
def progress(what: str, total: int | None = None) -> Iterator[Callable[[int], None]]:
    """Show progress while the block runs; yields what to call with the number done so far.

    Args:
        what: What is counted, such as "messages sent".
        total: How many there will be; None if that is unknown.
    """
    if not sys.stderr.isatty():
        yield lambda _: None
        return
    line = ProgressLine(what, total)
    line.draw(0)
    try:
        yield line.update
    finally:
        ProgressLine.erase()
