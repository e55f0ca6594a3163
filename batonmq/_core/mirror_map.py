"""Which offset of a mirrored queue is which of its source, and how progress is translated. Pure.

A run is a sequence of messages that follow each other in both queues, so a map of millions of
messages has few runs. What a map does not have counts as not handled: then a message may be handled
again after a failover, and none is left out.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from batonmq._core.ranges import Range, normalize, subtract

RUNS_MAX = 10_000
"""Runs that a map keeps; the oldest is dropped."""


class OffsetRun(NamedTuple):
    """Messages that have consecutive offsets in source and target."""

    source_offset: int
    target_offset: int
    message_count: int

    @property
    def source_end(self) -> int:
        """Source offset after the last message."""
        return self.source_offset + self.message_count

    @property
    def target_end(self) -> int:
        """Target offset after the last message."""
        return self.target_offset + self.message_count


class OffsetMap:
    """Runs in the order in which they were found, the newest last.

    Args:
        runs_max: Number of runs to keep.
    """

    def __init__(self, runs_max: int = RUNS_MAX) -> None:
        self._runs: list[OffsetRun] = []
        self._runs_max = runs_max

    def __len__(self) -> int:
        return len(self._runs)

    @property
    def runs(self) -> Sequence[OffsetRun]:
        """The runs, the oldest first."""
        return self._runs

    def add(self, run: OffsetRun) -> None:
        """Add a run; one that continues the last run extends it."""
        if self._runs:
            last = self._runs[-1]
            if (last.source_end, last.target_end) == run[:2]:
                self._runs[-1] = last._replace(message_count=last.message_count + run.message_count)
                return
        self._runs.append(run)
        if len(self._runs) > self._runs_max:
            del self._runs[0]

    def source_ranges(self) -> list[Range]:
        """Return the source offsets that the map has."""
        return normalize((run.source_offset, run.source_end) for run in self._runs)

    def translate(self, ranges: Sequence[Range]) -> list[Range]:
        """Return the target offsets of the normalized source ranges, as far as the map has them."""
        image: list[Range] = []
        for run in self._runs:
            delta = run.target_offset - run.source_offset
            whole = [(run.source_offset, run.source_end)]
            wanted = subtract(whole, subtract(whole, ranges))
            image += [(first + delta, end + delta) for first, end in wanted]
        return normalize(image)


class TranslatedProgress(NamedTuple):
    """Progress on a queue of the target: `acked` is above `committed_offset`."""

    committed_offset: int
    acked: tuple[Range, ...]


def handled_ranges(committed_offset: int, acked: Iterable[Range]) -> list[Range]:
    """Return the offsets that a group has handled on a queue."""
    return normalize([(0, committed_offset), *acked])


def translate_progress(
    handled: Sequence[Range], maps: Iterable[OffsetMap], target_handled: Sequence[Range]
) -> TranslatedProgress:
    """Return the progress on a queue of the target.

    Args:
        handled: What the group has handled in the source, normalized.
        maps: Maps that have different target offsets.
        target_handled: What counts as handled in the target already: its own progress there, and
            what it does not keep any more.
    """
    image = [part for one in maps for part in one.translate(handled)]
    known = normalize([*target_handled, *image])
    if known and known[0][0] == 0:
        return TranslatedProgress(known[0][1], tuple(known[1:]))
    return TranslatedProgress(0, tuple(known))
