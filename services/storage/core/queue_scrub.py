"""Compares the files of consume queues with the entries that a range of the log has."""

from __future__ import annotations

import numpy as np

from batonmq_server.storage.core.consumequeue import ENTRY, FiledEntries
from batonmq_server.storage.core.files import UNREADABLE, Disk
from batonmq_server.storage.core.producers import QueueKey
from batonmq_server.storage.core.queue_repair import QueueRepair
from batonmq_server.storage.core.scrub import ScrubRange
from batonmq_server.storage.core.store import MessageStore


class QueueScrub:
    """The comparison for one range. Only `compare` may run in another thread.

    Attributes:
        repairs: The entries that differ from the log; set by `compare`.
    """

    def __init__(self, disk: Disk, store: MessageStore, range_: ScrubRange) -> None:
        self._disk = disk
        self.repairs: list[QueueRepair] = []
        self._expected: list[tuple[QueueKey, FiledEntries]] = []
        for key, runs in range_.entries.items():
            if (queue := store.queues.get(key)) is not None:
                for first_offset, entries in runs:
                    self._expected += ((key, part) for part in queue.filed(first_offset, entries))

    def compare(self) -> None:
        """Read the files.

        Raises:
            OSError: a file can't be opened, for another reason than that it is missing.
        """
        self.repairs.clear()
        for key, part in self._expected:
            wanted = part.entries.tobytes()
            stored = self._read(part.path, part.at, len(wanted))
            if stored != wanted:
                rows = np.frombuffer(stored.ljust(len(wanted), b"\0"), ENTRY)
                (damaged,) = (rows != part.entries).nonzero()
                first_offset, last_offset = (part.offset + int(damaged[at]) for at in (0, -1))
                repair = QueueRepair(key, first_offset, last_offset + 1, spans=[])
                repair.found[part.offset] = part.entries
                self.repairs.append(repair)

    def _read(self, path: str, at: int, length: int) -> bytes:
        """Return the bytes of a file; fewer if it is short, missing or unreadable."""
        try:
            file = self._disk.open(path)
        except FileNotFoundError:  # lost, or removed by retention meanwhile
            return b""
        try:
            return file.read(at, length)
        except OSError as error:
            if error.errno not in UNREADABLE:
                raise
            return b""
        finally:
            file.close()
