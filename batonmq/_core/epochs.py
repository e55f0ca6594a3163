"""The epochs that a client has seen, of the offsets sets that have kept its group.

An epoch says which of two leaders of one set is newer, and nothing about another set: when a group
has been moved, its new set may well have a lower one. Pure.
"""

from __future__ import annotations


class SeenEpochs:
    """The highest epoch of each set.

    Attributes:
        newest_set: The set of the last answer that counted; empty if none did.
    """

    def __init__(self) -> None:
        self.newest_set = ""
        self._highest: dict[str, int] = {}

    def of(self, offsets_set: str) -> int:
        """The highest epoch of a set; 0 if none was seen."""
        return self._highest.get(offsets_set, 0)

    def saw(self, offsets_set: str, epoch: int) -> bool:
        """Note an epoch; False if it is older than one seen of this set: drop the answer."""
        if epoch < self.of(offsets_set):
            return False
        self._highest[offsets_set] = epoch
        self.newest_set = offsets_set
        return True
