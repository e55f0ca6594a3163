"""The epochs of offsets sets that a client has seen.

An epoch says which of two leaders of one set is newer. It says nothing about another set: when a
group moves, its new set may have a lower epoch.
"""

from __future__ import annotations


class SeenEpochs:
    """The highest epoch of each set.

    Attributes:
        newest_set: The set of the last answer that counted; empty before the first.
    """

    def __init__(self) -> None:
        self.newest_set = ""
        self._highest: dict[str, int] = {}

    def of(self, offsets_set: str) -> int:
        """Return the highest epoch of a set; 0 if none was seen."""
        return self._highest.get(offsets_set, 0)

    @property
    def newest(self) -> tuple[str, int]:
        """The set of the last answer that counted, and its highest epoch."""
        return self.newest_set, self.of(self.newest_set)

    def observe(self, offsets_set: str, epoch: int) -> bool:
        """Note the epoch of an answer; False if a higher one was seen of the set.

        The caller drops such an answer: it comes from an old leader.
        """
        if epoch < self.of(offsets_set):
            return False
        self._highest[offsets_set] = epoch
        self.newest_set = offsets_set
        return True
